"""Strategy files: read back as written, accepted by MindSpore's own tools, and refused when they do not fit."""

import json
import shutil

import mindspore
import pytest
from mindspore.train.node_strategy_pb2 import ParallelStrategyMap
from sharding_models import CONFIG

from mindrlhf.errors import UserError
from mindrlhf.layout import layout as layout_module
from mindrlhf.layout.layout import Layout, parameter_layouts
from mindrlhf.layout.parameter import ParameterLayout
from mindrlhf.shards.strategy_files import (
    check_strategy_directory,
    read_strategy,
    stage_path,
    strategy_hash,
    write_strategy_directory,
    write_strategy_file,
)
from mindrlhf.specs import find_spec

SPEC = find_spec(CONFIG)
DIMS = SPEC.dims(CONFIG)
SHAPES = {rule.mf_name: rule.mf_shape(DIMS) for rule in SPEC.rules(DIMS)}


@pytest.fixture(autouse=True)
def no_threshold(monkeypatch):
    monkeypatch.setattr(layout_module, "OPTIMIZER_THRESHOLD_BYTES", 0)


def write(directory, text="dp=2,mp=2,pp=2,opt=1"):
    layout = Layout.parse(text)
    layouts = parameter_layouts(SPEC, DIMS, layout)
    write_strategy_directory(directory, DIMS, layout, layouts)
    return layout, layouts


@pytest.mark.parametrize("text", ["dp=2,mp=2,pp=2,opt=1", "dp=4,mp=2,opt=2", "mp=4", "pp=3", "dp=2,cp=2,mp=2,opt=2"])
def test_read_back_as_written(tmp_path, text):
    layout, layouts = write(tmp_path, text)
    assert read_strategy(tmp_path, DIMS, SHAPES) == (layouts, layout)
    assert read_strategy(tmp_path / "merged.ckpt", DIMS, SHAPES) == (layouts, None)
    assert read_strategy(tmp_path / "stages", DIMS, SHAPES) == (layouts, None)


def test_an_axis_split_twice_is_read_back(tmp_path):
    layout = ParameterLayout("decoder.x", (12, 2), (0,), (2, 3, 2), ((2, 0), -1))
    write_strategy_file(tmp_path / "s.ckpt", [layout], 0)
    assert read_strategy(tmp_path / "s.ckpt", DIMS, {"decoder.x": (12, 2)})[0] == [layout]


def test_mindspore_reads_the_same_ranks_out_of_them(tmp_path):
    _, layouts = write(tmp_path)
    merged = str(tmp_path / "merged.ckpt")
    # A rank of the whole model needs, from shards, every rank that writes a shard.
    writers = {rank for layout in layouts for rank in layout.writers()}
    assert set(mindspore.rank_list_for_transform(0, merged, None)) == writers == set(range(8))
    mindspore.merge_pipeline_strategys(str(tmp_path / "stages"), str(tmp_path / "again.ckpt"))
    again = ParallelStrategyMap.FromString((tmp_path / "again.ckpt").read_bytes())
    names = {item.param_name for item in again.parallel_layout_item}
    assert names == {f"{stage}-{layout.name}" for layout in layouts for stage in layout.stages}


def test_optimiser_state_in_compiled_files_is_passed_over(tmp_path):
    _, layouts = write(tmp_path)
    path = stage_path(tmp_path, 0)
    message = ParallelStrategyMap.FromString(path.read_bytes())
    extra = message.parallel_layout_item.add()
    extra.CopyFrom(message.parallel_layout_item[0])
    extra.param_name = "adam_m." + message.parallel_layout_item[0].param_name
    path.write_bytes(message.SerializeToString())
    assert read_strategy(tmp_path / "stages", DIMS, SHAPES)[0] == layouts


def test_the_hash_tells_models_and_layouts_apart():
    layout = Layout.parse("mp=2")
    other = find_spec(CONFIG).dims({**CONFIG, "num_hidden_layers": 4})
    hashes = {strategy_hash(DIMS, layout), strategy_hash(other, layout), strategy_hash(DIMS, Layout.parse("mp=4"))}
    assert len(hashes) == 3 and strategy_hash(DIMS, Layout.parse("mp=2")) in hashes


def refused(path, dims=DIMS, shapes=SHAPES):
    with pytest.raises(UserError) as raised:
        read_strategy(path, dims, shapes)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_damaged_and_foreign_files(tmp_path):
    assert "does not exist" in refused(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    assert "has no strategy file" in refused(tmp_path / "empty")
    write(tmp_path / "good")
    merged = (tmp_path / "good" / "merged.ckpt").read_bytes()
    for name, content in {
        "half": merged[: len(merged) // 2],
        "noise": b"\xff" * 99,
        "nothing": b"",
        "text": b"hello",
    }.items():
        (tmp_path / f"{name}.ckpt").write_bytes(content)
        assert "is damaged or no strategy file" in refused(tmp_path / f"{name}.ckpt")
    (tmp_path / "good" / "merged.ckpt").write_bytes(merged[:-1] + b"\x07")
    assert "merged.ckpt is damaged or of another config" in refused(tmp_path / "good")
    (tmp_path / "good" / "merged.ckpt").unlink()
    assert "merged.ckpt is missing" in refused(tmp_path / "good")


def test_another_model(tmp_path):
    write(tmp_path)
    changed = {**CONFIG, "num_hidden_layers": 4}
    dims = SPEC.dims(changed)
    shapes = {rule.mf_name: rule.mf_shape(dims) for rule in SPEC.rules(dims)}
    assert "strategy of another model (num_layers is 3, the model has 4)" in refused(tmp_path, dims, shapes)
    assert "says nothing about decoder.layers.3" in refused(tmp_path / "merged.ckpt", dims, shapes)
    fewer = {name: shape for name, shape in SHAPES.items() if ".layers.2." not in name}
    assert "which the model does not" in refused(tmp_path / "merged.ckpt", DIMS, fewer)
    odd = {name: tuple(size + 1 for size in shape) for name, shape in SHAPES.items()}
    assert "does not divide by its device matrix" in refused(tmp_path / "merged.ckpt", DIMS, odd)
    flat = {name: (shape[0],) for name, shape in SHAPES.items()}
    assert "does not fit" in refused(tmp_path / "merged.ckpt", DIMS, flat)


def test_another_config(tmp_path):
    layout, _ = write(tmp_path / "a")
    assert check_strategy_directory(tmp_path / "a", DIMS, layout) == layout
    with pytest.raises(UserError, match="was made for another config"):
        check_strategy_directory(tmp_path / "a", DIMS, Layout.parse("mp=4,pp=2"))
    write(tmp_path / "b", "mp=4,pp=2")
    shutil.copy(tmp_path / "b" / "merged.ckpt", tmp_path / "a" / "merged.ckpt")
    assert "damaged or of another config" in refused(tmp_path / "a")
    description = json.loads((tmp_path / "b" / "strategy.json").read_text())
    description["layout"]["data_parallel"] = 2
    (tmp_path / "b" / "strategy.json").write_text(json.dumps(description))
    assert "was changed after it was written" in refused(tmp_path / "b")
    (tmp_path / "b" / "strategy.json").write_text("{}")
    assert "strategy.json is damaged" in refused(tmp_path / "b")


def test_a_missing_stage(tmp_path):
    write(tmp_path, "pp=3")
    stage_path(tmp_path, 1).unlink()
    assert "lacks pipeline stage 1" in refused(tmp_path / "stages")
