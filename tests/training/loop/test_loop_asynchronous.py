"""Fully asynchronous sampling: how old groups may be, that none is lost or used twice, and runs that are repeated."""

import random
import time

import numpy as np
import pytest
import test_loop
from test_loop import NUM_GENERATIONS, Run, finish
from test_loop_segments import LONGEST, SPAN
from test_loop_segments import Server as Spans

from mindrlhf.errors import RunFailure, UserError
from mindrlhf.rollout.types import WeightsReplaced
from mindrlhf.training.loop.sampling.order import ORDER_NAME

NUM_STEPS, NUM_GROUPS = 8, 2
DELAY_S = 0.004


class Server(Spans):
    """Takes a random time for each round."""

    fails_at = None
    was_replaced = None  # asked once, in the middle of a round: whether newer weights are in the buffer by now
    num_replaced = 0

    def generate(self, requests, sampling):
        time.sleep(DELAY_S * random.random())
        if len(self.requests) + 1 == self.fails_at:
            raise RunFailure("the server has died")
        generated = list(super().generate(requests, sampling))
        time.sleep(DELAY_S)
        if self.was_replaced is not None and self.was_replaced():
            self.requests.pop()  # nobody has had them
            self.num_replaced += 1
            raise WeightsReplaced("the server has died; the weights it sampled with have been replaced")
        yield from generated

    def cancel(self):
        self.journal.append("cancel")


class Rank(test_loop.Rank):
    """Takes a random time for each update."""

    def update(self, **arguments):
        time.sleep(2 * DELAY_S * random.random())
        return super().update(**arguments)


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch):
    monkeypatch.setattr(test_loop, "Script", Server)
    monkeypatch.setattr(test_loop, "Rank", Rank)


def start(output_dir, staleness=2, replays="", **options):
    rollout = {"asynchronous": True, "off_policy_steps": staleness, "segment_tokens": SPAN}
    rollout["max_response_length"] = LONGEST
    options = {"num_prompts": 4, "training": {"chunk_size": NUM_GROUPS, "micro_batch_size": 4, "epochs": 50}, **options}
    rollout["replay_order"] = str(replays)
    return Run(steps=NUM_STEPS, run={"output_dir": str(output_dir)}, rollout=rollout, **options)


def first_requests(run):
    """Return the prompts of all responses that were begun, in order; prompt i is the token i + 1."""
    asked = [request for requests, _ in run.generator.requests for request in requests]
    return [request.prompt_ids[0] - 1 for request in asked if len(request.prompt_ids) == 1]


@pytest.mark.parametrize("staleness", [1, 2, 3])
def test_groups_are_as_old_as_may_be_and_each_is_trained_on_once(tmp_path, staleness):
    run = start(tmp_path, staleness)
    metrics, _ = finish(run)
    used = [sample for record, _ in run.memory.reviewed for sample in record.trained]
    assert len(used) == NUM_STEPS * NUM_GROUPS * NUM_GENERATIONS
    # Four prompts again and again: each was begun as often as it was trained on, and none beyond the end.
    begun = np.bincount(first_requests(run), minlength=4)
    assert begun.tolist() == [NUM_STEPS * NUM_GROUPS * NUM_GENERATIONS // 4] * 4
    assert np.bincount([sample.prompt.prompt_ids[0] - 1 for sample in used]).tolist() == begun.tolist()
    for record, _ in run.memory.reviewed:
        groups = [(sample.group, sample.prompt.answer) for sample in record.trained]
        assert [group for group, _ in groups] == np.repeat(range(NUM_GROUPS), NUM_GENERATIONS).tolist()
        assert len(set(groups)) == NUM_GROUPS, "a group is of one prompt, and advantages are of a group"
        for one in (sample.completion for sample in record.trained):
            versions = [version for version, _ in one.spans]
            assert versions == sorted(versions) and record.number - versions[0] <= staleness + 1
            by_token = np.concatenate([np.full(count, -1 - 0.01 * version) for version, count in one.spans])
            np.testing.assert_allclose(one.logprobs, by_token, rtol=1e-6)
            assert one.token_ids[0] == 100 + len(one.token_ids), "all tokens are of one response"
        assert metrics[record.number]["staleness/max"] <= staleness + 1
    # New weights reach what is being generated.
    assert max(len(sample.completion.spans) for sample in used) > 1


def test_no_more_is_begun_than_the_weights_of_the_moment_allow(tmp_path):
    run = start(tmp_path)
    finish(run)
    begun = 0
    for requests, version in run.generator.requests:
        begun += sum(len(request.prompt_ids) == 1 for request in requests)
        assert begun <= (version + 2) * NUM_GROUPS * NUM_GENERATIONS


def test_a_round_whose_weights_are_gone_is_done_with_those_that_replaced_them(tmp_path):
    """Whenever a server dies after newer weights were published; and what came of it is repeated from its order."""
    run = start(tmp_path / "first")
    run.generator.was_replaced = lambda: run.trainer.sampling._pending is not None
    expected = finish(run)
    assert run.generator.num_replaced > 0
    used = [sample for record, _ in run.memory.reviewed for sample in record.trained]
    counts = np.bincount([sample.prompt.prompt_ids[0] - 1 for sample in used])
    assert counts.tolist() == [NUM_STEPS * NUM_GROUPS * NUM_GENERATIONS // 4] * 4
    assert finish(start(tmp_path / "again", replays=tmp_path / "first")) == expected
    again = start(tmp_path / "killed", replays=tmp_path / "first")
    again.generator.was_replaced = lambda: True
    with pytest.raises(WeightsReplaced):  # a replay cannot load others at that round
        finish(again)


def test_an_order_of_another_run_is_refused(tmp_path):
    with pytest.raises(UserError, match=f"has no {ORDER_NAME}: give the output directory of a run with"):
        start(tmp_path / "again", replays=tmp_path)
    (tmp_path / ORDER_NAME).write_text('{"step": 0, "round": 0}\n{"step": 1, "round": 0}\n{"step": 2, "round": 0}\n')
    run = start(tmp_path / "other", replays=tmp_path)
    # Its second step began before anything was generated.
    run.trainer.sampling._order.num_rounds = 1
    with pytest.raises(UserError, match="step 1 of that run began after 0 rounds, here 1 are done"):
        finish(run)
