"""Sampling ahead of training: which weights sample what, whatever anybody's speed, and what a restart takes up."""

import random
import threading
import time

import numpy as np
import pytest
import test_loop
from test_loop import END, Rank, Run, Script, finish

from mindrlhf.errors import RunFailure
from mindrlhf.rollout.types import Completion

NUM_STEPS = 6
LIMIT_S = 30  # of waits that end at once unless something is broken


class Server(Script):
    """Samples depend on the seed of the request and on the version of the weights alone."""

    version = 0
    delay_s = 0.0
    fails_at = None  # number of the call, from 1

    def generate(self, requests, sampling):
        if len(self.requests) + 1 == self.fails_at:
            raise RunFailure("the server has died")
        self.journal.append(f"sample with {self.version}")
        self.requests.append((list(requests), sampling))
        for request in requests:
            for index in range(request.num_samples):
                time.sleep(self.delay_s * random.random())
                ids = np.random.default_rng([request.seed, index, self.version]).integers(1, 50, index + 2)
                ids[-1] = END
                logprobs = np.full(len(ids), -1.0 - 0.01 * self.version, np.float32)
                yield Completion(request.request_id, index, ids.astype(np.int32), logprobs, "stop", self.version)

    def update_weights(self, version):
        time.sleep(self.delay_s * random.random())
        self.version = version
        super().update_weights(version)

    def cancel(self):
        self.journal.append("cancel")


@pytest.fixture(autouse=True)
def server(monkeypatch):
    monkeypatch.setattr(test_loop, "Script", Server)


def start(ahead, steps=NUM_STEPS, **options):
    """Return a run of ``steps`` steps of two prompts."""
    options = {"num_prompts": 4, "training": {"chunk_size": 2, "micro_batch_size": 4, "epochs": 50}, **options}
    return Run(steps=steps, rollout={"off_policy_steps": ahead}, **options)


def versions_used(run):
    """Return the versions of the weights whose samples each step trained on."""
    steps = [[sample.completion for sample in record.trained] for record, _ in run.memory.reviewed]
    return [sorted({one.weights_version for one in step}) for step in steps]


# The weights that a step begins with have the number of the step, from 1.
@pytest.mark.parametrize(
    ("ahead", "expected"),
    [
        (0, [1, 2, 3, 4, 5, 6]),
        (1, [1, 1, 2, 3, 4, 5]),
        (2, [1, 1, 1, 2, 3, 4]),
        (5, [1, 1, 1, 1, 1, 1]),
    ],
)
def test_a_step_trains_on_samples_of_so_many_versions_before(ahead, expected):
    run = start(ahead)
    metrics, _ = finish(run)
    assert versions_used(run) == [[version] for version in expected]
    if ahead:
        staleness = [step - version for step, version in enumerate(expected, start=1)]
        assert [metrics[step]["staleness/mean"] for step in metrics] == staleness
        assert [metrics[step]["staleness/max"] for step in metrics] == staleness
    seeds = [request.seed for requests, _ in run.generator.requests for request in requests]
    prompts = [request.prompt_ids[0] - 1 for requests, _ in run.generator.requests for request in requests]
    # The same prompts with the same seeds as without, nothing twice, nothing beyond the end.
    plain = start(0)
    finish(plain)
    assert seeds == [request.seed for requests, _ in plain.generator.requests for request in requests]
    assert prompts == [0, 1, 2, 3] * 3


def test_the_server_does_one_thing_after_the_other():
    run = start(2, steps=5)
    run.train()
    run.trainer.sampling.settle()  # the last weights are loaded by then
    run.trainer.close()
    served = [entry for entry in run.journal if entry.startswith(("sample", "update_weights"))]
    assert served == [
        *("update_weights 1", "sample with 1", "sample with 1", "sample with 1"),
        *("update_weights 2", "sample with 2", "update_weights 3", "sample with 3"),
        *("update_weights 4", "update_weights 5", "update_weights 6"),
    ]
    assert "sleep" not in run.journal and "wake" not in run.journal


def test_the_next_step_is_sampled_while_one_is_trained_on(monkeypatch):
    is_updating, is_sampling = threading.Event(), threading.Event()
    generate, update = Server.generate, Rank.update

    def generate_in_update(self, requests, sampling):
        if self.requests:  # the second step's
            is_sampling.set()
            assert is_updating.wait(LIMIT_S), "the update waits for samples that it does not train on"
        return generate(self, requests, sampling)

    def update_in_sampling(self, **arguments):
        is_updating.set()
        assert is_sampling.wait(LIMIT_S), "nothing is sampled beside the update"
        return update(self, **arguments)

    monkeypatch.setattr(Server, "generate", generate_in_update)
    monkeypatch.setattr(Rank, "update", update_in_sampling)
    run = start(1, steps=2)
    metrics, _ = finish(run)
    assert len(metrics) == 2


def test_weights_are_replaced_when_the_samples_of_the_next_step_are_there(monkeypatch):
    monkeypatch.setattr(Server, "delay_s", 0.02)
    commit = test_loop.Buffer.commit

    def commit_and_look(self, written):
        self.counts.append((len(self.server.requests), self.num_left()))
        commit(self, written)

    monkeypatch.setattr(test_loop.Buffer, "commit", commit_and_look)
    run = start(1, steps=4)
    buffer = run.trainer.parts.policy._publisher._buffer
    buffer.counts, buffer.server = [], run.generator
    buffer.num_left = lambda: int(run.trainer.sampling._is_working)
    finish(run)
    # Before the first step nothing is sampled; then the step's own samples and the next one's, which are all done.
    assert buffer.counts == [(0, 0), (2, 0), (3, 0), (4, 0), (4, 0)]


def test_held_out_prompts_are_sampled_with_the_weights_of_the_moment():
    run = start(2, held_out=True, evaluation={"every_steps": 2, "before_training": True})
    finish(run)
    # Two questions in one call: before training, after 2, 4 and 6 steps.
    entries = [entry for entry in run.journal if entry.startswith(("sample", "update_weights"))]
    sampled = [entry for entry in entries if entry.startswith("sample")]
    questions = [i for i, (requests, sampling) in enumerate(run.generator.requests) if sampling.max_tokens == 7]
    assert [sampled[i] for i in questions] == [f"sample with {version}" for version in (1, 3, 5, 7)]
    assert versions_used(run) == [[version] for version in (1, 1, 1, 2, 3, 4)]


def test_old_logprobs_are_the_trainers_and_the_generators_go_to_the_correction():
    run = start(1, training={"chunk_size": 2, "micro_batch_size": 4, "epochs": 50, "num_minibatches": 2})
    metrics, _ = finish(run)
    for _, _, micro_batches in run.ranks[0].updates:
        for rows in micro_batches:
            assert "old_logprobs" not in rows.tokens, "the rank has its own, and nobody replaced them"
    # Weights 2 generate what step 3 trains on: -1.02 against the stand-in's -1.25.
    rollout = run.ranks[0].updates[4][2][0]
    np.testing.assert_allclose(rollout.tokens["rollout_logprobs"], -1.02 * rollout.mask, rtol=1e-6)
    assert metrics[3]["rollout_ratio/mean"] == pytest.approx(np.exp(-0.23), rel=1e-5)
    assert "rollout_diff/mean_abs" in metrics[1], "the first step's samples are of its own weights"
    assert all("rollout_diff/mean_abs" not in metrics[step] for step in range(2, NUM_STEPS + 1))
    assert [diff is None for _, diff in run.memory.reviewed] == [False] + [True] * (NUM_STEPS - 1)


def test_a_server_that_fails_ends_the_run_and_the_thread(monkeypatch):
    monkeypatch.setattr(Server, "fails_at", 3)
    run = start(1)
    with pytest.raises(RunFailure, match="the server has died"):
        finish(run)
    assert run.progress.step == 1, "the step whose samples were there is done"
    assert run.journal[-1] == "cancel"
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rollout")]


def test_a_request_to_end_breaks_off_the_first_samples_only():
    run = start(1)
    run.memory.stops_at = 1
    assert run.train() is False
    run.trainer.close()
    assert run.memory.saved == ["broken off after 0"]
    run = start(1)
    run.memory.stops_at = 3
    finish(run)
    assert run.progress.step == NUM_STEPS, "later a step is finished: its samples could not be had again"


def test_times_and_idle_shares_are_reported():
    run = start(1)
    run.train()
    run.trainer.close()
    for _, values in run.memory.metrics:
        assert 0 <= values["async/idle_ranks"] <= 1 and 0 <= values["async/idle_servers"] <= 1
        # Of the one step that is drawn ahead: whether it is ready by then is a matter of time.
        assert values["async/queue"] in (0, 1) and values["timing/rollout_wait"] >= 0
        assert "timing/rollout" not in values and values["vllm_tps"] > 0
