"""Strategies by compilation: what is refused before compiling, and how layers and stages are extended by name."""

import dataclasses
import json

import pytest
from tiny_models import tiny_model

from mindrlhf.dryrun.compile.report import report_strategy
from mindrlhf.dryrun.compile.strategy import extend_strategies, shorten
from mindrlhf.errors import RunFailure, UserError
from mindrlhf.layout.feasibility import check_num_ranks
from mindrlhf.layout.layout import Layout, parameter_layouts
from mindrlhf.shards.strategy_files import finish_strategy_directory, read_strategy, stage_path, write_strategy_file
from mindrlhf.specs import find_spec
from mindrlhf.weights.hf import read_hf_config

CONFIG = """
run: {device: ascend}
model: {path: MODEL}
data: {train_file: prompts.mindrecord, tokenizer_dir: MODEL}
reward: {verifier_function: accuracy_reward}
rollout: {max_response_length: 32}
training: {sequence_lengths: [64], micro_batch_size: 4}
parallel_config: {vocab_emb_dp: false}
"""
SIZES = {"hidden_size": 96, "num_hidden_layers": 6, "num_attention_heads": 6, "head_dim": 16}
HF_CONFIG = tiny_model("qwen3", vocab_size=384, intermediate_size=192, **SIZES)


@pytest.fixture
def config(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(HF_CONFIG))
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG.replace("MODEL", str(tmp_path / "model")))
    return path


IMPOSSIBLE = [
    (["model_parallel=4"], 4, r"model_parallel is 4, but the model has 6 query heads: set it to one of 1, 2"),
    (["model_parallel=3"], 3, r"model_parallel is 3, but the model has 2 key/value heads: set it to one of 1, 2"),
    (["pipeline_stage=8", "micro_batch_num=8"], 8, r"pipeline_stage is 8, but the model has 6 layers: set it to 6"),
    (["model_parallel=2"], 5, r"5 ranks do not divide by .* = 2: start 6 workers"),
    (["data_parallel=2"], 4, r"makes 2 ranks, but 4 were started: set data_parallel to 4"),
    (["context_parallel=24"], 24, r"'training.sequence_lengths' has 64, which does not divide over 24 ranks"),
    (["expert_parallel=2"], 2, r"expert_parallel is 2, but the model has no experts: set it to 1"),
    (["micro_batch_num=3"], 1, r"'training.micro_batch_size' is 4, .* 3 equal pipeline micro-batches: set it to 6"),
    (["pipeline_stage=2", "micro_batch_num=2", "TIED"], 2, r"output layer is its embedding .*: set it to 1"),
    ([], 1, r"--output .*out exists"),
]
# What spans a response refuses context parallelism.
IMPOSSIBLE += [
    (["context_parallel=2", override], 2, message)
    for override, message in (
        ("algorithm.loss=gspo", r"splits responses, but 'algorithm.loss' is gspo, .* to ppo_clip"),
        ("algorithm.loss=gspo_token", r"'algorithm.loss' is gspo_token"),
        ("algorithm.name=rloo", r"'algorithm.loss' is sequence_clip"),
        ("correction.weight=sequence", r"'correction.weight' is sequence, .* token or none"),
        ("correction.mask=geometric", r"'correction.mask' is geometric"),
        ("correction.off_policy_mask=0.1", r"'correction.off_policy_mask' is 0.1, .* to 0"),
        ("correction.veto=0.0001", r"'correction.veto' is 0.0001, .* to 0"),
    )
]


@pytest.mark.parametrize(("overrides", "world_size", "message"), IMPOSSIBLE)
def test_what_is_impossible_is_explained_before_compiling(config, tmp_path, overrides, world_size, message):
    if "TIED" in overrides:
        overrides = [override for override in overrides if override != "TIED"]
        (tmp_path / "model" / "config.json").write_text(json.dumps({**HF_CONFIG, "tie_word_embeddings": True}))
    words = [override if "." in override.partition("=")[0] else f"parallel_config.{override}" for override in overrides]
    exists = "exists" in message
    if exists:
        (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match=message):
        report_strategy(config, words, world_size=world_size, directory=tmp_path / "out", layers_per_stage="auto")
    assert (tmp_path / "out").exists() == exists


@pytest.mark.parametrize(("num_ranks", "choice"), [(3, 4), (5, 8), (12, 16)])
def test_numbers_of_ranks_that_mindspore_refuses(num_ranks, choice):
    with pytest.raises(UserError, match=f"has {num_ranks} ranks, .*: use {choice}$"):
        check_num_ranks(num_ranks)
    check_num_ranks(choice)


def test_a_shortened_model_keeps_a_layer_of_each_kind():
    assert shorten({"num_hidden_layers": 61, "first_k_dense_replace": 3}, 4) == {
        "num_hidden_layers": 4,
        "first_k_dense_replace": 1,
    }
    assert shorten({"num_hidden_layers": 28}, 2) == {"num_hidden_layers": 2}
    linear = shorten(read_hf_config("model_configs/qwen3_5/qwen3_5_9b"), 4)
    assert find_spec(linear).dims(linear).linear.layers == (True, False, True, False)


@pytest.mark.parametrize("num_layers", [6, 7, 11])
def test_extension_gives_the_layouts_of_the_whole_model(tmp_path, num_layers):
    """Files of three layers in three stages, extended, are those of the model in four; uneven stages too."""
    layout = Layout(data_parallel=2, model_parallel=2, pipeline_stage=4, optimizer_shard=-1)
    compiled = dataclasses.replace(layout, pipeline_stage=3)
    whole, short = ({**HF_CONFIG, "num_hidden_layers": number} for number in (num_layers, 3))
    spec = find_spec(whole)
    dims = spec.dims(whole)
    (tmp_path / "stages").mkdir()
    for stage in range(3):
        write_strategy_file(tmp_path / "compiled.ckpt", parameter_layouts(spec, spec.dims(short), compiled), stage)
        (tmp_path / "compiled.ckpt").rename(stage_path(tmp_path, (0, 1, 3)[stage]))
    extend_strategies(tmp_path, spec, dims, layout)
    finish_strategy_directory(tmp_path, dims, layout)
    expected = parameter_layouts(spec, dims, layout)
    found, found_layout = read_strategy(tmp_path, dims, {one.name: one.shape for one in expected})
    assert found_layout == layout
    for one, other in zip(expected, found, strict=True):
        assert (one.name, one.stages) == (other.name, other.stages)
        assert [one.shard_of(rank) for rank in one.ranks] == [other.shard_of(rank) for rank in other.ranks]


def test_a_kind_of_layer_that_was_not_compiled_is_an_error(tmp_path):
    qwen2, qwen3 = ({**HF_CONFIG, "architectures": [name]} for name in ("Qwen2ForCausalLM", "Qwen3ForCausalLM"))
    layout = Layout()
    compiled, spec = find_spec(qwen2), find_spec(qwen3)
    (tmp_path / "stages").mkdir()
    short = compiled.dims({**qwen2, "num_hidden_layers": 1})
    write_strategy_file(stage_path(tmp_path, 0), parameter_layouts(compiled, short, layout), 0)
    with pytest.raises(RunFailure, match=r"stage 0 has a kind of layer \(layer 0\) that was not compiled"):
        extend_strategies(tmp_path, spec, spec.dims(qwen3), layout)
