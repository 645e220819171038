"""Samples of a step: prompts in the order of the stream, generated and scored whole.

With dynamic sampling, prompts are sampled until all groups teach something: DAPO, Yu et al. 2025 (arXiv:2503.14476),
section 3.2. What is sampled beyond a step's needs is left over for the next.
"""

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from mindrlhf.config.schema import GrpoConfig
from mindrlhf.data.mindrecord import Prompt, PromptFile
from mindrlhf.data.stream import PromptStream
from mindrlhf.evaluation.heldout import HeldOut
from mindrlhf.observe.timing import StageTimer
from mindrlhf.rollout.samples import Sample, Sampler, groups_that_teach
from mindrlhf.rollout.types import Generator, SamplingParams
from mindrlhf.training.checkpoints.run import Progress
from mindrlhf.training.loop.step import StepSamples

MAX_PROMPTS_IN_MEMORY = 10_000

Group = list[Sample]
SampleRound = Callable[[int, int], list[Sample]]  # (number of prompts, number of the first group) -> their samples


@dataclass(frozen=True)
class Rollout:
    """Sources of samples.

    Attributes:
        generator: holds the published weights.
        prompts: samples the prompts of each step.
        sampler: generates and scores the held-out prompts.
        held_out: None when nothing is evaluated.
        more_held_out: further sets by name, which are reported beside it.
    """

    generator: Generator
    prompts: "PromptSampling"
    sampler: Sampler
    held_out: HeldOut | None
    more_held_out: Mapping[str, HeldOut] = field(default_factory=dict)


class WholeSteps:
    """Makes the samples of steps, one step after the other, each in one go.

    Attributes:
        next_step: the first whose samples are not complete, from 0.
    """

    def __init__(
        self, config: GrpoConfig, prompts: "PromptSampling", progress: Progress, num_steps: int, *, needs_greedy: bool
    ):
        self._prompts = prompts
        self._progress = progress
        self._needs_greedy = needs_greedy
        self._lag = config.rollout.off_policy_steps
        self._is_dynamic = config.algorithm.dynamic_sampling
        self._leftover: list[Sample] = []
        self.next_step = progress.step

    def advance(self, version: int) -> list[StepSamples]:
        """Generate something with these weights; return what ``take`` takes of each step that is complete by it."""
        samples = self._prompts.sample(self.next_step, self._leftover, needs_greedy=self._needs_greedy)
        versions = {sample.completion.weights_version for sample in (*samples.generated, *samples.greedy)}
        assert not self._lag or versions <= {version}, (
            f"samples of step {self.next_step + 1} must be of weights {version}, but are of {versions}"
        )
        self._leftover = samples.leftover
        self.next_step += 1
        return [dataclasses.replace(samples, version=version)]

    def take(self, step: StepSamples, version: int) -> StepSamples:
        """Return the samples of a step that begins with these weights."""
        return step

    def save(self, ready: Sequence[StepSamples]) -> None:
        """Put what is not trained on into ``Progress``; ``ready`` are complete steps that nobody has taken."""
        if self._lag or self._is_dynamic:
            self._progress.leftover = list(map(without_images, ready if self._lag else self._leftover))

    def restore(self) -> list[StepSamples]:
        """Take up what is in ``Progress``; return the steps that are complete."""
        ready = list(map(with_images, self._progress.leftover))
        if not self._lag:
            self._leftover = ready
            return []
        self._leftover = ready[-1].leftover if ready else []
        self.next_step += len(ready)
        return ready

    def close(self) -> None:
        """End what is still going on."""


class PromptSampling:
    """Reads prompts in the stream's order and has their samples generated and scored."""

    def __init__(
        self,
        config: GrpoConfig,
        prompts: PromptFile,
        stream: PromptStream,
        sampler: Sampler,
        stop_token_ids: tuple[int, ...],
        timer: StageTimer,
        interruptible: Callable[[], contextlib.AbstractContextManager[None]],
    ):
        self._config = config
        self._prompts = prompts
        self.stream = stream
        self.sampler = sampler
        self._timer = timer
        self.interruptible = interruptible
        self._groups = GroupSampling(config)
        self._records: list[Prompt] = []  # all prompts, when they are few: a read from disk costs 10 ms
        self.sampling = SamplingParams(
            max_tokens=config.rollout.max_response_length,
            temperature=config.rollout.temperature,
            top_p=config.rollout.top_p,
            top_k=config.rollout.top_k,
            stop_token_ids=stop_token_ids,
            stop=config.rollout.stop,
        )

    def read_small_file(self) -> None:
        """Read the prompts into memory, unless they are many or have images."""
        if len(self._prompts) <= MAX_PROMPTS_IN_MEMORY and self._prompts.header.images is None:
            self._records += self._prompts.read(range(len(self._prompts)))

    def beside_the_loop(self) -> "PromptSampling":
        """Return one for another thread, of the same prompts and place in the stream.

        Its times are of no stage of the loop, and no request to end breaks it off.
        """
        other = copy.copy(self)
        other.sampler = self.sampler.without_model()
        other._timer = StageTimer()
        other.interruptible = contextlib.nullcontext
        return other

    def sample(self, index: int, leftover: Sequence[Sample], *, needs_greedy: bool) -> StepSamples:
        """Return the samples of step ``index``, from 0.

        Raises:
            StopRequested: the run was asked to end.
        """
        records: list[Prompt] = []

        def sample_round(num_prompts: int, first_group: int) -> list[Sample]:
            new = self.read(self.stream.next(num_prompts))
            records.extend(new)
            return self._generate(new, index, self._config.algorithm.num_generations, self.sampling, first_group)

        samples = self._groups.collect(sample_round, leftover)
        if not needs_greedy:
            return samples
        greedy = dataclasses.replace(self.sampling, temperature=0.0, top_p=1.0, top_k=0)
        return dataclasses.replace(samples, greedy=self._generate(records, index, 1, greedy, 0))

    def read(self, indices: Sequence[int]) -> list[Prompt]:
        """Return the prompts at ``indices``."""
        with self._timer.stage("data"):
            if self._records:
                return [self._records[index] for index in indices]
            return self._prompts.read(indices)

    @contextlib.contextmanager
    def generating(self) -> Iterator[None]:
        """Time the body as ``rollout``, and let a request to end break it off."""
        with self._timer.stage("rollout"), self.interruptible():
            yield

    def _generate(
        self, records: Sequence[Prompt], index: int, num_samples: int, sampling: SamplingParams, first_group: int
    ) -> list[Sample]:
        with self.generating():
            return self.sampler.sample(
                records,
                num_samples,
                sampling,
                (self._config.run.seed, index),
                chunk_size=self._config.training.chunk_size,
                first_group=first_group,
            )


class GroupSampling:
    """Collects the groups of a step.

    Without ``algorithm.dynamic_sampling`` there is one round, and all of it is used. With it each round asks for as
    many chunks of prompts as could fill the step, so that less than a chunk is left over. When the step has asked
    for ``algorithm.max_oversampling`` times its prompts, groups without signal fill what is still missing.
    """

    def __init__(self, config: GrpoConfig):
        self.is_dynamic = config.algorithm.dynamic_sampling
        self._chunk_size = config.training.chunk_size
        self._num_groups = config.training.chunk_size * config.training.num_rollouts
        self._max_prompts = config.algorithm.max_oversampling * self._num_groups

    def collect(self, sample_round: SampleRound, leftover: Sequence[Sample]) -> StepSamples:
        """Have the samples of a step made; ``leftover`` are those of the step before, which are used first."""
        if not self.is_dynamic:
            assert not leftover, "only dynamic sampling leaves samples over"
            generated = sample_round(self._num_groups, 0)
            return StepSamples(generated, generated, num_without_signal=sum(map(len, _split(generated)[1])))
        chosen = _groups(leftover)
        num_stale_groups = len(chosen)
        generated: list[Sample] = []
        without_signal: list[Group] = []
        num_prompts = 0
        while len(chosen) < self._num_groups and num_prompts < self._max_prompts:
            missing = self._num_groups - len(chosen)
            count = min(-(-missing // self._chunk_size) * self._chunk_size, self._max_prompts - num_prompts)
            samples = sample_round(count, num_prompts)
            num_prompts += count
            generated += samples
            taught, useless = _split(samples)
            chosen += taught
            without_signal += useless
        used, surplus = chosen[: self._num_groups], chosen[self._num_groups :]
        assert len(surplus) < self._chunk_size, f"{len(surplus)} groups carried over, of chunks of {self._chunk_size}"
        num_missing = self._num_groups - len(used)
        fillers, dropped = without_signal[:num_missing], without_signal[num_missing:]
        return StepSamples(
            generated=generated,
            used=_numbered(used + fillers),
            num_stale=sum(map(len, chosen[:num_stale_groups])),
            num_without_signal=sum(map(len, fillers)),
            leftover=_flat(surplus),
            dropped=_flat(dropped),
        )


def _groups(samples: Sequence[Sample]) -> list[Group]:
    groups: dict[int, Group] = {}
    for sample in samples:
        groups.setdefault(sample.group, []).append(sample)
    return list(groups.values())


def _split(samples: Sequence[Sample]) -> tuple[list[Group], list[Group]]:
    """Return the groups with signal and those without, each in order.

    The verifiers' rewards decide, before any penalty for length: of two right answers the shorter is no better.
    """
    numbers, has_signal = groups_that_teach(samples)
    teaches = dict(zip(numbers.tolist(), has_signal.tolist()))
    groups = _groups(samples)
    return [g for g in groups if teaches[g[0].group]], [g for g in groups if not teaches[g[0].group]]


def _numbered(groups: Sequence[Group]) -> list[Sample]:
    return [dataclasses.replace(sample, group=number) for number, group in enumerate(groups) for sample in group]


def _flat(groups: Sequence[Group]) -> list[Sample]:
    return [sample for group in groups for sample in group]


def without_images(record: Sample | StepSamples) -> Sample | StepSamples:
    """Return samples as a checkpoint has them: of images the files of the prompts alone."""
    return _changed(record, lambda sample: dataclasses.replace(sample, images=()))


def with_images(record: Sample | StepSamples) -> Sample | StepSamples:
    """Undo ``without_images``."""
    return _changed(record, lambda sample: dataclasses.replace(sample, images=sample.prompt.images))


def _changed(record: Sample | StepSamples, change: Callable[[Sample], Sample]) -> Sample | StepSamples:
    if isinstance(record, Sample):
        return change(record)
    lists = {name: list(map(change, getattr(record, name))) for name in ("generated", "used", "leftover", "dropped")}
    return dataclasses.replace(record, **lists, greedy=list(map(change, record.greedy)))
