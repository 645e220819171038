"""What a plan says of teachers, adapters and vision towers: bytes by hand from the sizes of the models."""

import json
from functools import cache

import pytest
from plan_cases import DEVICE_BYTES, ROOT, plan_of

from mindrlhf.config.load import load_grpo_config
from mindrlhf.dryrun.plan.plan import Machine, make_plan, read_model
from mindrlhf.dryrun.plan.text import render_text
from mindrlhf.dryrun.plan.verdict import give_verdict

NAME = "qwen2_5_7b_8npu"
WHOLE_STATES = ("parallel_config.data_parallel=2", "parallel_config.model_parallel=4")
WHOLE_STATES += ("parallel_config.enable_parallel_optimizer=false",)


def items(plan, phase):
    (found,) = (one for one in plan.memory if one.phase == phase and one.stage == 0)
    return {item.name: item.size_bytes for item in found.items}


# The teacher.
HIDDEN, MLP, LAYERS, VOCABULARY = 2048, 8192, 10, 152064


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> str:
    """A Qwen2 with sizes of its own; a plan needs no more than its config."""
    config = json.loads((ROOT / plan_of(NAME).config.model.path / "config.json").read_text())
    sizes = {"hidden_size": HIDDEN, "intermediate_size": MLP, "num_hidden_layers": LAYERS, "vocab_size": VOCABULARY}
    sizes |= {"num_attention_heads": 16, "num_key_value_heads": 4, "tie_word_embeddings": False}
    directory = tmp_path_factory.mktemp("teacher")
    (directory / "config.json").write_text(json.dumps(config | sizes))
    return str(directory)


def distilled(*overrides):
    """Return the items of each phase."""
    plan = plan_of(NAME, *WHOLE_STATES, "algorithm.name=distill", *overrides)
    return {phase: items(plan, phase) for phase in ("update", "old log-probs")}


def test_a_teacher_is_in_memory_beside_the_student(teacher):
    one = distilled("model.reference_path=another")["update"]
    assert one["reference model"] == one["parameters"]  # nothing of it is here: as the student
    two = distilled(f"model.reference_path={teacher}")["update"]
    # By hand, of four ranks: queries, keys and values with biases, and the MLP, are split; norms are not.
    qkv, head = (16 + 2 * 4) * 128, VOCABULARY * HIDDEN
    layer = (qkv * (HIDDEN + 1) + HIDDEN * HIDDEN + 3 * MLP * HIDDEN) // 4 + 2 * HIDDEN
    elements = LAYERS * layer + 2 * head // 4 + HIDDEN  # embedding and head apart
    assert two["reference model"] == 4 * elements
    assert two["parameters"] == one["parameters"]


def test_the_larger_pass_of_student_and_teacher_counts(teacher):
    student = distilled("model.reference_path=another")["old log-probs"]
    alone = distilled(f"model.path={teacher}", f"model.reference_path={teacher}")["old log-probs"]
    names = ("one layer's activations", "gathered weights and casts", "logits")
    larger = distilled(f"model.reference_path={teacher}")["old log-probs"]
    assert {name: larger.get(name) for name in names} == {name: student.get(name) for name in names}
    path = ROOT / plan_of(NAME).config.model.path
    below = distilled(f"model.path={teacher}", f"model.reference_path={path}")["old log-probs"]
    assert {name: below.get(name) for name in names} == {name: student.get(name) for name in names}
    assert {name: alone.get(name) for name in names} != {name: student.get(name) for name in names}


# Adapters of rank 16 on Qwen2.5-7B.
RANK = 16


@pytest.fixture(scope="module")
def plans():
    return [plan_of(NAME, *WHOLE_STATES, "algorithm.beta=0.1", *more) for more in ([], [f"lora.rank={RANK}"])]


def test_only_the_factors_have_gradients_and_moments(plans):
    layers, hidden, mlp, query, qkv = 28, 3584, 18944, 28 * 128, 36 * 128
    per_layer = {
        # The factor on the side that model_parallel = 4 splits is split, the other whole.
        "qkv": 3 * RANK * hidden + qkv // 4 * RANK,
        "proj": RANK * query // 4 + hidden * RANK,
        "fc1": 2 * RANK * hidden + 2 * mlp // 4 * RANK,
        "fc2": RANK * mlp // 4 + hidden * RANK,
    }
    factors = layers * sum(per_layer.values())
    (full,), (adapted,) = (plan.states for plan in plans)
    assert (adapted.adapters, adapted.moments, adapted.gradient_sums) == (4 * factors, 8 * factors, 4 * factors)
    assert adapted.largest_gradient_elements == 3 * RANK * hidden
    assert full.adapters == 0 and full.moments == 2 * full.parameters  # float32
    whole = layers * RANK * (3 * hidden + qkv + query + hidden + 2 * hidden + 2 * mlp + mlp + hidden)
    assert plans[1].num_adapter_parameters == whole
    rows = plans[1].rows
    exact = sum(row.num_tensors * row.state_bytes for row in rows)
    assert exact == adapted.parameters + adapted.adapters + adapted.moments


def test_the_reference_model_takes_no_memory(plans):
    full, adapted = (items(plan, "update") for plan in plans)
    assert full["reference model"] == full["parameters"]
    assert "reference model" not in adapted and "adapters" not in full
    with_own = plan_of(NAME, "algorithm.beta=0.1", "lora.rank=8", "model.reference_path=another")
    assert "reference model" in items(with_own, "update")


def test_32b_fits_eight_devices_with_adapters_only():
    layout = ["parallel_config.pipeline_stage=1", "parallel_config.micro_batch_num=1", "training.micro_batch_size=1"]
    servers = ["rollout.num_replicas=1", "rollout.max_num_seqs=16"]
    full = plan_of("qwen2_5_32b_16npu", *layout, *servers, world_size=8)
    adapted = plan_of("qwen2_5_32b_16npu", *layout, *servers, "lora.rank=32", world_size=8)
    assert not full.fits and adapted.fits
    text = render_text(adapted, give_verdict(adapted))
    assert "trained: adapters of rank 32, 268,435,456 parameters (0.82% more)" in text
    assert max(map(len, text.splitlines())) <= 100


# Vision towers.
FOLDER = ROOT / "model_configs" / "qwen2_5_vl"
KEYS = ("data.train_file=x", "data.tokenizer_dir=x", "reward.verifier_function=accuracy_reward")
# By hand: a block has 4 x 1280 x 1280 + 5120 for attention, 3 x 1280 x 3420 + 8120 for the MLP, two norms.
BLOCK = 4 * 1280**2 + 5120 + 3 * 1280 * 3420 + 2 * 3420 + 1280 + 2 * 1280
TOWER_3B = 1280 * 1176 + 32 * BLOCK + 1280 + 5120 * 5120 + 5120 + 5120 * 2048 + 2048


@cache
def vision_plan(name: str, world_size: int):
    model = FOLDER / f"qwen2_5_vl_{name}"
    path = FOLDER / f"grpo_{model.name}_{world_size}npu.yaml"
    config = load_grpo_config(path, [*KEYS, f"model.path={model}"], world_size=world_size)
    return make_plan(config, read_model(str(model)), Machine(world_size, DEVICE_BYTES, node_size=8))


def test_the_tower_is_in_the_first_stage_without_moments():
    plan = vision_plan("3b", 8)
    assert plan.tower.num_parameters == TOWER_3B == 668_684_288
    without = [one for one in plan.rows if one.name.startswith("visual.")]
    assert sum(one.state_bytes * one.num_tensors for one in without) == 4 * TOWER_3B
    (state,) = plan.states
    assert state.moments % 8 == 0 and state.num_elements - state.moments // 8 == TOWER_3B
    first, last = vision_plan("32b", 16).states
    assert first.num_elements - first.moments // 8 == 688_841_984 and last.num_elements == last.moments // 8


def test_the_memory_of_the_tower_by_hand():
    # An image of 1,024 tokens has 4 patches a token; of each, the MLP has three arrays beside its input, in bfloat16.
    assert vision_plan("3b", 8).tower.run_bytes == 4 * 1024 * (1280 + 3 * 3420) * 2


def test_the_text_shows_the_tower():
    plan = vision_plan("7b", 8)
    text = render_text(plan, give_verdict(plan))
    assert "676,550,144" in text and "Vision tower" in text and "+ vision + embedding" in text
    assert max(map(len, text.splitlines())) <= 110
