"""Preference losses of pairs of responses: NumPy, float64, on the host.

A pair's loss depends on the two responses through one number each: a summed log-probability, or a score. So each
loss here gives, beside its value, its derivative with respect to the pair's margin; the graph only carries that back
through the model (:class:`mindrlhf.algorithms.losses.CoefficientLoss`). The two responses of a pair need not share a
row, a micro-batch or a rank, and the result does not depend on how the batch is cut.
"""

from collections.abc import Callable

import numpy as np

PairLoss = Callable[[np.ndarray, float, float], tuple[np.ndarray, np.ndarray]]


def sigmoid(margins: np.ndarray, beta: float, label_smoothing: float) -> tuple[np.ndarray, np.ndarray]:
    """Logistic loss -log s(beta h): DPO, Rafailov et al. 2023 (arXiv:2305.18290), eq. 7.

    With label smoothing e, the pairs are taken to be swapped with probability e: -(1 - e) log s(beta h) -
    e log s(-beta h), Mitchell 2023, "A note on DPO with noisy preferences", eq. 3.

    Args:
        margins: float64 [pairs], h: preferred minus rejected.
        beta: scale of the margins.
        label_smoothing: e, from 0 to below 0.5.

    Returns:
        The losses and their derivatives with respect to the margins, float64 [pairs] each.
    """
    scaled = beta * margins
    losses = (1 - label_smoothing) * np.logaddexp(0, -scaled) + label_smoothing * np.logaddexp(0, scaled)
    return losses, beta * (_logistic(scaled) - (1 - label_smoothing))


def hinge(margins: np.ndarray, beta: float, label_smoothing: float) -> tuple[np.ndarray, np.ndarray]:
    """max(0, 1 - beta h): SLiC, Zhao et al. 2023 (arXiv:2305.10425), in the form of RSO, Liu et al. 2023
    (arXiv:2309.06657), section 3.2. Arguments and result as those of ``sigmoid``; without label smoothing.
    """
    del label_smoothing
    slack = 1 - beta * margins
    return np.maximum(slack, 0.0), np.where(slack > 0, -beta, 0.0)


def ipo(margins: np.ndarray, beta: float, label_smoothing: float) -> tuple[np.ndarray, np.ndarray]:
    """(h - 1 / (2 beta))^2: IPO, Azar et al. 2023 (arXiv:2310.12036), eq. 17, where beta is called tau.

    The margins are of log-probabilities per token, so that long responses do not count more. Arguments and result
    as those of ``sigmoid``; without label smoothing.
    """
    del label_smoothing
    error = margins - 1 / (2 * beta)
    return error**2, 2 * error


PAIR_LOSSES: dict[str, PairLoss] = {"sigmoid": sigmoid, "hinge": hinge, "ipo": ipo}


def _logistic(values: np.ndarray) -> np.ndarray:
    return np.exp(-np.logaddexp(0, -values))
