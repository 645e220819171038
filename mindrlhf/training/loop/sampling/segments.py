"""Partial rollout: responses are given so many tokens at a time, and long ones go on with newer weights.

A step that waits for the longest of its responses leaves most of the generator idle. Here more prompts are in flight
than a step trains on. In a round all their responses get at most ``rollout.segment_tokens`` tokens; that is repeated
until enough groups are complete. The others go on with the weights that come next, from the tokens they have (partial
rollout of Kimi k1.5, arXiv:2501.12599). A response is made with ``rollout.max_segments`` weights at most: in the last
it is finished. A conversation that has ended its turn with a round begins the next with the answers of its tools.

With v(i) for the weights that step i begins with, from 0, batch for the groups of a step and k for
``rollout.off_policy_steps``, v(i) begin groups while begun < (i + k + in_flight) * batch. Within the step, k = 0, a
step takes the oldest groups that are complete. Beside the training group n, from 0, is of block n // batch, and a step
takes the groups that were complete first, but every one of an earlier block than its own number: each is overtaken by
one step at most. So what steps train on follows from the order in which groups were complete, whenever anybody looks.

With dynamic sampling a group that teaches nothing is dropped when it is complete, and the next prompt takes its place
among the groups, up to ``algorithm.max_oversampling`` prompts for each place.

Counts of tokens decide, never clocks: a round is the same whatever the number of servers and their speed.
"""

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain

from mindrlhf.config.schema import GrpoConfig
from mindrlhf.data.mindrecord import Prompt
from mindrlhf.rollout.agents.records import EpisodeUnderWay
from mindrlhf.rollout.partial import NOTHING, followed_by, start_of_turn
from mindrlhf.rollout.samples import Sample, derived_seed, groups_that_teach
from mindrlhf.rollout.types import Completion, GenerationRequest
from mindrlhf.system.progress import counted
from mindrlhf.system.records import record
from mindrlhf.training.checkpoints.run import Progress
from mindrlhf.training.loop.sampling.in_step import PromptSampling
from mindrlhf.training.loop.step import StepSamples

Scored = tuple[list[Sample], list[Sample]]  # the samples of a group and its greedy one


@record
@dataclass(frozen=True)
class Group:
    """The responses to one prompt, or their beginnings, whose ``finish_reason`` is ""; greedy ones come last."""

    number: int  # of the prompt among all that the run has begun, from 0
    prompt: int  # its index in the file
    responses: tuple[Completion | EpisodeUnderWay, ...]
    place: int  # among the groups that are trained on, from 0: ``number`` where none was dropped
    num_tries: int = 1  # prompts that were begun for the place
    is_dropped: bool = False

    @property
    def is_complete(self) -> bool:
        """True if none of the responses goes on."""
        return all(response.finish_reason for response in self.responses)

    def is_of(self, version: int) -> bool:
        """Return whether all tokens are of one version of the weights."""
        return all(span == version for response in self.responses for span, _ in response.spans)


# What a step trains on, and what was dropped since the one before was complete.
Chosen = tuple[list[Group], list[Group]]


class Segments:
    """Makes the samples of steps by rounds of segments, in the place of
    :class:`mindrlhf.training.loop.sampling.in_step.WholeSteps`.
    """

    def __init__(
        self, config: GrpoConfig, prompts: PromptSampling, progress: Progress, num_steps: int, *, needs_greedy: bool
    ):
        section = config.rollout
        self._section, self._seed = section, config.run.seed
        self._prompts, self._progress, self._num_steps = prompts, progress, num_steps
        self._num_responses = config.algorithm.num_generations
        self._num_greedy = int(needs_greedy)
        self._num_groups = config.training.chunk_size * config.training.num_rollouts
        self._lag = section.off_policy_steps
        self._in_flight = 1.0 if section.asynchronous else section.in_flight
        self._max_segments = math.inf if section.asynchronous else section.max_segments
        self._is_dynamic = config.algorithm.dynamic_sampling
        self._max_tries = config.algorithm.max_oversampling
        # Scores complete groups beside what is generated next.
        self._scorer = ThreadPoolExecutor(1, thread_name_prefix="scores") if self._lag else None
        self.next_step = progress.step
        self._going_on: list[Group] = []
        self._complete: list[Group] = []  # in the order in which they were
        self._dropped: list[Group] = []  # the same
        self._prompts_of: dict[int, Prompt] = {}  # by the group's number, like the next
        self._scored: dict[int, Future[Scored] | Scored] = {}
        self._free: list[tuple[int, int]] = []  # places without a group, each with the number of its next try
        self._num_replaced = 0
        self._overtakers: set[int] = set()  # places, of blocks that later steps begin with, that are taken already

    def advance(self, version: int) -> list[Chosen]:
        """Give every response that goes on a segment of tokens, and begin with new ones where the bound allows."""
        self._going_on += self._begin(self._to_begin(version))
        with self._prompts.generating():
            groups = self._give_segment(version)
        self._going_on = []
        for group in groups:
            self._take_up(group)
        if not self._lag:
            self._complete.sort(key=lambda group: group.place)
        return self._choose()

    def has_work(self, version: int) -> bool:
        """Return whether a response goes on or may be begun."""
        return bool(self._going_on or self._to_begin(version))

    def take(self, step: Chosen, version: int) -> StepSamples:
        """Return the samples of a step; those of older weights first, as the others alone tell how far generator and
        trainer are apart."""
        groups = sorted(step[0], key=lambda group: group.is_of(version))
        if missing := [group for group in groups if group.number not in self._scored]:
            with self._prompts.generating():
                self._scored |= {group.number: found for group, found in zip(missing, self._score(missing))}
        numbers = [group.number for group in (*groups, *step[1])]
        found = [_result(self._scored.pop(number)) for number in numbers]
        for number in numbers:
            del self._prompts_of[number]
        samples = [[replace(one, group=place) for one in members] for place, (members, _) in enumerate(found)]
        greedy = [replace(one, group=place) for place, (_, likeliest) in enumerate(found) for one in likeliest]
        count, size = len(groups), self._num_responses
        used, dropped = list(chain(*samples[:count])), list(chain(*samples[count:]))
        return StepSamples(
            generated=[*used, *dropped] if dropped else used,
            used=used,
            num_stale=size * sum(not group.is_of(version) for group in groups),
            num_without_signal=size * sum(not _teaches(members) for members in samples[:count]),
            dropped=dropped,
            greedy=greedy[: count * self._num_greedy],
            version=version,
            num_unfinished=sum(not one.finish_reason for group in self._going_on for one in group.responses),
        )

    def save(self, ready: Sequence[Chosen]) -> None:
        """Put all groups that are not trained on into ``Progress``, and have them scored: verifiers are free then."""
        for scored in self._scored.values():
            _result(scored)
        groups = [group for chosen, dropped in ready for group in (*dropped, *chosen)]
        groups += [*self._dropped, *self._complete, *self._going_on]
        self._progress.leftover = groups if self._lag else sorted(groups, key=lambda group: group.place)
        if self._is_dynamic:
            state = self._progress.algorithm
            state.num_replaced, state.free_places = self._num_replaced, [list(entry) for entry in self._free]

    def restore(self) -> list[Chosen]:
        """Take up the groups of ``Progress``: what they make complete is what it was."""
        groups: list[Group] = self._progress.leftover
        prompts = self._prompts.read([group.prompt for group in groups])
        self._prompts_of = {group.number: prompt for group, prompt in zip(groups, prompts)}
        state = self._progress.algorithm
        self._num_replaced, self._free = state.num_replaced or 0, [tuple(entry) for entry in state.free_places or ()]
        first_open = self.next_step * self._num_groups
        self._overtakers = {*range(first_open, self._num_opened)} - {group.place for group in groups}
        self._overtakers -= {place for place, _ in self._free}
        chosen: list[Chosen] = []
        for group in groups:
            self._take_up(group)
            chosen += self._choose() if self._lag else []
        return chosen

    def close(self) -> None:
        """End the scoring."""
        if self._scorer is not None:
            self._scorer.shutdown(cancel_futures=True)

    @property
    def _num_opened(self) -> int:
        """Places that have, or had, a group."""
        return self._prompts.stream.num_taken - self._num_replaced

    def _to_begin(self, version: int) -> list[tuple[int, int]]:
        """Return the places for which groups may be begun with weights, each with the number of its try."""
        most = (version - 1 + self._lag) * self._num_groups + math.ceil(self._in_flight * self._num_groups)
        # Toward the end no more is begun than the last steps train on.
        most = min(most, self._num_steps * self._num_groups)
        return [*self._free, *((place, 1) for place in range(self._num_opened, most))]

    def _begin(self, places: Sequence[tuple[int, int]]) -> list[Group]:
        """Return groups of the next prompts of the stream, whose responses have no tokens yet."""
        if not places:
            return []
        first = self._prompts.stream.num_taken
        prompts = self._prompts.stream.next(len(places))
        self._num_replaced, self._free = self._num_replaced + len(self._free), []
        self._prompts_of |= dict(enumerate(self._prompts.read(prompts), first))
        nothing = (NOTHING,) * (self._num_responses + self._num_greedy)
        return [
            Group(number, int(prompt), nothing, *place)
            for number, (prompt, place) in enumerate(zip(prompts, places, strict=True), first)
        ]

    def _give_segment(self, version: int) -> list[Group]:
        """Return the groups with up to so many tokens more for each response that goes on."""
        found = {
            (one.number, index): response for one in self._going_on for index, response in enumerate(one.responses)
        }
        source, plain = self._prompts.sampler.source, self._prompts.sampling
        returns_all = getattr(source, "continues", False)  # else what was generated next
        images = {one.number: self._prompts_of[one.number].images for one in self._going_on}  # unpacked once
        for sampling, is_greedy in ((plain, False), (replace(plain, temperature=0.0, top_p=1.0, top_k=0), True)):
            under_way = [one for one, response in found.items() if not response.finish_reason]
            places = [one for one in under_way if (one[1] >= self._num_responses) == is_greedy]
            requests = [
                replace(self._request(one, found[one], version), request_id=position, images=images[one[0]])
                for position, one in enumerate(places)
            ]
            completions = source.generate(requests, sampling) if requests else ()
            for completion in counted(completions, len(requests), "responses"):
                place = places[completion.request_id]
                before = found[place]
                found[place] = completion if returns_all else followed_by(before, completion, sampling.max_tokens)
        return [
            replace(one, responses=tuple(found[one.number, index] for index in range(len(one.responses))))
            for one in self._going_on
        ]

    def _request(self, place: tuple[int, int], response: Completion, version: int) -> GenerationRequest:
        number, index = place
        record = self._prompts_of[number]
        length = len(response.token_ids)
        remaining = self._section.max_response_length - length
        is_last = sum(span_version != version for span_version, _ in response.spans) + 1 >= self._max_segments
        return GenerationRequest(
            0,
            (*record.prompt_ids.tolist(), *response.token_ids.tolist()),
            num_samples=1,
            seed=derived_seed(self._seed, number, index, length),
            max_tokens=remaining if is_last else min(self._section.segment_tokens, remaining),
            num_begun=length - (0 if response.is_generated is None else start_of_turn(response.is_generated)),
            answer=record.answer,
            extra=record.extra,
            begun=response,
            response=number * (self._num_responses + self._num_greedy) + index,
        )

    def _take_up(self, group: Group) -> None:
        """Have a group go on; once it is complete keep it for a step, or drop it where it teaches nothing."""
        if not group.is_complete:
            self._going_on.append(group)
            return
        if self._scorer is not None:
            self._scored[group.number] = self._scorer.submit(lambda: self._score([group])[0])
        elif self._is_dynamic:
            self._scored[group.number] = self._score([group])[0]
        may_drop = self._is_dynamic and not group.is_dropped and group.num_tries < self._max_tries
        if may_drop and not _teaches(_result(self._scored[group.number])[0]):
            self._free.append((group.place, group.num_tries + 1))
            group = replace(group, is_dropped=True)
        (self._dropped if group.is_dropped else self._complete).append(group)

    def _choose(self) -> list[Chosen]:
        """Return the steps that are complete; within the step at most one, as the next begins with newer weights."""
        chosen: list[Chosen] = []
        while self.next_step < self._num_steps and self._can_choose() and (self._lag or not chosen):
            first_of_block = self.next_step * self._num_groups
            due_first = sorted(self._complete, key=lambda one: one.place >= first_of_block)
            numbers = {group.number for group in due_first[: self._num_groups]}
            found = [group for group in self._complete if group.number in numbers]
            self._complete = [group for group in self._complete if group.number not in numbers]
            chosen.append((found, self._dropped))
            self._dropped = []
            self.next_step += 1
            taken = {group.place for group in found} | self._overtakers
            self._overtakers = {place for place in taken if place >= first_of_block + self._num_groups}
        return chosen

    def _can_choose(self) -> bool:
        """Return whether a step can be chosen.

        Beside the training every group that the step must train on is complete: as many as were taken before them.
        Within the step all responses are complete of which these weights are the last.
        """
        if len(self._complete) < self._num_groups:
            return False
        if self._lag:
            first_of_block = self.next_step * self._num_groups
            return sum(one.place < first_of_block for one in self._complete) == len(self._overtakers)
        under_way = (one for group in self._going_on for one in group.responses if not one.finish_reason)
        return all(len({version for version, _ in one.spans}) < self._max_segments for one in under_way)

    def _score(self, groups: Sequence[Group]) -> list[Scored]:
        """Return for each complete group its samples with their rewards, and the greedy ones."""
        if not groups:
            return []
        records = [self._prompts_of[group.number] for group in groups]
        sampler, count = self._prompts.sampler, self._num_responses

        def completions(first: int, end: int) -> Iterator[Completion]:
            for position, group in enumerate(groups):
                for index, response in enumerate(group.responses[first:end]):
                    version = response.spans[0][0]
                    yield replace(response, request_id=position, sample_index=index, weights_version=version)

        samples = sampler.score(records, count, completions(0, count))
        greedy = sampler.score(records, 1, completions(count, count + 1)) if self._num_greedy else []
        return [
            (samples[position * count : (position + 1) * count], greedy[position : position + 1])
            for position in range(len(groups))
        ]


def _result(scored: "Future[Scored] | Scored") -> Scored:
    return scored.result() if isinstance(scored, Future) else scored


def _teaches(samples: Sequence[Sample]) -> bool:
    """Return whether the verifiers' rewards of a group differ."""
    return bool(groups_that_teach(samples)[1].all())
