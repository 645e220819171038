"""Runs over pretended machines that a cluster of the real Ray starts: equal to one machine, and what faults cost.

Ray is the one that can be imported, else the package index's of today, into a directory of the test.
"""

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from machine_jobs import TIMEOUT_S, assert_same, num_steps
from slow_tests import SLOW

pytestmark = [pytest.mark.timeout(1800), SLOW]
# What it needs beside the product's requirements.
PACKAGES = ("ray>=2.52,<3", "msgpack", "jsonschema", "jsonschema-specifications", "referencing", "rpds-py")
NODE = """
export PYTHONPATH=$PWD:{ray} HOME=/tmp RAY_USAGE_STATS_ENABLED=0 {token}
ray() {{ {python} -c 'from ray.scripts.scripts import main; main()' "$@"; }}
start() {{
    ray start --node-ip-address=$NODE_IP --num-cpus=1 --object-store-memory=80000000 --disable-usage-stats "$@"
}}
if [ $NODE_RANK = 0 ]; then
    start --head --port=6399 --include-dashboard=false
    until [ -e {directory}/up ]; do sleep 0.2; done
    SHAPE="--ray 10.77.0.1:6399 --nodes 2"
    {run}
    code=$?
    touch {directory}/over
else
    until start --address=10.77.0.1:6399; do sleep 1; done
    touch {directory}/up
    until [ -e {directory}/over ]; do sleep 0.2; done
    code=0
fi
(exit $code)
"""
TOKEN = "RAY_AUTH_MODE=token RAY_AUTH_TOKEN=0123456789abcdef0123456789abcdef"


@pytest.fixture(scope="session")
def ray_directory(tmp_path_factory) -> Path:
    if found := os.environ.get("MINDRLHF_TEST_RAY"):
        return Path(found)
    if importlib.util.find_spec("ray"):
        return Path(importlib.util.find_spec("ray").origin).parents[1]
    directory = tmp_path_factory.mktemp("ray")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", directory, *PACKAGES]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=900)
    if ended.returncode:
        pytest.skip(f"Ray cannot be had: {ended.stderr[-300:]}")
    return directory


# In the place of the launcher: it holds on to its lifeline, and ends when a file says so.
STAND_IN = """
import os, signal, sys, time
from mindrlhf.launch.nodes.over_ssh import hold_on_to_lifeline
hold_on_to_lifeline()
signal.signal(signal.SIGUSR1, lambda *_: print("SIGUSR1 came", flush=True))
print("stand-in", *sys.argv[1:], *sorted(name for name in os.environ if name.startswith(("RAY", "OMP"))), flush=True)
while not os.path.exists("{directory}/end"):
    time.sleep(0.05)
"""
DRIVER = """
import sys
from mindrlhf.launch.nodes import over_ray
make = over_ray._RayRun.__init__
def with_stand_in(self, *arguments):
    make(self, *arguments)
    self._words[1:4] = ["{directory}/stand_in.py"]
over_ray._RayRun.__init__ = with_stand_in
sys.exit(over_ray.run_over_ray(["train"], "10.77.0.1:6399", "2", 1, max_restarts={max_restarts}))
"""


@pytest.fixture
def ray_machines(start_machines, ray_directory, tmp_path):
    def start(options="", token=TOKEN, run="", **changes):
        words = {"ray": ray_directory, "token": token, "python": sys.executable, "directory": tmp_path / "machines_0"}
        script = NODE.format(run=run or f"train {options}", **words)
        return start_machines(2, script, (ray_directory,), rollout__num_replicas=2, **changes)

    return start


@pytest.fixture
def stand_ins(ray_machines, tmp_path):
    """Start a cluster whose nodes run stand-ins for launchers."""

    def start(max_restarts=0):
        directory = tmp_path / "machines_0"
        machines = ray_machines(run=f"{sys.executable} {directory}/driver.py")
        (directory / "driver.py").write_text(DRIVER.format(directory=directory, max_restarts=max_restarts))
        (directory / "stand_in.py").write_text(STAND_IN.format(directory=directory))
        machines.wait_for(lambda: machines.text(0).count("stand-in train --nodes 2") == 2)
        return machines

    return start


def processes(machines, node: int) -> dict[int, str]:
    """Return the command lines of a machine's processes: launchers do not have the variables that mark the others."""
    name = os.readlink(f"/proc/{min(machines.processes(node))}/ns/uts")
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(path / "ns" / "uts") == name:
                found[int(path.name)] = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
    return found


def kill(machines, node: int, words: str) -> float:
    """Kill the first process of a machine whose command line has ``words``; return when."""
    found = processes(machines, node).items()
    os.kill(min(pid for pid, line in found if words in line and "bash " not in line), signal.SIGKILL)
    return time.monotonic()


def wait_for_words(machines, words: str, since_s: float, times: int = 1) -> None:
    machines.wait_for(lambda: machines.text(0).count(words) >= times)
    print(f"{words!r} after {time.monotonic() - since_s:.1f} s")


def finish(machines) -> list[int | None]:
    (machines.directory / "over").touch()
    (machines.directory / "go").touch()
    return machines.wait(TIMEOUT_S)


LAUNCHER, AGENT, RAYLET, HEAD = "-m mindrlhf.cli train", "ray::NodeAgent", "raylet/raylet", "gcs/gcs_server"


def left(machines, node: int) -> list[str]:
    kinds = ("training.main", "rollout.server", "sandbox.pool_node", "sandbox.worker")
    return [line for line in processes(machines, node).values() if any(kind in line for kind in kinds)]


def stand_ins_left(machines, node: int) -> list[str]:
    return [line for line in processes(machines, node).values() if "stand_in.py" in line]


def test_launchers_are_started_told_and_ended_by_their_agents(stand_ins):
    machines = stand_ins()
    said = machines.text(0)
    assert "stand-in train --nodes 2 --master 10.77.0.1:8118 --node-rank 0 OMP_NUM_THREADS\n" in said, said
    assert "[node 1] stand-in train --nodes 2 --master 10.77.0.1:8118 --node-rank 1 OMP_NUM_THREADS\n" in said, said
    (driver,) = [pid for pid, line in processes(machines, 0).items() if line.endswith("driver.py ")]
    os.kill(driver, signal.SIGUSR1)
    machines.wait_for(lambda: "SIGUSR1 came" in machines.text(0))
    assert "[node 1] SIGUSR1 came" not in machines.text(0)
    since_s = time.monotonic()
    os.kill(driver, signal.SIGKILL)
    machines.wait_for(lambda: not stand_ins_left(machines, 0) and not stand_ins_left(machines, 1), 60)
    print(f"nothing is left {time.monotonic() - since_s:.1f} s after the driver was killed")
    finish(machines)


@pytest.mark.parametrize("what", [AGENT, "stand_in.py", RAYLET, HEAD], ids=["agent", "launcher", "raylet", "head"])
def test_what_is_lost_is_noticed_and_leaves_nothing(stand_ins, what):
    machines = stand_ins(max_restarts=1)
    since_s = kill(machines, 0 if what == HEAD else 1, what)
    if what != HEAD:
        how = "its launcher was killed by signal 9" if what == "stand_in.py" else "its agent is lost"
        wait_for_words(machines, f"node 1: {how}", since_s)
    if what in (AGENT, "stand_in.py"):
        wait_for_words(machines, "[node 1] stand-in", since_s, 2)
        assert machines.text(0).count("--master 10.77.0.1:8118 --node-rank 0") == 1, "node 0 went on"
        (machines.directory / "end").touch()
    else:
        machines.wait_for(lambda: not stand_ins_left(machines, 1), 120)
        print(f"the launcher of node 1 ended after {time.monotonic() - since_s:.1f} s")
    if what == RAYLET:
        (machines.directory / "end").touch()
    machines.wait_for(lambda: "THE END" in machines.text(0), 180)
    print(f"over after {time.monotonic() - since_s:.1f} s")
    assert not stand_ins_left(machines, 0)
    code = finish(machines)[0]
    assert (code == 0) == (what in (AGENT, "stand_in.py")), machines.all_text()


def test_two_nodes_of_a_ray_cluster_train_as_one_machine_also_after_losses(ray_machines, one_machine):
    changes = {"checkpoint__every_steps": 1, "run__max_steps": 4}
    machines = ray_machines("--max-restarts 3", **changes)
    for number, what in enumerate((AGENT, LAUNCHER), 1):
        machines.wait_for(lambda number=number: num_steps(machines) > number)
        since_s = kill(machines, 1, what)
        how = "node 1: its agent is lost" if what == AGENT else "node 1: its launcher was killed by signal 9"
        wait_for_words(machines, how, since_s)
        wait_for_words(machines, "node 1 is started again", since_s, number)
        wait_for_words(machines, "mindrlhf: resumed after step", since_s, number)
    machines.wait_for(lambda: "THE END" in machines.text(0), TIMEOUT_S)
    assert "node 0 is node0 (10.77.0.1)" in machines.text(0), "rank 0 is on the head"
    assert finish(machines) == [0, 0], machines.all_text()
    assert_same(machines.directory / "run", one_machine(2, **changes))


@pytest.mark.parametrize("what", [RAYLET, HEAD], ids=["raylet", "head"])
def test_what_is_lost_of_ray_itself_ends_the_run_and_leaves_nothing(ray_machines, what):
    machines = ray_machines(run__max_steps=5000, training__epochs=1000, checkpoint__every_steps=1)
    machines.wait_for(lambda: num_steps(machines) > 1)
    since_s = kill(machines, 1 if what == RAYLET else 0, what)
    if what == RAYLET:
        wait_for_words(machines, "node 1: its agent is lost", since_s)
    machines.wait_for(lambda: "THE END" in machines.text(0), TIMEOUT_S)
    print(f"over after {time.monotonic() - since_s:.1f} s")
    machines.wait_for(lambda: not left(machines, 0) and not left(machines, 1), 60)
    print(f"nothing left after {time.monotonic() - since_s:.1f} s")
    assert finish(machines)[0] not in (0, None), machines.all_text()


def test_a_cluster_that_lets_everybody_in_is_refused(ray_machines):
    machines = ray_machines(token="RAY_AUTH_MODE=disabled")
    machines.wait_for(lambda: "THE END" in machines.text(0), TIMEOUT_S)
    assert "error: the Ray cluster has no token on 10.77.0.1, 10.77.0.2" in machines.text(0), machines.all_text()
    assert finish(machines)[0] == 2
