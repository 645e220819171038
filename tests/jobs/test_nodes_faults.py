"""What becomes of a run over several pretended machines when one of them fails; docs/cluster.md promises it."""

import os
import signal
import subprocess

import pytest
import sanity_inputs
from machine_jobs import RECIPE, TIMEOUT_S, assert_same, assert_same_but_for_rounding, find, num_steps, one_machine
from machines import Machines
from slow_tests import SLOW

pytestmark = [pytest.mark.timeout(1800), SLOW]

ENDLESS = {"training__epochs": 1000, "run__max_steps": 5000, "checkpoint__every_steps": 1}


def assert_no_ranks_are_left(machines: Machines) -> None:
    for node in range(machines.num_nodes):
        lines = machines.processes(node).values()
        assert not [line for line in lines if "training.main" in line or "rollout.server" in line], lines


def break_and_wait(machines: Machines, action) -> list[int | None]:
    """Do it after two steps; the script of each machine goes on after the run has ended, so that leftovers are seen."""
    machines.wait_for(lambda: num_steps(machines) >= 3)  # the evaluation before the first is a line as well
    action()
    machines.wait_for(lambda: all("THE END" in machines.text(node) for node in range(machines.num_nodes)))
    assert_no_ranks_are_left(machines)
    (machines.directory / "go").touch()
    return machines.wait(TIMEOUT_S)


SCRIPT = """
train {options}
code=$?
echo THE END
until [ -e {directory}/go ]; do sleep 0.1; done
exit $code
"""


@pytest.fixture
def endless(start_machines, tmp_path):
    return lambda num_nodes, options="": start_machines(
        num_nodes, SCRIPT.format(options=options, directory=tmp_path / "machines_0"), **ENDLESS
    )


def test_kill_9_of_a_rank_of_another_node_is_named_on_all(endless):
    machines = endless(3)
    codes = break_and_wait(machines, lambda: os.kill(find(machines, 1, "rank"), signal.SIGKILL))
    assert all(codes), machines.all_text()
    for node in (0, 1, 2):
        assert "rank 1 was killed by SIGKILL" in machines.text(node), machines.all_text()
    for node in (0, 2):
        assert "node 1 (node1, 10.77.0.2) rank 1 was killed by SIGKILL" in machines.text(node), machines.all_text()


@pytest.mark.parametrize("node", [0, 1])
def test_an_interface_that_goes_down_is_named_on_both_sides(endless, node):
    machines = endless(2)
    codes = break_and_wait(machines, lambda: machines.cut(node))
    assert codes == [1, 1], machines.all_text()
    assert "node 1 (node1, 10.77.0.2) has not been heard of for 10 s" in machines.text(0), machines.all_text()
    assert "node 0 (10.77.0.1) has not been heard of for 10 s" in machines.text(1), machines.all_text()


@pytest.mark.parametrize("node", [0, 1])
def test_kill_9_of_a_launcher_ends_its_ranks_and_the_others(endless, node):
    machines = endless(2)
    break_and_wait(machines, lambda: os.kill(find(machines, node, "launcher"), signal.SIGKILL))
    named = {0: "node 0 (10.77.0.1)", 1: "node 1 (node1, 10.77.0.2)"}[node]
    assert f"{named} has closed the connection: it has ended, or was killed" in machines.text(1 - node)


def test_a_machine_without_power_is_named_by_the_others(start_machines):
    machines = start_machines(3, **ENDLESS)
    machines.wait_for(lambda: num_steps(machines) >= 3)
    machines.power_off(2)
    codes = machines.wait(TIMEOUT_S)
    assert codes[:2] == [1, 1] and codes[2] is None, machines.all_text()
    for node in (0, 1):
        assert "node 2 (node2, 10.77.0.3) has closed the connection" in machines.text(node), machines.all_text()


def test_a_run_goes_on_after_a_killed_rank_and_a_launcher_that_comes_back(
    start_machines,
    fault_inputs_dir,
    tmp_path,
):
    recipe = {"run__max_steps": 8, "checkpoint__every_steps": 1}
    # As Kubernetes would: what was killed is started again.
    machines = start_machines(2, "train --max-restarts 3 || train --max-restarts 3", **recipe)
    machines.wait_for(lambda: num_steps(machines) >= 3)
    os.kill(find(machines, 1, "rank"), signal.SIGKILL)
    machines.wait_for(lambda: "restart 1 of 3" in machines.text(0))
    before = num_steps(machines)
    machines.wait_for(lambda: num_steps(machines) > before)
    os.kill(find(machines, 1, "launcher"), signal.SIGKILL)
    assert machines.wait(TIMEOUT_S) == [0, 0], machines.all_text()
    assert "restart 2 of 3" in machines.text(0)
    assert_same(machines.directory / "run", one_machine(fault_inputs_dir, tmp_path / "one", 2, **recipe))


def test_three_machines_train_as_one(start_machines, fault_inputs_dir, tmp_path, monkeypatch):
    """With the sums of collectives: in shared memory, three numbers are added in another order."""
    machines = start_machines(3)
    assert machines.wait(TIMEOUT_S) == [0, 0, 0], machines.all_text()
    sanity_inputs.sum_by_collectives(tmp_path, monkeypatch)
    expected = one_machine(fault_inputs_dir, tmp_path / "one", 3)
    assert_same_but_for_rounding(machines.directory / "run", expected, RECIPE["run__max_steps"])


def test_sigterm_to_the_launcher_of_another_node_saves_and_ends_the_run(endless):
    machines = endless(2)
    codes = break_and_wait(machines, lambda: os.kill(find(machines, 1, "launcher"), signal.SIGTERM))
    assert codes == [0, 0], machines.all_text()
    assert "SIGTERM: step" in machines.text(0) and "is saved in" in machines.text(0)


SSH = """#!/usr/bin/env bash
# ssh -o BatchMode=yes HOST COMMAND, to a pretended machine
exec nsenter -t "$(cat {directory}/pid_$3)" -a bash -c "$4"
"""


def test_a_file_of_hosts_runs_the_same_line_on_all_of_them(start_machines, fault_inputs_dir, tmp_path):
    machines = start_machines(2, "sleep 1000")
    machines.wait_for(lambda: machines.processes(0) and machines.processes(1))
    hosts = ["10.77.0.1", "10.77.0.2"]
    for node, host in enumerate(hosts):
        (machines.directory / f"pid_{host}").write_text(str(min(machines.processes(node))))
    (tmp_path / "hosts.txt").write_text("# two machines\n" + "\n".join(hosts))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ssh").write_text(SSH.format(directory=machines.directory))
    (tmp_path / "bin" / "ssh").chmod(0o755)
    recipe = {**RECIPE, "data__eval_file": fault_inputs_dir / "prompts.mindrecord"}
    words = sanity_inputs.overrides(fault_inputs_dir, machines.directory / "run", **recipe)
    finished = subprocess.run(
        sanity_inputs.command("train", "examples/sanity/config.yaml", *words, "--hostfile", tmp_path / "hosts.txt"),
        cwd=sanity_inputs.REPOSITORY,
        env={**sanity_inputs.environment(), "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert_same(machines.directory / "run", one_machine(fault_inputs_dir, tmp_path / "one", 2))
