"""Roofline of a step: by hand on the plan's own numbers, and against figures that were published of real runs."""

import dataclasses
from types import SimpleNamespace

import pytest
from plan_cases import ROOT, example, plan_of

from mindrlhf.cli import main
from mindrlhf.config.load import load_layout_config
from mindrlhf.dryrun.plan.plan import Machine, make_plan, read_model
from mindrlhf.dryrun.plan.roofline import DEVICES, _stage_operations

PARAMETERS = 7_615_616_512
HEAD = 152_064 * 3584


def seconds_of(*overrides, kind="A2"):
    plan = plan_of("qwen2_5_7b_8npu", *overrides)
    plan = make_plan(plan.config, plan.model, dataclasses.replace(plan.machine, kind=DEVICES[kind]))
    return plan, plan.seconds.phases


def test_tokens_per_second_are_those_of_the_phases():
    plan, phases = seconds_of("memory.offload_optimizer=true", "algorithm.beta=0.1")
    assert all(seconds > 0 for name, seconds in phases.items() if name != "old log-probs")
    low, high = plan.seconds.tokens_per_s
    # 1,024 samples of 512 + 768 tokens on 8 devices.
    assert high == pytest.approx(1024 * 1280 / sum(phases.values()) / 8)
    assert low == high / 40


def test_sampling_by_hand():
    plan, phases = seconds_of()
    # 4 servers of 2 devices: 256 samples each, 160 at a time; a token costs more to read than to compute.
    context = 512 + 768 / 2
    # Two sums a layer over the one link of two devices: each sends a half, and its half of the sum.
    sums = 28 * 2 * 3584 * 2 / 28e9
    step = (plan.rollout.weights + 160 * plan.rollout.kv_token * context) / 1.6e12 + 160 * sums
    prefill = 256 / 8 * 512 * (2 * PARAMETERS / 2 / 354e12 + sums)
    assert phases["sampling"] == pytest.approx(256 / 160 * 768 * step + prefill)


def test_an_update_by_hand():
    _, phases = seconds_of()
    # Rows of 4,096 tokens, of which 512 + 768 are filled; embeddings are looked up. Attention: two products of half a
    # square.
    positions = 1024 * 4096 * (512 + 768) / 4096
    products = 4 * positions * (2 * (PARAMETERS - HEAD) + 2 * 28 * 3584 * 4096) / 8 / 354e12
    # Tensor parallelism: four exchanges of three quarters over three links, three times with recomputation.
    hidden = positions / 2 * 3584 * 2
    tensor = 28 * 3 * 4 * hidden * 3 / 4 / (3 * 28e9)
    # Data parallelism: two replicas over one link, gathers in bfloat16 and sums in float32 of each of 256 calls.
    data = 256 * 1280 / 4096 * PARAMETERS / 4 * (2 + 4) / 2 / 28e9
    state = PARAMETERS / 8 * 28 / 1.6e12
    assert phases["update"] == pytest.approx(products + tensor + data + state, rel=0.01)


def test_a_reference_is_one_more_pass():
    without, with_reference = seconds_of()[1], seconds_of("algorithm.beta=0.1")[1]
    assert without["reference"] == 0
    assert 0 < with_reference["reference"] < with_reference["update"] / 2


def test_state_goes_to_the_host_and_back_where_it_is_offloaded():
    plan, phases = seconds_of("memory.offload_optimizer=true")
    state = max(stage.moments + stage.gradient_sums for stage in plan.states)
    assert phases["optimizer state to the host and back"] == 2 * state / 22e9


def test_a_pipeline_of_few_micro_batches_idles_more():
    keys = ("parallel_config.data_parallel=1", "parallel_config.pipeline_stage=2")
    sizes = [[f"parallel_config.micro_batch_num={count}", f"training.micro_batch_size={count}"] for count in (2, 8)]
    few, many = (seconds_of(*keys, *size)[1]["update"] for size in sizes)
    # (p - 1) / m of the work: a half with 2 micro-batches, an eighth with 8; the rest is the optimiser's.
    assert few / many == pytest.approx((1 + 1 / 2) / (1 + 1 / 8), rel=0.02)


@pytest.mark.parametrize(
    ("layer_stages", "vocabulary", "operations"),
    # A layer: 2 x 100 of its weights, and of scores half a square of 10 for 2 + 2 channels.
    [([0, 0, 1, 1], 7, 2 * 240 + 2 * 7 * 5), ([0, 0, 0, 1], 7, 3 * 240), ([0, 0, 0, 1], 99, 240 + 2 * 99 * 5)],
)
def test_the_fullest_stage_has_most_layers_or_the_head(layer_stages, vocabulary, operations):
    inputs = SimpleNamespace(
        dims=SimpleNamespace(vocab_size=vocabulary, hidden_size=5, tied=False), batch=SimpleNamespace(row_length=10),
        widths=[SimpleNamespace(query=2, context=2)] * 4, layout=SimpleNamespace(pipeline_stage=2),
        stage_layers=lambda stage: [layer for layer, of in enumerate(layer_stages) if of == stage],
    )  # fmt: skip
    assert _stage_operations(inputs, 4 * 100 + 2 * 5 * vocabulary) == operations


def test_a3_is_quicker_where_links_were_slow():
    a2, a3 = seconds_of()[1], seconds_of(kind="A3")[1]
    assert a3["update"] < a2["update"] and 0.7 < a3["sampling"] / a2["sampling"] < 1


def test_top_p_costs_what_its_kernel_takes():
    assert seconds_of("rollout.top_p=0.9")[1]["sampling"] - seconds_of()[1]["sampling"] == pytest.approx(
        256 / 160 * 768 * 0.019
    )


# Tokens of prompts and responses for each device and second, end to end: MindSpeed-RL's documentation of GRPO, PPO and
# DAPO (2026-04); of the last two cann-recipes-train's of DeepSeek, and verl-ascend-recipe 19, whose lengths are not
# told. Config, model, devices, machine; prompts x samples; tokens of prompt + response; figure.
PUBLISHED = [
    ("examples/grpo/qwen2_5_7b_8npu", "qwen2_5/qwen2_5_7b", 16, "A3", 32, 8, 2048, 2048, 220),
    ("examples/grpo/qwen2_5_32b_16npu", "qwen2_5/qwen2_5_32b", 16, "A3", 64, 16, 1024, 2048, 220),
    ("examples/grpo/qwen2_5_32b_16npu", "qwen2_5/qwen2_5_32b", 16, "A2", 64, 16, 1024, 1024, 100),
    ("model_configs/qwen3/grpo_qwen3_8b_16npu", "qwen3/qwen3_8b", 16, "A3", 32, 8, 2048, 8192, 252),
    ("examples/grpo/deepseek_v3_512npu", "deepseek_v3/deepseek_v3_671b", 256, "A3", 384, 32, 1024, 2048, 210),
    ("examples/grpo/qwen2_5_32b_16npu", "qwen2_5/qwen2_5_32b", 16, "A3", 128, 8, 1024, 2048, 74),
    ("examples/grpo/qwen3_30b_a3b_32npu", "qwen3/qwen3_30b_a3b", 32, "A3", 32, 8, 2048, 2048, 44),
    ("model_configs/qwen3/grpo_qwen3_32b_16npu", "qwen3/qwen3_32b", 16, "A3", 32, 8, 2048, 2048, 140),
    ("examples/grpo/qwen2_5_32b_16npu", "qwen2_5/qwen2_5_32b", 16, "A3", 256, 16, 2048, 30720, 108),
    ("examples/grpo/qwen2_5_32b_16npu", "qwen2_5/qwen2_5_32b", 16, "A2", 256, 16, 2048, 20480, 35),
    ("examples/grpo/deepseek_v3_512npu", "deepseek_v3/deepseek_v3_671b", 128, "A3", 512, 16, 1024, 3072, 112),
    ("examples/grpo/qwen2_5_7b_8npu", "qwen2_5/qwen2_5_7b", 4, "A2", 256, 2, 1024, 1024, 239),
]
# The layout of those runs is not told: ours, over their devices.
DEEPSEEK = ["rollout.tensor_parallel=64", "rollout.max_num_seqs=1024", "rollout.gpu_memory_utilization=0.9"]
PIPELINE = [
    *("parallel_config.pipeline_stage=8", "parallel_config.model_parallel=4"),
    *("parallel_config.micro_batch_num=32", "training.micro_batch_size=32"),
]
LAYOUTS = {
    ("qwen2_5_7b", 16): ["rollout.num_replicas=8"],
    ("qwen2_5_7b", 4): ["rollout.tensor_parallel=1"],
    ("deepseek_v3_671b", 256): [*DEEPSEEK, "rollout.num_replicas=4", "parallel_config.expert_parallel=32", *PIPELINE],
    ("deepseek_v3_671b", 128): [*DEEPSEEK, "rollout.num_replicas=2", "parallel_config.expert_parallel=8"],
}


@pytest.mark.parametrize(
    "file, model, num_devices, kind, prompts, samples, prompt, response, figure",
    PUBLISHED,
    ids=[f"{row[1]} {row[3]} {row[-1]}" for row in PUBLISHED],
)
def test_the_range_holds_what_was_published(
    file, model, num_devices, kind, prompts, samples, prompt, response, figure, monkeypatch
):
    monkeypatch.chdir(ROOT)
    directory = f"model_configs/{model}"
    keys = [
        *(f"model.path={directory}", f"training.chunk_size={prompts}", "training.num_rollouts=1"),
        *(f"algorithm.num_generations={samples}", f"rollout.max_response_length={response}"),
        *(f"training.sequence_lengths=[{prompt + response}]", "parallel_config.data_parallel=0"),
        *LAYOUTS.get((directory.rpartition("/")[2], num_devices), ()),
    ]
    config = load_layout_config(f"{file}.yaml", keys)
    plan = make_plan(config, read_model(directory), Machine(num_devices, 64 * 10**9, 8, DEVICES[kind]))
    low, high = plan.seconds.tokens_per_s
    assert low < figure < high


def test_the_command_says_that_it_is_an_estimate(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    assert main(["plan", str(example("qwen2_5_7b_8npu")), "--workers", "8", "--device", "A3"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "tokens/s/NPU of prompts and responses: an estimate." in text and "roofline, which no run reaches" in text
