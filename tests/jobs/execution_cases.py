"""A tiny policy and a tiny critic, six batches and layouts of each, for parallel graphs executed on CPU ranks."""

from pathlib import Path

import numpy as np
from engines import whole_engine
from slow_tests import RUNS_SLOW_TESTS
from tiny_models import WIDE, tiny_model

from mindrlhf.specs import find_spec
from mindrlhf.specs.fuse import fuse
from mindrlhf.weights.convert import hf_shapes

NUM_ROWS, ROW_LENGTH, VOCABULARY = 4, 32, 128
LEARNING_RATE = 1e-2
# As large as a gradient here. With a tiny one the first steps of AdamW are the signs of the gradients, and those of
# gradients near zero depend on the order of sums.
EPSILON = 1e-3
# Large enough that the optimiser shard takes hold: MindSpore leaves shards below 64 KiB whole.
SIZES = {"intermediate_size": 256, "max_position_embeddings": 64, "initializer_range": 0.02}
MODEL = tiny_model(base=WIDE, vocab_size=VOCABULARY, **SIZES)
# For what executes pipelines nightly only: a second layer proves nothing without them and doubles the time to compile.
UNCUT_MODEL = {**MODEL, "num_hidden_layers": 2 if RUNS_SLOW_TESTS else 1}
CRITIC = {**UNCUT_MODEL, "architectures": ["Qwen2ForSequenceClassification"], "num_labels": 1}
OPTIMIZER = {"data_parallel": 2, "enable_parallel_optimizer": True}
PIPELINE = {"data_parallel": 1, "pipeline_stage": 2, "micro_batch_num": 2}
SEQUENCE = {"data_parallel": 1, "model_parallel": 2, "use_seq_parallel": True, "vocab_emb_dp": True}
# By number of ranks, name -> parallel_config. As few as have, with the families' own layouts, each pair of properties:
# data, tensor, pipeline, context or expert parallelism, a sharded optimizer, a split vocabulary; model, loss,
# optimizer, adapters, memory, images. The compile matrix has more.
ALL_LAYOUTS = {
    2: {"tp2_sequence_parallel": SEQUENCE, "dp2_optimizer_parallel": OPTIMIZER, "pp2": PIPELINE},
    4: {
        # The second sample of a row begins on the second rank's part of it, and the first ends there.
        "cp2_dp2_optimizer_parallel": {**OPTIMIZER, "context_parallel": 2},
        "cp2_tp2_sequence_and_optimizer_parallel": {**OPTIMIZER, **SEQUENCE, "context_parallel": 2},
        "tp2_dp2": {"data_parallel": 2, "model_parallel": 2, "vocab_emb_dp": True},
        "dp2_pp2": {**PIPELINE, **OPTIMIZER},
        "tp2_pp2": {**PIPELINE, "model_parallel": 2, "vocab_emb_dp": False},
    },
}
# The same of a critic.
CRITIC_LAYOUTS = {2: {"critic_pp2": PIPELINE}, 4: {"critic_tp2_dp2": {**SEQUENCE, **OPTIMIZER}}}
# Those whose ranks compute the old log-probabilities of a step; those of the others are made up.
WITH_LOGPROBS = [
    name
    for layouts in ALL_LAYOUTS.values()
    for name in layouts
    if name.startswith("cp2") or name in ("dp2_optimizer_parallel", "dp2_pp2", "pp2", "tp2_dp2")
]


def hf_weights(model: dict = MODEL) -> dict[str, np.ndarray]:
    """Random float32 tensors by Hugging Face name; norms and biases are not trivial either."""
    spec = find_spec(model)
    random = np.random.default_rng(0)
    return {
        name: ((1.0 if "norm" in name else 0.0) + 0.05 * random.standard_normal(shape)).astype(np.float32)
        for name, shape in hf_shapes(spec, spec.dims(model)).items()
    }


def mf_weights(model: dict = MODEL) -> dict[str, np.ndarray]:
    """The same by MindFormers name."""
    spec = find_spec(model)
    dims, tensors = spec.dims(model), hf_weights(model)
    return {rule.mf_name: fuse(rule, dims, [tensors[name] for name in rule.hf_names]) for rule in spec.rules(dims)}


# Six calls make three updates. The first call of the second update has a loss that is not finite, so that what it adds
# up must not reach the third.
IS_LAST = (False, True, False, True, False, True)
NOT_FINITE = 2
KL_COEFFICIENT = 0.04


def batches() -> list[list[np.ndarray]]:
    """For each call the inputs of a policy's update: two sequences to a row, padding, positions without weight."""
    result = []
    for call in range(len(IS_LAST)):
        random, (*rows, mask) = _rows(call)
        advantages = random.standard_normal(mask.shape).astype(np.float32) * mask
        logprobs = (-4.85 + 0.2 * random.standard_normal((3, *mask.shape))).astype(np.float32) * mask
        result.append([*rows, mask, advantages, mask.copy(), *logprobs])
    _spoil(result[NOT_FINITE], 4)
    return with_scalars(result)


def critic_batches() -> list[list[np.ndarray]]:
    """The same for a critic's update; the old values, input 4, are zeros."""
    result = []
    for call in range(len(IS_LAST)):
        random, (*rows, mask) = _rows(call)
        returns = random.standard_normal(mask.shape).astype(np.float32) * mask
        result.append([*rows, mask, mask * 0.0, returns])
    _spoil(result[NOT_FINITE], 5)
    return with_scalars(result)


def _rows(call: int) -> tuple[np.random.Generator, list[np.ndarray]]:
    random = np.random.default_rng(call)
    shape = (NUM_ROWS, ROW_LENGTH)
    input_ids, labels = random.integers(1, VOCABULARY, (2, *shape)).astype(np.int32)
    segment_ids = np.ones(shape, np.int32)
    segment_ids[:, 20:] = 2
    segment_ids[1, 28:] = 0
    mask = ((random.random(shape) > 0.3) & (segment_ids > 0)).astype(np.float32)
    return random, [input_ids, segment_ids, labels, mask]


def _spoil(inputs: list[np.ndarray], index: int) -> None:
    inputs[index][2] = np.where(inputs[3][2] > 0, np.nan, 0.0)


def with_scalars(calls: list[list[np.ndarray]]) -> list[list[np.ndarray]]:
    """The same inputs with the KL coefficient and the tokens of the update behind them."""
    first = 0
    for call, is_last in enumerate(IS_LAST):
        if is_last:
            num_tokens = sum(inputs[3].sum() for inputs in calls[first : call + 1])
            scalars = np.tile(np.array([[KL_COEFFICIENT, num_tokens]], np.float32), (NUM_ROWS, 1))
            for inputs in calls[first : call + 1]:
                inputs.append(scalars)
            first = call + 1
    return calls


def plain_network(log_dir: Path, model: dict = MODEL, num_image_rows: int = 0, row_length: int = ROW_LENGTH):
    """Return the model on CPU cells, whole, with the weights that the ranks begin with."""
    import mindspore as ms

    from mindrlhf.models.causal_lm import build_model
    from mindrlhf.models.context import prepare_mindformers

    prepare_mindformers("cpu", log_dir)
    options = {"num_image_rows": num_image_rows} if num_image_rows else {}
    network = build_model(model, seq_length=row_length, **options)
    parameters = {parameter.name: parameter for parameter in network.get_parameters()}
    for name, value in mf_weights(model).items():
        parameters[name].set_data(ms.Tensor(value))
    return network


def plain_engine(network, optimizer: str = "adamw"):
    """Return what updates such a model in one process, with the loss that the ranks have."""
    from mindrlhf.algorithms import policy_losses
    from mindrlhf.algorithms.logprobs import PolicyLogProbs
    from mindrlhf.algorithms.losses import PolicyLoss
    from mindrlhf.config.training import OptimizerSection

    surrogate = policy_losses.surrogate("ppo_clip", clip_low=0.2, clip_high=0.28)
    loss = PolicyLoss(PolicyLogProbs(network, 1.0, "cpu"), surrogate, on_policy=False, kl_estimator="k3")
    return whole_engine(loss, OptimizerSection(type=optimizer, epsilon=EPSILON))
