"""Verdict and search: what they propose is planned again and must fit; what they rank must be ranked by its cost."""

import dataclasses

import pytest
from plan_cases import DEVICE_BYTES, plan_of

from mindrlhf.config.memory import MemorySection
from mindrlhf.dryrun.plan.plan import Machine, make_plan
from mindrlhf.dryrun.plan.search import Candidate, search
from mindrlhf.dryrun.plan.verdict import give_verdict, with_keys

QWEN, SHARE = "qwen2_5_7b_8npu", "rollout.gpu_memory_utilization"
OPTIMIZER, RECOMPUTE = "parallel_config.enable_parallel_optimizer", "model.recompute"
SERVERS = "rollout.tensor_parallel"


@pytest.mark.parametrize(
    "change, name, overrides, device_bytes",
    [
        (SHARE, QWEN, f"{SHARE}=0.8", DEVICE_BYTES),
        (OPTIMIZER, QWEN, f"{OPTIMIZER}=false {SHARE}=0.5", DEVICE_BYTES),
        (RECOMPUTE, QWEN, f"{RECOMPUTE}=false training.micro_batch_size=4 {SHARE}=0.3", DEVICE_BYTES),
        ("memory.offload_optimizer", QWEN, f"{SHARE}=0.75", DEVICE_BYTES),
        ("memory.logit_tile", "qwen2_5_7b_16npu_128k", f"memory.logit_tile=0 {SHARE}=0.4", 50 * 10**9),
        (SERVERS, "qwen2_5_32b_16npu", f"{SERVERS}=4 rollout.num_replicas=4", DEVICE_BYTES),
    ],
)
def test_what_does_not_fit_comes_with_changes_that_do(change, name, overrides, device_bytes):
    plan = plan_of(name, *overrides.split(), device_bytes=device_bytes)
    verdict = give_verdict(plan)
    assert not verdict.fits
    assert change in {key for one in verdict.changes for key in one.keys}
    for one in verdict.changes:
        again = make_plan(with_keys(plan.config, one.keys), plan.model, plan.machine)
        assert again.fits, one
        assert again.peak.total == one.peak_bytes


def test_the_reason_names_phase_and_sizes():
    plan = plan_of("qwen2_5_7b_8npu", "rollout.gpu_memory_utilization=0.6", device_bytes=40 * 10**9)
    verdict = give_verdict(plan)
    assert verdict.reason.startswith("the rollout needs ") and " of 40.00 GB" in verdict.reason


def test_a_hopeless_case_has_no_changes():
    verdict = give_verdict(plan_of("qwen2_5_32b_16npu", device_bytes=16 * 10**9))
    assert (verdict.fits, verdict.changes) == (False, ())


def test_no_room_for_one_sequence_is_no_fit():
    plan = plan_of("qwen2_5_32b_16npu", "rollout.gpu_memory_utilization=0.15")
    assert plan.peak.total < DEVICE_BYTES
    assert not plan.fits
    assert "KV cache" in give_verdict(plan).reason


def test_large_buffers_are_noted():
    notes = give_verdict(plan_of("deepseek_v3_512npu", "rollout.weight_buffer_gib=0")).notes
    assert any("1.34 TB" in note for note in notes)
    assert not any("buffer" in note for note in give_verdict(plan_of("deepseek_v3_512npu")).notes)
    assert give_verdict(plan_of("qwen2_5_7b_8npu")).notes == ()


@pytest.mark.parametrize("name", ["qwen2_5_7b_8npu", "qwen2_5_32b_16npu"])
def test_search_results_fit_and_are_ranked(name):
    plan = plan_of(name)
    result = search(plan.config, plan.model, plan.machine)
    assert result.num_tried >= result.num_feasible >= result.num_fitting >= len(result.best) > 1
    scores = [one.score for one in result.best]
    assert scores == sorted(scores)
    for one in result.best:
        again = make_plan(with_keys(plan.config, one.keys), plan.model, plan.machine)
        assert again.fits
        assert again.layout.world_size == plan.machine.world_size
        assert again.layout.model_parallel <= plan.machine.node_size
        assert again.peak.total == one.peak_bytes
    assert len({tuple(sorted(one.keys.items())) for one in result.best}) == len(result.best)


def test_search_tries_every_layout_of_a_dense_model():
    plan = plan_of("qwen2_5_7b_8npu")
    result = search(plan.config, plan.model, plan.machine)
    # model 1, 2, 4 (28 heads, so not 8) x stages that divide the rest; x recompute 2; optimiser shard only with
    # replicas; pipelines with 1, 2 or 4 micro-batches per stage.
    expected = 0
    for model in (1, 2, 4):
        for stages in (size for size in (1, 2, 4, 8) if (8 // model) % size == 0):
            replicas = 8 // model // stages
            expected += 2 * (2 if replicas > 1 else 1) * (3 if stages > 1 else 1)
    # With the two rows of a micro-batch that the config has, and with one.
    assert result.num_tried == 2 * expected


@pytest.mark.parametrize("part", ["memory.recompute_layers=0-13", "memory.recompute_operators=[norms]"])
def test_what_is_recomputed_in_part_is_not_proposed_whole_as_well(part):
    """The config would be refused."""
    plan = plan_of("qwen2_5_7b_8npu", "model.recompute=false", part, "training.micro_batch_size=4")
    found = search(plan.config, plan.model, plan.machine)
    every = search(dataclasses.replace(plan.config, memory=MemorySection()), plan.model, plan.machine)
    assert (found.num_tried, bool(found.best)) == (every.num_tried // 2, True)
    changes = give_verdict(dataclasses.replace(plan, machine=Machine(8, 40 * 10**9, 8))).changes
    for keys in (*(one.keys for one in found.best), *(one.keys for one in changes)):
        assert not keys.get("model.recompute")


def test_nothing_fits_tiny_devices():
    plan = plan_of("qwen2_5_7b_8npu")
    result = search(plan.config, plan.model, Machine(8, 10**9, 8))
    assert (result.best, result.num_fitting) == ((), 0)


def test_little_free_memory_costs_rank():
    full, free = (Candidate({}, 1, slack, 10.0) for slack in (0.0, 0.5))
    assert full.score == (11.0, 1) and free.score == (10.0, 1)
