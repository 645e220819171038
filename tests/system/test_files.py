"""Scratch directories: gone after the block, and gone at the next one when the block was killed."""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile

import pytest

from mindrlhf.system.files import (
    is_locked,
    partial_path,
    remove_unheld,
    scratch_directory,
    take_directory,
    whole_directory,
    whole_file,
    write_file,
)

HOLDER = """
import sys, time
from pathlib import Path
from mindrlhf.system.files import scratch_directory
with scratch_directory(Path(sys.argv[1]), ".scratch-") as directory:
    (directory / "half").write_text("x")
    print(directory.name, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path):
    """A living process with a scratch directory; yields it and the directory."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, tmp_path], stdout=subprocess.PIPE, text=True)
    try:
        yield process, tmp_path / process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate(timeout=30)


def test_the_directory_is_private_and_goes_with_the_block(tmp_path):
    for error in (None, ValueError, KeyboardInterrupt):
        try:
            with scratch_directory(tmp_path, ".scratch-") as directory:
                assert directory.parent == tmp_path and directory.name.startswith(".scratch-")
                assert directory.stat().st_mode & 0o777 == 0o700
                (directory / "file").write_text("x")
                if error:
                    raise error
        except (ValueError, KeyboardInterrupt) as raised:
            assert type(raised) is error
        assert os.listdir(tmp_path) == []


def test_what_a_living_process_uses_stays_and_what_a_killed_one_left_goes(tmp_path, holder):
    process, held = holder
    assert is_locked(held)
    with scratch_directory(tmp_path, ".scratch-"):
        assert (held / "half").exists()
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    assert not is_locked(held)
    with scratch_directory(tmp_path, ".scratch-") as directory:
        assert os.listdir(tmp_path) == [directory.name]


def test_other_names_files_and_links_are_left_alone(tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / ".scratch-file").write_text("x")
    (tmp_path / ".other-1").mkdir()
    (tmp_path / ".scratch-link").symlink_to(tmp_path / "kept")
    before = sorted(os.listdir(tmp_path))
    with scratch_directory(tmp_path, ".scratch-"):
        pass
    assert sorted(os.listdir(tmp_path)) == before
    assert not is_locked(tmp_path / ".scratch-link")


def test_a_file_is_there_whole_or_as_before(tmp_path):
    path = tmp_path / "file"
    write_file(path, "old ä")
    assert path.read_bytes() == "old ä".encode()
    with pytest.raises(ValueError, match="no"), whole_file(path) as file:
        file.write(b"half")
        file.flush()
        assert path.read_bytes() == "old ä".encode() and partial_path(path).read_bytes() == b"half"
        raise ValueError("no")
    assert path.read_bytes() == "old ä".encode() and os.listdir(tmp_path) == ["file"]
    write_file(path, b"\0new")
    assert path.read_bytes() == b"\0new" and os.listdir(tmp_path) == ["file"]
    with pytest.raises(FileNotFoundError):
        write_file(tmp_path / "missing" / "file", "")


def test_a_file_and_its_name_are_forced_to_the_disk_in_this_order(tmp_path, monkeypatch):
    path, events = tmp_path / "file", []
    fsync, replace = os.fsync, os.replace

    def record_sync(descriptor):
        events.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(os, "replace", lambda *paths: (events.append("replace"), replace(*paths)))
    write_file(path, "text")
    assert events == [str(partial_path(path)), "replace", str(tmp_path)]


def test_a_directory_is_there_whole_or_as_before(tmp_path):
    path = tmp_path / "directory"
    with whole_directory(path) as directory:
        (directory / "inner").mkdir()
        (directory / "inner" / "file").write_text("1")
        assert directory.parent == tmp_path and not path.exists() and is_locked(directory)
    with pytest.raises(OSError, match="not empty"), whole_directory(path) as directory:
        (directory / "other").write_text("2")
    with pytest.raises(ValueError, match="no"), whole_directory(path, replace=True) as directory:
        raise ValueError("no")
    assert os.listdir(tmp_path) == ["directory"] and (path / "inner" / "file").read_text() == "1"
    with whole_directory(path, replace=True) as directory:
        (directory / "other").write_text("2")
    assert os.listdir(tmp_path) == ["directory"] and os.listdir(path) == ["other"]


def test_a_directory_that_another_process_tidies_up_is_not_taken(tmp_path, monkeypatch):
    make, swept = tempfile.mkdtemp, []

    def make_and_be_swept(**options):
        """The first is locked by a process that took it for one that was left, and is about to remove it."""
        path = make(**options)
        if not swept:
            swept.append((path, os.open(path, os.O_RDONLY | os.O_DIRECTORY)))
            fcntl.flock(swept[0][1], fcntl.LOCK_EX)
        return path

    monkeypatch.setattr(tempfile, "mkdtemp", make_and_be_swept)
    path, lock = take_directory(tmp_path, "private-")
    assert str(path) != swept[0][0] and is_locked(path)
    for descriptor in (lock, swept[0][1]):
        os.close(descriptor)


def test_a_directory_is_locked_while_it_is_tidied_up(tmp_path, monkeypatch):
    (tmp_path / "private-left").mkdir()
    held = []
    monkeypatch.setattr(shutil, "rmtree", lambda path, **_: held.append((path.name, is_locked(path))))
    remove_unheld(tmp_path, "private-")
    assert held == [("private-left", True)] and not is_locked(tmp_path / "private-left")
