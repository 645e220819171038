"""A rank that holds the whole model resumes from the shards that the ranks of a sharded model saved."""

import numpy as np
import pytest
from engines import whole_engine

from mindrlhf.config.model import ModelSection
from mindrlhf.config.run import RunSection
from mindrlhf.config.training import OptimizerSection
from mindrlhf.errors import UserError
from mindrlhf.layout.layout import Layout, parameter_layouts
from mindrlhf.shards.save import finish_saving, plan_saving, write_rank
from mindrlhf.shards.sources import open_source
from mindrlhf.specs import find_spec
from mindrlhf.weights.hf import read_hf_config

LAYOUT = "dp=2,mp=2,pp=1,opt=1"
KINDS = {"adamw": ("exp_avg", "exp_avg_sq"), "muon": ("momentum_buffer", "exp_avg", "exp_avg_sq")}


@pytest.fixture(params=["adamw", "muon"])
def optimizer(request):
    return request.param


@pytest.fixture
def actor(mindformers, inputs_dir, optimizer):
    from networks import load_model

    from mindrlhf.algorithms import policy_losses
    from mindrlhf.algorithms.logprobs import PolicyLogProbs
    from mindrlhf.algorithms.losses import PolicyLoss
    from mindrlhf.training.engine.actor import Actor

    path = str(inputs_dir / "model")
    network = load_model(ModelSection(path=path), path, RunSection(), 16)
    policy = PolicyLogProbs(network, 1.0, "cpu")
    loss = PolicyLoss(policy, policy_losses.surrogate("ppo_clip", clip_low=0.2, clip_high=0.2), on_policy=True)
    return Actor(whole_engine(loss, OptimizerSection(type=optimizer)))


def save_shards(model_dir, directory, ranks=range(4), optimizer="adamw"):
    """Write random shards as some ranks of the layout do; return the whole arrays, and the layouts."""
    hf_config = read_hf_config(model_dir)
    spec = find_spec(hf_config)
    layout = Layout.parse(LAYOUT)
    layouts = parameter_layouts(spec, spec.dims(hf_config), layout)
    manifest = plan_saving(hf_config, layouts, layout, "float32", state=KINDS[optimizer])
    random = np.random.default_rng(0)
    arrays = {
        name: random.standard_normal(array.layout.shape).astype(np.float32) for name, array in manifest.arrays.items()
    }
    arrays["global_step"] = np.array([9], np.int32)
    for rank in ranks:
        names = manifest.infos_of_rank(rank)
        shards = ((name, arrays[name][manifest.arrays[name].layout.shard_of(rank)]) for name in names)
        write_rank(directory, manifest, rank, shards)
    finish_saving(directory, manifest, hf_config, layouts, layout)
    return arrays, layouts


def test_a_rank_reads_its_own_shards_where_those_of_others_are_elsewhere(inputs_dir, tmp_path):
    arrays, layouts = save_shards(inputs_dir / "model", tmp_path / "model", ranks=[2, 3])
    with pytest.raises(UserError, match="rank_0 is missing"):
        open_source(tmp_path / "model")
    source = open_source(tmp_path / "model", is_partial=True)
    for one in layouts:
        for rank in (2, 3):
            np.testing.assert_array_equal(source.read_shard(one, rank), arrays[one.name][one.shard_of(rank)])
    with pytest.raises(UserError, match="rank_0 is missing, and .* is read from it: copy it from the node that holds"):
        source.read_shard(layouts[0], 0)


def test_weights_and_moments_come_from_shards(actor, inputs_dir, tmp_path, optimizer):
    arrays, layouts = save_shards(inputs_dir / "model", tmp_path / "step" / "model", optimizer=optimizer)
    actor.restore(str(tmp_path / "step"))
    for parameter in actor.model.network.get_parameters():
        np.testing.assert_array_equal(parameter.asnumpy(), arrays[parameter.name], err_msg=parameter.name)
    state = {name: parameter.asnumpy() for name, parameter in actor.engine.state.items()}
    matrices = [one for one in layouts if one.name.startswith("decoder.layers.") and len(one.shape) == 2]
    assert len(state) == 1 + 2 * len(layouts) - (len(matrices) if optimizer == "muon" else 0)
    kinds = {name.partition(".")[0] for name in state if name.endswith("mlp.linear_fc1.weight")}
    assert kinds == set(KINDS[optimizer][:1] if optimizer == "muon" else KINDS[optimizer])
    for name, array in state.items():
        np.testing.assert_array_equal(array, arrays[name], err_msg=name)


def test_the_state_of_another_optimizer_is_refused(actor, inputs_dir, tmp_path, optimizer):
    other = {"adamw": "muon", "muon": "adamw"}[optimizer]
    save_shards(inputs_dir / "model", tmp_path / "step" / "model", optimizer=other)
    with pytest.raises(UserError, match=f"set optimizer.type to {other}"):
        actor.restore(str(tmp_path / "step"))
