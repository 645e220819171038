"""The critic of PPO on a rank, beside the actor: values of states, its own updates, its part of checkpoints."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import mindspore as ms
import numpy as np

from mindrlhf.checkpoint.state import StateWriter
from mindrlhf.data.packing import PackedRows
from mindrlhf.system import heartbeat
from mindrlhf.training.checkpoints import models
from mindrlhf.training.engine.actor import Actor
from mindrlhf.training.engine.engine import Engine
from mindrlhf.training.engine.offload import Part
from mindrlhf.training.placement import Placement
from mindrlhf.training.results import ProcessStatistics, UpdateResult


class Turns:
    """Lets the models of a device take turns on it: the state of those not in use lies in the host's memory.

    On a CPU, where both memories are one, nothing moves.

    Args:
        device: "cpu" or "ascend".
        models: name -> the parameters of a model and of its training; all are on the device.
    """

    def __init__(self, device: str, models: Mapping[str, Sequence[ms.Parameter]]):
        self._parts = {name: Part(parameters if device != "cpu" else ()) for name, parameters in models.items()}

    def take(self, name: str) -> None:
        """Make room for one model and bring it to the device."""
        for other, part in self._parts.items():
            if other != name:
                part.send()
        self._parts[name].fetch()


# Of models that are sharded: both stay on the device.
NO_TURNS = Turns("", {"actor": (), "critic": ()})


class ActorCritic(Actor):
    """Actor and critic on one rank; public methods are called through the team."""

    def __init__(self, critic: Engine, turns: Turns, engine: Engine, **others: Any):
        super().__init__(engine, **others)
        self.critic = critic
        self._turns = turns

    def warm_up(self, shapes: list[PackedRows], graphs: list[str]) -> None:
        """Compile the graphs of both models; see :meth:`Actor.warm_up`."""
        self._turns.take("critic")
        for rows in shapes:
            size = f"sequences of {rows.labels.shape[1]} tokens"
            heartbeat.enter(f"compiling the critic for {size}")
            self.critic.outputs("values", rows)
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
            rows.tokens["values"] = self.critic.outputs("values", rows)
        return [rows.tokens["values"] for rows in micro_batches]

    def update_critic(self, batch: int, lr: float) -> UpdateResult:
        """Make one update of the critic from received batch number ``batch``.

        Returns:
            Statistics [2] (``VALUE_STATISTICS``), and a norm that is not finite when there was no update.
        """
        done = self.critic.update(self._batches[batch], lr)
        self.critic.make_room()
        return replace(done, logprobs=())

    def process_statistics(self) -> ProcessStatistics:
        """Return the compilations of both models and the peak memory of this rank."""
        own = super().process_statistics()
        return replace(own, recompiles=own.recompiles + self.critic.process_statistics().recompiles)

    def _published_model(self, name: str) -> Placement:
        """Return that of "critic", or else the actor's."""
        return self.critic.model.placement if name == "critic" else super()._published_model(name)

    def state_size_bytes(self) -> int:
        """Return the size of a checkpoint of both models, in bytes."""
        return super().state_size_bytes() + models.state_size_bytes(self.critic.placement, self.critic.state)

    def state_writer(self, hold: Callable) -> StateWriter:
        """See :meth:`SavesState.state_writer`; of both models."""
        critic = self.critic
        writer = models.state_writer(critic.placement, critic.name, hold, critic.state)
        writers = (super().state_writer(hold), writer)

        return lambda directory: writers[0](directory) | writers[1](directory)

    def restore(self, directory: str) -> None:
        """Load what ``save`` wrote."""
        super().restore(directory)
        self.critic.restore(directory)
