"""Supervised fine-tuning on the cells of reinforcement learning; also the warm-up before it."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mindrlhf.config.schema import SftConfig
from mindrlhf.config.training import UNPACKED
from mindrlhf.data.epochs import EpochSteps
from mindrlhf.data.mindrecord import PromptFile
from mindrlhf.data.packing import Row, TokenSequence, plan_rows
from mindrlhf.images.pixels import decode_png
from mindrlhf.system.workers import Workers
from mindrlhf.training.batch import Batch, batch_of_rows
from mindrlhf.training.offline.run import OfflineTrainer, rank_metrics, read_image_files, read_records, row_options
from mindrlhf.training.preflight import RunInputs
from mindrlhf.training.results import UpdateResult
from mindrlhf.training.team import Results, Team

if TYPE_CHECKING:
    from mindrlhf.training.engine.offline import OfflineWorker


class SupervisedTrainer(OfflineTrainer):
    """Training on every record ``training.epochs`` times, or for ``run.max_steps`` steps; the items are rows."""

    def __init__(self, config: SftConfig, inputs: RunInputs, team: Team):
        section = config.training
        self._config = config
        self._team = team
        self._workers: OfflineWorker = Workers(team.call)
        self._options = row_options(config, inputs, team.world_size)
        self._sequences = read_sequences(inputs.prompts)
        self._image_files = read_image_files(inputs.prompts) if inputs.image_tokens else []
        lengths = [sequence.num_tokens for sequence in self._sequences]
        self._rows = plan_rows(lengths, self._options.row_lengths, pack=section.packing != UNPACKED)
        self._held_out = self._held_out_batch(inputs.held_out) if inputs.held_out else None
        self.order = EpochSteps(len(self._rows), section.rows_per_step, config.run.seed, config.data.shuffle)
        self.num_steps = self.order.num_steps(section.epochs, config.run.max_steps)

    def update(self, index: int, items: np.ndarray) -> dict[str, float]:
        """Make one optimiser update and return its metrics."""
        start_s = time.perf_counter()
        batch = self._batch(self._sequences, self._image_files, [self._rows[item] for item in items])
        lr = self._config.optimizer.learning_rate(index, self.num_steps)
        metrics = _metrics(self._call(self._workers.train, batch, lr=lr), batch, lr)
        if self._config.observe.performance_stats:
            metrics |= _performance(batch, time.perf_counter() - start_s, self._team.num_devices)
        return metrics

    def evaluate(self) -> dict[str, float]:
        """Return the loss on held-out records after the last step."""
        if not self._held_out or self.progress.step < self.num_steps:
            return {}
        results = self._call(self._workers.evaluate, self._held_out)
        return {"eval/loss": -sum(result.total for result in results) / self._held_out.num_tokens}

    def _held_out_batch(self, file: PromptFile) -> Batch:
        sequences = read_sequences(file)
        lengths = [sequence.num_tokens for sequence in sequences]
        files = read_image_files(file) if self._options.image_tokens else []
        return self._batch(sequences, files, plan_rows(lengths, self._options.row_lengths))

    def _batch(
        self, sequences: Sequence[TokenSequence], image_files: Sequence[tuple[bytes, ...]], rows: Sequence[Row]
    ) -> Batch:
        """Make a batch of rows; their images are unpacked for it."""
        if image_files:
            sequences = list(sequences)
            for item in (item for row in rows for item in row.items):
                sequences[item] = _with_images(sequences[item], image_files[item])
        return batch_of_rows(sequences, rows, self._options)

    def _call(self, method: Callable[..., Results], batch: Batch, **arguments: Any) -> Results:
        return method(per_rank=batch.per_rank(self._team.world_size), **arguments)


def read_sequences(file: PromptFile) -> list[TokenSequence]:
    """Read every record of a prompt file built with ``--task sft``."""
    return [TokenSequence(record.prompt_ids, record.response_ids, {}) for record in read_records(file)]


def _with_images(sequence: TokenSequence, files: tuple[bytes, ...]) -> TokenSequence:
    return replace(sequence, images=tuple(decode_png(file) for file in files))


def _metrics(results: Sequence[UpdateResult], batch: Batch, lr: float) -> dict[str, float]:
    loss, entropy = np.sum([result.statistics for result in results], axis=0)
    return {"loss": float(loss), "entropy": float(entropy) / batch.num_tokens} | rank_metrics(results, lr)


def _performance(batch: Batch, elapsed_s: float, num_devices: int) -> dict[str, float]:
    num_tokens = sum(int((rows.segment_ids > 0).sum()) for rows in batch.micro_batches)
    return {"timing/all": elapsed_s, "e2e_tps": num_tokens / num_devices / elapsed_s}
