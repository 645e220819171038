"""Dynamic sampling over scripted rounds of sampling: which groups a step gets; every sample is accounted for."""

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_samples import make_sample, with_completion, with_prompt, with_reward

from mindrlhf.checkpoint.algorithm_state import SampleTotals
from mindrlhf.checkpoint.leftover import LeftoverSample, leftover_records, load_leftover, save_leftover
from mindrlhf.checkpoint.manifest import DamagedDirectory
from mindrlhf.config.algorithm import AlgorithmSection
from mindrlhf.config.model import ModelSection
from mindrlhf.config.reward import RewardSection
from mindrlhf.config.run import DataSection
from mindrlhf.config.schema import GrpoConfig
from mindrlhf.config.training import TrainingSection
from mindrlhf.images.pixels import encode_png
from mindrlhf.training.loop.leftover import SampleLedger, from_leftover, to_leftover
from mindrlhf.training.loop.sampling.in_step import GroupSampling

SIZE = 3  # samples of a group


def make_config(chunk_size=2, num_rollouts=2, max_oversampling=10, dynamic_sampling=True):
    return GrpoConfig(
        model=ModelSection(path="model"),
        data=DataSection(train_file="train", tokenizer_dir="tokenizer"),
        reward=RewardSection(verifier_function=("length",)),
        algorithm=AlgorithmSection(
            num_generations=SIZE, dynamic_sampling=dynamic_sampling, max_oversampling=max_oversampling
        ),
        training=TrainingSection(chunk_size=chunk_size, num_rollouts=num_rollouts),
    )


def sample(group, reward, name="", finish_reason="stop"):
    ids = np.arange(1, 4, dtype=np.int32)
    logprobs = np.array([-0.1, -1 / 3, -2.5], np.float32)
    return make_sample(
        ids[:2], ids, reward, group=group, prompt=name, logprobs=logprobs, finish_reason=finish_reason
    )


class Rounds:
    """Prompts with and without signal in a given order, by name; remembers what was asked."""

    def __init__(self, signals):
        self.signals = list(signals)
        self.asked = []
        self.num_sampled = 0

    def __call__(self, num_prompts, first_group):
        self.asked.append((num_prompts, first_group))
        samples = []
        for group in range(first_group, first_group + num_prompts):
            name = str(self.num_sampled)
            teaches = self.signals[self.num_sampled]
            self.num_sampled += 1
            samples += [sample(group, float(place == 0 and teaches), name) for place in range(SIZE)]
        return samples


def names(samples):
    """Names of the prompts of whole groups, in order."""
    assert len(samples) % SIZE == 0
    groups = [samples[start : start + SIZE] for start in range(0, len(samples), SIZE)]
    assert all(len({(item.prompt_text, item.group) for item in group}) == 1 for group in groups)
    return [int(group[0].prompt_text) for group in groups]


def test_rounds_ask_for_as_many_chunks_as_could_fill_the_step():
    #               round 1: 0 1 2 3, round 2: 4 5 (misses 1), round 3: 6 7
    rounds = Rounds([1, 0, 1, 1] + [0, 0] + [1, 1])
    step = GroupSampling(make_config()).collect(rounds, [])
    assert rounds.asked == [(4, 0), (2, 4), (2, 6)]
    assert names(step.used) == [0, 2, 3, 6] and names(step.leftover) == [7]
    assert names(step.dropped) == [1, 4, 5] and names(step.generated) == list(range(8))
    assert [item.group for item in step.used[::SIZE]] == [0, 1, 2, 3]
    assert (step.num_stale, step.num_without_signal) == (0, 0)


def test_what_was_left_over_comes_first_and_is_told_apart():
    sampling, rounds = GroupSampling(make_config()), Rounds([1, 0, 1, 1, 0, 0, 1, 1] + [1, 1, 0, 1])
    first = sampling.collect(rounds, [])
    second = sampling.collect(rounds, from_leftover(to_leftover(first.leftover)))
    assert rounds.asked[3:] == [(4, 0)], "3 groups are missing, and prompts come by chunks of 2"
    assert names(second.used) == [7, 8, 9, 11]
    assert second.num_stale == SIZE and names(second.used[second.num_stale :]) == [8, 9, 11]
    assert [item.group for item in second.used[::SIZE]] == [0, 1, 2, 3]


def test_at_the_bound_groups_without_signal_fill_the_step():
    rounds = Rounds([0, 1, 0, 0] + [0, 0, 0, 0])
    step = GroupSampling(make_config(max_oversampling=2)).collect(rounds, [])
    assert rounds.asked == [(4, 0), (4, 4)]
    assert names(step.used) == [1, 0, 2, 3] and names(step.dropped) == [4, 5, 6, 7]
    assert step.num_without_signal == 3 * SIZE and not step.leftover


def test_without_dynamic_sampling_all_that_one_round_samples_is_used():
    rounds = Rounds([0, 1, 0, 0])
    step = GroupSampling(make_config(dynamic_sampling=False)).collect(rounds, [])
    assert step.used is step.generated and names(step.used) == [0, 1, 2, 3]
    assert step.num_without_signal == 3 * SIZE and not step.leftover and not step.dropped


def test_the_metrics_of_a_step_by_hand():
    rounds = Rounds([1, 0, 1, 1, 0, 0, 1, 1] + [1, 1, 0, 1])
    sampling, ledger = GroupSampling(make_config()), SampleLedger()
    first = sampling.collect(rounds, [])
    ledger.add(first)
    second = sampling.collect(rounds, first.leftover)
    cut = with_completion(second.used[4], finish_reason="length")
    second.used[4] = cut
    assert ledger.add(second) == {
        "samples/generated": 4 * SIZE,
        "samples/used": 4 * SIZE,
        "samples/used_stale": SIZE,
        "samples/used_without_signal": 0,
        "samples/used_cut": 1,
        "samples/carried": 0,
        "samples/dropped_without_signal": SIZE,
        "samples/total_generated": 12 * SIZE,
        "samples/total_used": 8 * SIZE,
        "samples/total_dropped_without_signal": 4 * SIZE,
    }


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    share=st.floats(0, 1),
    chunk_size=st.integers(1, 5),
    num_rollouts=st.integers(1, 3),
    max_oversampling=st.integers(1, 4),
    resume_at=st.integers(0, 6),
)
def test_every_prompt_of_a_run_is_used_once_or_dropped_also_over_a_restart(
    seed, share, chunk_size, num_rollouts, max_oversampling, resume_at
):
    num_steps, num_groups = 6, chunk_size * num_rollouts
    rounds = Rounds(np.random.default_rng(seed).random(num_steps * num_groups * max_oversampling) < share)
    config = make_config(chunk_size, num_rollouts, max_oversampling)
    sampling, ledger, leftover = GroupSampling(config), SampleLedger(), []
    used, dropped, generated = [], [], 0
    for index in range(num_steps):
        if index == resume_at:
            sampling, ledger = GroupSampling(config), SampleLedger(ledger.state())
            leftover = to_leftover(from_leftover(leftover))
        step = sampling.collect(rounds, from_leftover(leftover))
        metrics = ledger.add(step)
        leftover = to_leftover(step.leftover)
        used += names(step.used)
        dropped += names(step.dropped)
        generated += metrics["samples/generated"]
        assert len(step.used) == num_groups * SIZE
        left = names(step.leftover)
        assert len(left) < chunk_size and all(rounds.signals[name] for name in left)
        assert not any(rounds.signals[name] for name in names(step.dropped))
        assert metrics["samples/total_generated"] == generated == rounds.num_sampled * SIZE
        assert sorted(used + dropped + left) == list(range(rounds.num_sampled)), "each prompt is in one place"
    assert ledger.state() == SampleTotals(
        generated=rounds.num_sampled * SIZE,
        used=len(used) * SIZE,
        dropped=len(dropped) * SIZE,
        carried=len(leftover),
    )


def test_a_lost_sample_is_noticed():
    step = GroupSampling(make_config()).collect(Rounds([1, 0, 1, 1, 0, 0, 1, 1]), [])
    with pytest.raises(AssertionError, match="24 generated are not 12 used, 3 carried over and 8 dropped"):
        SampleLedger().add(dataclasses.replace(step, dropped=step.dropped[1:]))
    ledger = SampleLedger()
    ledger.add(step)
    with pytest.raises(AssertionError, match="3 samples were carried over, 0 are used"):
        ledger.add(step)


def through_files(directory, samples):
    """What a run that is resumed from a checkpoint finds of samples left over."""
    leftover = to_leftover(samples)
    save_leftover(directory, leftover)
    return from_leftover(load_leftover(directory, json.loads(json.dumps(leftover_records(leftover)))))


def assert_equal(before, after):
    """Two records are the same, to the dtype of each array."""
    assert type(before) is type(after)
    if dataclasses.is_dataclass(before):
        for field in dataclasses.fields(before):
            assert_equal(getattr(before, field.name), getattr(after, field.name))
    elif isinstance(before, np.ndarray):
        np.testing.assert_array_equal(before, after, strict=True)
    else:
        assert before == after


def test_leftover_samples_come_back_exactly(tmp_path):
    original = with_reward(sample(4, 1 / 3, "p", "length"), failures={"length": "timeout"})
    original = with_prompt(original, source_id="math:3", verifier="length", extra={"level": 3, "tags": [None, "x"]})
    original = with_completion(
        original, spans=((1, 2), (3, 1)), num_turns=2, is_generated=np.array([True, False, True]), weights_version=1
    )
    (back,) = through_files(tmp_path, [original])
    assert_equal(original, back)


@pytest.mark.parametrize(("path", "name"), [(("prompt",), "answer"), (("reward",), "total"), ((), "response_text")])
def test_a_leftover_sample_that_lacks_a_value_is_damage(path, name):
    for change in ("less", "more"):
        (leftover,) = to_leftover([sample(4, 0.5)])
        record = json.loads(json.dumps(leftover.record))
        inner = record
        for step in path:
            inner = inner[step]
        if change == "less":
            del inner[name]
        else:
            name = "strange"
            inner[name] = 1
        with pytest.raises(DamagedDirectory, match=f"'{name}' of carried-over sample 1 is missing or new"):
            from_leftover([leftover, LeftoverSample(record, leftover.arrays)])
    with pytest.raises(DamagedDirectory, match="'reward' of carried-over sample 0"):
        from_leftover([LeftoverSample({**leftover.record, "reward": 0.5}, leftover.arrays)])


def test_leftover_samples_of_earlier_releases_are_read():
    """They held the values of prompt, completion and reward side by side, and images as they are seen."""
    record = {"group": 4, "prompt": "p", "completion": "c", "answer": "a", "finish_reason": "length", "source": "math"}
    record |= {"rewards": {"length": 0.5}, "reward": 0.25, "failures": {"length": "timeout"}, "num_turns": 2}
    record |= {"num_tool_calls": 3, "num_tool_failures": 1, "is_generated": None, "weights_version": 7}
    arrays = {"prompt_ids": np.array([5, 6], np.int32), "response_ids": np.array([1, 2], np.int32)}
    arrays |= {"rollout_logprobs": np.array([-1, -2], np.float32)}
    images = [np.full((28, 28, 3), shade, np.uint8) for shade in range(11)]
    shown = {f"image{number}": image for number, image in enumerate(images)}
    oldest = {name: value for name, value in record.items() if name not in ("source", "weights_version")}
    seen, unseen, old = from_leftover(
        [LeftoverSample(record, arrays | shown), LeftoverSample(record, arrays), LeftoverSample(oldest, arrays)]
    )
    expected = make_sample(
        [5, 6], [1, 2], 0.25, {"length": 0.5}, group=4, logprobs=[-1, -2], finish_reason="length", num_turns=2,
        num_tool_calls=3, num_tool_failures=1,
    )  # fmt: skip
    expected = with_reward(expected, failures={"length": "timeout"})
    assert_equal(old, expected)
    expected = with_completion(with_prompt(expected, source_id="math:"), weights_version=7)
    assert expected.prompt.source == unseen.prompt.source == "math"
    assert_equal(with_prompt(unseen, source_id="math:"), expected)
    assert len(seen.images) == 11
    for image, same in zip(images, seen.images, strict=True):
        np.testing.assert_array_equal(image, same, strict=True)
    with pytest.raises(DamagedDirectory, match="'answer' of carried-over sample 0"):
        from_leftover([LeftoverSample({name: record[name] for name in record if name != "answer"}, arrays)])
    with pytest.raises(DamagedDirectory, match="'strange' of carried-over sample 0"):
        from_leftover([LeftoverSample(record | {"strange": 1}, arrays)])


def test_leftover_samples_keep_their_images(tmp_path):
    images = tuple(np.full((28, 28 * (n % 3 + 1), 3), n, np.uint8) for n in range(11))
    files = tuple(map(encode_png, images))
    samples = [with_prompt(sample(0, 0.0, "p", "stop"), image_files=files[first:]) for first in (0, 10, 11)]
    for first, after in zip((0, 10, 11), through_files(tmp_path, samples), strict=True):
        assert after.prompt.image_files == files[first:]
        for image, same in zip(images[first:], after.images, strict=True):
            np.testing.assert_array_equal(image, same, strict=True)


def test_leftover_samples_keep_their_experts(tmp_path):
    choices = [np.arange(12, dtype=dtype).reshape(3, 2, 2) for dtype in (np.uint8, np.uint16)]
    samples = [with_completion(sample(0, 0.0, "p", "stop"), experts=experts) for experts in (*choices, None)]
    *back, without = through_files(tmp_path, samples)
    assert without.completion.experts is None
    for experts, same in zip(choices, back, strict=True):
        np.testing.assert_array_equal(experts, same.completion.experts, strict=True)
