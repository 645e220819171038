"""The supervised loop over ranks that only count: steps, epochs, shares and the numbers reported."""

import dataclasses
from collections import Counter

import numpy as np
import pytest
from fakes import LocalTeam
from offline_cases import NoCheckpoints, Sinks

from mindrlhf.config.model import ModelSection
from mindrlhf.config.offline import SupervisedSection
from mindrlhf.config.run import DataSection, RunSection
from mindrlhf.config.schema import SftConfig
from mindrlhf.config.training import OptimizerSection
from mindrlhf.data.mindrecord import Prompt
from mindrlhf.images.geometry import VisionGeometry
from mindrlhf.images.pixels import encode_png, image_digest
from mindrlhf.training.checkpoints.run import Progress
from mindrlhf.training.offline.run import read_records
from mindrlhf.training.offline.supervised import SupervisedTrainer
from mindrlhf.training.preflight import RunInputs
from mindrlhf.training.results import HeldOutLogProbs, ProcessStatistics, UpdateResult
from mindrlhf.training.train import run_steps
from mindrlhf.training.vision.image_rows import ImageTokens


class Records:
    """Record i has a prompt of one token, i + 1, and a response of ``lengths[i]`` tokens."""

    def __init__(self, lengths):
        self.lengths = lengths
        self.blocks = []

    def __len__(self):
        return len(self.lengths)

    def read(self, indices):
        self.blocks.append(len(indices))
        return [
            Prompt(np.array([i + 1], np.int32), np.full(self.lengths[i], i + 1, np.int32), "", f"s:{i}")
            for i in indices
        ]


class Rank:
    """Its loss is its share of the tokens, so that the shares of a step add up to 1."""

    def __init__(self):
        self.updates, self.evaluations = [], []

    def train(self, batch, lr):
        micro_batches, num_tokens = batch.micro_batches, batch.num_tokens
        count = sum(float(rows.mask.sum()) for rows in micro_batches)
        # The last prompt position of each record carries its number; padding rows carry none.
        records = [
            int(row[position])
            for rows in micro_batches
            for row, mask in zip(rows.labels, rows.mask)
            for position in np.flatnonzero(mask)
        ]
        self.updates.append((lr, num_tokens, Counter(records)))
        return UpdateResult(np.array([count / num_tokens, 2 * count]), 0.25, ProcessStatistics(1, 0.1))

    def evaluate(self, batch):
        count = sum(float(rows.mask.sum()) for rows in batch.micro_batches)
        self.evaluations.append(count)
        return HeldOutLogProbs(-3.0 * count)


def run(lengths, *, world_size=1, held_out=None, max_steps=0, shuffle=True, seed=0, optimizer=None, **supervised):
    options = {"rows_per_step": 2 * world_size, "micro_batch_size": 1, "epochs": 1, "packing": "none", **supervised}
    config = SftConfig(
        model=ModelSection(path="model"),
        data=DataSection(train_file="train", tokenizer_dir="tokenizer", shuffle=shuffle),
        run=RunSection(max_steps=max_steps, seed=seed),
        training=SupervisedSection(**options),
        optimizer=OptimizerSection(**(optimizer or {"start_lr": 1.0})),
    )
    team, sinks = LocalTeam([Rank() for _ in range(world_size)]), Sinks()
    inputs = RunInputs(None, Records(lengths), Records(held_out) if held_out else None, (8, 16), 0)
    trainer = SupervisedTrainer(config, inputs, team)
    trainer.progress = Progress()
    assert run_steps(trainer, NoCheckpoints(), sinks)
    return team, sinks.metrics


LENGTHS = [3, 5, 2, 15, 9]


@pytest.mark.parametrize("packing", ["none", "first_fit"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_every_epoch_trains_on_every_token_once(world_size, packing):
    team, metrics = run(LENGTHS, world_size=world_size, epochs=3, packing=packing)
    total = sum((records for rank in team.workers for _, _, records in rank.updates), Counter())
    assert total == {i + 1: 3 * length for i, length in enumerate(LENGTHS)}
    assert list(metrics) == list(range(1, len(metrics) + 1))
    for step, values in metrics.items():
        # Divided by the tokens of the step, over all ranks: the parts of the loss add up to a mean.
        assert values["loss"] == pytest.approx(1.0)
        assert values["entropy"] == pytest.approx(2.0)
        assert values["lr"] == 1.0 and values["grad_norm"] == 0.25
        assert len({rank.updates[step - 1][1] for rank in team.workers}) == 1
    assert all(len(rank.updates) == len(metrics) for rank in team.workers)


def test_the_last_step_of_an_epoch_is_shorter():
    team, metrics = run(LENGTHS, epochs=2)
    # Five rows, two to a step: 2 + 2 + 1, twice.
    assert [len(records) for _, _, records in team.workers[0].updates] == [2, 2, 1, 2, 2, 1]
    for _, num_tokens, records in team.workers[0].updates:
        assert num_tokens == sum(LENGTHS[record - 1] for record in records)


@pytest.mark.parametrize(("max_steps", "num_steps"), [(0, 6), (4, 4), (99, 6)])
def test_max_steps_cuts_the_run_short(max_steps, num_steps):
    _, metrics = run(LENGTHS, epochs=2, max_steps=max_steps)
    assert list(metrics) == list(range(1, num_steps + 1))


def orders(**options):
    team, _ = run(LENGTHS, epochs=2, rows_per_step=1, **options)
    records = [next(iter(records)) for _, _, records in team.workers[0].updates]
    return records[:5], records[5:]


def test_the_order_is_anew_in_each_epoch_and_a_function_of_the_seed():
    first, second = orders(seed=3)
    assert sorted(first) == sorted(second) == [1, 2, 3, 4, 5]
    assert first != second
    assert orders(seed=3) == (first, second)
    assert orders(seed=4) != (first, second)


def test_without_shuffling_epochs_are_alike():
    first, second = orders(shuffle=False)
    assert first == second


def test_the_schedule_spans_all_steps():
    optimizer = {"start_lr": 1.0, "end_lr": 0.0, "lr_schedule": "linear"}
    _, metrics = run(LENGTHS, epochs=2, optimizer=optimizer)
    assert [values["lr"] for values in metrics.values()] == pytest.approx([1, 0.8, 0.6, 0.4, 0.2, 0])


@pytest.mark.parametrize("world_size", [1, 3])
def test_the_held_out_loss_is_a_mean_over_its_tokens(world_size):
    team, metrics = run(LENGTHS, world_size=world_size, held_out=[4, 7, 1, 1])
    assert [step for step, values in metrics.items() if "eval/loss" in values] == [len(metrics)]
    assert metrics[len(metrics)]["eval/loss"] == pytest.approx(3.0)
    assert sum(count for rank in team.workers for count in rank.evaluations) == 13


def test_records_are_read_in_blocks():
    records = Records([1] * 10)
    read = list(read_records(records, block=4))
    assert records.blocks == [4, 4, 2]
    assert [int(record.prompt_ids[0]) for record in read] == list(range(1, 11))


class Pictures(Records):
    """Record i shows picture i % 2, of one token."""

    FILES = [encode_png(np.full((28, 28, 3), shade, np.uint8)) for shade in (0, 200)]

    def read(self, indices):
        records = super().read(indices)
        return [
            dataclasses.replace(record, prompt_ids=np.array([9, 8], np.int32), image_files=(self.FILES[index % 2],))
            for index, record in zip(indices, records)
        ]


class SeeingRank(Rank):
    """Notes which images it was sent, and which its rows look at."""

    def __init__(self):
        super().__init__()
        self.sent, self.looked_at = [], []

    def train(self, batch, lr):
        self.sent.append({image_digest(image) for image in batch.images.values()})
        wide = [rows for rows in batch.micro_batches if rows.input_ids.shape == (*rows.mask.shape, 4)]
        assert len(wide) == len(batch.micro_batches)
        self.looked_at.append({digest for rows in wide for digest in rows.images})
        return super().train(batch, lr)


def test_ranks_are_sent_the_images_of_each_step():
    config = SftConfig(
        model=ModelSection(path="model"),
        data=DataSection(train_file="train", tokenizer_dir="tokenizer"),
        training=SupervisedSection(rows_per_step=2, micro_batch_size=1, epochs=2, packing="none"),
    )
    team = LocalTeam([SeeingRank(), SeeingRank()])
    inputs = RunInputs(None, Pictures(LENGTHS), None, (8, 16, 32), 0, ImageTokens(100, 9, VisionGeometry()))
    trainer = SupervisedTrainer(config, inputs, team)
    trainer.progress = Progress()
    assert run_steps(trainer, NoCheckpoints(), Sinks())
    for rank in team.workers:
        assert rank.sent == rank.looked_at and any(rank.sent)
