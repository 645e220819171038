"""Block-scaled 8-bit weights: each code, each block and whole models against other ways to compute them."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny_models import tiny_model

from mindrlhf.cli import main
from mindrlhf.errors import UserError
from mindrlhf.weights.convert import export_hf, random_hf_weights
from mindrlhf.weights.fp8 import E4M3_VALUES, convert_directory, dequantise
from mindrlhf.weights.hf import read_hf_config

BLOCK = 128
CONFIG = tiny_model(
    "qwen3", hidden_size=136, intermediate_size=264,
    num_attention_heads=2, num_key_value_heads=1, head_dim=68, vocab_size=16,
)  # fmt: skip
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}


def value_of(code):
    """The value of a code from its text of bits: sign, 4 bits of exponent with bias 7, 3 of fraction."""
    bits = f"{code:08b}"
    sign, exponent, fraction = -1 if bits[0] == "1" else 1, int(bits[1:5], 2), int(bits[5:], 2)
    if bits[1:] == "1111111":
        return float("nan")
    if exponent == 0:
        return sign * (fraction / 8) * 2.0**-6
    return sign * (1 + fraction / 8) * 2.0 ** (exponent - 7)


def test_all_256_codes():
    expected = np.array([value_of(code) for code in range(256)], np.float32)
    np.testing.assert_array_equal(E4M3_VALUES, expected)
    numbers = ~np.isnan(expected)
    assert (np.signbit(E4M3_VALUES) == np.signbit(expected))[numbers].all(), "the sign of zero too"
    assert np.nanmax(E4M3_VALUES) == 448 and np.isnan(E4M3_VALUES).sum() == 2


def test_all_256_codes_against_another_library():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    expected = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(E4M3_VALUES, expected)


@pytest.mark.parametrize("shape", [(128, 128), (1, 1), (129, 127), (300, 260)])
def test_every_element_has_the_factor_of_its_block(shape):
    generator = np.random.default_rng(3)
    codes = generator.integers(0, 127, shape).astype(np.uint8)
    scales = generator.standard_normal((-(-shape[0] // BLOCK), -(-shape[1] // BLOCK))).astype(np.float32)
    found = dequantise(codes, scales, (BLOCK, BLOCK))
    rows, columns = np.indices(shape)
    expected = np.float32(E4M3_VALUES[codes]) * scales[rows // BLOCK, columns // BLOCK]
    np.testing.assert_array_equal(found, expected)


def write_fp8(directory, change=lambda tensors, config: None):
    """Write a model whose matrices are random codes; return its tensors by name as float32, computed here."""
    export_hf(random_hf_weights(CONFIG, 1), CONFIG, directory, dtype="bfloat16")
    generator, tensors, expected = np.random.default_rng(7), {}, {}
    for name, bits in load_file(directory / "model.safetensors").items():
        bits = bits.view(np.uint16)
        if "_proj" not in name:
            tensors[name] = ("BF16", bits)
            expected[name] = (bits.astype(np.uint32) << 16).view(np.float32)
            continue
        codes = generator.integers(0, 256, bits.shape).astype(np.uint8)
        codes[(codes & 127) == 127] = 5
        scales = np.exp2(generator.uniform(-9, -7, [-(-size // BLOCK) for size in bits.shape])).astype(np.float32)
        tensors[name], tensors[f"{name}_scale_inv"] = ("F8_E4M3", codes), ("F32", scales)
        wide = np.kron(scales, np.ones((BLOCK, BLOCK), np.float32))[: bits.shape[0], : bits.shape[1]]
        expected[name] = np.vectorize(value_of)(codes).astype(np.float32) * wide
    config = read_hf_config(directory) | {"quantization_config": dict(FP8)}
    change(tensors, config)
    header, data = {}, b""
    for name, (code, array) in tensors.items():
        place = [len(data), len(data) + array.nbytes]
        header[name] = {"dtype": code, "shape": list(array.shape), "data_offsets": place}
        data += array.tobytes()
    text = json.dumps(header).encode()
    (directory / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    (directory / "config.json").write_text(json.dumps(config))
    return expected


def test_a_model_is_dequantised_to_what_was_computed_here(tmp_path, capsys):
    expected = write_fp8(tmp_path / "fp8")
    convert = ["weights", "convert", str(tmp_path / "fp8"), "--output"]
    assert main([*convert, str(tmp_path / "f32"), "--dtype", "float32"]) == 0
    found = load_file(tmp_path / "f32" / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, array in found.items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name)
    assert "quantization_config" not in read_hf_config(tmp_path / "f32")
    # bfloat16 unless said otherwise: the nearest one of each value.
    assert main([*convert, str(tmp_path / "bf16")]) == 0
    assert read_hf_config(tmp_path / "bf16")["torch_dtype"] == "bfloat16"
    ml_dtypes = pytest.importorskip("ml_dtypes")
    for name, bits in load_file(tmp_path / "bf16" / "model.safetensors").items():
        nearest = expected[name].astype(ml_dtypes.bfloat16)
        assert bits.tobytes() == nearest.tobytes(), name
    assert main(["weights", "inspect", str(tmp_path / "bf16")]) == 0
    assert "bfloat16" in capsys.readouterr().out


def test_a_model_that_is_not_quantised_changes_its_dtype_alone(tmp_path):
    export_hf(random_hf_weights(CONFIG, 1), CONFIG, tmp_path / "plain")
    convert_directory(tmp_path / "plain", tmp_path / "same")
    assert (tmp_path / "same" / "model.safetensors").read_bytes() == (
        tmp_path / "plain" / "model.safetensors"
    ).read_bytes()
    assert read_hf_config(tmp_path / "same")["torch_dtype"] == "float32"


NAME = "model.layers.0.mlp.down_proj.weight"


def damaged(key, value):
    def change(tensors, config):
        code, array = tensors[key]
        tensors[key] = value(code, array)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors, config: tensors.pop(f"{NAME}_scale_inv"), "is float8, but not a matrix with its _scale_inv"),
        (damaged(f"{NAME}_scale_inv", lambda code, array: (code, array[:1])), r"need \[2, 3\]"),
        (damaged(NAME, lambda code, array: (code, array | 0x7F)), "holds codes of no number"),
        (lambda tensors, config: config["quantization_config"].update(quant_method="awq"), "of another kind than fp8"),
        (lambda tensors, config: config["quantization_config"].pop("weight_block_size"), "of another kind than fp8"),
        (lambda tensors, config: config["quantization_config"].update(fmt="e5m2"), "of another kind than fp8"),
    ],
)
def test_what_cannot_be_dequantised_is_one_line(tmp_path, change, message):
    write_fp8(tmp_path / "fp8", change)
    with pytest.raises(UserError, match=message):
        convert_directory(tmp_path / "fp8", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_other_commands_name_the_one_that_helps(tmp_path, capsys):
    write_fp8(tmp_path / "fp8")
    assert main(["weights", "import", str(tmp_path / "fp8"), "--output", str(tmp_path / "out")]) == 2
    assert "mindrlhf weights convert" in capsys.readouterr().err
