"""Supervised fine-tuning on the cells of reinforcement learning; also the warm-up before it."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mindrlhf.algorithms.logprobs import PolicyLogProbs
from mindrlhf.algorithms.losses import SupervisedLoss
from mindrlhf.config.loader import write_config
from mindrlhf.config.schema import SftConfig
from mindrlhf.data.packing import Row, TokenSequence, plan_rows
from mindrlhf.observe.sinks import SinkGroup, open_sinks
from mindrlhf.training.batch import Batch, RowOptions, batch_of_rows, unpack_share
from mindrlhf.training.cells import check_finite
from mindrlhf.training.learner import Learner, load_model
from mindrlhf.training.preflight import FINAL_NAME, RunInputs, check_free, check_sft_inputs
from mindrlhf.training.runtime import Rank, start_runtime
from mindrlhf.training.schedule import learning_rate
from mindrlhf.training.team import Team, connect, serve


class SupervisedLearner(Learner):
    """The model of a supervised run on one rank; its public methods are called through the team."""

    def __init__(self, network: Any, loss: SupervisedLoss, config: SftConfig, rank: Rank):
        super().__init__(network, loss, config.optimizer, rank, config.run.device)

    def update(self, lr: float, **share: Any) -> dict[str, Any]:
        """Make one optimiser update; "statistics" [2] are this rank's part of the loss and its entropy sum."""
        micro_batches, num_tokens = unpack_share(share)
        statistics = [self.accumulate(rows, (), num_tokens)[0] for rows in micro_batches]
        norm = check_finite(self.apply(lr))
        return {"statistics": np.sum(statistics, axis=0), "grad_norm": norm, **self.process_statistics()}

    def evaluate(self, **share: Any) -> dict[str, Any]:
        """Return "logprob_sum", the summed log-probability of this rank's response tokens."""
        micro_batches, _ = unpack_share(share)
        return {"logprob_sum": sum(float(self.logprobs(self.policy, rows).sum()) for rows in micro_batches)}


def run_supervised_rank(config: SftConfig) -> None:
    """Do this rank's part of a supervised run: the lead drives the loop, the others serve it.

    Raises:
        UserError, RunFailure: as the rooms raise them.
    """
    inputs = check_sft_inputs(config)
    output_dir = Path(config.run.output_dir)
    check_free(output_dir / FINAL_NAME)
    rank = start_runtime(config.run, output_dir / "logs")
    connections = connect(rank)
    network = load_model(config.model, config.model.path, config.run, inputs.row_lengths[-1])
    loss = SupervisedLoss(PolicyLogProbs(network, 1.0, config.run.device))
    learner = SupervisedLearner(network, loss, config, rank)
    if not rank.is_lead:
        serve(learner, connections[0])
        return
    write_config(config, output_dir)
    team = Team(learner, connections)
    sinks = open_sinks(output_dir, first_step=0, tensorboard=config.observe.tensorboard)
    try:
        run_supervised(config, inputs, team, sinks)
    finally:
        sinks.close()
        team.close()
    learner.export(output_dir / FINAL_NAME, config.data.tokenizer_dir)
    print(f"model: {output_dir / FINAL_NAME}", flush=True)


def run_supervised(config: SftConfig, inputs: RunInputs, team: Team, sinks: SinkGroup) -> None:
    """Train on every record ``supervised.epochs`` times, or for ``run.max_steps`` steps; the lead rank's loop."""
    options = RowOptions(inputs.row_lengths, config.supervised.batch_size, team.world_size, config.supervised.pack)
    sequences = read_sequences(inputs.prompts)
    rows = plan_rows([sequence.num_tokens for sequence in sequences], options.row_lengths, pack=options.pack)
    held_out = None
    if inputs.held_out:
        held_out_sequences = read_sequences(inputs.held_out)
        lengths = [sequence.num_tokens for sequence in held_out_sequences]
        held_out = batch_of_rows(held_out_sequences, plan_rows(lengths, options.row_lengths), options)
    per_step = config.supervised.rows_per_step
    num_steps = config.supervised.epochs * -(-len(rows) // per_step)
    num_steps = min(num_steps, config.run.max_steps or num_steps)
    for step, part in enumerate(_steps(rows, per_step, num_steps, config)):
        start = time.perf_counter()
        batch = batch_of_rows(sequences, part, options)
        lr = learning_rate(config.optimizer, step, num_steps)
        shares = [batch.share(rank, team.world_size) for rank in range(team.world_size)]
        results = team.call("update", per_rank=shares, lr=lr)
        metrics = _metrics(results, batch, lr)
        if config.observe.performance_stats:
            metrics |= _performance(batch, time.perf_counter() - start, team.world_size)
        if held_out and step + 1 == num_steps:
            metrics["eval/loss"] = _held_out_loss(team, held_out)
        sinks.write(step + 1, metrics)


def read_sequences(file: Any, block: int = 4096) -> list[TokenSequence]:
    """Read every record of a prompt file built with ``--task sft``."""
    sequences = []
    for start in range(0, len(file), block):
        for record in file.read(range(start, min(start + block, len(file)))):
            sequences.append(TokenSequence(record.prompt_ids, record.response_ids, {}))
    return sequences


def _steps(rows: Sequence[Row], per_step: int, num_steps: int, config: SftConfig) -> Iterator[list[Row]]:
    """Yield the rows of each step, epoch after epoch, each in an order of its own if ``data.shuffle`` says so."""
    done, epoch = 0, 0
    while done < num_steps:
        order = np.arange(len(rows))
        if config.data.shuffle:
            np.random.default_rng([config.run.seed, epoch]).shuffle(order)
        for start in range(0, len(rows), per_step):
            if done == num_steps:
                return
            yield [rows[index] for index in order[start : start + per_step]]
            done += 1
        epoch += 1


def _metrics(results: Sequence[dict[str, Any]], batch: Batch, lr: float) -> dict[str, float]:
    loss, entropy = np.sum([result["statistics"] for result in results], axis=0)
    return {
        "loss": float(loss),
        "entropy": float(entropy) / batch.num_tokens,
        "grad_norm": results[0]["grad_norm"],
        "lr": lr,
        "recompiles": max(result["recompiles"] for result in results),
        "memory/peak_rss_gb": max(result["memory/peak_rss_gb"] for result in results),
    }


def _performance(batch: Batch, elapsed_s: float, world_size: int) -> dict[str, float]:
    num_tokens = sum(int((rows.segment_ids > 0).sum()) for rows in batch.micro_batches)
    return {"timing/all": elapsed_s, "e2e_tps": num_tokens / world_size / elapsed_s}


def _held_out_loss(team: Team, batch: Batch) -> float:
    shares = [batch.share(rank, team.world_size) for rank in range(team.world_size)]
    results = team.call("evaluate", per_rank=shares)
    return -sum(result["logprob_sum"] for result in results) / batch.num_tokens
