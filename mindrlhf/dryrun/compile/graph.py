"""Compile a cell, and read MindSpore's answers: the sharded graph and the planned memory (once it is set up)."""

import os
from collections.abc import Sequence

import mindspore as ms
from mindspore import nn
from mindspore.common.api import _cell_graph_executor
from mindspore.train.mind_ir_pb2 import ModelProto
from mindspore.train.node_strategy_pb2 import ParallelStrategyMap


def compile_graph(step: nn.Cell, inputs: Sequence[ms.Tensor]) -> bytes | None:
    """Compile up to the sharded graph with its collectives, and return its message, without the parameters' data.

    This is what `mindspore.export` does first; the rest of it would write every parameter. None when the graph's
    message passes protobuf's limit of 2 GB, as that of the largest models does: it is compiled all the same.
    """
    graph_id, _ = _cell_graph_executor.compile(step, *inputs, phase="export.mindir", do_convert=False)
    try:
        return _cell_graph_executor._get_func_graph_proto(step, graph_id, "mind_ir")
    except RuntimeError as error:
        if "Export MINDIR format model failed" in str(error):
            return None
        raise


def read_graph(message: bytes) -> ModelProto:
    """Return what a message of :func:`compile_graph` says; MindSpore parses it in Python, which takes seconds."""
    return ModelProto.FromString(message)


def write_graph(message: bytes, path: str | os.PathLike) -> None:
    """Write a graph as `.mindir`; its parameters have names, shapes and dtypes but no data."""
    temporary = f"{os.fspath(path)}.tmp"
    with open(temporary, "wb") as file:
        file.write(message)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def plan_memory(step: nn.Cell, inputs: Sequence[ms.Tensor]) -> int:
    """Return the device memory that MindSpore plans for one update, in bytes (simulation level 1).

    The first call compiles and plans; nothing is computed.
    """
    step(*inputs)
    ms.runtime.synchronize()
    return ms.runtime.max_memory_allocated()


def read_shards(strategy_file: str | os.PathLike) -> dict[str, tuple[int, int]]:
    """Return step and size of the optimiser shard of every parameter in a strategy file; (0, 0) without one."""
    strategies = ParallelStrategyMap()
    with open(strategy_file, "rb") as file:
        strategies.ParseFromString(file.read())
    return {
        item.param_name: (item.parallel_layouts.opt_weight_shard_step, item.parallel_layouts.opt_weight_shard_size)
        for item in strategies.parallel_layout_item
    }
