"""`mindrlhf strategy` end to end on a small model: what it writes, MindSpore reads."""

import json

import pytest
from layout_matrix import QWEN3, hf_config
from slow_tests import SIMULATES_CANN, SLOW

from mindrlhf.cli import main
from mindrlhf.layout.layout import Layout, parameter_layouts
from mindrlhf.shards.strategy_files import read_strategy
from mindrlhf.specs import find_spec

pytestmark = [SLOW, SIMULATES_CANN, pytest.mark.timeout(1200)]

CONFIG = """
run: {device: ascend}
model: {path: MODEL, compute_dtype: bfloat16, recompute: true}
data: {train_file: prompts.mindrecord, tokenizer_dir: MODEL}
reward: {verifier_function: accuracy_reward}
rollout: {max_response_length: 32, tensor_parallel: 2}
training: {sequence_lengths: [64], micro_batch_size: 4}
parallel_config: {model_parallel: 2, pipeline_stage: 4, micro_batch_num: 4, vocab_emb_dp: false}
"""


@pytest.fixture(scope="module")
def strategies(tmp_path_factory):
    """For five layers in four stages: one compiled layer for each of three stages, and all layers."""
    directory = tmp_path_factory.mktemp("strategy")
    (directory / "model").mkdir()
    (directory / "model" / "config.json").write_text(json.dumps(hf_config(QWEN3, 5)))
    config = directory / "config.yaml"
    config.write_text(CONFIG.replace("MODEL", str(directory / "model")))
    for layers in ("1", "all"):
        arguments = [str(config), "--workers", "32", "--output", str(directory / layers), "--layers-per-stage", layers]
        assert main(["strategy", *arguments, "parallel_config.enable_parallel_optimizer=true"]) == 0
    return directory


def test_few_layers_extended_equal_all_layers_compiled(strategies):
    from mindspore.train.node_strategy_pb2 import ParallelStrategyMap

    for stage in range(4):
        layouts = []
        for layers in ("1", "all"):
            message = ParallelStrategyMap()
            message.ParseFromString((strategies / layers / "stages" / f"strategy_stage_{stage}.ckpt").read_bytes())
            layouts.append(
                {item.param_name: item.parallel_layouts.SerializeToString() for item in message.parallel_layout_item}
            )
        extended, compiled = layouts
        # MindSpore lists the inputs of the graph too.
        compiled = {name: layout for name, layout in compiled.items() if not name.startswith("inputs")}
        extended = {name: layout for name, layout in extended.items() if not name.startswith("inputs")}
        assert extended == compiled


def test_the_strategy_is_the_one_computed_from_the_config(strategies):
    config = hf_config(QWEN3, 5)
    spec = find_spec(config)
    dims = spec.dims(config)
    layout = Layout(data_parallel=4, model_parallel=2, pipeline_stage=4, optimizer_shard=-1)
    computed = parameter_layouts(spec, dims, layout)
    found, described = read_strategy(strategies / "1", dims, {one.name: one.shape for one in computed})
    assert described == layout
    for one, other in zip(computed, found, strict=True):
        assert (one.name, one.stages) == (other.name, other.stages)
        assert [one.shard_of(rank) for rank in one.ranks] == [other.shard_of(rank) for rank in other.ranks]


def test_mindspore_merges_the_stage_files(strategies, tmp_path):
    import mindspore

    mindspore.merge_pipeline_strategys(str(strategies / "1" / "stages"), str(tmp_path / "merged.ckpt"))
    assert (tmp_path / "merged.ckpt").read_bytes() == (strategies / "1" / "merged.ckpt").read_bytes()
    ranks = mindspore.rank_list_for_transform(0, str(tmp_path / "merged.ckpt"), None)
    assert sorted(ranks) == list(range(32))


def test_the_rollout_layout_lies_beside(strategies):
    config = hf_config(QWEN3, 5)
    dims = find_spec(config).dims(config)
    shapes = {one.name: one.shape for one in parameter_layouts(find_spec(config), dims, Layout())}
    _, described = read_strategy(strategies / "1" / "rollout", dims, shapes)
    assert described == Layout(model_parallel=2)
