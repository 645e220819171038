"""The policy as the loop sees it: all that passes between rank 0 and the ranks that compute and train it."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from mindrlhf.data.packing import PackedRows
from mindrlhf.system.records import merge
from mindrlhf.system.workers import Workers
from mindrlhf.training.batch import Batch, RowOptions, parts_of_step
from mindrlhf.training.results import UpdateResult
from mindrlhf.training.team import Team
from mindrlhf.weights.publish.buffer import WeightBuffer
from mindrlhf.weights.publish.publisher import WeightPublisher

if TYPE_CHECKING:
    from mindrlhf.training.engine.actor import Actor


def merge_update(results: Sequence[UpdateResult], batch: Batch) -> UpdateResult:
    """Return the result of an update over all ranks: sums of statistics, log-probabilities in the batch's order."""
    return UpdateResult(
        statistics=np.sum([result.statistics for result in results], axis=0),
        grad_norm=results[0].grad_norm,
        process=merge([result.process for result in results]),
        logprobs=tuple(batch.in_order([result.logprobs for result in results])),
    )


class Policy:
    """The trained model and its reference on all ranks; :class:`mindrlhf.training.engine.actor.Actor` is their part.

    The ranks keep the batches of a step until the next one's; what is said of a sample is in the order of the batches.
    """

    def __init__(self, team: Team, buffer: WeightBuffer):
        self._team = team
        self._workers: Actor = Workers(team.call)
        self._publisher = WeightPublisher(team, buffer)
        self._batches: Sequence[Batch] = ()

    def warm_up(self, rows: RowOptions, graphs: Sequence[str]) -> None:
        """Compile the update and the ``graphs`` ("old_logprobs", "reference_logprobs") for every shape of rows."""
        self._workers.warm_up(shapes=rows.shapes(), graphs=list(graphs))

    def receive(self, batches: Sequence[Batch]) -> None:
        """Give every rank its part of the updates of a step, with the images that its rows look at."""
        self._batches = batches
        self._workers.receive(per_rank=parts_of_step(batches, self._team.world_size))

    def logprobs(self, name: str) -> list[np.ndarray]:
        """Have the ranks compute and keep "old_logprobs" or "reference_logprobs".

        Returns:
            float32 [response] for each sample.
        """
        responses = []
        for position, batch in enumerate(self._batches):
            responses += batch.collect(self._workers.compute_logprobs(name=name, batch=position))
        return responses

    def send_tokens(self, name: str, responses: Sequence[np.ndarray]) -> None:
        """Give the ranks an array [response] for each sample; updates read them under their name."""
        start, by_batch = 0, []
        for batch in self._batches:
            own = responses[start : start + batch.num_samples]
            start += len(own)
            by_batch.append(batch.spread(own, self._team.world_size))
        self._workers.receive_tokens(per_rank=[{"arrays": list(parts)} for parts in zip(*by_batch)], name=name)

    def update(self, position: int, lr: float, kl_coefficient: float) -> UpdateResult:
        """Make one optimiser update from the batch at ``position``."""
        results = self._workers.update(batch=position, lr=lr, kl_coefficient=kl_coefficient)
        return merge_update(results, self._batches[position])

    def responses(self, updates: Sequence[UpdateResult]) -> list[np.ndarray]:
        """Return the log-probabilities that updates of the first pass began with, float32 [response] by sample."""
        found = (batch.responses(update.logprobs) for batch, update in zip(self._batches, updates))
        return [response for responses in found for response in responses]

    def held_rows(self, position: int, batch: Batch) -> list[PackedRows]:
        """Return the micro-batches of ``batch``, at ``position``, with all that the ranks were given and computed."""
        return batch.in_order(self._workers.held_rows(batch=position))

    def sync_reference(self) -> None:
        """Copy the policy into the reference model."""
        self._workers.sync_reference()

    def publish(self, version: int, load: Callable[[int, int], None] | None = None) -> str:
        """Put the weights where the generator finds them; see :meth:`WeightPublisher.publish`."""
        return self._publisher.publish(version, load)
