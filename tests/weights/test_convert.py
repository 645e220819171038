"""Model directories: reading, converting both ways, writing; checked against the safetensors package and by hand."""

import json
import struct

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from tiny_models import LLAMA3_ROPE, tiny_model

from mindrlhf.errors import UserError
from mindrlhf.weights.convert import export_hf, hf_shapes, random_hf_weights
from mindrlhf.weights.directories import describe_directory, export_directory, import_directory
from mindrlhf.weights.hf import SafetensorsDirectory, read_hf_config
from mindrlhf.weights.tensors import convert_dtype

CONFIG = tiny_model(hidden_size=8, intermediate_size=6, num_hidden_layers=2, vocab_size=10)


def make_model(directory, dtype="float32", seed=0, config=CONFIG, **options):
    export_hf(random_hf_weights(config, seed), config, directory, dtype=dtype, **options)
    return directory


def contents(directory):
    source = SafetensorsDirectory(directory)
    return {name: (source.info(name), source.read(name).tobytes()) for name in source.names()}


LLAMA = tiny_model("llama", CONFIG, rope_scaling=LLAMA3_ROPE)
MISTRAL = tiny_model("mistral", CONFIG)
QWEN3_5 = tiny_model("qwen3_5_text", CONFIG, num_hidden_layers=4, head_dim=8, linear_num_value_heads=6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("config", [CONFIG, LLAMA, MISTRAL, QWEN3_5], ids=lambda config: config["model_type"])
def test_import_and_export_are_inverse_to_the_bit(tmp_path, dtype, tied, config):
    source = make_model(tmp_path / "hf", dtype, config={**config, "tie_word_embeddings": tied})
    import_directory(source, tmp_path / "mf")
    export_directory(tmp_path / "mf", tmp_path / "back")
    assert contents(tmp_path / "back") == contents(source)
    assert read_hf_config(tmp_path / "back") == read_hf_config(source)
    assert ("lm_head.weight" in contents(source)) is not tied


def test_conversion_to_another_dtype_is_stated_in_the_config(tmp_path):
    source = make_model(tmp_path / "hf")
    import_directory(source, tmp_path / "mf", "bfloat16")
    export_directory(tmp_path / "mf", tmp_path / "back")
    assert read_hf_config(tmp_path / "back")["torch_dtype"] == "bfloat16"
    back = SafetensorsDirectory(tmp_path / "back")
    for name, array in load_file(source / "model.safetensors").items():
        np.testing.assert_array_equal(back.read(name), convert_dtype(array, "float32", "bfloat16"))


def test_imported_names_and_layout(tmp_path):
    import_directory(make_model(tmp_path / "hf"), tmp_path / "mf")
    hugging_face, mindformers = (load_file(tmp_path / part / "model.safetensors") for part in ("hf", "mf"))
    gate, up = (hugging_face[f"model.layers.1.mlp.{part}_proj.weight"] for part in ("gate", "up"))
    fused = mindformers["decoder.layers.1.mlp.linear_fc1.weight"]
    np.testing.assert_array_equal(fused[0::2], gate)
    np.testing.assert_array_equal(fused[1::2], up)
    key = hugging_face["model.layers.0.self_attn.k_proj.weight"]
    # Two groups of two query heads, one key head and one value head, two channels each: keys are rows 4-5 and 12-13.
    np.testing.assert_array_equal(mindformers["decoder.layers.0.self_attention.linear_qkv.weight"][[4, 5, 12, 13]], key)
    np.testing.assert_array_equal(mindformers["output_layer.weight"], hugging_face["lm_head.weight"])


def test_shards_hold_everything_once_and_the_index_says_where(tmp_path):
    whole = make_model(tmp_path / "whole")
    sharded = make_model(tmp_path / "sharded", max_shard_bytes=600)
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in sharded.glob("*.safetensors"))
    assert len(files) > 2
    assert files == [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
    loaded = [(name, name_of_file) for name_of_file in files for name in load_file(sharded / name_of_file)]
    assert dict(loaded) == index["weight_map"]
    assert len(loaded) == len(index["weight_map"])
    assert contents(sharded) == contents(whole)
    expected_bytes = sum(array.nbytes for array in load_file(whole / "model.safetensors").values())
    assert index["metadata"]["total_size"] == expected_bytes


def test_checksums_are_those_of_the_files_whose_tensors_came_in_order(tmp_path):
    tensors = list(random_hf_weights(CONFIG, 0))
    checksums = export_hf(iter(tensors), CONFIG, tmp_path / "in_order", max_shard_bytes=600)
    files = sorted((tmp_path / "in_order").glob("*.safetensors"))
    assert len(files) > 2
    assert checksums == {path.name: xxhash.xxh3_64_hexdigest(path.read_bytes()) for path in files}
    last = SafetensorsDirectory(tmp_path / "in_order").names()[-1]
    late_first = sorted(tensors, key=lambda tensor: tensor[0] != last)
    others = export_hf(iter(late_first), CONFIG, tmp_path / "late_first", max_shard_bytes=600)
    assert contents(tmp_path / "late_first") == contents(tmp_path / "in_order")
    assert others.items() <= checksums.items() and len(others) >= len(files) - 1


def test_random_weights_are_repeatable_and_have_their_distribution():
    config = {**CONFIG, "hidden_size": 64, "vocab_size": 500, "initializer_range": 0.1}
    first, second, other = (dict(random_hf_weights(config, seed)) for seed in (1, 1, 2))
    for name, array in first.items():
        np.testing.assert_array_equal(array, second[name])
    embedding = first["model.embed_tokens.weight"]
    assert not np.array_equal(embedding, other["model.embed_tokens.weight"])
    assert not np.array_equal(embedding, first["lm_head.weight"])
    assert embedding.std() == pytest.approx(0.1, rel=0.03)
    assert abs(embedding.mean()) < 0.003
    assert np.all(first["model.norm.weight"] == 1)
    assert np.all(first["model.layers.0.self_attn.q_proj.bias"] == 0)


@settings(max_examples=60)
@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=20))
def test_bfloat16_rounds_to_the_nearest_with_ties_to_even(values):
    exact = np.array(values, np.float32)
    bits = convert_dtype(exact, "float32", "bfloat16")
    for value, actual in zip(exact, bits):
        pattern = struct.unpack("<I", struct.pack("<f", value))[0]
        low, remainder = pattern >> 16, pattern & 0xFFFF
        expected = low + (remainder > 0x8000 or (remainder == 0x8000 and low % 2 == 1))
        assert actual == expected
    widened = convert_dtype(bits, "bfloat16", "float32")
    np.testing.assert_array_equal(convert_dtype(widened, "float32", "bfloat16"), bits)


def test_bfloat16_keeps_nan():
    nan = np.array([0x7F800001, 0xFFFFFFFF], np.uint32).view(np.float32)
    assert np.isnan(convert_dtype(convert_dtype(nan, "float32", "bfloat16"), "bfloat16", "float32")).all()


def test_tokenizer_files_are_copied(tmp_path):
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")
    (tmp_path / "tokenizer" / "notes.txt").write_text("private")
    make_model(tmp_path / "hf", tokenizer_dir=tmp_path / "tokenizer")
    assert {path.name for path in (tmp_path / "hf").iterdir()} == {"config.json", "model.safetensors", "tokenizer.json"}


def test_a_failed_export_leaves_nothing(tmp_path):
    def interrupted():
        yield from list(random_hf_weights(CONFIG, 0))[:3]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_hf(interrupted(), CONFIG, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_an_incomplete_export_is_caught(tmp_path):
    with pytest.raises(AssertionError, match="not given"):
        export_hf(iter(list(random_hf_weights(CONFIG, 0))[1:]), CONFIG, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_an_output_directory_in_use_is_refused(tmp_path):
    make_model(tmp_path / "hf")
    with pytest.raises(UserError, match="exists already"):
        make_model(tmp_path / "hf")


def test_description_counts_parameters(tmp_path):
    make_model(tmp_path / "hf", "bfloat16")
    expected = sum(int(np.prod(shape)) for shape in _shapes().values())
    text = describe_directory(tmp_path / "hf")
    assert f"{expected:,} parameters, bfloat16" in text
    assert "Hugging Face" in text
    import_directory(tmp_path / "hf", tmp_path / "mf")
    assert "MindFormers" in describe_directory(tmp_path / "mf")


def _shapes():
    from mindrlhf.specs import find_spec

    spec = find_spec(CONFIG)
    return hf_shapes(spec, spec.dims(CONFIG))


def _rewrite(directory, change):
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def _truncate(directory, num_bytes):
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:num_bytes])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: _rewrite(path, lambda t: t.pop("model.norm.weight")), "lacks 1 tensor .* model.norm.weight"),
        (lambda path: _rewrite(path, lambda t: t.update(extra=np.zeros(1, np.float32))), "does not know: extra"),
        (
            lambda path: _rewrite(path, lambda t: t.update({"lm_head.weight": np.zeros((9, 8), np.float32)})),
            r"'lm_head.weight' has shape \[9, 8\], but config.json implies \[10, 8\]",
        ),
        (lambda path: _rewrite(path, lambda t: t.update(extra=np.zeros(1, np.int64))), "'extra' is not F32"),
        (lambda path: _truncate(path, -10), "or is truncated"),
        (lambda path: _truncate(path, 40), "truncated"),
        (lambda path: _truncate(path, 3), "truncated"),
        (lambda path: (path / "model.safetensors").write_bytes(struct.pack("<Q", 4) + b"oops1234"), "no safetensors"),
        (lambda path: (path / "model.safetensors").write_bytes(b"version https://git-lfs.git"), "git lfs pull"),
        (lambda path: (path / "model.safetensors").unlink(), "only safetensors are read"),
        (lambda path: (path / "config.json").unlink(), "no config.json"),
        (lambda path: (path / "config.json").write_text("{"), "cannot be read as JSON"),
        (lambda path: (path / "config.json").write_text("[]"), "not a JSON object"),
    ],
)
def test_damaged_directories_are_named(tmp_path, damage, message):
    damage(make_model(tmp_path / "hf"))
    with pytest.raises(UserError, match=message):
        import_directory(tmp_path / "hf", tmp_path / "mf")
    assert not (tmp_path / "mf").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda index: index.pop("weight_map"), "no weight_map"),
        (lambda index: index["weight_map"].update(ghost="model-00001-of-00002.safetensors"), "disagree about 'ghost'"),
        (lambda index: index["weight_map"].update(ghost="absent.safetensors"), "No such file"),
        (lambda index: index["weight_map"].update(ghost="../model.safetensors"), "beside the index"),
    ],
)
def test_a_damaged_index_is_named(tmp_path, change, message):
    directory = make_model(tmp_path / "hf", max_shard_bytes=2300)
    assert (directory / "model-00001-of-00002.safetensors").exists()
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))
    with pytest.raises(UserError, match=message):
        SafetensorsDirectory(directory)


def test_a_missing_directory_is_named(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        describe_directory(tmp_path / "nowhere")
