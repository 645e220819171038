"""Collectives of an Ascend graph, in terms of those the CPU has kernels for in graph mode.

Those are AllReduce (sum; any group) and AllGather (all ranks only). Everything else becomes one of them and
shards: more traffic than on a cluster, the same numbers. Adding zeros changes no value, so gathering by a sum
is exact.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from mindspore.train import mind_ir_pb2 as ir

from graph_on_cpu.mindir import (
    FLOAT32_TYPE_ID,
    INT32_TYPE_ID,
    Emitter,
    LoweringError,
    TensorType,
    Value,
    attribute,
    integers,
    scalar,
    set_attribute,
)

ASCEND_WORLD = "hccl_world_group"
CPU_WORLD = "mccl_world_group"
_NO_EXPERT = 1e6  # a number behind those of all experts
_GATHERED_REDUCTIONS = {"max": "ReduceMax", "min": "ReduceMin"}


@dataclass
class Groups:
    """The communication groups of one rank's graph.

    Attributes:
        rank: this rank.
        members: ranks by group name, the world left out.
    """

    rank: int
    members: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def adopt(self, primitive: ir.PrimitiveProto) -> None:
        """Note the group of a primitive, if it has one, and rename the world as the CPU calls it."""
        name = attribute(primitive, "group")
        if name is None or not name.s:
            return
        if name.s.decode() == ASCEND_WORLD:
            set_attribute(primitive, "group", CPU_WORLD)
        elif name.s.decode() != CPU_WORLD:
            ranks = _named_ranks(name.s.decode(), _ranks(primitive))
            set_attribute(primitive, "group_rank_ids", tuple(ranks))
            if len(ranks) > 1:
                self.members[name.s.decode()] = tuple(ranks)

    def pair(self, sender: int, receiver: int, tag: int) -> str:
        """Return the group of the two ends of a point-to-point message, which both ends name alike."""
        name = f"pipeline_{sender}_{receiver}_{tag}"
        self.members[name] = tuple(sorted((sender, receiver)))
        return name


def lower_all_reduce(emitter: Emitter, primitive: ir.PrimitiveProto, groups: Groups, inputs: Sequence[Value]) -> bool:
    """Maxima and minima are taken after gathering; sums stay; a group of one needs nothing."""
    reduction = scalar(attribute(primitive, "op"))
    if len(_ranks(primitive)) == 1:
        emitter.reshape(inputs[0], emitter.output.shape, name=emitter.output.name)
        return True
    if reduction == "sum":
        return False
    if reduction not in _GATHERED_REDUCTIONS:
        raise LoweringError(f"AllReduce of '{reduction}': the CPU can do sum, max and min")
    (value,), output = inputs, emitter.output
    row = emitter.reshape(value, (1, *output.shape))
    gathered = _gather(emitter, primitive, groups, row)
    emitter.result(_GATHERED_REDUCTIONS[reduction], gathered, (0,), False)
    return True


def lower_reduce_scatter(
    emitter: Emitter, primitive: ir.PrimitiveProto, groups: Groups, inputs: Sequence[Value]
) -> bool:
    """Sum all of it, keep this rank's rows."""
    if scalar(attribute(primitive, "op")) != "sum":
        raise LoweringError("ReduceScatter of anything but sums cannot run on the CPU")
    output = emitter.output
    num_rows, position = output.shape[0], _ranks(primitive).index(groups.rank)
    total = _all_reduce(emitter, _group(primitive), inputs[0])
    emitter.slice(total, 0, position * num_rows, (position + 1) * num_rows, name=output.name)
    return True


def lower_all_gather(emitter: Emitter, primitive: ir.PrimitiveProto, groups: Groups, inputs: Sequence[Value]) -> bool:
    """Among all ranks the CPU has a kernel; within a group every rank adds its rows to zeros."""
    if _group(primitive) == CPU_WORLD:
        return False
    _gather_by_sum(emitter, primitive, groups, inputs[0], name=emitter.output.name)
    return True


def lower_all_to_all(emitter: Emitter, primitive: ir.PrimitiveProto, groups: Groups, inputs: Sequence[Value]) -> bool:
    """Gather everything, keep this rank's part of every other rank's tensor."""
    (value,), output = inputs, emitter.output
    ranks = _ranks(primitive)
    names, rank = ("split_dim", "concat_dim"), len(value.shape)
    split_axis, concat_axis = (scalar(attribute(primitive, name)) % rank for name in names)
    part = value.shape[split_axis] // len(ranks)
    position = ranks.index(groups.rank)
    gathered = _gather_by_sum(emitter, primitive, groups, emitter.reshape(value, (1, *value.shape)))
    own = emitter.slice(gathered, split_axis + 1, position * part, (position + 1) * part)
    parts = [emitter.reshape(emitter.slice(own, 0, index, index + 1), own.shape[1:]) for index in range(len(ranks))]
    emitter.concat(parts, concat_axis, name=output.name)
    return True


def lower_all_to_all_v(emitter: Emitter, primitive: ir.PrimitiveProto, groups: Groups, inputs: Sequence[Value]) -> bool:
    """Gather everything, keep the rows for this rank, in the order of their senders.

    The inputs are flat blocks, and how many of them go to each rank and come from each, which add up to no more than
    the sizes that :mod:`graph_on_cpu.routing` has fixed.
    """
    (value, sent, received), output, ranks = inputs, emitter.output, _ranks(primitive)
    block, size = scalar(attribute(primitive, "block_size")), len(ranks)
    num_sent, num_received = value.shape[0] // block, output.shape[0] // block
    blocks = _gather(emitter, primitive, groups, emitter.reshape(value, (num_sent, block)))
    sent, received = (
        emitter.reshape(emitter.cast(one, FLOAT32_TYPE_ID, TensorType.FLOAT), (1, size)) for one in (sent, received)
    )
    counts = _gather(emitter, primitive, groups, sent)  # [from, to]
    is_before = (np.arange(size) < ranks.index(groups.rank)).astype(np.float32)
    # Where the rows for this rank begin at each sender, among all senders' rows, and where they are to be here.
    offsets = emitter.reshape(emitter.matmul(counts, emitter.array(is_before[:, None])), (1, size))
    firsts = emitter.binary("Add", offsets, emitter.array(num_sent * np.arange(size, dtype=np.float32)[None]))
    starts = emitter.matmul(received, emitter.array(np.triu(np.ones((size, size), np.float32), k=1)))
    places = emitter.array(np.arange(num_received, dtype=np.float32)[:, None])
    is_from = emitter.between(places, starts, emitter.binary("Add", starts, received))
    is_filled = emitter.matmul(is_from, emitter.array(np.ones((size, 1), np.float32)))
    shifts = emitter.reshape(emitter.binary("Sub", firsts, starts), (size, 1))
    found = emitter.binary("Add", emitter.binary("Mul", places, is_filled), emitter.matmul(is_from, shifts))
    index = emitter.cast(emitter.reshape(found, (num_received,)), INT32_TYPE_ID, TensorType.INT32)
    taken = emitter.call("Gather", blocks, index, 0, 0, shape=(num_received, block), dtype=value.dtype)
    kept = emitter.binary("Mul", taken, is_filled)
    if block == 1:  # numbers of experts, after which what is left over is sorted
        is_left = emitter.binary("Sub", emitter.number(1.0, value.dtype), is_filled)
        kept = emitter.binary("Add", kept, emitter.binary("Mul", is_left, emitter.number(_NO_EXPERT, value.dtype)))
    emitter.reshape(kept, output.shape, name=output.name)
    return True


def lower_send(emitter: Emitter, primitive: ir.PrimitiveProto, groups: Groups, inputs: Sequence[Value]) -> bool:
    """A message is a sum between two ranks, to which the receiver adds zeros."""
    receiver = _ranks(primitive)[_number(primitive, "dest_rank")]
    group = groups.pair(groups.rank, receiver, _number(primitive, "sr_tag"))
    _all_reduce(emitter, group, inputs[0], name=emitter.output.name, shape=emitter.output.shape)
    return True


def lower_receive(emitter: Emitter, primitive: ir.PrimitiveProto, groups: Groups, inputs: Sequence[Value]) -> bool:
    """The other end of :func:`lower_send`. Its input has no data but says when to receive: it stays a dependency."""
    output = emitter.output
    sender = _ranks(primitive)[_number(primitive, "src_rank")]
    group = groups.pair(sender, groups.rank, _number(primitive, "sr_tag"))
    # A constant would not wait for anything: MindSpore drops its dependencies.
    zeros = emitter.zero_parameter(output.shape, output.dtype)
    turn = emitter.call("Depend", zeros, inputs[0], shape=output.shape, dtype=output.dtype)
    _all_reduce(emitter, group, turn, name=output.name)
    return True


LOWER_COLLECTIVE: dict[str, Callable[[Emitter, ir.PrimitiveProto, Groups, Sequence[Value]], bool]] = {
    "AllReduce": lower_all_reduce,
    "ReduceScatter": lower_reduce_scatter,
    "AllGather": lower_all_gather,
    "AlltoAll": lower_all_to_all,
    "AlltoAllV": lower_all_to_all_v,
    "Send": lower_send,
    "Receive": lower_receive,
}


def _group(primitive: ir.PrimitiveProto) -> str:
    return scalar(attribute(primitive, "group"))


def _ranks(primitive: ir.PrimitiveProto) -> list[int]:
    ranks = integers(attribute(primitive, "group_rank_ids")) or integers(attribute(primitive, "rank_list"))
    if not ranks:
        raise LoweringError(f"{primitive.op_type} in group '{_group(primitive)}' does not say which ranks are in it")
    return ranks


def _named_ranks(name: str, recorded: list[int]) -> list[int]:
    """Return the ranks of a group: MindFormers names those that share experts by a hash of them.

    Beside the name of a group that MindSpore knows under another name it records all ranks of the world.
    """
    blocks = (recorded[first:last] for first in range(len(recorded)) for last in range(first + 1, len(recorded) + 1))
    return next((block for block in blocks if _hashed("-".join(map(str, block))) == name), recorded)


def _hashed(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:48]


def _number(primitive: ir.PrimitiveProto, name: str) -> int:
    entry = attribute(primitive, name)
    return entry.ints[0] if entry.ints else entry.i


def _all_reduce(
    emitter: Emitter, group: str, value: Value, name: str | None = None, shape: tuple[int, ...] | None = None
) -> Value:
    shape = value.shape if shape is None else shape
    return emitter.call("AllReduce", value, shape=shape, dtype=value.dtype, name=name, group=group, op="sum")


def _gather(emitter: Emitter, primitive: ir.PrimitiveProto, groups: Groups, value: Value) -> Value:
    """Concatenate the ranks' tensors along axis 0."""
    if _group(primitive) != CPU_WORLD:
        return _gather_by_sum(emitter, primitive, groups, value)
    num_ranks = len(_ranks(primitive))
    shape = (num_ranks * value.shape[0], *value.shape[1:])
    attributes = {"group": CPU_WORLD, "rank_size": num_ranks}
    return emitter.call("AllGather", value, shape=shape, dtype=value.dtype, **attributes)


def _gather_by_sum(
    emitter: Emitter, primitive: ir.PrimitiveProto, groups: Groups, value: Value, name: str | None = None
) -> Value:
    """Concatenate the ranks' tensors along axis 0: each has zeros where the others have theirs."""
    ranks = _ranks(primitive)
    if len(ranks) == 1:
        return emitter.reshape(value, value.shape, name=name)
    zeros = emitter.zeros(value.shape, value.dtype)
    padded = emitter.concat([value if rank == groups.rank else zeros for rank in ranks], 0)
    return _all_reduce(emitter, _group(primitive), padded, name=name)
