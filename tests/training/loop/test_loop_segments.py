"""Partial rollout: what a step gives each response, what it trains on, and what goes on in the next."""

import random

import numpy as np
import pytest
import test_loop
from test_loop import END, NUM_GENERATIONS, Run, Script, finish

from mindrlhf.rollout.types import Completion

NUM_STEPS = 6
SPAN, LONGEST, MAX_SPANS = 2, 12, 3


class Server(Script):
    """A response's first token says how long it will be, from 1 to 12; prompts are single tokens."""

    version = 0
    shuffles = False

    def generate(self, requests, sampling):
        self.journal.append(f"generate {len(requests)}")
        self.requests.append((list(requests), self.version))
        completions = [self._complete(request) for request in requests]
        if self.shuffles:
            random.shuffle(completions)
        yield from completions

    def _complete(self, request):
        _, *before = request.prompt_ids
        length = before[0] - 100 if before else int(np.random.default_rng(request.seed).integers(1, LONGEST + 1))
        ids = [100 + length, *range(1, length)][len(before) : len(before) + request.max_tokens]
        is_done = len(before) + len(ids) == length
        if is_done and length > 1:
            ids[-1] = END
        logprobs = np.full(len(ids), -1.0 - 0.01 * self.version, np.float32)
        reason = "stop" if is_done else "length"
        return Completion(request.request_id, 0, np.array(ids, np.int32), logprobs, reason, self.version)

    def update_weights(self, version):
        self.version = version
        super().update_weights(version)


@pytest.fixture(autouse=True)
def server(monkeypatch):
    monkeypatch.setattr(test_loop, "Script", Server)


def start(**options):
    """Return a run of six steps of two prompts, with three in flight."""
    rollout = {"segment_tokens": SPAN, "max_segments": MAX_SPANS, "in_flight": 1.5, "max_response_length": LONGEST}
    options = {"num_prompts": 4, "training": {"chunk_size": 2, "micro_batch_size": 4, "epochs": 50}, **options}
    return Run(steps=NUM_STEPS, rollout=rollout, **options)


def simulate(run):
    """Work out what each step trains on, from the lengths alone: lists of (length, spans) by sample, by step."""
    lengths = {}
    for requests, _ in run.generator.requests:
        for request in requests:
            if len(request.prompt_ids) == 1:  # begins; requests come in the order of prompts
                lengths.setdefault(len(lengths), int(np.random.default_rng(request.seed).integers(1, LONGEST + 1)))
    lengths = [lengths[i] for i in range(len(lengths))]
    groups, begun, steps = [], 0, []
    for index in range(NUM_STEPS):
        version = index + 1
        while len(groups) < min(3, 2 * (NUM_STEPS - index)):
            own = lengths[begun * NUM_GENERATIONS : (begun + 1) * NUM_GENERATIONS]
            groups.append([{"left": length, "length": length, "spans": {}} for length in own])
            begun += 1
        has_given = False
        while not has_given or sum(all(not one["left"] for one in group) for group in groups) < 2:
            has_given = True
            for one in (one for group in groups for one in group if one["left"]):
                earlier = sum(seen != version for seen in one["spans"])
                count = one["left"] if earlier == MAX_SPANS - 1 else min(SPAN, one["left"])
                one["spans"][version] = one["spans"].get(version, 0) + count
                one["left"] -= count
        complete = [group for group in groups if all(not one["left"] for one in group)][:2]
        groups = [group for group in groups if group not in complete]
        steps.append([(one["length"], tuple(one["spans"].items())) for group in complete for one in group])
    return steps, groups


def test_steps_train_on_the_oldest_complete_groups():
    run = start()
    finish(run)
    metrics = dict(run.memory.metrics)
    expected, left = simulate(run)
    assert left == [], "no more is begun than the run trains on"
    for (record, _), step in zip(run.memory.reviewed, expected, strict=True):
        completions = [sample.completion for sample in record.trained]
        assert [(len(one.token_ids), one.spans) for one in completions] == step
        for one in completions:
            by_token = np.concatenate([np.full(count, -1 - 0.01 * version) for version, count in one.spans])
            np.testing.assert_allclose(one.logprobs, by_token, rtol=1e-6)
            assert one.token_ids[0] == 100 + len(one.token_ids), "all tokens are of one response"
            assert one.finish_reason == "stop" and one.weights_version == one.spans[0][0]
        number = record.number
        behind = [number - version for _, spans in step for version, count in spans for _ in range(count)]
        assert metrics[number]["staleness/mean"] == pytest.approx(np.mean(behind))
        assert metrics[number]["staleness/max"] == max(behind)
        assert metrics[number]["segments/max"] == max(len(spans) for _, spans in step) <= MAX_SPANS
        assert metrics[number]["segments/mean"] == pytest.approx(np.mean([len(spans) for _, spans in step]))
    assert max(metrics[step]["segments/max"] for step in metrics) > 1, "something goes on in a later step"
    assert metrics[NUM_STEPS]["segments/unfinished"] == 0
    asked = [request for requests, _ in run.generator.requests for request in requests]
    assert len({request.seed for request in asked}) == len(asked), "no two requests share a random stream"
    assert {request.max_tokens for request in asked} >= {SPAN} and all(request.max_tokens > 0 for request in asked)


def test_the_order_in_which_responses_come_changes_nothing(monkeypatch):
    expected = finish(start())
    monkeypatch.setattr(Server, "shuffles", True)
    assert finish(start()) == expected


def test_a_step_that_is_broken_off_leaves_what_goes_on_as_it_was():
    run = start()
    run.memory.stops_at = 3
    before = []
    begin_step = run.memory.begin_step
    run.memory.begin_step = lambda progress: (before.append(list(progress.leftover)), begin_step(progress))
    assert run.train() is False
    assert run.progress.step == 2 and run.progress.leftover == before[-1] != []


def test_requests_say_which_tokens_are_of_the_response_already():
    # Stop strings may begin in them, and never in the prompt, here of one token.
    run = start()
    finish(run)
    requests = [request for batch, _ in run.generator.requests for request in batch]
    assert all(request.num_begun == len(request.prompt_ids) - 1 for request in requests)
    assert len({request.num_begun for request in requests}) > 3
