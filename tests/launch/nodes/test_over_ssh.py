"""The same command on every host of a file, with a program that stands for ssh."""

import os
import signal
import subprocess
import sys
import time

import pytest

from mindrlhf.errors import UserError
from mindrlhf.launch.nodes.over_ssh import read_hosts
from mindrlhf.system import processes

pytestmark = pytest.mark.timeout(60)

# Runs the command here; the interpreter of the command is one that shows what it was given.
SSH = """#!/usr/bin/env bash
echo "$@" >> {directory}/argv
exec bash -c "$4"
"""
LAUNCHER = """
import os, signal, sys, time
from mindrlhf.launch.nodes.over_ssh import hold_on_to_lifeline
node = sys.argv[sys.argv.index("--node-rank") + 1]
signal.signal(signal.SIGTERM, lambda *_: (print("asked to end", flush=True), os._exit(5)))
hold_on_to_lifeline()
print(os.getcwd(), os.environ["MINDRLHF_SECRET"], os.environ["MINDRLHF_ROLLOUT_PYTHON"], *sys.argv[1:], flush=True)
open(sys.argv[1] + "/pid_" + node, "w").write(str(os.getpid()))
time.sleep(0 if sys.argv[2] == "short" else 600)
"""
RUN = """
import sys
from mindrlhf.launch.nodes import over_ssh
from mindrlhf.launch.nodes.over_ssh import run_over_ssh
import shlex
join = shlex.join
# In place of `-m mindrlhf.cli`.
over_ssh.shlex.join = lambda words: join(words).replace("-m mindrlhf.cli", sys.argv[1])
sys.exit(run_over_ssh(sys.argv[2:], ["a", "user@b"], None))
"""


@pytest.fixture
def start(tmp_path):
    (tmp_path / "ssh").write_text(SSH.format(directory=tmp_path))
    (tmp_path / "ssh").chmod(0o755)
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "MINDRLHF_SECRET": "a secret with 'quotes'",
        "MINDRLHF_ROLLOUT_PYTHON": "/some/where/python",
    }
    started = []

    def run(length: str, *prefix: str) -> subprocess.Popen:
        argv = [*prefix, sys.executable, "-c", RUN, str(tmp_path / "launcher.py"), str(tmp_path), length]
        started.append(subprocess.Popen(argv, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.wait()


def wait_for_launchers(tmp_path) -> list[int]:
    paths = [tmp_path / f"pid_{node}" for node in range(2)]
    end_s = time.monotonic() + 30
    while not all(path.exists() and path.read_text() for path in paths):
        assert time.monotonic() < end_s
        time.sleep(0.05)
    return [int(path.read_text()) for path in paths]


def test_every_host_gets_its_number_and_the_secret_stays_off_the_command_line(start, tmp_path):
    process = start("short")
    out, _ = process.communicate(timeout=50)
    assert process.returncode == 0
    shown = f"{tmp_path} a secret with 'quotes' /some/where/python {tmp_path} short --nodes 2 --node-rank"
    assert sorted(out.splitlines()) == sorted([f"{shown} 0 --master a:8118", f"[node 1] {shown} 1 --master a:8118"])
    argv = (tmp_path / "argv").read_text()
    assert "quotes" not in argv
    assert sorted(line.split()[:3] for line in argv.splitlines()) == [
        ["-o", "BatchMode=yes", host] for host in ("a", "user@b")
    ]


def test_a_signal_goes_to_node_0(start, tmp_path):
    process = start("long")
    _, other = wait_for_launchers(tmp_path)
    process.send_signal(signal.SIGTERM)
    end_s = time.monotonic() + 30
    while "asked to end" not in process.stdout.readline():
        assert time.monotonic() < end_s
    os.kill(other, 0)  # runs on, until node 0 tells it otherwise
    os.kill(other, signal.SIGKILL)
    assert process.wait(30) == 5


@pytest.mark.parametrize("prefix", [(), ("env", "--ignore-signal=HUP")], ids=["plain", "under nohup"])
def test_launchers_end_with_the_one_that_started_them(start, tmp_path, prefix):
    process = start("long", *prefix)
    pids = wait_for_launchers(tmp_path)
    process.kill()
    end_s = time.monotonic() + 30
    for pid in pids:
        while processes.state(pid) not in ("", "Z"):
            assert time.monotonic() < end_s
            time.sleep(0.05)


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "names 0 different hosts"),
        ("a\na\n", "names 1 different hosts in 2 lines"),
        ("a slots=8\n", "line 1 is 'a slots=8': give one host a line"),
        ("a\n-oProxyCommand=x\n", "line 2 is '-oProxyCommand=x'"),
    ],
)
def test_what_is_no_file_of_hosts_is_refused(tmp_path, text, message):
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        read_hosts(str(path))
    with pytest.raises(UserError, match="cannot be read"):
        read_hosts(str(tmp_path / "missing"))


def test_hosts_are_read_with_comments(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("# nodes\nnpu01\n\nuser@npu02  # the second\n")
    assert read_hosts(str(path)) == ["npu01", "user@npu02"]


def test_the_sample_hostfile_is_read():
    assert read_hosts("examples/cluster/hostfile") == ["node-0", "node-1"]
