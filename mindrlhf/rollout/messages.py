"""Requests and completions as the arrays of a message (:mod:`mindrlhf.system.wire`), to a server or to another node."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mindrlhf.rollout.sent_experts import pack_experts, unpack_experts
from mindrlhf.rollout.sent_images import pack_images, unpack_images
from mindrlhf.rollout.types import Completion, GenerationRequest, SamplingParams

_FINISH_REASONS = ("stop", "length")


def pack_sampling(sampling: SamplingParams) -> dict[str, Any]:
    """Return the arguments of vLLM's own SamplingParams."""
    return dataclasses.asdict(sampling) | {"stop_token_ids": list(sampling.stop_token_ids)}


def unpack_sampling(values: Mapping[str, Any]) -> SamplingParams:
    """Return what :func:`pack_sampling` was given."""
    return SamplingParams(**{**values, "stop_token_ids": tuple(values["stop_token_ids"])})


def pack_requests(requests: Sequence[GenerationRequest], sampling: SamplingParams) -> dict[str, np.ndarray]:
    """Return the arrays of requests."""
    prompts = [request.prompt_ids for request in requests]
    lengths = [len(prompt) for prompt in prompts]
    return {
        "request_ids": np.array([request.request_id for request in requests], np.int64),
        "num_samples": np.array([request.num_samples for request in requests], np.int32),
        "seeds": np.array([request.seed for request in requests], np.int64),
        "max_tokens": np.array([request.token_limit(sampling) for request in requests], np.int32),
        "prompt_lengths": np.array(lengths, np.int64),
        "prompt_ids": np.fromiter(itertools.chain.from_iterable(prompts), np.int32, sum(lengths)),
    } | pack_images([request.images for request in requests])


def unpack_requests(arrays: Mapping[str, np.ndarray]) -> list[GenerationRequest]:
    """Return what :func:`pack_requests` was given, each request with its own limit of tokens."""
    prompts = np.split(arrays["prompt_ids"], np.cumsum(arrays["prompt_lengths"])[:-1])
    names = ("request_ids", "num_samples", "seeds", "max_tokens")
    images = [tuple(image.pixels for image in own) for own in unpack_images(arrays)]
    return [
        GenerationRequest(name, tuple(prompt.tolist()), num_samples, seed, max_tokens, images=own)
        for name, num_samples, seed, max_tokens, prompt, own in zip(
            *(arrays[name].tolist() for name in names), prompts, images
        )
    ]


def pack_completions(completions: Sequence[Completion]) -> dict[str, np.ndarray]:
    """Return the arrays of completions by one version of the weights, as a server sends them."""
    return {
        "request_ids": np.array([one.request_id for one in completions], np.int64),
        "sample_indices": np.array([one.sample_index for one in completions], np.int32),
        "lengths": np.array([len(one.token_ids) for one in completions], np.int32),
        "finish_reasons": np.array([_FINISH_REASONS.index(one.finish_reason) for one in completions], np.uint8),
        "token_ids": np.concatenate([one.token_ids for one in completions]),
        "logprobs": np.concatenate([one.logprobs for one in completions]),
    } | pack_experts([one.experts for one in completions])


def unpack_completions(header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Iterator[Completion]:
    """Yield the completions of a message."""
    ends = np.cumsum(arrays["lengths"])
    experts = unpack_experts(arrays, len(ends))
    for i, end in enumerate(ends):
        start = end - arrays["lengths"][i]
        yield Completion(
            request_id=int(arrays["request_ids"][i]),
            sample_index=int(arrays["sample_indices"][i]),
            token_ids=arrays["token_ids"][start:end],
            logprobs=arrays["logprobs"][start:end],
            finish_reason=_FINISH_REASONS[arrays["finish_reasons"][i]],
            weights_version=header["weights_version"],
            experts=experts[i],
        )
