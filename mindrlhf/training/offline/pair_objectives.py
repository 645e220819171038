"""Losses of preference learning from the model's outputs on pairs, on rank 0. NumPy, float64."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mindrlhf.algorithms.preferences import PAIR_LOSSES
from mindrlhf.config.offline import DpoSection, RewardModelSection

Outputs = Sequence[np.ndarray]  # one float array [response] for each response


@dataclass(frozen=True)
class PairResult:
    """A batch of pairs under the current model."""

    losses: np.ndarray  # float64 [pairs]
    chosen_rewards: np.ndarray  # float64 [pairs]: score, or implicit reward
    rejected_rewards: np.ndarray  # float64 [pairs]
    coefficients: list[np.ndarray]  # derivative of the mean loss by each output: chosen 0, rejected 0, chosen 1, ...

    @property
    def is_right(self) -> np.ndarray:
        """Return 1 for each pair in the right order, float64 [pairs]; a tie (as before any update) is half right."""
        return (np.sign(self.chosen_rewards - self.rejected_rewards) + 1) / 2

    def metrics(self) -> dict[str, float]:
        """Return means over the pairs."""
        margins = self.chosen_rewards - self.rejected_rewards
        return {
            "loss": float(self.losses.mean()),
            "accuracy": float(self.is_right.mean()),
            "reward/margin": float(margins.mean()),
            "reward/chosen": float(self.chosen_rewards.mean()),
            "reward/rejected": float(self.rejected_rewards.mean()),
        }


class DpoObjective:
    """Direct preference optimisation, Rafailov et al. 2023 (arXiv:2305.18290).

    The margin is h = (log p - log p_ref)(chosen) - (log p - log p_ref)(rejected) of the summed log-probabilities;
    IPO takes means per token instead. ``sft_weight`` adds the negative log-likelihood of the chosen responses, per
    token of the batch (Pang et al. 2024, arXiv:2404.19733, section 3, has it per sequence).
    """

    needs_reference = True

    def __init__(self, options: DpoSection):
        self._options = options
        self._per_token = options.loss == "ipo"

    def summarise(self, outputs: Outputs) -> np.ndarray:
        """Return one number for each response, float64 [responses]: its log-probability, per token for IPO."""
        sums = np.array([output.sum(dtype=np.float64) for output in outputs])
        return sums / [len(output) for output in outputs] if self._per_token else sums

    def evaluate(self, outputs: Outputs, reference: np.ndarray) -> PairResult:
        """Return the loss of pairs and its derivatives.

        Args:
            outputs: log-probabilities of the tokens of chosen 0, rejected 0, chosen 1, ...
            reference: float64 [responses]: what ``summarise`` gives for the reference model.
        """
        options = self._options
        ratios = (self.summarise(outputs) - reference).reshape(-1, 2)
        margins = ratios[:, 0] - ratios[:, 1]
        losses, slopes = PAIR_LOSSES[options.loss](margins, options.beta, options.label_smoothing)
        num_chosen_tokens = sum(len(output) for output in outputs[::2])
        coefficients = []
        for index, output in enumerate(outputs):
            value = slopes[index // 2] / len(margins) * (1 if index % 2 == 0 else -1)
            value = value / len(output) if self._per_token else value
            if index % 2 == 0:
                value -= options.sft_weight / num_chosen_tokens
            coefficients.append(np.full(len(output), value))
        if options.sft_weight:
            likelihood = sum(output.sum(dtype=np.float64) for output in outputs[::2])
            losses = losses - options.sft_weight * likelihood / num_chosen_tokens
        return PairResult(losses, options.beta * ratios[:, 0], options.beta * ratios[:, 1], coefficients)


class RewardModelObjective:
    """Bradley-Terry reward model: -log s(r(chosen) - r(rejected)), Ouyang et al. 2022 (arXiv:2203.02155), eq. 1.

    ``centering`` adds c (r(chosen) + r(rejected))^2, which keeps scores around 0: Eisenstein et al. 2023
    (arXiv:2312.09244), section 2. The score of a response is the one after its last token.
    """

    needs_reference = False

    def __init__(self, options: RewardModelSection):
        self._options = options

    def summarise(self, outputs: Outputs) -> np.ndarray:
        """Return the score of each response, float64 [responses]."""
        return np.array([output[-1] for output in outputs], np.float64)

    def evaluate(self, outputs: Outputs, reference: np.ndarray | None = None) -> PairResult:
        """Return the loss of pairs and its derivatives; see :meth:`DpoObjective.evaluate`."""
        scores = self.summarise(outputs).reshape(-1, 2)
        losses, slopes = PAIR_LOSSES["sigmoid"](scores[:, 0] - scores[:, 1], 1.0, 0.0)
        sums = scores.sum(axis=1)
        losses = losses + self._options.centering * sums**2
        by_sum = 2 * self._options.centering * sums
        by_score = np.stack([slopes + by_sum, -slopes + by_sum], axis=1).reshape(-1) / len(scores)
        coefficients = [np.zeros(len(output)) for output in outputs]
        for values, value in zip(coefficients, by_score):
            values[-1] = value
        return PairResult(losses, scores[:, 0], scores[:, 1], coefficients)
