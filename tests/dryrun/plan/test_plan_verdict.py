"""Verdict and search: what they propose is planned again and must fit; what they rank must be ranked by its cost."""

import dataclasses

import pytest
from plan_cases import DEVICE_BYTES, plan_of

from mindrlhf.config.memory import MemorySection
from mindrlhf.dryrun.plan.cost import STATE_BYTES, divisors, estimate_cost
from mindrlhf.dryrun.plan.plan import Machine, make_plan
from mindrlhf.dryrun.plan.search import search
from mindrlhf.dryrun.plan.verdict import give_verdict, with_keys


@pytest.mark.parametrize(
    "name, overrides, device_bytes, change",
    [
        ("qwen2_5_7b_8npu", ("rollout.gpu_memory_utilization=0.8",), DEVICE_BYTES, "rollout.gpu_memory_utilization"),
        (
            "qwen2_5_7b_8npu",
            ("parallel_config.enable_parallel_optimizer=false", "rollout.gpu_memory_utilization=0.5"),
            DEVICE_BYTES,
            "parallel_config.enable_parallel_optimizer",
        ),
        (
            "qwen2_5_7b_8npu",
            ("model.recompute=false", "training.micro_batch_size=4", "rollout.gpu_memory_utilization=0.3"),
            DEVICE_BYTES,
            "model.recompute",
        ),
        (
            "qwen2_5_7b_8npu",
            ("rollout.gpu_memory_utilization=0.75",),
            DEVICE_BYTES,
            "memory.offload_optimizer",
        ),
        (
            "qwen2_5_7b_16npu_128k",
            ("memory.logit_positions=0", "rollout.gpu_memory_utilization=0.4"),
            50 * 10**9,
            "memory.logit_positions",
        ),
        (
            "qwen2_5_32b_16npu",
            ("rollout.tensor_parallel=4", "rollout.num_replicas=4"),
            DEVICE_BYTES,
            "rollout.tensor_parallel",
        ),
    ],
)
def test_what_does_not_fit_comes_with_changes_that_do(name, overrides, device_bytes, change):
    plan = plan_of(name, *overrides, device_bytes=device_bytes)
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
    scores = [one.cost.score for one in result.best]
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


def test_search_prefers_all_links_of_a_node_to_tensor_parallelism():
    """Of data parallelism alone all ranks of a node exchange weights over seven links, and nothing else."""
    plan = plan_of("qwen2_5_7b_8npu")
    best = search(plan.config, plan.model, plan.machine).best[0].keys
    assert (best["parallel_config.data_parallel"], best["training.micro_batch_size"]) == (8, 1)


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


def _cost(*overrides, world_size=16, slack=0.5, servers=8):
    from mindrlhf.dryrun.plan.plan import prepare

    plan = plan_of("qwen2_5_7b_8npu", f"rollout.num_replicas={servers}", *overrides, world_size=world_size)
    inputs, _ = prepare(plan.config, plan.model, plan.machine)
    return estimate_cost(inputs, 7_615_616_512, slack, plan.machine.device)


def test_costs_move_as_they_should():
    base = _cost("parallel_config.data_parallel=4")
    assert base.bubble == base.imbalance == base.expert == 0
    keys = ("parallel_config.data_parallel=2", "parallel_config.pipeline_stage=2")
    few = _cost(*keys, "parallel_config.micro_batch_num=2", "training.micro_batch_size=2")
    many = _cost(*keys, "parallel_config.micro_batch_num=8", "training.micro_batch_size=8")
    def busy(cost):
        return cost.compute + cost.vector + cost.imbalance + cost.tensor

    # Of a pipeline's time, (p - 1) / (m + p - 1) is idle: 1/3 with 2 micro-batches, 1/9 with 8.
    assert few.bubble / (busy(few) + few.bubble) == pytest.approx(1 / 3)
    assert many.bubble / (busy(many) + many.bubble) == pytest.approx(1 / 9)
    # The head is work of the last stage: h * V against 14 layers.
    assert few.imbalance > 0
    without = _cost("parallel_config.data_parallel=4", "model.recompute=false")
    layers = 7_615_616_512 - 2 * 152_064 * 3584
    again = (2 * layers + 2 * 28 * 3584 * 4096) * 1024 * 4096 / 16 / (354e12 * 0.65)
    assert base.compute - without.compute == pytest.approx(again)


def test_compute_is_six_operations_per_parameter_and_token():
    cost = _cost("parallel_config.data_parallel=4", "model.recompute=false")
    # Attention: two products of half a square forward, five backward.
    per_token = 6 * (7_615_616_512 - 152_064 * 3584) + 7 * 28 * 3584 * 4096
    assert cost.compute == pytest.approx(per_token * 1024 * 4096 / 16 / (354e12 * 0.65))


def test_groups_of_two_have_one_link_and_groups_of_eight_seven():
    """Eight replicas gather and scatter over seven links, which carry 7/8 of the weights; two over one, which has 1/2
    of a quarter of them: the layers of a rank that is one of four."""
    two = _cost("parallel_config.data_parallel=2", world_size=8, servers=4).data
    eight = _cost(
        *("parallel_config.data_parallel=8", "parallel_config.model_parallel=1"),
        *("parallel_config.use_seq_parallel=false", "training.micro_batch_size=2"),
        world_size=8,
        servers=4,
    ).data
    calls = 1024 / 2 / 2, 1024 / 8 / 2
    assert eight / calls[1] / (two / calls[0]) == pytest.approx((7 / 8 / 7) / (1 / 4 / 2 / 1), rel=0.01)


def test_calls_add_up_gradients_and_the_last_pays_for_the_optimizer():
    few, many = (_cost("parallel_config.data_parallel=4", f"training.micro_batch_size={rows}") for rows in (8, 2))
    assert many.num_calls == 4 * few.num_calls
    assert many.data == pytest.approx(4 * few.data)
    # 8 replicas' shards: a quarter of the layers' weights by model parallelism, a quarter of that by the optimiser's.
    added = 3 * few.num_calls * STATE_BYTES[0] * 7_615_616_512 / 16 / (1.6e12 * 0.7)
    assert many.state - few.state == pytest.approx(added, rel=0.01)
    assert many.compute == pytest.approx(few.compute)


def test_little_slack_costs_score():
    full, free = _cost("parallel_config.data_parallel=4", slack=0.0), _cost("parallel_config.data_parallel=4")
    assert full.seconds == free.seconds
    assert full.score == pytest.approx(1.1 * free.score)
    assert dataclasses.asdict(full).keys() == dataclasses.asdict(free).keys()


def test_divisors():
    assert divisors(1) == [1]
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
    assert divisors(16) == [1, 2, 4, 8, 16]
