"""Parallel graphs, compiled for Ascend and executed by msrun on CPU ranks, train like one plain process.

The ranks run the product's worker of a sharded model, and rank 0 its team and policy. The plain process uses the cells
of the product on the CPU, which share no code with the Ascend cells, and knows nothing of parallelism. What the ranks
publish to the weight buffer is compared with the tensors themselves.
"""

import dataclasses
import json
import platform
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from execution_cases import (
    IS_LAST,
    LAYOUTS,
    LEARNING_RATE,
    MODEL,
    NOT_FINITE,
    WITH_LOGPROBS,
    batches,
    hf_weights,
    mf_weights,
    plain_learner,
    plain_network,
)
from execution_jobs import compile_and_execute, execute_over_machines
from slow_tests import SLOW

from mindrlhf.config.sections import COLLECTIVES, TCP
from mindrlhf.specs import find_spec
from mindrlhf.specs.fuse import split

pytestmark = [
    pytest.mark.timeout(2400),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the simulation of CANN is x86-64 only"),
]

TOLERANCE = 1e-5
OLD_LOGPROBS = 6  # their place among the inputs of the update
FIRST_UPDATE = IS_LAST.index(True) + 1  # its number of calls
NAMES = [name for layouts in LAYOUTS.values() for name in layouts]


@pytest.fixture(scope="module")
def executions(tmp_path_factory):
    """The result of every layout by name."""
    from mindrlhf.algorithms.losses import POLICY_INPUTS
    from mindrlhf.dryrun.compile.request import LOGPROBS, UPDATE

    root = tmp_path_factory.mktemp("execution")
    computed = dict.fromkeys(WITH_LOGPROBS, "old_logprobs")
    return compile_and_execute(root, MODEL, LAYOUTS, batches(), (UPDATE, LOGPROBS), POLICY_INPUTS, computed)


@dataclass
class Plain:
    """What one process computes.

    Attributes:
        losses: of each call.
        statistics, norms: of each update.
        initial, started, trained: log-probabilities of the rows of each call under the initial weights, those that the
            update of the call began with, and the final weights.
        weights: the final ones.
    """

    losses: list[float]
    statistics: list[np.ndarray]
    norms: list[float]
    initial: list[np.ndarray]
    started: list[np.ndarray]
    trained: list[np.ndarray]
    weights: dict[str, np.ndarray]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The same training by one process, by whether it computes the old log-probabilities."""
    log_dir, kinds = tmp_path_factory.mktemp("mindformers-log"), {name in WITH_LOGPROBS for name in NAMES}
    return {is_computed: train_plainly(log_dir, is_computed) for is_computed in kinds}


def train_plainly(log_dir: Path, computes_logprobs: bool, model: dict = MODEL) -> Plain:
    from mindrlhf.data.packing import PackedRows

    network = plain_network(log_dir, model)
    parameters = {parameter.name: parameter for parameter in network.get_parameters()}
    learner = plain_learner(network)
    rows = [PackedRows(*inputs[:4], tokens={}) for inputs in batches()]

    def logprobs():
        return [learner.model.logprobs(one) for one in rows]

    initial = current = logprobs()
    statistics, norms, started = [], [], []
    for call, (inputs, is_last) in enumerate(zip(batches(), IS_LAST)):
        if computes_logprobs:
            inputs[OLD_LOGPROBS] = initial[call]
        kl_coefficient, num_tokens = inputs[9][0]
        statistics.append(learner.accumulate(rows[call], [*inputs[4:9], kl_coefficient], num_tokens)[0])
        started.append(current[call])
        if is_last:
            norms.append(learner.apply(LEARNING_RATE))
            assert np.isfinite(norms[-1]) == (call != NOT_FINITE + 1)
            current = logprobs()
    ends = [call + 1 for call, is_last in enumerate(IS_LAST) if is_last]
    return Plain(
        losses=[one[0] for one in statistics],
        statistics=[sum(part) for part in np.split(np.array(statistics), ends[:-1])],
        norms=norms,
        initial=initial,
        started=initial if computes_logprobs else started,
        trained=current,
        weights={name: parameter.asnumpy() for name, parameter in parameters.items()},
    )


@pytest.mark.parametrize("name", NAMES)
def test_losses_are_those_of_one_process(executions, plain, name):
    losses = plain[name in WITH_LOGPROBS].losses
    assert [np.isnan(loss) for loss in losses] == [call == NOT_FINITE for call in range(len(IS_LAST))]
    np.testing.assert_allclose(executions[name].losses, losses, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", NAMES)
def test_statistics_and_norms_of_updates_are_those_of_one_process(executions, plain, name):
    """The ranks' statistics add up to those of all rows: no replica counts twice, no stage is left out."""
    expected = plain[name in WITH_LOGPROBS]
    assert len(executions[name].statistics) == len(expected.statistics) == sum(IS_LAST)
    for found, summed in zip(executions[name].statistics, expected.statistics):
        assert found.shape == summed.shape == (7,)
        np.testing.assert_allclose(found, summed, rtol=1e-4, atol=TOLERANCE)
    np.testing.assert_allclose(executions[name].grad_norms, expected.norms, rtol=1e-4)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "kind, of_plain", [("first", "started"), ("reference", "initial"), ("synchronised", "trained")]
)
def test_logprobs_are_those_of_one_process(executions, plain, name, kind, of_plain):
    """Of the policy as its updates began; of the reference; and of the reference as a copy of the trained policy."""
    found = executions[name].outputs[kind]
    assert len(found) == len(IS_LAST)
    for one, expected in zip(found, getattr(plain[name in WITH_LOGPROBS], of_plain)):
        assert expected.min() < -4
        np.testing.assert_allclose(one, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", NAMES)
def test_training_moves_logprobs_further_than_the_tolerance(executions, name):
    outputs = executions[name].outputs
    for old, new in zip(outputs["reference"], outputs["synchronised"]):
        assert np.abs(old - new).max() > 100 * TOLERANCE


@pytest.mark.parametrize("name", NAMES)
def test_updates_after_a_restored_checkpoint_are_the_same_to_the_last_bit(executions, name):
    """The ranks save after the first update, go on, restore, and make the other updates once more."""
    result = executions[name]
    np.testing.assert_array_equal(result.resumed_losses, result.losses[FIRST_UPDATE:])
    assert result.published["resumed"].keys() == result.published["after"].keys()
    for hf_name, tensor in result.published["after"].items():
        np.testing.assert_array_equal(result.published["resumed"][hf_name], tensor, err_msg=hf_name)


@pytest.mark.parametrize("name", NAMES)
def test_the_exported_model_is_what_was_published_last(executions, name):
    from safetensors.numpy import load_file

    published, directory = executions[name].published["after"], executions[name].exported
    (file,) = directory.glob("*.safetensors")
    exported = load_file(file)
    assert exported.keys() == published.keys()
    for hf_name, tensor in published.items():
        np.testing.assert_array_equal(exported[hf_name], tensor, err_msg=hf_name)
    assert json.loads((directory / "config.json").read_text())["hidden_size"] == MODEL["hidden_size"]


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_those_of_one_process(executions, plain, name):
    """Two updates, and between them one that is withheld, since the loss of its first call is not finite."""
    start, trained = mf_weights(), plain[name in WITH_LOGPROBS].weights
    assert executions[name].weights.keys() == trained.keys()
    for parameter, expected in trained.items():
        actual = executions[name].weights[parameter]
        np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE, err_msg=parameter)
        # The training has moved them much further than the tolerance.
        assert np.abs(expected - start[parameter]).max() > 100 * TOLERANCE, parameter


@pytest.mark.parametrize("name", NAMES)
def test_ranks_that_hold_the_same_shard_stay_equal(executions, name):
    assert executions[name].replica_difference == 0.0


@pytest.mark.parametrize("name", NAMES)
def test_buffer_holds_the_logical_tensors(executions, name):
    """Written by all ranks from their own shards, before the first step and after the last."""
    published = executions[name].published
    spec = find_spec(MODEL)
    dims = spec.dims(MODEL)
    trained = {
        hf_name: tensor
        for rule in spec.rules(dims)
        for hf_name, tensor in zip(rule.hf_names, split(rule, dims, executions[name].weights[rule.mf_name]))
    }
    for moment, tensors in (("before", hf_weights()), ("after", trained)):
        assert published[moment].keys() == tensors.keys()
        for hf_name, tensor in tensors.items():
            np.testing.assert_array_equal(published[moment][hf_name], tensor, err_msg=hf_name)


@pytest.mark.parametrize("name", NAMES)
def test_publishing_moves_each_byte_once_and_shares_the_work(executions, name):
    size_bytes = sum(tensor.nbytes for tensor in hf_weights().values())
    written_bytes = executions[name].written_bytes
    assert sum(written_bytes) == size_bytes
    # The largest parameter is a tenth of this model: no rank writes much more than its share.
    assert max(written_bytes) <= 1.25 * size_bytes / len(written_bytes)


@SLOW
@pytest.mark.parametrize(
    "name, carrier",
    [
        (name, carrier)
        for name, carrier in (
            ("pp2", TCP),
            ("pp2", COLLECTIVES),
            ("dp2_optimizer_parallel", TCP),
            ("dp2_optimizer_parallel", COLLECTIVES),
            ("tp2_sequence_parallel", TCP),
            # Not by collectives: with two ranks on each machine they are among some of the ranks.
            ("tp2_pp2", TCP),
        )
        if name in NAMES
    ],
)
def test_two_machines_compute_and_publish_what_one_does_to_the_last_bit(executions, tmp_path, name, carrier):
    """Each machine has a rank (or two) and holds a part of the model; the buffers of both have all of it in the end."""
    one = executions[name]
    graphs = Path(one.job.graphs[0]).parent
    job = dataclasses.replace(one.job, carrier=carrier)
    two = execute_over_machines(job, MODEL, batches(), tmp_path, keep=graphs)
    assert len(set(one.machines)) == 1 and len(set(two.machines)) == 2
    np.testing.assert_array_equal(two.losses, one.losses)
    np.testing.assert_array_equal(two.grad_norms, one.grad_norms)
    for moment, tensors in one.published.items():
        assert two.published[moment].keys() == tensors.keys()
        for hf_name, tensor in tensors.items():
            np.testing.assert_array_equal(two.published[moment][hf_name], tensor, err_msg=f"{moment} {hf_name}")
    for parameter, array in one.weights.items():
        np.testing.assert_array_equal(two.weights[parameter], array, err_msg=parameter)
    assert len({*one.buffers, *two.buffers}) == 1, "the buffers of both machines hold the same"


def test_fused_kernels_and_collectives_were_lowered(executions):
    """The executed graphs are those of the cluster: with Ascend's attention, and collectives that the CPU lacks."""
    assert all(result.lowered["FlashAttentionScore"] >= 1 for result in executions.values())
    assert {"Send", "Receive"} <= executions["pp2"].lowered.keys()
    if "tp2_dp2_sequence_and_optimizer_parallel" in NAMES:
        assert executions["tp2_dp2_sequence_and_optimizer_parallel"].lowered["ReduceScatter"] >= 1


@SLOW  # every day the buffer is compared with the weights, and test_rollout_parity.py compares vLLM with the cells
@pytest.mark.parametrize("name", ["pp2"])
def test_vllm_generates_the_same_tokens_as_from_the_checkpoint(executions, rollout_python, tmp_path, name):
    from mindrlhf.rollout.types import GenerationRequest, SamplingParams
    from mindrlhf.rollout.vllm import VllmGenerator
    from mindrlhf.rollout.vllm_options import VllmOptions
    from mindrlhf.weights.convert import export_hf
    from mindrlhf.weights.publish.buffer import TensorInfo, WeightBuffer

    published = executions[name].published["before"]
    model_dir = tmp_path / "model"
    export_hf(iter(hf_weights().items()), MODEL, model_dir)
    requests = [GenerationRequest(i, tuple(range(3 + i, 13 + i)), 2, seed=i) for i in range(4)]

    def tokens(load_format, buffer):
        options = VllmOptions(
            rollout_python,
            str(model_dir),
            str(tmp_path / f"{load_format}.log"),
            load_format=load_format,
            max_model_len=64,
            kv_cache_gib=0.25,
        )
        with VllmGenerator.start(options) as generator:
            if buffer is not None:
                generator.use_weight_buffer(buffer.path)
            generator.wait_ready()
            if buffer is not None:
                generator.update_weights(1)
            completions = generator.generate(requests, SamplingParams(max_tokens=16))
            return {(item.request_id, item.sample_index): tuple(item.token_ids.tolist()) for item in completions}

    infos = [TensorInfo(hf_name, "float32", tensor.shape) for hf_name, tensor in published.items()]
    with WeightBuffer.create(infos) as buffer:
        buffer.begin(1)
        for hf_name, tensor in published.items():
            buffer.write(hf_name, tensor)
        buffer.commit()
        assert tokens("dummy", buffer) == tokens("auto", None)
