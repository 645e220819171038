"""Every schedule with what a run may have beside it: conversations, episodes, dynamic sampling, greedy baselines, a
reward model, images. What a conversation says depends on nothing but its prompt and its first token, so that it has to
come out token by token whatever its segments and the weights; and a run that is resumed is the run that was not."""

import dataclasses
import json
import math
import random
import shutil
import threading
import time
from concurrent.futures import Future

import numpy as np
import pytest
import test_loop
from fakes import Characters
from saved_progress import load_progress, save_progress
from test_loop import END, NUM_GENERATIONS, Run, finish
from test_loop_critic import ALGORITHM, CriticRank, brute_force, responses_of

from mindrlhf.errors import RunFailure
from mindrlhf.images.pixels import encode_png
from mindrlhf.rewards.types import RewardResult
from mindrlhf.rollout.conversations import ConversationLimits, Conversations, Episodes
from mindrlhf.rollout.pool import ServerPool
from mindrlhf.rollout.samples import Sampler
from mindrlhf.rollout.types import Completion
from mindrlhf.tools.calls import ToolAnswer
from mindrlhf.training.batch import RowOptions
from mindrlhf.training.loop.sampling.order import ORDER_NAME

NUM_STEPS, NUM_GROUPS, NUM_PROMPTS, LONGEST, SEGMENT = 6, 2, 4, 400, 23
DELAY_S = 0.004
SCHEDULES = {
    "in step": {},
    "off-policy": {"off_policy_steps": 1},
    "off-policy by 2": {"off_policy_steps": 2},
    "segments": {"segment_tokens": SEGMENT, "in_flight": 2.0, "max_segments": 3},
    "segments off-policy": {"segment_tokens": SEGMENT, "off_policy_steps": 1, "in_flight": 1.5, "max_segments": 4},
    "segments off-policy by 2": {"segment_tokens": SEGMENT, "off_policy_steps": 2, "in_flight": 1.5},
    "asynchronous": {"segment_tokens": SEGMENT, "off_policy_steps": 2, "asynchronous": True},
}
TOKENIZER = Characters()


def call(x, name="double"):
    return f'<tool_call>{{"name": "{name}", "arguments": {{"x": {x}}}}}</tool_call>'


def answer(*texts):
    return "\n" + "\n".join(f"<tool_response>\n{text}\n</tool_response>" for text in texts) + "\n"


def plain(prompt, variant):
    return [("x" * (7 + 20 * variant + 11 * prompt), True)]


def conversation(prompt, variant):
    """Return what is said, by whom: no calls, one, or three, of which one fails."""
    last = "so " + "y" * (5 + 9 * variant + 4 * prompt)
    return [
        [("nothing to ask " + last, True)],
        [(call(3 + prompt), True), (answer(6 + 2 * prompt), False), (last, True)],
        [
            (call(1) + call(2, "bad"), True),
            (answer(2, "Error: no"), False),
            (call(4), True),
            (answer(8), False),
            (last, True),
        ],
    ][variant]


def episode(prompt, variant):
    """Return the actions and what is seen after them: an environment adds up the lengths of actions."""
    said = ["a" * (10 + 7 * variant), "b" * (20 + prompt), "c" * 12][: variant + 1]
    turns, total = [], 1  # the first letter, which says the variant, is of the first action
    for action in said:
        total += len(action)
        turns += [(action, True), (f"\nsum {total}\n", False)]
    return turns[:-1]


TELLERS = {"conversations": conversation, "episodes": episode}


def tokens_of(teller, prompt, variant):
    """Return the tokens of a response and who wrote them; the first tells the variant, and each turn has its end."""
    tokens, by_model = [ord("A") + variant], [True]
    for text, is_model in teller(prompt, variant):
        more = [*TOKENIZER.encode(text), *([END] if is_model else [])]
        tokens += more
        by_model += [is_model] * len(more)
    return tokens, by_model


class Server(test_loop.Script):
    """Goes on with what it is sent, which has to be the beginning of what it tells."""

    version = 0
    teller = staticmethod(plain)
    images: dict = {}

    def generate(self, requests, sampling):
        time.sleep(DELAY_S * random.random())
        self.requests.append((list(requests), self.version))
        self.journal.append(f"generate {len(requests)}")
        for request in requests:
            prompt, so_far = request.prompt_ids[0] - 1, list(request.prompt_ids[1:])
            for expected, seen in zip(self.images.get(prompt, ()), request.images, strict=True):
                np.testing.assert_array_equal(seen, expected)
            for index in range(request.num_samples):
                variant = (
                    so_far[0] - ord("A") if so_far else int(np.random.default_rng([request.seed, index]).integers(3))
                )
                variant = 0 if sampling.temperature == 0 else variant
                told, by_model = tokens_of(self.teller, prompt, variant)
                assert told[: len(so_far)] == so_far
                if request.begun is not None:  # stop strings may begin in the turn, and not in what tools wrote
                    assert all(by_model[len(so_far) - request.num_begun : len(so_far)])
                    assert request.num_begun == len(so_far) or not by_model[len(so_far) - request.num_begun - 1]
                end = told.index(END, len(so_far)) + 1
                assert all(by_model[len(so_far) : end])
                is_whole = end - len(so_far) <= request.token_limit(sampling)
                ids = told[len(so_far) : end if is_whole else len(so_far) + request.token_limit(sampling)]
                logprobs = np.full(len(ids), -1.0 - 0.01 * self.version, np.float32)
                reason = "stop" if is_whole else "length"
                yield Completion(request.request_id, index, np.array(ids, np.int32), logprobs, reason, self.version)

    def update_weights(self, version):
        self.version = version
        super().update_weights(version)

    def cancel(self):
        self.journal.append("cancel")


class Rank(test_loop.Rank):
    """Takes a random time for each update, as the server does for each request."""

    def update(self, **arguments):
        time.sleep(2 * DELAY_S * random.random())
        return super().update(**arguments)

    def publish(self, version, bucket, purpose):
        return super().publish(version, 0, purpose)


class Tools:
    """Doubles a number; "bad" fails."""

    def submit(self, one):
        future = Future()
        is_bad = one.name == "bad"
        future.set_result(ToolAnswer("Error: no" if is_bad else str(2 * one.arguments["x"]), is_failure=is_bad))
        return future


class Lengths:
    """Episodes of an environment in which an action earns its length; the first letter says how many there are."""

    def __init__(self):
        self.actions = {}

    def begin(self, number, answer, extra=None):
        assert number not in self.actions
        self.actions[number] = []

    def step(self, number, action):
        actions = self.actions[number]
        actions.append(action)
        future = Future()
        is_over = len(actions) == "ABC".index(actions[0][0]) + 1
        future.set_result(ToolAnswer(json.dumps([f"sum {sum(map(len, actions))}", len(action), is_over])))
        return future

    def end(self, number):
        del self.actions[number]


class Rewards(test_loop.Rewards):
    """The length of a response, its return in an environment, and a constant for prompt 0."""

    def submit(self, sample):
        value = sample.num_tokens if sample.episode_return is None else sample.episode_return
        parts, total = {"length": float(value), "half": 0.5}, 1.0 if sample.answer == "0" else value
        self.waiting.append(RewardResult(sample.index, parts, total, {}))


class Model:
    """A reward model on the ranks: only the loop itself may ask it."""

    def add_rewards(self, samples):
        assert threading.current_thread() is threading.main_thread()
        return [
            dataclasses.replace(
                one,
                reward=dataclasses.replace(one.reward, total=one.reward.total + float(one.completion.token_ids.sum())),
            )
            for one in samples
        ]


FEATURES = {
    "conversations": {},
    "episodes": {},
    "dynamic sampling": {"algorithm": {"num_generations": NUM_GENERATIONS, "dynamic_sampling": True}},
    "little dynamic sampling": {
        "algorithm": {"num_generations": NUM_GENERATIONS, "dynamic_sampling": True, "max_oversampling": 2}
    },
    "conversations, dynamic sampling": {"algorithm": {"num_generations": NUM_GENERATIONS, "dynamic_sampling": True}},
    "greedy": {"algorithm": {"num_generations": NUM_GENERATIONS, "advantage": "remax"}},
    "reward model": {},
    "images": {},
    "critic": {
        "algorithm": {"num_generations": NUM_GENERATIONS, **ALGORITHM},
        "critic": {"path": "critic", "start_lr": 0.5},
    },
    "buckets": {},
}
# Only while the ranks wait: beside the training nobody could score when groups are chosen.
FEATURES["reward model, dynamic sampling"] = FEATURES["dynamic sampling"]


@pytest.fixture
def start(monkeypatch, tmp_path):
    """Start a run: ``start(schedule, feature, name)``."""
    pools = []

    def sampler(generator, rewards, tokens, feature):
        limits = ConversationLimits(4, 8, 100)
        if "conversations" in feature:
            generator = Conversations(generator, Tools(), TOKENIZER, limits)
        elif "episodes" in feature:
            pools.append(Lengths())
            generator = Episodes(generator, pools[-1], TOKENIZER, limits)
        return Sampler(generator, rewards, Characters(), Model() if "reward model" in feature else None)

    def make(schedule, feature, name, **more):
        told = next((one for key, one in TELLERS.items() if key in feature), plain)
        monkeypatch.setattr(Server, "teller", staticmethod(told))
        monkeypatch.setattr(test_loop, "Sampler", lambda *arguments: sampler(*arguments, feature))
        options = {"num_prompts": NUM_PROMPTS, **FEATURES[feature]}
        options["training"] = {"chunk_size": NUM_GROUPS, "micro_batch_size": 4, "epochs": 50}
        rollout = {"max_response_length": LONGEST, **SCHEDULES[schedule], **more}
        if feature == "buckets":
            rollout["weight_buffer_gib"] = 1.0
            monkeypatch.setattr(test_loop.Buffer, "num_buckets", 3)
        directory = {"output_dir": str(tmp_path / name)}
        if feature == "critic":
            monkeypatch.setattr(test_loop, "Rank", CriticRank)
        return Run(steps=NUM_STEPS, rollout=rollout, run=directory, checkpoint={"every_steps": 1}, **options)

    make.pools = pools
    monkeypatch.setattr(test_loop, "Script", Server)
    monkeypatch.setattr(test_loop, "Rank", Rank)
    monkeypatch.setattr(test_loop, "Rewards", Rewards)
    monkeypatch.setattr(test_loop, "RowOptions", lambda lengths, *rest: RowOptions((512,), *rest))
    return make


@pytest.fixture
def images(monkeypatch):
    """Give the prompts but the first an image each."""
    made = test_loop.Prompts.__init__

    def make(self, num_prompts):
        made(self, num_prompts)
        for number in range(1, num_prompts):
            file = encode_png(np.full((28, 28 * number, 3), number, np.uint8))
            self.records[number] = dataclasses.replace(self.records[number], image_files=(file,))
        Server.images = {number: record.images for number, record in enumerate(self.records)}

    monkeypatch.setattr(test_loop.Prompts, "__init__", make)
    monkeypatch.setattr(Server, "images", {})


def check(run, metrics, schedule, feature):
    """Compare what was trained on with what the server tells; return the number of samples by prompt."""
    assert len(metrics) == NUM_STEPS
    rollout = SCHEDULES[schedule]
    told = next((one for key, one in TELLERS.items() if key in feature), plain)
    used = []
    for record, _ in run.memory.reviewed:
        assert len(record.trained) == NUM_GROUPS * NUM_GENERATIONS
        assert [one.group for one in record.trained] == np.repeat(range(NUM_GROUPS), NUM_GENERATIONS).tolist()
        for one in record.trained:
            prompt, completion = int(one.prompt.answer), one.completion
            tokens, by_model = tokens_of(told, prompt, int(completion.token_ids[0]) - ord("A"))
            assert completion.token_ids.tolist() == tokens and completion.finish_reason == "stop"
            assert len(completion.logprobs) == sum(by_model)
            versions = [version for version, _ in completion.spans] or [completion.weights_version]
            assert versions == sorted(versions)
            assert record.number - versions[0] <= rollout.get("off_policy_steps", 0) + rollout.get("max_segments", 1)
            if rollout.get("segment_tokens"):
                by_token = [np.full(count, -1 - 0.01 * version) for version, count in completion.spans]
                np.testing.assert_allclose(completion.logprobs, np.concatenate(by_token), rtol=1e-6)
            if told is not plain:
                assert completion.is_generated.tolist() == by_model
                assert completion.num_turns == len(
                    [text for text, is_model in told(prompt, tokens[0] - ord("A")) if is_model]
                )
            if told is episode:
                assert completion.episode_return == sum(by_model) - completion.num_turns  # without the end tokens
            used.append(prompt)
        assert all(math.isfinite(value) for value in metrics[record.number].values())
    return np.bincount(used, minlength=NUM_PROMPTS)


COMBINATIONS = [
    (schedule, feature)
    for schedule, keys in SCHEDULES.items()
    for feature in FEATURES
    if not ("off_policy_steps" in keys and feature == "reward model, dynamic sampling")
]


@pytest.mark.parametrize(("schedule", "feature"), COMBINATIONS)
def test_what_is_trained_on_is_what_was_told(schedule, feature, start, request):
    if feature == "images":
        request.getfixturevalue("images")
    run = start(schedule, feature, "run")
    metrics, _ = finish(run)
    counts = check(run, metrics, schedule, feature)
    if "dynamic" not in feature:
        assert counts.tolist() == [NUM_STEPS * NUM_GROUPS * NUM_GENERATIONS // NUM_PROMPTS] * NUM_PROMPTS
    elif feature == "dynamic sampling":
        assert counts[0] == 0, "its rewards are all the same"
        for step, values in metrics.items():
            assert values["samples/used_without_signal"] == 0
            if step > 1:
                assert values["samples/total_generated"] > metrics[step - 1]["samples/total_generated"]
        totals = run.progress.algorithm.samples
        assert totals.generated == totals.used + totals.carried + totals.dropped and totals.dropped > 0
    if feature == "episodes":
        (pool,) = start.pools
        assert not pool.actions, "all that was begun has ended"
    if feature == "buckets":
        served = [entry for entry in run.journal if entry.startswith(("generate", "update_weights"))]
        loads = [place for place, entry in enumerate(served) if entry.startswith("update_weights")]
        assert len(loads) == 3 * (NUM_STEPS + 1)
        for first in loads[::3]:  # nothing is generated with a part of the weights
            assert served[first : first + 3] == [served[first]] * 3
    if feature == "critic":
        for read, arrays in (one for update in range(NUM_STEPS) for one in responses_of(run.ranks[0], update)):
            rewards = np.zeros(len(read))
            rewards[-1] = 1.0 if read[0] == 1 else len(read)
            advantages, returns = brute_force(rewards, read / 8)
            np.testing.assert_allclose(arrays["advantages"], advantages, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(arrays["returns"], returns, rtol=1e-5, atol=1e-6)
    if feature == "reward model":
        for record, _ in run.memory.reviewed:
            for one in record.trained:
                own = 1.0 if one.prompt.answer == "0" else len(one.completion.token_ids)
                assert one.reward.total == own + one.completion.token_ids.sum()
    if feature == "greedy":
        for record, _ in run.memory.reviewed:
            by_prompt = {0: 1.0} | {
                prompt: float(len(tokens_of(plain, prompt, 0)[0])) for prompt in range(1, NUM_PROMPTS)
            }
            assert record.baselines.tolist() == [by_prompt[int(one.prompt.answer)] for one in record.trained]


class Node:
    """A node for rollout only, or one that trains."""

    def __init__(self, number, may_leave):
        self.name, self.may_leave, self.lost = f"node {number}", may_leave, ""

    def drop(self, how, *, ends=False):
        self.lost = how


class Placed(Server):
    """A server of a node, which is lost after some responses, at the worst in the middle of a round."""

    options = None

    def __init__(self, journal, node, num_left=math.inf):
        super().__init__(journal)
        self.node, self.nodes, self._num_left = node, [node], num_left

    def launch(self):
        """It is there at once."""

    close = launch

    def generate(self, requests, sampling):
        for completion in super().generate(requests, sampling):
            self._num_left -= 1
            if self._num_left < 0:
                raise RunFailure("is lost")
            yield completion


class Newcomers:
    """Lets two nodes of two servers in with each of the first three versions of the weights."""

    def __init__(self):
        self.nodes = []

    def take(self, options):
        if len(self.nodes) > 5:
            return []
        first = len(self.nodes)
        self.nodes += [Node(first + i, may_leave=True) for i in range(2)]
        return [Placed([], node, 4 + 5 * first) for node in self.nodes[-2:] for _ in range(2)]

    def send_weights(self, node, version):
        """They read the same."""

    def close(self):
        pass


class Elastic(ServerPool):
    def __init__(self, journal):
        super().__init__([Placed(journal, Node("0", may_leave=False))], num_restarts=0)
        self.newcomers = Newcomers()
        self.admit(self.newcomers)


@pytest.mark.parametrize("feature", ["conversations", "episodes", "dynamic sampling", "images"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_nodes_that_come_and_are_lost_change_nothing(schedule, feature, start, tmp_path, monkeypatch, request):
    if feature == "images":
        request.getfixturevalue("images")
    expected = finish(start(schedule, feature, "plain"))
    monkeypatch.setattr(test_loop, "Script", Elastic)
    replay = {"replay_order": str(tmp_path / "plain")} if schedule == "asynchronous" else {}
    run = start(schedule, feature, "elastic", **replay)
    assert finish(run) == expected
    nodes = run.generator.newcomers.nodes
    assert len(nodes) == 6 and any(node.lost for node in nodes)


class OneByOne(Rewards):
    """Takes its time, and samples of one thread at a time only, as a pool of verifiers does."""

    def __init__(self):
        super().__init__()
        self.thread, self.evaluated = None, 0

    def submit(self, sample):
        assert self.thread in (None, threading.current_thread())
        self.thread = threading.current_thread()
        super().submit(sample)

    def results(self):
        time.sleep(2 * DELAY_S)
        yield from super().results()
        self.evaluated += self.thread is threading.main_thread()
        self.thread = None


@pytest.mark.parametrize("schedule", [name for name, keys in SCHEDULES.items() if "off_policy_steps" in keys])
def test_verifiers_are_free_when_held_out_prompts_are_scored(schedule, start, monkeypatch):
    monkeypatch.setattr(test_loop, "Rewards", OneByOne)
    evaluation = {"held_out": True, "evaluation": {"every_steps": 1}}
    monkeypatch.setitem(FEATURES, "episodes", evaluation)
    run = start(schedule, "episodes", "run")
    finish(run)
    assert run.trainer.parts.rollout.sampler._rewards.evaluated == NUM_STEPS + 1


def saver(run, tmp_path):
    """Have a run's checkpoints kept, as files, by step."""
    saved = {}

    def save(progress):
        save_progress(tmp_path / f"step_{progress.step}", progress)
        order = tmp_path / "whole" / ORDER_NAME
        saved[progress.step] = run.stream.state(), order.read_text() if order.exists() else ""

    run.memory.save = save
    return saved


def resumed_at(stop, run, whole, saved, tmp_path):
    """Set a run to where another was after a step."""
    stream, order = saved[stop]
    run.trainer.close()
    if order:
        (tmp_path / f"resumed_{stop}" / ORDER_NAME).write_text(order)
    progress = run.progress
    progress.step = progress.weights_version = stop
    load_progress(tmp_path / f"step_{stop}", progress)
    run.stream.restore(stream)
    run.trainer = type(run.trainer)(run.config, run.trainer.parts, progress, NUM_STEPS)
    run.ranks[0].updates += whole.ranks[0].updates[:stop]  # a rank counts them in its gradient norm
    return run


@pytest.mark.parametrize(("schedule", "feature"), COMBINATIONS)
def test_a_resumed_run_is_the_run_that_was_not_broken_off(schedule, feature, start, tmp_path, request):
    if feature == "images":
        request.getfixturevalue("images")
    whole = start(schedule, feature, "whole")
    saved = saver(whole, tmp_path)
    metrics, course = finish(whole)
    for stop in (1, 2, 4):
        resumed = resumed_at(stop, start(schedule, feature, f"resumed_{stop}"), whole, saved, tmp_path)
        again, course_again = finish(resumed)
        if schedule == "asynchronous":  # the clock is another; what came of it is repeated from its order, whole
            order = tmp_path / f"order_{stop}"
            shutil.copytree(tmp_path / f"resumed_{stop}", order)
            replay = start(schedule, feature, f"again_{stop}", replay_order=str(order))
            metrics, course = finish(replay)
        assert again == {step: values for step, values in metrics.items() if step > stop}, stop
        assert course_again == course[stop + 1 :]
