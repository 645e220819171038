"""Launchers on pretended machines, with nothing in place of the ranks: what each says when another is lost."""

import os
import shlex
import signal
import sys
from pathlib import Path

import pytest
from machines import Machines

pytestmark = pytest.mark.timeout(300)

TIMEOUT_S = 200  # generous: other work may load the machine
ROOT = Path(__file__).parents[3]
DRIVER = """
import sys, time
from pathlib import Path
from mindrlhf.launch.nodes.first import FirstNode
from mindrlhf.launch.nodes.other import OtherNode
from mindrlhf.launch.nodes.place import Place

node, num_nodes, directory = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
secret = sys.argv[4].encode()  # of a test: no real one stands there
place = Place(node, num_nodes, "10.77.0.1", 8118)

def start_with(peers):
    def start(resume):
        (directory / f"started_{node}").touch()
        while (ending := peers.ending()) is None:
            time.sleep(0.05)
        print(ending.line, flush=True)
        return ending.code
    return start

if node == 0:
    with FirstNode(place, secret, [], {}, 100) as nodes:
        code = nodes.attempt(False, start_with(nodes))
        nodes.close(code)
else:
    other = OtherNode(place, secret, lambda _: [], directory / f"logs_{node}", limit_s=100, rejoins=False)
    code = other.serve(start_with(other))
sys.exit(code)
"""


@pytest.fixture
def start(tmp_path):
    started = []

    def run(num_nodes: int, secrets: tuple[str, ...] = ()) -> Machines:
        secrets = secrets or ("a secret of some length",) * num_nodes
        (tmp_path / "driver.py").write_text(DRIVER)
        words = shlex.join(secrets)
        script = f"""
            cd {shlex.quote(str(ROOT))}
            export PYTHONPATH=$PWD
            secrets=({words})
            {sys.executable} {tmp_path}/driver.py $NODE_RANK $NODES {tmp_path} "${{secrets[$NODE_RANK]}}"
        """
        started.append(Machines(tmp_path, script, num_nodes, keep=(ROOT,)))
        return started[-1]

    yield run
    for machines in started:
        machines.clean_up()


def wait_for_start(machines: Machines) -> None:
    nodes = range(machines.num_nodes)
    machines.wait_for(lambda: all((machines.directory / f"started_{node}").exists() for node in nodes), TIMEOUT_S)


def test_an_interface_that_goes_down_is_named_on_both_sides_and_by_the_third(start):
    machines = start(3)
    wait_for_start(machines)
    machines.cut(1)
    assert machines.wait(TIMEOUT_S) == [1, 1, 1], machines.all_text()
    for node in (0, 2):
        # After 10 s, or when a busy machine looks again.
        assert "node 1 (node1, 10.77.0.2) has not been heard of for 1" in machines.text(node), machines.all_text()
    assert "node 0 (10.77.0.1) has not been heard of for 1" in machines.text(1), machines.all_text()


@pytest.mark.parametrize("node", [0, 2])
def test_a_machine_without_power_is_named_by_the_others(start, node):
    machines = start(3)
    wait_for_start(machines)
    machines.power_off(node)
    codes = machines.wait(TIMEOUT_S)
    assert codes[node] is None and sum(code == 1 for code in codes) == 2, machines.all_text()
    named = {0: "node 0 (10.77.0.1)", 2: "node 2 (node2, 10.77.0.3)"}[node]
    for other in {0, 1, 2} - {node}:
        assert f"{named} has closed the connection" in machines.text(other), machines.all_text()


def test_a_wrong_secret_is_named_on_both_machines(start):
    machines = start(2, ("a secret of some length", "another secret of some length"))
    machines.wait_for(lambda: machines.code(1) is not None, TIMEOUT_S)
    assert "node 0 at 10.77.0.1:8118 and this node do not know each other" in machines.text(1)
    machines.wait_for(lambda: "node 1 of 2 has not come" in machines.text(0), TIMEOUT_S)
    assert "a connection from 10.77.0.2 was turned away: it does not know the secret" in machines.text(0)
    os.kill(machines.find(0, "driver.py"), signal.SIGKILL)
    machines.wait(TIMEOUT_S)
