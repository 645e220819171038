"""Dynamic sampling over scripted rounds of sampling: which groups a step gets; every sample is accounted for."""

import dataclasses

import numpy as np
import pytest
from configs import grpo_config
from hypothesis import given, settings
from hypothesis import strategies as st
from made_samples import make_sample, with_completion, with_prompt, with_reward
from saved_progress import stored

from mindrlhf.checkpoint.algorithm_state import SampleTotals
from mindrlhf.images.pixels import encode_png
from mindrlhf.training.loop.report import SampleLedger
from mindrlhf.training.loop.sampling.in_step import GroupSampling, with_images, without_images

SIZE = 3  # samples of a group


def make_config(chunk_size=2, num_rollouts=2, max_oversampling=10, dynamic_sampling=True):
    return grpo_config(
        algorithm={"num_generations": SIZE, "dynamic_sampling": dynamic_sampling, "max_oversampling": max_oversampling},
        training={"chunk_size": chunk_size, "num_rollouts": num_rollouts},
    )


def sample(group, reward, name="", finish_reason="stop"):
    ids = np.arange(1, 4, dtype=np.int32)
    logprobs = np.array([-0.1, -1 / 3, -2.5], np.float32)
    return make_sample(ids[:2], ids, reward, group=group, prompt=name, logprobs=logprobs, finish_reason=finish_reason)


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
    second = sampling.collect(rounds, first.leftover)
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


@settings(max_examples=60)
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
        step = sampling.collect(rounds, leftover)
        metrics = ledger.add(step)
        leftover = step.leftover
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
    return list(map(with_images, stored(list(map(without_images, samples)), directory / "step")))


def assert_equal(before, after):
    """Two records are the same, to the dtype of each array."""
    assert type(before) is type(after)
    if dataclasses.is_dataclass(before):
        for field in dataclasses.fields(before):
            assert_equal(getattr(before, field.name), getattr(after, field.name))
    elif isinstance(before, tuple):
        for one, other in zip(before, after, strict=True):
            assert_equal(one, other)
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
    image = np.full((28, 28, 3), 7, np.uint8)
    original = with_prompt(original, image_files=(encode_png(image), encode_png(image + 1)))
    original = dataclasses.replace(original, images=(image, image + 1))
    (back,) = through_files(tmp_path, [original])
    assert_equal(original, back)
