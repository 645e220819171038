"""The batch of an update that was skipped, on disk: what ``mindrlhf replay`` works on.

batch.safetensors   the rows of each micro-batch as every rank had them, their images, and the log-probabilities it
                    computed
batch.json          everything else; see SkippedBatch
"""

import dataclasses
import json
import os
import secrets
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from mindrlhf.checkpoint.manifest import DamagedDirectory, read_json_object
from mindrlhf.data.packing import POSITIONS, PREFIX_IDS, PackedRows
from mindrlhf.errors import UserError
from mindrlhf.images.pixels import image_digest
from mindrlhf.system.files import sync
from mindrlhf.training.routing.rows import EXPERTS
from mindrlhf.weights.array_file import load_arrays, save_arrays
from mindrlhf.weights.tensors import array_infos

ARRAYS_NAME, INFO_NAME = "batch.safetensors", "batch.json"
FORMAT_VERSION = 1
_ROW_FIELDS = ("input_ids", "segment_ids", "labels", "mask")
_PARTS = ("tokens", "context")  # fields with arrays by name


@dataclass(frozen=True)
class SkippedBatch:
    """One optimiser update that was not made."""

    step: int
    update: int  # number within the step, from 1
    num_micro_batches: int
    num_tokens: int  # what the loss divides by
    kl_coefficient: float
    loss: str  # text, since JSON has no name for what is not finite
    grad_norm: str
    weights: str  # digest of the weights it met (digest_weights), "" when unknown
    placed: list[list[int]]  # per sample: micro-batch, row, first position, last + 1
    samples: list[dict[str, Any]]  # "prompt", "completion" and "reward", in the order of ``placed``
    config: dict[str, Any]  # the run's config


def saved_arrays(
    micro_batches: Sequence[PackedRows],
    logprobs: Sequence[np.ndarray],
    images: Mapping[str, np.ndarray] = MappingProxyType({}),
) -> dict[str, np.ndarray]:
    """Return the arrays of the file by name, the inverse of ``_loaded_arrays``.

    Args:
        micro_batches: of the batch, in order.
        logprobs: [rows, length] for each.
        images: uint8 [height, width, 3] by digest, those that the rows name.
    """
    arrays = {}
    for index, (rows, computed) in enumerate(zip(micro_batches, logprobs, strict=True)):
        arrays |= {f"{index}.{field}": getattr(rows, field) for field in _ROW_FIELDS}
        for part in _PARTS:
            arrays |= {f"{index}.{part}.{name}": array for name, array in getattr(rows, part).items()}
        arrays |= {f"{index}.image.{number}": images[digest] for number, digest in enumerate(rows.images)}
        arrays[f"{index}.logprobs"] = computed
    return arrays


def _loaded_arrays(num_micro_batches: int, arrays: Mapping[str, np.ndarray]) -> tuple[list, list]:
    micro_batches, logprobs = [], []
    for index in range(num_micro_batches):
        fields: dict[str, Any] = {field: arrays[f"{index}.{field}"] for field in _ROW_FIELDS}
        for part in _PARTS:
            prefix = f"{index}.{part}."
            fields[part] = {name.removeprefix(prefix): arrays[name] for name in arrays if name.startswith(prefix)}
        images = tuple(image_digest(image) for image in _images(index, arrays))
        micro_batches.append(PackedRows(**fields, images=images))
        logprobs.append(arrays[f"{index}.logprobs"])
    return micro_batches, logprobs


def _images(index: int, arrays: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    count = sum(name.startswith(f"{index}.image.") for name in arrays)
    return [arrays[f"{index}.image.{number}"] for number in range(count)]


def load_images(directory: Path, num_micro_batches: int) -> list[np.ndarray]:
    """Read the images of a batch that ``load_skipped`` has read."""
    arrays = load_arrays(directory / ARRAYS_NAME)
    return [image for index in range(num_micro_batches) for image in _images(index, arrays)]


def save_skipped(directory: Path, batch: SkippedBatch, arrays: Mapping[str, np.ndarray]) -> None:
    """Write a batch; it appears whole or not at all, and replaces one that a resumed run left.

    Raises:
        OSError: the disk refuses.
    """
    temporary = directory.with_name(f".{directory.name}.{secrets.token_hex(4)}.partial")
    temporary.mkdir(parents=True)
    try:
        save_arrays(temporary / ARRAYS_NAME, arrays.items(), array_infos(arrays))
        with open(temporary / INFO_NAME, "w", encoding="utf-8") as file:
            json.dump({"format_version": FORMAT_VERSION, **dataclasses.asdict(batch)}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        sync(temporary)
        if directory.exists():
            shutil.rmtree(directory)
        os.rename(temporary, directory)
        sync(directory.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def load_skipped(directory: Path) -> tuple[SkippedBatch, list[PackedRows], list[np.ndarray]]:
    """Read a batch: what is known of it, its micro-batches, and the log-probabilities [rows, length] of each.

    Raises:
        UserError: the directory holds no batch, or a damaged one.
    """
    try:
        values = read_json_object(directory / INFO_NAME)
    except DamagedDirectory as error:
        raise UserError(f"{directory} holds no batch to replay ({error}): name a directory below skipped") from None
    version = values.pop("format_version", None)
    fields = {item.name for item in dataclasses.fields(SkippedBatch)}
    if version != FORMAT_VERSION or values.keys() != fields:
        raise UserError(f"{directory / INFO_NAME} is damaged or of another release (format version {version!r})")
    batch, arrays = SkippedBatch(**values), load_arrays(directory / ARRAYS_NAME)
    try:
        micro_batches, logprobs = _loaded_arrays(batch.num_micro_batches, arrays)
    except (KeyError, TypeError) as error:
        raise UserError(f"{directory / ARRAYS_NAME} does not fit {INFO_NAME}: {error} is missing or wrong") from None
    if wrong := _first_misfit(batch, micro_batches, logprobs):
        raise UserError(f"{directory} is damaged: {wrong} is missing or wrong")
    return batch, micro_batches, logprobs


def _first_misfit(batch: SkippedBatch, micro_batches: Sequence[PackedRows], logprobs: Sequence[np.ndarray]) -> str:
    """Return what of a batch cannot be replayed, "" when all of it can."""
    numbers = (batch.step, batch.update, batch.num_tokens)
    if not (micro_batches and all(type(number) is int and number >= 0 for number in numbers)):
        return "a number of steps, updates, micro-batches or tokens"
    if not isinstance(batch.kl_coefficient, (int, float)) or not all(
        isinstance(text, str) for text in (batch.loss, batch.grad_norm, batch.weights)
    ):
        return "kl_coefficient, loss, grad_norm or weights"
    for rows, computed in zip(micro_batches, logprobs, strict=True):
        # With vision a position takes several numbers.
        arrays = [rows.input_ids[:, :, 0] if rows.input_ids.ndim == 3 else rows.input_ids]
        arrays += [rows.segment_ids, rows.labels, rows.mask]
        # Several tokens of a teacher for each position.
        arrays += [array[:, :, 0] if array.ndim == 3 else array for array in rows.tokens.values()]
        # Several numbers of experts for each position.
        arrays += [array[:, :, 0, 0] if name == EXPERTS else array for name, array in rows.context.items()]
        if computed.ndim != 2 or any(array.shape != computed.shape for array in arrays):
            return "a packed sequence"
        if rows.context.keys() - {EXPERTS} not in (set(), {PREFIX_IDS, POSITIONS}):
            return "what its sequences say of prompts"
        if "advantages" not in rows.tokens:
            return "an advantage"
    if not (isinstance(batch.samples, list) and isinstance(batch.placed, list)):
        return "the list of samples"
    if len(batch.samples) != len(batch.placed) or not all(_is_sample(sample) for sample in batch.samples):
        return "a sample"
    return "" if all(_is_place(place, logprobs) for place in batch.placed) else "the place of a sample"


def _is_sample(sample: Any) -> bool:
    names = {"prompt": str, "completion": str, "reward": (int, float)}
    return isinstance(sample, dict) and all(isinstance(sample.get(name), kind) for name, kind in names.items())


def _is_place(place: Any, logprobs: Sequence[np.ndarray]) -> bool:
    """Whether it is micro-batch, row, first position and last + 1 of a sequence that is not empty."""
    if not (isinstance(place, list) and len(place) == 4 and all(type(number) is int for number in place)):
        return False
    number, row, first, last = place
    if not 0 <= number < len(logprobs):
        return False
    num_rows, length = logprobs[number].shape
    return 0 <= row < num_rows and 0 <= first < last <= length
