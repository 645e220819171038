"""The teacher in a plan: in memory beside the student, and the larger pass of the two."""

import json

import pytest
from plan_cases import DEVICE_BYTES, LAYOUTS, ROOT, example

from mindrlhf.config.load import load_grpo_config
from mindrlhf.dryrun.plan.plan import Machine, make_plan, read_model

HIDDEN, MLP, LAYERS, VOCABULARY = 2048, 8192, 10, 152064


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> str:
    """A Qwen2 with sizes of its own; a plan needs no more than its config."""
    config = json.loads((ROOT / load("qwen2_5_7b_8npu").model.path / "config.json").read_text())
    sizes = {"hidden_size": HIDDEN, "intermediate_size": MLP, "num_hidden_layers": LAYERS, "vocab_size": VOCABULARY}
    sizes |= {"num_attention_heads": 16, "num_key_value_heads": 4, "tie_word_embeddings": False}
    directory = tmp_path_factory.mktemp("teacher")
    (directory / "config.json").write_text(json.dumps(config | sizes))
    return str(directory)


def load(name, *overrides):
    return load_grpo_config(example(name), [*LAYOUTS.get(name, ()), *overrides], world_size=None)


def phases(*overrides):
    keys = {"data_parallel": 2, "model_parallel": 4, "enable_parallel_optimizer": "false"}
    config = load("qwen2_5_7b_8npu", *(f"parallel_config.{key}={value}" for key, value in keys.items()), *overrides)
    plan = make_plan(config, read_model(str(ROOT / config.model.path)), Machine(8, DEVICE_BYTES, 8))
    return {one.phase: {item.name: item.size_bytes for item in one.items} for one in plan.memory}


def test_a_teacher_is_in_memory_beside_the_student(teacher):
    distill = ["algorithm.name=distill", "model.reference_path=another"]
    one = phases(*distill)["update"]
    assert one["reference model"] == one["parameters"]  # nothing of it is here: as the student
    two = phases("algorithm.name=distill", f"model.reference_path={teacher}")["update"]
    # By hand, of four ranks: queries, keys and values with biases, and the MLP, are split; norms are not.
    qkv, head = (16 + 2 * 4) * 128, VOCABULARY * HIDDEN
    layer = (qkv * (HIDDEN + 1) + HIDDEN * HIDDEN + 3 * MLP * HIDDEN) // 4 + 2 * HIDDEN
    elements = LAYERS * layer + 2 * head // 4 + HIDDEN  # embedding and head apart
    assert two["reference model"] == 4 * elements
    assert two["parameters"] == one["parameters"]


def test_the_larger_pass_of_student_and_teacher_counts(teacher):
    student = phases("algorithm.name=distill", "model.reference_path=another")["old log-probs"]
    config = ["algorithm.name=distill", f"model.path={teacher}", f"model.reference_path={teacher}"]
    alone = phases(*config)["old log-probs"]
    names = ("one layer's activations", "gathered weights and casts", "logits")
    larger = phases("algorithm.name=distill", f"model.reference_path={teacher}")["old log-probs"]
    assert {name: larger.get(name) for name in names} == {name: student.get(name) for name in names}
    path = ROOT / load("qwen2_5_7b_8npu").model.path
    own = ["algorithm.name=distill", f"model.path={teacher}", f"model.reference_path={path}"]
    below = phases(*own)["old log-probs"]
    assert {name: below.get(name) for name in names} == {name: student.get(name) for name in names}
    assert {name: alone.get(name) for name in names} != {name: student.get(name) for name in names}
