"""Sharded directories written by the ranks that hold the shards, and shards read from them under other layouts."""

import numpy as np
import pytest
import xxhash
from tiny_models import WIDE, tiny_model

from mindrlhf.errors import UserError
from mindrlhf.layout.layout import Layout, parameter_layouts
from mindrlhf.shards.save import finish_saving, plan_saving, write_rank
from mindrlhf.shards.shard import shard_directory
from mindrlhf.shards.sources import RandomSource, open_source
from mindrlhf.specs import find_spec
from mindrlhf.specs.fuse import fuse
from mindrlhf.weights.convert import export_hf, random_hf_weights
from mindrlhf.weights.sharded import ShardedDirectory

MODEL = tiny_model(base=WIDE, vocab_size=128, intermediate_size=256, initializer_range=0.02)
LAYOUTS = ["dp=2,mp=2,pp=1", "dp=1,mp=1,pp=2", "dp=4,mp=1,pp=1,opt=1", "dp=2,mp=2,pp=2,opt=1"]


def layouts_of(text):
    spec = find_spec(MODEL)
    layout = Layout.parse(text)
    return layout, parameter_layouts(spec, spec.dims(MODEL), layout)


@pytest.fixture(scope="module")
def arrays():
    """Parameters, moments and step count, whole, by name."""
    spec = find_spec(MODEL)
    dims, tensors = spec.dims(MODEL), dict(random_hf_weights(MODEL, 3))
    random = np.random.default_rng(0)
    whole = {rule.mf_name: fuse(rule, dims, [tensors[name] for name in rule.hf_names]) for rule in spec.rules(dims)}
    for name, array in list(whole.items()):
        for prefix in ("exp_avg.", "exp_avg_sq."):
            whole[prefix + name] = random.standard_normal(array.shape).astype(np.float32)
    return {**whole, "global_step": np.array([7], np.int32)}


def save(directory, text, arrays, *, state=("exp_avg.", "exp_avg_sq.")):
    layout, layouts = layouts_of(text)
    manifest = plan_saving(MODEL, layouts, layout, "float32", state=state)
    for rank in range(layout.world_size):
        shards = (
            (name, arrays[name][manifest.arrays[name].layout.shard_of(rank)]) for name in manifest.infos_of_rank(rank)
        )
        checksums = write_rank(directory, manifest, rank, shards)
        (path,) = (directory / f"rank_{rank}").glob("*.safetensors")
        assert checksums == {str(path.relative_to(directory)): xxhash.xxh3_64_hexdigest(path.read_bytes())}
    finish_saving(directory, manifest, MODEL, layouts, layout)


@pytest.mark.parametrize("text", LAYOUTS)
def test_what_ranks_write_is_the_model_and_its_state(tmp_path, arrays, text):
    save(tmp_path / "saved", text, arrays)
    shards = ShardedDirectory(tmp_path / "saved")
    for name, tensor in random_hf_weights(MODEL, 3):
        np.testing.assert_array_equal(shards.read(name), tensor, err_msg=name)
    for name, array in arrays.items():
        np.testing.assert_array_equal(shards.read_array(name), array, err_msg=name)
    assert open_source(tmp_path / "saved").dtypes.keys() == arrays.keys()


@pytest.mark.parametrize(("first", "second"), [(LAYOUTS[0], LAYOUTS[3]), (LAYOUTS[2], LAYOUTS[1])])
def test_shards_under_another_layout(tmp_path, arrays, first, second):
    """As a run that resumes reads them, and as `mindrlhf weights reshard` writes them."""
    save(tmp_path / "saved", first, arrays)
    shard_directory(tmp_path / "saved", tmp_path / "resharded", parallel=second)
    source = open_source(tmp_path / "saved")
    resharded = ShardedDirectory(tmp_path / "resharded")
    layout, layouts = layouts_of(second)
    for rank in range(layout.world_size):
        for one in [one for one in layouts if rank in one.ranks]:
            expected = arrays[one.name][one.shard_of(rank)]
            np.testing.assert_array_equal(source.read_shard(one, rank), expected)
            np.testing.assert_array_equal(resharded.read_shard(rank, one.name), expected)


@pytest.mark.parametrize("text", LAYOUTS)
def test_shards_of_a_hugging_face_directory_and_of_random_weights(tmp_path, arrays, text):
    export_hf(random_hf_weights(MODEL, 3), MODEL, tmp_path / "model")
    layout, layouts = layouts_of(text)
    for source in (open_source(tmp_path / "model"), RandomSource(tmp_path / "model", 3)):
        for rank in range(layout.world_size):
            for one in [one for one in layouts if rank in one.ranks]:
                expected = arrays[one.name][one.shard_of(rank)]
                np.testing.assert_array_equal(source.read_shard(one, rank), expected)


def test_a_shard_that_is_damaged_is_named(tmp_path, arrays):
    save(tmp_path / "saved", LAYOUTS[0], arrays, state=())
    path = tmp_path / "saved" / "rank_1" / "checkpoint_1.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    source = open_source(tmp_path / "saved")
    _, layouts = layouts_of(LAYOUTS[0])
    with pytest.raises(UserError, match=r"checkpoint_1\.safetensors is damaged at"):
        for one in layouts:
            source.read_shard(one, 1)


def test_a_rank_that_gives_too_little_leaves_no_file(tmp_path, arrays):
    layout, layouts = layouts_of(LAYOUTS[0])
    manifest = plan_saving(MODEL, layouts, layout, "float32", state=())
    with pytest.raises(AssertionError, match="rank 0 did not give"):
        write_rank(tmp_path, manifest, 0, [])
    assert list((tmp_path / "rank_0").iterdir()) == []
