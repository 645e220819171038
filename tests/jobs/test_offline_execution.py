"""Fine-tuning, preference learning and reward models whose model is cut over ranks: as one process.

The graphs are compiled for Ascend and executed on CPU ranks by the product's worker of a sharded model; the plain
process uses the product's cells for the CPU, and for reward models scores after each token.
"""

import platform

import numpy as np
import pytest
from execution_cases import (
    CRITIC,
    EPSILON,
    IS_LAST,
    LEARNING_RATE,
    MODEL,
    NOT_FINITE,
    ROW_LENGTH,
    critic_batches,
    mf_weights,
)
from execution_jobs import compile_and_execute
from slow_tests import SLOW

from mindrlhf.dryrun.compile.request import LOGPROBS, PAIR_UPDATE, SUPERVISED_UPDATE, VALUES
from mindrlhf.dryrun.execute.run import SEED

pytestmark = [
    SLOW,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the simulation of CANN is x86-64 only"),
]

TOLERANCE = 1e-5
TENSOR_PARALLEL = {"data_parallel": 1, "model_parallel": 2, "use_seq_parallel": True, "vocab_emb_dp": True}
PIPELINE = {"data_parallel": 1, "pipeline_stage": 2, "micro_batch_num": 2}
LORA = {"rank": 4, "alpha": 8.0}
# Kind of training, of all weights or of adapters -> model, graphs, token arrays of the update, and a layout.
KINDS = {
    "sft": (MODEL, (SUPERVISED_UPDATE, LOGPROBS), (), PIPELINE),
    "dpo": (MODEL, (PAIR_UPDATE, LOGPROBS), ("coefficients",), TENSOR_PARALLEL),
    "reward_model": (CRITIC, (PAIR_UPDATE, VALUES), ("coefficients",), TENSOR_PARALLEL),
}
ADAPTED = "_adapters"
KINDS |= {kind + ADAPTED: values for kind, values in KINDS.items()}


def batches(kind: str) -> list[list[np.ndarray]]:
    """For each call rows and mask, coefficients but for sft, and kl_coefficient and num_tokens of each row."""
    found = []
    for *rows, mask, _, returns, scalars in critic_batches():
        mask = mask.copy()
        mask[:, -1] = 0  # the last position of a row predicts nothing
        found.append([*rows, mask, scalars] if kind.startswith("sft") else [*rows, mask, returns, scalars])
    return found


@pytest.fixture(scope="module", params=KINDS)
def executed(request, tmp_path_factory):
    """The kind of training, its results by layout, and the plain process' losses, outputs and weights."""
    kind = request.param
    model, cells, token_inputs, first = KINDS[kind]
    layouts = {"one": first, "other": TENSOR_PARALLEL if first is PIPELINE else PIPELINE}
    lora = LORA if kind.endswith(ADAPTED) else None
    if lora:
        del layouts["other"]
    root = tmp_path_factory.mktemp(kind)
    given = batches(kind)
    options = {"after_token": kind.startswith("reward_model"), "lora": lora}
    results = compile_and_execute(root, model, {2: layouts}, given, cells, token_inputs, {}, **options)
    return kind, results, train_plainly(kind, model, given, lora, tmp_path_factory.mktemp("mindformers-log"))


def train_plainly(kind: str, model: dict, given: list, lora: dict | None, log_dir):
    """Return losses and outputs of every call, and what is trained, before and after."""
    import mindspore as ms

    from mindrlhf.algorithms.logprobs import PolicyLogProbs
    from mindrlhf.algorithms.losses import CoefficientLoss, SupervisedLoss
    from mindrlhf.algorithms.scores import TokenScores
    from mindrlhf.config.training import OptimizerSection
    from mindrlhf.data.packing import PackedRows
    from mindrlhf.models.causal_lm import build_model
    from mindrlhf.models.context import prepare_mindformers
    from mindrlhf.models.lora.model import attach_lora
    from mindrlhf.specs.lora import LoraOptions
    from mindrlhf.training.runtime import Rank
    from mindrlhf.training.worker.learner import Learner

    prepare_mindformers("cpu", log_dir)
    network = build_model(model, seq_length=ROW_LENGTH)
    parameters = {parameter.name: parameter for parameter in network.get_parameters()}
    for name, value in mf_weights(model).items():
        parameters[name].set_data(ms.Tensor(value))
    if lora:
        attach_lora(network, LoraOptions(**lora), SEED, "base")
    parameters = {parameter.name: parameter for parameter in network.trainable_params()}
    begun = {name: parameter.asnumpy().copy() for name, parameter in parameters.items()}
    is_scorer = kind.startswith("reward_model")
    policy = TokenScores(network, after_token=True) if is_scorer else PolicyLogProbs(network, 1.0, "cpu")
    loss = SupervisedLoss(policy) if kind.startswith("sft") else CoefficientLoss(policy)
    learner = Learner(network, loss, OptimizerSection(epsilon=EPSILON), Rank(0, 1), "cpu")
    rows = [PackedRows(*inputs[:4], tokens={}) for inputs in given]
    outputs, losses = [], []
    for call, (inputs, is_last) in enumerate(zip(given, IS_LAST)):
        outputs.append(learner.model.logprobs(rows[call]))
        losses.append(learner.accumulate(rows[call], inputs[4:-1], inputs[-1][0, 1])[0][0])
        if is_last:
            assert np.isfinite(learner.apply(LEARNING_RATE)) == (kind.startswith("sft") or call != NOT_FINITE + 1)
    return losses, outputs, begun, {name: parameter.asnumpy() for name, parameter in parameters.items()}


def test_losses_are_those_of_one_process(executed):
    kind, results, (losses, *_) = executed
    # Nothing that sft is given can make a loss infinite.
    can_fail = not kind.startswith("sft")
    assert [np.isnan(loss) for loss in losses] == [call == NOT_FINITE and can_fail for call in range(len(IS_LAST))]
    for result in results.values():
        np.testing.assert_allclose(result.losses, losses, rtol=0, atol=TOLERANCE)


def test_outputs_before_each_update_are_those_of_one_process(executed):
    """Log-probabilities of the response tokens, or scores after them."""
    kind, results, (_, outputs, *_) = executed
    for result in results.values():
        assert len(result.outputs["first"]) == len(outputs) == len(IS_LAST)
        for found, expected in zip(result.outputs["first"], outputs):
            assert np.abs(expected).max() > 0.1
            np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE, err_msg=kind)


def test_weights_are_those_of_one_process(executed):
    _, results, (_, _, start, weights) = executed
    for result in results.values():
        assert result.weights.keys() == weights.keys()
        for parameter, expected in weights.items():
            np.testing.assert_allclose(result.weights[parameter], expected, rtol=0, atol=TOLERANCE, err_msg=parameter)
            assert np.abs(expected - start[parameter]).max() > 100 * TOLERANCE, parameter
        assert result.replica_difference == 0.0


def test_updates_after_a_restored_checkpoint_are_the_same_to_the_last_bit(executed):
    for result in executed[1].values():
        np.testing.assert_array_equal(result.resumed_losses, result.losses[IS_LAST.index(True) + 1 :])
        for name, tensor in result.published["after"].items():
            np.testing.assert_array_equal(result.published["resumed"][name], tensor, err_msg=name)
