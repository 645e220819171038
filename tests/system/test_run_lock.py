"""One run to a directory: who holds the lock, who is refused, and what a dead owner leaves."""

import errno
import json
import os
import re
import signal
import subprocess
import sys

import pytest

from mindrlhf.errors import UserError
from mindrlhf.system import run_lock

HOLD = """
import sys
from pathlib import Path
from mindrlhf.system.run_lock import holding
with holding(Path(sys.argv[1]), "mindrlhf train"):
    print("held", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def start_owner():
    owners = []

    def start(directory):
        owner = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        owners.append(owner)
        assert owner.stdout.readline() == "held\n"
        return owner

    yield start
    for owner in owners:
        owner.kill()
        owner.communicate()


def refusal(directory) -> str:
    with pytest.raises(UserError) as refused, run_lock.holding(directory, "mindrlhf sft"):
        pass
    return str(refused.value)


def test_a_second_run_is_refused_by_one_line_that_names_the_first(tmp_path, start_owner):
    owner = start_owner(tmp_path / "run")
    message = refusal(tmp_path / "run")
    assert f"process {owner.pid} on " in message and "mindrlhf train" in message and "\n" not in message
    owner.communicate("end\n")
    with run_lock.holding(tmp_path / "run", "mindrlhf sft"):
        assert json.loads((tmp_path / "run" / run_lock.LOCK_NAME).read_text())["pid"] == os.getpid()
    assert list(tmp_path.iterdir()) == []


def test_a_killed_owner_leaves_no_lock(tmp_path, start_owner):
    owner = start_owner(tmp_path)
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    assert (tmp_path / run_lock.LOCK_NAME).exists()
    with run_lock.holding(tmp_path, "mindrlhf train"):
        pass


def test_a_body_that_fails_releases_the_lock_and_leaves_no_directory(tmp_path):
    with pytest.raises(ZeroDivisionError), run_lock.holding(tmp_path / "run", "mindrlhf train"):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []
    with run_lock.holding(tmp_path / "run", "mindrlhf train"):
        (tmp_path / "run" / "metrics.jsonl").write_text("")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["metrics.jsonl"]


def test_of_many_that_start_at_once_one_runs(tmp_path):
    code = HOLD.replace("sys.stdin.readline()", "__import__('time').sleep(1.5)")
    started = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(6)
    ]
    outputs = [process.communicate(timeout=60)[0] for process in started]
    codes = [process.returncode for process in started]
    assert codes.count(0) >= 1
    # Whoever came after the first had ended may run as well; but never two at a time: each failure names its owner.
    assert all(output == b"held\n" for output, code in zip(outputs, codes) if code == 0)
    assert sum(output == b"held\n" for output in outputs) == codes.count(0)


@pytest.fixture
def no_locks(monkeypatch):
    def refuse(descriptor, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(run_lock.fcntl, "flock", refuse)


def write_owner(directory, **changes):
    owner = {**run_lock._describe("mindrlhf train"), **changes}
    (directory / run_lock.LOCK_NAME).write_text(json.dumps(owner))


@pytest.mark.parametrize(
    ("changes", "is_refused"),
    [
        ({}, True),
        ({"host": "elsewhere", "pid": 1}, True),  # nobody here can know
        ({"start_ticks": 1}, False),  # another process has its number now
        ({"boot": "an earlier one"}, False),
        ({"pid": 2**22 + 1}, False),
    ],
)
def test_without_locks_the_file_decides(tmp_path, no_locks, changes, is_refused):
    write_owner(tmp_path, **changes)
    if is_refused:
        assert re.search(r"if that run has ended, remove .*\.lock", refusal(tmp_path))
    else:
        with run_lock.holding(tmp_path, "mindrlhf train"):
            pass


@pytest.mark.parametrize(
    ("changes", "is_refused"),
    [({}, True), ({"host": "elsewhere"}, False), ({"start_ticks": 1}, False), ({"pid": 2**22 + 1}, False)],
)
def test_a_look_before_the_lock_is_taken_names_a_living_owner_of_this_host(tmp_path, changes, is_refused):
    run_lock.refuse_held(tmp_path)
    write_owner(tmp_path, **changes)
    if is_refused:
        with pytest.raises(UserError, match=f"process {os.getpid()} on "):
            run_lock.refuse_held(tmp_path)
    else:
        run_lock.refuse_held(tmp_path)
    assert (tmp_path / run_lock.LOCK_NAME).exists()


@pytest.mark.parametrize("content", ["", "{", "[]", "null"])
def test_a_damaged_file_without_an_owner_is_free(tmp_path, no_locks, content):
    (tmp_path / run_lock.LOCK_NAME).write_text(content)
    with run_lock.holding(tmp_path, "mindrlhf train"):
        pass


def test_a_directory_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    assert "cannot be locked" in refusal(tmp_path / "file" / "run")
