"""Nodes of a Ray cluster: which of them, with which environment, and what is done when one is lost; without Ray."""

import os
import queue
import sys
import threading
import types

import pytest

from mindrlhf.cli import main
from mindrlhf.errors import UserError
from mindrlhf.launch.nodes import over_ray
from mindrlhf.launch.nodes.over_ray import NodeAgent, child_environment, choose_nodes, run_over_ray

pytestmark = pytest.mark.timeout(60)
HEAD = {"node:__internal_head__": 1.0}


def node(address, alive=True, **resources):
    given = {"CPU": 4.0, f"node:{address}": 1.0, **resources}
    return {"Alive": alive, "NodeManagerAddress": address, "Resources": given}


@pytest.mark.parametrize(
    "offers, workers, nodes, spares, expected",
    [
        # Rank 0 is on the head where that has room, else on the first address.
        ([node("10.0.0.9"), node("10.0.0.1") | {"Resources": {"CPU": 4.0, **HEAD}}], 2, None, 0, ("CPU", 2, *HEAD)),
        ([node("b", NPU=8.0), node("a", NPU=8.0), node("c") | {"Resources": HEAD}], 8, "2", 0, ("NPU", 2, "node:a")),
        ([node("b", NPU=8.0), node("a", NPU=4.0), node("c", NPU=8.0)], 8, "auto", 1, ("NPU", 2, "node:b")),
        ([node("a"), node("b", alive=False), node("c")], 4, None, 0, ("CPU", 2, "node:a")),
    ],
)
def test_nodes_with_room_get_a_share_each_and_rank_0_a_fixed_one(offers, workers, nodes, spares, expected):
    kind, number, first = expected
    bundles = choose_nodes(offers, workers, nodes, spares)
    assert bundles == [{kind: workers, first: 0.001}, *[{kind: workers}] * (number - 1)]


@pytest.mark.parametrize(
    "offers, workers, nodes, spares, message",
    [
        ([node("a"), node("b")], 8, "2", 0, r"--nodes 2 needs 2 nodes with 8 CPUs, but .* has 0 \(CPUs by"),
        ([node("a", NPU=8.0), node("b")], 8, "2", 0, r"has 1 \(NPUs by node: a 8, b 0\): give fewer"),
        ([node("a"), node("b")], 1, "2", 1, r"--nodes 2 --spares 1 needs 3 nodes"),
        ([node("a")], 1, None, 1, r"--nodes auto --spares 1 needs 2 nodes"),
        ([], 1, None, 0, r"needs 1 nodes with 1 CPUs, but the Ray cluster has 0 \(CPUs by node: none\)"),
        ([node("a")], 1, "0", 0, r"--nodes is 0: give a number"),
        ([node("a")], 1, "two", 0, r"--nodes is two: give a number"),
        ([node("a")], 1, "-1", 0, r"--nodes is -1: give a number"),
    ],
)
def test_too_few_nodes_are_told_with_what_there_is(offers, workers, nodes, spares, message):
    with pytest.raises(UserError, match=message):
        choose_nodes(offers, workers, nodes, spares)


def test_a_launcher_gets_what_is_listed_and_nothing_of_rays():
    theirs = {
        "PATH": "/bin",
        "ASCEND_RT_VISIBLE_DEVICES": "0,1",
        "OMP_NUM_THREADS": "1",
        "PYTHONBREAKPOINT": "ray.util.rpdb.set_trace",
        "PYTHONUNBUFFERED": "1",
        "RAY_AUTH_TOKEN": "secret",
        "RAY_AUTH_MODE": "token",
        "OPENAI_API_KEY": "key",
        "MINDRLHF_ROLLOUT_PYTHON": "theirs",
        "PYTHONPATH": "of Ray",
        "SOMETHING": "else",
    }
    ours = {"MINDRLHF_ROLLOUT_PYTHON": "ours", "PYTHONPATH": "/repository", "PATH": "/ours", "RAY_AUTH_TOKEN": "secret"}
    assert child_environment(theirs, ours) == {
        "PATH": "/bin",
        "ASCEND_RT_VISIBLE_DEVICES": "0,1",
        "OPENAI_API_KEY": "key",
        "MINDRLHF_ROLLOUT_PYTHON": "ours",
        "PYTHONPATH": "/repository",
        "MINDRLHF_LIFELINE": "ray",
    }
    assert child_environment({}, {"OMP_NUM_THREADS": "4"})["OMP_NUM_THREADS"] == "4"


class FakeRay:
    """Actors are objects of this process, whose calls threads make."""

    class exceptions:
        class RayError(Exception):
            pass

    def __init__(self, offers, tokens=True):
        self.offers, self.tokens, self.agents, self.killed = offers, tokens, [], []
        self.util = types.SimpleNamespace(
            placement_group=lambda bundles, strategy: types.SimpleNamespace(wait=lambda limit_s: True),
            scheduling_strategies=types.SimpleNamespace(
                PlacementGroupSchedulingStrategy=lambda group, **bundle: bundle["placement_group_bundle_index"]
            ),
        )

    def nodes(self):
        return self.offers

    def shutdown(self):
        for agent in self.agents:
            agent.end()

    def kill(self, agent):
        self.killed.append(agent.number)

    def get(self, value, timeout=None):
        if isinstance(value, list):
            return [self.get(one) for one in value]
        if isinstance(value, BaseException):
            raise value
        return value

    def remote(self, **options):
        def options_of(resources, scheduling_strategy):
            def make():
                self.agents.append(FakeAgent(self, scheduling_strategy, resources))
                return self.agents[-1]

            return types.SimpleNamespace(remote=make)

        return lambda cls: types.SimpleNamespace(options=options_of)


class FakeAgent(NodeAgent):
    def __init__(self, ray, number, resources):
        self.ray, self.number, self.resources = ray, number, resources
        self.process = None
        for name in ("place", "start", "wait", "tell"):
            setattr(self, name, types.SimpleNamespace(remote=getattr(self, f"_{name}")))
        self.output = types.SimpleNamespace(options=lambda num_returns: types.SimpleNamespace(remote=self._output))

    def _place(self):
        return {"address": f"10.0.0.{self.number}", "host": f"host{self.number}", "has_token": self.ray.tokens}

    def _start(self, words, directory, ours):
        return NodeAgent.start(self, words, directory, ours)

    def _wait(self):
        return NodeAgent.wait(self)

    def _tell(self, number):
        NodeAgent.tell(self, number)

    def _output(self):
        yield from NodeAgent.output(self)
        if self.ray.is_lost(self):
            yield FakeRay.exceptions.RayError("gone")

    def end(self):
        if self.process is not None:
            self.process.stdin.close()
            self.process.kill()
            self.process.wait()


# In place of `-m mindrlhf.cli`: says what it was given, then does as the first word says for its node and this start.
LAUNCHER = """
import os, signal, sys, time
node = sys.argv[sys.argv.index("--node-rank") + 1] if "--node-rank" in sys.argv else "0"
path = os.path.join(os.environ["MINDRLHF_TEST_DIR"], node)
open(path, "a").write(".")
times = len(open(path).read())
print(*sys.argv[2:], flush=True)
deed = dict(one.split("=") for one in sys.argv[1].split(",")).get(f"{node}.{times}", "0")
if deed == "line":
    print("told", sys.stdin.readline().strip(), flush=True)
elif deed == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
elif deed.startswith("wait"):
    while not os.path.exists(path[:-1] + deed[4:]) or len(open(path[:-1] + deed[4:]).read()) < 2:
        time.sleep(0.02)
else:
    sys.exit(int(deed))
"""


@pytest.fixture
def run(tmp_path, monkeypatch, capfd):
    """Run words on a cluster of fakes: ``run(deeds, offers, ...)`` returns exit code, output and the fake."""
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    monkeypatch.setenv("MINDRLHF_TEST_DIR", str(tmp_path))

    def start(deeds, offers=None, tokens=True, lost=(), while_it_runs=None, **options):
        ray = FakeRay(offers or [node("a"), node("b")], tokens)
        losses = list(lost)
        ray.is_lost = lambda agent: agent.number in losses and (losses.remove(agent.number) or True)
        monkeypatch.setattr(over_ray, "_connect", lambda address: ray)
        actual = over_ray._RayRun.__init__

        def with_launcher(self, *arguments):
            actual(self, *arguments)
            self._words[1:4] = [str(tmp_path / "launcher.py"), deeds]

        monkeypatch.setattr(over_ray._RayRun, "__init__", with_launcher)
        if while_it_runs:
            threading.Thread(target=while_it_runs, args=(ray,), daemon=True).start()
        code = run_over_ray(["train", "x.yaml"], "auto", options.pop("nodes", None), 1, **options)
        return code, capfd.readouterr(), ray

    return start


def test_each_node_runs_the_command_with_its_number_and_the_address_of_node_0(run):
    code, said, ray = run("0.1=0,1.1=3")
    assert code == 3
    line = "train x.yaml --nodes 2 --master 10.0.0.0:8118 --node-rank"
    assert sorted(said.out.splitlines()) == [f"[node 1] {line} 1", f"{line} 0"]
    assert "node 0 is host0 (10.0.0.0)" in said.err and ray.killed == []


def test_one_node_is_a_run_without_nodes(run):
    code, said, _ = run("0.1=0", offers=[node("a")])
    assert (code, said.out) == (0, "train x.yaml\n")


def test_all_npus_of_a_share_are_asked_for(run):
    _, _, ray = run("0.1=0", offers=[node("a", NPU=1.0), node("b", NPU=1.0)])
    assert [agent.resources for agent in ray.agents] == [{"NPU": 1}] * 2


def test_spares_are_nodes_too(run):
    _, said, ray = run("0.1=0", offers=[node("a"), node("b"), node("c")], nodes="2", num_spares=1)
    assert len(ray.agents) == 3 and "[node 2] train x.yaml --nodes 2 --spares 1 --master" in said.out


@pytest.mark.parametrize("how", ["agent", "launcher"])
def test_another_node_that_is_lost_is_started_again_as_often_as_the_run(run, how):
    deeds = "0.1=wait1,1.1=kill" if how == "launcher" else "0.1=wait1"
    code, said, ray = run(deeds, lost=[1] if how == "agent" else [], max_restarts=1)
    assert code == 0
    assert ("its launcher was killed by signal 9" if how == "launcher" else "its agent is lost (RayError)") in said.err
    assert "node 1 is started again" in said.err and ray.killed == [1]
    assert [agent.number for agent in ray.agents] == [0, 1, 1]


def test_without_restarts_a_lost_node_is_told_and_fails_the_run(run):
    code, said, ray = run("0.1=1", lost=[1])
    assert code == 1 and "node 1: its agent is lost (RayError)" in said.err and len(ray.agents) == 2


def test_the_agent_of_node_0_is_not_started_again(run):
    code, said, ray = run("0.1=0,1.1=0", lost=[0], max_restarts=3)
    assert code == 1 and "node 0: its agent is lost" in said.err
    assert [agent.number for agent in ray.agents] == [0, 1]


def test_a_cluster_without_tokens_is_refused_unless_the_user_says_so(run):
    with pytest.raises(UserError, match=r"no token on 10\.0\.0\.0, 10\.0\.0\.1: .*=token.*--ray-without-token"):
        run("0.1=0", tokens=False)
    assert run("0.1=0", tokens=False, may_lack_token=True)[0] == 0


def test_a_signal_goes_to_node_0(run):
    import signal

    started = queue.SimpleQueue()

    def send(ray):
        while not (ray.agents and ray.agents[0].process):
            pass
        os.kill(os.getpid(), signal.SIGUSR1)
        started.put(True)

    code, said, _ = run("0.1=line", while_it_runs=send)
    assert code == 0 and f"told {int(signal.SIGUSR1)}" in said.out


def test_an_interpreter_that_is_not_there_is_told(run, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    code, said, _ = run("0.1=0")
    assert code == 1 and "/nowhere/python does not start in" in said.err and "same place on all nodes" in said.err


@pytest.mark.parametrize(
    "words, message",
    [
        (["--ray", "--hostfile", "x"], "--hostfile and --ray are both given"),
        (["--ray", "--node-rank", "0"], "--ray numbers the nodes itself: leave out --node-rank"),
        (["--ray", "--elastic", "--role", "rollout"], "--role is rollout, but --ray starts"),
        (["--ray", "--spares", "1"], "--spares is 1, but --max-restarts is 0"),
        (["--ray"], "--ray needs the package ray: pip install"),
        (["--ray", "run.seed=3"], "--ray needs the package ray: pip install"),
    ],
)
def test_what_does_not_go_together_is_told(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)  # as where it is not installed
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x").write_text("a\nb\n")
    assert main(["train", "x.yaml", *words]) == 2
    assert message in capsys.readouterr().err
