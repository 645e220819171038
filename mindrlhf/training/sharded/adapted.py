"""One rank's shard of a model with low-rank adapters: it publishes merged weights, and saves the adapters alone."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import mindspore as ms
import numpy as np

from mindrlhf.data.packing import PackedRows
from mindrlhf.layout.parameter import ParameterLayout
from mindrlhf.models.lora.model import initial_down, scale_name, without_adapters
from mindrlhf.shards.adapter_sources import AdapterSource, open_adapter_source
from mindrlhf.shards.save import finish_saving, plan_saving
from mindrlhf.shards.sources import ArraySource, ShardedSource
from mindrlhf.specs.lora import AdaptedRules
from mindrlhf.training.sharded.model import ShardedModel, set_shard
from mindrlhf.weights.adapters.merge import merge
from mindrlhf.weights.adapters.peft import adapter_config
from mindrlhf.weights.publish.buffer import WeightBuffer
from mindrlhf.weights.publish.shards import PublishedShard, wanted_shards, write_shards
from mindrlhf.weights.sharded import ShardedManifest


class AdaptedShard(ShardedModel):
    """A shard of a model whose adapters are trained; see :mod:`mindrlhf.models.lora.ascend_cells`.

    A rank that holds rows of W has those of B, and one that holds columns of W those of A: so each merges what it
    publishes without the others.

    Args: see :class:`ShardedModel`; ``network.lora`` says what the adapters are.
    """

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        network = self.network
        self._scale = self._parameters[scale_name(self.layout.stage_of(self.rank))]
        self._adapted = AdaptedRules(network.spec, network.dims, network.lora.options)
        names = {rule.mf_name for rule in self._adapted.trained()}
        self._trained = {one.name: one for one in self.layouts if one.name in names}
        self._layout_of = {one.name: one for one in self.held}
        self._adapter_of = {one.base.mf_name: one for one in self._adapted.adapters}

    def _held_in(self, source: ArraySource) -> list[ParameterLayout]:
        # A source has the base, or the adapters.
        return [one for one in self.held if one.name in source.dtypes]

    def begin(self, seed: int, adapter_dir: str) -> None:
        """Give the adapters what they begin with: those of a directory, or when it is "", new ones of a seed.

        Raises:
            UserError: the adapter is of another model.
        """
        if adapter_dir:
            self.load(self.open_saved(adapter_dir))
            return
        for adapter in self._adapted.adapters:
            if adapter.down.mf_name in self._layout_of:
                down, up = self._layout_of[adapter.down.mf_name], self._layout_of[adapter.up.mf_name]
                whole = initial_down(adapter, self.network.dims, seed)
                set_shard(self._parameters[down.name], whole[down.shard_of(self.rank)], down)
                set_shard(self._parameters[up.name], np.zeros(up.shard_shape, np.float32), up)

    def base(self) -> "BaseShard":
        """Return the model without its adapters, in the same memory and by the same graph."""
        parameters, after_token = self._parameters, self._after_token
        return BaseShard(self.network, self.cell, self.parallel, self.rank, parameters, after_token=after_token)

    def open_saved(
        self, directory: str | os.PathLike, optimizer_file: str | os.PathLike = ""
    ) -> AdapterSource | ShardedSource:
        """See :meth:`ShardedModel.open_saved`: an adapter."""
        return open_adapter_source(directory, self._adapted, self.network.dims, optimizer_file)

    def write_to(self, buffer: WeightBuffer, ranks: Sequence[int] | None = None) -> None:
        """See :meth:`ShardedModel.write_to`: merged with the adapters; what has none is written once."""
        publication = self._publication(None if ranks is None else tuple(ranks))
        for name, parts in wanted_shards(publication, buffer).items():
            if name in self._adapter_of:
                self._write_merged(buffer, name, parts)
            elif name in self._trained or not all(buffer.keep(part.hf_name) for part in parts):
                write_shards(buffer, {name: parts}, {name: self.shard(name)})

    def _write_merged(self, buffer: WeightBuffer, name: str, parts: Sequence[PublishedShard]) -> None:
        adapter, rank = self._adapter_of[name], self.network.lora.options.rank
        base, down, up = (self.shard(one) for one in (name, adapter.down.mf_name, adapter.up.mf_name))
        # A sharded optimiser cuts the rows of W among replicas, but not those of B.
        start = self._layout_of[name].shard_of(self.rank)[0].start
        start -= self._layout_of[adapter.up.mf_name].shard_of(self.rank)[0].start
        up = up[start : start + len(base)]
        for part in parts:
            first = adapter.base.hf_names.index(part.hf_name) * rank
            factors = (down[first : first + rank], up[part.rows])
            array = merge(base[part.rows], *factors, self.network.lora.options.scale)
            buffer.write(part.hf_name, array, part.index)

    def _plan_saving(self, state: Mapping[str, ms.Parameter] | None) -> ShardedManifest:
        hf_config, trained = self.network.hf_config, list(self._trained.values())
        return plan_saving(hf_config, trained, self.layout, self.dtype, state=state or (), adapted=self._adapted)

    def _finish_saving(self, directory: Path, manifest: ShardedManifest) -> None:
        network, lora = self.network, self.network.lora
        config = adapter_config(network.spec, network.dims, lora.options, lora.base_path)
        finish_saving(directory, manifest, network.hf_config, list(self._trained.values()), self.layout, config)


class BaseShard(AdaptedShard):
    """The same without its adapters: the reference model of a policy that has them; see `AdaptedShard.base`."""

    def logprobs(self, rows: PackedRows) -> np.ndarray:
        """See :meth:`ShardedModel.logprobs`."""
        with without_adapters(self._scale):
            return super().logprobs(rows)
