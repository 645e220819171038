"""Times of a step: each phase against arithmetic on the plan's own numbers, on devices of round rates."""

import dataclasses
import json

import pytest
from plan_cases import ROOT, example, plan_of

from mindrlhf.cli import main
from mindrlhf.dryrun.plan.devices import DEVICES
from mindrlhf.dryrun.plan.plan import make_plan
from mindrlhf.dryrun.plan.schedule.lengths import ResponseLengths
from mindrlhf.dryrun.plan.times import plan_times

PHASES = ["sampling", "rewards", "old log-probs", "reference", "update", "publication", "offload", "sleep and wake"]
EQUAL = ResponseLengths(median=500.0, sigma=0.0, limit=3072, source="given")


def times_of(*overrides, lengths=EQUAL, kind="A2"):
    plan = plan_of("qwen2_5_7b_8npu", *overrides)
    machine = dataclasses.replace(plan.machine, kind=DEVICES[kind])
    plan = make_plan(plan.config, plan.model, machine)
    times = plan_times(plan, lengths)
    return plan, {one.phase: one for one in times.phases}, times


def test_every_phase_is_there_and_no_better_than_at_best():
    _, phases, times = times_of("memory.offload_optimizer=true", "algorithm.beta=0.1")
    assert list(phases) == PHASES
    assert all(0 <= one.best_s <= one.assumed_s for one in phases.values())
    sums = [sum(values) for values in zip(*((one.best_s, one.assumed_s) for one in phases.values()))]
    assert times.seconds == pytest.approx(sums)
    low, high = times.tokens_per_s
    assert 0 < low < high
    # 1,024 samples of 512 + 500 tokens on 8 devices.
    assert high == pytest.approx(1024 * 1012 / times.seconds[0] / 8)


def test_equal_responses_take_a_decoding_step_a_token():
    plan, phases, _ = times_of()
    # 4 servers of 2 devices: 256 samples each, 160 at a time.
    context = 512 + 250
    token = plan.rollout.kv_token * context / 1.6e12 + 2 * 7_615_616_512 / 2 / 354e12
    fixed = plan.rollout.weights / 1.6e12
    prefill = 128 * 512 * 2 * 7_615_616_512 / 2 / 354e12 / 4
    expected = 500 * (2 * fixed + 256 * token) + prefill
    assert phases["sampling"].best_s == pytest.approx(expected, rel=1e-2)


def test_state_goes_to_the_host_and_back_where_it_is_offloaded():
    plan, phases, _ = times_of("memory.offload_optimizer=true")
    state = max(one.moments + one.gradient_sums for one in plan.states)
    assert (phases["offload"].best_s, phases["offload"].assumed_s) == (2 * state / 22e9, 2 * state / 5e9)
    assert times_of()[1]["offload"].assumed_s == 0


def test_a_reference_is_one_more_pass():
    without, with_reference = times_of()[1], times_of("algorithm.beta=0.1")[1]
    assert without["reference"].assumed_s == 0
    forward = with_reference["reference"].assumed_s
    assert 0 < forward < with_reference["update"].assumed_s / 2


def test_a3_is_quicker_where_links_were_slow():
    a2, a3 = times_of()[1], times_of(kind="A3")[1]
    assert a3["update"].assumed_s < a2["update"].assumed_s
    # It has the memory of A2.
    assert a3["sampling"].assumed_s == pytest.approx(a2["sampling"].assumed_s, rel=0.02)


def test_the_command_prints_a_range_and_what_is_assumed(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(ROOT)
    path = tmp_path / "plan.json"
    assert main(["plan", str(example("qwen2_5_7b_8npu")), "--workers", "8", "--device", "A3", "--json", str(path)]) == 0
    text = capsys.readouterr().out
    assert "Time of a step" in text and "a range of assumptions" in text and "Ascend 910C" in text
    values = json.loads(path.read_text())["times"]
    assert [one["phase"] for one in values["phases"]] == PHASES
    assert values["tokens_per_s"][0] < values["tokens_per_s"][1]


def test_kernels_are_counted_where_graphs_are_compiled(capsys):
    assert main(["plan", str(example("qwen2_5_7b_8npu")), "--workers", "8", "--kernels"]) == 2
    assert "--kernels is read by --compile alone: give both" in capsys.readouterr().err
