"""The loss and gradients of a saved batch, computed again: why was its update skipped?"""

import math
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from mindrlhf.config.memory import MemorySection
from mindrlhf.config.parse import build
from mindrlhf.config.schema import GrpoConfig
from mindrlhf.config.training import ParallelSection
from mindrlhf.data.packing import PackedRows
from mindrlhf.errors import UserError
from mindrlhf.training.loop.skipped_batches import SkippedBatch, load_images, load_skipped

_STEP_NAME = re.compile(r"step_(\d{8,})")


@dataclass(frozen=True)
class SampleExtremes:
    """The extreme values of one sample of the batch."""

    index: int  # in the batch
    prompt: str
    completion: str
    reward: float
    max_abs_advantage: float
    min_logprob: float  # under the replayed weights
    max_abs_change: float  # of its log-probabilities since the saved update, 0 when the weights are the same

    @property
    def is_finite(self) -> bool:
        """Whether all of its values are."""
        return math.isfinite(self.max_abs_advantage) and math.isfinite(self.min_logprob)


@dataclass(frozen=True)
class Replay:
    """What :func:`replay` found."""

    batch: SkippedBatch
    model_dir: Path
    has_same_weights: bool | None  # as the update met, None when that is unknown
    losses: list[float]  # each micro-batch's part of the loss
    norms: dict[str, float]  # of the gradient of each parameter, in the order of the model
    samples: list[SampleExtremes]

    @property
    def loss(self) -> float:
        """The loss of the update."""
        return sum(self.losses)

    @property
    def grad_norm(self) -> float:
        """The global norm of the gradients."""
        return math.sqrt(sum(norm**2 for norm in self.norms.values()))

    @property
    def first_not_finite(self) -> str:
        """Name of the first parameter whose gradient is not finite, "" when all are."""
        return next((name for name, norm in self.norms.items() if not math.isfinite(norm)), "")


def replay(directory: Path, model_dir: Path | None = None) -> Replay:
    """Compute a saved batch again, on one rank: in float32 on the CPU, wherever the run was.

    Args:
        directory: what the run left below ``skipped``.
        model_dir: Hugging Face directory of the weights; None finds those of the update, or the nearest before it.

    Raises:
        UserError: no batch there, or the model cannot be loaded.
    """
    batch, micro_batches, logprobs = load_skipped(directory)
    config = build(GrpoConfig, batch.config)
    model_dir = model_dir or find_weights(directory, batch, config)
    engine = _build_engine(config, model_dir, micro_batches)
    if engine.model.network.images is not None:
        engine.model.see(load_images(directory, batch.num_micro_batches))
    losses, computed = [], []
    for rows in micro_batches:
        statistics, values = engine.updater.add(rows, batch.num_tokens, batch.kl_coefficient)
        losses.append(float(statistics[0]))
        computed.append(values.copy())
    norms = {name: float(np.linalg.norm(array.astype(np.float64))) for name, array in engine.updater.gradients()}
    digest = _weights_digest(engine.model.placement, config.model.param_dtype)
    has_same_weights = digest == batch.weights if batch.weights else None
    samples = _extremes(batch, micro_batches, computed, logprobs)
    return Replay(batch, model_dir, has_same_weights, losses, norms, samples)


def find_weights(directory: Path, batch: SkippedBatch, config: GrpoConfig) -> Path:
    """Return the model directory whose weights are most likely those that the update met.

    These are the checkpoint of the step before; then that of the step itself, which has the same weights when none of
    its updates was made; then the newest one before; then the model that the run began with.
    """
    checkpoints = Path(config.checkpoint.save_dir or directory.resolve().parents[2] / "checkpoints")
    steps = {}
    for path in checkpoints.glob("step_*"):
        match = _STEP_NAME.fullmatch(path.name)
        if match and (path / "model" / "config.json").is_file():
            steps[int(match[1])] = path / "model"
    for step in (batch.step - 1, batch.step, *sorted(steps, reverse=True)):
        if step in steps and step <= batch.step:
            return steps[step]
    if config.model.random_init:
        raise UserError(
            f"no checkpoint up to step {batch.step} is in {checkpoints}, and the run began with random weights: give "
            "--model DIR"
        )
    return Path(config.model.path)


def _build_engine(config: GrpoConfig, model_dir: Path, micro_batches: Sequence[PackedRows]):
    from mindrlhf.training.engine.build import Models, build_policy_engine
    from mindrlhf.training.runtime import start_runtime

    model = replace(config.model, param_dtype="float32", compute_dtype="float32")
    run = replace(config.run, device="cpu")
    config = replace(config, run=run, model=model, memory=MemorySection(), parallel_config=ParallelSection())
    with tempfile.TemporaryDirectory(prefix="mindrlhf-replay-") as log_dir:
        rank = start_runtime(config.run, Path(log_dir))
    lengths = tuple(sorted({rows.mask.shape[1] for rows in micro_batches}))
    models = Models(config, lengths, max(len(rows.mask) for rows in micro_batches), rank)
    return build_policy_engine(models, str(model_dir))[1]


def _weights_digest(placement, dtype: str) -> str:
    from mindrlhf.observe.fingerprint import digest_weights

    with placement.create_weight_buffer(dtype) as buffer:
        buffer.begin(1)
        placement.write_to(buffer)
        return digest_weights(buffer.written())


def _extremes(
    batch: SkippedBatch,
    micro_batches: Sequence[PackedRows],
    computed: Sequence[np.ndarray],
    saved: Sequence[np.ndarray],
) -> list[SampleExtremes]:
    """Return all samples, the strangest first: not finite, then the lowest log-probability."""
    found = []
    for index, (place, sample) in enumerate(zip(batch.placed, batch.samples, strict=True)):
        number, row, first, last = place
        now, before = computed[number][row, first:last], saved[number][row, first:last]
        same = (now == before) | (np.isnan(now) & np.isnan(before))
        with np.errstate(invalid="ignore"):
            change = np.where(same, 0.0, np.abs(now - before))
        found.append(
            SampleExtremes(
                index=index,
                **{name: sample[name] for name in ("prompt", "completion", "reward")},
                max_abs_advantage=float(np.abs(micro_batches[number].tokens["advantages"][row, first:last]).max()),
                min_logprob=float(now.min()),
                max_abs_change=float(change.max()),
            )
        )
    return sorted(found, key=lambda sample: (sample.is_finite, sample.min_logprob if sample.is_finite else 0.0))
