"""The optimiser's state and gradient sums, which are on the host while nothing asks for them."""

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import mindspore as ms

from mindrlhf.config.memory import MemorySection
from mindrlhf.models.context import give_back_memory

if TYPE_CHECKING:
    from mindrlhf.training.engine.sharded_cells import ParallelUpdate


class OptimizerPlaces:
    """Place of the state that only an update needs, device or host, as the section `memory` wants it.

    Args:
        update: the compiled cell.
        held: names of the weights that this rank holds; of others there is no data.
        memory: the section.
    """

    def __init__(self, update: "ParallelUpdate", held: Collection[str], memory: MemorySection):
        moments = update.optimizer.state.items()
        self._moments = Part([one for name, one in moments if name.partition(".")[2] in held])
        sums = zip(update.weights, update.totals, strict=True)
        self._sums = Part([one for weight, one in sums if weight.name in held])
        self._memory = memory

    def have_for_gradients(self) -> None:
        """Have on the device what the calls of an update before its last one need."""
        self._sums.fetch()
        if self._memory.swap_moments:
            self._send(self._moments)
        else:
            self._moments.fetch()

    def have_for_step(self) -> None:
        """Have all of it on the device."""
        self._sums.fetch()
        self._moments.fetch()

    def make_room(self) -> None:
        """Send to the host what is not needed before the next update."""
        if self._memory.swap_moments or self._memory.offload_optimizer:
            self._send(self._moments)
        if self._memory.offload_optimizer:
            self._send(self._sums)

    def _send(self, part: "Part") -> None:
        part.send()
        give_back_memory()


class Part:
    """Parameters that move together."""

    def __init__(self, parameters: Sequence[ms.Parameter]):
        self._parameters = parameters
        self._is_away = False

    def send(self) -> None:
        if not self._is_away:
            for parameter in self._parameters:
                parameter._offload()  # MindSpore has no public form of it
            self._is_away = True

    def fetch(self) -> None:
        if self._is_away:
            for parameter in self._parameters:
                parameter._load()
            self._is_away = False
