"""A rank that holds the whole model resumes from the shards that the ranks of a sharded model saved."""

import numpy as np
import pytest

from mindrlhf.config.sections import ModelSection, OptimizerSection, RunSection
from mindrlhf.layout.layout import Layout, parameter_layouts
from mindrlhf.shards.save import finish_saving, plan_saving, write_rank
from mindrlhf.specs import find_spec
from mindrlhf.weights.hf import read_hf_config

LAYOUT = "dp=2,mp=2,pp=1,opt=1"


@pytest.fixture
def actor(inputs_dir, tmp_path):
    from mindrlhf.algorithms import policy_losses
    from mindrlhf.algorithms.logprobs import PolicyLogProbs
    from mindrlhf.algorithms.losses import PolicyLoss
    from mindrlhf.models.context import prepare_mindformers
    from mindrlhf.models.load import load_model
    from mindrlhf.training.runtime import Rank
    from mindrlhf.training.worker.actor import Actor
    from mindrlhf.training.worker.policy_learner import PolicyLearner

    prepare_mindformers("cpu", tmp_path / "log")
    path = str(inputs_dir / "model")
    network = load_model(ModelSection(path=path), path, RunSection(), 16)
    policy = PolicyLogProbs(network, 1.0, "cpu")
    loss = PolicyLoss(policy, policy_losses.surrogate("ppo_clip", clip_low=0.2, clip_high=0.2), on_policy=True)
    return Actor(PolicyLearner(network, loss, OptimizerSection(), Rank(0, 1), "cpu"), None, saves_reference=False)


def test_weights_and_moments_come_from_shards(actor, inputs_dir, tmp_path):
    from mindrlhf.checkpoint.optimizer import optimizer_arrays

    hf_config = read_hf_config(inputs_dir / "model")
    spec = find_spec(hf_config)
    layout = Layout.parse(LAYOUT)
    layouts = parameter_layouts(spec, spec.dims(hf_config), layout)
    manifest = plan_saving(hf_config, layouts, layout, "float32", with_state=True)
    random = np.random.default_rng(0)
    arrays = {
        name: random.standard_normal(array.layout.shape).astype(np.float32) for name, array in manifest.arrays.items()
    }
    arrays["global_step"] = np.array([9], np.int32)
    for rank in range(layout.world_size):
        names = manifest.infos_of_rank(rank)
        shards = ((name, arrays[name][manifest.arrays[name].layout.shard_of(rank)]) for name in names)
        write_rank(tmp_path / "step" / "model", manifest, rank, shards)
    finish_saving(tmp_path / "step" / "model", manifest, hf_config, layouts, layout)
    actor.restore(str(tmp_path / "step"))
    for parameter in actor.learner.network.get_parameters():
        np.testing.assert_array_equal(parameter.asnumpy(), arrays[parameter.name], err_msg=parameter.name)
    state = dict(optimizer_arrays(actor.learner.optimizer))
    assert len(state) == 1 + 2 * len(layouts)
    for name, array in state.items():
        np.testing.assert_array_equal(array, arrays[name], err_msg=name)
