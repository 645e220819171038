"""Four real ranks of one replica: each has the rows bit for bit, and rank 0 sends them by the collective alone."""

import json

import numpy as np
from launch_jobs import Job
from slow_tests import SLOW

pytestmark = SLOW

WORKER = """
    import hashlib, json, sys
    from pathlib import Path
    import mindspore as ms
    import numpy as np
    from mindspore.communication import get_group_size, get_rank, init
    from mindrlhf.layout.layout import Layout
    from mindrlhf.system import wire
    from mindrlhf.training import team
    from mindrlhf.training.replica_team import ReplicaTeam
    from mindrlhf.training.runtime import Rank

    here = Path(__file__).parent
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_device("CPU")
    init()
    rank = Rank(get_rank(), get_group_size())
    sent = [0]
    send_all = wire._send_all

    def counting(*arguments):
        sent[0] += sum(map(len, arguments[1]))
        return send_all(*arguments)

    wire._send_all = counting

    class Worker:
        def take(self, rows):
            (here / f"digest_{rank.index}").write_text(hashlib.sha256(rows.tobytes()).hexdigest())

    connections = team.connect(rank)
    if not rank.is_rank_0:
        team.serve(Worker(), connections[0])
        sys.exit(0)
    ranks = team.Team(Worker(), connections)
    replicas = ReplicaTeam(ranks, Layout(data_parallel=1, model_parallel=4))
    rows = np.random.default_rng(0).integers(0, 1 << 30, (16, 65536), np.int32)
    sent[0] = 0
    replicas.call("take", per_rank=[{"rows": rows}])
    report = {"sent": sent[0], "rows": rows.nbytes, "digest": hashlib.sha256(rows.tobytes()).hexdigest()}
    (here / "report.json").write_text(json.dumps(report))
    ranks.close()
"""


def test_four_ranks_of_a_replica(tmp_path):
    job = Job(tmp_path, WORKER, 4)
    try:
        assert job.wait(300) == 0, job.errors()
        report = json.loads((tmp_path / "report.json").read_text())
        assert [(tmp_path / f"digest_{rank}").read_text() for rank in range(4)] == [report["digest"]] * 4
        assert report["rows"] == 16 * 65536 * np.dtype(np.int32).itemsize
        assert report["sent"] < 10_000, report["sent"]
    finally:
        job.clean_up()
