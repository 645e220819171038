"""The broadcasts by which the buffers of Ascend nodes would become whole, compiled for every rank and counted."""

import json
import math
import os
import subprocess
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import pytest
from layout_matrix import QWEN2, hf_config
from slow_tests import SIMULATES_CANN, SLOW

from mindrlhf.dryrun.compile.request import Collective
from mindrlhf.layout.layout import Layout, parameter_layouts
from mindrlhf.specs import find_spec
from mindrlhf.weights.publish import sync as planning
from mindrlhf.weights.publish.collective import BUCKET_BYTES, plan_buckets
from mindrlhf.weights.publish.shards import plan_publication
from mindrlhf.weights.publish.sync import plan_sync
from mindrlhf.weights.tensors import TensorInfo

pytestmark = [SLOW, SIMULATES_CANN, pytest.mark.timeout(900)]

# Layout, ranks of a node, bytes of a bucket, nodes that lack each element of the model (None where small parameters
# stay whole on all of them).
CASES = {
    "a stage on each of two nodes": (Layout(model_parallel=4, pipeline_stage=2), 4, 256 << 10, 1),
    "a stage on each of four nodes": (Layout(2, 2, pipeline_stage=4), 4, BUCKET_BYTES, 3),
    "stages on two nodes each": (Layout(4, pipeline_stage=2), 2, 256 << 10, 2),
    "optimiser shards over four nodes": (Layout(8, optimizer_shard=-1), 2, 256 << 10, None),
}
TRANSFER_BYTES = 32 << 10
BFLOAT16 = 2


@pytest.mark.parametrize("name", CASES)
def test_compiled_broadcasts_are_those_planned(name, tmp_path, monkeypatch):
    monkeypatch.setattr(planning, "TRANSFER_BYTES", TRANSFER_BYTES)
    layout, node_size, bucket_bytes, num_lacking = CASES[name]
    nodes = [tuple(range(first, first + node_size)) for first in range(0, layout.world_size, node_size)]
    infos, written = published(layout, nodes)
    transfers = plan_sync(written, infos)
    buckets = plan_buckets(transfers, nodes, infos, bucket_bytes)
    work = {
        "infos": infos,
        "transfers": [[each.name, each.slice, each.origin, each.nodes] for each in transfers],
        "nodes": nodes,
        "bucket_bytes": bucket_bytes,
        "pipeline_stage": layout.pipeline_stage,
    }
    graphs = compile_all(work, tmp_path)
    for rank in range(layout.world_size):
        planned = Counter((bucket.root, bucket.ranks, bucket_bytes) for bucket in buckets if rank in bucket.ranks)
        compiled: Counter = Counter()
        for graph in graphs[rank]:
            (one,) = graph["collectives"]
            ranks, size_bytes = tuple(graph["ranks"]), one["input_bytes"]
            assert one == asdict(Collective("Broadcast", ranks, 1, size_bytes, size_bytes)) | {
                "group_ranks": list(ranks)
            }
            compiled[graph["root"], ranks, size_bytes] += graph["calls"]
        assert compiled == planned
        assert len(graphs[rank]) == len(planned)  # one for each node that sends
    # What all nodes lack is in the buckets.
    model_bytes = sum(info.size_bytes for info in infos)
    lacking = sum(model_bytes - BFLOAT16 * num_elements(one) for one in written)
    assert num_lacking is None or lacking == num_lacking * model_bytes
    widths = {info.name: info.numpy_dtype.itemsize for info in infos}
    parts = [transfer for bucket in buckets for transfer, _ in bucket.parts]
    assert lacking == sum(widths[part.name] * num_elements([("", part.slice)]) * len(part.nodes) for part in parts)


def published(layout: Layout, nodes: list[tuple[int, ...]]) -> tuple[list[TensorInfo], list[dict]]:
    """The tensors of a buffer in bfloat16, and what the ranks of each node would write to it."""
    config = hf_config(QWEN2, layout.pipeline_stage)
    spec = find_spec(config)
    dims = spec.dims(config)
    layouts, rules = parameter_layouts(spec, dims, layout), {rule.mf_name: rule for rule in spec.rules(dims)}
    shapes = {name: shape for rule in rules.values() for name, shape in zip(rule.hf_names, rule.shape(dims))}
    infos = [TensorInfo(name, "bfloat16", tuple(shape)) for name, shape in shapes.items()]
    written: list[dict] = []
    for ranks in nodes:
        sums: dict = {}
        for rank in ranks:
            for parts in plan_publication(layouts, rules, dims, rank, ranks).values():
                for part in parts:
                    sizes = shapes[part.hf_name]
                    bounds = (one.indices(size)[:2] for one, size in zip(part.index, sizes, strict=True))
                    sums[part.hf_name, tuple(bounds)] = 0
        written.append(sums)
    return infos, written


def num_elements(written: dict) -> int:
    return sum(math.prod(stop - start for start, stop in one) for _, one in written)


def compile_all(work: dict, directory: Path) -> list[list[dict]]:
    (directory / "plan.json").write_text(json.dumps(work))
    script = Path(__file__).with_name("broadcast_graphs_rank.py")
    command = [sys.executable, str(script), str(directory)]
    environment = os.environ | {"PYTHONPATH": str(script.parents[2])}
    ended = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=600)
    ranks = range(sum(map(len, work["nodes"])))
    logs = "".join(path.read_text()[-500:] for rank in ranks if (path := directory / f"log_{rank}").exists())
    assert ended.returncode == 0, ended.stderr[-1000:] + logs
    return [json.loads((directory / f"rank_{rank}.json").read_text()) for rank in ranks]
