"""What one rank holds of a model, behind one interface: all of it here, a shard in mindrlhf.training.sharded.model."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import mindspore as ms
import numpy as np

from mindrlhf.algorithms.head import likeliest_first
from mindrlhf.algorithms.logprobs import PolicyLogProbs
from mindrlhf.algorithms.scores import TokenScores
from mindrlhf.algorithms.top_k.cells import TopTokens
from mindrlhf.algorithms.top_k.loss import TEACHER_LOGPROBS, TEACHER_TOKENS
from mindrlhf.checkpoint.manifest import below
from mindrlhf.checkpoint.state import StateWriter
from mindrlhf.data.packing import PackedRows
from mindrlhf.models.causal_lm import CausalLM
from mindrlhf.models.context import run_graph
from mindrlhf.specs.rules import VISION_PREFIX
from mindrlhf.training.routing.rows import experts_by_layer
from mindrlhf.training.runtime import Rank
from mindrlhf.weights.convert import export_hf, hf_tensor_infos, iter_hf_tensors, load_hf_weights
from mindrlhf.weights.publish.buffer import WeightBuffer


class RankModel(ABC):
    """A model as a rank's worker sees it.

    Args:
        network: the model; of one that is sharded only its names, dtypes and shapes are looked at.
    """

    def __init__(self, network: CausalLM):
        self.network = network

    @property
    def dtype(self) -> str:
        """Dtype name of the trained parameters."""
        return str(self.network.head_weight.dtype).lower()

    def see(self, images: Sequence[np.ndarray]) -> None:
        """Take the images of a step, uint8 [height, width, 3] each."""
        self.network.images.see(images)

    @abstractmethod
    def logprobs(self, rows: PackedRows) -> np.ndarray:
        """Return what the model says of each token of this rank's rows, float32 [rows, length]."""

    @abstractmethod
    def copy_from(self, other: "RankModel") -> None:
        """Take the weights of a model of the same shape."""

    @abstractmethod
    def write_to(self, buffer: WeightBuffer, ranks: Sequence[int] | None = None) -> None:
        """Write this rank's share of the tensors that a buffer wants.

        Args:
            ranks: those of this node, which share the buffer; None for all.
        """

    @abstractmethod
    def size_bytes(self) -> int:
        """Return the bytes of the whole model in a checkpoint."""

    @abstractmethod
    def state_writer(self, name: str, hold: Callable) -> StateWriter:
        """Return the function that writes this rank's part of the directory ``name`` of a checkpoint.

        ``hold`` takes ``name`` and the arrays first.
        """

    @abstractmethod
    def restore(self, directory: str | os.PathLike) -> None:
        """Load what the ranks of any layout have written.

        Raises:
            UserError: it is damaged, or of another model.
        """

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
        tensors = self.hf_tensors() if tensors is None else tensors
        export_hf(tensors, self.network.hf_config, directory, dtype=self.dtype, tokenizer_dir=tokenizer_dir)

    def hf_tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield all Hugging Face tensors, where a rank has them."""
        raise NotImplementedError(f"a {type(self).__name__} has a part of the tensors only")


class WholeModel(RankModel):
    """A model of which every rank has a replica.

    Args:
        policy: its log-probabilities, or scores.
        rank: this process.
        likeliest: of a teacher that is asked for its top-k tokens: what finds them, over ``policy``.
    """

    def __init__(self, policy: PolicyLogProbs | TokenScores, rank: Rank, likeliest: TopTokens | None = None):
        super().__init__(policy.model)
        self.policy = policy
        self._rank = rank
        self._likeliest = likeliest

    def logprobs(self, rows: PackedRows) -> np.ndarray:
        """See :meth:`RankModel.logprobs`."""
        return run_graph(self.policy, *model_tensors(self.network, rows))[0].asnumpy().copy()

    def top_tokens(self, rows: PackedRows) -> dict[str, np.ndarray]:
        """See :meth:`mindrlhf.training.distillation.models.FrozenModel.top_tokens`."""
        assert self._likeliest is not None, "nothing was built that finds the top-k tokens"
        found = run_graph(self._likeliest, *model_tensors(self.network, rows))
        logprobs, token_ids, of_given = (output.asnumpy() for output in found)
        token_ids, of_given = likeliest_first(token_ids, of_given)
        return {"reference_logprobs": logprobs.copy(), TEACHER_TOKENS: token_ids, TEACHER_LOGPROBS: of_given}

    def copy_from(self, other: "WholeModel") -> None:
        """See :meth:`RankModel.copy_from`."""
        for target, source in zip(self.network.get_parameters(), other.network.get_parameters(), strict=True):
            target.set_data(ms.Tensor(source.asnumpy().copy()))

    def write_to(self, buffer: WeightBuffer, ranks: Sequence[int] | None = None) -> None:
        """See :meth:`RankModel.write_to`: the ranks divide the tensors, and write a tower's that are frozen once."""
        ranks = range(self._rank.world_size) if ranks is None else ranks
        frozen = frozen_tensors(self.network).values()
        for name, array in iter_hf_tensors(self.network, ranks.index(self._rank.index), len(ranks), buffer.wants):
            if not (name in frozen and buffer.keep(name)):
                buffer.write(name, array)

    def hf_tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield all tensors, of this rank's memory."""
        return iter_hf_tensors(self.network)

    def size_bytes(self) -> int:
        """See :meth:`RankModel.size_bytes`."""
        return sum(info.size_bytes for info in hf_tensor_infos(self.network))

    def state_writer(self, name: str, hold: Callable) -> StateWriter:
        """See :meth:`RankModel.state_writer`: the only shard, which one rank writes, as a Hugging Face directory."""
        weights = hold(name, iter_hf_tensors(self.network))
        return lambda directory: below(
            name, export_hf(weights, self.network.hf_config, directory / name, dtype=self.dtype)
        )

    def restore(self, directory: str | os.PathLike) -> None:
        """See :meth:`RankModel.restore`."""
        load_hf_weights(self.network, directory)


def frozen_tensors(network: CausalLM) -> dict[str, str]:
    """Return the Hugging Face names of the parameters of a vision tower that stay as they are, by their own."""
    if network.dims.vision is None:
        return {}
    rules = {rule.mf_name: rule.hf_names[0] for rule in network.spec.rules(network.dims) if not rule.trained}
    named = (parameter for parameter in network.get_parameters() if parameter.name.startswith(VISION_PREFIX))
    return {parameter.name: rules[parameter.name] for parameter in named if not parameter.requires_grad}


def model_tensors(network: CausalLM, rows: PackedRows) -> tuple:
    """Return `row_tensors` as a model takes them: with the images of the rows, or the experts to be replayed."""
    input_ids, *others = row_tensors(rows)
    experts = experts_by_layer(rows)
    if experts is not None:
        # Not mutable, the experts would be constants of the graph: it would be compiled for each micro-batch anew.
        return (ms.mutable((input_ids, ms.Tensor(experts))), *others)
    if network.images is not None:
        input_ids = network.images.inputs(input_ids, rows.images)
    return (input_ids, *others)


def row_tensors(rows: PackedRows) -> tuple[ms.Tensor, ...]:
    """Return the four arrays that every cell takes first."""
    return tuple(ms.Tensor(array) for array in (rows.model_inputs, rows.segment_ids, rows.labels, rows.mask))
