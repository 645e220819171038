"""Has a process take this machine for one with NPUs: what is imported later is put right when it is."""

import importlib.abc
import importlib.machinery
import os
import sys
import types
from collections.abc import Callable

_AFTER: dict[str, Callable[[types.ModuleType], None]] = {}


def after(name: str) -> Callable:
    """Have a function called with a module once it is imported."""
    return lambda function: _AFTER.setdefault(name, function)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of ``_AFTER`` as ever, and calls back when they are there."""

    def find_spec(self, fullname, path, target=None):
        if fullname not in _AFTER:
            return None
        found = importlib.machinery.PathFinder.find_spec(fullname, path)
        if found is None or found.loader is None:
            return found
        execute, then = found.loader.exec_module, _AFTER.pop(fullname)

        def exec_module(module):
            execute(module)
            then(module)

        found.loader.exec_module = exec_module
        return found


class _Anything(type):
    """A class that has every attribute."""

    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})


class _Absent(types.ModuleType):
    """torchvision and torchaudio, which vLLM imports and text models do not use."""

    __path__: tuple[str, ...] = ()
    __version__ = "0.26.0"

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})


class _AbsentFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname, path, target=None):
        if fullname.partition(".")[0] in ("torchvision", "torchaudio"):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Absent(spec.name)

    def exec_module(self, module):
        """There is nothing to run."""


@after("torch_npu")
def _torch_npu(module: types.ModuleType) -> None:
    import fake_npu_graphs
    import fake_npu_kernels
    import fake_npu_operators

    fake_npu_kernels.install()
    fake_npu_kernels.install_collectives()
    fake_npu_operators.install(module, fake_npu_kernels.refuse_others())
    fake_npu_graphs.install(module.npu)


@after("vllm_ascend.utils")
def _utils(module: types.ModuleType) -> None:
    module._CUSTOM_OP_ENABLED = False  # vLLM-Ascend's own kernels; it does without them


@after("vllm_ascend.worker.worker")
def _worker(module: types.ModuleType) -> None:
    module._register_atb_extensions = lambda: None  # NNAL's, of which there is no host version
    module.NPUWorker._warm_up_atb = lambda worker: None


@after("vllm_ascend.worker.block_table")
def _block_table(module: types.ModuleType) -> None:
    import fake_npu_operators

    module.BlockTable.compute_slot_mapping = fake_npu_operators.compute_slot_mapping


@after("vllm_ascend.device.device_op")
def _device_op(module: types.ModuleType) -> None:
    import fake_npu_operators as operators

    adaptor, launched = module.BaseDeviceAdaptor, operators.launched
    adaptor.moe_gating_top_k = staticmethod(launched(operators.checked(operators.moe_gating_top_k)))
    adaptor.kv_cache_load = staticmethod(launched(operators.kv_cache_load))
    adaptor.npu_moe_init_routing = staticmethod(launched(operators.checked(operators.moe_init_routing)))


@after("vllm_ascend.patch.worker.patch_qwen3vl")
def _qwen3_vl(module: types.ModuleType) -> None:
    import torch
    from fake_npu_graphs import launched
    from fake_npu_operators import split_qkv_rmsnorm_mrope

    # A kernel of Triton's, by which that attention is computed whether Triton is there or not.
    torch.ops.vllm.triton_split_qkv_rmsnorm_mrope = launched(split_qkv_rmsnorm_mrope)


_GRAPHS = os.environ.get("FAKE_NPU_GRAPHS")  # "compiled", as the product has them, or of "launches" alone


@after("vllm_ascend.worker.model_runner_v1")
def _model_runner(module: types.ModuleType) -> None:
    if _GRAPHS == "launches":  # it makes graphs of compiled models alone
        module.NPUModelRunner._use_aclgraph = lambda runner: True


@after("mindrlhf.rollout.server.engine")
def _engine(module: types.ModuleType) -> None:
    arguments = module.engine_arguments

    def engine_arguments(*given):
        found = arguments(*given)
        if _GRAPHS == "compiled":
            passes = {"fuse_norm_quant": False, "fuse_allreduce_rms": False, "fuse_muls_add": False}  # no host versions
            return found | {"additional_config": found["additional_config"] | {"ascend_compilation_config": passes}}
        without = {"compilation_config": found["compilation_config"] | {"mode": 0}}
        return found | (without if _GRAPHS else {"enforce_eager": True})

    module.engine_arguments = engine_arguments


sys.meta_path.insert(0, _Finder())
sys.meta_path.append(_AbsentFinder())
