"""Cutting and merging: identity to the bit, and the shards that MindSpore's own tools make."""

import json
import os
from unittest import mock

import mindspore
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sharding_models import CONFIG, contents, make_model
from tiny_models import FAMILIES

from mindrlhf.errors import UserError
from mindrlhf.layout import layout as layout_module
from mindrlhf.layout.layout import Layout, parameter_layouts
from mindrlhf.shards.merge import merge_directory
from mindrlhf.shards.shard import shard_directory
from mindrlhf.shards.strategy_files import write_strategy_directory
from mindrlhf.shards.verify import check_coverage, verify_directory
from mindrlhf.specs import find_spec
from mindrlhf.weights.array_file import ArrayFile, save_arrays
from mindrlhf.weights.directories import import_directory
from mindrlhf.weights.hf import SafetensorsDirectory, read_hf_config
from mindrlhf.weights.open import open_tensors
from mindrlhf.weights.sharded import PROGRESS_NAME, RANK_MANIFEST_NAME
from mindrlhf.weights.tensors import array_infos

SPEC = find_spec(CONFIG)
DIMS = SPEC.dims(CONFIG)


@pytest.fixture(autouse=True)
def no_threshold(monkeypatch):
    """Small shards are split by the parallel optimiser too."""
    monkeypatch.setattr(layout_module, "OPTIMIZER_THRESHOLD_BYTES", 0)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "hf")


LAYOUTS = st.builds(
    Layout,
    data_parallel=st.sampled_from([1, 2, 3]),
    model_parallel=st.sampled_from([1, 2, 4]),
    pipeline_stage=st.sampled_from([1, 2, 3]),
    context_parallel=st.sampled_from([1, 2]),
    vocab_emb_dp=st.booleans(),
    optimizer_shard=st.sampled_from([1, -1]),
)


@given(
    layout=LAYOUTS,
    other=LAYOUTS,
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    formats=st.permutations(["safetensors", "ckpt"]),
    architecture=st.sampled_from(["Qwen2ForCausalLM", "Qwen3ForCausalLM"]),
    tied=st.booleans(),
)
@settings(max_examples=10)
def test_merging_undoes_sharding_and_resharding(tmp_path_factory, layout, other, dtype, formats, architecture, tied):
    work = tmp_path_factory.mktemp("identity")
    changes = {"architectures": [architecture], "tie_word_embeddings": tied}
    hf_dir = make_model(work / "hf", dtype, **changes)
    with mock.patch("mindrlhf.shards.shard.write_strategy_directory"):  # slow, and tested by itself
        shard_directory(hf_dir, work / "one", parallel=str(layout), file_format=formats[0], num_workers=2)
        shard_directory(work / "one", work / "two", parallel=str(other), file_format=formats[1], num_workers=1)
    verified = verify_directory(work / "two", against=hf_dir)
    assert verified.num_ranks == other.world_size
    merge_directory(work / "two", work / "back")
    assert contents(work / "back") == contents(hf_dir)
    assert read_hf_config(work / "back") == read_hf_config(hf_dir)


EXPERTS = {**FAMILIES["qwen3_moe"], "model_type": "qwen3_moe", "head_dim": 2, "moe_intermediate_size": 6}
LATENT = FAMILIES["deepseek_v3"] | {
    "model_type": "deepseek_v3", "num_key_value_heads": 8, "num_nextn_predict_layers": 1, "num_experts_per_tok": 2,
    "moe_intermediate_size": 6, "n_routed_experts": 4, "n_shared_experts": 2, "n_group": 2, "topk_group": 1,
    "q_lora_rank": 5, "kv_lora_rank": 3, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 4,
}  # fmt: skip


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("changes", [EXPERTS, LATENT, {"architectures": ["Qwen2ForSequenceClassification"]}])
def test_experts_latent_attention_and_scores(tmp_path, changes, dtype):
    hf_dir = make_model(tmp_path / "hf", "float32", **changes)
    config = read_hf_config(hf_dir)
    experts = ",ep=2" if "num_experts_per_tok" in config else ""
    shard_directory(hf_dir, tmp_path / "one", parallel=f"dp=2,mp=2,pp=3,opt=1{experts}", dtype=dtype)
    shard_directory(tmp_path / "one", tmp_path / "two", strategy=tmp_path / "one" / "strategy")
    shard_directory(tmp_path / "two", tmp_path / "three", parallel="dp=4" + experts.replace("2", "4"))
    verify_directory(tmp_path / "three", against=hf_dir)
    merge_directory(tmp_path / "three", tmp_path / "back")
    if dtype is None:
        assert contents(tmp_path / "back") == contents(hf_dir)
    stages = {
        one.name: one.stages
        for one in parameter_layouts(find_spec(config), find_spec(config).dims(config), Layout.parse("pp=3"))
    }
    assert stages["embedding.word_embeddings.weight"] == (0,)
    assert stages.get("score.weight", (2,)) == (2,)


def save_whole(hf_dir, directory, dtype):
    """The model as one checkpoint in MindSpore's own format, written by MindSpore."""
    import_directory(hf_dir, directory / "mindformers")
    files = SafetensorsDirectory(directory / "mindformers")
    (directory / "full" / "rank_0").mkdir(parents=True)
    numpy_dtype = mindspore.Tensor([0], getattr(mindspore, dtype)).asnumpy().dtype
    whole = [
        {"name": name, "data": mindspore.Tensor(files.read(name).view(numpy_dtype).copy())} for name in files.names()
    ]
    mindspore.save_checkpoint(whole, str(directory / "full" / "rank_0" / "full.ckpt"))
    return directory / "full"


def as_bits(parameters):
    return {name: (str(one.dtype), one.shape, one.asnumpy().tobytes()) for name, one in parameters.items()}


@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        ("mp=4", "float32"),
        ("dp=2,mp=2,pp=2", "float32"),
        ("dp=2,mp=2,pp=2,opt=1", "bfloat16"),
        ("dp=4,mp=2,opt=2", "float32"),
        ("dp=2,cp=2,mp=2,opt=1", "float32"),
        ("pp=3", "bfloat16"),
    ],
)
def test_mindspore_makes_the_same_shards_and_takes_ours_back(tmp_path, text, dtype):
    # NaN bits would not survive MindSpore's way of bfloat16 through float32: ordinary numbers here.
    hf_dir = make_ordinary(tmp_path / "hf", dtype)
    full = save_whole(hf_dir, tmp_path, dtype)
    layout = Layout.parse(text)
    strategy = tmp_path / "strategy"
    write_strategy_directory(strategy, DIMS, layout, parameter_layouts(SPEC, DIMS, layout))
    shard_directory(hf_dir, tmp_path / "ours", strategy=strategy, file_format="ckpt")
    merged = str(strategy / "merged.ckpt")
    mindspore.transform_checkpoints(str(full), str(tmp_path / "theirs"), "checkpoint_", None, merged)
    for rank in range(layout.world_size):
        file = f"rank_{rank}/checkpoint_{rank}.ckpt"
        ours, theirs = (mindspore.load_checkpoint(str(tmp_path / who / file)) for who in ("ours", "theirs"))
        assert as_bits(ours) == as_bits(theirs), rank
    mindspore.transform_checkpoints(str(tmp_path / "ours"), str(tmp_path / "back"), "back_", merged, None)
    back = mindspore.load_checkpoint(str(tmp_path / "back" / "rank_0" / "back_0.ckpt"))
    assert as_bits(back) == as_bits(mindspore.load_checkpoint(str(full / "rank_0" / "full.ckpt")))


def make_ordinary(directory, dtype):
    from mindrlhf.weights.convert import export_hf, random_hf_weights

    export_hf(random_hf_weights(CONFIG, 3), CONFIG, directory, dtype=dtype)
    return directory


def test_mindspore_loads_the_shards_into_a_network(tmp_path):
    hf_dir = make_ordinary(tmp_path / "hf", "float32")
    shard_directory(hf_dir, tmp_path / "out", parallel="dp=2,mp=2", file_format="ckpt")
    import_directory(hf_dir, tmp_path / "mindformers")
    files = SafetensorsDirectory(tmp_path / "mindformers")

    class Network(mindspore.nn.Cell):
        def __init__(self):
            super().__init__()
            zeros = [mindspore.Parameter(np.zeros_like(files.read(name)), name=name) for name in files.names()]
            self.weights = mindspore.ParameterTuple(zeros)

    network = Network()
    paths = [str(tmp_path / "out" / f"rank_{rank}" / f"checkpoint_{rank}.ckpt") for rank in range(4)]
    strategy = str(tmp_path / "out" / "strategy" / "stages" / "strategy_stage_0.ckpt")
    mindspore.load_distributed_checkpoint(network, paths, train_strategy_filename=strategy)
    for parameter in network.get_parameters():
        np.testing.assert_array_equal(parameter.asnumpy(), files.read(parameter.name))


def make_optimizer_state(path, dims=DIMS, seed=1, is_muon=False):
    generator = np.random.default_rng(seed)
    arrays = {"global_step": np.array([7], np.int32)}
    for rule in SPEC.rules(dims):
        is_matrix = "layers" in rule.mf_name and len(rule.mf_shape(dims)) == 2
        for prefix in ("momentum_buffer.",) if is_muon and is_matrix else ("exp_avg.", "exp_avg_sq."):
            arrays[prefix + rule.mf_name] = generator.standard_normal(rule.mf_shape(dims), np.float32)
    save_arrays(path, arrays.items(), array_infos(arrays))
    return arrays


@pytest.mark.parametrize("is_muon", [False, True], ids=["adamw", "muon"])
@pytest.mark.parametrize("file_format", ["safetensors", "ckpt"])
def test_optimizer_state_moves_from_layout_to_layout(tmp_path, model, file_format, is_muon):
    state = make_optimizer_state(tmp_path / "optimizer.safetensors", is_muon=is_muon)
    shard_directory(
        model,
        tmp_path / "one",
        parallel="dp=2,mp=2,pp=2,opt=1",
        file_format=file_format,
        optimizer_file=tmp_path / "optimizer.safetensors",
    )
    shard_directory(tmp_path / "one", tmp_path / "two", parallel="mp=4", file_format=file_format)
    assert verify_directory(tmp_path / "two", against=model).num_arrays == len(state) + len(SPEC.rules(DIMS))
    merge_directory(tmp_path / "two", tmp_path / "back", optimizer_file=tmp_path / "merged.safetensors")
    merged = ArrayFile(tmp_path / "merged.safetensors")
    assert merged.keys() == state.keys()
    for name, array in state.items():
        np.testing.assert_array_equal(merged[name], array, strict=True)
    assert contents(tmp_path / "back") == contents(model)


def test_optimizer_state_of_another_model_is_refused(tmp_path, model):
    make_optimizer_state(tmp_path / "other.safetensors", SPEC.dims({**CONFIG, "vocab_size": 64}))
    with pytest.raises(UserError, match="it is of another model"):
        shard_directory(model, tmp_path / "o", parallel="mp=2", optimizer_file=tmp_path / "other.safetensors")
    make_optimizer_state(tmp_path / "fewer.safetensors", SPEC.dims({**CONFIG, "num_hidden_layers": 2}))
    with pytest.raises(UserError, match=r"lacks exp_avg\.decoder\.layers\.2"):
        shard_directory(model, tmp_path / "o", parallel="mp=2", optimizer_file=tmp_path / "fewer.safetensors")
    state = dict(make_optimizer_state(tmp_path / "mixed.safetensors", is_muon=True))
    name = next(name for name in state if name.startswith("momentum_buffer."))
    state[name.replace("momentum_buffer", "exp_avg")] = state[name]
    save_arrays(tmp_path / "mixed.safetensors", state.items(), array_infos(state))
    with pytest.raises(UserError, match=r"has exp_avg\.decoder\.layers\.\d+.*, which is no optimiser state"):
        shard_directory(model, tmp_path / "o", parallel="mp=2", optimizer_file=tmp_path / "mixed.safetensors")
    shard_directory(model, tmp_path / "o", parallel="mp=2")
    with pytest.raises(UserError, match="holds no optimiser state"):
        merge_directory(tmp_path / "o", tmp_path / "back", optimizer_file=tmp_path / "x.safetensors")


def test_a_sharded_directory_reads_like_the_one_it_was_made_from(tmp_path, model):
    shard_directory(model, tmp_path / "out", parallel="dp=2,mp=2,pp=3,opt=1")
    sharded, original = open_tensors(tmp_path / "out"), open_tensors(model)
    assert set(sharded.names()) == set(original.names())
    for name in sharded.names():
        assert sharded.info(name) == original.info(name)
        assert sharded.read(name).tobytes() == original.read(name).tobytes()
    with pytest.raises(UserError, match="lacks 1 tensor"):
        sharded.check_coverage({"absent": (1,)})


def test_conversion_of_dtype(tmp_path, model):
    shard_directory(make_ordinary(tmp_path / "hf", "float32"), tmp_path / "out", parallel="mp=2", dtype="bfloat16")
    verify_directory(tmp_path / "out", against=tmp_path / "hf")
    merge_directory(tmp_path / "out", tmp_path / "back")
    assert read_hf_config(tmp_path / "back")["torch_dtype"] == "bfloat16"
    make_ordinary(tmp_path / "rounded", "bfloat16")
    assert contents(tmp_path / "back") == contents(tmp_path / "rounded")


@pytest.mark.parametrize(
    ("boxes", "message"),
    [
        ([((0, 2),), ((2, 3),)], r"element \[3\] of p lies in no shard"),
        ([((0, 3),), ((2, 4),)], r"element \[2\] of p lies in several shards"),
        ([((0, 2),), ((0, 2),), ((2, 4),)], r"stored \[1, 2\] times"),
        ([((0, 2),), ((2, 5),)], "beyond its shape"),
    ],
)
def test_coverage_finds_gaps_overlaps_and_lost_replicas(boxes, message):
    with pytest.raises(UserError, match=message):
        check_coverage("p", (4,), boxes)
    assert check_coverage("p", (4,), [((0, 1),), ((1, 4),), ((1, 4),), ((0, 1),)]) == 2


def files_of(directory):
    return sorted(directory.glob("rank_*/*.safetensors"))


def held_bytes(directory):
    """Bytes on the disk: a file with several names counts once."""
    return sum({status.st_ino: status.st_size for status in map(os.stat, files_of(directory))}.values())


@pytest.mark.parametrize("text", ["dp=4", "dp=4,mp=2", "dp=2,mp=2,pp=3", "dp=2,cp=2", "dp=4,mp=2,vocab_emb_dp=1"])
def test_data_parallel_ranks_share_one_file(tmp_path, model, text):
    shard_directory(model, tmp_path / "out", parallel=text)
    shard_directory(
        model, tmp_path / "one", parallel=text.replace("dp=4", "dp=1").replace("dp=2", "dp=1").replace("cp=2", "cp=1")
    )
    layout = Layout.parse(text)
    assert len(files_of(tmp_path / "out")) == layout.world_size
    assert held_bytes(tmp_path / "out") == held_bytes(tmp_path / "one")
    verify_directory(tmp_path / "out")
    # Every rank's manifest is its own, and its file is that of a run that writes each.
    assert [
        json.loads((path.parent / RANK_MANIFEST_NAME).read_text())["rank"] for path in files_of(tmp_path / "out")
    ] == [int(path.parent.name.removeprefix("rank_")) for path in files_of(tmp_path / "out")]
    with mock.patch("os.link", side_effect=OSError("no links here")):
        shard_directory(model, tmp_path / "copies", parallel=text)
    for path in files_of(tmp_path / "out"):
        copy = tmp_path / "copies" / path.relative_to(tmp_path / "out")
        assert copy.read_bytes() == path.read_bytes() and copy.stat().st_nlink == 1


def test_a_rank_that_is_gone_is_linked_again(tmp_path, model):
    shard_directory(model, tmp_path / "out", parallel="dp=3,mp=2")
    files = files_of(tmp_path / "out")
    contents_before = [path.read_bytes() for path in files]
    for path in (files[0], files[3]):  # one that was written, and a link to another
        path.unlink()
    (tmp_path / "out" / "sharded.json").rename(tmp_path / "out" / PROGRESS_NAME)
    lines = []
    shard_directory(model, tmp_path / "out", parallel="dp=3,mp=2", report=lines.append)
    assert [path.read_bytes() for path in files_of(tmp_path / "out")] == contents_before
    assert "4 ranks are there already" in lines and not [line for line in lines if "written" in line]


def test_a_sharded_optimiser_leaves_nothing_to_share(tmp_path, model):
    shard_directory(model, tmp_path / "out", parallel="dp=2,mp=2,opt=1")
    assert {path.stat().st_nlink for path in files_of(tmp_path / "out")} == {1}
