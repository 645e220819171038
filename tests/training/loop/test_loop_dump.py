"""Dumps of the loop's steps: what is dumped is what the scripted samples, the ranks and the algorithm say."""

import dataclasses
import json
import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest
from test_loop import NUM_GENERATIONS, Run

from mindrlhf.config.observe import MsprobeSection
from mindrlhf.debugging.dump_diff import compare_dumps
from mindrlhf.debugging.dump_paths import rank_dir, rank_dirs
from mindrlhf.training.engine.actor import Actor
from mindrlhf.training.loop.dump import StepDump
from mindrlhf.training.loop.policy import Policy

# Looked for, not imported: see StageDump.
pytestmark = pytest.mark.skipif(find_spec("msprobe") is None, reason="the debug extra is not installed")

OPTIONS = {"algorithm": {"beta": 0.1}, "training": {"num_minibatches": 2}}


class Ranks:
    """The team of a run, with what its scripted ranks lack."""

    def __init__(self, team):
        self.team = team
        self.calls = []

    def call(self, method, **arguments):
        if method == "held_rows":
            return [Actor.held_rows(_Held(rank), **arguments) for rank in self.team.workers]
        self.calls.append((method, arguments))
        return [None for _ in self.team.workers]


class _Held:
    def __init__(self, rank):
        self._batches = rank.batches


def _keeping(rank):
    """As a real rank, keep the computed log-probabilities among what the update reads."""
    compute = rank.compute_logprobs

    def compute_logprobs(name, batch):
        results = compute(name, batch)
        for rows, array in zip(rank.batches[batch].micro_batches, results, strict=True):
            rows.tokens[name] = array
        return results

    return compute_logprobs


def train(directory, *, world_size=1, **section):
    run = Run(num_prompts=6, world_size=world_size, **OPTIONS)
    ranks = Ranks(run.trainer.parts.team)
    for rank in ranks.team.workers:
        rank.compute_logprobs = _keeping(rank)
    dump = StepDump(MsprobeSection(enabled=True, **section), directory, Policy(ranks, None))
    observers = dataclasses.replace(run.trainer.parts.observers, dump=dump)
    run.trainer.parts = dataclasses.replace(run.trainer.parts, observers=observers)
    return run(), ranks.calls


def read(directory, stage, step, name):
    """Return the arrays or values of each time that arrays of this name were written."""
    place = rank_dir(directory, stage, step, 0)
    data = json.loads((place / "debug.json").read_text())["data"]

    def value(leaf):
        if isinstance(leaf, list):
            return [value(part) for part in leaf]
        if "type" not in leaf:
            return {key: value(part) for key, part in leaf.items()}
        if "data_name" in leaf:
            return np.load(place / "dump_tensor_data" / leaf["data_name"])
        return leaf["value"]

    return [value(leaf) for full, leaf in data.items() if full.partition(".")[0] == name]


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_dump_of_a_step_by_hand(tmp_path, world_size):
    metrics, calls = train(tmp_path, task="tensor", first_step=2, last_step=2, world_size=world_size)
    assert calls == [], "level debug asks nothing of the ranks"
    assert {place[:2] for place in rank_dirs(tmp_path)} == {
        (2, stage) for stage in ("rollout", "old_log_prob", "reference", "update")
    }
    lengths = [1, 2, 3] * 2
    # Step 2 has prompts 2 and 3, which are the tokens 3 and 4, and samples of 1, 2 and 3 tokens.
    (prompt_ids,), (responses,) = (read(tmp_path, "rollout", 2, name) for name in ("prompt_ids", "responses"))
    assert [list(ids) for ids in prompt_ids] == [[3]] * 3 + [[4]] * 3
    assert [len(text.split()) for text in responses] == lengths
    (logprobs,), (rewards,), (reward,) = (
        read(tmp_path, "rollout", 2, name) for name in ("rollout_logprobs", "rewards", "reward")
    )
    assert [list(array) for array in logprobs] == [[-1.0] * length for length in lengths]
    assert rewards == [{"length": float(length), "half": 0.5} for length in lengths]
    assert list(reward) == [2 * length + 0.5 for length in lengths]
    # The ranks say -1.25 and -1.75 everywhere, and -1.5 in the update.
    for stage, name, value in (
        ("old_log_prob", "old_logprobs", -1.25),
        ("reference", "reference_logprobs", -1.75),
        ("update", "logprobs", -1.5),
    ):
        found = [list(array) for part in read(tmp_path, stage, 2, name) for array in part]
        assert found == [[value] * length for length in lengths], name
    # Rewards of a group are 2.5, 4.5, 6.5: advantages -1, 0, 1 times (1 - 5e-7), on every token.
    (advantages,) = read(tmp_path, "update", 2, "advantages")
    expected = [[value] * length for length, value in zip(lengths, [-1, 0, 1] * 2)]
    for array, values in zip(advantages, expected, strict=True):
        np.testing.assert_allclose(array, values, rtol=1e-5, atol=1e-6)
    losses, norms = (read(tmp_path, "update", 2, name) for name in ("loss", "grad_norm"))
    assert len(losses) == len(norms) == 2
    assert np.mean(losses) == pytest.approx(metrics[2]["loss"]) and np.mean(norms) == metrics[2]["grad_norm"]
    assert len(responses) == 2 * NUM_GENERATIONS


def test_two_runs_are_the_same_and_stages_can_be_chosen(tmp_path):
    stages = ("rollout", "update")
    for name in ("a", "b"):
        train(tmp_path / name, stages=stages, first_step=1, last_step=3)
    assert {place[:2] for place in rank_dirs(tmp_path / "a")} == {(step, name) for step in (1, 2, 3) for name in stages}
    found = compare_dumps(tmp_path / "a", tmp_path / "b")
    assert found.is_same and not found.one_sided and all(count.num_compared for count in found.stages)
    train(tmp_path / "two_ranks", stages=stages, world_size=2)
    assert compare_dumps(tmp_path / "a", tmp_path / "two_ranks").is_same, "dumps do not depend on the ranks"


def test_ranks_are_told_which_steps_to_dump(tmp_path):
    _, calls = train(tmp_path, level="L0", first_step=2, last_step=3)
    begun = [("begin_dump", {"step": 2}), ("end_dump", {}), ("begin_dump", {"step": 3}), ("end_dump", {})]
    assert calls == begun


def test_the_modules_of_a_run_do_not_load_msprobe():
    modules = "mindrlhf.training.loop.trainer, mindrlhf.training.engine.actor"
    code = f"import sys, {modules}; sys.exit('msprobe' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300, capture_output=True)


def test_a_run_without_dump_has_the_same_metrics(tmp_path):
    with_dump, _ = train(tmp_path, last_step=3)
    without = Run(num_prompts=6, **OPTIONS)()
    for step, metrics in without.items():
        same = {name: value for name, value in metrics.items() if not name.startswith(("timing/", "e2e_"))}
        assert {name: with_dump[step][name] for name in same if "tps" not in name} == {
            name: value for name, value in same.items() if "tps" not in name
        }
        assert "timing/dump" in with_dump[step] and "timing/dump" not in metrics
