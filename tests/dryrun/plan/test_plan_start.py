"""The start of a run in the plan, what a sleeping server keeps, and that every shipped config fits from the first."""

import re
from pathlib import Path

import pytest
from plan_cases import DEVICE_BYTES

from mindrlhf.config.load import load_grpo_config
from mindrlhf.dryrun.plan.memory import ASLEEP, ROLLOUT, RUNTIME, START
from mindrlhf.dryrun.plan.plan import Machine, Plan, make_plan, read_model

ROOT = Path(__file__).parents[3]
SHIPPED = sorted(
    path
    for folder in ("model_configs", "examples/grpo")
    for path in (ROOT / folder).rglob("*npu*.yaml")
    if "predict" not in path.name
)


def shipped_plan(path: Path, *overrides: str) -> Plan:
    num_devices = int(re.search(r"(\d+)npu", path.name)[1])
    name = path.stem.removeprefix("grpo_").removesuffix(f"_{num_devices}npu")
    given = [
        "data.train_file=x.mindrecord",
        "data.tokenizer_dir=tokenizer",
        "reward.verifier_function=[accuracy_reward]",
    ]
    if (path.parent / name).is_dir():
        given.append(f"model.path={path.parent / name}")
    config = load_grpo_config(path, (*given, *overrides), world_size=num_devices)
    return make_plan(config, read_model(str(ROOT / config.model.path)), Machine(num_devices, DEVICE_BYTES, 8))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_config_fits_from_its_start_on(path):
    plan = shipped_plan(path)
    assert START in {phase.phase for phase in plan.memory}
    assert plan.fits, f"{plan.peak.phase} takes {plan.peak.total / 1e9:.1f} GB"


def test_at_the_start_a_server_is_awake_beside_ranks_that_have_run_nothing():
    plan = shipped_plan(ROOT / "examples" / "grpo" / "qwen2_5_7b_8npu.yaml")
    (start,) = (phase for phase in plan.memory if phase.phase == START)
    (sampling,) = (phase for phase in plan.memory if phase.phase == ROLLOUT)
    (runtime,) = (item.size_bytes for item in start.items if item.name == RUNTIME)
    share = int(plan.config.rollout.gpu_memory_utilization * 64e9)
    assert start.total == runtime + share
    assert sampling.total > start.total  # the trainer's state is there too


CASES = [(1, 1.5e9), (2, 2.3e9)]


@pytest.mark.parametrize("tensor_parallel, expected", CASES)
def test_a_sleeping_server_keeps_graphs_and_its_groups_buffers(tensor_parallel, expected):
    changes = (f"rollout.tensor_parallel={tensor_parallel}", f"rollout.num_replicas={8 // tensor_parallel}")
    plan = shipped_plan(ROOT / "examples" / "grpo" / "qwen2_5_7b_8npu.yaml", *changes)
    for phase in plan.memory:
        kept = [item.size_bytes for item in phase.items if item.name == ASLEEP]
        assert kept == ([] if phase.phase in (START, ROLLOUT) else [expected])
