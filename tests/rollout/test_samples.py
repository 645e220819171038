"""From prompts to scored samples, with a scripted generator and a verifier that runs at once."""

import dataclasses
from collections import deque

import numpy as np
import pytest
from made_samples import make_sample, with_completion, with_reward

from mindrlhf.data.mindrecord import Prompt
from mindrlhf.errors import RunFailure
from mindrlhf.images.pixels import encode_png
from mindrlhf.observe.samples import SampleRecord
from mindrlhf.rewards.types import RewardResult
from mindrlhf.rollout.samples import Sampler, reward_matrix, sample_parts, sample_record
from mindrlhf.rollout.types import Completion, SamplingParams
from mindrlhf.training.loop.signals import step_rewards

SAMPLING = SamplingParams(max_tokens=6, stop_token_ids=(0,))


class Letters:
    """Tokens 1.. are letters a..; 0 ends a text and is special."""

    def decode(self, ids, skip_special_tokens=True):
        assert all(isinstance(token, int) for token in ids)
        return "".join("" if token == 0 and skip_special_tokens else chr(ord("`") + token) for token in ids)


class Script:
    """Sample i of a request is i + 1 letters long; completions come in a scrambled order."""

    def __init__(self):
        self.chunks = []

    def generate(self, requests, sampling):
        self.chunks.append(list(requests))
        assert sampling == SAMPLING
        completions = [
            Completion(
                request_id=request.request_id,
                sample_index=index,
                token_ids=np.array([request.request_id + 1] * (index + 1) + [0] * (index < 2), np.int32),
                logprobs=np.full(index + 1 + (index < 2), -0.5 - index, np.float32),
                finish_reason="stop" if index < 2 else "length",
                weights_version=1,
            )
            for request in requests
            for index in range(request.num_samples)
        ]
        order = np.random.default_rng(0).permutation(len(completions))
        return iter([completions[i] for i in order])


class Counter:
    """A reward pool: two verifiers, the weighted sum of which is length + 10 * correct; results in reverse."""

    compares = False
    reads_steps = False

    def __init__(self):
        self.inputs = []
        self.waiting = deque()

    def submit(self, sample):
        self.inputs.append(sample)
        parts = {"length": float(len(sample.completion)), "correct": float(sample.answer in sample.completion)}
        failures = {"correct": "timeout"} if sample.num_tokens == 3 else {}
        self.waiting.appendleft(RewardResult(sample.index, parts, parts["length"] + 10 * parts["correct"], failures))

    def results(self):
        while self.waiting:
            yield self.waiting.popleft()


class Comparing(Counter):
    compares = True


class Stepwise(Counter):
    reads_steps = True


RECORDS = [
    Prompt(np.array([3, 4], np.int32), np.zeros(0, np.int32), "aaa", "s:0"),
    Prompt(np.array([5], np.int32), np.zeros(0, np.int32), "b", "s:1"),
    Prompt(np.array([6, 0, 7], np.int32), np.zeros(0, np.int32), "zz", "s:2"),
]


@pytest.fixture
def sampled():
    generator, pool = Script(), Counter()
    samples = Sampler(generator, pool, Letters()).sample(RECORDS, 3, SAMPLING, (11, 4))
    return samples, generator, pool


def test_samples_come_in_order_with_their_own_rewards(sampled):
    samples, _, _ = sampled
    assert [sample.group for sample in samples] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert [sample.response_text for sample in samples] == ["a", "aa", "aaa", "b", "bb", "bbb", "c", "cc", "ccc"]
    assert [sample.reward.total for sample in samples] == [1, 2, 13, 11, 12, 13, 1, 2, 3]
    assert [sample.reward.parts["correct"] for sample in samples] == [0, 0, 1, 1, 1, 1, 0, 0, 0]
    assert [sample.completion.finish_reason for sample in samples] == ["stop", "stop", "length"] * 3
    for sample in samples:
        np.testing.assert_array_equal(sample.prompt.prompt_ids, RECORDS[sample.group].prompt_ids)
        assert sample.prompt is RECORDS[sample.group]
        assert len(sample.completion.token_ids) == len(sample.completion.logprobs)
    assert samples[0].completion.token_ids.tolist() == [1, 0], "the stop token is part of the response"
    # Special tokens show in a prompt, where they mean something, and not in what verifiers read.
    assert [sample.prompt_text for sample in samples[::3]] == ["cd", "e", "f`g"]
    assert samples[1].reward.failures == {"correct": "timeout"} and not samples[0].reward.failures


def test_the_wait_for_verifiers_counts_from_the_last_response_on(monkeypatch):
    """One second passes with each look at the clock, and ten in the verifiers after the last response."""
    clock = iter(range(1000))
    monkeypatch.setattr("mindrlhf.rollout.samples.time.perf_counter", lambda: float(next(clock)))

    class Slow(Counter):
        def results(self):
            for _ in range(9):
                next(clock)
            yield from super().results()

    sampler = Sampler(Script(), Slow(), Letters())
    for _ in range(2):
        sampler.sample(RECORDS, 3, SAMPLING, (11, 4))
    assert sampler.take_reward_wait_s() == 20.0
    assert sampler.take_reward_wait_s() == 0.0
    assert Sampler(Script(), None, Letters()).take_reward_wait_s() is None


def test_a_response_without_tokens_ends_the_run_in_one_line(monkeypatch):
    empty = Completion(1, 2, np.zeros(0, np.int32), np.zeros(0, np.float32), "stop", weights_version=1)
    generator = Script()
    whole = generator.generate
    monkeypatch.setattr(generator, "generate", lambda *arguments: iter([*whole(*arguments), empty]))
    with pytest.raises(RunFailure, match="empty response to the prompt 'e'"):
        Sampler(generator, None, Letters()).sample(RECORDS, 3, SAMPLING, (11, 4))


def test_verifiers_of_steps_read_turns_and_tokens_with_what_ends_them():
    pool = Stepwise()
    Sampler(Script(), pool, Letters()).sample(RECORDS[:1], 2, SAMPLING, (11, 4))
    given = {one.index: (one.turn_texts, one.token_texts) for one in pool.inputs}
    assert given == {0: (("a`",), ("a", "`")), 1: (("aa`",), ("a", "a", "`"))}


EPISODE = {
    "is_generated": np.array([True, True, False, True, False, True]),
    "turn_rewards": ((2, 1.0), (1, 0.0), (1, -3.0)),
    "episode_return": -2.0,
}


def episode(parts, **changed):
    return make_sample([1], range(6), 5.0, parts, logprobs=np.zeros(4), **(EPISODE | changed))


def test_rewards_of_an_environment_stand_where_its_turns_end():
    ends, given = step_rewards(episode({"environment_reward": -2.0, "length": 7.0}), {"environment_reward": 0.5})
    assert (ends.tolist(), given.tolist()) == ([1, 2, 3], [0.5, 0.0, -1.5])
    # A gate was closed, so that the part is not the environment's; nobody asked for it; there is none.
    for other in (
        episode({"environment_reward": 0.0}),
        episode({"length": 1.0}),
        episode({"length": 1.0}, turn_rewards=(), episode_return=None),
    ):
        ends, given = step_rewards(other, {"environment_reward": 0.5})
        assert len(ends) == len(given) == 0


def test_rewards_of_turns_and_of_tokens_add_up():
    plain = episode({"turns": 3.0, "environment_reward": -2.0})
    weights = {"turns": 1.0, "tokens": 10.0, "environment_reward": 2.0}
    both = with_reward(plain, steps={"turns": [1.0, 1.0, 1.0]})
    ends, given = step_rewards(both, weights)
    assert (ends.tolist(), given.tolist()) == ([1, 2, 3], [3.0, 1.0, -5.0])
    ends, given = step_rewards(with_reward(both, steps={"tokens": [0.0, 1.0, 2.0, 3.0]} | both.reward.steps), weights)
    assert (ends.tolist(), given.tolist()) == ([0, 1, 2, 3], [0.0, 13.0, 21.0, 25.0])


def test_turns_of_tools_are_the_runs_of_what_the_model_wrote():
    tools = with_completion(episode({}), turn_rewards=(), episode_return=None)
    assert tools.completion.turn_lengths == [2, 1, 1]
    assert make_sample([1], range(6)).completion.turn_lengths == [6]


def test_verifiers_are_told_what_they_may_ask(sampled):
    _, _, pool = sampled
    given = {sample.index: sample for sample in pool.inputs}
    assert sorted(given) == list(range(9))
    assert (given[5].completion, given[5].answer, given[5].prompt) == ("bbb", "b", "e")
    assert (given[5].finish_reason, given[5].num_tokens) == ("length", 3)
    assert (given[0].finish_reason, given[0].num_tokens) == ("stop", 2)


def seeds(seed_path, records=RECORDS, chunk_size=0):
    generator = Script()
    Sampler(generator, Counter(), Letters()).sample(records, 3, SAMPLING, seed_path, chunk_size)
    return [request.seed for chunk in generator.chunks for request in chunk]


def test_seeds_depend_on_the_path_and_the_place_alone():
    first = seeds((11, 4))
    assert first == seeds((11, 4))
    assert first == seeds((11, 4), chunk_size=1)
    assert first[:2] == seeds((11, 4), RECORDS[::-1][:2])
    others = [*seeds((11, 5)), *seeds((12, 4)), *seeds((4, 11))]
    assert len({*first, *others}) == 12
    assert all(0 <= seed < 2**63 for seed in others)


def test_verifiers_that_compare_see_all_samples_of_the_prompt_in_order():
    pool = Comparing()
    samples = Sampler(Script(), pool, Letters()).sample(RECORDS, 3, SAMPLING, (0,))
    assert len(pool.inputs) == 9
    for one in pool.inputs:
        group = samples[one.index // 3 * 3 :][:3]
        assert one.completions == tuple(sample.response_text for sample in group)
        assert one.completion == one.completions[one.index % 3]
    plain = Counter()
    Sampler(Script(), plain, Letters()).sample(RECORDS, 3, SAMPLING, (0,))
    assert {one.completions for one in plain.inputs} == {()}



@pytest.mark.parametrize(("chunk_size", "sizes"), [(0, [3]), (1, [1, 1, 1]), (2, [2, 1]), (3, [3]), (8, [3])])
def test_prompts_go_out_in_chunks(chunk_size, sizes):
    generator = Script()
    samples = Sampler(generator, Counter(), Letters()).sample(RECORDS, 3, SAMPLING, (0,), chunk_size)
    assert [len(chunk) for chunk in generator.chunks] == sizes
    assert [request.request_id for chunk in generator.chunks for request in chunk] == [0, 1, 2]
    assert [request.prompt_ids for chunk in generator.chunks for request in chunk] == [(3, 4), (5,), (6, 0, 7)]
    assert [sample.reward.total for sample in samples] == [1, 2, 13, 11, 12, 13, 1, 2, 3]


def test_images_go_to_the_generator_and_the_samples_and_texts_show_each_as_one_token():
    class WithImages(Letters):
        def token_to_id(self, token):
            return {"<|image_pad|>": 9}[token]

    pixels = np.random.default_rng(0).integers(0, 256, (28, 56, 3), dtype=np.uint8)
    ids = np.array([3, 9, 9, 4, 9, 9, 5], np.int32)
    seeing = dataclasses.replace(RECORDS[0], prompt_ids=ids, image_files=(encode_png(pixels), encode_png(pixels[::-1])))
    generator, pool = Script(), Counter()
    samples = Sampler(generator, pool, WithImages()).sample([RECORDS[1], seeing], 2, SAMPLING, (0,))
    asked = generator.chunks[0]
    assert asked[0].images == () and asked[1].prompt_ids == tuple(ids)
    for images in (asked[1].images, samples[2].images, samples[3].images):
        assert len(images) == 2
        assert np.array_equal(images[0], pixels) and np.array_equal(images[1], pixels[::-1])
    assert [sample.prompt_text for sample in samples[::2]] == ["e", "cidie"]
    assert {sample.prompt for sample in pool.inputs} == {"e", "cidie"}
    other = [dataclasses.replace(sample, images=sample.images[::-1]) for sample in samples]
    assert sample_parts(samples)["prompts"] != sample_parts(other)["prompts"]
    assert sample_parts(samples)["samples"] == sample_parts(other)["samples"]


def test_a_generator_that_loses_a_sample_is_noticed():
    class Lossy(Script):
        def generate(self, requests, sampling):
            return iter(list(super().generate(requests, sampling))[1:])

    with pytest.raises(AssertionError, match="9 samples were asked for, 8 generated"):
        Sampler(Lossy(), Counter(), Letters()).sample(RECORDS, 3, SAMPLING, (0,))


def test_a_matrix_of_rewards_has_a_row_for_each_prompt(sampled):
    samples, _, _ = sampled
    total, correct = reward_matrix(samples, 3), reward_matrix(samples, 3, "correct")
    assert total.dtype == np.float64
    np.testing.assert_array_equal(total, [[1, 2, 13], [11, 12, 13], [1, 2, 3]])
    np.testing.assert_array_equal(correct, [[0, 0, 1], [1, 1, 1], [0, 0, 0]])


def test_what_a_samples_file_keeps(sampled):
    samples, _, _ = sampled
    assert sample_record(samples[2], 17) == SampleRecord(
        17, "cd", "aaa", "aaa", 13.0, {"length": 3.0, "correct": 1.0}, "length"
    )


def test_a_prompt_takes_its_choice_of_verifiers_along():
    choices = ["", "length", "length,correct"]
    records = [dataclasses.replace(record, verifier=choice) for record, choice in zip(RECORDS, choices)]
    pool = Counter()
    Sampler(Script(), pool, Letters()).sample(records, 1, SAMPLING, (0,))
    assert {sample.index: sample.verifiers for sample in pool.inputs} == {
        0: (),
        1: ("length",),
        2: ("length", "correct"),
    }


class Lengths:
    """A reward model: the length of the response in tokens."""

    def add_rewards(self, samples):
        return [
            with_reward(
                sample,
                parts={**sample.reward.parts, "reward_model": float(len(sample.completion.token_ids))},
                total=sample.reward.total + 100 * len(sample.completion.token_ids),
            )
            for sample in samples
        ]


def test_a_reward_model_scores_beside_verifiers_or_alone():
    beside = Sampler(Script(), Counter(), Letters(), Lengths()).sample(RECORDS, 3, SAMPLING, (0,))
    assert [sample.reward.total for sample in beside[:3]] == [201, 302, 313]
    assert beside[2].reward.parts == {"length": 3.0, "correct": 1.0, "reward_model": 3.0}
    alone = Sampler(Script(), None, Letters(), Lengths()).sample(RECORDS, 3, SAMPLING, (0,), chunk_size=1)
    assert [sample.reward.total for sample in alone] == [200, 300, 300] * 3
    assert alone[2].reward.parts == {"reward_model": 3.0} and not alone[2].reward.failures
    assert [sample.response_text for sample in alone[:3]] == ["a", "aa", "aaa"]


def test_later_rounds_number_their_groups_and_seeds_on():
    generator = Script()
    whole = seeds((5, 1))
    samples = Sampler(generator, Counter(), Letters()).sample(RECORDS[1:], 3, SAMPLING, (5, 1), first_group=1)
    assert [sample.group for sample in samples] == [1] * 3 + [2] * 3
    assert [request.seed for chunk in generator.chunks for request in chunk] == whole[1:]
    assert [request.request_id for chunk in generator.chunks for request in chunk] == [0, 1]
    assert [sample.prompt_text for sample in samples[::3]] == ["e", "f`g"]


def test_tokens_of_a_sample_have_their_values_where_the_model_wrote_them():
    sampler = Sampler.__new__(Sampler)
    sampler._tokenizer = Letters()
    sample = make_sample([1], [3, 1, 2], logprobs=[-0.5, -1.0], is_generated=np.array([True, False, True]))
    found = sampler.token_values(sample, {"rollout_logprobs": sample.completion.logprobs})
    assert found == {"tokens": ["c", "a", "b"], "rollout_logprobs": [-0.5, None, -1.0]}
    whole = with_completion(sample, is_generated=None, logprobs=np.array([-1, -2, -3], np.float32))
    assert sampler.token_values(whole, {"x": whole.completion.logprobs})["x"] == [-1, -2, -3]
