"""The config's algorithm on scored samples, on rank 0: advantages, weights, and the rows to compute."""

from collections.abc import Sequence

import numpy as np

from mindrlhf.algorithms import advantages
from mindrlhf.algorithms.advantages import RewardBatch
from mindrlhf.algorithms.aggregation import token_weights
from mindrlhf.algorithms.kl_control import KlController, kl_estimate
from mindrlhf.algorithms.options import chosen
from mindrlhf.algorithms.overlong import complete, soft_punishment
from mindrlhf.config.derived import is_corrected, is_on_policy, skips_zero_advantages
from mindrlhf.config.schema import GrpoConfig
from mindrlhf.data.packing import TokenSequence
from mindrlhf.rollout.samples import Sample
from mindrlhf.training.batch import RowOptions, make_update_batch
from mindrlhf.training.loop.signals import clipped, each_role, reward_parts, steps_of
from mindrlhf.training.loop.step import Step


class Objective:
    """The host's part of the algorithm; the graph's is built by :mod:`mindrlhf.training.engine.build`.

    Attributes:
        kl: controller of the KL coefficient; its state belongs in a checkpoint.
    """

    def __init__(self, config: GrpoConfig):
        self._config = config
        self._algorithm = config.algorithm
        self._max_length = config.rollout.max_response_length
        self._bypass = config.correction.bypass
        self.is_corrected = is_corrected(config)
        self._estimator = advantages.find(config.algorithm.advantage)
        self.kl = KlController(config.algorithm.beta, config.algorithm.kl_target)
        # A single update computes the log-probabilities before it changes the weights: they are the old ones.
        self.needs_old_logprobs = not self._bypass and (not is_on_policy(config) or self.kl_in_reward)

    @property
    def needs_reference(self) -> bool:
        """True if log-probabilities under the reference model are needed."""
        return self._algorithm.beta > 0

    @property
    def needs_greedy(self) -> bool:
        """True if the rewards of greedy responses are needed."""
        return "baselines" in self._estimator.NEEDS

    @property
    def needs_values(self) -> bool:
        """True if the values of a critic are needed."""
        return "values" in self._estimator.NEEDS

    @property
    def kl_in_reward(self) -> bool:
        """True if the KL term is a part of the reward."""
        return self.needs_reference and self._algorithm.kl_in == "reward"

    @property
    def advantages_wait(self) -> bool:
        """True if advantages need results of the ranks: the KL in the reward, or a critic's values."""
        return self.kl_in_reward or self.needs_values

    def make_batches(self, step: Step, options: RowOptions) -> None:
        """Put the samples of a step into rows, with all that is known of them; advantages are where rewards decide.

        Samples without a gradient are left out where they may be; one of each update is computed at least.
        """
        samples = step.samples.used
        if self.needs_greedy:
            step.baselines = np.array([step.samples.greedy[sample.group].reward.total for sample in samples])
            step.metrics["reward/greedy"] = float(step.baselines.mean())
        if not self.advantages_wait:
            step.advantages = self.advantages(samples, baselines=step.baselines)
        step.computed = np.ones(len(samples), bool)
        if skips_zero_advantages(self._config):
            step.computed = self.have_gradient(samples, step.advantages)
        if self._config.observe.sample_tokens:  # these are shown with what the ranks computed
            num_shown = self._config.observe.num_samples(self._config.algorithm.num_generations)
            step.computed[:num_shown] = True
        for part in np.array_split(np.arange(len(samples)), self._config.training.num_minibatches):
            if len(part):
                step.computed[part[0]] |= not step.computed[part].any()
                known = None if step.advantages is None else [step.advantages[item] for item in part]
                sequences = self.sequences([samples[item] for item in part], known)
                step.batches.append(make_update_batch(sequences, step.computed[part], options))

    def finish_advantages(self, step: Step) -> dict[str, list[np.ndarray]]:
        """Set the advantages that waited for log-probabilities or values.

        Returns:
            What the ranks have not yet got, float64 [generated tokens] for each sample, by name.
        """
        samples, penalties = step.samples.used, None
        if self.kl_in_reward:
            estimates, kl = self.divergences(step.old_logprobs, step.reference_logprobs)
            penalties = [self.kl.coefficient * part for part in estimates]
            step.metrics |= kl
        step.advantages = self.advantages(samples, penalties=penalties, baselines=step.baselines, values=step.values)
        found = {"advantages": step.advantages}
        if step.values is not None:
            found["returns"] = self.returns(samples, step.values, penalties)
        return found

    def rewards(self, samples: Sequence[Sample]) -> np.ndarray:
        """Return the rewards that advantages are computed from, float64 [samples]."""
        rewards = np.array([sample.reward.total for sample in samples], np.float64)
        if self._algorithm.overlong_buffer:
            buffer = max(1, round(self._algorithm.overlong_buffer * self._max_length))
            lengths = np.array([len(sample.completion.token_ids) for sample in samples])
            rewards += soft_punishment(lengths, self._max_length, buffer)
        return rewards

    def sequences(
        self, samples: Sequence[Sample], advantages: Sequence[np.ndarray] | None = None
    ) -> list[list[TokenSequence]]:
        """Return the token sequences of each sample of one update, with all values that no rank has to compute.

        An agent's sample has several where it kept several contexts: its advantages, and what it weighs, are those of
        one response of all their tokens (Multi-Conv DAPO, Yu et al. 2025, arXiv:2507.02259).

        Args:
            advantages: [generated tokens] for each sample; None where they are not known yet.
        """
        lengths = np.array([sample.num_generated for sample in samples])
        kept = np.array([sample.completion.num_turns > 0 for sample in samples])
        if self._algorithm.overlong_filter:
            kept = complete([sample.completion.finish_reason for sample in samples])
        weights = token_weights(lengths, kept, self._algorithm.aggregation, self._max_length)
        sequences = []
        for index, (sample, weight) in enumerate(zip(samples, weights)):
            values = {"weights": np.full(sample.num_generated, weight, np.float32)}
            if self.is_corrected:
                values["rollout_logprobs"] = sample.completion.logprobs
            if self._bypass:
                values["old_logprobs"] = sample.completion.logprobs
            if advantages is not None:
                values["advantages"] = advantages[index]
            more = (sample.images, sample.completion.experts)
            own, start = [], 0
            for prompt_ids, token_ids, is_generated in sample.completion.sequences(sample.prompt.prompt_ids):
                stop = start + (len(token_ids) if is_generated is None else int(is_generated.sum()))
                part = {name: array[start:stop] for name, array in values.items()}
                own.append(TokenSequence(prompt_ids, token_ids, part, is_generated, *more))
                start = stop
            sequences.append(own)
        return sequences

    def divergences(
        self, logprobs: Sequence[np.ndarray], reference_logprobs: Sequence[np.ndarray]
    ) -> tuple[list[np.ndarray], dict[str, float]]:
        """Return estimates of the KL at each sampled token, float64 [response] each, and their means as metrics."""
        estimator = self._algorithm.kl_estimator.removesuffix("+")  # which changes the gradient alone
        estimates = [kl_estimate(*pair, estimator) for pair in zip(logprobs, reference_logprobs)]
        return estimates, {"kl": float(np.concatenate(estimates).mean())}

    def advantages(
        self,
        samples: Sequence[Sample],
        *,
        penalties: Sequence[np.ndarray] | None = None,
        baselines: np.ndarray | None = None,
        values: Sequence[np.ndarray] | None = None,
    ) -> list[np.ndarray]:
        """Return the advantages of a whole step, float64 [generated tokens] for each sample; see ``RewardBatch``."""
        options = chosen(self._estimator.OPTIONS, self._algorithm.options)
        found = self._estimated(self._estimator.estimate, options, samples, penalties, baselines, values)
        return clipped(found, samples, self._config) if self._algorithm.options.get("clip_cov_ratio") else found

    def have_gradient(self, samples: Sequence[Sample], advantages: Sequence[np.ndarray]) -> np.ndarray:
        """Return which samples of a step have a gradient, bool, where the loss has no term without advantages."""
        found = np.array([bool(part.any()) for part in advantages])
        if self._algorithm.overlong_filter:
            found &= complete([sample.completion.finish_reason for sample in samples])
        return found

    def returns(
        self, samples: Sequence[Sample], values: Sequence[np.ndarray], penalties: Sequence[np.ndarray] | None = None
    ) -> list[np.ndarray]:
        """Return what the critic learns of a whole step, float64 [response] for each sample; see ``advantages``."""
        options = chosen(self._estimator.OPTIONS, self._algorithm.options)
        del options["whiten_advantages"]  # targets are of the advantages before it
        return self._estimated(self._estimator.targets, options, samples, penalties, None, values)

    def _estimated(self, function, options, *given) -> list[np.ndarray]:
        if self._config.tools.agent:
            return each_role(lambda *own: function(self._batch(*own), **options), self._config, *given)
        return function(self._batch(*given), **options)

    def _batch(self, samples, penalties, baselines, values) -> RewardBatch:
        return RewardBatch(
            rewards=self.rewards(samples),
            group_ids=np.array([sample.group for sample in samples]),
            lengths=np.array([sample.num_generated for sample in samples]),
            penalties=penalties,
            baselines=baselines,
            values=values,
            parts=reward_parts(samples, self._config) if "parts" in self._estimator.NEEDS else None,
            steps=None if self._estimator.PER_TOKEN == "never" else steps_of(samples, self._config),
        )
