"""The rest of the fault table over nodes: every kind of process on every node, slow links, wrong clocks, full disks.

What is named, and after how many seconds, is printed (``pytest -s``).
"""

import os
import shlex
import signal
import subprocess
import time

import pytest
import sanity_inputs
from fault_jobs import FAULTY_START
from machine_jobs import TIMEOUT_S, assert_same, find, num_steps, one_machine
from machines import Machines
from slow_tests import SLOW

from mindrlhf.system.processes import SERVER_PREFIX

pytestmark = [pytest.mark.timeout(1800), SLOW]

# What is killed, one after the other; the line that both nodes show, or none where the run goes on in place and who is
# started again is for its own node to say.
KILLS = [
    (0, "verifier worker", None),
    (0, "rollout server", None),
    (1, "rollout server", None),
    (1, "rank", "rank 1 was killed by SIGKILL"),
    (0, "rank", "rank 0 was killed by SIGKILL"),
    (0, "scheduler", "the scheduler was killed by SIGKILL"),
    (0, "msrun", "msrun was killed by SIGKILL"),
    (1, "msrun", "msrun was killed by SIGKILL"),
    (1, "launcher", "node 1 (node1, 10.77.0.2) has closed the connection"),
    (0, "launcher", "node 0 (10.77.0.1) has closed the connection"),
]


def named_s(machines: Machines, nodes: list[int], line: str, action) -> float:
    """Do it, and return after how many seconds all these nodes have said the line once more."""
    before, start_s = {node: machines.text(node).count(line) for node in nodes}, time.monotonic()
    action()
    machines.wait_for(lambda: all(machines.text(node).count(line) > before[node] for node in nodes))
    return time.monotonic() - start_s


def kill(machines: Machines, node: int, kind: str, line: str | None, num_restarts: int, of: int = 20) -> None:
    """Kill a process after two more steps, and wait until all nodes have named it and start again."""
    before = num_steps(machines)
    machines.wait_for(lambda: num_steps(machines) > before + 1)
    pid = find(machines, node, kind)
    if line is None:
        os.kill(pid, signal.SIGKILL)
        print(f"{kind} of node {node}: the run goes on", flush=True)
        return
    nodes = [1 - node] if kind == "launcher" else [0, 1]
    duration_s = named_s(machines, nodes, line, lambda: os.kill(pid, signal.SIGKILL))
    print(f"{kind} of node {node}: named after {duration_s:.1f} s", flush=True)
    if (kind, node) != ("launcher", 0):
        machines.wait_for(lambda: f"restart {num_restarts} of {of}" in machines.text(0))


def test_a_run_in_which_each_kind_of_process_is_killed_on_each_node_ends_like_the_undisturbed(
    start_machines, fault_inputs_dir, tmp_path
):
    recipe = {"run__max_steps": 60, "checkpoint__every_steps": 1, "rollout__restarts": 5}
    machines = start_machines(2, "until train --max-restarts 20 $again; do again=--resume; done", **recipe)
    num_restarts = 0
    for node, kind, line in KILLS:
        num_restarts += line is not None
        kill(machines, node, kind, line, num_restarts)
    assert machines.wait(TIMEOUT_S) == [0, 0], machines.all_text()
    assert f"restart {num_restarts + 1} of" not in machines.text(0), "what goes on in place costs no restart"
    assert_same(machines.directory / "run", one_machine(fault_inputs_dir, tmp_path / "one", 2, **recipe))


def test_a_slow_link_and_a_clock_that_jumps_by_hours_change_nothing(start_machines, fault_inputs_dir, tmp_path):
    packages = tmp_path / "packages"
    packages.mkdir()
    (packages / "mindrlhf").symlink_to(sanity_inputs.REPOSITORY / "mindrlhf")
    path, clocks = f"{FAULTY_START}:{packages}", tmp_path / "clocks"
    clocks.mkdir()
    recipe = {"run__max_steps": 4, "rollout__env": f"{{PYTHONPATH: '{path}'}}"}
    script = f"""
        if [ $NODE_RANK = 1 ]; then
            export PYTHONPATH={shlex.quote(path)} MINDRLHF_TEST_CLOCK_DIR={clocks}
            tc qdisc add dev eth0 root tbf rate 4mbit burst 32kbit latency 400ms || exit 77
        fi
        train
    """
    machines = start_machines(2, script, keep=(packages, clocks), **recipe)
    codes = machines.wait(TIMEOUT_S)
    if 77 in codes:
        pytest.skip("this kernel has no tbf to slow an interface")
    assert codes == [0, 0], machines.all_text()
    assert len(list(clocks.iterdir())) >= 3, "launcher, rank and server of node 1 have the bad clock"
    assert_same(machines.directory / "run", one_machine(fault_inputs_dir, tmp_path / "one", 2, **recipe))


def test_a_full_disk_of_another_node_is_named_on_all_and_the_run_goes_on_when_there_is_room(
    start_machines, fault_inputs_dir, tmp_path
):
    recipe = {"run__max_steps": 12, "checkpoint__every_steps": 1, "rollout__restarts": 1}
    script = """
        if [ $NODE_RANK = 1 ]; then
            mkdir -p /dev/shm/small; mount -t tmpfs -o size=8m,nr_inodes=500 tmpfs /dev/shm/small
            export TMPDIR=/dev/shm/small
        fi
        train --max-restarts 1
    """
    machines = start_machines(2, script, **recipe)
    machines.wait_for(lambda: num_steps(machines) >= 3)

    def on_node_1(command: str) -> None:
        subprocess.run(["nsenter", "-t", str(find(machines, 1, "launcher")), "-a", "bash", "-c", command], check=True)

    def fill() -> None:
        # What a dead server leaves is removed first, which would make room for the next: the test removes it itself,
        # while the rank cannot start another.
        rank = find(machines, 1, "rank")
        os.kill(rank, signal.SIGSTOP)
        os.kill(find(machines, 1, "rollout server"), signal.SIGKILL)
        on_node_1(f"rm -rf /dev/shm/small/{SERVER_PREFIX}*")
        on_node_1("for i in {1..500}; do : > /dev/shm/small/$i || break; done 2>/dev/null; true")
        os.kill(rank, signal.SIGCONT)

    duration_s = named_s(machines, [0, 1], "No space left on device", fill)
    print(f"full disk of node 1: named after {duration_s:.1f} s", flush=True)
    on_node_1("rm -f /dev/shm/small/[0-9]*")
    assert machines.wait(TIMEOUT_S) == [0, 0], machines.all_text()
    assert_same(machines.directory / "run", one_machine(fault_inputs_dir, tmp_path / "one", 2, **recipe))


def test_a_spare_takes_the_place_of_a_machine_that_loses_power(start_machines, fault_inputs_dir, tmp_path):
    recipe = {"run__max_steps": 8, "checkpoint__every_steps": 1}
    machines = start_machines(3, "train --nodes 2 --spares 1 --max-restarts 2", **recipe)
    machines.wait_for(lambda: num_steps(machines) >= 3)
    assert "is a spare: it waits" in machines.text(2) and "starting" not in machines.text(2)
    machines.power_off(1)
    assert machines.wait(TIMEOUT_S)[::2] == [0, 0], machines.all_text()
    line = "node 2 (node2, 10.77.0.3) takes the place of node 1"
    assert line in machines.text(0) and line in machines.text(2)
    assert_same(machines.directory / "run", one_machine(fault_inputs_dir, tmp_path / "one", 2, **recipe))


def test_nodes_that_keep_their_checkpoints_themselves_resume_from_the_newest_that_all_hold(
    start_machines, fault_inputs_dir, tmp_path
):
    recipe = {"run__max_steps": 14, "checkpoint__every_steps": 1}
    own = {"checkpoint__node_local": "true", "checkpoint__save_dir": "/dev/shm/checkpoints"}  # each machine has its own
    machines = start_machines(2, "train --max-restarts 3", **recipe, **own)
    machines.wait_for(lambda: num_steps(machines) >= 3)  # so that there is a checkpoint
    kill(machines, 1, "rank", "rank 1 was killed by SIGKILL", 1, of=3)
    machines.wait_for(lambda: "mindrlhf: resumed after step" in machines.text(0))
    assert machines.wait(TIMEOUT_S) == [0, 0], machines.all_text()
    assert_same(machines.directory / "run", one_machine(fault_inputs_dir, tmp_path / "one", 2, **recipe))
