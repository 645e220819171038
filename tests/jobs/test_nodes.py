"""Runs over pretended machines: equal to one machine with as many ranks, whatever is killed, cut off or full.

What is named, and after how many seconds, is printed (``pytest -s``); docs/cluster.md promises it.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import sanity_inputs
import test_schedule_features
from fault_jobs import FAULTY_START, metrics
from machine_jobs import (
    PROFILER,
    RECIPE,
    SHARED,
    TIMEOUT_S,
    assert_same,
    assert_same_but_for_rounding,
    find,
    finish,
    num_steps,
)
from machines import Machines
from slow_tests import SLOW
from test_listeners import listening_addresses

from mindrlhf.errors import STOPPED
from mindrlhf.system.heartbeat import heartbeat_path, read_beat
from mindrlhf.system.processes import SERVER_PREFIX, descendants

pytestmark = pytest.mark.timeout(1800)

Act = Callable[[Machines], None]
SAVING = {"checkpoint__every_steps": 1}
ENDLESS = SAVING | {"training__epochs": 1000, "run__max_steps": 5000}


@dataclass(frozen=True)
class Case:
    """A run on machines, what befalls it, and what becomes of it.

    Attributes:
        recipe: keys of the run.
        act: befalls it after three lines of metrics.
        said: by node, patterns of what it has printed.
        codes: the exit codes of the machines, None of one without power.
        run: the script of each machine.
        ranks: it ends as one machine with so many does; 0: it does not come to its end.
        same: compares the two.
        of_machines, of_one: keys that the run on one machine does not have, or alone.
        is_elastic: the last machine is for rollout only.
        check: looks at what is left.
    """

    recipe: Mapping[str, object] = field(default_factory=dict)
    act: Act | None = None
    said: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    codes: tuple[int | None, ...] = (0, 0)
    run: str = "train"
    ranks: int = 2
    same: Callable[[Path, Path], None] = assert_same
    of_machines: Mapping[str, object] = field(default_factory=dict)
    of_one: Mapping[str, object] = field(default_factory=dict)
    is_elastic: bool = False
    check: Act | None = None


def named_s(machines: Machines, nodes: list[int], line: str, action) -> float:
    """Do it, and return after how many seconds all these nodes have said the line once more."""
    before, start_s = {node: machines.text(node).count(line) for node in nodes}, time.monotonic()
    action()
    machines.wait_for(lambda: all(machines.text(node).count(line) > before[node] for node in nodes))
    return time.monotonic() - start_s


def kill(node: int, kind: str, number: int = signal.SIGKILL) -> Act:
    return lambda machines: os.kill(find(machines, node, kind), number)


def cut(node: int) -> Act:
    return lambda machines: machines.cut(node)


def power_off(node: int) -> Act:
    return lambda machines: machines.power_off(node)


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


def kill_all_in_turn(machines: Machines) -> None:
    """Kill each after two more steps, and wait until all nodes have named it and start again."""
    num_restarts = 0
    for node, kind, line in KILLS:
        num_restarts += line is not None
        before = num_steps(machines)
        machines.wait_for(lambda before=before: num_steps(machines) > before + 1)
        pid = find(machines, node, kind)
        if line is None:
            os.kill(pid, signal.SIGKILL)
            continue
        nodes = [1 - node] if kind == "launcher" else [0, 1]
        duration_s = named_s(machines, nodes, line, lambda pid=pid: os.kill(pid, signal.SIGKILL))
        print(f"{kind} of node {node}: named after {duration_s:.1f} s", flush=True)
        if (kind, node) != ("launcher", 0):
            machines.wait_for(lambda count=num_restarts: f"restart {count} of 20" in machines.text(0))


def only_named_restarts(machines: Machines) -> None:
    restarts = sum(line is not None for *_, line in KILLS)
    assert f"restart {restarts + 1} of" not in machines.text(0), "what goes on in place costs no restart"


def is_shared_among_both(machines: Machines) -> None:
    """Each machine had a rollout server of its own."""
    logs = machines.directory / "run" / "logs"
    assert [path.name for path in logs.glob("rollout_*.log")] == ["rollout_0.log"], "one of two servers is here"
    assert [path.name for path in (logs / "rollout_node1").glob("*.log")] == ["rollout_0.log"], "the other is there"


def has_scored(machines: Machines) -> None:
    is_shared_among_both(machines)
    no_secret_is_left(machines)
    said = worker_text(machines)
    assert re.search(r"this node has done \d+ items for the run", said), said  # how many, the clock decides


def no_secret_is_left(machines: Machines) -> None:
    assert not list((machines.directory / "run").glob(".nodes_*")), "the secret and the probe are gone"


def worker_text(machines: Machines) -> str:
    logs = (machines.directory / "run" / "logs").rglob("worker_1.log")
    return "".join(path.read_text(errors="replace") for path in logs)


def fill_disk_of_node_1(machines: Machines) -> None:
    launcher, rank, server = (find(machines, 1, kind) for kind in ("launcher", "rank", "rollout server"))

    def on_node_1(command: str) -> None:
        subprocess.run(["nsenter", "-t", str(launcher), "-a", "bash", "-c", command], check=True)

    def fill() -> None:
        # What a dead server leaves is removed first, which would make room for the next: the test removes it itself,
        # while the rank cannot start another.
        os.kill(rank, signal.SIGSTOP)
        os.kill(server, signal.SIGKILL)
        fill_up = "for i in {1..500}; do : > $i || break; done 2>/dev/null; true"
        on_node_1(f"cd /dev/shm/small; rm -rf {SERVER_PREFIX}*; {fill_up}")
        os.kill(rank, signal.SIGCONT)

    duration_s = named_s(machines, [0, 1], "No space left on device", fill)
    print(f"full disk of node 1: named after {duration_s:.1f} s", flush=True)
    on_node_1("rm -f /dev/shm/small/[0-9]*")


SMALL_DISK = """
if [ $NODE_RANK = 1 ]; then
    mkdir -p /dev/shm/small; mount -t tmpfs -o size=8m,nr_inodes=500 tmpfs /dev/shm/small
    export TMPDIR=/dev/shm/small
fi
train --max-restarts 1
"""


def power_off_beside_a_spare(machines: Machines) -> None:
    assert "is a spare: it waits" in machines.text(2) and "starting" not in machines.text(2)
    machines.power_off(1)


SPANNING = {"rollout__tensor_parallel": 2, "evaluation__every_steps": 0}


def has_parts_on_both(machines: Machines) -> None:
    logs = machines.directory / "run" / "logs"
    assert (logs / "rollout_0.log").exists() and (logs / "rollout_node1" / "rollout_0_part.log").exists()
    assert not (logs / "rollout_node1" / "rollout_0.log").exists(), "the other machine has no server of its own"


def kill_part(node: int) -> Act:
    def act(machines: Machines) -> None:
        for each in range(2):  # what vLLM listens at is the address of its machine
            server = find(machines, each, "rollout server")
            pids = [server, *(status.pid for status in descendants(server))]
            assert {address for pid in pids for address, _ in listening_addresses(pid)} == {f"10.77.0.{each + 1}"}
        os.kill(find(machines, node, "rollout server"), signal.SIGKILL)

    return act


def part_is_named_once(who: str) -> Act:
    line = rf"{who} \(process \d+\) was killed by signal 9 \(SIGKILL\)"

    def check(machines: Machines) -> None:
        assert len(re.findall(line, machines.text(0))) == 1, machines.all_text()
        assert num_steps(machines) == 1 + 8

    return check


ISSUED_AGAIN = r"\d+ prompts of rollout nodes that are lost are issued again"
READY = "is ready: it takes part from the next version of the weights on"
NODE = "rollout node node1, 10.77.0.2"


def wait_to_take_part(machines: Machines, times: int = 1) -> None:
    """Wait until the node for rollout only has taken part in a whole step."""
    machines.wait_for(lambda: machines.text(0).count("takes part from version") >= times)
    before = num_steps(machines)
    machines.wait_for(lambda: num_steps(machines) > before + 1)


def while_it_generates(act: Act) -> Act:
    """Stop a node's server while it owes samples, so that the run waits for them, before it befalls the node."""

    def wait_and_act(machines: Machines) -> None:
        def read_activity() -> str:
            return read_beat(heartbeat_path(machines.directory / "run" / "logs", 0)).activity

        wait_to_take_part(machines)
        server = machines.find(1, "-m mindrlhf.rollout.server ")
        deadline_s = time.monotonic() + TIMEOUT_S
        while True:
            os.kill(server, signal.SIGSTOP)
            since_s, activity = time.monotonic(), None
            # The run stands still: in the rollout, or where it gives the server new weights, and then nothing is owed.
            while time.monotonic() - since_s < 4:
                assert time.monotonic() < deadline_s, machines.all_text()
                if (now := read_activity()) != activity:
                    since_s, activity = time.monotonic(), now
                time.sleep(0.1)
            if activity.endswith(": rollout"):
                return act(machines)
            os.kill(server, signal.SIGCONT)
            machines.wait_for(lambda stood=activity: read_activity() != stood)  # or it would never get its weights

    return wait_and_act


def kill_and_wait_for_another(machines: Machines) -> None:
    launcher = find(machines, 1, "launcher")
    while_it_generates(lambda _: (hold().touch(), os.kill(launcher, signal.SIGKILL)))(machines)
    machines.wait_for(lambda: machines.text(0).count(READY) == 2)
    hold().unlink()
    wait_to_take_part(machines, 2)


def hold() -> Path:
    """While this file is there, the verifiers of an elastic run wait."""
    return Path(os.environ["MINDRLHF_TEST_INPUTS"]) / "fault_inputs" / "hold"


def leave_in_good_order(machines: Machines) -> None:
    wait_to_take_part(machines)
    os.kill(find(machines, 1, "launcher"), signal.SIGTERM)
    machines.wait_for(lambda: "THE END" in machines.text(1))
    assert num_steps(machines) < ELASTIC["run__max_steps"], "it left before the end"


def kill_rank_0_beside_it(machines: Machines) -> None:
    wait_to_take_part(machines)
    os.kill(find(machines, 0, "rank"), signal.SIGKILL)


def made_samples(node: int, least: int) -> Act:
    def check(machines: Machines) -> None:
        made = map(int, re.findall(r"this node has made (\d+) samples", machines.text(node)))
        assert sum(made) > least, machines.all_text()
        no_secret_is_left(machines)

    return check


def has_its_logs_itself(machines: Machines) -> None:
    assert not (machines.directory / "run" / "logs" / "rollout_node1").exists(), "its logs are on its own disk"


def vllm_was_started_twice(machines: Machines) -> None:
    assert machines.text(1).count("starting vLLM") == 2, machines.text(1)


# The machine for rollout only sees an empty directory in the place of the run's.
OWN_DIRECTORY = """
export MINDRLHF_SECRET=a_secret_of_some_length
mkdir -p {directory}/run
if [ $NODE_RANK = 1 ]; then mkdir /tmp/empty; mount --bind /tmp/empty {directory}/run; fi
train
"""
ELASTIC = {
    "run__max_steps": 40,
    "training__epochs": 100,
    "evaluation__every_steps": 20,
    "reward__timeout_s": 300,
}


def elastic(act: Act | None = None, ranks: int = 1, **more) -> Case:
    return Case(ELASTIC, act, ranks=ranks, same=assert_same_but_for_rounding, is_elastic=True, **more)


CASES = {
    "all there": Case(SHARED, check=has_scored, of_one=PROFILER),
    "verifiers killed": Case(
        {"rollout__num_replicas": 2, "run__max_steps": 12},
        kill(1, "verifiers"),
        {0: ("mindrlhf: the verifiers of node 1: has closed the connection",)},
        check=is_shared_among_both,
    ),
    "all killed in turn": Case(
        {"run__max_steps": 60, "rollout__restarts": 5} | SAVING,
        kill_all_in_turn,
        # As Kubernetes would: what was killed is started again.
        run="export KUBERNETES_SERVICE_HOST=10.96.0.1; until train --max-restarts 20 --resume auto; do :; done",
        check=only_named_restarts,
    ),
    "rank killed": Case(
        ENDLESS,
        kill(1, "rank"),
        {
            0: (r"node 1 \(node1, 10.77.0.2\) rank 1 was killed by SIGKILL",),
            1: ("rank 1 was killed by SIGKILL",),
            2: (r"node 1 \(node1, 10.77.0.2\) rank 1 was killed by SIGKILL",),
        },
        codes=(137, 137, 137),
        ranks=0,
    ),
    **{
        f"interface of {node} down": Case(
            ENDLESS,
            cut(node),
            {
                0: (r"node 1 \(node1, 10.77.0.2\) has not been heard of for 10 s",),
                1: (r"node 0 \(10.77.0.1\) has not been heard of for 10 s",),
            },
            codes=(1, 1),
            ranks=0,
        )
        for node in range(2)
    },
    **{
        f"launcher of {node} killed": Case(
            ENDLESS,
            kill(node, "launcher"),
            {1 - node: (rf"{name} has closed the connection: it has ended, or was killed",)},
            codes=(137, 1) if node == 0 else (1, 137),
            ranks=0,
        )
        for node, name in enumerate((r"node 0 \(10.77.0.1\)", r"node 1 \(node1, 10.77.0.2\)"))
    },
    "no power": Case(
        ENDLESS,
        power_off(2),
        dict.fromkeys(range(2), (r"node 2 \(node2, 10.77.0.3\) has closed the connection",)),
        codes=(1, 1, None),
        ranks=0,
    ),
    "SIGTERM": Case(
        ENDLESS,
        kill(1, "launcher", signal.SIGTERM),
        {0: ("SIGTERM: step", "is saved in")},
        codes=(STOPPED, STOPPED),
        ranks=0,
    ),
    "full disk": Case({"run__max_steps": 12, "rollout__restarts": 1} | SAVING, fill_disk_of_node_1, run=SMALL_DISK),
    "spare": Case(
        {"run__max_steps": 12} | SAVING,
        power_off_beside_a_spare,
        dict.fromkeys((0, 2), (r"node 2 \(node2, 10.77.0.3\) takes the place of node 1",)),
        codes=(0, None, 0),
        run="train --nodes 2 --spares 1 --max-restarts 2",
    ),
    "checkpoints of each machine": Case(
        {"run__max_steps": 14} | SAVING,
        kill(1, "rank"),
        {
            0: ("rank 1 was killed by SIGKILL", "restart 1 of 3", "mindrlhf: resumed after step"),
            1: ("rank 1 was killed by SIGKILL",),
        },
        run="train --max-restarts 3",
        of_machines={"checkpoint__node_local": "true", "checkpoint__save_dir": "/dev/shm/checkpoints"},
    ),
    "a server over both": Case(SPANNING, same=assert_same_but_for_rounding, check=has_parts_on_both),
    **{
        f"part {node} of a server killed": Case(
            SPANNING | {"run__max_steps": 8},
            kill_part(node),
            {0: (r"starting it again \(1 restarts left\)",)},
            ranks=0,
            check=part_is_named_once(who),
        )
        for node, who in enumerate(("the rollout server", "has lost its part on node 1, which"))
    },
    "rollout only": elastic(said={0: (f"{NODE} takes part from version",)}, check=made_samples(1, 20)),
    "rollout only, no power": elastic(
        while_it_generates(power_off(1)),
        said={0: (f"{NODE} has closed the connection.*; the run goes on without it", ISSUED_AGAIN)},
        codes=(0, None),
    ),
    "rollout only, cut off": elastic(
        while_it_generates(cut(1)), said={0: (f"{NODE} has not been heard of",)}, codes=(0, 1)
    ),
    "rollout only, killed and started again": elastic(
        kill_and_wait_for_another, said={0: (ISSUED_AGAIN,)}, run="until train; do :; done"
    ),
    "rollout only, leaves": elastic(
        leave_in_good_order,
        said={
            0: (f"{NODE} leaves; the run goes on without it", f"{NODE} has left"),
            1: ("SIGTERM received: leaving the run", "this node has left the run"),
        },
        run=OWN_DIRECTORY,
        check=has_its_logs_itself,
    ),
    "rollout only, the run starts again": elastic(
        kill_rank_0_beside_it,
        said={0: ("restart 1 of 1",)},
        run="train --max-restarts 1 checkpoint.every_steps=1",
        check=vllm_was_started_twice,
    ),
    "rollout only beside two": elastic(ranks=2, codes=(0, 0, 0), check=made_samples(2, 0)),
}
OF_EVERY_DAY = ("all there",)
# Verifiers wait while there is a file, so that the run may be held for as long as a node needs to come.
VERIFIER = """
import time
from pathlib import Path

HOLD = Path(__file__).with_name("hold")


def lowercase(completion, answer):
    while HOLD.exists():
        time.sleep(0.05)
    return sum("a" <= letter <= "z" for letter in completion) / max(1, len(completion))
"""


@pytest.fixture
def start_case(start_machines, tmp_path) -> Iterator[Callable[[Case], tuple[Machines, dict[str, object]]]]:
    """Start the run of a case, and return its recipe."""

    def start(case: Case) -> tuple[Machines, dict[str, object]]:
        directory, num_nodes = tmp_path / "machines_0", len(case.codes)
        run, recipe = case.run.format(directory=directory), dict(case.recipe)
        if not case.is_elastic:
            return start_machines(num_nodes, run, **recipe, **case.of_machines), recipe
        shape = f"--nodes {num_nodes - 1} --elastic"
        is_last = f"[ $NODE_RANK = {num_nodes - 1} ]"
        run = f'SHAPE="{shape} --node-rank $NODE_RANK"; {is_last} && SHAPE="{shape} --role rollout"\n{run}'
        verifier = hold().with_name("held.py")
        verifier.write_text(VERIFIER)
        recipe["reward__verifier_function"] = f"{verifier}:lowercase"
        hold().touch()
        machines = start_machines(num_nodes, run, **recipe)
        # However slow it is: no step is made before it is there.
        machines.wait_for(lambda: machines.text(0).count(READY) == 1)
        hold().unlink()
        return machines, recipe

    yield start
    hold().unlink(missing_ok=True)


@pytest.mark.parametrize("name", [name if name in OF_EVERY_DAY else pytest.param(name, marks=SLOW) for name in CASES])
def test_a_run_over_machines(start_case, one_machine, name):
    case = CASES[name]
    machines, recipe = start_case(case)
    if case.act and not case.is_elastic:
        machines.wait_for(lambda: num_steps(machines) >= 3)  # the evaluation before the first is a line as well
    if case.act:
        case.act(machines)
    codes = finish(machines, [node for node, code in enumerate(case.codes) if code is None])
    assert tuple(codes) == case.codes, machines.all_text()
    for node, patterns in case.said.items():
        for pattern in patterns:
            assert re.search(pattern, machines.text(node)), machines.all_text()
    if case.check:
        case.check(machines)
    if case.ranks:
        case.same(machines.directory / "run", one_machine(case.ranks, **recipe, **case.of_one))


@SLOW
def test_three_machines_train_as_one(start_machines, one_machine):
    machines = start_machines(3)
    assert finish(machines) == [0, 0, 0], machines.all_text()
    assert_same_but_for_rounding(machines.directory / "run", one_machine(3))


@SLOW
def test_agents_of_two_machines_are_those_of_one_with_as_many_ranks(start_machines, one_machine, tmp_path):
    """Bit for bit: which of them runs an agent decides nothing."""
    made = tmp_path / "agent"
    test_schedule_features.make_agent(made)
    changes = test_schedule_features.AGENTS | {"tools__agent": f"{made / 'agent.py'}:agent"}
    changes |= {"model__path": made / "model"}
    changes |= {f"data__{kind}_file": made / "prompts.mindrecord" for kind in ("train", "eval")}
    changes |= {"data__tokenizer_dir": made / "model", "reward__verifier_function": "environment_reward"}
    changes |= {"rollout__num_replicas": 2, "tools__agents_at_once": 256}
    machines = start_machines(2, keep=(made,), **changes)
    assert finish(machines) == [0, 0], machines.all_text()
    assert_same(machines.directory / "run", one_machine(2, **changes))
    assert re.search(r"this node has run [1-9]\d* agents for the run", worker_text(machines)), machines.all_text()


@SLOW
def test_a_slow_link_and_a_clock_that_jumps_by_hours_change_nothing(start_machines, one_machine, tmp_path):
    packages, clocks = tmp_path / "packages", tmp_path / "clocks"
    packages.mkdir()
    clocks.mkdir()
    (packages / "mindrlhf").symlink_to(sanity_inputs.REPOSITORY / "mindrlhf")
    path = f"{FAULTY_START}:{packages}"
    recipe = {"run__max_steps": 4, "rollout__env": f"{{PYTHONPATH: '{path}'}}"}
    script = f"""
        if [ $NODE_RANK = 1 ]; then
            export PYTHONPATH={shlex.quote(path)} MINDRLHF_TEST_CLOCK_DIR={clocks}
            tc qdisc add dev eth0 root tbf rate 4mbit burst 32kbit latency 400ms && touch {clocks}/slow
        fi
        train
    """
    machines = start_machines(2, script, (packages, clocks), **recipe)
    assert finish(machines) == [0, 0], machines.all_text()
    with_bad_clock = {path.name for path in clocks.iterdir()}
    assert len(with_bad_clock - {"slow"}) >= 3, "launcher, rank and server of node 1 have the bad clock"
    assert_same(machines.directory / "run", one_machine(2, **recipe))
    if "slow" not in with_bad_clock:
        pytest.skip("this kernel has no tbf to slow an interface")


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


@SLOW
@pytest.mark.parametrize("what", DIFFERENCES)
def test_nodes_that_differ_are_refused_on_both_in_one_line_with_the_fix(start_machines, what, tmp_path):
    before, line = DIFFERENCES[what]
    machines = start_machines(2, f'RUN_PARENT={tmp_path}/machines_0/run; {before}; train "$@"')
    assert finish(machines) == [2, 2], machines.all_text()
    for node in range(2):
        assert re.search(
            rf"^mindrlhf train: error: the nodes cannot train together:\n  {line}", machines.text(node), re.M
        ), machines.all_text()
        assert "Traceback" not in machines.text(node)


SSH = """#!/usr/bin/env bash
# ssh -o BatchMode=yes HOST COMMAND, to a pretended machine
exec nsenter -t "$(cat {directory}/pid_$3)" -a bash -c "$4"
"""


@SLOW
def test_a_file_of_hosts_runs_the_same_line_on_all_of_them(start_machines, one_machine, sanity_dir, tmp_path):
    machines = start_machines(2, "sleep 1000")
    machines.wait_for(lambda: machines.processes(0) and machines.processes(1))
    hosts = ["10.77.0.1", "10.77.0.2"]
    for node, host in enumerate(hosts):
        (machines.directory / f"pid_{host}").write_text(str(min(machines.processes(node))))
    (tmp_path / "hosts.txt").write_text("# two machines\n" + "\n".join(hosts))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ssh").write_text(SSH.format(directory=machines.directory))
    (tmp_path / "bin" / "ssh").chmod(0o755)
    recipe = {**RECIPE, "data__eval_file": sanity_dir / "prompts.mindrecord"}
    words = sanity_inputs.overrides(sanity_dir, machines.directory / "run", **recipe)
    finished = subprocess.run(
        sanity_inputs.command("train", "examples/sanity/config.yaml", *words, "--hostfile", tmp_path / "hosts.txt"),
        cwd=sanity_inputs.REPOSITORY,
        env={**sanity_inputs.environment(), "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert_same(machines.directory / "run", one_machine(2))


PAIRS = {"training": {"pairs_per_step": 8, "micro_batch_size": 4, "sequence_lengths": [32], "epochs": 1}}
OFFLINE = {
    "sft": {"training": {"rows_per_step": 8, "micro_batch_size": 4, "sequence_lengths": [32], "epochs": 2}},
    "dpo": PAIRS,
    "reward-model": PAIRS,
}


@SLOW
@pytest.mark.parametrize("command", OFFLINE)
def test_an_offline_run_over_machines(start_machines, pairs_dir, tmp_path, command):
    train_file = pairs_dir / f"{'sft' if command == 'sft' else 'preference'}.mindrecord"
    config = {
        "model": {"path": str(pairs_dir / "model")},
        "data": {"train_file": str(train_file), "tokenizer_dir": str(pairs_dir / "model")},
        "run": {"output_dir": str(tmp_path / "unset")},
        "optimizer": {"start_lr": 1e-3},
        "observe": {"sinks": []},
        **OFFLINE[command],
    }
    path = tmp_path / f"{command}.yaml"  # YAML is a superset of JSON
    path.write_text(json.dumps(config))
    one = tmp_path / "one"
    sanity_inputs.run(command, path, f"run.output_dir={one}", "--workers", 2, timeout_s=TIMEOUT_S)
    machines = start_machines(2, keep=(tmp_path, pairs_dir), command=(command, path))
    assert finish(machines) == [0, 0], machines.all_text()
    two = machines.directory / "run"
    assert metrics(two) == metrics(one)
    for name in ("model.safetensors", "config.json"):
        assert (two / "final" / name).read_bytes() == (one / "final" / name).read_bytes(), name
    assert (two / "logs" / "node_1").is_dir(), "the second machine had a rank"
