"""The launchers of several nodes together, in one process: start, end, failures, losses, restarts, refusals."""

import contextlib
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from mindrlhf.errors import RunFailure, UserError, UserErrors
from mindrlhf.launch.nodes import first
from mindrlhf.launch.nodes.facts import Fact
from mindrlhf.launch.nodes.first import FirstNode, telling_others
from mindrlhf.launch.nodes.other import OtherNode
from mindrlhf.launch.nodes.place import Place
from mindrlhf.launch.nodes.secret import SECRET_NAME, SECRET_VARIABLE, wait_for_secret
from mindrlhf.launch.restarts import run_with_restarts
from mindrlhf.system import rpc as rpc_module
from mindrlhf.system.handshake import introduce
from mindrlhf.system.ports import find_free_port

pytestmark = pytest.mark.timeout(120)
SECRET = b"a secret of some length"


class Ranks:
    """What stands for the ranks of a node: they run until they are told to end."""

    def __init__(self, peers) -> None:
        self.peers = peers
        self.starts: list[bool] = []
        self.orders: queue.SimpleQueue = queue.SimpleQueue()
        self.lines: list[str] = []
        self.end_s = 0.0  # how long it takes to end those that are left

    def __call__(self, resume: bool) -> int:
        self.starts.append(resume)
        while True:
            with contextlib.suppress(queue.Empty):
                code = self.orders.get_nowait()
                if code:
                    self.peers.report(f"rank died with {code}")
                time.sleep(self.end_s)
                return code
            if (ending := self.peers.ending()) is not None:
                self.lines.append(ending.line)
                return ending.code
            time.sleep(0.02)


class Cluster:
    """Node 0 and others, each in a thread."""

    def __init__(
        self,
        tmp_path: Path,
        num_nodes: int,
        *,
        num_spares: int = 0,
        max_restarts: int = 0,
        limit_s: float = 30.0,
        advice: str = "",
    ) -> None:
        self.port = find_free_port()
        self.num_nodes = num_nodes
        self.num_spares = num_spares
        self.tmp_path = tmp_path
        self.max_restarts = max_restarts
        self.limit_s = limit_s
        self.advice = (lambda: advice) if advice else None
        self.ranks: dict[int, Ranks] = {}
        self.nodes: dict[int, OtherNode] = {}
        self.results: dict[int, object] = {}
        self.threads: dict[int, threading.Thread] = {}

    def place(self, node: int) -> Place:
        return Place(node, self.num_nodes, "127.0.0.1", self.port, self.num_spares)

    def start(self, node: int, facts: tuple[Fact, ...] = (), secret: bytes = SECRET) -> None:
        run = self._first if node == 0 else self._other

        def guarded() -> None:
            try:
                self.results[node] = run(node, list(facts), secret)
            except Exception as error:
                self.results[node] = error

        self.threads[node] = threading.Thread(target=guarded, daemon=True)
        self.threads[node].start()

    def begin(self) -> "Cluster":
        """Start the nodes that train, and wait until the ranks of all of them run."""
        for node in range(self.num_nodes):
            self.start(node)
        self.wait_for_starts(1)
        return self

    def end_well(self) -> None:
        """Have the ranks of all nodes end with 0, and the run with them."""
        for ranks in self.ranks.values():
            ranks.orders.put(0)
        assert self.ends() == [0] * len(self.ranks)

    def _first(self, node: int, facts: list[Fact], secret: bytes) -> int:
        with FirstNode(self.place(0), secret, facts, {"run.output_dir": "7"}, self.limit_s, self.advice) as nodes:
            self.ranks[0] = ranks = Ranks(nodes)
            logs = self.tmp_path / "logs_0"
            code = run_with_restarts(
                lambda resume: nodes.attempt(resume, ranks), lambda: True, self.max_restarts, logs, resume=False
            )
            nodes.close(code)
            return code

    def _other(self, node: int, facts: list[Fact], secret: bytes) -> int:
        def find_facts(probes: dict) -> list[Fact]:
            assert probes == {"run.output_dir": "7"}
            return facts

        logs = self.tmp_path / f"logs_{node}"
        options = {"limit_s": self.limit_s, "rejoins": self.max_restarts > 0 and not self.advice}
        other = OtherNode(self.place(node), secret, find_facts, logs, **options)
        self.nodes[node], self.ranks[node] = other, Ranks(other)
        return other.serve(self.ranks[node])

    def other(self, node: int, secret: bytes = SECRET) -> OtherNode:
        return OtherNode(self.place(node), secret, lambda _: [], self.tmp_path, limit_s=30, rejoins=False)

    def lose(self, node: int) -> None:
        """End its connection, as both sides see."""
        self.nodes[node]._channel._connection.close()

    def wait_for_starts(self, count: int, nodes: Sequence[int] = ()) -> None:
        end_s, nodes = time.monotonic() + 30, nodes or range(self.num_nodes)
        while not all(node in self.ranks and len(self.ranks[node].starts) == count for node in nodes):
            assert time.monotonic() < end_s, (self.results, {n: r.starts for n, r in self.ranks.items()})
            time.sleep(0.02)

    def ends(self) -> list[object]:
        for thread in self.threads.values():
            thread.join(60)
            assert not thread.is_alive()
        return [self.results[node] for node in range(self.num_nodes + self.num_spares)]


@pytest.fixture
def cluster(tmp_path):
    return lambda num_nodes, **options: Cluster(tmp_path, num_nodes, **options)


def test_all_nodes_start_together_and_end_well(cluster):
    run = cluster(3)
    for node in (2, 0, 1):  # whoever comes first waits
        run.start(node)
    run.wait_for_starts(1)
    assert {ranks.starts[0] for ranks in run.ranks.values()} == {False}
    ports = {ranks.peers.scheduler_port for ranks in run.ranks.values()}
    assert len(ports) == 1 and ports != {run.port}
    run.end_well()


HERE = f"{socket.gethostname()}, 127.0.0.1"


@pytest.mark.parametrize(
    ("failed", "code", "line", "told"),
    [
        (2, 137, f"node 2 ({HERE}) rank died with 137", (0, 1)),
        (0, 137, "node 0 (127.0.0.1): rank died with 137", (1, 2)),
        (1, 2, f"node 1 ({HERE}) rank died with 2", (0, 2)),  # a mistake of the user's is not tried again
    ],
)
def test_a_failure_on_one_node_ends_all_and_is_named_everywhere(cluster, failed, code, line, told):
    run = cluster(3, max_restarts=2 if code == 2 else 0).begin()
    run.ranks[failed].orders.put(code)
    assert run.ends() == [code] * 3
    assert [run.ranks[node].lines for node in told] == [[line]] * 2
    assert [ranks.starts for ranks in run.ranks.values()] == [[False]] * 3


def test_the_cause_on_another_node_is_told_rather_than_its_victim_on_node_0(cluster):
    run = cluster(3).begin()
    run.ranks[0].orders.put(1)  # "rank 1 died"
    time.sleep(0.3)
    run.ranks[1].orders.put(137)
    assert run.ends() == [137, 137, 137]
    assert run.ranks[2].lines == [f"node 1 ({HERE}) rank died with 137"]


def test_a_node_whose_ranks_fell_with_those_of_node_0_is_told_why(cluster, capfd):
    run = cluster(3).begin()
    run.ranks[0].end_s = 1.0
    run.ranks[0].orders.put(137)
    time.sleep(0.2)
    run.ranks[1].orders.put(1)  # "rank 0 died"
    assert run.ends() == [137, 1, 137]
    line = "node 0 (127.0.0.1): rank died with 137"
    assert f"mindrlhf: {line}" in capfd.readouterr().err, "on node 1"
    assert run.ranks[2].lines == [line]


def test_a_failed_run_is_started_again_on_all_nodes_from_the_checkpoint(cluster):
    run = cluster(3, max_restarts=2).begin()
    run.ranks[1].orders.put(1)
    run.wait_for_starts(2)
    run.ranks[0].orders.put(137)
    run.wait_for_starts(3)
    run.end_well()
    assert all(ranks.starts == [False, True, True] for ranks in run.ranks.values())


def test_a_lost_node_may_come_back_and_the_run_goes_on(cluster):
    run = cluster(2, max_restarts=1).begin()
    run.lose(1)
    run.wait_for_starts(2)
    assert "has closed the connection" in run.ranks[0].lines[0] and run.ranks[0].lines[0].startswith("node 1 (")
    assert "node 0 (127.0.0.1) has closed the connection" in run.ranks[1].lines[0]
    run.end_well()


def test_a_lost_node_that_nothing_starts_again_ends_the_run_at_once_with_what_to_type(cluster):
    run = cluster(3, max_restarts=3, limit_s=0.0, advice="to resume: mindrlhf train c.yaml --resume").begin()
    run.lose(1)
    first, lost, other = map(str, run.ends())
    line = "node 1 has gone, and nothing starts it again"
    assert first == f"{line}: fix that, then start again on all nodes; to resume: mindrlhf train c.yaml --resume"
    assert other == line and "node 0 (127.0.0.1) has closed the connection" in lost
    assert [len(run.ranks[node].starts) for node in range(3)] == [1, 1, 1]


@pytest.mark.parametrize("has_mistake", [False, True])
def test_what_node_0_finds_wrong_before_it_starts_is_told_to_those_that_come(
    cluster, has_mistake, tmp_path, monkeypatch, capfd
):
    monkeypatch.setenv(SECRET_VARIABLE, SECRET.decode())
    run = cluster(2)
    mistakes = UserErrors(["'run.seed' is x", "8 workers on 2 cores"])
    if has_mistake:
        other = run.other(1)
        run._other = lambda *_: other.tell_problem("no NPU here")
    run.start(1)
    with pytest.raises(UserErrors) as raised, telling_others(run.place(0), tmp_path):
        raise mistakes
    assert raised.value is mistakes
    run.threads[1].join(60)
    lines = ["node 0: 'run.seed' is x", "node 0: 8 workers on 2 cores", *["node 1: no NPU here"] * has_mistake]
    assert str(run.results[1]) == "\n  ".join(["the nodes cannot train together:", *lines])
    assert "node 0 cannot start: 'run.seed' is x" in capfd.readouterr().err


def test_a_node_that_waits_for_the_secret_says_for_whom_and_where(tmp_path, monkeypatch, capfd):
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    monkeypatch.setattr("mindrlhf.launch.nodes.secret.FIRST_NEWS_S", 0.0)
    with pytest.raises(UserError, match=r"node 0 \(host\) has not made .*nodes_secret within 0.3 s"):
        wait_for_secret(tmp_path, 0.3, "node 0 (host)")
    assert capfd.readouterr().err.count(f"waiting: node 0 (host) has not made {tmp_path / SECRET_NAME} for") == 1


def test_an_address_that_does_not_resolve_is_an_error_at_once_and_waited_for_in_kubernetes(monkeypatch):
    tries = []

    def resolve(*_, **__):
        tries.append(1)
        if len(tries) < 3:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, 0, 0, "", ("10.0.0.1", 1))]

    place = Place(1, 2, "mindrlhf-0.mindrlhf", 8118)
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(UserError, match="--master is mindrlhf-0.mindrlhf, a name that this machine does not know"):
        place.check_address()
    assert len(tries) == 1
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    monkeypatch.setattr("mindrlhf.launch.nodes.place.time.sleep", lambda _: None)
    assert place.check_address() == (socket.AF_INET, "10.0.0.1") and len(tries) == 3


def wait_for_line(capfd, line: str) -> None:
    text, end_s = "", time.monotonic() + 30
    while line not in text:
        assert time.monotonic() < end_s, text
        text += capfd.readouterr().err
        time.sleep(0.02)


def test_a_spare_takes_the_place_of_a_lost_node_which_is_a_spare_when_it_comes_back(cluster, capfd):
    run = cluster(3, num_spares=1, max_restarts=2)
    run.start(3)  # the spare is first, and takes nobody's place yet
    for node in range(3):
        run.start(node)
    run.wait_for_starts(1)
    assert run.ranks[3].starts == []
    run.nodes[1]._rejoins = False
    run.lose(1)
    run.threads[1].join(30)
    run.wait_for_starts(1, nodes=[3])
    run.wait_for_starts(2, nodes=[0, 2])
    assert run.ranks[2].lines[0].startswith("node 1 (") and "has closed the connection" in run.ranks[2].lines[0]
    assert [run.ranks[node].peers.node for node in (0, 3, 2)] == [0, 1, 2]
    assert run.ranks[3].starts == [True], "it resumes from what the lost node had saved"
    ports = {run.ranks[node].peers.scheduler_port for node in (0, 2, 3)}
    assert len(ports) == 1
    run.start(1)  # somebody has repaired it
    wait_for_line(capfd, f"node 1 ({HERE}) is a spare: it waits for a node to be lost")
    run.nodes[2]._rejoins = False
    run.lose(2)
    run.threads[2].join(30)
    run.wait_for_starts(1, nodes=[1])
    run.wait_for_starts(3, nodes=[0])
    assert [run.ranks[node].peers.node for node in (1, 3)] == [2, 1]
    for node in (0, 1, 3):
        run.ranks[node].orders.put(0)
    codes = run.ends()
    assert codes[:2] + codes[3:] == [0, 0, 0] and isinstance(codes[2], RunFailure)


def test_a_spare_stands_in_for_a_node_that_does_not_come(cluster, monkeypatch):
    monkeypatch.setattr(first, "_SPARE_PATIENCE_S", 0.5)
    run = cluster(3, num_spares=1, max_restarts=1)
    for node in (3, 0, 2):
        run.start(node)
    run.wait_for_starts(1, nodes=[0, 2, 3])
    assert run.ranks[3].peers.node == 1 and run.ranks[3].starts == [False]
    for node in (0, 2, 3):
        run.ranks[node].orders.put(0)
    run.results[1] = None
    assert run.ends() == [0, None, 0, 0]


def test_a_spare_that_differs_is_refused_alone(cluster, capfd):
    run = cluster(2, num_spares=2, max_restarts=1)
    same, other = (Fact("mindspore", version, "install the same") for version in ("2.9.0", "2.8.0"))
    run.start(0, (same,))
    run.start(2, (other,))
    run.threads[2].join(30)
    line = 'mindspore is "2.9.0" on node 0, "2.8.0" on node 2: install the same'
    assert isinstance(run.results[2], UserError) and line in str(run.results[2])
    assert line in capfd.readouterr().err
    with pytest.raises(UserError, match="node 3: there is no such file"):
        run.other(3).tell_problem("there is no such file")
    run.start(1, (same,))
    run.wait_for_starts(1)
    for node in (0, 1):
        run.ranks[node].orders.put(0)
    run.results[3] = None
    assert [run.ends()[node] for node in (0, 1, 3)] == [0, 0, None]


def test_a_silent_node_is_lost_on_both_sides(cluster, monkeypatch):
    monkeypatch.setattr(rpc_module, "SILENCE_LIMIT_S", 2.0)
    run = cluster(2).begin()
    monkeypatch.setattr(rpc_module.Link, "send", lambda *_, **__: None)
    first, second = run.ends()
    assert first == 1 and isinstance(second, RunFailure)
    lines = run.ranks[0].lines[0], run.ranks[1].lines[0]
    assert lines[0].startswith("node 1 (") and lines[1].startswith("node 0 (127.0.0.1)")
    # Who notices first closes the connection, which the other, not cut off after all, may see.
    assert any("has not been heard of for" in line for line in lines)


@pytest.mark.parametrize("absent", [0, 1])
def test_a_node_that_never_comes_is_named(cluster, absent):
    run = cluster(3, limit_s=1.0)
    for node in {0, 1, 2} - {absent}:
        run.start(node)
    run.threads[absent] = threading.Thread()
    run.threads[absent].start()
    run.results[absent] = None
    ends = [end for end in run.ends() if end is not None]
    assert len(ends) == 2 and all(isinstance(end, RunFailure) for end in ends)
    for end in ends:
        assert ("node 0 has not answered at 127.0.0.1" if absent == 0 else "node 1 of 3 has not come") in str(end)


def test_nodes_that_differ_are_refused_on_all_of_them(cluster):
    run = cluster(3)
    for node, version in enumerate(("2.9.0", "2.9.0", "2.8.0")):
        run.start(node, (Fact("mindspore", version, "install the same"),))
    line = 'mindspore is "2.9.0" on nodes 0, 1, "2.8.0" on node 2: install the same'
    for end in run.ends():
        assert isinstance(end, UserError) and str(end).splitlines()[1:] == [f"  {line}"]
    assert not any(ranks.starts for ranks in run.ranks.values())


def test_what_a_node_finds_wrong_by_itself_is_told_to_all(cluster):
    run = cluster(2)
    run.start(0)
    with pytest.raises(UserError, match="node 1: there is no such file"):
        run.other(1).tell_problem("there is no such file")
    run.threads[0].join(30)
    assert isinstance(run.results[0], UserError) and "node 1: there is no such file" in str(run.results[0])


def test_two_nodes_of_one_number_are_told_apart(cluster):
    run = cluster(3)
    for node in range(2):
        run.start(node)
    time.sleep(1.0)
    with pytest.raises(UserError, match=r"node 1 is there already \(.*\): give each node its own --node-rank"):
        run.other(1).serve(lambda _: 0)
    run.start(2)
    run.wait_for_starts(1)
    run.end_well()


def test_a_wrong_secret_is_named_and_the_others_are_not_disturbed(cluster, capfd):
    run = cluster(2)
    run.start(0)
    with pytest.raises(UserError, match="do not know each other .*set MINDRLHF_SECRET to the same on all nodes"):
        run.other(1, b"another secret of some length").serve(lambda _: 0)
    run.start(1)
    run.wait_for_starts(1)
    assert "a connection from 127.0.0.1 was turned away: it does not know the secret" in capfd.readouterr().err
    run.end_well()


def test_strangers_on_the_port_do_not_disturb(cluster):
    run = cluster(2)
    run.start(0)
    silent = [_connect(run.port) for _ in range(20)]
    loud = _connect(run.port)
    loud.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
    insider = introduce(_connect(run.port), SECRET)  # knows the secret but not what to say
    insider.send({"node": "seven"})
    run.start(1)
    run.wait_for_starts(1)
    for connection in (*silent, loud):
        connection.close()
    run.end_well()


def _connect(port: int) -> socket.socket:
    end_s = time.monotonic() + 10
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=5)
        except OSError:
            assert time.monotonic() < end_s
            time.sleep(0.05)


def test_a_signal_of_another_node_reaches_node_0_once(cluster):
    run = cluster(2).begin()
    run.nodes[1].pass_on(15)
    end_s = time.monotonic() + 10
    while not (signals := run.ranks[0].peers.asked_signals()):
        assert time.monotonic() < end_s
        time.sleep(0.02)
    assert signals == [15] and run.ranks[0].peers.asked_signals() == []
    run.end_well()


def test_the_port_is_open_at_the_address_given_and_at_no_other(cluster):
    run = cluster(2, limit_s=2.0)
    run.start(0)
    _connect(run.port).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", run.port), timeout=5)
    run.threads[0].join(30)


@pytest.mark.parametrize("master", ["192.0.2.1", "no-such-host.invalid"])
def test_an_address_that_is_not_of_node_0_is_refused(master):
    with pytest.raises(UserError, match=f"{master}"):
        FirstNode(Place(0, 2, master, 8118), SECRET, [], {}, 1.0)


def test_kill_9_of_a_launcher_is_noticed_at_once(cluster, tmp_path):
    run = cluster(2)
    run.start(0)
    code = (
        "import sys, time; from pathlib import Path; from mindrlhf.launch.nodes.other import OtherNode;"
        "from mindrlhf.launch.nodes.place import Place;"
        f"OtherNode(Place(1, 2, '127.0.0.1', {run.port}), {SECRET!r}, lambda _: [], Path({str(tmp_path)!r}),"
        "limit_s=30, rejoins=False).serve(lambda resume: time.sleep(600))"
    )
    with subprocess.Popen([sys.executable, "-c", code]) as launcher:
        end_s = time.monotonic() + 30
        while not (0 in run.ranks and run.ranks[0].starts):
            assert time.monotonic() < end_s and launcher.poll() is None
            time.sleep(0.05)
        launcher.kill()
    run.threads[0].join(30)
    assert run.results[0] == 1
    assert "has closed the connection: it has ended, or was killed" in run.ranks[0].lines[0]
