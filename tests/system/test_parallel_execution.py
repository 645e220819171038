"""Parallel graphs, compiled for Ascend and executed by msrun on CPU ranks, train like one plain process.

The plain process uses the cells of the product on the CPU, which share no code with the Ascend cells, and knows nothing
of parallelism. What the ranks publish to the weight board is compared with the tensors themselves.
"""

import platform

import numpy as np
import pytest
from execution_cases import (
    EPSILON,
    LAYOUTS,
    LEARNING_RATE,
    MODEL,
    NUM_ROWS,
    ROW_LENGTH,
    batches,
    hf_weights,
    mf_weights,
)

from mindrlhf.models.layouts import split
from mindrlhf.models.spec import find_spec

pytestmark = [
    pytest.mark.timeout(2400),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the simulation of CANN is x86-64 only"),
]

TOLERANCE = 1e-5
NAMES = [name for layouts in LAYOUTS.values() for name in layouts]


def compile_request(name, parallel, rank, directory):
    from mindrlhf.parallel.compile import CompileRequest

    num_cuts = parallel["data_parallel"] * parallel.get("micro_batch_num", 1)
    return CompileRequest(
        MODEL,
        parallel,
        rank=rank,
        seq_length=ROW_LENGTH,
        batch_size=NUM_ROWS // num_cuts,
        compute_dtype="float32",
        epsilon=EPSILON,
        mindir_file=str(directory / f"{name}_{rank}.mindir"),
    )


@pytest.fixture(scope="module")
def executions(tmp_path_factory):
    """The result of every layout by name."""
    from mindrlhf.config.sections import ParallelSection
    from mindrlhf.parallel.compile import compile_ranks
    from mindrlhf.parallel.execution import ExecutionJob, execute
    from mindrlhf.parallel.layout import Layout

    root = tmp_path_factory.mktemp("execution")
    requests = {
        (name, rank): compile_request(name, parallel, rank, root)
        for size, layouts in LAYOUTS.items()
        for name, parallel in layouts.items()
        for rank in range(size)
    }
    compile_ranks(list(requests.values()), timeout_s=1800, num_processes=2)
    results = {}
    for size, layouts in LAYOUTS.items():
        jobs = []
        for name, parallel in layouts.items():
            graphs = tuple(requests[name, rank].mindir_file for rank in range(size))
            jobs.append(ExecutionJob(name, Layout.from_config(ParallelSection(**parallel), size), graphs))
        inputs = (jobs, MODEL, mf_weights(), batches(), root / f"ranks_{size}")
        done = execute(*inputs, learning_rate=LEARNING_RATE, timeout_s=400)
        results.update({result.job.name: result for result in done})
    return results


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Losses and final weights of one process."""
    import mindspore as ms

    from mindrlhf.algorithms import policy_losses
    from mindrlhf.algorithms.logprobs import PolicyLogProbs
    from mindrlhf.algorithms.losses import PolicyLoss
    from mindrlhf.config.sections import OptimizerSection
    from mindrlhf.data.packing import PackedRows
    from mindrlhf.models.causal_lm import build_model
    from mindrlhf.models.context import prepare_mindformers
    from mindrlhf.training.learner import Learner
    from mindrlhf.training.runtime import Rank

    prepare_mindformers("cpu", tmp_path_factory.mktemp("mindformers-log"))
    network = build_model(MODEL, seq_length=ROW_LENGTH)
    parameters = {parameter.name: parameter for parameter in network.get_parameters()}
    for name, value in mf_weights().items():
        parameters[name].set_data(ms.Tensor(value))
    surrogate = policy_losses.surrogate("ppo_clip", clip_low=0.2, clip_high=0.28)
    loss = PolicyLoss(PolicyLogProbs(network, 1.0, "cpu"), surrogate, on_policy=False, kl_estimator="k3")
    learner = Learner(network, loss, OptimizerSection(epsilon=EPSILON), Rank(0, 1), "cpu")
    losses = []
    for inputs in batches():
        kl_coefficient, num_tokens = inputs[9][0]
        rows = PackedRows(*inputs[:4], tokens={})
        statistics, _ = learner.accumulate(rows, [*inputs[4:9], kl_coefficient], num_tokens)
        learner.apply(LEARNING_RATE)
        losses.append(statistics[0])
    return losses, {name: parameter.asnumpy() for name, parameter in parameters.items()}


@pytest.mark.parametrize("name", NAMES)
def test_losses_are_those_of_one_process(executions, plain, name):
    np.testing.assert_allclose(executions[name].losses, plain[0], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_those_of_one_process(executions, plain, name):
    start = mf_weights()
    assert executions[name].weights.keys() == plain[1].keys()
    for parameter, expected in plain[1].items():
        actual = executions[name].weights[parameter]
        np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE, err_msg=parameter)
        # The training has moved them much further than the tolerance.
        assert np.abs(expected - start[parameter]).max() > 100 * TOLERANCE, parameter


@pytest.mark.parametrize("name", NAMES)
def test_ranks_that_hold_the_same_slice_stay_equal(executions, name):
    assert executions[name].replica_difference == 0.0


@pytest.mark.parametrize("name", NAMES)
def test_board_holds_the_logical_tensors(executions, name):
    """Written by all ranks from their own slices, before the first step and after the last."""
    published = executions[name].published
    spec = find_spec(MODEL)
    dims = spec.dims(MODEL)
    trained = {
        hf_name: tensor
        for rule in spec.rules(dims)
        for hf_name, tensor in zip(rule.hf_names, split(rule, dims, executions[name].weights[rule.mf_name]))
    }
    for moment, tensors in (("before", hf_weights()), ("after", trained)):
        assert published[moment].tensors.keys() == tensors.keys()
        for hf_name, tensor in tensors.items():
            np.testing.assert_array_equal(published[moment].tensors[hf_name], tensor, err_msg=hf_name)


@pytest.mark.parametrize("name", NAMES)
def test_publishing_moves_each_byte_once_and_shares_the_work(executions, name):
    size_bytes = sum(tensor.nbytes for tensor in hf_weights().values())
    written_bytes = executions[name].published["after"].written_bytes
    assert sum(written_bytes) == size_bytes
    # The largest parameter is a tenth of this model: no rank writes much more than its share.
    assert max(written_bytes) <= 1.25 * size_bytes / len(written_bytes)


def test_fused_kernels_and_collectives_were_lowered(executions):
    """The executed graphs are those of the cluster: with Ascend's attention, and collectives that the CPU lacks."""
    assert all(result.lowered["FlashAttentionScore"] >= 1 for result in executions.values())
    assert executions["tp2_sequence_parallel"].lowered["ReduceScatter"] >= 1
    assert {"Send", "Receive"} <= executions["tp2_pp2"].lowered.keys()


@pytest.mark.parametrize("name", ["tp2_pp2"])
def test_vllm_generates_the_same_tokens_as_from_the_checkpoint(executions, rollout_python, tmp_path, name):
    from mindrlhf.rollout.types import GenerationRequest, SamplingParams
    from mindrlhf.rollout.vllm import VllmGenerator, VllmOptions
    from mindrlhf.weights.board import TensorInfo, WeightBoard
    from mindrlhf.weights.convert import export_hf

    published = executions[name].published["before"].tensors
    model_dir = tmp_path / "model"
    export_hf(iter(hf_weights().items()), MODEL, model_dir)
    requests = [GenerationRequest(i, tuple(range(3 + i, 13 + i)), 2, seed=i) for i in range(4)]

    def tokens(load_format, board):
        options = VllmOptions(
            rollout_python,
            str(model_dir),
            str(tmp_path / f"{load_format}.log"),
            load_format=load_format,
            max_model_len=64,
            kv_cache_gib=0.25,
        )
        with VllmGenerator.start(options) as generator:
            if board is not None:
                generator.use_board(board.path)
            generator.wait_ready()
            if board is not None:
                generator.update_weights(1)
            completions = generator.generate(requests, SamplingParams(max_tokens=16))
            return {(item.request_id, item.sample_index): tuple(item.token_ids.tolist()) for item in completions}

    infos = [TensorInfo(hf_name, "float32", tensor.shape) for hf_name, tensor in published.items()]
    with WeightBoard.create(infos) as board:
        board.begin(1)
        for hf_name, tensor in published.items():
            board.write(hf_name, tensor)
        board.seal()
        assert tokens("dummy", board) == tokens("auto", None)
