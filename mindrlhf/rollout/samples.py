"""From prompts to scored samples: generation and verification, overlapped."""

import dataclasses
import math
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from mindrlhf.algorithms.advantages import groups_with_signal
from mindrlhf.data.mindrecord import Prompt
from mindrlhf.data.pictures.reader import shown_ids
from mindrlhf.data.tokenizers import Tokenizer
from mindrlhf.errors import RunFailure
from mindrlhf.observe.fingerprint import digest_arrays, digest_json
from mindrlhf.observe.samples import SampleRecord
from mindrlhf.rewards.pool import RewardPool
from mindrlhf.rewards.selection import split_choice
from mindrlhf.rewards.types import RewardInput, RewardResult
from mindrlhf.rollout.types import Completion, CompletionSource, GenerationRequest, SamplingParams
from mindrlhf.system import timeline
from mindrlhf.system.progress import counted
from mindrlhf.system.records import record
from mindrlhf.system.terminal import visible
from mindrlhf.tools.environments import CHOICE

# Samples of a run with a log-probability that is not finite, before it ends.
MAX_NOT_FINITE = 3


@record
@dataclass(frozen=True)
class Sample:
    """One response to one prompt: the record of the prompt, its completion, and what the rewards made of it."""

    group: int  # index of the prompt among those asked for together
    prompt: Prompt
    completion: Completion
    reward: RewardResult
    prompt_text: str  # special tokens included, an image as one of its tokens
    response_text: str  # as verifiers read it: without special tokens
    images: tuple[np.ndarray, ...] = ()  # those of the prompt, decoded once for all of its samples

    @property
    def num_generated(self) -> int:
        """Response tokens that the model generated; the rest is of tools."""
        return len(self.completion.logprobs)

    @property
    def is_scored(self) -> bool:
        """False where a failure that the policy did not cause left it without a reward."""
        return not self.reward.unscored


class SampleRewards(Protocol):
    """Rewards that need all samples at once."""

    def add_rewards(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return the samples with further rewards."""


class Sampler:
    """Samples completions from a generator and has them verified while others are still being generated.

    Args:
        generator: completes prompts; it is the attribute ``source``.
        rewards: the verifiers; None when there are none.
        tokenizer: of the model.
        reward_model: scores the samples when all are there; None when there is no such model.
    """

    def __init__(
        self,
        generator: CompletionSource,
        rewards: RewardPool | None,
        tokenizer: Tokenizer,
        reward_model: SampleRewards | None = None,
    ):
        self.source = generator
        self._rewards = rewards
        self._tokenizer = tokenizer
        self.reward_model = reward_model
        self._reward_wait_s = 0.0
        self._num_not_finite = 0

    def sample(
        self,
        records: Sequence[Prompt],
        num_samples: int,
        sampling: SamplingParams,
        seed_path: Sequence[int],
        chunk_size: int = 0,
        first_group: int = 0,
    ) -> list[Sample]:
        """Return ``num_samples`` samples of each prompt, ordered by prompt and sample index.

        Args:
            records: the prompts.
            num_samples: samples per prompt.
            sampling: how to sample.
            seed_path: integers, such as run seed and step, that with the prompt's position seed its samples.
            chunk_size: prompts sent to the generator at a time; 0 sends all.
            first_group: position of the first prompt among all that share the seed path; groups are numbered from it.
        """
        requests = [
            GenerationRequest(
                index,
                tuple(record.prompt_ids.tolist()),
                num_samples,
                derived_seed(*seed_path, first_group + index),
                images=record.images,
                answer=record.answer,
                extra=record.extra,
            )
            for index, record in enumerate(records)
        ]

        def completions() -> Iterator[Completion]:
            for start in range(0, len(requests), chunk_size or len(requests)):
                chunk = requests[start : start + (chunk_size or len(requests))]
                yield from self.source.generate(chunk, sampling)

        return self.score(records, num_samples, completions(), first_group)

    def score(
        self, records: Sequence[Prompt], num_samples: int, found: Iterable[Completion], first_group: int = 0
    ) -> list[Sample]:
        """Return the samples that completions make, ordered by prompt and sample index; see ``sample``.

        Args:
            found: all completions of all prompts, in any order; ``request_id`` is the place of the prompt. Each is
                verified while the next are awaited.

        Raises:
            RunFailure: a response without any token.
        """
        prompts = [self._prompt_text(record) for record in records]
        images = [record.images for record in records]  # unpacked once for all samples of a prompt
        completions: dict[int, Completion] = {}
        texts: dict[int, str] = {}
        unscored: dict[int, list[RewardInput]] = {}  # samples of prompts that are not complete
        for completion in counted(found, len(records) * num_samples, "samples"):
            place = completion.request_id * num_samples + completion.sample_index
            if len(completion.token_ids) == 0:
                raise RunFailure(
                    f"the generator gave an empty response to the prompt {prompts[completion.request_id][:80]!r}: a "
                    "reward needs a token to stand at, so every response has one at least, the stop token"
                )
            self._check_finite(completion, prompts[completion.request_id])
            completions[place] = completion
            agent = completion.agent
            texts[place] = self._tokenizer.decode(completion.token_ids.tolist()) if agent is None else agent.text
            if self._rewards is not None:
                waiting = self._reward_input(place, completion, texts[place], prompts, records)
                if self._rewards.reads_steps:
                    waiting = dataclasses.replace(waiting, **self._step_texts(completion))
                self._submit(waiting, unscored, num_samples)
        if self._rewards is not None:
            start_s = time.perf_counter()
            with timeline.span("waiting for the verifiers"):
                results = {result.index: result for result in self._rewards.results()}
            self._reward_wait_s += time.perf_counter() - start_s
        else:
            results = {place: RewardResult(place, parts={}, total=0.0) for place in completions}
        expected = len(records) * num_samples
        assert len(completions) == len(results) == expected, (
            f"{expected} samples were asked for, {len(completions)} generated, {len(results)} verified"
        )
        samples = []
        for place in range(expected):
            request, reason = place // num_samples, completions[place].unscored
            samples.append(
                Sample(
                    group=first_group + request,
                    prompt=records[request],
                    completion=completions[place],
                    reward=RewardResult(place, {}, math.nan, unscored=reason) if reason else results[place],
                    prompt_text=prompts[request],
                    response_text=texts[place],
                    images=images[request],
                )
            )
        return self.add_model_rewards(samples)

    def _check_finite(self, completion: Completion, prompt: str) -> None:
        """Say so where the generator gave a log-probability that is not finite.

        Raises:
            RunFailure: it is the third time.
        """
        if np.isfinite(completion.logprobs).all():
            return
        self._num_not_finite += 1
        what = f"sample {completion.sample_index} of the prompt {prompt[-80:]!r} is left out: {completion.unscored}"
        if self._num_not_finite >= MAX_NOT_FINITE:
            raise RunFailure(f"{what}; it is number {self._num_not_finite} of this run: the generator is at fault")
        print(f"mindrlhf: {visible(what)}", file=sys.stderr, flush=True)

    def add_model_rewards(self, samples: list[Sample]) -> list[Sample]:
        return samples if self.reward_model is None or not samples else self.reward_model.add_rewards(samples)

    def without_model(self) -> "Sampler":
        """Return one that leaves the reward model out: it scores on the ranks, which may be busy."""
        return Sampler(self.source, self._rewards, self._tokenizer)

    def take_judge_counts(self) -> dict[str, float]:
        """Return what judges took since this was last asked; see ``RewardPool.take_counts``."""
        return {} if self._rewards is None else self._rewards.take_counts()

    def take_reward_wait_s(self) -> float | None:
        """Return the seconds, since this was last asked, in which all responses were there and verifiers still at work.

        None without verifiers.
        """
        waited_s, self._reward_wait_s = self._reward_wait_s, 0.0
        return None if self._rewards is None else waited_s

    def _submit(self, one: RewardInput, unscored: dict[int, list[RewardInput]], num_samples: int) -> None:
        """Have a sample verified; where a verifier compares, when the prompt's last sample is there."""
        if not self._rewards.compares:
            self._rewards.submit(one)
            return
        group = unscored.setdefault(one.index // num_samples, [])
        group.append(one)
        if len(group) == num_samples:
            completions = tuple(other.completion for other in sorted(group, key=lambda other: other.index))
            for member in unscored.pop(one.index // num_samples):
                self._rewards.submit(dataclasses.replace(member, completions=completions))

    def _step_texts(self, completion: Completion) -> dict[str, tuple[str, ...]]:
        """The texts of what a verifier may reward apart, special tokens included."""
        ids = completion.token_ids if completion.is_generated is None else completion.token_ids[completion.is_generated]
        turns = np.split(ids, np.cumsum(completion.turn_lengths)[:-1])
        return {
            name: tuple(self._tokenizer.decode(part.tolist(), skip_special_tokens=False) for part in parts)
            for name, parts in (("turn_texts", turns), ("token_texts", ids.reshape(-1, 1)))
        }

    def conversations(self, sample: Sample) -> list[dict[str, Any]]:
        """Return the conversations of an agent's episode, as ``SampleRecord.conversations`` has them."""
        agent = sample.completion.agent
        return [
            {
                "role": one.role,
                "prompt": self._tokenizer.decode(one.prompt_ids.tolist(), skip_special_tokens=False),
                "completion": self._tokenizer.decode(one.token_ids.tolist(), skip_special_tokens=False),
            }
            | ({"reward": agent.rewards[one.role]} if one.role in agent.rewards else {})
            for one in (agent.sequences if agent is not None else ())
        ]

    def token_values(self, sample: Sample, values: Mapping[str, np.ndarray]) -> dict[str, list]:
        """Return the response token by token, as ``SampleRecord.tokens`` has it.

        Args:
            values: by name, a number for each token that the model wrote.
        """
        completion = sample.completion
        texts = [self._tokenizer.decode([token], skip_special_tokens=False) for token in completion.token_ids.tolist()]
        is_generated = completion.is_generated
        written = np.ones(len(texts), bool) if is_generated is None else np.asarray(is_generated, bool)
        found: dict[str, list] = {"tokens": texts}
        for name, numbers in values.items():
            rounded = iter(np.round(np.asarray(numbers, np.float64), 5).tolist())
            found[name] = [next(rounded) if is_written else None for is_written in written]
        return found

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Tokens that end a response."""
        return self._tokenizer.eos_token_ids

    def _prompt_text(self, record: Prompt) -> str:
        ids = shown_ids(record.prompt_ids, self._tokenizer) if record.image_files else record.prompt_ids
        return self._tokenizer.decode(ids.tolist(), skip_special_tokens=False)

    @staticmethod
    def _reward_input(
        place: int, completion: Completion, text: str, prompts: Sequence[str], records: Sequence[Prompt]
    ) -> RewardInput:
        return RewardInput(
            index=place,
            completion=text,
            answer=records[completion.request_id].answer,
            prompt=prompts[completion.request_id],
            finish_reason=completion.finish_reason,
            num_tokens=len(completion.token_ids),
            verifiers=split_choice(records[completion.request_id].verifier),
            episode_return=completion.episode_return,
            extra=records[completion.request_id].extra,
        )


def derived_seed(*path: int) -> int:  # 0 to 2**63 - 1
    return int(np.random.SeedSequence(path).generate_state(1, np.uint64)[0]) >> 1


def sample_parts(samples: Sequence[Sample]) -> dict[str, str]:
    """Return the digests of what a step sampled, for its line of the fingerprint; the order of samples counts."""
    return {
        "prompts": digest_arrays(array for sample in samples for array in (sample.prompt.prompt_ids, *sample.images)),
        "samples": digest_arrays(sample.completion.token_ids for sample in samples),
        "rollout_logprobs": digest_arrays(sample.completion.logprobs for sample in samples),
        "rewards": digest_json([[sample.reward.total, dict(sample.reward.parts)] for sample in samples]),
    }


def verifier_names(samples: Iterable[Sample]) -> list[str]:
    """Return the names of the verifiers that apply to any of the samples, in the order they come up."""
    return list(dict.fromkeys(name for sample in samples for name in sample.reward.parts))


def groups_that_teach(samples: Sequence[Sample]) -> tuple[np.ndarray, np.ndarray]:
    """Return the groups of samples, and True for those in which rewards differ, or those of a role of agents."""
    rewards = {(sample.group, ""): [] for sample in samples}
    for sample in samples:
        rewards[sample.group, ""].append(sample.reward.total)
        for role, reward in (sample.completion.agent.rewards if sample.completion.agent else {}).items():
            rewards.setdefault((sample.group, role), []).append(reward)
    numbers = np.repeat(np.arange(len(rewards)), [len(values) for values in rewards.values()])
    _, has_signal = groups_with_signal(np.array([one for values in rewards.values() for one in values]), numbers)
    groups = np.array([group for group, _ in rewards])
    return np.unique(groups), np.isin(np.unique(groups), groups[has_signal])


def reward_matrix(samples: Iterable[Sample], num_samples: int, verifier: str = "") -> np.ndarray:
    """Return the rewards (of one verifier, or weighted), float64 [prompts, num_samples].

    They are NaN where the verifier does not apply to the prompt, and of samples that are not scored.
    """
    values = [
        (sample.reward.parts.get(verifier, np.nan) if verifier else sample.reward.total) if sample.is_scored else np.nan
        for sample in samples
    ]
    return np.asarray(values, np.float64).reshape(-1, num_samples)


def sample_record(sample: Sample, step: int) -> SampleRecord:
    """Return what a samples file keeps of a sample."""
    return SampleRecord(
        step=step,
        prompt=sample.prompt_text,
        completion=sample.response_text,
        answer=sample.prompt.answer,
        reward=sample.reward.total,
        rewards=sample.reward.parts,
        finish_reason=sample.completion.finish_reason,
        images=sample.images,
        extra=sample.prompt.extra,
        unscored=sample.reward.unscored,
    )


def tool_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Return ``tools/calls``, ``tools/failures``, ``tools/malformed``, ``tools/neutralised``, ``tools/tokens`` (of
    answers), summed, and ``turns/mean``; of agents ``agents/...`` too."""
    agents = [sample.completion.agent for sample in samples if sample.completion.agent is not None]
    found = (
        {
            "agents/sequences": float(np.mean([len(one.sequences) for one in agents])),
            "agents/failures": float(sum(bool(one.failure) for one in agents)),
            "agents/refused": float(sum(one.num_refused for one in agents)),
            "agents/unread": float(sum(one.num_unread for one in agents)),
            "agents/rewritten": float(sum(one.num_rewritten for one in agents)),
            "agents/other_tokens": float(sum(one.num_other_tokens for one in agents)),
        }
        if agents
        else {}
    )
    for role in dict.fromkeys(role for one in agents for role in one.rewards):
        found[f"agents/reward/{role}"] = float(np.mean([one.rewards[role] for one in agents if role in one.rewards]))
    return found | {
        "tools/calls": float(sum(sample.completion.num_tool_calls for sample in samples)),
        "tools/failures": float(sum(sample.completion.num_tool_failures for sample in samples)),
        "tools/malformed": float(sum(sample.completion.num_malformed_calls for sample in samples)),
        "tools/neutralised": float(sum(sample.completion.num_neutralised_answers for sample in samples)),
        "tools/tokens": float(sum(len(sample.completion.token_ids) - sample.num_generated for sample in samples)),
        "turns/mean": float(np.mean([sample.completion.num_turns for sample in samples])),
    } | _returns(samples)


def _returns(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the mean return of each environment by name, where records choose one; episodes that broke down aside."""
    found: dict[str, list[float]] = {}
    for sample in samples:
        name, earned = sample.prompt.extra.get(CHOICE), sample.completion.episode_return
        if isinstance(name, str) and earned is not None and not math.isnan(earned):
            found.setdefault(f"environments/{name}", []).append(earned)
    return {name: float(np.mean(returns)) for name, returns in found.items()}
