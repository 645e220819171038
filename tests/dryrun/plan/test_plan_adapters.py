"""What a plan says of adapters: bytes by hand from the sizes of Qwen2.5-7B, and nothing kept for weights that stay."""

import pytest
from plan_cases import DEVICE_BYTES, ROOT, example

from mindrlhf.config.load import load_grpo_config
from mindrlhf.dryrun.plan.plan import Machine, make_plan, read_model
from mindrlhf.dryrun.plan.text import render_text
from mindrlhf.dryrun.plan.verdict import give_verdict

LAYERS, HIDDEN, MLP, QUERY, QKV = 28, 3584, 18944, 28 * 128, 36 * 128
RANK = 16


def plan_of(name, *overrides, world_size=8):
    config = load_grpo_config(example(name), overrides, world_size=None)
    return make_plan(config, read_model(str(ROOT / config.model.path)), Machine(world_size, DEVICE_BYTES, 8))


def items(plan, phase):
    (found,) = (one for one in plan.memory if one.phase == phase and one.stage == 0)
    return {item.name: item.size_bytes for item in found.items}


@pytest.fixture(scope="module")
def plans():
    keys = {"data_parallel": 2, "model_parallel": 4, "enable_parallel_optimizer": "false"}
    layout = [*(f"parallel_config.{key}={value}" for key, value in keys.items()), "algorithm.beta=0.1"]
    return [plan_of("qwen2_5_7b_8npu", *layout, *more) for more in ([], [f"lora.rank={RANK}"])]


def test_only_the_factors_have_gradients_and_moments(plans):
    per_layer = {
        # The factor on the side that model_parallel = 4 splits is split, the other whole.
        "qkv": 3 * RANK * HIDDEN + QKV // 4 * RANK,
        "proj": RANK * QUERY // 4 + HIDDEN * RANK,
        "fc1": 2 * RANK * HIDDEN + 2 * MLP // 4 * RANK,
        "fc2": RANK * MLP // 4 + HIDDEN * RANK,
    }
    factors = LAYERS * sum(per_layer.values())
    (full,), (adapted,) = (plan.states for plan in plans)
    assert (adapted.adapters, adapted.moments, adapted.gradient_sums) == (4 * factors, 8 * factors, 4 * factors)
    assert adapted.largest_gradient_elements == 3 * RANK * HIDDEN
    assert full.adapters == 0 and full.moments == 2 * full.parameters  # float32
    whole = LAYERS * RANK * (3 * HIDDEN + QKV + QUERY + HIDDEN + 2 * HIDDEN + 2 * MLP + MLP + HIDDEN)
    assert plans[1].num_adapter_parameters == whole
    rows = plans[1].rows
    exact = sum(row.num_tensors * row.state_bytes for row in rows)
    assert exact == adapted.parameters + adapted.adapters + adapted.moments


def test_the_reference_model_takes_no_memory(plans):
    full, adapted = (items(plan, "update") for plan in plans)
    assert full["reference model"] == full["parameters"]
    assert "reference model" not in adapted and "adapters" not in full
    with_own = plan_of("qwen2_5_7b_8npu", "algorithm.beta=0.1", "lora.rank=8", "model.reference_path=another")
    assert "reference model" in items(with_own, "update")


def test_32b_fits_eight_devices_with_adapters_only():
    layout = ["parallel_config.pipeline_stage=1", "parallel_config.micro_batch_num=1", "training.micro_batch_size=1"]
    servers = ["rollout.num_replicas=1", "rollout.max_num_seqs=16"]
    full = plan_of("qwen2_5_32b_16npu", *layout, *servers)
    adapted = plan_of("qwen2_5_32b_16npu", *layout, *servers, "lora.rank=32")
    assert not full.fits and adapted.fits
    text = render_text(adapted, give_verdict(adapted))
    assert "trained: adapters of rank 32, 268,435,456 parameters (0.82% more)" in text
    assert max(map(len, text.splitlines())) <= 100
