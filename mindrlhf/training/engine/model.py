"""A model on one rank: parameter placement (replicated) and forward passes over packed rows."""

import contextlib
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np

from mindrlhf.checkpoint.manifest import below
from mindrlhf.checkpoint.state import StateWriter
from mindrlhf.data.packing import PackedRows
from mindrlhf.models.causal_lm import CausalLM
from mindrlhf.models.context import run_graph
from mindrlhf.system.files import remove
from mindrlhf.training.routing.rows import experts_by_layer
from mindrlhf.training.runtime import Rank
from mindrlhf.weights.adapters import peft
from mindrlhf.weights.adapters.merge import iter_merged_tensors
from mindrlhf.weights.convert import export_hf, hf_tensor_infos, iter_hf_tensors, load_hf_weights
from mindrlhf.weights.publish.buffer import WeightBuffer


class Placement:
    """Placement of a model's parameters on the ranks: how rows get into its graphs, and weights out of it.

    It is :class:`Whole`, or :class:`mindrlhf.training.engine.shards.Shards`, which has the same methods. A model with
    adapters publishes and exports what is merged with them, and saves them alone.

    Args:
        network: the model; of one that is sharded only its names, dtypes and shapes are looked at.
        parameters: that hold it on this rank, by name; None: the network's.

    Attributes:
        names: of the parameters of which this rank holds something.
    """

    def __init__(self, network: CausalLM, parameters: Mapping[str, ms.Parameter] | None = None):
        self.network = network
        self.parameters = parameters or {parameter.name: parameter for parameter in network.get_parameters()}
        self.names: Collection[str] = self.parameters

    @property
    def dtype(self) -> str:
        """Dtype name of the trained parameters."""
        return str(self.network.head_weight.dtype).lower()

    def see(self, images: Sequence[np.ndarray]) -> None:
        """Take the images of a step, uint8 [height, width, 3] each."""
        self.network.images.see(images)

    def copy_from(self, other: "Placement") -> None:
        """Take the weights of a model of the same shape that is placed alike."""
        for name in self.names:
            self.parameters[name].set_data(ms.Tensor(other.parameters[name].asnumpy().copy()))

    def create_weight_buffer(self, dtype: str | None = None, bucket_bytes: int = 0) -> WeightBuffer:
        """Make a weight buffer for the model.

        Args:
            dtype: of those who read it; see :func:`mindrlhf.weights.convert.hf_tensor_infos`.
            bucket_bytes: see :meth:`WeightBuffer.create`.
        """
        return WeightBuffer.create(hf_tensor_infos(self.network, dtype), bucket_bytes)

    def export(
        self,
        directory: Path,
        tokenizer_dir: str | os.PathLike | None,
        tensors: Iterator[tuple[str, np.ndarray]] | None = None,
    ) -> None:
        """Write the weights as a Hugging Face directory, in their own dtype.

        Args:
            tensors: all of them, where no rank has them itself; read once.
        """
        export_hf(tensors, self.network.hf_config, directory, dtype=self.dtype, tokenizer_dir=tokenizer_dir)


class Whole(Placement):
    """Every rank has a replica.

    Args:
        network: the model.
        rank: this process.
    """

    def __init__(self, network: CausalLM, rank: Rank):
        super().__init__(network)
        self._rank = rank

    def run(self, graph: Callable, rows: PackedRows) -> Any:
        """Return all outputs of a graph on rows."""
        return run_graph(graph, *model_tensors(self.network, rows))

    def outputs(self, graph: Callable, rows: PackedRows) -> np.ndarray:
        """Return what a graph over the model says of each token of this rank's rows, float32 [rows, length]."""
        return self.run(graph, rows)[0].asnumpy().copy()

    def without_adapters(self) -> contextlib.AbstractContextManager[None]:
        """Compute without the adapters while the body runs: they add 0."""
        return self.network.lora.off()

    def tensors(self, *share: Any) -> Iterator[tuple[str, np.ndarray]]:
        """Yield the Hugging Face tensors, merged with adapters; ``share`` as `iter_hf_tensors` takes it."""
        return (iter_hf_tensors if self.network.lora is None else iter_merged_tensors)(self.network, *share)

    def write_to(self, buffer: WeightBuffer, ranks: Sequence[int] | None = None) -> None:
        """Write this rank's share of the tensors that a buffer wants.

        Args:
            ranks: those of this node, which share the buffer and divide the tensors; None for all.
        """
        ranks = range(self._rank.world_size) if ranks is None else ranks
        for name, array in self.tensors(ranks.index(self._rank.index), len(ranks), buffer.wants):
            buffer.write(name, array)

    def size_bytes(self) -> int:
        """Return the bytes of the whole model in a checkpoint."""
        if self.network.lora is not None:
            return sum(array.nbytes for _, array in peft.iter_adapter_tensors(self.network))
        return sum(info.size_bytes for info in hf_tensor_infos(self.network))

    def state_writer(self, name: str, hold: Callable) -> StateWriter:
        """Return the function that writes the directory ``name`` of a checkpoint, as a Hugging Face directory.

        ``hold`` takes ``name`` and the arrays first.
        """
        network = self.network
        if network.lora is not None:
            adapter = hold(name, peft.iter_adapter_tensors(network))
            return lambda directory: below(name, self._write_adapter(adapter, directory / name))
        weights = hold(name, iter_hf_tensors(network))
        return lambda directory: below(name, export_hf(weights, network.hf_config, directory / name, dtype=self.dtype))

    def restore(self, directory: str | os.PathLike) -> None:
        """Load what the ranks of any layout have written; raises UserError where it is of another model."""
        (load_hf_weights if self.network.lora is None else peft.load_adapter)(self.network, directory)

    def export(
        self,
        directory: Path,
        tokenizer_dir: str | os.PathLike | None,
        tensors: Iterator[tuple[str, np.ndarray]] | None = None,
    ) -> None:
        """See :meth:`Placement.export`; before it come the adapters, beside it as PEFT has them.

        The directory comes last, since it marks a run as complete. Adapters that are there already are those that a run
        left when it was killed in between.
        """
        if self.network.lora is not None:
            adapter_dir = peft.exported_adapter(directory)
            remove(adapter_dir)
            self._write_adapter(peft.iter_adapter_tensors(self.network), adapter_dir)
        super().export(directory, tokenizer_dir, self.tensors() if tensors is None else tensors)

    def _write_adapter(self, tensors, directory: Path) -> dict[str, str]:
        network, options = self.network, self.network.lora.options
        shapes = peft.adapter_shapes(network.spec, network.dims, options)
        config = peft.adapter_config(network.spec, network.dims, options, network.lora.base_path)
        return peft.write_adapter(tensors, shapes, config, directory)


class Model:
    """A forward pass over rows.

    Args:
        placement: of its parameters.
        graph: over them: log-probabilities, or scores.
        is_base: it is the reference model of a policy with adapters: without these, in the same memory.
    """

    def __init__(self, placement: Placement, graph: Callable, *, is_base: bool = False):
        self.placement = placement
        self.network = placement.network
        self.graph = graph
        self._turned_off = placement.without_adapters if is_base else contextlib.nullcontext

    def see(self, images: Sequence[np.ndarray]) -> None:
        self.placement.see(images)

    def logprobs(self, rows: PackedRows) -> np.ndarray:
        """See :meth:`Whole.outputs`."""
        with self._turned_off():
            return self.placement.outputs(self.graph, rows)


def model_tensors(network: CausalLM, rows: PackedRows) -> tuple:
    """Return `row_tensors` as a model takes them: with the images of the rows, or the experts to be replayed."""
    input_ids, *others = row_tensors(rows)
    experts = experts_by_layer(rows)
    if experts is not None:
        # Not mutable, the experts would be constants of the graph: it would be compiled for each micro-batch anew.
        return (ms.mutable((input_ids, ms.Tensor(experts))), *others)
    if network.images is not None:
        network.images.place(rows.images)
    return (input_ids, *others)


def row_tensors(rows: PackedRows) -> tuple[ms.Tensor, ...]:
    """Return the four arrays that every cell takes first."""
    return tuple(ms.Tensor(array) for array in (rows.model_inputs, rows.segment_ids, rows.labels, rows.mask))
