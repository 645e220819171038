"""The part of the rollout server that runs inside each vLLM worker: loading weights from the buffer."""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from mindrlhf.rollout.server import ascend, grammars
from mindrlhf.rollout.server.cpu import do_without_lscpu, rotate_every_head
from mindrlhf.rollout.server.layers import record_layers
from mindrlhf.rollout.server.multi_node import buffer_of_node, join_nodes
from mindrlhf.weights.publish.buffer import WeightBuffer, WeightBufferError

# Buffers are mapped for reading only; nothing here writes to the tensors made over them.
warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
# A worker process of its own imports this module before it looks at the cores, and builds the model.
do_without_lscpu()
rotate_every_head()
join_nodes()


@dataclass
class _Loading:
    """Progress of loading a weight version.

    Attributes:
        num_buckets: that were loaded.
        missing: names of the parameters that were not.
    """

    version: int
    num_buckets: int = 0
    missing: set[str] = field(default_factory=set)


class WorkerExtension:
    """Methods that vLLM adds to its worker class (``worker_extension_cls``), called by ``collective_rpc``."""

    def load_weight_buffer(self, path: str, version: int) -> bool:
        """Load every tensor of ``version`` from the buffer at ``path``: all, or the bucket that comes next.

        Each worker reads the full tensors and vLLM's own loaders take their fused and sharded parts.

        Returns:
            Whether all of the version is loaded now.

        Raises:
            WeightBufferError: another version or bucket in the buffer, a wrong checksum, or, on a CPU, parameters that
                it lacks.
        """
        buffer = self._attached_buffer(path)
        loading = getattr(self, "_loading", None)
        if loading is None or loading.version != version or loading.num_buckets == buffer.num_buckets:
            self._loading = loading = _Loading(version)
        bucket, is_last = loading.num_buckets, loading.num_buckets == buffer.num_buckets - 1
        if buffer.bucket != bucket:
            raise WeightBufferError(f"bucket {bucket} of the weights is due; the buffer holds bucket {buffer.bucket}")
        parallel = self.parallel_config
        num_workers = parallel.world_size // parallel.nnodes  # that share the memory, and the work
        buffer.verify(version, self.rank % num_workers, num_workers)
        loading.num_buckets += 1
        model = self.model_runner.get_model()
        if bucket == 0:
            loading.missing = {name for name, _ in model.named_parameters()}
            _forget_kernels(model)
            initialize_layerwise_reload(model)
        tensors = _torch_tensors(buffer, version)
        if buffer.num_buckets > 1:
            # vLLM keeps them until those that it fuses with them have come, and that may be in the next bucket.
            tensors = ((name, tensor.clone()) for name, tensor in tensors)
        loading.missing -= model.load_weights(tensors) or loading.missing  # some models do not say
        if is_last:
            finalize_layerwise_reload(model, self.model_runner.model_config)
        if is_last and current_platform.is_cpu():
            _repack_embeddings(model)
            if loading.missing:
                raise WeightBufferError(f"the weight buffer lacks tensors for {', '.join(sorted(loading.missing)[:5])}")
        return is_last

    def set_up_sampler(self) -> None:
        from vllm_ascend.sample import sampler as sampling

        ascend.set_up_sampler(self.model_runner.sampler, sampling)

    def before_sleep(self) -> None:
        """Remember what a sleep of level 2 forgets; see :class:`mindrlhf.rollout.server.ascend.WhatSleepForgets`."""
        from vllm_ascend.ops import rotary_embedding

        self._forgotten = ascend.WhatSleepForgets(self.model_runner.get_model(), rotary_embedding)

    def after_wake(self) -> None:
        """Put it back, now that the weights have their memory."""
        if getattr(self, "_forgotten", None) is not None:
            self._forgotten.put_back()
        self._forgotten = None

    def device_memory(self) -> tuple[int, int]:
        """Return the bytes of this worker's NPU that are free, and all of them."""
        return torch.npu.mem_get_info()

    def record_layers(self, path: str) -> None:
        if self.rank == 0:  # layers end with the same on all
            record_layers(self.model_runner.get_model(), path)

    def take_allowed(self, name: str) -> tuple[str, list[float]]:
        """See :func:`mindrlhf.rollout.server.grammars.take_allowed`."""
        return grammars.take_allowed(name)

    def _attached_buffer(self, path: str) -> WeightBuffer:
        path = buffer_of_node(path)
        buffer = getattr(self, "_weight_buffer", None)
        if buffer is None or buffer.path != path:
            if buffer is not None:
                buffer.close()
            self._weight_buffer = buffer = WeightBuffer.attach(path)
        return buffer


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


def _torch_tensors(buffer: WeightBuffer, version: int) -> Iterator[tuple[str, torch.Tensor]]:
    for name, dtype, array in buffer.tensors(version):
        if dtype == "bfloat16":
            yield name, torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        else:
            yield name, torch.from_numpy(array)
