"""Learning from pairs of responses: direct preference optimisation, and reward models.

Each update makes two passes: the first measures every response, from which the host computes the loss of the pairs
and its derivatives; the second carries these back through the model.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mindrlhf.checkpoint.algorithm_state import PairAccuracy
from mindrlhf.config.derived import is_base
from mindrlhf.config.schema import DpoConfig, RewardModelConfig
from mindrlhf.data.epochs import EpochSteps
from mindrlhf.data.mindrecord import PromptFile
from mindrlhf.data.packing import TokenSequence
from mindrlhf.evaluation.statistics import Interval, accuracy_interval
from mindrlhf.images.pixels import decode_png
from mindrlhf.observe.fingerprint import digest_arrays
from mindrlhf.system.workers import Workers
from mindrlhf.training.batch import make_batch
from mindrlhf.training.offline.pair_objectives import DpoObjective, PairResult, RewardModelObjective
from mindrlhf.training.offline.run import OfflineTrainer, rank_metrics, read_image_files, read_records, row_options
from mindrlhf.training.preflight import RunInputs
from mindrlhf.training.team import Results, Team

if TYPE_CHECKING:
    from mindrlhf.training.engine.offline import OfflineWorker

Config = DpoConfig | RewardModelConfig
Objective = DpoObjective | RewardModelObjective
BLOCK_PAIRS = 256  # pairs measured at a time outside of training


@dataclass(frozen=True)
class Pairs:
    """Pairs as sequences, chosen 0, rejected 0, chosen 1, ..., and what the objective keeps of the reference.

    ``image_files`` are those of each sequence, PNG; empty where the model sees none.
    """

    sequences: list[TokenSequence]
    image_files: list[tuple[bytes, ...]]
    reference: np.ndarray | None = None  # float64 [responses]

    def __len__(self) -> int:
        return len(self.sequences) // 2

    def take(self, indices: Sequence[int]) -> "Pairs":
        """Return some of the pairs."""
        responses = [2 * int(index) + side for index in indices for side in (0, 1)]
        reference = None if self.reference is None else self.reference[responses]
        files = [self.image_files[response] for response in responses if self.image_files]
        return Pairs([self.sequences[response] for response in responses], files, reference)

    def with_images(self) -> list[TokenSequence]:
        """Return the sequences with their images, unpacked; both of a pair share them."""
        if not self.image_files:
            return self.sequences
        images = [tuple(decode_png(file) for file in files) for files in self.image_files[::2]]
        return [replace(one, images=images[number // 2]) for number, one in enumerate(self.sequences)]


class PreferenceTrainer(OfflineTrainer):
    """Training on every pair ``training.epochs`` times, or for ``run.max_steps`` steps; the items are pairs."""

    def __init__(self, config: Config, inputs: RunInputs, team: Team):
        self._config = config
        self._team = team
        self._workers: OfflineWorker = Workers(team.call)
        training, self._rows = config.training, row_options(config, inputs, team.world_size)
        is_dpo = isinstance(config, DpoConfig)
        self._objective: Objective = DpoObjective(config.dpo) if is_dpo else RewardModelObjective(config.reward_model)
        path = config.model.reference_path
        has_reference = is_dpo and (path or is_base(config, path))
        self._reference_name = "reference" if has_reference else "policy"
        self._pairs = self._with_reference(self._read(inputs.prompts))
        self._held_out = self._with_reference(self._read(inputs.held_out)) if inputs.held_out else None
        held_out = self._held_out.sequences if self._held_out else []
        self._held_out_digest = digest_arrays(ids for one in held_out for ids in (one.prompt_ids, one.response_ids))
        if is_dpo:
            self._workers.drop_reference()
        self.order = EpochSteps(len(self._pairs), training.pairs_per_step, config.run.seed, config.data.shuffle)
        self.num_steps = self.order.num_steps(training.epochs, config.run.max_steps)

    def update(self, index: int, items: np.ndarray) -> dict[str, float]:
        """Make one optimiser update and return its metrics, measured before it."""
        start_s = time.perf_counter()
        metrics = self.train_on(self._pairs.take(items), self._config.optimizer.learning_rate(index, self.num_steps))
        if self._config.observe.performance_stats:
            metrics["timing/all"] = time.perf_counter() - start_s
        return metrics

    def evaluate(self) -> dict[str, float]:
        """Return the metrics of the held-out pairs before the first step, after the last, and when one is due."""
        progress = self.progress
        every = self._config.evaluation.every_steps
        is_due = progress.step in (0, self.num_steps) or (every and progress.step % every == 0)
        if not self._held_out or not is_due:
            return {}
        metrics, accuracy = self._evaluate_held_out()
        state = progress.algorithm
        state.last_evaluation = PairAccuracy(self._held_out_digest, progress.step, list(accuracy))
        # A resumed run may have been given other pairs.
        if state.first_evaluation is None or state.first_evaluation.pairs != self._held_out_digest:
            state.first_evaluation = state.last_evaluation
        return metrics

    def summary(self) -> str:
        """Return the accuracy on held-out pairs before and after."""
        if not self._held_out:
            return ""
        first, last = self.progress.algorithm.first_evaluation, self.progress.algorithm.last_evaluation
        accuracies = f"{_percentages(Interval(*last.accuracy))} after"
        if first.step != last.step:
            when = f"at step {first.step}" if first.step else "before"
            accuracies = f"{_percentages(Interval(*first.accuracy))} {when}, {accuracies}"
        return f"preference accuracy on {len(self._held_out)} held-out pairs: {accuracies}"

    def train_on(self, pairs: Pairs, lr: float) -> dict[str, float]:
        result = self._evaluate(pairs)
        sequences = [
            replace(sequence, values={"coefficients": values.astype(np.float32)})
            for sequence, values in zip(pairs.with_images(), result.coefficients, strict=True)
        ]
        results = self._call(self._workers.train, sequences, lr=lr)[1]
        return result.metrics() | rank_metrics(results, lr)

    def _evaluate_held_out(self) -> tuple[dict[str, float], Interval]:
        """Return the metrics of the held-out pairs, and their accuracy with its interval."""
        parts = [self._evaluate(self._held_out.take(block)) for block in _blocks(len(self._held_out))]
        fields = ("losses", "chosen_rewards", "rejected_rewards")
        columns = [np.concatenate([getattr(part, field) for part in parts]) for field in fields]
        result = PairResult(*columns, [])
        return {f"eval/{name}": value for name, value in result.metrics().items()}, accuracy_interval(result.is_right)

    def _evaluate(self, pairs: Pairs) -> PairResult:
        return self._objective.evaluate(self._measure("policy", pairs), pairs.reference)

    def _with_reference(self, pairs: Pairs) -> Pairs:
        """Measure all pairs under the reference model, which the policy still is when there is no other."""
        if not self._objective.needs_reference:
            return pairs
        parts = [
            self._objective.summarise(self._measure(self._reference_name, pairs.take(block)))
            for block in _blocks(len(pairs))
        ]
        return replace(pairs, reference=np.concatenate(parts))

    def _read(self, file: PromptFile) -> Pairs:
        files = read_image_files(file) if self._rows.image_tokens else []
        return Pairs(read_pairs(file), [both for both in files for _ in ("chosen", "rejected")])

    def _measure(self, name: str, pairs: Pairs) -> list[np.ndarray]:
        batch, results = self._call(self._workers.measure, pairs.with_images(), name=name)
        return batch.collect(results)

    def _call(self, method: Callable[..., Results], sequences: Sequence[TokenSequence], **arguments: Any):
        batch = make_batch(sequences, self._rows)
        return batch, method(per_rank=batch.per_rank(self._team.world_size), **arguments)


def read_pairs(file: PromptFile) -> list[TokenSequence]:
    """Read a prompt file built with ``--task preference``: chosen 0, rejected 0, chosen 1, ..."""
    return [
        TokenSequence(record.prompt_ids, response_ids, {})
        for record in read_records(file)
        for response_ids in (record.response_ids, record.rejected_ids)
    ]


def _blocks(count: int) -> Iterator[range]:
    return (range(start, min(start + BLOCK_PAIRS, count)) for start in range(0, count, BLOCK_PAIRS))


def _percentages(interval: Interval) -> str:
    return f"{interval.mean:.1%} ({interval.low:.1%} to {interval.high:.1%})"
