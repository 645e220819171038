"""The part of the rollout server that runs inside each vLLM worker: loading weights from the board."""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from mindrlhf.rollout.server.cpu import do_without_lscpu, rotate_every_head
from mindrlhf.rollout.server.in_place import InPlaceLoader
from mindrlhf.rollout.server.linear import forget_copies
from mindrlhf.rollout.server.needs import trace_reads, without_memory
from mindrlhf.rollout.server.span import board_of_node, join_span
from mindrlhf.weights.publish.buffer import WeightBoard, WeightBoardError
from mindrlhf.weights.publish.slices import Box
from mindrlhf.weights.tensors import TensorInfo

# Boards are mapped for reading only; nothing here writes to the tensors made over them.
warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
# A worker process of its own imports this module before it looks at the cores, and builds the model.
do_without_lscpu()
rotate_every_head()
join_span()


@dataclass
class _Loading:
    """How far the loading of a version is.

    Attributes:
        num_buckets: that were loaded.
        names: of the parameters that were; None where the model does not say.
    """

    version: int
    num_buckets: int = 0
    names: set[str] | None = field(default_factory=set)


class WorkerExtension:
    """Methods that vLLM adds to its worker class (``worker_extension_cls``), called by ``collective_rpc``."""

    def load_board(self, path: str, version: int, in_place: bool) -> bool:
        """Load every tensor that the board at ``path`` now has of ``version``: all, or a bucket of them.

        Each worker reads the full tensors and vLLM's own loaders take their fused and sharded parts. Of a board that
        was sealed with parts of its tensors, these must hold what :meth:`find_needs` returned here.

        Args:
            in_place: load into the live parameters; else vLLM rebuilds its kernel weights.

        Returns:
            Whether all of the version is loaded now.

        Raises:
            WeightBoardError: another version on the board, a wrong checksum, a bucket that is not the next, or
                parameters that the board lacks.
        """
        board = self._attached_board(path)
        board.require(version, self._known_needs(board))
        board.verify(version)
        bucket, is_last = board.bucket, board.bucket == board.num_buckets - 1
        loading = getattr(self, "_loading", None)
        if bucket == 0:
            self._loading = loading = _Loading(version)
        if loading is None or (loading.version, loading.num_buckets) != (version, bucket):
            raise WeightBoardError(f"bucket {bucket} of weights version {version} came before those that precede it")
        loading.num_buckets += 1
        model = self.model_runner.get_model()
        if in_place:
            self._load_in_place(model, board, loading)
        elif board.num_buckets == 1:
            _forget_kernels(model)
            self.model_runner.reload_weights(weights_iterator=_torch_tensors(board, version))
        else:
            if bucket == 0:
                _forget_kernels(model)
                initialize_layerwise_reload(model)
            # vLLM keeps them until those that it fuses with them have come, and that may be in the next bucket.
            model.load_weights((name, tensor.clone()) for name, tensor in _torch_tensors(board, version))
            if is_last:
                finalize_layerwise_reload(model, self.model_runner.model_config)
        if is_last and not in_place and current_platform.is_cpu():
            _repack_embeddings(model)
        return is_last

    def find_needs(self, infos: Sequence[TensorInfo]) -> dict[str, list[Box] | None]:
        """Return which parts of each tensor this worker reads, which is so for as long as it lives.

        vLLM's loaders are watched as they load tensors without memory; the weights stay as they are.

        Args:
            infos: name, dtype and shape of all tensors that will be loaded.

        Returns:
            By tensor, disjoint boxes, (start, stop) per axis; None for all of it.
        """
        infos = tuple(TensorInfo(name, dtype, tuple(shape)) for name, dtype, shape in infos)
        model = self.model_runner.get_model()
        with without_memory(model):
            self._needs = infos, trace_reads(model.load_weights, infos, dict(model.named_parameters()))
        return self._needs[1]

    def _known_needs(self, board: WeightBoard) -> dict[str, list[Box] | None]:
        """What this worker reads of a board's tensors: all of each where nobody has asked before."""
        infos, needs = getattr(self, "_needs", ((), {}))
        known = {(info.name, info.shape) for info in infos}
        return {info.name: needs[info.name] if (info.name, info.shape) in known else None for info in board.infos}

    def _load_in_place(self, model: torch.nn.Module, board: WeightBoard, loading: _Loading) -> None:
        loader = getattr(self, "_loader", None)
        if loader is None:
            self._loader = loader = InPlaceLoader(model)
        loaded = loader.load(board, _torch_tensors(board, loading.version))
        forget_copies(model)
        loading.names = None if loaded is None or loading.names is None else loading.names | loaded
        if loading.names is None or loading.num_buckets < board.num_buckets:
            return
        if missing := {name for name, _ in model.named_parameters()} - loading.names:
            raise WeightBoardError(f"the weight board lacks tensors for {', '.join(sorted(missing)[:5])}")

    def _attached_board(self, path: str) -> WeightBoard:
        path = board_of_node(path)
        board = getattr(self, "_board", None)
        if board is None or board.path != path:
            if board is not None:
                board.close()
            self._board = board = WeightBoard.attach(path)
        return board


def _forget_kernels(model: torch.nn.Module) -> None:
    """Let vLLM set the kernels of experts up again when it reloads on a CPU.

    For the CPU, setting up repacks the weights; vLLM 0.32 leaves that out when a kernel exists, and then computes with
    weights in the wrong order.
    """
    for module in model.modules() if current_platform.is_cpu() else ():
        method = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _repack_embeddings(model: torch.nn.Module) -> None:
    """Pack the weights of embeddings and of the output layer for the CPU's matrix kernels again.

    An output layer that is tied to the embedding loads nothing of its own, so vLLM 0.32 leaves it with the packed copy
    of the old weights.
    """
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, UnquantizedEmbeddingMethod):
            method.process_weights_after_loading(module)


def _torch_tensors(board: WeightBoard, version: int) -> Iterator[tuple[str, torch.Tensor]]:
    for name, dtype, array in board.tensors(version):
        if dtype == "bfloat16":
            yield name, torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        else:
            yield name, torch.from_numpy(array)
