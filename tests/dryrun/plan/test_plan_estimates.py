"""Batch arithmetic and estimates, each against numbers worked out in another way."""

import json

import pytest
from plan_cases import DEVICE_BYTES, LAYOUTS, ROOT, example, plan_of

from mindrlhf.config.load import load_grpo_config
from mindrlhf.dryrun.plan.activations import checkpoint_bytes, layer_bytes, logit_bytes, work_bytes
from mindrlhf.dryrun.plan.compiled import step_estimate
from mindrlhf.dryrun.plan.plan import Machine, make_plan, read_model
from mindrlhf.errors import UserError
from mindrlhf.layout.layout import Layout
from mindrlhf.system.sizes import format_size, parse_size

TOKENS = 4096


def test_batch_arithmetic_by_hand():
    batch = plan_of("qwen2_5_32b_16npu", "training.num_minibatches=2", "training.num_iterations=3").batch
    assert (batch.num_prompts, batch.num_samples, batch.num_samples_per_replica) == (128, 1024, 512)
    assert (batch.num_samples_per_update, batch.num_updates) == (512, 6)
    # 512 rows in micro-batches of 8, each in 8 pipeline micro-batches of 1 row, on the only replica.
    assert batch.num_micro_batches_per_rank == 64
    assert (batch.num_pipeline_micro_batches, batch.rows_per_pipeline_micro_batch) == (8, 1)
    assert batch.num_tokens_per_update == 512 * TOKENS
    assert (batch.max_prompt_length, batch.max_response_tokens) == (1024, 1024 * 3072)


def test_micro_batches_are_rounded_up():
    batch = plan_of("qwen2_5_7b_8npu", "training.micro_batch_size=3").batch
    assert batch.num_micro_batches_per_rank == 171  # 1024 rows over 2 ranks of 3 rows: 170.7
    assert batch.num_tokens_per_update == 171 * 2 * 3 * TOKENS


def test_row_length_must_be_known():
    with pytest.raises(UserError, match="training.sequence_lengths"):
        plan_of("qwen2_5_7b_8npu", "training.sequence_lengths=[]")


def test_activations_of_a_dense_layer_term_by_term():
    plan = plan_of("qwen2_5_7b_8npu", "parallel_config.use_seq_parallel=false")
    widths, layout = plan.model.widths[0], plan.layout
    h, queries, keys, mlp, t = 3584, 28 * 128, 4 * 128, 18_944, 4
    by_hand = (
        2 * 4 * h  # inputs of both norms, float32
        + 2 * 2 * h  # their outputs
        + 2 * 2 * h  # results of attention and MLP
        + (2 * queries * 2 + 2 * keys * 2) / t  # queries and keys before and after rotation
        + (2 * keys + 2 * queries) / t  # values, attention output
        + 28 * 2 * 8 * 4 / t  # softmax statistics
        + 4 * 2 * mlp / t  # gate, up, activated gate, product
    )
    assert layer_bytes(widths, layout, TOKENS, 2) == by_hand * TOKENS
    # With sequence parallelism all but the gathered outputs of the norms are sharded.
    parallel = plan_of("qwen2_5_7b_8npu").layout
    saved = (2 * 4 * h + 2 * 2 * h) * (1 - 1 / t)
    assert layer_bytes(widths, parallel, TOKENS, 2) == (by_hand - saved) * TOKENS
    assert checkpoint_bytes(widths, parallel, TOKENS, 2) == TOKENS * h * 2 / t


def test_linear_attention_keeps_states_in_place_of_scores():
    model = read_model(str(ROOT / "model_configs" / "qwen3_5" / "qwen3_5_9b"))
    linear, full = model.widths[2], model.widths[3]
    layout, h, mlp = Layout(model_parallel=2), 4096, 12_288
    around = 2 * 4 * h + 4 * 2 * h + 4 * 2 * mlp / 2  # norms, what they give, results; the MLP
    queries, keys, values = 16 * 128, 16 * 128, 32 * 128
    kept = 2 * (queries + keys + values) + 2 * 2 * values + 2 * 2 * 32  # projections, and the output's rows
    # In float32 rows of the convolution, its result; unit queries, scaled ones, keys; values, outputs, gates; inverses
    kept += 4 * (2 * (queries + keys + values) + 2 * queries + keys + 3 * values + 4 * 32 + 64 * 32)
    states = 4 * 32 * 128 * 128 / 64  # one for each chunk of 64 tokens
    assert layer_bytes(linear, layout, TOKENS, 2) == (around + (kept + states) / 2) * TOKENS
    both = model.widths_with_prompts[2]
    assert layer_bytes(both, layout, TOKENS, 2) == (around + (kept + 2 * states) / 2) * TOKENS
    assert work_bytes(both, layout, TOKENS) == 4 * work_bytes(linear, layout, TOKENS) > 0
    assert work_bytes(full, layout, TOKENS) == 0 and full.query == 16 * 256


def test_activations_of_experts_and_latents():
    widths = plan_of("deepseek_v3_512npu").model.widths
    dense, routed = widths[0], widths[-1]
    assert [one.num_experts for one in widths] == [0] * 3 + [256] * 58
    assert (dense.mlp, routed.mlp, routed.shared, routed.expert) == (18_432, 0, 2048, 2048)
    assert (routed.query, routed.key, routed.value) == (128 * 192, 128 * 192, 128 * 128)
    assert routed.latents == 1536 + 512 + 64
    layout = plan_of("deepseek_v3_512npu").layout
    # Imbalance 1.5: eight copies of the token (7168 in and out, 4 x 2048 inside) at 2 bytes.
    experts = 1.5 * 8 * (2 * 7168 + 4 * 2048) * 2 + 4 * 2048 * 2 + 2 * 256 * 4
    without = layer_bytes(dense, layout, TOKENS, 2) - TOKENS * 4 * 18_432 * 2 / 8
    assert layer_bytes(routed, layout, TOKENS, 2) == pytest.approx(without + TOKENS * experts / 8, rel=1e-6)


def test_pipeline_stages_keep_as_many_micro_batches_as_follow():
    plan = plan_of("deepseek_v3_512npu")
    kept = {phase.stage: item.size_bytes for phase in plan.memory for item in phase.items if "recomputed" in item.name}
    layers = [plan.layer_stages.count(stage) for stage in range(16)]
    one_layer = 4096 * 7168 * 2 // 8
    assert [kept[stage] for stage in range(16)] == [
        min(32, 16 - stage) * layers[stage] * one_layer for stage in range(16)
    ]


def test_logits_are_in_the_last_stage_only():
    plan = plan_of("qwen2_5_32b_16npu")
    stages = {phase.stage for phase in plan.memory for item in phase.items if item.name == "logits"}
    assert stages == {1}
    assert logit_bytes(plan.model.dims, plan.layout, 4096, 2) == 4096 * (152_064 // 8) * (2 + 4 * 4)


def test_rollout_share_by_hand():
    rollout = plan_of("qwen2_5_7b_8npu").rollout
    # A token: 2 (key, value) x 2 heads (4 over 2 devices) x 128 channels x 28 layers x 2 bytes.
    assert rollout.kv_token == 2 * 2 * 128 * 28 * 2
    cut, whole = 7_615_616_512, 28 * 2 * 3584 + 3584
    assert rollout.weights == 2 * ((cut - whole) // 2 + whole)
    assert rollout.kv_cache == rollout.share - rollout.weights - rollout.workspace
    assert rollout.num_full_sequences == rollout.kv_cache // rollout.kv_token // TOKENS
    latent = plan_of("deepseek_v3_512npu").rollout
    assert latent.kv_token == (512 + 64) * 61 * 2


def test_beta_adds_the_reference_model():
    keys = {"enable_parallel_optimizer": "false", "model_parallel": 1, "use_seq_parallel": "false", "data_parallel": 8}
    plain = [f"parallel_config.{key}={value}" for key, value in keys.items()]
    # The graph of an update returns its log-probabilities: those of a later one alone have a pass of their own.
    for layout in (plain, []):
        for several in ([], ["training.num_iterations=2"]):
            phases = {phase.phase for phase in plan_of("qwen2_5_7b_8npu", *layout, *several).memory}
            assert ("old log-probs" in phases) == bool(several)
    # The parallel optimizer shards the reference model too.
    sizes = {item.name: item.size_bytes for item in plan_of("qwen2_5_7b_8npu", "algorithm.beta=0.04").peak.items}
    assert sizes["reference model"] == sizes["parameters"] == 952_146_944 * 4


# Planned by MindSpore 2.9.0 in simulation (level 1), with recomputation, sequence parallelism and bfloat16: bytes of a
# rank of the stage. Two layers of Qwen2.5-7B with rows of 2,048 tokens, two at once; four of 32B with rows of 4,096.
SHORT = ("training.sequence_lengths=[2048]", "rollout.max_response_length=1024")
MICRO_BATCHES = ("parallel_config.micro_batch_num=2", "training.micro_batch_size=2")
WHOLE = ("parallel_config.data_parallel=1", "parallel_config.enable_parallel_optimizer=false")
PLANNED = [
    ("qwen2_5_7b", 2, 4, 0, (*SHORT, *WHOLE, "rollout.num_replicas=2"), 9_610_000_000),
    ("qwen2_5_7b", 2, 8, 0, (*SHORT, MICRO_BATCHES[0], "training.micro_batch_size=4"), 8_290_000_000),
    ("qwen2_5_32b", 4, 16, 0, MICRO_BATCHES, 6_380_000_000),
    ("qwen2_5_32b", 4, 16, 1, MICRO_BATCHES, 6_360_000_000),
]


@pytest.mark.parametrize("name, num_layers, world_size, stage, overrides, planned_bytes", PLANNED)
def test_update_is_near_what_mindspore_plans(name, num_layers, world_size, stage, overrides, planned_bytes, tmp_path):
    hf_config = json.loads((ROOT / f"model_configs/qwen2_5/{name}/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(hf_config | {"num_hidden_layers": num_layers}))
    run_file = example("qwen2_5_7b_8npu" if name == "qwen2_5_7b" else "qwen2_5_32b_16npu")
    layout = LAYOUTS.get(run_file.stem, ())
    config = load_grpo_config(run_file, [*layout, *overrides], world_size=world_size)
    plan = make_plan(config, read_model(str(tmp_path)), Machine(world_size, DEVICE_BYTES, 8))
    assert step_estimate(plan, stage) == pytest.approx(planned_bytes, rel=0.15)


def test_the_weight_buffer_holds_the_model_in_the_dtype_of_the_servers():
    plan = plan_of("qwen2_5_7b_8npu")
    assert 2 * plan.num_parameters <= plan.buffer_bytes < 2.001 * plan.num_parameters


@pytest.mark.parametrize(
    "name, number",
    [
        ("qwen2_5_7b_8npu", 4),  # world, tensor and data parallelism, optimiser shards
        ("qwen2_5_7b_16npu_32k", 5),  # and context parallelism
        ("qwen2_5_32b_16npu", 3),  # world, tensor parallelism, pipeline
    ],
)
def test_communication_groups_of_a_rank(name, number):
    item = next(item for item in plan_of(name).memory[0].items if item.name == "runtime and HCCL")
    assert item.size_bytes == 2_500_000_000 + number * 400_000_000


@pytest.mark.parametrize(
    "text, size_bytes",
    [("64GB", 64 * 10**9), ("61.5 GiB", int(61.5 * 2**30)), ("64e9", 64 * 10**9), ("1tb", 10**12), ("512MiB", 2**29)],
)
def test_sizes_are_read(text, size_bytes):
    assert parse_size(text, "--device-memory") == size_bytes


@pytest.mark.parametrize("text", ["", "GB", "64XB", "-1GB", "0", "1e999", "64 G B", "nan", "9" * 400])
def test_unreadable_sizes_name_the_option_and_an_example(text):
    with pytest.raises(UserError, match=r"--device-memory .* such as 64GB"):
        parse_size(text, "--device-memory")


def test_sizes_are_written():
    assert [format_size(size) for size in (12, 1500, 64 * 10**9, 2.68e12)] == ["12 B", "1.50 kB", "64.00 GB", "2.68 TB"]
