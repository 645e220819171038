"""Sampling notes the pass rates of its prompts, so that those without a lesson rest; a resumed run draws the same."""

import contextlib

import numpy as np
from configs import grpo_config
from made_samples import make_sample

from mindrlhf.data.mindrecord import Prompt
from mindrlhf.observe.timing import StageTimer
from mindrlhf.training.loop.difficulty import DifficultyStream, pass_rates
from mindrlhf.training.loop.sampling.in_step import PromptSampling

# Of six prompts: hopeless, four with a lesson, easy.
RIGHT = {0: (0, 0), 1: (1, 0), 2: (0, 1), 3: (1, 0), 4: (0, 1), 5: (1, 1)}


class Prompts:
    path = "train.mindrecord"

    class header:
        images = None
        columns = ("level",)

    def __len__(self):
        return 6

    def read(self, indices):
        nothing = np.zeros(0, np.int32)
        return [Prompt(np.array([i], np.int32), nothing, "a", "s:1", extra={"level": 6 - i}) for i in indices]


class Sampler:
    def __init__(self):
        self.drawn = []

    def sample(self, records, num_samples, sampling, seed_path, chunk_size, first_group):
        numbers = [int(record.prompt_ids[0]) for record in records]
        self.drawn.append(numbers)
        return [
            make_sample([number], [1], 9.0, {"right": float(value), "length": 9.0}, group=first_group + place)
            for place, number in enumerate(numbers)
            for value in RIGHT[number]
        ]


def sampling(stream):
    config = grpo_config(
        reward={"verifier_function": ("file.py:right", "length")},
        algorithm={"num_generations": 2, "rest_epochs": 1},
        training={"chunk_size": 2, "num_rollouts": 1},
    )
    return PromptSampling(config, Prompts(), stream, Sampler(), (0,), StageTimer(), contextlib.nullcontext)


def draw(prompts, steps):
    for step in steps:
        prompts.sample(step, [], needs_greedy=False)
    return prompts.sampler.drawn


def test_hopeless_and_easy_prompts_rest_for_an_epoch():
    stream = DifficultyStream(6, 0, True, 1)
    drawn = draw(sampling(stream), range(8))
    epochs = [sum(drawn[:3], []), sum(drawn[3:5], [])]
    assert sorted(epochs[0]) == [0, 1, 2, 3, 4, 5]
    # What the last step of an epoch finds out is known when the next epoch has begun.
    late = {*drawn[2]} & {0, 5}
    assert {*epochs[1]} >= {1, 2, 3, 4} - {*drawn[5]} and not {*epochs[1]} & ({0, 5} - late)
    assert stream.rates[0][0] == 0.0 and stream.rates[5][0] == 1.0 and stream.rates[1][0] == 0.5


def test_the_pass_rate_is_the_mean_of_the_first_verifier_within_0_and_1():
    parts = [{"f": 0.25}, {"f": 0.75}, {"f": -1.0}, {"f": 3.0}, {"g": 1.0}, {"g": 1.0}]
    samples = [make_sample([1], [1], 0.0, part, group=place // 2) for place, part in enumerate(parts)]
    np.testing.assert_array_equal(pass_rates(samples, 2, "a/b.py:f"), [0.5, 0.5, np.nan])
