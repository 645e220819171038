"""KL on the host: its estimate as a penalty in the reward, and the course of its coefficient. NumPy.

The estimates in the loss, with their gradients, are graph code: :func:`mindrlhf.algorithms.losses.kl_per_token`.
"""

from typing import Any

import numpy as np

ESTIMATORS = ("k1", "k2", "k3", "abs")
# For these the ratio-weighted estimate has the gradient of the KL divergence itself; see losses.kl_per_token.
UNBIASED_ESTIMATORS = ("k1+", "k3+")

MAX_CHANGE, GAIN = 0.2, 0.1


def kl_estimate(logprobs: np.ndarray, reference_logprobs: np.ndarray, estimator: str) -> np.ndarray:
    """Return an estimate of KL(policy || reference) per token, float64 of the same shape, in nats.

    With d = logprobs - reference_logprobs of tokens that the policy sampled: k1 = d, k2 = d^2 / 2,
    k3 = exp(-d) - 1 + d (Schulman 2020, "Approximating KL divergence"), abs = |d|.
    """
    difference = np.asarray(logprobs, np.float64) - np.asarray(reference_logprobs, np.float64)
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference**2 / 2
    if estimator == "k3":
        return np.expm1(-difference) + difference
    assert estimator == "abs", f"there is no KL estimator {estimator!r}"
    return np.abs(difference)


class KlController:
    """The coefficient of the KL term: fixed, or steered towards a target.

    Adaptive, after each step whose mean KL is ``kl``:

        error = clip(kl / target - 1, -0.2, 0.2);  coefficient *= 1 + gain * error

    Ziegler et al. 2019 (arXiv:1909.08593), section 2.2, gain 0.1; ``kl`` is per token here, there per response.

    Args:
        coefficient: at the start.
        target: nats per token; None keeps the coefficient fixed.
    """

    def __init__(self, coefficient: float, target: float | None = None):
        self.coefficient = coefficient
        self._target = target

    def update(self, kl: float) -> None:
        """Take in the mean KL of a step, in nats per token."""
        if self._target is not None:
            error = min(max(kl / self._target - 1.0, -MAX_CHANGE), MAX_CHANGE)
            self.coefficient *= 1.0 + GAIN * error

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint needs, as JSON values."""
        return {"coefficient": self.coefficient}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what ``state`` returned."""
        self.coefficient = float(state["coefficient"])
