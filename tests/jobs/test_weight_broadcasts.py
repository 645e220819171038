"""Buffers of pretended nodes, which CPU ranks make whole by broadcasts: the product's transport over real collectives.

A node is a group of ranks of this machine. Where each has one rank the product's own graphs broadcast; MindSpore has no
CPU kernel of them for groups of some ranks, for which an operator that runs eagerly stands in.
"""

import json
import os
from collections import Counter
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from random_bits import random_bits
from slow_tests import SLOW

from mindrlhf.launch.launch import launch
from mindrlhf.weights.publish import sync as planning
from mindrlhf.weights.publish.collective import plan_buckets
from mindrlhf.weights.publish.sync import plan_sync, sums_of
from mindrlhf.weights.tensors import TensorInfo

pytestmark = pytest.mark.timeout(400)

VERSIONS = (1, 2)
TRANSFER_BYTES = 256
INFOS = (
    TensorInfo("matrix", "float32", (60, 50)),
    TensorInfo("half", "bfloat16", (30, 20, 6)),
    TensorInfo("vector", "bfloat16", (77,)),
    TensorInfo("scalar", "float32", ()),
)
# Rows of one tensor, columns of another and an odd number of elements of a third; what is left is everybody's.
ROWS = [("matrix", ((0, 23), (0, 50))), ("matrix", ((23, 60), (0, 50)))]
COLUMNS = [("half", ((0, 30), (0, 7), (0, 6))), ("half", ((0, 30), (7, 20), (0, 6)))]
ODD = [("vector", ((0, 31),)), ("vector", ((31, 77),))]
SCALAR = [("scalar", ())]
HELD = [[ROWS[0], COLUMNS[0], ODD[0], *SCALAR], [ROWS[1], COLUMNS[1], ODD[1], *SCALAR]]
ONE_BY_ONE = {"name": "one rank each", "nodes": [[0], [1]], "bucket_bytes": 1024, "held": HELD}
# Three of four nodes have parts; the last has nothing.
FOUR_NODES = {
    "name": "four nodes",
    "nodes": [[0], [1], [2], [3]],
    "bucket_bytes": 1 << 20,
    "held": [[ROWS[0], COLUMNS[0]], [ROWS[1], COLUMNS[1]], [*ODD, *SCALAR], []],
}
# Ranks of a node that do not follow each other take turns.
TWO_RANKS = {"name": "two ranks each", "nodes": [[0, 2], [1, 3]], "bucket_bytes": 328, "held": HELD}


def run(cases: list[dict], directory: Path) -> None:
    (directory / "sync.json").write_text(json.dumps({"infos": INFOS, "cases": cases, "transfer_bytes": TRANSFER_BYTES}))
    here = Path(__file__).parent
    environment = {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join((str(here.parent / "helpers"), str(here.parents[1]))),
    }
    num_ranks = sum(map(len, cases[0]["nodes"]))
    out = StringIO()
    code = launch(
        [str(here / "broadcast_rank.py"), str(directory)], num_ranks, directory / "logs", env=environment, out=out
    )
    assert code == 0, out.getvalue()


@pytest.mark.parametrize(
    "cases", [pytest.param([ONE_BY_ONE], id="2 ranks"), pytest.param([FOUR_NODES, TWO_RANKS], id="4 ranks", marks=SLOW)]
)
def test_buffers_become_whole_bit_for_bit(cases, tmp_path):
    run(cases, tmp_path)
    for case in cases:
        for version in VERSIONS:
            check(case, version, tmp_path)


def check(case: dict, version: int, directory: Path) -> None:
    def told(name):
        return json.loads((directory / f"{case['name']}_{name}_{version}").read_text())

    expected = random_bits(INFOS, version)
    nodes = case["nodes"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "TRANSFER_BYTES", TRANSFER_BYTES)
        written = [sums_of(each for rank in ranks for each in told(f"wrote_{rank}")) for ranks in nodes]
        buckets = plan_buckets(plan_sync(written, INFOS), nodes, INFOS, case["bucket_bytes"])
    for node, _ in enumerate(nodes):
        with np.load(directory / f"{case['name']}_{node}_{version}.npz") as buffer:
            assert buffer.files == list(expected)
            for name, array in expected.items():
                assert buffer[name].tobytes() == array.tobytes(), (case["name"], node, name)
    planned = Counter(bucket.root for bucket in buckets)
    assert len(buckets) > len(planned) or case is FOUR_NODES  # several rounds
    for rank in range(sum(map(len, nodes))):
        assert told(f"done_{rank}") == version * planned[rank] * case["bucket_bytes"]
