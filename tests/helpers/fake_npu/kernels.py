"""PyTorch's operators for tensors on a fake NPU, whose memory is the host's: the CPU's kernels on the same memory."""

import ctypes
import functools
from typing import Any

import torch

CPU = torch.device("cpu")
# Torch-npu's own do right without a device: they only make tensors, or views of them.
_NATIVE = {
    "_pin_memory", "_reshape_alias", "_resize_output_", "alias", "detach", "empty", "empty_strided", "is_pinned",
    "new_empty", "new_empty_strided", "pin_memory", "record_stream", "resize_", "set_", "unfold",
    "_has_compatible_shallow_copy_type",
}  # fmt: skip
_OF_NPUS = {"npu_format_cast"}  # of torch-npu's, what is one without a device
_COUNTED = ("CPU", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor on the CPU that has the same memory; of others than those of an NPU themselves."""
    if tensor.device.type != "npu":
        return tensor
    num_bytes = tensor.untyped_storage().nbytes()
    if num_bytes == 0:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    memory = (ctypes.c_char * num_bytes).from_address(tensor.untyped_storage().data_ptr())
    flat = torch.frombuffer(memory, dtype=torch.uint8)
    flat = flat[: num_bytes // tensor.element_size() * tensor.element_size()].view(tensor.dtype)
    return torch.as_strided(flat, tensor.size(), tensor.stride(), tensor.storage_offset())


def on_npu(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy of a tensor of the CPU on an NPU."""
    made = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    if tensor.numel():
        on_host(made).copy_(tensor)
    return made


class _Call:
    """One call of an operator: arguments go down to the host, results that are no argument come up."""

    def __init__(self) -> None:
        self.device: torch.device | None = None
        self._known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def down(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.device.type == "npu":
            self.device = value.device
            host = on_host(value)
            self._known[id(host)] = value, host
            return host
        if isinstance(value, torch.device) and value.type == "npu":
            self.device = value
            return CPU
        if isinstance(value, torch.Generator) and value.device.type == "npu":
            return _host_generator(value)
        if isinstance(value, (list, tuple)):
            return type(value)(map(self.down, value))
        return value

    def up(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._known[id(value)][0] if id(value) in self._known else on_npu(value, self.device)
        if isinstance(value, (list, tuple)):
            return type(value)(map(self.up, value))
        return value


_generators: dict[int, tuple[torch.Generator, torch.Generator]] = {}


def _host_generator(generator: torch.Generator) -> torch.Generator:
    """A generator of the host that goes on from call to call, as the one of the NPU would."""
    known = _generators.get(id(generator))
    if known is None or known[0] is not generator or known[1].initial_seed() != generator.initial_seed():
        host = torch.Generator()
        host.manual_seed(generator.initial_seed())
        _generators[id(generator)] = known = generator, host
    return known[1]


def _run(operator: Any, *arguments: Any, **options: Any) -> Any:
    call = _Call()
    lowered, lowered_options = [call.down(one) for one in arguments], {k: call.down(v) for k, v in options.items()}
    if lowered_options.get("pin_memory"):
        lowered_options["pin_memory"] = False
    if call.device is None:
        call.device = torch.device("npu", torch.npu.current_device())
    result = operator(*lowered, **lowered_options)
    wanted = options.get("device")
    if isinstance(wanted, torch.device) and wanted.type == "cpu":
        return result.clone()
    return call.up(result)


def _copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    on_host(target).copy_(on_host(source))
    return target


_library: torch.library.Library | None = None  # its registrations end with it


def install() -> int:
    """Register the CPU's kernels for the NPU; return how many."""
    from fake_npu_graphs import launched

    global _library
    _library, num = torch.library.Library("aten", "IMPL"), 0
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        base, _, overload = rest.partition(".")
        if namespace != "aten" or base in _NATIVE or base in ("copy_", "_local_scalar_dense"):
            continue
        operator = getattr(getattr(torch.ops.aten, base, None), overload or "default", None)
        if operator is None or operator.is_view:
            continue
        wants = has(name, "PrivateUse1") or has(name, "CPU")
        if wants and (any(has(name, key) for key in _COUNTED) or has(name, "PrivateUse1")):
            kernel = launched(functools.wraps(_run)(functools.partial(_run, operator)))
            _library.impl(rest, kernel, "PrivateUse1", allow_override=True)
            num += 1
    _library.impl("copy_", launched(_copy), "PrivateUse1", allow_override=True)
    _library.impl("_local_scalar_dense", lambda one: on_host(one).item(), "PrivateUse1", allow_override=True)
    return num


def refuse_others() -> torch.library.Library:
    """Have torch-npu's own operators say that there is no host version, unless the library that is returned has one."""
    global _refused
    _refused = torch.library.Library("npu", "IMPL")
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        if namespace != "npu" or rest.partition(".")[0] in _OF_NPUS:
            continue
        if torch._C._dispatch_has_kernel_for_dispatch_key(name, "PrivateUse1"):
            _refused.impl(rest, functools.partial(_refuse, name), "PrivateUse1", allow_override=True)
    return _refused


def _refuse(name: str, *_: Any, **__: Any) -> None:
    raise NotImplementedError(f"the fake NPU has no host version of {name}")


_refused: torch.library.Library | None = None


def install_collectives() -> None:
    """Have what ranks exchange on NPUs go over gloo, of the same memory: each group has a group of the host beside."""
    from fake_npu_graphs import launched

    global _collectives
    _collectives = torch.library.Library("c10d", "IMPL")
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        if namespace == "c10d" and torch._C._dispatch_has_kernel_for_dispatch_key(name, "PrivateUse1"):
            base, _, overload = rest.partition(".")
            operator = getattr(getattr(torch.ops.c10d, base), overload or "default")
            exchange = launched(functools.wraps(_exchange)(functools.partial(_exchange, operator)))
            _collectives.impl(rest, exchange, "PrivateUse1", allow_override=True)
    for name in ("init_process_group", "new_group"):
        setattr(torch.distributed, name, _with_host_backend(getattr(torch.distributed, name)))


_collectives: torch.library.Library | None = None


def _exchange(operator: Any, *arguments: Any) -> Any:
    """Run a collective over gloo; what comes back beside the work are the tensors that were given."""
    call = _Call()
    done = operator(*[call.down(one) for one in arguments])
    for one in done if isinstance(done, (list, tuple)) else [done]:
        if hasattr(one, "wait"):
            one.wait()
    return call.up(list(done)) if isinstance(done, (list, tuple)) else done


def _with_host_backend(make: Any) -> Any:
    @functools.wraps(make)
    def made(*arguments: Any, **options: Any) -> Any:
        arguments = tuple("cpu:gloo,npu:hccl" if one == "hccl" else one for one in arguments)
        if options.get("backend") == "hccl":
            options["backend"] = "cpu:gloo,npu:hccl"
        return make(*arguments, **options)

    return made
