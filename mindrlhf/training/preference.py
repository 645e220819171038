"""Learning from pairs of responses: direct preference optimisation, and reward models.

Each update makes two passes: the first measures every response, from which the host computes the loss of the pairs
and its derivatives; the second carries these back through the model.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mindrlhf.algorithms.logprobs import PolicyLogProbs
from mindrlhf.algorithms.losses import CoefficientLoss
from mindrlhf.algorithms.scores import TokenScores
from mindrlhf.config.loader import write_config
from mindrlhf.config.schema import DpoConfig, RewardModelConfig
from mindrlhf.data.mindrecord import PromptFile
from mindrlhf.data.packing import TokenSequence
from mindrlhf.evaluation.statistics import Interval, bootstrap_interval
from mindrlhf.observe.sinks import SinkGroup, open_sinks
from mindrlhf.training.batch import RowOptions, make_batch, unpack_share
from mindrlhf.training.cells import check_finite
from mindrlhf.training.learner import Learner, load_model
from mindrlhf.training.pair_objectives import DpoObjective, PairResult, RewardModelObjective
from mindrlhf.training.preflight import FINAL_NAME, RunInputs, check_free, check_preference_inputs
from mindrlhf.training.runtime import Rank, start_runtime
from mindrlhf.training.schedule import learning_rate
from mindrlhf.training.scorer import load_scorer
from mindrlhf.training.team import Team, connect, serve

Config = DpoConfig | RewardModelConfig
Objective = DpoObjective | RewardModelObjective
BLOCK_PAIRS = 256  # pairs measured at a time outside of training


class PreferenceLearner(Learner):
    """The model of a preference run on one rank; its public methods are called through the team.

    Args:
        loss: :class:`mindrlhf.algorithms.losses.CoefficientLoss`.
        reference: log-probabilities under the reference model, None when the run has no such model in memory.
    """

    def __init__(self, network: Any, loss: Any, config: Config, rank: Rank, reference: PolicyLogProbs | None):
        super().__init__(network, loss, config.optimizer, rank, config.run.device)
        self._reference = reference

    def measure(self, name: str, **share: Any) -> dict[str, np.ndarray]:
        """Return "<index>.outputs", float32 [rows, length], of each micro-batch under "policy" or "reference"."""
        policy = self.policy if name == "policy" else self._reference
        micro_batches, _ = unpack_share(share)
        return {f"{index}.outputs": self.logprobs(policy, rows) for index, rows in enumerate(micro_batches)}

    def update(self, lr: float, **share: Any) -> dict[str, Any]:
        """Make one optimiser update from the "coefficients" of the tokens."""
        micro_batches, _ = unpack_share(share)
        for rows in micro_batches:
            self.accumulate(rows, (rows.tokens["coefficients"],), 1)
        return {"grad_norm": check_finite(self.apply(lr)), **self.process_statistics()}

    def drop_reference(self) -> None:
        """Free the reference model."""
        self._reference = None


@dataclass(frozen=True)
class Pairs:
    """Pairs as sequences, chosen 0, rejected 0, chosen 1, ..., and what the objective keeps of the reference."""

    sequences: list[TokenSequence]
    reference: np.ndarray | None = None  # float64 [responses]

    def __len__(self) -> int:
        return len(self.sequences) // 2

    def take(self, indices: Sequence[int]) -> "Pairs":
        """Return some of the pairs."""
        responses = [2 * int(index) + side for index in indices for side in (0, 1)]
        reference = None if self.reference is None else self.reference[responses]
        return Pairs([self.sequences[response] for response in responses], reference)


def run_preference_rank(config: Config) -> None:
    """Do this rank's part of a preference run: the lead drives the loop, the others serve it.

    Raises:
        UserError, RunFailure: as the rooms raise them.
    """
    inputs = check_preference_inputs(config)
    output_dir = Path(config.run.output_dir)
    check_free(output_dir / FINAL_NAME)
    rank = start_runtime(config.run, output_dir / "logs")
    connections = connect(rank)
    learner = _build_learner(config, inputs.row_lengths[-1], rank)
    if not rank.is_lead:
        serve(learner, connections[0])
        return
    write_config(config, output_dir)
    team = Team(learner, connections)
    sinks = open_sinks(output_dir, first_step=0, tensorboard=config.observe.tensorboard)
    try:
        PreferenceTrainer(config, inputs, team, sinks).run()
    finally:
        sinks.close()
        team.close()
    learner.export(output_dir / FINAL_NAME, config.data.tokenizer_dir)
    print(f"model: {output_dir / FINAL_NAME}", flush=True)


def _build_learner(config: Config, length: int, rank: Rank) -> PreferenceLearner:
    model, run = config.model, config.run
    if isinstance(config, RewardModelConfig):
        network = load_scorer(model, model.path, run, length)
        return PreferenceLearner(network, CoefficientLoss(TokenScores(network, after_token=True)), config, rank, None)
    network = load_model(model, model.path, run, length)
    reference = None
    if model.reference_path or config.dpo.reference == "live":
        reference_network = load_model(model, model.reference_path or model.path, run, length)
        reference = PolicyLogProbs(reference_network, 1.0, run.device)
    loss = CoefficientLoss(PolicyLogProbs(network, 1.0, run.device))
    return PreferenceLearner(network, loss, config, rank, reference)


class PreferenceTrainer:
    """The loop, as the lead rank runs it."""

    def __init__(self, config: Config, inputs: RunInputs, team: Team, sinks: SinkGroup):
        self._config = config
        self._team = team
        self._sinks = sinks
        preference = config.preference
        self._rows = RowOptions(inputs.row_lengths, preference.batch_size, team.world_size, preference.pack)
        is_dpo = isinstance(config, DpoConfig)
        self._objective: Objective = DpoObjective(config.dpo) if is_dpo else RewardModelObjective(config.reward_model)
        self._reference_name = "reference" if is_dpo and config.model.reference_path else "policy"
        self._reference_is_live = is_dpo and config.dpo.reference == "live"
        self._pairs = self._with_reference(Pairs(read_pairs(inputs.prompts)))
        self._held_out = self._with_reference(Pairs(read_pairs(inputs.held_out))) if inputs.held_out else None
        if is_dpo and not self._reference_is_live:
            team.call("drop_reference")

    def run(self) -> None:
        """Train on every pair ``preference.epochs`` times, or for ``run.max_steps`` steps."""
        preference = self._config.preference
        num_steps = preference.epochs * -(-len(self._pairs) // preference.pairs_per_step)
        num_steps = min(num_steps, self._config.run.max_steps or num_steps)
        accuracies = []
        if self._held_out:
            metrics, accuracy = self.evaluate()
            accuracies.append(accuracy)
            self._sinks.write(0, metrics)
        for step, indices in enumerate(self._steps(num_steps), start=1):
            start_s = time.perf_counter()
            metrics = self.step(self._pairs.take(indices), learning_rate(self._config.optimizer, step - 1, num_steps))
            if self._config.observe.performance_stats:
                metrics["timing/all"] = time.perf_counter() - start_s
            every = preference.eval_every_steps
            if self._held_out and (step == num_steps or (every and step % every == 0)):
                evaluation, accuracy = self.evaluate()
                accuracies.append(accuracy)
                metrics |= evaluation
            self._sinks.write(step, metrics)
        if self._held_out:
            first, last = (_percentages(accuracies[index]) for index in (0, -1))
            print(f"\npreference accuracy on {len(self._held_out)} held-out pairs: {first} before, {last} after")

    def step(self, pairs: Pairs, lr: float) -> dict[str, float]:
        """Make one optimiser update and return its metrics, measured before it."""
        result = self._evaluate(pairs)
        sequences = [
            TokenSequence(sequence.prompt_ids, sequence.response_ids, {"coefficients": values.astype(np.float32)})
            for sequence, values in zip(pairs.sequences, result.coefficients, strict=True)
        ]
        results = self._call("update", sequences, lr=lr)[1]
        return {
            **result.metrics(),
            "grad_norm": results[0]["grad_norm"],
            "lr": lr,
            "recompiles": max(result["recompiles"] for result in results),
            "memory/peak_rss_gb": max(result["memory/peak_rss_gb"] for result in results),
        }

    def evaluate(self) -> tuple[dict[str, float], Interval]:
        """Return the metrics of the held-out pairs, and their accuracy with its interval."""
        parts = [self._evaluate(self._held_out.take(block)) for block in _blocks(len(self._held_out))]
        fields = ("losses", "chosen_rewards", "rejected_rewards")
        columns = [np.concatenate([getattr(part, field) for part in parts]) for field in fields]
        result = PairResult(*columns, [])
        return {f"eval/{name}": value for name, value in result.metrics().items()}, bootstrap_interval(result.is_right)

    def _evaluate(self, pairs: Pairs) -> PairResult:
        reference = pairs.reference
        if self._reference_is_live:
            reference = self._objective.summarise(self._measure("reference", pairs.sequences))
        return self._objective.evaluate(self._measure("policy", pairs.sequences), reference)

    def _with_reference(self, pairs: Pairs) -> Pairs:
        """Measure all pairs under the reference model, which the policy still is when there is no other."""
        if not self._objective.needs_reference or self._reference_is_live:
            return pairs
        parts = [
            self._objective.summarise(self._measure(self._reference_name, pairs.take(block).sequences))
            for block in _blocks(len(pairs))
        ]
        return Pairs(pairs.sequences, np.concatenate(parts))

    def _measure(self, name: str, sequences: Sequence[TokenSequence]) -> list[np.ndarray]:
        batch, results = self._call("measure", sequences, name=name)
        return batch.collect(results, "outputs")

    def _call(self, method: str, sequences: Sequence[TokenSequence], **arguments: Any):
        batch = make_batch(sequences, self._rows)
        shares = [batch.share(rank, self._team.world_size) for rank in range(self._team.world_size)]
        return batch, self._team.call(method, per_rank=shares, **arguments)

    def _steps(self, num_steps: int) -> Iterator[np.ndarray]:
        """Yield the pairs of each step, epoch after epoch, each in an order of its own if ``data.shuffle`` says so."""
        per_step = self._config.preference.pairs_per_step
        done, epoch = 0, 0
        while done < num_steps:
            order = np.arange(len(self._pairs))
            if self._config.data.shuffle:
                np.random.default_rng([self._config.run.seed, epoch]).shuffle(order)
            for start in range(0, len(order), per_step):
                if done == num_steps:
                    return
                yield order[start : start + per_step]
                done += 1
            epoch += 1


def read_pairs(file: PromptFile, block: int = 4096) -> list[TokenSequence]:
    """Read a prompt file built with ``--task preference``: chosen 0, rejected 0, chosen 1, ..."""
    sequences = []
    for start in range(0, len(file), block):
        for record in file.read(range(start, min(start + block, len(file)))):
            for response_ids in (record.response_ids, record.rejected_ids):
                sequences.append(TokenSequence(record.prompt_ids, response_ids, {}))
    return sequences


def _blocks(count: int) -> Iterator[range]:
    return (range(start, min(start + BLOCK_PAIRS, count)) for start in range(0, count, BLOCK_PAIRS))


def _percentages(interval: Interval) -> str:
    return f"{interval.mean:.1%} ({interval.low:.1%} to {interval.high:.1%})"
