"""Adapters on disk: what is refused, what PEFT would be told, and the command that merges."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_models import tiny_model

from mindrlhf.cli import main
from mindrlhf.errors import UserError
from mindrlhf.specs import find_spec, scorer_config
from mindrlhf.specs.lora import LoraOptions
from mindrlhf.weights.adapters.merge import merge_adapter
from mindrlhf.weights.adapters.peft import (
    AdapterDirectory,
    adapter_config,
    adapter_shapes,
    check_adapter,
    write_adapter,
)
from mindrlhf.weights.convert import export_hf, random_hf_weights

DENSE = tiny_model(
    vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, tie_word_embeddings=True,
)  # fmt: skip
EXPERTS = tiny_model(
    "qwen3_moe", DENSE, head_dim=8, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=12, mlp_only_layers=[1]
)
LINEAR = tiny_model("qwen3_5_text", DENSE, head_dim=8, layer_types=["linear_attention", "full_attention"])
OPTIONS = LoraOptions(rank=2, alpha=4.0)


def make_adapter(directory, hf_config=DENSE, options=OPTIONS, seed=0):
    spec = find_spec(hf_config)
    shapes = adapter_shapes(spec, spec.dims(hf_config), options)
    stream = np.random.default_rng(seed)
    tensors = {name: stream.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    config = adapter_config(spec, spec.dims(hf_config), options, "base")
    checksums = write_adapter(tensors.items(), shapes, config, directory)
    assert list(checksums) == ["adapter_model.safetensors"]
    return tensors


def change_config(directory, **values):
    path = directory / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


# What is wrong with the directory, and words of the message.
DAMAGE = {
    "another kind": ({"peft_type": "IA3"}, "peft_type='IA3': only 'LORA'"),
    "magnitudes": ({"use_dora": True}, "use_dora=True: only False"),
    "ranks that differ": ({"rank_pattern": {"q_proj": 4}}, "rank_pattern={'q_proj': 4}"),
    "trained biases": ({"bias": "all"}, "bias='all': only 'none'"),
    "no rank": ({"r": 0}, "r=0 and lora_alpha=4.0: both must be numbers above 0"),
    "a part of the base in it": ({"init_lora_weights": "pissa"}, "which changes the base model too"),
    "the same, in steps": ({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights='pissa_niter_16'"),
    "orthonormal parts": ({"init_lora_weights": "olora"}, "path_initial_model_for_weight_conversion"),
    "a quantised base": ({"init_lora_weights": "loftq", "loftq_config": {"loftq_bits": 4}}, "set init_lora_weights"),
    "corda": ({"init_lora_weights": "corda"}, "changes the base"),
    "gradients": ({"init_lora_weights": "lora_ga"}, "changes the base"),
    "an unknown start": ({"init_lora_weights": "nova"}, "not known whether it changes the base"),
    "tokens that switch it on": ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens=[1, 2]: only None"),
    "trained tokens": ({"trainable_token_indices": [3]}, "trainable_token_indices=[3]"),
    "whole parameters": ({"target_parameters": ["experts.gate_up_proj"]}, "target_parameters="),
    "grouped adapters": ({"use_qalora": True}, "use_qalora=True: only False"),
    "another rank": ({"r": 3}, "has rank=3, but 'lora.rank' is 2: set it to 3"),
    "another alpha": ({"lora_alpha": 2}, "has alpha=2.0, but 'lora.alpha' is 4.0"),
    "another scaling": ({"use_rslora": True}, "has rank_stabilised=True, but 'lora.rank_stabilised' is False"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_an_adapter_that_computes_something_else_is_refused_in_one_line(tmp_path, damage):
    make_adapter(tmp_path / "adapter")
    check_adapter(tmp_path / "adapter", DENSE, OPTIONS)
    changes, words = DAMAGE[damage]
    change_config(tmp_path / "adapter", **changes)
    with pytest.raises(UserError) as error:
        check_adapter(tmp_path / "adapter", DENSE, OPTIONS)
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("start", [True, False, None, "gaussian", "orthogonal", "eva"])
def test_starts_that_leave_the_base_alone_are_read_and_unknown_settings_said(tmp_path, start, caplog):
    make_adapter(tmp_path / "adapter")
    change_config(tmp_path / "adapter", init_lora_weights=start, new_setting=None, eva_config={"rho": 1.0})
    check_adapter(tmp_path / "adapter", DENSE, OPTIONS)
    assert ("A began from data" in caplog.text) == (start == "eva")
    assert "new_setting" not in caplog.text
    change_config(tmp_path / "adapter", new_setting=3)
    check_adapter(tmp_path / "adapter", DENSE, OPTIONS)
    assert "has new_setting=3, which is not known here" in caplog.text


def test_an_adapter_of_another_model_or_without_files_is_refused(tmp_path):
    make_adapter(tmp_path / "adapter", {**DENSE, "num_hidden_layers": 3})
    with pytest.raises(UserError, match="has 14 tensors the model does not know"):
        check_adapter(tmp_path / "adapter", DENSE, OPTIONS)
    make_adapter(tmp_path / "narrow", {**DENSE, "intermediate_size": 20})
    with pytest.raises(UserError, match="shape"):
        check_adapter(tmp_path / "narrow", DENSE, OPTIONS)
    (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    with pytest.raises(UserError, match="has no adapter_model.safetensors"):
        AdapterDirectory(tmp_path / "adapter")


def test_peft_is_told_the_ends_of_names_unless_others_end_alike():
    dims, spec = find_spec(EXPERTS).dims(EXPERTS), find_spec(EXPERTS)
    told = {
        roles: adapter_config(spec, dims, LoraOptions(2, 4.0, roles), "base")["target_modules"]
        for roles in [(), ("attention",), ("mlp",)]
    }
    of_mlp = [f"model.layers.1.mlp.{part}_proj" for part in ("down", "gate", "up")]
    assert told["attention",] == ["k_proj", "o_proj", "q_proj", "v_proj"]
    # Experts have projections of these names too.
    assert told["mlp",] == of_mlp
    of_attention = [f"model.layers.{layer}.self_attn.{part}_proj" for layer in (0, 1) for part in "koqv"]
    assert told[()] == sorted(of_mlp + of_attention)
    scorer = scorer_config(DENSE)
    config = adapter_config(find_spec(scorer), find_spec(scorer).dims(scorer), OPTIONS, "base")
    assert (config["task_type"], config["modules_to_save"]) == ("SEQ_CLS", ["score"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_command_adds_an_adapter_of_some_matrices_and_keeps_the_dtype(tmp_path, capsys, dtype):
    export_hf(random_hf_weights(DENSE, 1), DENSE, tmp_path / "base", dtype=dtype)
    factors = make_adapter(tmp_path / "adapter", options=LoraOptions(2, 4.0, ("mlp",)))
    arguments = [str(tmp_path / "base"), str(tmp_path / "adapter"), "--output", str(tmp_path / "merged")]
    assert main(["weights", "merge-adapter", *arguments]) == 0
    base, merged = (read_float64(tmp_path / name / "model.safetensors") for name in ("base", "merged"))
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["torch_dtype"] == dtype
    assert merged.keys() == base.keys()
    for name, array in merged.items():
        module = "base_model.model." + name.removesuffix(".weight")
        added = 0.0
        if ".mlp." in name:
            added = 2.0 * factors[f"{module}.lora_B.weight"].astype(np.float64) @ factors[f"{module}.lora_A.weight"]
        # bfloat16 has 8 bits.
        tolerance = {"rtol": 2**-8, "atol": 0} if dtype == "bfloat16" else {"rtol": 0, "atol": 1e-5}
        np.testing.assert_allclose(array, base[name] + added, err_msg=name, **tolerance)
    assert main(["weights", "merge-adapter", *arguments]) == 2
    assert "exists already" in capsys.readouterr().err


def test_peft_s_adapter_of_all_linear_layers_is_merged_where_training_has_no_place_for_it(tmp_path):
    export_hf(random_hf_weights(LINEAR, 1), LINEAR, tmp_path / "base")
    tensors, rng = make_adapter(tmp_path / "adapter", LINEAR), np.random.default_rng(2)
    for name in ("in_proj_a", "in_proj_b"):
        module = f"base_model.model.model.layers.0.linear_attn.{name}"
        tensors[f"{module}.lora_A.weight"] = rng.standard_normal((2, 16)).astype(np.float32)
        tensors[f"{module}.lora_B.weight"] = rng.standard_normal((4, 2)).astype(np.float32)
    save_file(tensors, tmp_path / "adapter" / "adapter_model.safetensors")
    with pytest.raises(UserError, match="has 4 tensors the model does not know.*in_proj_a.lora_A"):
        check_adapter(tmp_path / "adapter", LINEAR, OPTIONS)
    merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    base, merged = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "merged"))
    assert base.keys() == merged.keys()
    for name, array in merged.items():
        module = "base_model.model." + name.removesuffix(".weight")
        factors = [tensors.get(f"{module}.lora_{one}.weight") for one in "BA"]
        added = 2.0 * np.matmul(*factors) if factors[0] is not None else 0.0
        np.testing.assert_allclose(array, base[name] + added, err_msg=name, rtol=0, atol=1e-5)


def read_float64(path):
    from safetensors import safe_open

    with safe_open(path, "numpy") as file:
        if file.get_slice(next(iter(file.keys()))).get_dtype() == "F32":
            return {name: array.astype(np.float64) for name, array in load_file(path).items()}
    header_size = int.from_bytes(path.read_bytes()[:8], "little")
    content = path.read_bytes()
    header = json.loads(content[8 : 8 + header_size])
    header.pop("__metadata__")
    arrays = {}
    for name, entry in header.items():
        start, stop = (8 + header_size + offset for offset in entry["data_offsets"])
        bits = np.frombuffer(content[start:stop], np.uint16).astype(np.uint32) << 16
        arrays[name] = bits.view(np.float32).reshape(entry["shape"]).astype(np.float64)
    return arrays


def test_files_of_half_precision_are_read(tmp_path):
    tensors = make_adapter(tmp_path / "adapter")
    halves = {name: array.astype(np.float16) for name, array in tensors.items()}
    save_file(halves, tmp_path / "adapter" / "adapter_model.safetensors")
    source = check_adapter(tmp_path / "adapter", DENSE, OPTIONS)
    for name, array in halves.items():
        np.testing.assert_array_equal(source.read_float32(name), array.astype(np.float32))
