"""Qwen3.5: config.json, the rows of its fused parameters, what has adapters, and the text part of one that sees."""

import json
import logging

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_models import tiny_model

from mindrlhf.errors import UserError
from mindrlhf.layout.feasibility import check_model
from mindrlhf.layout.layout import Layout
from mindrlhf.models.rotary import rotary_frequencies
from mindrlhf.specs import QWEN3_5, find_spec, with_num_layers
from mindrlhf.specs.fuse import fuse, split
from mindrlhf.specs.lora import LoraOptions, adapters
from mindrlhf.weights.convert import export_hf, random_hf_weights
from mindrlhf.weights.fp8 import convert_directory
from mindrlhf.weights.hf import SafetensorsDirectory, read_hf_config

CONFIG = tiny_model(
    "qwen3_5_text", hidden_size=8, intermediate_size=6, num_hidden_layers=4, head_dim=8, vocab_size=10,
    linear_key_head_dim=3, linear_value_head_dim=5,
    rope_parameters={"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
)  # fmt: skip
LAYER = "model.layers.0.linear_attn."


def rules(**changes):
    dims = QWEN3_5.dims({**CONFIG, **changes})
    return dims, {rule.mf_name: rule for rule in QWEN3_5.rules(dims)}


def test_published_sizes_have_their_number_of_parameters():
    """Those of Qwen3.5-9B, whose embedding is not tied, by hand: full and linear layers, their MLPs and two norms."""
    sizes = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32, "num_attention_heads": 16}
    dims = QWEN3_5.dims({**sizes, "vocab_size": 248320, "architectures": CONFIG["architectures"]})
    full = 4096 * (2 * 16 * 256 + 2 * 4 * 256 + 16 * 256) + 2 * 256
    linear = 4096 * (8192 + 4096 + 2 * 32 + 4096) + 8192 * 4 + 2 * 32 + 128
    expected = 8 * full + 24 * linear + 32 * (3 * 4096 * 12288 + 2 * 4096) + 2 * 248320 * 4096 + 4096
    assert sum(np.prod(rule.mf_shape(dims)) for rule in QWEN3_5.rules(dims)) == expected
    assert dims.linear.layers == (True, True, True, False) * 8 and dims.rotary_dim == 64
    assert dims.cached_numbers() == 8 * 2 * 4 * 256
    assert dims.state_numbers(2) == 24 * (32 * 128 * 128 + 3 * 8192) // 2


def test_what_a_config_says_is_read():
    kinds = ["linear_attention", "full_attention", "full_attention", "linear_attention"]
    dims = QWEN3_5.dims({**CONFIG, "layer_types": kinds, "mtp_num_hidden_layers": 1})
    assert dims.linear.layers == (True, False, False, True) and dims.num_draft_layers == 1
    assert dims.linear.group_rows == (3, 3, 10) and dims.zero_centred_norms and dims.gates_output
    np.testing.assert_allclose(rotary_frequencies(dims), [1.0, 0.1], rtol=1e-6)
    assert QWEN3_5.dims(with_num_layers({**CONFIG, "layer_types": kinds}, 2)).linear.layers == (True, False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["linear_attention"]}, "for each of the 4 layers"),
        ({"layer_types": ["sliding_attention"] * 4}, "full_attention or linear_attention"),
        ({"full_attention_interval": 0}, "full_attention_interval=0"),
        ({"linear_num_value_heads": 3}, "linear_num_key_heads=2"),
        ({"linear_key_head_dim": None}, "linear_key_head_dim=None"),
        ({"attn_output_gate": False}, "attn_output_gate=false"),
        ({"attention_bias": True}, "attention biases"),
        ({"hidden_act": "gelu"}, "only 'silu'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "only the default rotary embedding"),
        ({"rope_parameters": {"partial_rotary_factor": 0.1}}, "partial_rotary_factor=0.1"),
        ({"quantization_config": {"quant_method": "fp8"}}, "dequantise"),
    ],
)
def test_what_is_not_computed_is_refused(changes, message):
    with pytest.raises(UserError, match=message):
        QWEN3_5.dims({**CONFIG, **changes})


def test_rows_lie_by_key_head():
    """Of the fused parameter: the query, key and values of a key head; a value head's learning rate and decay."""
    dims, by_name = rules()
    rows = np.arange(2 * 6 + 20)[:, None]
    queries, keys, values = rows[:6], rows[6:12], rows[12:]
    for name in ("in_proj_qkv", "conv1d"):
        rule = by_name[f"decoder.layers.0.self_attention.{name}.weight"]
        fused = fuse(rule, dims, [rows])
        by_hand = [queries[:3], keys[:3], values[:10], queries[3:], keys[3:], values[10:]]
        np.testing.assert_array_equal(fused, np.concatenate(by_hand))
        np.testing.assert_array_equal(split(rule, dims, fused)[0], rows)
    gates = by_name["decoder.layers.0.self_attention.gates.weight"]
    assert gates.hf_names == (f"{LAYER}in_proj_b.weight", f"{LAYER}in_proj_a.weight")
    fused = fuse(gates, dims, [np.arange(4)[:, None], np.arange(4, 8)[:, None]])
    np.testing.assert_array_equal(fused[:, 0], [0, 4, 1, 5, 2, 6, 3, 7])
    qkv = by_name["decoder.layers.3.self_attention.linear_qkv.weight"]
    assert qkv.shape(dims) == ((64, 8), (16, 8), (16, 8))
    # Each head's query, then its gate, as the checkpoint has them: two heads to a key.
    fused = fuse(qkv, dims, [np.arange(64)[:, None], np.arange(100, 116)[:, None], np.arange(200, 216)[:, None]])
    np.testing.assert_array_equal(fused[:48, 0], [*range(32), *range(100, 108), *range(200, 208)])


def test_hidden_matrices_have_adapters_and_orthogonal_updates():
    dims, by_name = rules()
    adapted = {one.base.mf_name for one in adapters(QWEN3_5, dims, LoraOptions(rank=2, alpha=1.0))}
    found = {name for name, rule in by_name.items() if rule.matrices(dims)}
    assert adapted == found
    parts = {name.removeprefix("decoder.layers.0.") for name in found if ".layers.0." in name}
    mixer = {f"self_attention.{name}.weight" for name in ("in_proj_qkv", "in_proj_z", "out_proj")}
    assert parts == mixer | {"mlp.linear_fc1.weight", "mlp.linear_fc2.weight"}
    in_proj = by_name["decoder.layers.0.self_attention.in_proj_qkv.weight"].matrices(dims)
    assert in_proj.shapes == [(6, 8), (6, 8), (20, 8)]
    assert by_name["decoder.layers.3.self_attention.linear_qkv.weight"].matrices(dims).shapes[0] == (64, 8)


def test_heads_that_do_not_divide_and_rows_that_are_cut_are_refused():
    dims, _ = rules()
    check_model(dims, Layout(model_parallel=2))
    with pytest.raises(UserError, match="'parallel_config.context_parallel' is 2.*set it to 1"):
        check_model(dims, Layout(context_parallel=2))
    with pytest.raises(UserError, match="2 key heads of linear attention"):
        check_model(QWEN3_5.dims({**CONFIG, "num_key_value_heads": 4}), Layout(model_parallel=4))


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_that_sees_is_refused_and_its_text_part_converted(tmp_path, caplog, tied):
    text, text_config = tmp_path / "text", {**CONFIG, "tie_word_embeddings": tied}
    export_hf(random_hf_weights(text_config, 0), text_config, text, dtype="float16")
    whole = tmp_path / "whole"
    whole.mkdir()
    inner = {key: value for key, value in CONFIG.items() if key not in ("architectures", "tie_word_embeddings")}
    config = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "tie_word_embeddings": tied,
        "text_config": {**inner, "mtp_num_hidden_layers": 1},
        "vision_config": {"depth": 1},
    }
    (whole / "config.json").write_text(json.dumps(config))
    tensors = load_file(text / "model.safetensors")
    nested = {name.replace("model.", "model.language_model.", 1): array for name, array in tensors.items()}
    others = {"model.visual.blocks.0.x": np.ones(2, np.float32), "mtp.norm.weight": np.ones(2, np.float32)}
    save_file(nested | others, whole / "model.safetensors")
    with pytest.raises(UserError, match="mindrlhf weights convert DIR"):
        find_spec(config)
    with caplog.at_level(logging.WARNING):
        convert_directory(whole, tmp_path / "out")
    for prefix in ("model.visual.", "mtp."):
        assert f"1 tensors {prefix}* are left out" in caplog.text
    found, expected = SafetensorsDirectory(tmp_path / "out"), SafetensorsDirectory(text)
    assert found.names() == expected.names()
    for name in found.names():
        assert found.info(name) == expected.info(name)
        np.testing.assert_array_equal(found.read(name), expected.read(name))
    written = read_hf_config(tmp_path / "out")
    assert written["architectures"] == ["Qwen3_5ForCausalLM"] and written["mtp_num_hidden_layers"] == 0
    assert written["tie_word_embeddings"] is tied and ("lm_head.weight" in found.names()) is not tied
