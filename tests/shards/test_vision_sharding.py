"""Weights of a model with a vision tower: converted, sharded, resharded and merged to the bit; published once each."""

import json
from pathlib import Path

import numpy as np
import pytest
from sharding_models import contents, make_model
from tiny_vl import TinyVl, config_of

from mindrlhf.config.parse import read_yaml
from mindrlhf.layout.layout import Layout, parameter_layouts
from mindrlhf.shards.merge import merge_directory
from mindrlhf.shards.shard import shard_directory
from mindrlhf.shards.verify import verify_directory
from mindrlhf.specs import QWEN2_5_VL, find_spec
from mindrlhf.specs.fuse import fuse
from mindrlhf.weights.convert import hf_shapes, random_hf_weights
from mindrlhf.weights.directories import describe_directory, export_directory, import_directory
from mindrlhf.weights.hf import read_hf_config
from mindrlhf.weights.publish.shards import plan_publication

PUBLISHED = Path(__file__).parents[2] / "model_configs" / "qwen2_5_vl"
MODEL = TinyVl(hidden=32, heads=4, kv_heads=2, intermediate=24, layers=3, vision_hidden=16, vision_intermediate=20)


@pytest.fixture(scope="module", params=[False, True], ids=["nested", "flat"])
def hf_dir(request, tmp_path_factory):
    config = config_of(TinyVl(**{**vars(MODEL), "is_flat": request.param, "is_tied": request.param}))
    return make_model(tmp_path_factory.mktemp("model") / "hf", **config)


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_merging_undoes_sharding_and_resharding(hf_dir, tmp_path, dtype):
    shard_directory(hf_dir, tmp_path / "one", parallel="dp=2,mp=2,pp=3,opt=1", dtype=dtype)
    shard_directory(tmp_path / "one", tmp_path / "two", strategy=tmp_path / "one" / "strategy")
    shard_directory(tmp_path / "two", tmp_path / "three", parallel="dp=4,opt=-1")
    verify_directory(tmp_path / "three", against=hf_dir)
    merge_directory(tmp_path / "three", tmp_path / "back")
    config = read_hf_config(tmp_path / "back")
    if dtype is None:
        assert contents(tmp_path / "back") == contents(hf_dir) and config == read_hf_config(hf_dir)
    else:
        # No part of the config names another dtype than the files have.
        assert config["torch_dtype"] == dtype
        assert not [part for part in config.values() if isinstance(part, dict) and {"dtype", "torch_dtype"} & set(part)]


@pytest.mark.parametrize("path", sorted(PUBLISHED.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_layouts_of_published_sizes_shard_and_merge_to_the_bit(path, tmp_path):
    """Layout, heads and forms are those of the run config; widths, layers and vocabulary are scaled down."""
    size, keys = path.stem.split("_")[4], read_yaml(path)["parallel_config"]
    config = json.loads((PUBLISHED / f"qwen2_5_vl_{size}" / "config.json").read_text())
    hidden = 8 * config["num_attention_heads"]
    config |= {"hidden_size": hidden, "intermediate_size": 48, "num_hidden_layers": 4}
    config |= {"vocab_size": 64, "image_token_id": 60}
    config["rope_scaling"] = {"type": "mrope", "mrope_section": [2, 1, 1]}
    config["vision_config"] |= {"hidden_size": 64, "intermediate_size": 36, "depth": 2, "out_hidden_size": hidden}
    config["vision_config"]["fullatt_block_indexes"] = [1]
    hf_dir = make_model(tmp_path / "hf", dtype="bfloat16", **config)
    layout = {"dp": "data_parallel", "mp": "model_parallel", "pp": "pipeline_stage"}
    text = ",".join(f"{short}={keys[key]}" for short, key in layout.items())
    text += ",opt=1" if keys.get("enable_parallel_optimizer") else ""
    shard_directory(hf_dir, tmp_path / "shards", parallel=text)
    verify_directory(tmp_path / "shards", against=hf_dir)
    merge_directory(tmp_path / "shards", tmp_path / "back")
    assert contents(tmp_path / "back") == contents(hf_dir)


def test_import_and_export_are_inverse_to_the_bit(hf_dir, tmp_path):
    import_directory(hf_dir, tmp_path / "mf")
    export_directory(tmp_path / "mf", tmp_path / "back")
    assert contents(tmp_path / "back") == contents(hf_dir)
    text = describe_directory(tmp_path / "back")
    assert "Qwen2_5_VLForConditionalGeneration" in text and f"{len(contents(hf_dir))}," in text


def test_random_weights_have_biases_of_zero_and_norms_of_one(hf_dir):
    tensors = dict(random_hf_weights(read_hf_config(hf_dir), 0))
    assert not tensors["visual.blocks.0.attn.qkv.bias"].any() and (tensors["visual.merger.ln_q.weight"] == 1).all()
    assert tensors["visual.patch_embed.proj.weight"].std() > 0


@pytest.mark.parametrize("text", ["dp=2,mp=2,pp=3", "dp=2,mp=2,pp=1,opt=-1"])
def test_ranks_write_every_element_once(text):
    config = config_of(MODEL)
    dims, start, tensors = find_spec(config).dims(config), 0, {}
    for name, shape in hf_shapes(QWEN2_5_VL, dims).items():
        size = int(np.prod(shape))
        tensors[name], start = np.arange(start, start + size).reshape(shape), start + size
    layouts = parameter_layouts(QWEN2_5_VL, dims, Layout.parse(text))
    rules = {rule.mf_name: rule for rule in QWEN2_5_VL.rules(dims)}
    places = {layout.name: layout for layout in layouts}
    written = {name: np.zeros(tensor.shape, int) for name, tensor in tensors.items()}
    counts = {name: np.zeros(tensor.shape, int) for name, tensor in tensors.items()}
    for rank in range(Layout.parse(text).world_size):
        for name, parts in plan_publication(layouts, rules, dims, rank).items():
            fused = fuse(rules[name], dims, [tensors[hf] for hf in rules[name].hf_names])
            for part in parts:
                written[part.hf_name][part.index] = fused[places[name].shard_of(rank)][part.rows]
                counts[part.hf_name][part.index] += 1
    for name, tensor in tensors.items():
        assert (counts[name] == 1).all(), name
        np.testing.assert_array_equal(written[name], tensor, err_msg=name)
