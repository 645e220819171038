"""Nodes for rollout only on pretended machines: they come, die, leave and come again, and the run stays the same."""

import os
import re
import signal
import time
from pathlib import Path

import pytest
from machine_jobs import TIMEOUT_S, assert_same_but_for_rounding, find, num_steps, one_machine
from machines import Machines
from slow_tests import SLOW

from mindrlhf.system.heartbeat import heartbeat_path, read_beat

pytestmark = [pytest.mark.timeout(900), SLOW]

NUM_STEPS = 40
ISSUED_AGAIN = re.compile(r"\d+ prompts of rollout nodes that are lost are issued again")
# Verifiers wait while there is a file, so that a test may hold the run for as long as a node needs to come.
VERIFIER = """
import time
from pathlib import Path

HOLD = Path(__file__).with_name("hold")


def lowercase(completion, answer):
    while HOLD.exists():
        time.sleep(0.05)
    return sum("a" <= one <= "z" for one in completion) / max(1, len(completion))
"""
READY = "is ready: it takes part from the next version of the weights on"
# The last machine is for rollout only.
SCRIPT = """
if [ $NODE_RANK = {last} ]; then SHAPE="{shape} --role rollout"; else SHAPE="{shape} --node-rank $NODE_RANK"; fi
{run}
"""


@pytest.fixture(scope="module")
def recipe(fault_inputs_dir) -> dict[str, object]:
    """What the runs have in common."""
    verifier = fault_inputs_dir / "held.py"
    verifier.write_text(VERIFIER)
    return {
        "run__max_steps": NUM_STEPS,
        "training__epochs": 100,
        "evaluation__every_steps": NUM_STEPS // 2,
        "reward__verifier_function": f"{verifier}:lowercase",
        "reward__timeout_s": 300,
        "rollout__stall_timeout_s": 60,
    }


@pytest.fixture(scope="module")
def undisturbed(recipe, fault_inputs_dir, tmp_path_factory) -> Path:
    """The run of one rank without such nodes."""
    return one_machine(fault_inputs_dir, tmp_path_factory.mktemp("undisturbed") / "run", 1, **recipe)


@pytest.fixture
def hold(recipe, fault_inputs_dir):
    """A file: while it is there, the run waits."""
    path = fault_inputs_dir / "hold"
    yield path
    path.unlink(missing_ok=True)


@pytest.fixture
def start_elastic(start_machines, recipe, hold):
    """Start machines of which the last is for rollout only."""

    def start(num_training: int = 1, run: str = "train") -> Machines:
        shape = f"--nodes {num_training} --elastic"
        script = SCRIPT.format(last=num_training, shape=shape, run=run)
        hold.touch()
        machines = start_machines(num_training + 1, script, **recipe)
        # However slow it is: no step is made before it is there.
        machines.wait_for(lambda: machines.text(0).count(READY) == 1)
        hold.unlink()
        return machines

    return start


def wait_to_take_part(machines: Machines, times: int = 1) -> None:
    """Wait until the node for rollout only has taken part in a whole step."""
    machines.wait_for(lambda: machines.text(0).count("takes part from version") >= times)
    before = num_steps(machines)
    machines.wait_for(lambda: num_steps(machines) > before + 1)


def num_made(machines: Machines, node: int) -> int:
    """Return how many samples a node says it has made."""
    return sum(map(int, re.findall(r"this node has made (\d+) samples", machines.text(node))))


def kill_while_it_generates(machines: Machines, node: int, kill) -> None:
    """Stop a node's server while it owes samples, so that the run waits for them, before the node is killed."""
    server = machines.find(node, "-m mindrlhf.rollout.server ")
    deadline_s = time.monotonic() + TIMEOUT_S
    while True:
        os.kill(server, signal.SIGSTOP)
        since_s, activity = time.monotonic(), None
        # The run stands still: in the rollout, or where it gives the server new weights, and then nothing is owed.
        while time.monotonic() - since_s < 4:
            assert time.monotonic() < deadline_s, machines.all_text()
            if (now := read_beat(heartbeat_path(machines.directory / "run" / "logs", 0)).activity) != activity:
                since_s, activity = time.monotonic(), now
            time.sleep(0.1)
        if activity.endswith(": rollout"):
            return kill()
        os.kill(server, signal.SIGCONT)


def test_a_node_for_rollout_only_takes_its_share_of_the_prompts(start_elastic, undisturbed):
    machines = start_elastic()
    assert machines.wait(TIMEOUT_S) == [0, 0], machines.all_text()
    assert "rollout node node1, 10.77.0.2 takes part from version" in machines.text(0), machines.all_text()
    assert num_made(machines, 1) > 20, machines.all_text()
    assert_same_but_for_rounding(machines.directory / "run", undisturbed, NUM_STEPS)
    assert not list((machines.directory / "run").glob(".nodes_*")), "the secret and the probe are gone"


def test_the_run_goes_on_when_such_a_node_has_no_power_any_more(start_elastic, undisturbed):
    machines = start_elastic()
    wait_to_take_part(machines)
    kill_while_it_generates(machines, 1, lambda: machines.power_off(1))
    assert machines.wait(TIMEOUT_S) == [0, None], machines.all_text()
    text = machines.text(0)
    named = "rollout node node1, 10.77.0.2 has closed the connection"
    assert re.search(rf"{named}.*; the run goes on without it", text), text
    assert ISSUED_AGAIN.search(text), text
    assert_same_but_for_rounding(machines.directory / "run", undisturbed, NUM_STEPS)


def test_the_run_goes_on_when_such_a_node_is_cut_off(start_elastic, undisturbed):
    machines = start_elastic()
    wait_to_take_part(machines)
    kill_while_it_generates(machines, 1, lambda: machines.cut(1))
    codes = machines.wait(TIMEOUT_S)
    assert codes[0] == 0 and codes[1] == 1, machines.all_text()
    named = "rollout node node1, 10.77.0.2 has not been heard of"
    assert named in machines.text(0), machines.text(0)
    assert_same_but_for_rounding(machines.directory / "run", undisturbed, NUM_STEPS)


def test_a_killed_node_comes_again_and_takes_part(start_elastic, undisturbed, hold):
    # As Kubernetes would: what was killed is started again.
    machines = start_elastic(run="until train; do :; done")
    wait_to_take_part(machines)
    launcher = find(machines, 1, "launcher")
    kill_while_it_generates(machines, 1, lambda: (hold.touch(), os.kill(launcher, signal.SIGKILL)))
    machines.wait_for(lambda: machines.text(0).count(READY) == 2)
    hold.unlink()
    wait_to_take_part(machines, 2)
    assert machines.wait(TIMEOUT_S) == [0, 0], machines.all_text()
    assert ISSUED_AGAIN.search(machines.text(0)), machines.text(0)
    assert_same_but_for_rounding(machines.directory / "run", undisturbed, NUM_STEPS)


# The machine for rollout only sees an empty directory in the place of the run's.
OWN_DIRECTORY = """
export MINDRLHF_SECRET=a_secret_of_some_length
mkdir -p {run}
if [ $NODE_RANK = 1 ]; then mkdir /tmp/empty; mount --bind /tmp/empty {run}; fi
train
"""


def test_sigterm_has_the_node_leave_in_good_order_and_it_need_not_share_a_directory(
    start_elastic, undisturbed, tmp_path
):
    machines = start_elastic(run=OWN_DIRECTORY.format(run=tmp_path / "machines_0" / "run"))
    wait_to_take_part(machines)
    os.kill(find(machines, 1, "launcher"), signal.SIGTERM)
    machines.wait_for(lambda: machines.code(1) is not None)
    assert num_steps(machines) < NUM_STEPS, "it left before the end"
    assert machines.wait(TIMEOUT_S) == [0, 0], machines.all_text()
    assert "rollout node node1, 10.77.0.2 leaves; the run goes on without it" in machines.text(0), machines.text(0)
    assert "rollout node node1, 10.77.0.2 has left" in machines.text(0), machines.text(0)
    assert "SIGTERM received: leaving the run" in machines.text(1) and "this node has left the run" in machines.text(1)
    assert_same_but_for_rounding(machines.directory / "run", undisturbed, NUM_STEPS)
    assert not list((machines.directory / "run" / "logs").glob("rollout_node1")), "its logs are on its own disk"


def test_the_node_takes_part_again_when_the_run_starts_again(start_elastic, undisturbed):
    machines = start_elastic(run="train --max-restarts 1 checkpoint.every_steps=1")
    wait_to_take_part(machines)
    os.kill(find(machines, 0, "rank"), signal.SIGKILL)
    assert machines.wait(TIMEOUT_S) == [0, 0], machines.all_text()
    assert "restart 1 of 1" in machines.text(0), machines.text(0)
    assert machines.text(1).count("starting vLLM") == 2, machines.text(1)
    assert_same_but_for_rounding(machines.directory / "run", undisturbed, NUM_STEPS)


def test_two_nodes_train_and_a_third_makes_samples(start_elastic, recipe, fault_inputs_dir, tmp_path):
    machines = start_elastic(2)
    assert machines.wait(TIMEOUT_S) == [0, 0, 0], machines.all_text()
    assert num_made(machines, 2) > 0, machines.all_text()
    expected = one_machine(fault_inputs_dir, tmp_path / "one", 2, **recipe)
    assert_same_but_for_rounding(machines.directory / "run", expected, NUM_STEPS)
