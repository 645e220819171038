"""Samples that nothing could score, by no fault of the policy: what leaves a step, an evaluation and the numbers."""

import http.client
import math
import socket
import urllib.error

import numpy as np
import pytest
from made_samples import make_sample, with_reward

from mindrlhf.errors import RunFailure, UserError
from mindrlhf.evaluation.heldout import Evaluation, known, paired
from mindrlhf.evaluation.statistics import accuracy_interval
from mindrlhf.rewards import Unavailable
from mindrlhf.rewards.availability import is_unavailable
from mindrlhf.rewards.judges.chat_client import ChatError, NoAnswer, _content
from mindrlhf.rewards.pool import RewardPool
from mindrlhf.rewards.selection import Selection
from mindrlhf.rewards.types import RewardInput
from mindrlhf.rollout.types import Completion, checked
from mindrlhf.training.loop.report import sample_metrics
from mindrlhf.training.loop.step import StepSamples


def samples(*groups):
    """One list of rewards for each group; None is of a sample that is not scored."""
    lost = {"total": math.nan, "parts": {}, "unscored": "judge: ConnectionError: refused"}
    rewards = [(number, reward) for number, group in enumerate(groups) for reward in group]
    made = [make_sample([1], [2, 3], reward or 0.0, group=number) for number, reward in rewards]
    return [with_reward(one, **lost) if reward is None else one for one, (_, reward) in zip(made, rewards)]


@pytest.mark.parametrize(
    ("groups", "num_stale", "left", "stale", "same"),
    [
        ([[1, 0], [0, 0]], 2, [[1, 0], [0, 0]], 2, 7),  # nothing is lost: as it was, its counts too
        ([[1, None, 0], [1, 1, 0]], 3, [[1, 0], [1, 1, 0]], 2, 0),
        ([[1, None, 1], [1, None, None]], 6, [[1, 1]], 2, 2),  # one alone has nothing to be compared with
        ([[None, None], [0, 1]], 0, [[0, 1]], 0, 0),
        ([[1], [None]], 0, [[1]], 0, 1),  # groups of one by the config
    ],
)
def test_what_is_not_scored_leaves_the_step_and_its_counts(groups, num_stale, left, stale, same):
    step = StepSamples(used := samples(*groups), used, num_stale=num_stale, num_without_signal=7).scored()
    found = {}
    for sample in step.used:
        found.setdefault(sample.group, []).append(sample.reward.total)
    assert [*found.values()] == left
    assert (step.num_stale, step.num_without_signal) == (stale, same)


def test_a_group_whose_greedy_response_is_not_scored_has_no_baseline():
    used, greedy = samples([1, 0], [1, 0]), samples([None], [1])
    assert {one.group for one in StepSamples(used, used, greedy=greedy).scored().used} == {1}


def test_metrics_are_of_what_was_scored():
    metrics = sample_metrics(samples([1, None, 0, 1], [None, 1, 0, None]))
    assert metrics["reward/mean"] == pytest.approx(3 / 5) and metrics["reward/unscored"] == 3
    assert metrics["reward/length/mean"] == pytest.approx(3 / 5) and metrics["reward/failures"] == 0


def test_an_evaluation_counts_what_was_scored():
    rows = [[1, 0], [None, 1], [None, None], [1, 1]]
    one = Evaluation.of(3, "length", samples(*rows), 2)
    assert one.means[[0, 1, 3]].tolist() == [0.5, 1.0, 1.0] and np.isnan(one.means[2])
    metrics, expected = one.metrics(), accuracy_interval([0.5, 1.0, 1.0])
    assert [metrics[f"eval/accuracy{end}"] for end in ("", "_low", "_high")] == [*expected[:3]]
    assert (metrics["eval/unscored"], metrics["eval/samples"], one.num_prompts) == (3, 8, 3)
    whole = Evaluation.of(0, "length", samples([0, 0], [0, 1], [1, 1], [1, 0]), 2)
    assert [part.tolist() for part in paired(whole, one)] == [[0.0, 0.5, 0.5], [0.5, 1.0, 1.0]]
    assert len(known(whole.means)) == 4 and "eval/unscored" not in whole.metrics()
    with pytest.raises(RunFailure, match="none of 4 held-out samples .*refused"):
        Evaluation.of(0, "length", samples([None, None], [None, None]), 2)


def raised_from(error, cause):
    error.__cause__ = cause
    return error


def like(module, name, *bases, **attributes):
    """An exception as a client library has it that is not installed here."""
    error = type(name, bases or (Exception,), {"__module__": module})("said")
    vars(error).update(attributes)
    return error


UNAVAILABLE = [
    Unavailable("no judge"), ConnectionError("x"), ConnectionRefusedError("x"), socket.gaierror("x"),
    http.client.RemoteDisconnected("x"), urllib.error.URLError("x"), NoAnswer("x"),
    *(urllib.error.HTTPError("u", status, "m", None, None) for status in (401, 403, 404, 407, 429, 500, 502, 503, 529)),
    raised_from(RuntimeError("the judge failed"), ConnectionError("x")),
    like("requests.exceptions", "ConnectionError"),
    like("requests.exceptions", "ReadTimeout", type(like("requests.exceptions", "Timeout"))),
    like("httpx", "ConnectError", type(like("httpx", "TransportError"))), like("openai", "APIConnectionError"),
    like("openai", "RateLimitError", status_code=429), like("aiohttp.client_exceptions", "ClientConnectionError"),
]  # fmt: skip
OF_THE_RESPONSE = [
    ValueError("x"), ZeroDivisionError("x"), MemoryError(), RecursionError(), SystemExit(1), TimeoutError("x"),
    OSError("x"), FileNotFoundError("x"), UserError("x"), ChatError("x"), UnicodeError("x"), AssertionError(),
    BrokenPipeError("the program under test has ended"), KeyError("x"),
    *(urllib.error.HTTPError("u", status, "m", None, None) for status in (400, 413, 422)),
    like("openai", "BadRequestError", status_code=400), like("elsewhere", "HTTPError", status_code=503),
]  # fmt: skip


@pytest.mark.parametrize("error", [*UNAVAILABLE, *OF_THE_RESPONSE], ids=repr)
def test_what_a_response_may_have_caused_stays_a_failure(error):
    assert is_unavailable(error) == any(error is one for one in UNAVAILABLE)


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (b"<html>proxy</html>", NoAnswer), (b"{}", NoAnswer), (b'{"choices": []}', NoAnswer),
        (b'{"choices": [{"message": {"content": null}}]}', ChatError),
    ],
)  # fmt: skip
def test_a_proxy_that_answers_for_a_judge_is_no_judge(reply, kind):
    with pytest.raises(ChatError) as caught:
        _content("http://judge/v1", reply)
    assert type(caught.value) is kind


VERIFIER = """
import os, signal
from pathlib import Path
from mindrlhf.rewards import Unavailable

def judge(completion, answer):
    if completion == "away":
        raise ConnectionError("refused")
    if completion == "told":
        raise Unavailable("quota")
    if completion == "crash":
        raise ValueError("broke")
    once = Path(__file__).with_name(completion)
    if completion == "killed always" or completion == "killed once" and not once.exists():
        once.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return 1.0
"""


def test_the_pool_tells_what_is_unavailable_from_what_failed(tmp_path):
    (tmp_path / "judge.py").write_text(VERIFIER)
    selection = Selection((f"{tmp_path}/judge.py:judge", "format_reward"), (1.0, 1.0))
    texts = ["good", "away", "told", "crash", "killed once", "killed always", "good"]
    with RewardPool(selection, failure_log=tmp_path / "failures.jsonl") as pool:
        results = pool.score([RewardInput(number, text, "a") for number, text in enumerate(texts)])
    reasons = {text: one.unscored for text, one in zip(texts, results) if one.unscored}
    assert reasons == {"away": "judge: ConnectionError: refused", "told": "judge: Unavailable: quota"}
    assert all(math.isnan(one.total) == bool(one.unscored) for one in results)
    failed = {text: one.failures["judge"] for text, one in zip(texts, results) if one.failures}
    assert failed == {"crash": "ValueError: broke", "killed always": "worker died: signal SIGKILL"}
    log = (tmp_path / "failures.jsonl").read_text()
    assert '"ConnectionError: refused"' in log and '"Unavailable: quota"' in log


def test_a_log_probability_that_is_not_finite_is_named():
    tokens = np.array([7, 8]), np.array([9, 10, 11])
    logprobs = np.array([-1.0, -2.0], np.float32), np.array([-1.0, -np.inf, np.nan], np.float32)
    good, bad = (
        checked(Completion(5, 0, ids, values, "stop", 1), "vLLM server_1") for ids, values in zip(tokens, logprobs)
    )
    assert not good.unscored
    assert bad.unscored == "vLLM server_1 gave token 10, number 2 of the response, the log-probability -inf"
