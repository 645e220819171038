"""What ranks publish, save and take of adapters, in several layouts: equal to one rank that has all of it."""

import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny_models import tiny_model

from mindrlhf.config.training import ParallelSection
from mindrlhf.errors import UserError
from mindrlhf.specs import find_spec, scorer_config
from mindrlhf.specs.lora import LoraOptions
from mindrlhf.weights.convert import export_hf, random_hf_weights
from mindrlhf.weights.publish.buffer import WeightBuffer
from mindrlhf.weights.tensors import TensorInfo

MODEL = tiny_model(hidden_size=256, intermediate_size=192, num_hidden_layers=2, num_key_value_heads=4)
# Large enough that a sharded optimiser would cut the factors, if it were let.
OPTIONS = LoraOptions(128, 64.0)
WHOLE = {"data_parallel": 1, "enable_parallel_optimizer": True}
LAYOUTS = {
    "tp2": {"data_parallel": 1, "model_parallel": 2},
    "tp2 dp2 sharded optimiser": {"data_parallel": 2, "model_parallel": 2, "enable_parallel_optimizer": True},
    "tp4": {"data_parallel": 1, "model_parallel": 4},
    "tp2 pp2": {"data_parallel": 1, "model_parallel": 2, "pipeline_stage": 2, "micro_batch_num": 2},
}


@pytest.fixture(scope="module", params=["language model", "reward model"])
def base(request, tmp_path_factory):
    """The directory of the base; of a reward model in its scoring form."""
    directory = tmp_path_factory.mktemp("base") / "model"
    hf_config = MODEL if request.param == "language model" else scorer_config(MODEL)
    export_hf(random_hf_weights(hf_config, 1), hf_config, directory)
    return directory


def make_ranks(base, layout, targets=()):
    """The shards of all ranks, loaded; B is not 0, as after some training."""
    import mindspore as ms
    from graph_on_cpu.model import DescribedModel

    from mindrlhf.models.lora.model import scale_name
    from mindrlhf.shards.sources import open_source
    from mindrlhf.training.checkpoints import models
    from mindrlhf.training.engine.factory import layout_of, network_layouts
    from mindrlhf.training.engine.shards import Shards
    from mindrlhf.weights.hf import read_hf_config

    parallel, source, ranks = ParallelSection(**layout), open_source(base), []
    options = {"rank": OPTIONS.rank, "alpha": OPTIONS.alpha, "targets": targets}
    network = DescribedModel(read_hf_config(base), options)
    layouts = network_layouts(network, layout_of(parallel))
    for rank in range(layout_of(parallel).world_size):
        held = [one for one in layouts if rank // one.stage_size in one.stages]
        parameters = {one.name: ms.Parameter(np.zeros(one.shard_shape, np.float32), name=one.name) for one in held}
        scale = scale_name(layout_of(parallel).stage_of(rank))
        parameters[scale] = ms.Parameter(np.array([OPTIONS.scale], np.float32), name=scale)
        shard = Shards(network, parallel, rank, parameters)
        models.load(shard, source)
        models.begin_adapters(shard, 3, "")
        for one in held:
            if one.name.endswith("lora_B"):
                seed = [7, *one.name.encode()]
                whole = np.random.default_rng(seed).standard_normal(one.shape).astype(np.float32)
                parameters[one.name].set_data(ms.Tensor(np.ascontiguousarray(whole[one.shard_of(rank)])))
        ranks.append(shard)
    return ranks


def published(ranks, base, bucket_bytes):
    spec = find_spec(ranks[0].network.hf_config)
    dims = ranks[0].network.dims
    infos = [
        TensorInfo(name, "float32", shape)
        for rule in spec.rules(dims)
        for name, shape in zip(rule.hf_names, rule.shape(dims))
    ]
    with WeightBuffer.create(infos, bucket_bytes) as buffer:
        buffers = [WeightBuffer.attach(buffer.path, writable=True) for _ in ranks]
        assert bool(bucket_bytes) == (buffer.num_buckets > 1)
        for version in (1, 2):  # the second time what has no adapter is kept
            found = {}
            for bucket in range(buffer.num_buckets):
                buffer.begin(version, bucket)
                for own, rank in zip(buffers, ranks):
                    own.begin(version, bucket)
                    rank.write_to(own)
                buffer.commit([one for own in buffers for one in own.written()])
                buffer.verify(version)
                found |= {name: array.copy() for name, _, array in buffer.tensors(version)}
        for own in buffers:
            own.close()
    return found


def save(ranks, directory):
    from mindrlhf.training.checkpoints import models

    for rank in reversed(ranks):  # rank 0 makes the directory whole
        models.state_writer(rank, "model", lambda _, arrays: list(arrays))(directory)
    return directory / "model"


@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_publish_and_save_what_one_rank_does(base, tmp_path, name):
    from mindrlhf.shards.merge import merge_directory
    from mindrlhf.weights.adapters.merge import merge_adapter

    one, several = make_ranks(base, WHOLE), make_ranks(base, LAYOUTS[name])
    expected, found = published(one, base, 0), published(several, base, 1 << 16)
    tensors = load_file(base / "model.safetensors")
    assert found.keys() == expected.keys() == tensors.keys()
    for hf_name, tensor in expected.items():
        # The products of parts of B are those of all of it, but for the order in which a library adds them up.
        np.testing.assert_allclose(found[hf_name], tensor, rtol=0, atol=1e-4, err_msg=hf_name)
        is_adapted = ".layers." in hf_name and "_proj.weight" in hf_name
        assert (np.abs(tensor - tensors[hf_name]).max() > 0.1) == is_adapted, hf_name
    for ranks, directory in ((one, tmp_path / "one"), (several, tmp_path / "several")):
        merge_directory(save(ranks, directory), directory / "adapter")
    adapters = [load_file(tmp_path / which / "adapter" / "adapter_model.safetensors") for which in ("one", "several")]
    assert adapters[0].keys() == adapters[1].keys()
    for hf_name, tensor in adapters[0].items():
        np.testing.assert_array_equal(adapters[1][hf_name], tensor, err_msg=hf_name)
    merge_adapter(base, tmp_path / "several" / "model", tmp_path / "merged")
    for hf_name, tensor in load_file(tmp_path / "merged" / "model.safetensors").items():
        np.testing.assert_allclose(tensor, expected[hf_name], rtol=0, atol=1e-4, err_msg=hf_name)


@pytest.mark.parametrize("kind", ["shards", "PEFT"])
def test_ranks_of_another_layout_go_on(base, tmp_path, kind):
    """From shards, as of a checkpoint, and from a directory in PEFT's format, as of lora.path."""
    from mindrlhf.shards.merge import merge_directory
    from mindrlhf.training.checkpoints import models

    several, others = make_ranks(base, LAYOUTS["tp2 dp2 sharded optimiser"]), make_ranks(base, LAYOUTS["tp2 pp2"])
    expected = [{name: array.copy() for name, array in rank.shards()} for rank in others]
    saved = save(several, tmp_path)
    if kind == "PEFT":
        merge_directory(saved, tmp_path / "adapter")
        saved = tmp_path / "adapter"
    for rank, before in zip(others, expected):
        models.begin_adapters(rank, 11, "")
        assert any((array != before[name]).any() for name, array in rank.shards())
        models.restore(rank, saved)
        for name, array in rank.shards():
            np.testing.assert_array_equal(array, before[name], err_msg=name)


@pytest.mark.parametrize(("saved", "wanted", "verb"), [((), ("attention",), "holds"), (("attention",), (), "lacks")])
def test_an_adapter_of_other_matrices_is_refused(base, tmp_path, saved, wanted, verb):
    from mindrlhf.training.checkpoints import models

    directory = save(make_ranks(base, LAYOUTS["tp2"], saved), tmp_path)
    with pytest.raises(UserError, match=rf"{verb} .*mlp.linear_fc1.lora_A: it is no adapter of the same model"):
        models.restore(make_ranks(base, LAYOUTS["tp2"], wanted)[0], directory)
