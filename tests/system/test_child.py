"""A child process: its start, its end, and the end of all that it has started."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mindrlhf.system.child import PIPE, Child, module_words
from mindrlhf.system.processes import read_status

pytestmark = pytest.mark.timeout(120)

# Starts a process that leaves its session, writes down both numbers, and waits or leaves.
FAMILY = """
import os, subprocess, sys, time
from mindrlhf.system.processes import end_with_starter
end_with_starter()
other = subprocess.Popen(["sleep", "1000"], start_new_session=True)
print(os.getpid(), other.pid, flush=True)
if sys.argv[1] == "wait":
    time.sleep(1000)
"""


def wait_until_gone(pid: int) -> bool:
    deadline = time.monotonic() + 60
    while (status := read_status(pid)) is not None and status.returncode is None:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def test_what_it_is_given_is_what_it_has(tmp_path):
    program = "import os; print(os.getcwd(), sorted(os.environ), os.read({}, 9), flush=True); input()"
    reading, writing = os.pipe()
    os.write(writing, b"inherited")
    child = Child(
        [sys.executable, "-I", "-c", program.format(reading)],
        environment={"A": "1"},
        directory=tmp_path,
        input=PIPE,
        output=PIPE,
        descriptors=[reading],
    )
    line = child.output.readline().decode()
    assert line.split()[0] == str(tmp_path) and "'A'" in line and "PATH" not in line and "b'inherited'" in line
    assert child.poll() is None and not child.has_ended() and child.ending() == "" and child.wait(0.0) is None
    assert os.getsid(child.pid) == child.pid
    child.input.write(b"\n")
    child.input.close()
    assert child.wait(60) == 0 and child.has_ended() and child.ending() == "exit code 0"
    child.output.close()
    os.close(reading)
    os.close(writing)


def test_the_end_of_its_log_is_told(tmp_path):
    log = tmp_path / "new" / "log"
    child = Child([sys.executable, "-c", "print('one'); raise SystemExit('two')"], output=log)
    assert child.wait(60) == 1
    assert child.last_lines() == f"; log {log} ends: one | two"
    again = Child([sys.executable, "-c", "import os; os.abort()"], output=log)
    assert again.wait(60) == -signal.SIGABRT and again.ending() == "signal SIGABRT"
    assert log.read_text().split()[:2] == ["one", "two"]


@pytest.mark.parametrize("how", ["wait", "leave"])
def test_kill_ends_all_that_it_has_started(how):
    child = Child([sys.executable, "-c", FAMILY, how], output=PIPE, mark=f"mark of {os.getpid()} {how}")
    own, other = map(int, child.output.readline().split())
    assert own == child.pid
    if how == "leave":
        assert child.wait(60) == 0 and read_status(other).returncode is None
    assert child.kill() == child.kill() == (0 if how == "leave" else -signal.SIGKILL)
    assert wait_until_gone(own) and wait_until_gone(other)
    child.output.close()


def test_it_ends_with_its_starter():
    starter = f"""
from mindrlhf.system.child import Child
import sys, time
Child([sys.executable, "-c", {FAMILY!r}, "wait"], output=1)
time.sleep(1000)
"""
    root = {"PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen([sys.executable, "-c", starter], stdout=subprocess.PIPE, env=os.environ | root) as process:
        pid, other = map(int, process.stdout.readline().split())
        process.kill()
        assert wait_until_gone(pid)
        os.kill(other, signal.SIGKILL)


def test_a_program_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        Child([str(tmp_path / "none")], output=tmp_path / "log")
    (tmp_path / "its_module.py").write_text("import sys\ndef main():\n    return int(sys.argv[1])\n")
    found = {**os.environ, "PYTHONPATH": str(tmp_path)}
    assert Child(module_words("its_module", 3), environment=found).wait(60) == 3
