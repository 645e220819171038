"""Conversion of models with experts: bit-exact both ways, what stays float32, what is ignored and said so."""

import logging
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from test_convert import contents
from tiny_models import tiny_model

from mindrlhf.errors import UserError
from mindrlhf.weights.convert import export_hf, random_hf_weights
from mindrlhf.weights.directories import describe_directory, export_directory, import_directory
from mindrlhf.weights.hf import SafetensorsDirectory, read_hf_config
from mindrlhf.weights.tensors import convert_dtype

SIZES = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 3, "moe_intermediate_size": 6}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 16, "num_experts_per_tok": 2}
CONFIGS = {
    "qwen": tiny_model("qwen3_moe", **SIZES, head_dim=4, mlp_only_layers=[1]),
    "deepseek": tiny_model(
        "deepseek_v3", **SIZES, n_routed_experts=4, n_group=2, topk_group=1, q_lora_rank=5, kv_lora_rank=3,
        qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=4,
    ),
}  # fmt: skip


def make_model(directory, config, dtype="float32"):
    """A model whose tensors are all random, those that usually start as 0 or 1 too."""
    noise = np.random.default_rng(5)
    tensors = (
        (name, array + noise.standard_normal(array.shape).astype(np.float32))
        for name, array in random_hf_weights(config, 3)
    )
    export_hf(tensors, config, directory, dtype=dtype)
    return directory


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_import_and_export_are_inverse_to_the_bit(tmp_path, name, dtype):
    source = make_model(tmp_path / "hf", CONFIGS[name], dtype)
    import_directory(source, tmp_path / "mf")
    export_directory(tmp_path / "mf", tmp_path / "back")
    assert contents(tmp_path / "back") == contents(source)
    assert read_hf_config(tmp_path / "back") == read_hf_config(source)


@pytest.mark.parametrize("name", CONFIGS)
def test_imported_experts_lie_where_mindformers_reads_them(tmp_path, name):
    import_directory(make_model(tmp_path / "hf", CONFIGS[name]), tmp_path / "mf")
    hugging_face, mindformers = (load_file(tmp_path / part / "model.safetensors") for part in ("hf", "mf"))
    first, second = (mindformers[f"decoder.layers.2.mlp.experts.weight{number}"] for number in (1, 2))
    for expert in range(4):
        gate, up, down = (
            hugging_face[f"model.layers.2.mlp.experts.{expert}.{part}_proj.weight"] for part in ("gate", "up", "down")
        )
        np.testing.assert_array_equal(first.reshape(4, 8, 12)[expert], np.hstack([gate.T, up.T]))
        np.testing.assert_array_equal(second.reshape(4, 6, 8)[expert], down.T)


def test_the_selection_bias_stays_float32(tmp_path):
    source = make_model(tmp_path / "hf", CONFIGS["deepseek"])
    make_model(tmp_path / "narrow", CONFIGS["deepseek"], "bfloat16")
    import_directory(source, tmp_path / "mf", "bfloat16")
    export_directory(tmp_path / "mf", tmp_path / "back")
    exact = load_file(source / "model.safetensors")
    for directory in (tmp_path / "narrow", tmp_path / "back"):
        files = SafetensorsDirectory(directory)
        for tensor, array in exact.items():
            if tensor.endswith("e_score_correction_bias"):
                np.testing.assert_array_equal(files.read(tensor), array)
            else:
                assert files.info(tensor).dtype == "bfloat16"
                np.testing.assert_array_equal(files.read(tensor), convert_dtype(array, "float32", "bfloat16"))


def add_draft_layer(source, directory):
    """The model with tensors of one multi-token prediction layer, as DeepSeek publishes it."""
    shutil.copytree(source, directory)
    tensors = load_file(source / "model.safetensors")
    for name in ("eh_proj.weight", "enorm.weight", "mlp.experts.0.up_proj.weight"):
        tensors[f"model.layers.3.{name}"] = np.zeros((2, 3), np.float32)
    save_file(tensors, directory / "model.safetensors")
    return directory


def test_multi_token_prediction_layers_are_ignored_with_a_count(tmp_path, caplog):
    source = make_model(tmp_path / "hf", {**CONFIGS["deepseek"], "num_nextn_predict_layers": 1})
    plain = contents(source)
    # Exported without them, the files say that there are none.
    assert read_hf_config(source)["num_nextn_predict_layers"] == 0
    (source / "config.json").write_text(
        (source / "config.json").read_text().replace('"num_nextn_predict_layers": 0', '"num_nextn_predict_layers": 1')
    )
    drafts = add_draft_layer(source, tmp_path / "drafts")
    assert "3 tensors of 1 multi-token prediction layers" in describe_directory(drafts)
    assert "4 in 2 layers, 2 per token" in describe_directory(drafts)
    with caplog.at_level(logging.WARNING):
        import_directory(drafts, tmp_path / "mf")
    assert "3 tensors of 1 multi-token prediction layers are ignored" in caplog.text
    export_directory(tmp_path / "mf", tmp_path / "back")
    assert contents(tmp_path / "back") == plain
    assert read_hf_config(tmp_path / "back")["num_nextn_predict_layers"] == 0


def test_layers_beyond_those_that_the_config_names_are_an_error(tmp_path):
    drafts = add_draft_layer(make_model(tmp_path / "hf", CONFIGS["deepseek"]), tmp_path / "drafts")
    with pytest.raises(UserError, match=r"3 tensors the model does not know: model\.layers\.3\."):
        import_directory(drafts, tmp_path / "mf")
    assert not (tmp_path / "mf").exists()


def test_a_missing_expert_is_an_error(tmp_path):
    source = make_model(tmp_path / "hf", CONFIGS["qwen"])
    tensors = load_file(source / "model.safetensors")
    del tensors["model.layers.2.mlp.experts.3.up_proj.weight"]
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(UserError, match=r"lacks 1 tensor .*experts\.3\.up_proj"):
        import_directory(source, tmp_path / "mf")
