"""Bytes that one transfer of weights moves, against the fewest that any transfer could, and what it takes of a node.

Trainer ranks write what they hold to the buffer of their node. What the servers of a node need and none of its ranks
holds comes from other nodes; each device of a server then takes its own.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from mindrlhf.config.schema import GrpoConfig
from mindrlhf.dryrun.plan.parameters import ELEMENT_BYTES, KnownRules
from mindrlhf.layout.layout import Layout
from mindrlhf.layout.parameter import ParameterLayout
from mindrlhf.layout.server_shards import Box, server_box
from mindrlhf.layout.servers import place_servers
from mindrlhf.specs import ModelDims, ParameterRule
from mindrlhf.weights.convert import buffer_dtype, buffer_infos, file_dtype
from mindrlhf.weights.publish.buffer import arrange_buckets
from mindrlhf.weights.publish.shards import published_shards
from mindrlhf.weights.tensors import STORAGE_DTYPES

# 200 Gbit/s, as servers with NPUs have it for storage and between hosts.
LINK_BYTES_PER_S = 25e9


@dataclass(frozen=True)
class TransferStep:
    """One leg of the way from the trainer to the generators, in bytes over the whole cluster.

    Attributes:
        name: from where to where.
        moved: bytes that the weight buffer moves.
        bound: bytes that must move, whatever the method: each needed element once per place that lacks it, in the
            rollout's dtype.
    """

    name: str
    moved: int
    bound: int


@dataclass(frozen=True)
class TransferPlan:
    """The weight transfer of one step.

    Attributes:
        buffer_bytes: host memory of the buffer on each node.
        num_buckets: that pass through it one after the other.
        num_nodes: nodes, each with a buffer.
        steps: the legs.
        most_received: bytes that come to one node over the network, at most.
        seconds: that this takes on a link, both ways at once; 0 where nothing crosses.
    """

    buffer_bytes: int
    num_buckets: int
    num_nodes: int
    steps: tuple[TransferStep, ...]
    most_received: int
    seconds: float


def plan_transfer(
    config: GrpoConfig,
    rules: KnownRules,
    dims: ModelDims,
    layout: Layout,
    layouts: Sequence[ParameterLayout],
    *,
    rollout_rank_bytes: int,
    node_size: int,
    link_bytes_per_s: float = LINK_BYTES_PER_S,
) -> TransferPlan:
    """Count the bytes of a weight transfer.

    Args:
        rollout_rank_bytes: weights of one generator device, in the rollout's dtype.
        link_bytes_per_s: that a node sends and receives at once, over the network.

    Raises:
        UserError: the servers do not go into the nodes.
    """
    nodes = _Nodes(config, dims, layout, node_size)
    exact = ELEMENT_BYTES[config.rollout.dtype]
    num_elements = written = written_bytes = bound = 0
    received = [0] * nodes.count
    by_name = {one.name: one for one in layouts}
    for rule in rules.rules(dims):
        one = by_name[rule.mf_name]
        own = file_dtype(rule, config.model.param_dtype)
        element_bytes = STORAGE_DTYPES[buffer_dtype(rule, own, config.rollout.dtype)].itemsize
        num_elements += math.prod(one.shape)
        for node in range(nodes.count):
            held, needed, overlap = nodes.shares(rule, one, node)
            written += held
            written_bytes += held * element_bytes
            received[node] += (needed - overlap) * element_bytes
            bound += (needed - overlap) * exact
    to_devices = rollout_rank_bytes * layout.world_size
    steps = (
        TransferStep("trainer devices to buffers", written_bytes, num_elements * exact),
        TransferStep("between nodes", sum(received), bound),
        TransferStep("buffers to generator devices", to_devices, to_devices),
    )
    infos = buffer_infos(rules, dims, config.model.param_dtype, config.rollout.dtype)
    buckets, place_sizes = arrange_buckets(infos, int(config.rollout.weight_buffer_gib * 2**30))
    # What comes to one node has left others: none sends more than its share, or than it receives itself.
    busiest = max(max(received), -(-sum(received) // nodes.count))
    return TransferPlan(
        buffer_bytes=sum(place_sizes),
        num_buckets=len(buckets),
        num_nodes=nodes.count,
        steps=steps,
        most_received=max(received),
        seconds=busiest / link_bytes_per_s,
    )


class _Nodes:
    """What the nodes of a run hold and need of parameters; layers that are alike are counted once."""

    def __init__(self, config: GrpoConfig, dims: ModelDims, layout: Layout, node_size: int):
        self.count = -(-layout.world_size // node_size)
        self._dims = dims
        self._node_size = min(node_size, layout.world_size)
        self._world_size = layout.world_size
        self._num_devices = config.rollout.tensor_parallel
        if layout.world_size % self._node_size and config.rollout.tensor_parallel <= self._node_size:
            self._places = [(node,) for node in range(self.count)]  # nodes of another size, each with whole servers
        else:
            self._places = place_servers(config.rollout, self.count, self._node_size)
        self._counted: dict[tuple, tuple[int, int, int]] = {}

    def shares(self, rule: ParameterRule, one: ParameterLayout, node: int) -> tuple[int, int, int]:
        """Return how many elements of a parameter a node's ranks hold, its servers need, and both do."""
        ranks = range(node * self._node_size, min((node + 1) * self._node_size, self._world_size))
        local = tuple(sorted({rank % one.stage_size for rank in ranks if rank // one.stage_size in one.stages}))
        kind = re.sub(r"\.layers\.\d+\.", ".layers.*.", one.name)
        lies = (one.shape, one.device_matrix, one.tensor_map, one.optimizer_shard_size)
        key = (kind, *lies, local, self._devices[node])
        if key not in self._counted:
            boxes = self._held(rule, one, local)
            needed = self._needed(rule, self._devices[node])
            overlap = sum(_overlap(box, other) for name, box in boxes for own, other in needed if own == name)
            held = sum(_size(box) for _, box in boxes)
            self._counted[key] = held, sum(_size(box) for _, box in needed), overlap
        return self._counted[key]

    @cached_property
    def _devices(self) -> list[tuple[int, int] | None]:
        """Of each node the devices of a server that lie on it, from the first on and before the last; None of none.

        Where whole servers lie on a node, one of them stands for all.
        """
        found: list[tuple[int, int] | None] = [None] * self.count
        for nodes in self._places:
            size = self._num_devices // len(nodes)
            for place, node in enumerate(nodes):
                found[node] = (place * size, (place + 1) * size)
        return found

    def _needed(self, rule: ParameterRule, devices: tuple[int, int] | None) -> list[tuple[str, Box]]:
        if devices is None:
            return []
        if rule.transform == "halves":
            ((rows, columns),) = rule.shape(self._dims)
            half = replace(rule, shape=lambda _: ((rows // 2, columns),))
            (start, stop), across = server_box(half, self._dims, 0, self._num_devices, *devices)
            return [(rule.hf_names[0], ((first + start, first + stop), across)) for first in (0, rows // 2)]
        per_expert = len(rule.hf_names) // rule.num_experts
        boxes = [server_box(rule, self._dims, part, self._num_devices, *devices) for part in range(per_expert)]
        return [(name, boxes[place % per_expert]) for place, name in enumerate(rule.hf_names)]

    def _held(self, rule: ParameterRule, one: ParameterLayout, local: Sequence[int]) -> set[tuple[str, Box]]:
        start = one.stages[0] * one.stage_size
        shards = {
            tuple((part.start, part.stop) for part in held): held
            for held in (one.shard_of(start + rank) for rank in local)
        }
        return {
            (shard.hf_name, tuple((part.start, part.stop) for part in shard.index))
            for held in shards.values()
            for shard in published_shards(rule, self._dims, held)
        }


def _size(box: Box) -> int:
    return math.prod(stop - start for start, stop in box)


def _overlap(box: Box, other: Box) -> int:
    return math.prod(max(0, min(a[1], b[1]) - max(a[0], b[0])) for a, b in zip(box, other))
