"""Four real ranks of one replica: each has the rows bit for bit, rank 0 sends them once, and a killed rank is named."""

import json

import numpy as np
import pytest
from launch_jobs import Job

WORKER = """
    import hashlib, json, os, signal, sys
    from pathlib import Path
    import mindspore as ms
    import numpy as np
    from mindspore.communication import get_group_size, get_rank, init
    from mindrlhf.errors import RunFailure
    from mindrlhf.layout.layout import Layout
    from mindrlhf.system import processes, wire
    from mindrlhf.training import relay, team
    from mindrlhf.training.replica_team import ReplicaTeam
    from mindrlhf.training.runtime import Rank

    here = Path(__file__).parent
    spec = json.loads((here / "spec.json").read_text())
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_device("CPU")
    init()
    rank = Rank(get_rank(), get_group_size())
    processes.machine = lambda: spec["machines"][rank.index]
    sent = [0, 0]

    def counting(number, function, size):
        def count(*arguments):
            sent[number] += size(arguments)
            return function(*arguments)
        return count

    wire._send_all = counting(0, wire._send_all, lambda arguments: sum(map(len, arguments[1])))
    relay.lay_out = counting(1, relay.lay_out, lambda arguments: sum(one.nbytes for one in arguments[0].values()))

    class Worker:
        def take(self, rows):
            (here / f"digest_{rank.index}").write_text(hashlib.sha256(rows.tobytes()).hexdigest())

    connections = team.connect(rank)
    if rank.index == spec.get("dies_reading"):
        whole = relay.Relay._receive
        def receive(self, before, star):
            if (here / "digest_0").exists():
                os.kill(os.getpid(), signal.SIGKILL)
            return whole(self, before, star)
        relay.Relay._receive = receive
    if not rank.is_rank_0:
        team.serve(Worker(), connections[0], connections.relay)
        sys.exit(0)
    ranks = team.Team(Worker(), connections)
    replicas = ReplicaTeam(ranks, Layout(data_parallel=1, model_parallel=4))
    rows = np.random.default_rng(0).integers(0, 1 << 30, (16, 65536), np.int32)
    sent[:] = [0, 0]
    replicas.call("take", per_rank=[{"rows": rows}])
    report = {"sent": list(sent), "rows": rows.nbytes, "digest": hashlib.sha256(rows.tobytes()).hexdigest()}
    if "dies_reading" in spec:
        try:
            replicas.call("take", per_rank=[{"rows": rows}])
        except RunFailure as error:
            report["error"] = str(error)
    (here / "report.json").write_text(json.dumps(report))
    ranks.close()
"""


@pytest.mark.parametrize(
    ("machines", "dead"), [("aaaa", None), ("aabb", None), ("aabb", 2), ("aaaa", 3)], ids=["one", "two", "far", "near"]
)
def test_four_ranks_of_a_replica(machines, dead, tmp_path):
    spec = {"machines": machines} | ({} if dead is None else {"dies_reading": dead})
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    job = Job(tmp_path, WORKER, 4)
    try:
        code = job.wait(300)
        report = json.loads((tmp_path / "report.json").read_text())
        assert (code == 0) == (dead is None), job.errors()
        assert [(tmp_path / f"digest_{rank}").read_text() for rank in range(4)] == [report["digest"]] * 4
        assert sum(report["sent"]) <= 1.1 * report["rows"], report["sent"]
        assert report["rows"] == 16 * 65536 * np.dtype(np.int32).itemsize
        if dead is not None:
            assert report["error"].startswith(f"rank {dead} died ") and f"worker_{dead}.log" in report["error"]
    finally:
        job.clean_up()
