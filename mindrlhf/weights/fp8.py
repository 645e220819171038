"""Weights in 8 bits with a scale for each block, as DeepSeek-V3 and Qwen3 are published, and out of them again.

A matrix ``NAME`` is stored as e4m3 codes beside ``NAME_scale_inv``, one factor for each block of ``weight_block_size``
in config.json (128 x 128), the last blocks cut off by the matrix; its values are code times factor. See
README_WEIGHTS.md of DeepSeek-V3. The format of a code (sign, 4 bits of exponent, 3 of significand, no infinities) is
the E4M3 of Micikevicius et al. 2022, table 1.
"""

import os
from pathlib import Path

import numpy as np

from mindrlhf.errors import UserError
from mindrlhf.specs import find_spec
from mindrlhf.specs.qwen3_5 import WITH_VISION, text_config_of
from mindrlhf.weights.convert import check_checkpoint, hf_shapes, write_hf
from mindrlhf.weights.hf import SafetensorsDirectory, TensorDirectory, read_hf_config
from mindrlhf.weights.tensors import FLOAT8, STORAGE_DTYPES, TensorInfo, convert_dtype
from mindrlhf.weights.text_part import TextPart

SCALE_ENDING = "_scale_inv"
_BIAS, _NUM_FRACTION_BITS = 7, 3
_NAN = 0x7F  # of either sign


def _e4m3_values() -> np.ndarray:
    """Return the values of the 256 codes, float32 [256]."""
    codes = np.arange(256)
    exponents, fractions = (codes >> _NUM_FRACTION_BITS) & 15, codes & 7
    # Without the hidden bit the exponent is that of the smallest one with it.
    significands = np.where(exponents == 0, fractions, fractions + 8)
    values = np.ldexp(significands.astype(np.float32), np.maximum(exponents, 1) - _BIAS - _NUM_FRACTION_BITS)
    values[(codes & _NAN) == _NAN] = np.nan
    return np.where(codes >= 128, -values, values).astype(np.float32)


E4M3_VALUES = _e4m3_values()


def dequantise(codes: np.ndarray, scales: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """Return code times factor, float32 [rows, columns].

    Args:
        codes: uint8 [rows, columns].
        scales: float32 [rows / block[0], columns / block[1]], rounded up.
        block: rows and columns that share a factor.
    """
    values = E4M3_VALUES[codes]
    for index, row in enumerate(scales):
        rows = slice(index * block[0], (index + 1) * block[0])
        values[rows] *= np.repeat(row, block[1])[: codes.shape[1]]
    return values


class Fp8Directory(SafetensorsDirectory):
    """A directory of block-scaled 8-bit weights, seen as float32 ones; other tensors are as they are.

    Raises:
        UserError: it is no such directory, or its scales do not fit its weights.
    """

    def __init__(self, model_dir: str | os.PathLike, block: tuple[int, int]):
        super().__init__(model_dir, dtypes=(*STORAGE_DTYPES, FLOAT8))
        self._block = block
        present = set(super().names())
        coded = {name for name in present if super(Fp8Directory, self).info(name).dtype == FLOAT8}
        self._names = [name for name in super().names() if name.removesuffix(SCALE_ENDING) not in coded - {name}]
        for name in sorted(coded):
            self._check_scales(name, present)

    def _check_scales(self, name: str, present: set[str]) -> None:
        shape, scale = super().info(name).shape, f"{name}{SCALE_ENDING}"
        if len(shape) != 2 or scale not in present:
            raise UserError(f"{self.directory}: tensor {name!r} is float8, but not a matrix with its {SCALE_ENDING}")
        wanted = tuple(-(-size // part) for size, part in zip(shape, self._block))
        if super().info(scale).shape != wanted:
            raise UserError(
                f"{self.directory}: {scale!r} has shape {list(super().info(scale).shape)}, but blocks of "
                f"{list(self._block)} of a matrix {list(shape)} need {list(wanted)}"
            )

    def names(self) -> list[str]:
        """Every tensor name but those of the scales."""
        return self._names

    def info(self, name: str) -> TensorInfo:
        """Name, dtype and shape of a tensor; of one in 8 bits those of its values."""
        info = super().info(name)
        return info._replace(dtype="float32") if info.dtype == FLOAT8 else info

    def read(self, name: str) -> np.ndarray:
        """The tensor; one in 8 bits as its values.

        Raises:
            UserError: it holds the code of no number.
        """
        array = super().read(name)
        if super().info(name).dtype != FLOAT8:
            return array
        if np.any((array & _NAN) == _NAN):
            raise UserError(f"{self.directory}: tensor {name!r} holds codes of no number: download it again")
        scale = f"{name}{SCALE_ENDING}"
        scales = convert_dtype(super().read(scale), super().info(scale).dtype, "float32")
        return dequantise(array, scales, self._block)


def convert_directory(hf_dir: str | os.PathLike, out_dir: str | os.PathLike, dtype: str | None = None) -> None:
    """Write a Hugging Face directory anew in another dtype; weights in 8 bits are dequantised.

    Multi-token prediction layers are left out, as everywhere, and of a Qwen3.5 that sees its vision tower.

    Args:
        dtype: of the files; None keeps each tensor's, and makes bfloat16 of a directory of 8 bits.

    Raises:
        UserError: the source does not fit its config.json, or `out_dir` is in use.
    """
    hf_config = read_hf_config(hf_dir)
    if hf_config.get("architectures") == [WITH_VISION]:
        write_converted(TextPart(hf_dir), text_config_of(hf_config), out_dir, dtype, tokenizer_dir=hf_dir)
        return
    quantization = hf_config.get("quantization_config")
    plain = {key: value for key, value in hf_config.items() if key != "quantization_config"}
    if quantization is None:
        source = SafetensorsDirectory(hf_dir)
    else:
        source, dtype = Fp8Directory(hf_dir, _block(quantization, hf_dir)), dtype or "bfloat16"
    write_converted(source, plain, out_dir, dtype, tokenizer_dir=hf_dir)


def write_converted(
    source: TensorDirectory,
    hf_config: dict,
    out_dir: str | os.PathLike,
    dtype: str | None,
    *,
    tokenizer_dir: str | os.PathLike,
) -> None:
    """Write tensors as a Hugging Face directory, one after the other.

    Args:
        dtype: of the files; None keeps each tensor's.
        tokenizer_dir: where the tokenizer and generation files are copied from.

    Raises:
        UserError: the tensors do not fit ``hf_config``, or ``out_dir`` is in use.
    """
    spec = find_spec(hf_config)
    dims = spec.dims(hf_config)
    check_checkpoint(source, spec, dims)
    stored = {name: source.info(name).dtype for name in hf_shapes(spec, dims)}

    def tensors():
        for name in stored:
            yield name, source.read(name)
            source.release(name)

    write_hf(tensors(), stored, hf_config, out_dir, dtype, tokenizer_dir=tokenizer_dir)


def _block(quantization: object, hf_dir: str | os.PathLike) -> tuple[int, int]:
    found = quantization if isinstance(quantization, dict) else {}
    block = found.get("weight_block_size")
    is_block = isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)
    if found.get("quant_method") != "fp8" or found.get("fmt", "e4m3") != "e4m3" or not is_block:
        raise UserError(
            f"{Path(hf_dir) / 'config.json'} has a quantization_config of another kind than fp8, e4m3, with a "
            "weight_block_size: only that one is dequantised"
        )
    return block[0], block[1]
