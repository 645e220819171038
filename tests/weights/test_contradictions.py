"""Model directories that hold two truths: refused, or said; against files that PyTorch itself has written."""

import json
import pickle

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_models import tiny_model

from mindrlhf.cli import main
from mindrlhf.errors import UserError
from mindrlhf.specs import find_spec
from mindrlhf.weights.adapters.peft import AdapterDirectory
from mindrlhf.weights.contradictions import check_tied
from mindrlhf.weights.convert import check_checkpoint, export_hf, random_hf_weights
from mindrlhf.weights.hf import SafetensorsDirectory
from mindrlhf.weights.open import open_tensors

CONFIG = tiny_model(hidden_size=8, intermediate_size=6, num_hidden_layers=2, vocab_size=10, tie_word_embeddings=True)
EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture
def model(tmp_path):
    export_hf(random_hf_weights(CONFIG, 0), CONFIG, tmp_path / "model")
    return tmp_path / "model"


def check(directory, config=CONFIG):
    spec = find_spec(config)
    check_checkpoint(open_tensors(directory), spec, spec.dims(config))


def add_head(model, change):
    tensors = load_file(model / "model.safetensors")
    head = tensors[EMBEDDING].copy()
    save_file({**tensors, "lm_head.weight": np.ascontiguousarray(change(head))}, model / "model.safetensors")


def test_a_tied_head_that_is_the_embedding_is_no_second_truth(model):
    check(model)
    add_head(model, lambda head: head)
    check(model)


def last_changed(head):
    head[-1, -1] += 1e-3
    return head


@pytest.mark.parametrize("change", [last_changed, lambda head: head * 2, lambda head: head[:5]])
def test_a_tied_head_that_differs_is_refused(model, change, capsys):
    add_head(model, change)
    with pytest.raises(
        UserError, match="lm_head.weight is another matrix than model.embed_tokens.weight: set tie_word"
    ):
        check(model)
    assert main(["weights", "import", str(model), "--output", str(model.with_name("mf"))]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    with pytest.raises(UserError, match="is another matrix"):
        check_tied(open_tensors(model))


def test_one_file_beside_the_shards_of_an_index_is_refused(tmp_path):
    export_hf(random_hf_weights(CONFIG, 1), CONFIG, tmp_path / "model", max_shard_bytes=800)
    SafetensorsDirectory(tmp_path / "model")
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    export_hf(random_hf_weights(CONFIG, 0), CONFIG, tmp_path / "other")
    (tmp_path / "other" / "model.safetensors").rename(tmp_path / "model" / "model.safetensors")
    with pytest.raises(
        UserError, match=r"holds two models: model\.safetensors, and \d+ files of .* remove what is not"
    ):
        SafetensorsDirectory(tmp_path / "model")


def test_an_index_of_the_one_file_is_no_second_truth(model):
    names = dict.fromkeys(load_file(model / "model.safetensors"), "model.safetensors")
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert SafetensorsDirectory(model).names() == list(names)


def test_an_adapter_within_a_whole_model_is_refused(model):
    (model / "adapter_config.json").write_text("{}")
    SafetensorsDirectory(model)
    (model / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match="holds a whole model and an adapter"):
        SafetensorsDirectory(model)


def test_files_that_are_not_read_are_named(model, caplog):
    check(model)
    assert caplog.text == ""
    (model / "model-00001-of-00002.safetensors").write_bytes(b"left over")
    check(model)
    assert "model-00001-of-00002.safetensors is not read: the model is in other files" in caplog.text


@pytest.mark.parametrize("content", [b"", pickle.dumps({"weight": [1.0]})])
def test_a_torch_file_beside_safetensors_is_named_and_never_opened(model, content, caplog):
    (model / "pytorch_model.bin").write_bytes(content)
    check(model)
    assert "pytorch_model.bin is not read: the safetensors beside it are, whatever it holds" in caplog.text


def test_an_adapters_torch_file_is_named_too(tmp_path, caplog):
    save_file({"base_model.model.a.lora_A.weight": np.ones((2, 4), np.float32)}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2, "lora_alpha": 4}')
    (tmp_path / "adapter_model.bin").write_bytes(b"")
    AdapterDirectory(tmp_path)
    assert "adapter_model.bin is not read" in caplog.text
