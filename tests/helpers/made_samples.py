"""Samples put together by hand, and the same with some values changed."""

import dataclasses

import numpy as np

from mindrlhf.data.mindrecord import Prompt, no_ids
from mindrlhf.rewards.types import RewardResult
from mindrlhf.rollout.samples import Sample
from mindrlhf.rollout.types import Completion


def make_sample(
    prompt_ids,
    response_ids,
    reward=0.0,
    rewards=None,
    *,
    group=0,
    prompt="p",
    response="c",
    answer="a",
    source="",
    logprobs=None,
    finish_reason="stop",
    **completion,
) -> Sample:
    """``rewards`` is by default {"length": reward}; ``completion`` holds further fields of the completion."""
    token_ids = np.array(response_ids, np.int32)
    logprobs = np.zeros(len(token_ids), np.float32) if logprobs is None else np.asarray(logprobs, np.float32)
    return Sample(
        group=group,
        prompt=Prompt(np.array(prompt_ids, np.int32), no_ids(), answer, source and f"{source}:1"),
        completion=Completion(0, 0, token_ids, logprobs, finish_reason, 0, **completion),
        reward=RewardResult(0, {"length": reward} if rewards is None else rewards, reward),
        prompt_text=prompt,
        response_text=response,
    )


def with_prompt(sample: Sample, **changed) -> Sample:
    """Return the sample with other values of its prompt."""
    return dataclasses.replace(sample, prompt=dataclasses.replace(sample.prompt, **changed))


def with_completion(sample: Sample, **changed) -> Sample:
    """Return the sample with other values of its completion."""
    return dataclasses.replace(sample, completion=dataclasses.replace(sample.completion, **changed))


def with_reward(sample: Sample, **changed) -> Sample:
    """Return the sample with other values of its reward."""
    return dataclasses.replace(sample, reward=dataclasses.replace(sample.reward, **changed))
