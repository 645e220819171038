"""A whole model with low-rank adapters: what it publishes is merged, what it saves are the adapters."""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from mindrlhf.algorithms.logprobs import PolicyLogProbs
from mindrlhf.algorithms.scores import TokenScores
from mindrlhf.checkpoint.manifest import below
from mindrlhf.checkpoint.state import StateWriter
from mindrlhf.data.packing import PackedRows
from mindrlhf.system.files import remove
from mindrlhf.training.runtime import Rank
from mindrlhf.training.worker.model import WholeModel
from mindrlhf.weights.adapters.merge import iter_merged_tensors
from mindrlhf.weights.adapters.peft import (
    adapter_config,
    adapter_shapes,
    exported_adapter,
    iter_adapter_tensors,
    load_adapter,
    write_adapter,
)
from mindrlhf.weights.publish.buffer import WeightBuffer


class AdaptedModel(WholeModel):
    """A model of which every rank has a replica, and whose adapters are trained.

    See :mod:`mindrlhf.models.lora.model`.
    """

    def write_to(self, buffer: WeightBuffer, ranks: Sequence[int] | None = None) -> None:
        """See :meth:`RankModel.write_to`: the ranks divide the tensors, merged with their adapters."""
        ranks = range(self._rank.world_size) if ranks is None else ranks
        for name, array in iter_merged_tensors(self.network, ranks.index(self._rank.index), len(ranks), buffer.wants):
            buffer.write(name, array)

    def hf_tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield all tensors, merged with their adapters."""
        return iter_merged_tensors(self.network)

    def size_bytes(self) -> int:
        """See :meth:`RankModel.size_bytes`: of the adapters."""
        return sum(array.nbytes for _, array in iter_adapter_tensors(self.network))

    def state_writer(self, name: str, hold: Callable) -> StateWriter:
        """See :meth:`RankModel.state_writer`: the adapters, as PEFT has them."""
        tensors = hold(name, iter_adapter_tensors(self.network))
        return lambda directory: below(name, self._write(tensors, directory / name))

    def restore(self, directory: str | os.PathLike) -> None:
        """See :meth:`RankModel.restore`."""
        load_adapter(self.network, directory)

    def export(
        self,
        directory: Path,
        tokenizer_dir: str | os.PathLike | None,
        tensors: Iterator[tuple[str, np.ndarray]] | None = None,
    ) -> None:
        """Write the merged weights as a Hugging Face directory, and before it the adapters beside it, as PEFT has them.

        The directory comes last, since it marks a run as complete. Adapters that are there already are those that a run
        left when it was killed in between.
        """
        adapter_dir = exported_adapter(directory)
        remove(adapter_dir)
        self._write(iter_adapter_tensors(self.network), adapter_dir)
        super().export(directory, tokenizer_dir, tensors)

    def _write(self, tensors, directory: Path) -> dict[str, str]:
        network, options = self.network, self.network.lora.options
        shapes = adapter_shapes(network.spec, network.dims, options)
        config = adapter_config(network.spec, network.dims, options, network.lora.base_path)
        return write_adapter(tensors, shapes, config, directory)


class BaseModel(WholeModel):
    """A model without its adapters: the reference model of a policy that has them, in the same memory.

    Args:
        policy: of the trained model.
        rank, likeliest: of :class:`WholeModel`.
    """

    def logprobs(self, rows: PackedRows) -> np.ndarray:
        """See :meth:`RankModel.logprobs`."""
        with self.network.lora.off():
            return super().logprobs(rows)

    def top_tokens(self, rows: PackedRows) -> dict[str, np.ndarray]:
        """See :meth:`WholeModel.top_tokens`."""
        with self.network.lora.off():
            return super().top_tokens(rows)


def trained_model(policy: PolicyLogProbs | TokenScores, rank: Rank) -> WholeModel:
    """Return what a rank holds of a trained model, with adapters or without."""
    return WholeModel(policy, rank) if policy.model.lora is None else AdaptedModel(policy, rank)
