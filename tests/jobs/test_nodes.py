"""Runs over several pretended machines: equal to one machine with as many ranks, and refused where nodes differ."""

import os
import re
import signal

import pytest
import test_schedule_features
from machine_jobs import TIMEOUT_S, assert_same, find, num_steps, one_machine
from slow_tests import SLOW

pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize("is_disturbed", [False, pytest.param(True, marks=SLOW)], ids=["all there", "one lost"])
def test_two_machines_train_as_one_with_as_many_ranks(start_machines, fault_inputs_dir, tmp_path, is_disturbed):
    machines = start_machines(2, rollout__num_replicas=2)
    if is_disturbed:
        machines.wait_for(lambda: num_steps(machines) > 0)
        os.kill(find(machines, 1, "verifiers"), signal.SIGKILL)
    assert machines.wait(TIMEOUT_S) == [0, 0], machines.all_text()
    assert_same(machines.directory / "run", one_machine(fault_inputs_dir, tmp_path / "one", 2))
    # Each machine had a rollout server of its own, and verifiers.
    logs = machines.directory / "run" / "logs"
    said = "".join(path.read_text(errors="replace") for path in logs.rglob("worker_1.log"))
    if is_disturbed:
        assert "mindrlhf: the verifiers of node 1: has closed the connection" in machines.text(0)
    else:
        assert re.search(r"this node has scored \d+ samples for the run", said), said  # how many, the clock decides
    assert [path.name for path in logs.glob("rollout_*.log")] == ["rollout_0.log"], "one of two servers is here"
    assert [path.name for path in (logs / "rollout_node1").glob("*.log")] == ["rollout_0.log"], "the other is there"
    assert not list((machines.directory / "run").glob(".nodes_*")), "the secret and the probe are gone"


@SLOW
def test_agents_of_two_machines_are_those_of_one_with_as_many_ranks(start_machines, fault_inputs_dir, tmp_path):
    """Bit for bit: which of them runs an agent decides nothing."""
    made = tmp_path / "agent"
    test_schedule_features.make_agent(made)
    changes = test_schedule_features.AGENTS | {"tools__agent": f"{made / 'agent.py'}:agent"}
    changes |= {"model__path": made / "model"}
    changes |= {f"data__{kind}_file": made / "prompts.mindrecord" for kind in ("train", "eval")}
    changes |= {"data__tokenizer_dir": made / "model", "reward__verifier_function": "environment_reward"}
    changes |= {"rollout__num_replicas": 2, "tools__agents_at_once": 256}
    machines = start_machines(2, keep=(made,), **changes)
    assert machines.wait(TIMEOUT_S) == [0, 0], machines.all_text()
    assert_same(machines.directory / "run", one_machine(fault_inputs_dir, tmp_path / "one", 2, **changes))
    logs = machines.directory / "run" / "logs"
    said = "".join(path.read_text(errors="replace") for path in logs.rglob("worker_1.log"))
    assert re.search(r"this node has run [1-9]\d* agents for the run", said), said


DIFFERENCES = {
    "config": (
        "[ $NODE_RANK = 0 ] || set -- optimizer.start_lr=2e-3",
        r"'optimizer.start_lr' is 0.001 on node 0, 0.002 on node 1: start all nodes with the same config file",
    ),
    "version": (
        # The other machine sees one file with another line at its end.
        "if [ $NODE_RANK = 1 ]; then cp mindrlhf/cli.py /tmp; echo '# changed' >> /tmp/cli.py;"
        " mount --bind /tmp/cli.py mindrlhf/cli.py; fi",
        r'the code of mindrlhf is "\w+" on node 0, "\w+" on node 1: install the same on all nodes',
    ),
    "options": (
        "[ $NODE_RANK = 0 ] || set -- --max-restarts 3",
        r"--max-restarts is 0 on node 0, 3 on node 1: give all nodes the same --max-restarts",
    ),
    "output_dir": (
        "mkdir -p $RUN_PARENT; if [ $NODE_RANK = 1 ]; then mkdir /tmp/empty; mount --bind /tmp/empty $RUN_PARENT; fi; "
        "export MINDRLHF_SECRET=a_secret_of_some_length",
        r"run.output_dir is \"the directory of node 0\" on node 0, .* on node 1: put it on a file system that all",
    ),
}


@pytest.mark.parametrize("what", [what if what == "config" else pytest.param(what, marks=SLOW) for what in DIFFERENCES])
def test_nodes_that_differ_are_refused_on_both_in_one_line_with_the_fix(start_machines, what, tmp_path):
    before, line = DIFFERENCES[what]
    machines = start_machines(2, f'RUN_PARENT={tmp_path}/machines_0/run; {before}; train "$@"')
    assert machines.wait(TIMEOUT_S) == [2, 2], machines.all_text()
    for node in range(2):
        assert re.search(
            rf"^mindrlhf train: error: the nodes cannot train together:\n  {line}", machines.text(node), re.M
        ), machines.all_text()
        assert "Traceback" not in machines.text(node)
