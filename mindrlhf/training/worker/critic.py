"""The critic of PPO on a rank, beside the actor: values of states, its own updates, its part of checkpoints."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import mindspore as ms
import numpy as np

from mindrlhf.algorithms.scores import TokenScores
from mindrlhf.algorithms.value_loss import VALUE_INPUTS, VALUE_STATISTICS, ValueLoss
from mindrlhf.checkpoint.state import CRITIC_NAME, CRITIC_OPTIMIZER_NAME, StateWriter
from mindrlhf.config.derived import critic_optimizer
from mindrlhf.config.schema import GrpoConfig
from mindrlhf.data.packing import PackedRows
from mindrlhf.models.load import load_scorer
from mindrlhf.system import heartbeat
from mindrlhf.system.files import remove
from mindrlhf.training.batch import Batch, ProcessStatistics, UpdateResult
from mindrlhf.training.runtime import Rank
from mindrlhf.training.worker.actor import Actor
from mindrlhf.training.worker.learner import Learner
from mindrlhf.training.worker.model import RankModel


class CriticLearner(Protocol):
    """What :class:`ActorCritic` needs of a critic, whole or sharded; see :class:`Critic`.

    Attributes:
        model: what it trains.
    """

    model: RankModel

    def warm_up(self, rows: PackedRows) -> None:
        """Run the graphs on rows of weight 0, which changes nothing."""

    def values(self, rows: PackedRows) -> np.ndarray:
        """Return the values of one micro-batch."""

    def update(self, batch: Batch, lr: float) -> UpdateResult:
        """Make one optimiser update."""

    def process_statistics(self) -> ProcessStatistics:
        """Return what this rank has used so far."""

    def state_size_bytes(self) -> int:
        """Return the size of weights and optimiser state in a checkpoint."""

    def state_writer(self, hold: Callable) -> StateWriter:
        """See :meth:`mindrlhf.training.checkpoints.shards.SavesState.state_writer`."""

    def restore(self, directory: str) -> None:
        """Load weights and optimiser state."""


class Critic(Learner):
    """A scoring model that learns the value of the text before each response token."""

    model_name, optimizer_name = CRITIC_NAME, CRITIC_OPTIMIZER_NAME

    def values(self, rows: PackedRows) -> np.ndarray:
        """Return the values of one micro-batch, float32 [rows, length], 0 outside the responses."""
        self.count_compile("values", rows)
        return self.model.logprobs(rows)

    def update(self, batch: Batch, lr: float) -> UpdateResult:
        """Make one optimiser update.

        Args:
            batch: with the tokens "values" and "returns".
            lr: learning rate.

        Returns:
            Statistics [2] (``VALUE_STATISTICS``), and a norm that is not finite when there was no update; see
            :meth:`Learner.apply`.
        """
        total = np.zeros(len(VALUE_STATISTICS))
        for rows in batch.micro_batches:
            total += self.accumulate(rows, [rows.tokens[name] for name in VALUE_INPUTS], batch.num_tokens)[0]
        norm = self.apply(lr, loss=float(total[0]))
        return UpdateResult(total, norm, self.process_statistics())

    def warm_up(self, rows: PackedRows) -> None:
        """Compile the graphs for rows of weight 0."""
        self.values(rows)
        self.accumulate(rows, [rows.mask] * len(VALUE_INPUTS), 1)


class Turns:
    """Lets the models of a device take turns on it: the state of those not in use lies in the host's memory.

    On a CPU, where both memories are one, nothing moves.

    Args:
        device: "cpu" or "ascend".
        models: name -> the parameters of a model and of its training; all are on the device.
    """

    def __init__(self, device: str, models: Mapping[str, Sequence[ms.Parameter]]):
        self._models = models if device != "cpu" else dict.fromkeys(models, ())
        self._loaded = set(models)

    def take(self, name: str) -> None:
        """Make room for one model and bring it to the device."""
        assert name in self._models, f"there is no model {name!r}"
        for other in sorted(self._loaded - {name}):
            for parameter in self._models[other]:
                parameter._offload()  # MindSpore has no public form of it
        if name not in self._loaded:
            for parameter in self._models[name]:
                parameter._load()
        self._loaded = {name}


# Of models that are sharded: both stay on the device.
NO_TURNS = Turns("", {"actor": (), "critic": ()})


class ActorCritic(Actor):
    """Actor and critic on one rank; public methods are called through the team.

    Args:
        critic: the critic, whole or sharded.
        turns: of both models.
        others: of :class:`mindrlhf.training.worker.actor.Actor`.
    """

    def __init__(self, critic: CriticLearner, turns: Turns, **others: Any):
        super().__init__(**others)
        self.critic = critic
        self._turns = turns

    def warm_up(self, shapes: list[PackedRows], graphs: list[str]) -> None:
        """Compile the graphs of both models; see :meth:`Actor.warm_up`."""
        self._turns.take("critic")
        for rows in shapes:
            size = f"sequences of {rows.labels.shape[1]} tokens"
            heartbeat.enter(f"compiling the critic for {size}")
            self.critic.warm_up(rows)
        self._turns.take("actor")
        super().warm_up(shapes, graphs)

    def see(self, images: tuple[np.ndarray, ...]) -> None:
        """Show the images to both models."""
        super().see(images)
        self.critic.model.see(images)

    def take_turn(self, model: str) -> None:
        """Give the device to "actor" or "critic"."""
        self._turns.take(model)

    def compute_values(self, batch: int) -> list[np.ndarray]:
        """Fill in "values" for received batch number ``batch``; return them."""
        micro_batches = self._batches[batch].micro_batches
        for rows in micro_batches:
            rows.tokens["values"] = self.critic.values(rows)
        return [rows.tokens["values"] for rows in micro_batches]

    def update_critic(self, batch: int, lr: float) -> UpdateResult:
        """Make one update of the critic from received batch number ``batch``; see :meth:`Critic.update`."""
        return self.critic.update(self._batches[batch], lr)

    def process_statistics(self) -> ProcessStatistics:
        """Return the compilations of both models and the peak memory of this rank."""
        own = super().process_statistics()
        return replace(own, recompiles=own.recompiles + self.critic.process_statistics().recompiles)

    def _published_model(self, name: str) -> RankModel:
        """Return the model of "critic", or else the actor's."""
        return self.critic.model if name == "critic" else self.model

    def export_critic(
        self, directory: Path, tokenizer_dir: Any, tensors: Iterator[tuple[str, np.ndarray]] | None = None
    ) -> None:
        """Write the critic as a Hugging Face directory; see :meth:`RankModel.export`.

        One that is there already is one that a run left when it was killed before it exported the actor.
        """
        remove(directory)
        self.critic.model.export(directory, tokenizer_dir, tensors)

    def state_size_bytes(self) -> int:
        """Return the size of a checkpoint of both models, in bytes."""
        return super().state_size_bytes() + self.critic.state_size_bytes()

    def state_writer(self, hold: Callable) -> StateWriter:
        """See :meth:`SavesState.state_writer`; of both models."""
        writers = (super().state_writer(hold), self.critic.state_writer(hold))

        return lambda directory: writers[0](directory) | writers[1](directory)

    def restore(self, directory: str) -> None:
        """Load what ``save`` wrote."""
        super().restore(directory)
        self.critic.restore(directory)


def build_critic(config: GrpoConfig, row_length: int, rank: Rank) -> Critic:
    """Return the critic of a run.

    Raises:
        UserError: the model in ``critic.path`` does not fit.
    """
    lora = replace(config.lora, path="")  # that adapter is the actor's
    options: dict = {"memory": config.memory, "num_image_rows": config.training.micro_batch_size * row_length}
    network = load_scorer(config.model, config.critic.path, config.run, row_length, lora, **options)
    loss = ValueLoss(TokenScores(network, after_token=False), config.critic.clip_range)
    return Critic(network, loss, critic_optimizer(config), rank, config.run.device)
