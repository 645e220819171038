"""The graphs by which the ranks of a run would broadcast weights, compiled for a simulated Ascend, one process each.

    python broadcast_graphs_rank.py DIRECTORY

``plan.json`` there has "infos" and "transfers", their fields, "nodes", "bucket_bytes" and "pipeline_stage". Each rank
does a sync by the product's transport, in which nothing is computed, and writes ``rank_R.json``: for each of its graphs
"root" and "ranks", the ranks that MindSpore takes for them, "collectives", and how often it was called.
"""

import functools
import json
import sys
from dataclasses import asdict
from pathlib import Path

from simulated_ranks import run_ranks

from mindrlhf.dryrun.compile import ascend_stubs as simulation


def sync(work: dict, directory: Path, rank: int) -> None:
    import mindspore as ms
    from mindspore.communication import init

    from mindrlhf.config.training import ParallelSection
    from mindrlhf.models.context import prepare_mindformers
    from mindrlhf.training.runtime import Rank, start_parallel
    from mindrlhf.weights.publish.buffer import WeightBuffer
    from mindrlhf.weights.publish.collective import CollectiveTransport
    from mindrlhf.weights.publish.sync import Transfer, to_slice
    from mindrlhf.weights.tensors import TensorInfo

    world_size = sum(map(len, work["nodes"]))
    simulation.set_rank(rank, world_size)
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_device("Ascend")
    init()
    prepare_mindformers("ascend", directory / "mindformers")
    # As in a run, all of whose graphs are sharded, but for these.
    parallel = ParallelSection(pipeline_stage=work["pipeline_stage"], data_parallel=1)
    start_parallel(parallel, Rank(rank, world_size), directory / f"strategy_{rank}")
    graphs: list[dict] = []

    @functools.cache
    def open_compiled(ranks, root, num_words):
        graph = compile_broadcast(ranks, root, num_words, world_size)
        graphs.append(graph)

        def broadcast(words):
            graph["calls"] += 1
            return ms.numpy.zeros(num_words, ms.int32).asnumpy() if words is None else None

        return broadcast

    infos = [TensorInfo(name, dtype, tuple(shape)) for name, dtype, shape in work["infos"]]
    with WeightBuffer.create(infos) as buffer:
        transport = CollectiveTransport(buffer, rank, work["nodes"], open_compiled, work["bucket_bytes"])
        transport.connect(
            [Transfer(name, to_slice(part), origin, tuple(nodes)) for name, part, origin, nodes in work["transfers"]],
            {},
            b"",
        )
        transport.sync(1)
    (directory / f"rank_{rank}.json").write_text(json.dumps(graphs))


def compile_broadcast(ranks, root, num_words, world_size) -> dict:
    from mindspore.communication import get_group_size, get_world_rank_from_group_rank

    from mindrlhf.dryrun.compile.collectives import read_collectives
    from mindrlhf.dryrun.compile.graph import compile_graph, read_graph
    from mindrlhf.models.context import by_itself
    from mindrlhf.training.broadcast import group_of, open_broadcast, placeholder

    broadcast = open_broadcast(ranks, root, num_words)
    with by_itself():
        model = read_graph(compile_graph(broadcast.cell, [placeholder(num_words)]))
    group = group_of(ranks)
    if len(ranks) == world_size:
        members = list(range(world_size))
    else:
        members = [get_world_rank_from_group_rank(group, index) for index in range(get_group_size(group))]
    (primitive,) = (one for one in model.primitives if one.op_type == "Broadcast")
    attributes = {attribute.name: attribute for attribute in primitive.attribute}
    return {
        "root": members[attributes["root_rank"].i],
        "ranks": members,
        "collectives": [asdict(one) for one in read_collectives(model, world_size, {group: members})],
        "calls": 0,
    }


if __name__ == "__main__":
    place = Path(sys.argv[1])
    given = json.loads((place / "plan.json").read_text())
    sys.exit(run_ranks(place, sum(map(len, given["nodes"])), functools.partial(sync, given, place)))
