"""Guards over scripted ranks: what is skipped, saved, reported, and when the run must stop."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from configs import grpo_config
from made_samples import make_sample, with_reward
from saved_progress import through_json

from mindrlhf.checkpoint.algorithm_state import GuardsState, LearningState
from mindrlhf.config.schema import GrpoConfig
from mindrlhf.data.packing import TokenSequence
from mindrlhf.errors import RunFailure
from mindrlhf.rollout.samples import Sample
from mindrlhf.training.batch import RowOptions, make_batch
from mindrlhf.training.loop import guards as guards_module
from mindrlhf.training.loop.guards import Guards
from mindrlhf.training.loop.policy import Policy, merge_update
from mindrlhf.training.loop.step import Step, StepSamples
from mindrlhf.training.results import ProcessStatistics, UpdateResult

NUM_RANKS = 2
LENGTHS = [3, 1, 2, 4]
# By sample, on its last token.
ADVANTAGES = [0.5, -9.0, 1.0, 2.0]
LOGPROBS = [-1.0, -2.0, -30.0, -3.0]


def make_config(output_dir, **guard) -> GrpoConfig:
    return grpo_config(run={"output_dir": str(output_dir)}, guard=guard)


def numbered_sample(index: int, length: int) -> Sample:
    ids = np.arange(length, dtype=np.int32) + 10 * index
    texts = {"prompt": f"prompt {index}", "response": f"text {index}"}
    return make_sample(ids[:1], ids, index / 2, {}, group=index, **texts)


class ScriptedStep:
    """Two updates of two samples each, on two ranks; every rank holds its shares, with advantages."""

    def __init__(self):
        self.samples = [numbered_sample(index, length) for index, length in enumerate(LENGTHS)]
        options = RowOptions((8,), 1, NUM_RANKS, False)
        self.batches, self.held, self.logprobs = [], [], []
        for first in (0, 2):
            part = self.samples[first : first + 2]
            ids = [(item.prompt.prompt_ids, item.completion.token_ids) for item in part]
            batch = make_batch([TokenSequence(*pair, {}) for pair in ids], options)
            self.batches.append(batch)
            self.held.append([batch.part_of(rank, NUM_RANKS) for rank in range(NUM_RANKS)])
            for values, name in ((ADVANTAGES, "advantages"), (LOGPROBS, "logprobs")):
                tokens = [np.append(np.zeros(len(item.completion.token_ids) - 1), values[item.group]) for item in part]
                spread = batch.spread(tokens, NUM_RANKS)
                if name == "logprobs":
                    self.logprobs.append(spread)
                else:
                    for share, own in zip(self.held[-1], spread):
                        for rows, array in zip(share.micro_batches, own, strict=True):
                            rows.tokens[name] = array

    def call(self, method, batch):
        assert method == "held_rows"
        return [part.micro_batches for part in self.held[batch]]

    def record(self, step: int, *norms: float, losses=(0.25, 0.25)) -> Step:
        results = []
        for number, norm in enumerate(norms):
            ranks = [
                UpdateResult(
                    np.array([losses[rank], 0.0]),
                    norm,
                    ProcessStatistics(0, 0.5),
                    tuple(self.logprobs[number % 2][rank]),
                )
                for rank in range(NUM_RANKS)
            ]
            results.append(merge_update(ranks, self.batches[number % 2]))
        computed, samples = np.ones(len(self.samples), bool), StepSamples(self.samples, self.samples)
        made = {"computed": computed, "batches": self.batches, "updates": results}
        return Step(step, step, f"weights {step}", 0.75, samples, **made)


@pytest.fixture
def step() -> ScriptedStep:
    return ScriptedStep()


@pytest.fixture
def open_guards(tmp_path, step):
    opened = []
    policy = Policy(step, None)

    def open_one(first_step=0, state=None, learning=None, **guard) -> Guards:
        config = make_config(tmp_path, **guard)
        opened.append(Guards(config, policy, first_step=first_step, state=state, learning=learning))
        return opened[-1]

    yield open_one
    for guards in opened:
        guards.close()


def events(directory) -> list[dict]:
    return [json.loads(line) for line in (directory / "guards.jsonl").read_text().splitlines()]


def test_a_plain_step_is_left_alone(open_guards, step, tmp_path, capsys):
    guards = open_guards()
    assert guards.review(step.record(1, 1.0, 2.0), 1e-5) == {"guard/skipped_updates": 0, "guard/grad_spikes": 0}
    guards.check()
    assert guards.state() == GuardsState(num_skipped=0, norms=[1.0, 2.0])
    assert events(tmp_path) == [] and capsys.readouterr().err == "" and not (tmp_path / "skipped").exists()


def test_a_skipped_update_is_counted_and_its_batch_saved(open_guards, step, tmp_path, capsys):
    guards = open_guards()
    counts = guards.review(step.record(7, 1.0, np.nan, losses=(np.inf, 0.5)), 1e-5)
    assert counts == {"guard/skipped_updates": 1, "guard/grad_spikes": 0}
    guards.check()
    path = tmp_path / "skipped" / "step_00000007_update_2.npz"
    assert f"its batch is in {path}" in capsys.readouterr().err
    (event,) = events(tmp_path)
    assert (event["event"], event["loss"], event["grad_norm"]) == ("skipped_update", "inf", "nan")

    with np.load(path) as saved:
        assert saved["prompts"].tolist() == ["prompt 2", "prompt 3"] and saved["num_tokens"] == 2 + 4
        assert saved["rewards"].tolist() == [sample.reward.total for sample in step.samples[2:]]
        for (number, row, first, last), advantage, logprob, sample in zip(
            saved["placed"], ADVANTAGES[2:], LOGPROBS[2:], step.samples[2:], strict=True
        ):
            assert saved[f"{number}.advantages"][row, last - 1] == advantage
            assert saved[f"{number}.logprobs"][row, last - 1] == logprob
            np.testing.assert_array_equal(saved[f"{number}.labels"][row, first:last], sample.completion.token_ids)


def test_the_run_stops_after_a_row_of_skipped_updates_also_across_a_resume(open_guards, step):
    guards = open_guards()
    guards.review(step.record(1, np.nan, np.nan), 0.0)
    guards.review(step.record(2, 1.0, np.nan), 0.0)
    guards.check()
    state = through_json(guards.state())
    assert state.num_skipped == 1
    resumed = open_guards(first_step=3, state=state)
    # The row is complete within the step, and what follows does not undo it.
    resumed.review(step.record(3, np.nan, np.nan, 1.0), 0.0)
    with pytest.raises(RunFailure, match="^3 updates in a row .* step 3: .*its batch is in .*update_2.npz$"):
        resumed.check()


def test_only_the_first_batches_are_saved(open_guards, step, tmp_path, monkeypatch):
    monkeypatch.setattr(guards_module, "MAX_SAVED_BATCHES", 3)
    guards = open_guards()
    guards.review(step.record(1, np.nan, np.nan), 0.0)
    counts = guards.review(step.record(2, np.nan, np.nan), 0.0)
    assert counts["guard/skipped_updates"] == 2
    saved = sorted(path.stem for path in tmp_path.glob("skipped/*"))
    assert saved == ["step_00000001_update_1", "step_00000001_update_2", "step_00000002_update_1"]
    assert events(tmp_path)[-1]["batch"] == ""


def test_a_disk_that_refuses_the_batch_does_not_end_the_run(open_guards, step, tmp_path, capsys):
    (tmp_path / "skipped").write_text("a file is in the way")
    guards = open_guards()
    assert guards.review(step.record(1, np.nan), 0.0)["guard/skipped_updates"] == 1
    guards.check()
    assert "cannot be saved" in capsys.readouterr().err


def test_a_spike_is_reported_with_its_samples(open_guards, step, tmp_path, capsys):
    guards = open_guards()
    for number in range(1, 5):
        assert guards.review(step.record(number, 1.0, 2.0), 0.0)["guard/grad_spikes"] == 0
    # The median of four 1.0 and four 2.0 is 1.5; after 7.5, which does not exceed five times that, it is 2.
    assert guards.review(step.record(5, 7.5, 10.5), 0.0)["guard/grad_spikes"] == 1
    guards.check()
    (event,) = events(tmp_path)
    assert (event["step"], event["update"], event["grad_norm"], event["median"]) == (5, 2, 10.5, 2.0)
    chosen = [(item["chosen_for"], item["prompt"]) for item in event["samples"]]
    assert chosen == [
        ("advantage", "prompt 3"),
        ("advantage", "prompt 2"),
        ("logprob", "prompt 2"),
        ("logprob", "prompt 3"),
    ]
    assert event["samples"][2]["min_logprob"] == -30.0 and event["samples"][0]["max_abs_advantage"] == 2.0
    assert "5.25 times" in capsys.readouterr().err


def test_updates_without_gradient_are_no_measure_of_spikes(open_guards, step):
    guards = open_guards()
    assert guards.review(step.record(1, *[0.0] * 20, 1.0), 0.0)["guard/grad_spikes"] == 0
    assert guards.state().norms == [1.0]
    assert guards.review(step.record(2, *[1.0] * 7, 0.0, 1e6), 0.0)["guard/grad_spikes"] == 1


def test_spikes_wait_for_a_median(open_guards, step):
    assert open_guards().review(step.record(1, *[1.0] * 7, 1e6), 0.0)["guard/grad_spikes"] == 0
    assert open_guards().review(step.record(1, *[1.0] * 8, 1e6), 0.0)["guard/grad_spikes"] == 1


def test_drift_warns_once_and_stops_beyond_the_limit(open_guards, step, tmp_path, capsys):
    guards = open_guards(max_rollout_diff=1.0)
    for number, difference in enumerate([0.1, 0.2, 0.3, 0.05, 1.0], start=1):
        guards.review(step.record(number, 1.0), difference)
        guards.check()
    assert [(event["step"], event["event"], event["alarm"]) for event in events(tmp_path)] == [
        (2, "alarm", "rollout_diff"),
        (4, "alarm_over", "rollout_diff"),
        (5, "alarm", "rollout_diff"),
    ]
    assert capsys.readouterr().err.count("the run stops above guard.max_rollout_diff = 1") == 2
    guards.review(step.record(6, 1.0), 1.01)
    with pytest.raises(RunFailure, match=r"^step 6: .*1\.01 nats .*guard\.max_rollout_diff is 1: .*top_p=1"):
        guards.check()


def test_drift_that_is_not_finite_warns(open_guards, step, capsys):
    guards = open_guards()
    guards.review(step.record(1, 1.0), np.nan)
    guards.check()
    assert "nan nats" in capsys.readouterr().err


def test_limits_of_zero_never_warn_nor_stop(open_guards, step, capsys):
    guards = open_guards(max_rollout_diff=0.0)
    guards.review(step.record(1, 1.0), 99.0)
    guards.check()
    assert capsys.readouterr().err == ""


def rewarded(failures: list[dict[str, str]]) -> list[Sample]:
    """Samples that two verifiers were asked for, but for the last, to which only the first applies."""
    samples = [numbered_sample(index, 2) for index in range(len(failures))]
    rewards = [{"first": 0.0, "second": 0.0}] * (len(failures) - 1) + [{"first": 0.0}]
    return [
        with_reward(sample, parts=own, failures=why)
        for sample, own, why in zip(samples, rewards, failures, strict=True)
    ]


WHOLLY = rewarded([{"second": "KeyError: 'x'"}, {"second": "timeout"}, {}])
PARTLY = rewarded([{"second": "timeout", "first": "timeout"}, {}, {"first": "timeout"}])


def test_a_verifier_that_fails_on_every_sample_stops_the_run_also_across_a_resume(
    open_guards, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr("mindrlhf.training.loop.guards.MAX_FAILED_STEPS", 3)
    learning = LearningState()
    guards = open_guards(learning=learning)
    for number, samples in enumerate([WHOLLY, PARTLY, WHOLLY, WHOLLY], start=1):
        guards.review_rewards(number, samples)
        guards.check()
    assert [(event["step"], event["event"], event["alarm"]) for event in events(tmp_path)] == [
        (1, "alarm", "failed second"),
        (2, "alarm_over", "failed second"),
        (3, "alarm", "failed second"),
    ]
    warnings = capsys.readouterr().err
    assert warnings.count("verifier second failed on all 2 samples (KeyError: 'x')") == 2
    resumed = open_guards(first_step=4, learning=through_json(learning))
    resumed.review_rewards(5, WHOLLY)
    with pytest.raises(RunFailure, match=r"^step 5: verifier second .*, 3 steps in a row: fix "):
        resumed.check()


def test_of_several_failures_in_a_step_the_skipped_updates_are_named(open_guards, step, monkeypatch):
    monkeypatch.setattr("mindrlhf.training.loop.guards.MAX_FAILED_STEPS", 1)
    limits = {"max_rollout_diff": 1.0}
    guards = open_guards(**limits)
    guards.review_rewards(1, WHOLLY)
    guards.review(step.record(1, np.nan), 9.0)
    with pytest.raises(RunFailure, match="verifier second failed"):
        guards.check()
    guards = open_guards(**limits)
    guards.review_rewards(1, WHOLLY)
    guards.review(step.record(1, np.nan, np.nan, np.nan), 9.0)
    with pytest.raises(RunFailure, match="^3 updates in a row"):
        guards.check()


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_rows_are_held_in_the_order_of_the_batch(num_ranks):
    samples = [numbered_sample(index, 3) for index in range(6)]
    sequences = [TokenSequence(item.prompt.prompt_ids, item.completion.token_ids, {}) for item in samples]
    batch = make_batch(sequences, RowOptions((8,), 1, num_ranks, False))
    team = SimpleNamespace(call=lambda method, batch: [part.micro_batches for part in held[batch]])
    held = [[batch.part_of(rank, num_ranks) for rank in range(num_ranks)]]
    micro_batches = Policy(team, None).held_rows(0, batch)
    for one, other in zip(micro_batches, batch.micro_batches, strict=True):
        np.testing.assert_array_equal(one.input_ids, other.input_ids)
