"""Responses that are given so many tokens at a time: what :mod:`.segments` and :mod:`.asynchronous` are made of."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mindrlhf.checkpoint.leftover import LeftoverSample
from mindrlhf.checkpoint.manifest import DamagedDirectory
from mindrlhf.config.schema import GrpoConfig
from mindrlhf.data.mindrecord import Prompt
from mindrlhf.rollout.samples import Sample
from mindrlhf.rollout.types import Completion, GenerationRequest
from mindrlhf.training.loop.sampling.in_step import PromptSampling, Rollout


@dataclass(frozen=True)
class Response:
    """A response, or the beginning of one."""

    token_ids: np.ndarray  # int32 [tokens so far]
    logprobs: np.ndarray  # float32 [tokens so far], of the weights that generated each
    spans: tuple[tuple[int, int], ...] = ()  # (version of the weights, tokens they generated), in order
    finish_reason: str = ""  # "" while it goes on

    def followed_by(self, completion: Completion, max_length: int) -> "Response":
        """Return the response with what was generated next; ``max_length`` is of a whole one, in tokens."""
        spans, count = list(self.spans), len(completion.token_ids)
        if spans and spans[-1][0] == completion.weights_version:
            count += spans.pop()[1]
        token_ids = np.concatenate([self.token_ids, completion.token_ids]).astype(np.int32, copy=False)
        is_cut = completion.finish_reason == "length" and len(token_ids) < max_length
        return Response(
            token_ids,
            np.concatenate([self.logprobs, completion.logprobs]).astype(np.float32, copy=False),
            (*spans, (completion.weights_version, count)),
            "" if is_cut else completion.finish_reason,
        )


@dataclass(frozen=True)
class Group:
    """The responses to one prompt."""

    number: int  # of the prompt among all that the run has begun, from 0
    prompt: int  # its index in the file
    responses: tuple[Response, ...]

    @property
    def is_complete(self) -> bool:
        """Whether none of the responses goes on."""
        return all(response.finish_reason for response in self.responses)


class SegmentRounds:
    """Begins groups, gives all responses that go on a segment of tokens, and scores complete groups.

    A round is the same whatever the number of servers and their speed: it follows from the groups and the weights.

    Args:
        rollout: its generator generates, its sampler scores.
        prompts: the prompts in the order of the stream.
        max_segments: most versions of the weights that a response is made with, the last of which ends it; None: any.
    """

    def __init__(self, config: GrpoConfig, rollout: Rollout, prompts: PromptSampling, max_segments: int | None):
        self._section = config.rollout
        self._seed = config.run.seed
        self._num_responses = config.algorithm.num_generations
        self._rollout = rollout
        self._prompts = prompts
        self._max_segments = max_segments

    def begin(self, count: int) -> list[Group]:
        """Return the next so many groups of the stream, whose responses have no tokens yet."""
        if count < 1:
            return []
        first = self._prompts.stream.num_taken
        nothing = Response(np.zeros(0, np.int32), np.zeros(0, np.float32))
        new = enumerate(self._prompts.stream.next(count), start=first)
        return [Group(number, prompt, (nothing,) * self._num_responses) for number, prompt in new]

    def read(self, groups: Sequence[Group]) -> dict[int, Prompt]:
        """Return the prompts of groups by the group's number."""
        return dict(zip([group.number for group in groups], self._prompts.read([group.prompt for group in groups])))

    def give_segment(self, groups: Sequence[Group], records: Mapping[int, Prompt], version: int) -> list[Group]:
        """Return the groups with up to so many tokens more for each response that goes on."""
        places = [
            (group.number, index)
            for group in groups
            for index, response in enumerate(group.responses)
            if not response.finish_reason
        ]
        by_number = {group.number: list(group.responses) for group in groups}
        requests = [
            self._request(position, records[number].prompt_ids, number, index, by_number[number][index], version)
            for position, (number, index) in enumerate(places)
        ]
        generator, sampling = self._rollout.generator, self._prompts.sampling
        for completion in generator.generate(requests, sampling) if requests else ():
            number, index = places[completion.request_id]
            before = by_number[number][index]
            by_number[number][index] = before.followed_by(completion, self._section.max_response_length)
        return [replace(group, responses=tuple(by_number[group.number])) for group in groups]

    def _request(
        self, position: int, prompt_ids: np.ndarray, number: int, index: int, response: Response, version: int
    ) -> GenerationRequest:
        length = len(response.token_ids)
        remaining = self._section.max_response_length - length
        earlier = sum(span_version != version for span_version, _ in response.spans)
        is_last = self._max_segments is not None and earlier + 1 >= self._max_segments
        seed = np.random.SeedSequence([self._seed, number, index, length]).generate_state(1, np.uint64)[0]
        return GenerationRequest(
            position,
            (*prompt_ids.tolist(), *response.token_ids.tolist()),
            num_samples=1,
            seed=int(seed) >> 1,
            max_tokens=remaining if is_last else min(self._section.segment_tokens, remaining),
            num_begun=length,
        )

    def score(self, groups: Sequence[Group], records: Mapping[int, Prompt]) -> list[Sample]:
        """Return the samples of complete groups, with their rewards."""

        def completions() -> Iterator[Completion]:
            for place, group in enumerate(groups):
                for index, response in enumerate(group.responses):
                    yield Completion(
                        request_id=place,
                        sample_index=index,
                        token_ids=response.token_ids,
                        logprobs=response.logprobs,
                        finish_reason=response.finish_reason,
                        weights_version=response.spans[0][0],
                        spans=response.spans,
                    )

        prompts = [records[group.number] for group in groups]
        return self._rollout.sampler.score(prompts, self._num_responses, completions())


def to_leftover(groups: Sequence[Group]) -> list[LeftoverSample]:
    """Return groups as a checkpoint holds them, in order."""
    return [
        LeftoverSample(
            {
                "number": group.number,
                "prompt": int(group.prompt),
                "spans": [list(span) for span in response.spans],
                "finish_reason": response.finish_reason,
            },
            {"token_ids": response.token_ids, "logprobs": response.logprobs},
        )
        for group in groups
        for response in group.responses
    ]


def from_leftover(leftover: Sequence[LeftoverSample], num_responses: int) -> list[Group]:
    """Return what ``to_leftover`` was called on.

    Raises:
        DamagedDirectory: the responses are not whole groups of ``num_responses``.
    """
    groups: dict[tuple[int, int], list[Response]] = {}
    for item in leftover:
        try:
            record, arrays = item.record, item.arrays
            spans = tuple((int(version), int(count)) for version, count in record["spans"])
            response = Response(arrays["token_ids"], arrays["logprobs"], spans, record["finish_reason"])
            groups.setdefault((record["number"], record["prompt"]), []).append(response)
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedDirectory(f"the checkpoint is damaged: a response that goes on is none ({error})") from error
    for (number, _), responses in groups.items():
        if len(responses) != num_responses:
            raise DamagedDirectory(
                f"the checkpoint is damaged: prompt {number} has {len(responses)} of {num_responses} responses"
            )
    return [Group(number, prompt, tuple(responses)) for (number, prompt), responses in groups.items()]
