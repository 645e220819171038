"""Model directories that hold two truths: refused, or said; against files that PyTorch itself has written."""

import json
import pickle
import subprocess
import zipfile

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mindrlhf.cli import main
from mindrlhf.errors import UserError
from mindrlhf.specs import find_spec
from mindrlhf.weights.adapters.peft import AdapterDirectory
from mindrlhf.weights.contradictions import check_tied, warn_of_other_files
from mindrlhf.weights.convert import check_checkpoint, export_hf, random_hf_weights
from mindrlhf.weights.hf import SafetensorsDirectory
from mindrlhf.weights.open import open_tensors
from mindrlhf.weights.torch_file import TorchFile, UnknownContent

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 8,
    "intermediate_size": 6,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 10,
    "tie_word_embeddings": True,
}
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
    assert main(["weights", "import", str(model), "--out", str(model.with_name("mf"))]) == 2
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


SAVE = """
import sys, torch
from safetensors.torch import load_file
tensors = load_file(sys.argv[1])
name = sorted(tensors, key=lambda name: (tensors[name].numel(), name))[0]
for kind in sys.argv[3:]:
    found = dict(tensors)
    if kind == "changed":
        found[name] = found[name] + 1
    elif kind == "bfloat16":
        found = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    elif kind == "parameters":
        found = {name: torch.nn.Parameter(tensor) for name, tensor in tensors.items()}
    elif kind == "renamed":
        found = {"old." + name: tensor for name, tensor in tensors.items()}
    elif kind == "reshaped":
        found[name] = found[name][:-1].clone()
    elif kind == "module":
        found = {"model": torch.nn.Linear(2, 2)}
    if kind == "old":
        torch.save(found, f"{sys.argv[2]}/{kind}.bin", _use_new_zipfile_serialization=False)
    else:
        torch.save(found, f"{sys.argv[2]}/{kind}.bin")
"""
KINDS = ("same", "changed", "bfloat16", "parameters", "renamed", "reshaped", "module", "old")


@pytest.fixture(scope="module")
def torch_files(tmp_path_factory, rollout_python):
    directory = tmp_path_factory.mktemp("torch")
    export_hf(random_hf_weights(CONFIG, 0), CONFIG, directory / "model")
    command = [rollout_python, "-c", SAVE, directory / "model" / "model.safetensors", directory, *KINDS]
    subprocess.run(command, check=True, timeout=120)
    return directory


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("same", ""),
        ("bfloat16", ""),
        ("parameters", ""),
        ("module", ""),
        ("old", ""),
        ("changed", "differs"),
        ("renamed", "no tensor of"),
        ("reshaped", "has another shape"),
    ],
)
def test_a_torch_file_with_other_weights_is_said_and_the_safetensors_are_read(model, torch_files, caplog, kind, said):
    (model / "pytorch_model.bin").write_bytes((torch_files / f"{kind}.bin").read_bytes())
    check(model)
    text = caplog.text
    assert bool(text) == bool(said) and said in text
    if said:
        assert "pytorch_model.bin holds other weights than the safetensors beside it" in text


@pytest.mark.parametrize("kind", ["same", "bfloat16", "parameters"])
def test_the_tensors_of_a_torch_file_are_read(torch_files, kind):
    wanted = load_file(torch_files / "model" / "model.safetensors")
    file = TorchFile(torch_files / f"{kind}.bin")
    assert set(file.names()) == wanted.keys()
    for name, array in wanted.items():
        found = file.read(name)
        if kind == "bfloat16":
            found = (found.astype(np.uint32) << 16).view(np.float32)
            np.testing.assert_allclose(found, array, rtol=2**-8)
        else:
            np.testing.assert_array_equal(found, array)


def test_an_adapters_torch_file_is_compared_too(tmp_path, rollout_python, caplog):
    tensors = {"base_model.model.a.lora_A.weight": np.ones((2, 4), np.float32)}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2, "lora_alpha": 4}')
    for kind in ("same", "changed"):
        command = [rollout_python, "-c", SAVE, tmp_path / "adapter_model.safetensors", tmp_path, kind]
        subprocess.run(command, check=True, timeout=120)
        (tmp_path / f"{kind}.bin").rename(tmp_path / "adapter_model.bin")
        AdapterDirectory(tmp_path)
        assert ("adapter_model.bin holds other weights" in caplog.text) == (kind == "changed")


class Evil:
    def __reduce__(self):
        return print, ("this must not run",)


@pytest.mark.parametrize("content", [b"", b"no zip", pickle.dumps({}), Evil()])
def test_what_is_no_file_of_tensors_runs_nothing_and_says_nothing(model, content, caplog, capsys):
    path = model / "pytorch_model.bin"
    if isinstance(content, Evil):
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("archive/data.pkl", pickle.dumps({"weight": content}))
    else:
        path.write_bytes(content)
    with pytest.raises(UnknownContent):
        TorchFile(path)
    warn_of_other_files(open_tensors(model))
    assert caplog.text == "" and capsys.readouterr().out == ""
