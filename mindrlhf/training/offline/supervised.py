"""Supervised fine-tuning on the cells of reinforcement learning; also the warm-up before it."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mindrlhf.config.schema import SftConfig
from mindrlhf.config.training import UNPACKED, trains_sharded
from mindrlhf.data.epochs import EpochSteps
from mindrlhf.data.packing import Row, TokenSequence, plan_rows
from mindrlhf.images.pixels import decode_png
from mindrlhf.system.workers import Workers
from mindrlhf.training.batch import Batch, RowOptions, batch_of_rows
from mindrlhf.training.offline.run import OfflineTrainer
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
        self._options = RowOptions(
            inputs.row_lengths,
            section.micro_batch_size,
            team.world_size,
            section.packing != UNPACKED,
            in_step=trains_sharded(config),
            image_tokens=inputs.image_tokens,
        )
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

    def _held_out_batch(self, file: Any) -> Batch:
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


def read_sequences(file: Any, block: int = 4096) -> list[TokenSequence]:
    """Read every record of a prompt file built with ``--task sft``."""
    sequences = []
    for start in range(0, len(file), block):
        for record in file.read(range(start, min(start + block, len(file)))):
            sequences.append(TokenSequence(record.prompt_ids, record.response_ids, {}))
    return sequences


def read_image_files(file: Any, block: int = 4096) -> list[tuple[bytes, ...]]:
    """Read the images of every record of a prompt file, as PNG."""
    starts = range(0, len(file), block)
    blocks = (file.read(range(start, min(start + block, len(file)))) for start in starts)
    return [record.image_files for records in blocks for record in records]


def _with_images(sequence: TokenSequence, files: tuple[bytes, ...]) -> TokenSequence:
    return replace(sequence, images=tuple(decode_png(file) for file in files))


def _metrics(results: Sequence[UpdateResult], batch: Batch, lr: float) -> dict[str, float]:
    loss, entropy = np.sum([result.statistics for result in results], axis=0)
    return {
        "loss": float(loss),
        "entropy": float(entropy) / batch.num_tokens,
        "grad_norm": results[0].grad_norm,
        "lr": lr,
        "recompiles": max(result.process.recompiles for result in results),
        "memory/peak_rss_gb": max(result.process.peak_rss_gb for result in results),
    }


def _performance(batch: Batch, elapsed_s: float, num_devices: int) -> dict[str, float]:
    num_tokens = sum(int((rows.segment_ids > 0).sum()) for rows in batch.micro_batches)
    return {"timing/all": elapsed_s, "e2e_tps": num_tokens / num_devices / elapsed_s}
