"""Random responses, and losses over them as the training loop computes them: packed, cut into micro-batches, spread."""

import functools
from dataclasses import dataclass

import numpy as np

from mindrlhf.algorithms.aggregation import token_weights
from mindrlhf.data.packing import TokenSequence
from mindrlhf.training.batch import RowOptions, make_batch

MAX_RESPONSE_LENGTH = 12
LONGEST = 16
PACKED = RowOptions((LONGEST,), 8, 1, True)


@dataclass
class Response:
    """One response: float64 [n] each, but exact in float32."""

    logprobs: np.ndarray
    old: np.ndarray
    reference: np.ndarray
    rollout: np.ndarray
    advantages: np.ndarray
    entropy: np.ndarray
    prompt_length: int

    def __len__(self):
        return len(self.logprobs)


def draw(seed: int, *, spread: float = 0.4, constant: bool = False, lengths=(3, 7, 1, 12, 5, 2, 9)) -> list[Response]:
    """Return responses whose ratios stray by about ``spread``; ``constant`` advantages do not vary within one."""
    stream = np.random.default_rng(seed)
    responses = []
    for length in lengths:
        logprobs = -stream.exponential(1.0, length)
        old = logprobs + spread * stream.standard_normal(length)
        advantages = stream.standard_normal() if constant else stream.standard_normal(length)
        parts = (
            logprobs,
            old,
            logprobs + 0.5 * stream.standard_normal(length),
            old + 0.5 * stream.standard_normal(length),
            np.full(length, advantages),
            stream.random(length),
        )
        rounded = [part.astype(np.float32).astype(np.float64) for part in parts]
        responses.append(Response(*rounded, prompt_length=int(stream.integers(1, 4))))
    return responses


def weights_of(responses, mode: str) -> np.ndarray:
    lengths = np.array([len(response) for response in responses])
    return token_weights(lengths, np.ones(len(lengths), bool), mode, MAX_RESPONSE_LENGTH)


@functools.cache
def compiled(rows: int, loss: str, options: tuple, on_policy: bool, correction: tuple, further: tuple):
    """Return a stand-in policy, whose log-probs and entropies are parameters, and the gradients of a loss over it."""
    import mindspore as ms
    from mindspore import nn

    from mindrlhf.algorithms import policy_losses
    from mindrlhf.algorithms.corrections import RolloutCorrection
    from mindrlhf.algorithms.losses import PolicyLoss

    class Policy(nn.Cell):
        def __init__(self):
            super().__init__()
            zeros = np.zeros((rows, LONGEST), np.float32)
            self.logprobs = ms.Parameter(zeros, name="logprobs")
            self.entropy = ms.Parameter(zeros, name="entropy")

        def construct(self, input_ids, segment_ids, labels, mask):
            return self.logprobs * mask, self.entropy * mask

    policy = Policy()
    surrogate = policy_losses.surrogate(loss, **dict(options))
    cell = PolicyLoss(
        policy,
        surrogate,
        on_policy=on_policy,
        correction=RolloutCorrection(**dict(correction)) if correction else None,
        **dict(further),
    )
    parameters = ms.ParameterTuple([policy.logprobs, policy.entropy])
    return policy, ms.value_and_grad(cell, None, parameters, has_aux=True)


def sequences_of(responses, weights) -> list[TokenSequence]:
    stream = np.random.default_rng(0)
    result = []
    for response, weight in zip(responses, weights):
        ids = stream.integers(1, 9, response.prompt_length + len(response)).astype(np.int32)
        values = {
            "logprobs": response.logprobs,
            "entropy": response.entropy,
            "advantages": response.advantages,
            "weights": np.full(len(response), weight),
            "old_logprobs": response.old,
            "reference_logprobs": response.reference,
            "rollout_logprobs": response.rollout,
        }
        values = {name: array.astype(np.float32) for name, array in values.items()}
        result.append(TokenSequence(ids[: response.prompt_length], ids[response.prompt_length :], values))
    return result


def run(
    responses,
    loss: str,
    *,
    rows: RowOptions = PACKED,
    mode: str = "token_mean",
    on_policy: bool = False,
    correction: dict | None = None,
    kl_coefficient: float = 0.0,
    options: dict | None = None,
    **further,
):
    """Return the loss, the statistics by name, and the gradients by log-prob and entropy, one array per response."""
    import mindspore as ms

    from mindrlhf.algorithms.losses import POLICY_INPUTS, POLICY_STATISTICS

    batch = make_batch(sequences_of(responses, weights_of(responses, mode)), rows)
    keys = (tuple((options or {}).items()), on_policy, tuple((correction or {}).items()), tuple(further.items()))
    policy, function = compiled(rows.rows_per_micro_batch, loss, *keys)
    value, statistics, shares = 0.0, 0.0, []
    for rank in range(rows.num_ranks):
        share = batch.part_of(rank, rows.num_ranks)
        shares.append({"logprobs": [], "entropy": []})
        for packed in share.micro_batches:
            policy.logprobs.set_data(ms.Tensor(packed.tokens["logprobs"]))
            policy.entropy.set_data(ms.Tensor(packed.tokens["entropy"]))
            arrays = (packed.input_ids, packed.segment_ids, packed.labels, packed.mask)
            arrays += tuple(packed.tokens[name] for name in POLICY_INPUTS)
            scalars = (ms.Tensor(kl_coefficient, ms.float32), ms.Tensor(share.num_tokens, ms.float32))
            (part, sums, logprobs), gradients = function(*map(ms.Tensor, arrays), *scalars)
            np.testing.assert_array_equal(logprobs.asnumpy(), packed.tokens["logprobs"])
            value, statistics = value + float(part), statistics + sums.asnumpy().astype(np.float64)
            for name, gradient in zip(("logprobs", "entropy"), gradients):
                outside = gradient.asnumpy()[packed.mask == 0]
                np.testing.assert_array_equal(outside, 0, err_msg="a gradient outside the responses")
                shares[-1][name].append(gradient.asnumpy().copy())
    named = dict(zip(POLICY_STATISTICS, statistics, strict=True))
    gradients = [batch.collect([share[name] for share in shares]) for name in ("logprobs", "entropy")]
    return value, named, *gradients


def central_differences(objective, base: list[np.ndarray]) -> list[np.ndarray]:
    """Return the gradient of ``objective``, which takes a list of arrays, at ``base``, an array for each."""
    gradients, step = [np.zeros(len(array)) for array in base], 1e-6
    for index, gradient in enumerate(gradients):
        for position in range(len(gradient)):
            values = []
            for shift in (step, -step):
                moved = [array.copy() for array in base]
                moved[index][position] += shift
                values.append(objective(moved))
            gradient[position] = (values[0] - values[1]) / (2 * step)
    return gradients


def assert_close(actual, expected, rtol: float = 1e-5) -> None:
    """Compare per-response arrays, relative to the largest entry."""
    actual, expected = np.concatenate(actual), np.concatenate(expected)
    scale = np.abs(expected).max()
    assert scale > 0, "nothing to compare"
    np.testing.assert_allclose(actual / scale, expected / scale, rtol=0, atol=rtol)
