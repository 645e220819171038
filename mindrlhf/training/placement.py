"""Parameters of a model on one rank, and what is published of them."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import mindspore as ms
import numpy as np

from mindrlhf.layout.layout import Layout, parameter_layouts
from mindrlhf.layout.parameter import ParameterLayout
from mindrlhf.models.causal_lm import CausalLM
from mindrlhf.specs.lora import AdaptedRules
from mindrlhf.weights.infos import hf_tensor_infos
from mindrlhf.weights.publish.buffer import WeightBuffer
from mindrlhf.weights.publish.shards import PublishedShard, plan_publication, wanted_shards, write_shards
from mindrlhf.weights.tensors import STORAGE_DTYPES, with_low_rank


class Placement:
    """A model's parameters on the ranks, as a layout says: what a rank holds is published from there.

    :mod:`mindrlhf.training.checkpoints.models` loads, saves and exports it.

    A model with adapters publishes and exports what is merged with them, and saves them alone. Of adapters, a rank that
    holds rows of W has those of B, and one that holds columns of W those of A: so each merges what it publishes without
    the others.

    Args:
        network: the model, of which names, dtypes and shapes are read; ``network.lora`` says what its adapters are.
        layout: of its shards.
        rank: number of this rank in it.
        parameters: those that hold the shards, by name, at least all that this rank holds; None: the network's.

    Attributes:
        held: layouts of the parameters of which this rank holds something, by name.
        adapted: the rules of its adapters; None without.
        saved: layouts of the parameters that a checkpoint has: of adapters, what is trained.
    """

    def __init__(
        self, network: CausalLM, layout: Layout, rank: int, parameters: Mapping[str, ms.Parameter] | None = None
    ):
        self.network = network
        self.parameters = parameters or {parameter.name: parameter for parameter in network.get_parameters()}
        self.layout = layout
        self.rank = rank
        self.stage = layout.stage_of(rank)
        self.layouts = network_layouts(network, layout)
        self.held = {one.name: one for one in self.layouts if self.stage in one.stages}
        self.published_layout, self.published_rank = layout, rank  # by which ranks share the work of publishing
        self._publications: dict[tuple[int, ...] | None, dict[str, list[PublishedShard]]] = {}
        self.adapted = network.lora and AdaptedRules(network.spec, network.dims, network.lora.options)
        self.saved, self._adapter_of = self.layouts, {}
        if self.adapted:
            trained = {rule.mf_name for rule in self.adapted.trained()}
            self.saved = [one for one in self.layouts if one.name in trained]
            self._adapter_of = {one.base.mf_name: one for one in self.adapted.adapters}

    @property
    def dtype(self) -> str:
        """Dtype name of the trained parameters."""
        return str(self.network.head_weight.dtype).lower()

    def see(self, images: Sequence[np.ndarray]) -> None:
        """Take the images of a step, uint8 [height, width, 3] each; the first stage alone has the vision tower."""
        if self.stage == 0:
            self.network.images.see(images)

    def without_adapters(self) -> contextlib.AbstractContextManager[None]:
        """Compute without the adapters while the body runs: they add 0."""
        from mindrlhf.models.lora.model import scale_name, without_adapters

        return without_adapters(self.parameters[scale_name(self.stage)])

    def copy_from(self, other: "Placement") -> None:
        """Take the weights of a model of the same shape that is placed alike."""
        for name in self.held:
            self.parameters[name].set_data(ms.Tensor(other.parameters[name].asnumpy().copy()))

    def create_weight_buffer(self, dtype: str | None = None, bucket_bytes: int = 0) -> WeightBuffer:
        """Make a weight buffer for the model.

        Args:
            dtype: of those who read it; see :func:`mindrlhf.weights.infos.hf_tensor_infos`.
            bucket_bytes: see :meth:`WeightBuffer.create`.
        """
        return WeightBuffer.create(hf_tensor_infos(self.network, dtype), bucket_bytes)

    def shards(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield name and array of what this rank holds; bfloat16 as uint16 bit patterns."""
        yield from ((name, self.shard(name)) for name in self.held)

    def shard(self, name: str) -> np.ndarray:
        """Return what this rank holds of a parameter; bfloat16 as uint16 bit patterns."""
        parameter = self.parameters[name]
        return parameter.asnumpy().view(STORAGE_DTYPES[dtype_of(parameter)])

    def write_to(self, buffer: WeightBuffer, ranks: Sequence[int] | None = None) -> None:
        """Write what no other rank of the node writes of the tensors that a buffer wants.

        Args:
            ranks: those of this node, which share the buffer; None for all.
        """
        publication = self._publication(None if ranks is None else tuple(ranks))
        for name, parts in wanted_shards(publication, buffer).items():
            if name in self._adapter_of:
                self._write_merged(buffer, name, parts)
            else:
                self._write_rounded(buffer, name, parts)

    def _write_rounded(self, buffer: WeightBuffer, name: str, parts: Sequence[PublishedShard]) -> None:
        """Write parts of a parameter, in the buffer's dtype and cut out before they leave the device."""
        parameter, dtype = self.parameters[name], buffer.info(parts[0].hf_name).dtype
        if sum(part.num_elements for part in parts) == parameter.size:
            write_shards(buffer, {name: parts}, {name: _to_host(parameter, dtype)})
            return
        for part in parts:  # the others are of another bucket
            if isinstance(part.rows, slice) or dtype != dtype_of(parameter):
                array = _to_host(part.cut(parameter), dtype)
            else:  # a CPU gathers no bfloat16
                array = part.cut(_to_host(parameter, dtype))
            buffer.write(part.hf_name, array if part.columns is None else array.T, part.index)

    def _write_merged(self, buffer: WeightBuffer, name: str, parts: Sequence[PublishedShard]) -> None:
        adapter, options = self._adapter_of[name], self.network.lora.options
        base, down, up = (self.shard(one) for one in (name, adapter.down.mf_name, adapter.up.mf_name))
        # A sharded optimiser cuts the rows of W among replicas, but not those of B.
        start = self.held[name].shard_of(self.rank)[0].start
        start -= self.held[adapter.up.mf_name].shard_of(self.rank)[0].start
        up = up[start : start + len(base)]
        for part in parts:
            first = adapter.base.hf_names.index(part.hf_name) * options.rank
            factors = (down[first : first + options.rank], up[part.rows])
            buffer.write(part.hf_name, with_low_rank(base[part.rows], *factors, options.scale), part.index)

    def _publication(self, ranks: tuple[int, ...] | None) -> dict[str, list[PublishedShard]]:
        if ranks not in self._publications:
            rules = {rule.mf_name: rule for rule in self.network.spec.rules(self.network.dims)}
            layouts = [one for one in network_layouts(self.network, self.published_layout) if one.name in rules]
            plan = plan_publication(layouts, rules, self.network.dims, self.published_rank, ranks)
            self._publications[ranks] = plan
        return self._publications[ranks]


def network_layouts(network: CausalLM, layout: Layout) -> list[ParameterLayout]:
    """Return how the parameters of a model lie on the ranks; see :func:`mindrlhf.layout.layout.parameter_layouts`."""
    element_bytes = np.dtype(STORAGE_DTYPES[str(network.head_weight.dtype).lower()]).itemsize
    adapted = network.lora and AdaptedRules(network.spec, network.dims, network.lora.options)
    return parameter_layouts(adapted or network.spec, network.dims, layout, element_bytes)


def set_shard(parameter: ms.Parameter, array: np.ndarray, layout: ParameterLayout) -> None:
    """Give a parameter its shard, in its dtype (bfloat16 as uint16 bit patterns)."""
    assert tuple(parameter.shape) == layout.shard_shape == array.shape, (
        f"{layout.name} is {tuple(parameter.shape)} in the graph, its layout gives {layout.shard_shape}, and the shard "
        f"is {array.shape}"
    )
    # The copy keeps the parameter from sharing a read-only file mapping.
    data = np.array(array, order="C")
    if parameter.dtype == ms.bfloat16:
        data = data.view(ms.Tensor([0], ms.bfloat16).asnumpy().dtype)
    parameter.set_data(ms.Tensor(data))


def _to_host(tensor: ms.Tensor, dtype: str) -> np.ndarray:
    """Return a tensor in a dtype, rounded (to nearest even) on the device, where it lies."""
    rounded = tensor if dtype == dtype_of(tensor) else ms.ops.cast(tensor, getattr(ms, dtype))
    return rounded.asnumpy().view(STORAGE_DTYPES[dtype])


def dtype_of(tensor: ms.Tensor) -> str:
    """Return the name of a dtype."""
    return str(tensor.dtype).lower()
