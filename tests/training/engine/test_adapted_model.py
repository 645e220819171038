"""Adapters in reinforcement learning on a real small model: what is trained, published, saved, restored; the reference
model, which is the policy without them; the critic's own."""

import json

import numpy as np
import pytest
from engines import export
from rewound import Rewound
from safetensors.numpy import load_file
from test_critic import MODEL, PACKED, build_worker, make_sequences

from mindrlhf.training.batch import make_batch

LORA = {"rank": 4, "alpha": 8.0}


@pytest.fixture(scope="module")
def model_dirs(mindformers, tmp_path_factory):
    import mindspore as ms

    from mindrlhf.weights.convert import export_hf, random_hf_weights

    ms.set_context(runtime_num_threads=1)
    directory = tmp_path_factory.mktemp("adapted")
    export_hf(random_hf_weights(MODEL, 3), MODEL, directory / "policy")
    return directory


def step(worker, seed, lr=0.01):
    """Make one update of all rows at once; return statistics, log-probs before it, those of the reference."""
    batch = make_batch(make_sequences(seed), PACKED)
    worker.receive([batch.part_of(0, 1)])
    reference = worker.compute_logprobs("reference_logprobs", 0)[0]
    result = worker.update(0, lr, 0.1)
    return result.statistics, result.logprobs[0], reference


def parameters(worker):
    return {one.name: one.asnumpy().copy() for one in worker.engine.model.network.get_parameters()}


@pytest.fixture(scope="module")
def stepped(model_dirs):
    """A worker after two updates, what it was before, what the updates gave, and its checkpoint in between.

    The last puts it back to how it was built.
    """
    worker = build_worker(model_dirs, algorithm={"beta": 0.1}, lora=LORA)
    before, rewound = parameters(worker), Rewound(worker.engine)
    results = [step(worker, 0)]
    worker.begin_saving(str(model_dirs / "checkpoint"), copies=False)
    results.append(step(worker, 1))
    return worker, before, results, rewound


def test_training_begins_at_the_base(stepped, model_dirs):
    (statistics, logprobs, reference), _ = stepped[2]
    np.testing.assert_array_equal(logprobs, reference)
    assert statistics[3] == 0  # the KL
    moved = stepped[2][1]
    assert moved[0][3] > 0 and np.abs(moved[1] - moved[2]).max() > 1e-4


def test_only_adapters_change_and_only_they_have_gradients_and_moments(stepped):
    worker, before, *_ = stepped
    changed = {name for name, array in parameters(worker).items() if not np.array_equal(array, before[name])}
    factors = {name for name in before if name.endswith(("lora_A", "lora_B"))}
    assert len(factors) == 8 and changed == factors
    held = {one.name for one in worker.engine.state_parameters()}
    assert {name for name in held if name.startswith("grad.")} == {f"grad.{name}" for name in factors}
    moments = {f"{kind}.{name}" for name in factors for kind in ("exp_avg", "exp_avg_sq")}
    assert worker.engine.state.keys() == moments | {"global_step"}


def test_a_resumed_run_makes_the_same_update_to_the_last_bit(stepped, model_dirs):
    """And so leaves the worker as it was."""
    worker, _, results, rewound = stepped
    directory = model_dirs / "checkpoint"
    factors = {name for name in parameters(worker) if name.endswith(("lora_A", "lora_B"))}
    state = {f"{kind}.{name}" for name in factors for kind in ("exp_avg", "exp_avg_sq")}
    saved = load_file(directory / "model" / "rank_0" / "checkpoint_0.safetensors")
    assert saved.keys() == factors | state | {"global_step"}, "the base stays where it is"
    expected = parameters(worker)
    rewound.rewind()
    worker.restore(str(directory))
    for found, wanted in zip(step(worker, 1), results[1], strict=True):
        np.testing.assert_array_equal(found, wanted)
    for name, array in parameters(worker).items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name)


def test_what_is_published_and_exported_is_the_sum(stepped, model_dirs):
    from mindrlhf.weights.publish.publisher import PUBLISH

    worker = stepped[0]
    worker.open_weights(PUBLISH, is_owner=True)
    with worker.weight_buffer() as buffer:
        buffer.commit(worker.publish(1).written["0"])
        published = {name: array.copy() for name, _, array in buffer.tensors(1)}
        (model_dirs / "out").mkdir()
        export(worker, model_dirs / "out" / "final")
    final = load_file(model_dirs / "out" / "final" / "model.safetensors")
    base = load_file(model_dirs / "policy" / "model.safetensors")
    factors = load_file(model_dirs / "out" / "final_adapter" / "adapter_model.safetensors")
    assert published.keys() == final.keys()
    num_changed = 0
    for name, array in final.items():
        np.testing.assert_array_equal(published[name], array, err_msg=name)
        module = "base_model.model." + name.removesuffix(".weight")
        down = factors.get(f"{module}.lora_A.weight")
        if down is None:
            np.testing.assert_array_equal(array, base[name], err_msg=name)
            continue
        total = base[name] + 2.0 * factors[f"{module}.lora_B.weight"].astype(np.float64) @ down
        np.testing.assert_allclose(array, total, atol=1e-6, rtol=0, err_msg=name)
        num_changed += not np.array_equal(array, base[name])
    assert num_changed == 7
    config = json.loads((model_dirs / "out" / "final_adapter" / "adapter_config.json").read_text())
    assert config["target_modules"] == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert (config["r"], config["lora_alpha"], config["task_type"]) == (4, 8.0, "CAUSAL_LM")
    assert config["base_model_name_or_path"] == str(model_dirs / "policy")


def test_a_critic_has_adapters_of_its_own_and_its_projection_is_trained(model_dirs, tmp_path):
    critic = {"path": str(model_dirs / "policy"), "start_lr": 0.01}
    worker = build_worker(model_dirs, algorithm={"name": "ppo"}, critic=critic, lora=LORA)
    critic_parameters = worker.critic.model.network.get_parameters()
    actor, before = parameters(worker), {one.name: one.asnumpy().copy() for one in critic_parameters}
    batch = make_batch(make_sequences(), PACKED)
    worker.receive([batch.part_of(0, 1)])
    assert not worker.compute_values(0)[0].any()  # the projection begins at 0
    for _ in range(2):  # the projection moves first, and with it the adapters have gradients
        worker.update_critic(0, 0.01)
    after = {one.name: one.asnumpy() for one in worker.critic.model.network.get_parameters()}
    changed = {name for name, array in after.items() if not np.array_equal(array, before[name])}
    assert changed == {name for name in before if name.endswith(("lora_A", "lora_B"))} | {"score.weight"}
    for name, array in parameters(worker).items():
        np.testing.assert_array_equal(array, actor[name], err_msg=name)
    export(worker, tmp_path / "final")
    export(worker, tmp_path / "critic", "critic")
    assert {path.name for path in tmp_path.iterdir()} == {"final", "final_adapter", "critic", "critic_adapter"}
    saved = load_file(tmp_path / "critic_adapter" / "adapter_model.safetensors")
    np.testing.assert_array_equal(saved["base_model.model.score.weight"], after["score.weight"])
    assert json.loads((tmp_path / "critic_adapter" / "adapter_config.json").read_text())["task_type"] == "SEQ_CLS"
