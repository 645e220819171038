"""The prompts of each step in the order of the stream, and their samples, on rank 0."""

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence

from mindrlhf.config.schema import GrpoConfig
from mindrlhf.data.mindrecord import Prompt, PromptFile
from mindrlhf.data.stream import PromptStream
from mindrlhf.observe.timing import StageTimer
from mindrlhf.rollout.samples import Sample, Sampler
from mindrlhf.rollout.types import SamplingParams
from mindrlhf.training.loop.dynamic_sampling import GroupSampling, StepSamples

MAX_RECORDS_IN_MEMORY = 10_000


class PromptSampling:
    """Reads prompts in the stream's order and has their samples generated and scored.

    Args:
        config: of the run.
        prompts, stream: the prompts and their order.
        sampler: generates and scores.
        stop_token_ids: tokens that end a response.
        timer: times ``data`` and ``rollout``.
        interruptible: context in which a request to end breaks off the rollout.
    """

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
        self._sampler = sampler
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
        )

    def read_small_file(self) -> None:
        """Read the prompts into memory, unless they are many or have images."""
        if len(self._prompts) <= MAX_RECORDS_IN_MEMORY and self._prompts.header.images is None:
            self._records += self._prompts.read(range(len(self._prompts)))

    def beside_the_loop(self) -> "PromptSampling":
        """Return one for another thread, of the same prompts and place in the stream.

        Its times are of no stage of the loop, and no request to end breaks it off.
        """
        other = copy.copy(self)
        other._timer = StageTimer()
        other.interruptible = contextlib.nullcontext
        return other

    def sample(self, index: int, leftover: Sequence[Sample], *, needs_greedy: bool) -> tuple[StepSamples, list[Sample]]:
        """Return the samples of step ``index`` (from 0), and the likeliest response to each prompt if it is needed.

        Args:
            index: the step.
            leftover: samples that the step before left.
            needs_greedy: whether to generate the likeliest responses.

        Raises:
            StopRequested: the run was asked to end.
        """
        records: list[Prompt] = []

        def sample_round(num_prompts: int, first_group: int) -> list[Sample]:
            new = self.read(self.stream.next(num_prompts))
            records.extend(new)
            return self._generate(new, index, self._config.algorithm.num_generations, self.sampling, first_group)

        step = self._groups.collect(sample_round, leftover)
        if not needs_greedy:
            return step, []
        greedy = dataclasses.replace(self.sampling, temperature=0.0, top_p=1.0, top_k=0)
        return step, self._generate(records, index, 1, greedy, 0)

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
            return self._sampler.sample(
                records,
                num_samples,
                sampling,
                (self._config.run.seed, index),
                chunk_size=self._config.training.chunk_size,
                first_group=first_group,
            )
