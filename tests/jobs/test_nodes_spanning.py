"""A run on pretended machines whose one rollout server lies over both: the same as on one machine."""

import os
import re
import signal

import pytest
from machine_jobs import TIMEOUT_S, assert_same_but_for_rounding, find, num_steps, one_machine
from slow_tests import SLOW
from test_listeners import listening_addresses

from mindrlhf.system.processes import descendants

pytestmark = [SLOW, pytest.mark.timeout(1500)]

RECIPE = {"rollout__tensor_parallel": 2, "evaluation__every_steps": 0}


def test_a_server_over_two_machines_trains_as_one_on_one_machine(start_machines, fault_inputs_dir, tmp_path):
    machines = start_machines(2, **RECIPE)
    assert machines.wait(TIMEOUT_S) == [0, 0], machines.all_text()
    logs = machines.directory / "run" / "logs"
    assert (logs / "rollout_0.log").exists() and (logs / "rollout_node1" / "rollout_0_part.log").exists()
    assert not (logs / "rollout_node1" / "rollout_0.log").exists(), "the other machine has no server of its own"
    expected = one_machine(fault_inputs_dir, tmp_path / "one", 2, **RECIPE)
    assert_same_but_for_rounding(machines.directory / "run", expected, 2)


@pytest.mark.parametrize("node", [0, 1])
def test_a_part_that_is_killed_is_named_and_the_server_started_again(start_machines, node):
    machines = start_machines(2, **RECIPE, run__max_steps=4)
    machines.wait_for(lambda: num_steps(machines) >= 2, TIMEOUT_S)
    for each in range(2):  # what vLLM listens at is the address of its machine
        server = find(machines, each, "rollout server")
        pids = [server, *(status.pid for status in descendants(server))]
        assert {address for pid in pids for address, _ in listening_addresses(pid)} == {f"10.77.0.{each + 1}"}
    pid = find(machines, node, "rollout server")
    os.kill(pid, signal.SIGKILL)
    assert machines.wait(TIMEOUT_S) == [0, 0], machines.all_text()
    who = "has lost its part on node 1, which" if node else "the rollout server"
    line = rf"{who} \(process \d+\) was killed by signal 9 \(SIGKILL\)"
    assert len(re.findall(line, machines.text(0))) == 1, machines.all_text()
    assert num_steps(machines) == 1 + 4
    assert "starting it again (1 restarts left)" in machines.text(0)
