"""The store under kills, damage and full disks."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mindrlhf.checkpoint import store as store_module
from mindrlhf.checkpoint.manifest import MANIFEST_NAME, verify
from mindrlhf.checkpoint.store import CheckpointStore
from mindrlhf.errors import RunFailure, UserError


def save(store, step, text="weights"):
    with store.writing(step, size_bytes=100) as directory:
        (directory / "model").mkdir()
        (directory / "model" / "model.safetensors").write_text(f"{text} {step}")
        (directory / "state.json").write_text("{}")


def names(save_dir):
    return sorted(os.listdir(save_dir))


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(tmp_path / "run" / "checkpoints", keep_last=2)


def test_a_checkpoint_appears_whole_when_the_block_ends(store):
    assert store.latest() is None
    with store.writing(100, size_bytes=10) as directory:
        (directory / "state.json").write_text("{}")
        assert os.stat(directory).st_dev == os.stat(store.save_dir).st_dev
        assert store.latest() is None
        assert store.steps() == []
    assert names(store.save_dir) == ["step_00000100"]
    assert names(store.path(100)) == [MANIFEST_NAME, "state.json"]
    assert store.latest() == store.save_dir / "step_00000100"
    verify(store.latest())


@pytest.mark.parametrize("failure", [RunFailure("rank 1 died"), KeyboardInterrupt(), SystemExit(3)])
def test_a_failed_block_leaves_nothing(store, failure):
    save(store, 1)
    with pytest.raises(type(failure)):
        with store.writing(2, size_bytes=10) as directory:
            (directory / "half").write_text("...")
            raise failure
    assert names(store.save_dir) == ["step_00000001"]


def test_a_disk_that_refuses_is_one_line_that_names_the_checkpoint(store):
    save(store, 1)
    with pytest.raises(UserError, match=r"step_00000002 cannot be written \(No space left on device\)"):
        with store.writing(2, size_bytes=10):
            with open("/dev/full", "wb") as full:
                full.write(b"weights")
    assert store.latest() == store.path(1)
    assert names(store.save_dir) == ["step_00000001"]


def test_an_error_of_who_writes_a_part_names_the_checkpoint_too(store):
    def write_part(directory):
        try:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise UserError(f"{directory}/model cannot be written") from error

    with pytest.raises(UserError, match=r"step_00000002 cannot be written \(No space left on device\): make room"):
        with store.writing(2, size_bytes=10) as directory:
            write_part(directory)
    with pytest.raises(UserError, match="another mistake"):
        with store.writing(2, size_bytes=10):
            raise UserError("another mistake")
    assert names(store.save_dir) == []


def test_only_the_newest_are_kept(store):
    for step in (1, 2, 3, 10, 11):
        save(store, step)
    assert names(store.save_dir) == ["step_00000010", "step_00000011"]
    assert store.steps() == [10, 11]


def test_the_one_just_written_stays_when_newer_ones_are_there(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=1)
    save(store, 30)
    save(store, 20)
    assert store.steps() == [20, 30]
    save(store, 40)
    assert store.steps() == [40]


def test_steps_are_ordered_as_numbers_beyond_eight_digits(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=5)
    save(store, 99_999_999)
    save(store, 123_456_789)
    assert store.latest().name == "step_123456789"


def test_what_is_not_ours_is_neither_counted_nor_removed(tmp_path):
    others = ["step_1", "step_00000001_backup", ".step_00000001.partial", "notes.txt", "step_000000001"]
    for name in others:
        (tmp_path / name).mkdir()
    store = CheckpointStore(tmp_path, keep_last=1)
    for step in (1, 2, 3):
        save(store, step)
    assert store.steps() == [3]
    assert names(tmp_path) == sorted([*others, "step_00000003"])


def cut_short(checkpoint):
    path = checkpoint / "model" / "model.safetensors"
    path.write_text(path.read_text()[:-1])
    return path


def link_the_checkpoint(checkpoint):
    checkpoint.rename(checkpoint.parent / "moved")
    checkpoint.symlink_to(checkpoint.parent / "moved")
    return checkpoint


# Every other damage is in test_manifest.py.
@pytest.mark.parametrize("damage", [cut_short, link_the_checkpoint])
def test_a_damaged_checkpoint_is_skipped_with_a_warning_and_can_be_written_again(store, damage, capsys):
    save(store, 1)
    save(store, 2)
    damaged_file = damage(store.path(2))
    assert store.latest() == store.path(1)
    warning = capsys.readouterr().err
    assert warning.count("\n") == 1
    assert warning.startswith("warning: checkpoint ")
    assert str(damaged_file) in warning
    save(store, 2, text="other weights")
    assert store.latest() == store.path(2)
    assert (store.path(2) / "model" / "model.safetensors").read_text() == "other weights 2"
    assert store.steps() == [1, 2]
    assert capsys.readouterr().err == ""


def test_too_little_room_is_an_error_before_anything_is_written(store, monkeypatch):
    save(store, 1)
    usage = store_module.shutil.disk_usage(store.save_dir)._replace(free=5 * 2**30)
    monkeypatch.setattr(store_module.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(UserError) as error:
        with store.writing(2, size_bytes=6 * 2**30):
            pytest.fail("the block must not run")
    assert "needs 6442450944 bytes (6.00 GiB)" in str(error.value)
    assert "has 5368709120 (5.00 GiB) free" in str(error.value)
    assert names(store.save_dir) == ["step_00000001"]
    with store.writing(2, size_bytes=5 * 2**30):
        pass
    assert store.steps() == [1, 2]


def test_more_than_any_disk_has_does_not_fit(store):
    with pytest.raises(UserError, match=f"needs {2**62} bytes"):
        store.check_space(2**62)


def test_a_directory_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file/checkpoints cannot be used .*checkpoint\.save_dir"):
        CheckpointStore(tmp_path / "file" / "checkpoints", keep_last=1)


# Writes step 2 and stops for good at the named point.
WRITER = """
import os, sys, time
from mindrlhf.checkpoint import store as store_module
from mindrlhf.system import files as files_module
from mindrlhf.checkpoint.store import CheckpointStore

def stop(*arguments, **options):
    print("stopped", flush=True)
    time.sleep(600)

point, save_dir = sys.argv[1:]
store = CheckpointStore(save_dir, keep_last=1)
if point == "manifest":
    store_module.write_manifest = stop
elif point == "sync":
    files_module.sync_tree = stop
elif point == "rename":
    rename = os.rename
    os.rename = lambda source, target: stop() if target == store.path(2) else rename(source, target)
elif point == "prune":
    store_module.shutil.rmtree = lambda path, **options: stop() if os.path.exists(path) else None
with store.writing(2, size_bytes=10) as directory:
    with open(directory / "state.json", "w") as file:
        file.write("half of it")
        file.flush()
        if point == "write":
            stop()
"""


@pytest.fixture
def start_writer():
    processes = []

    def start(point, save_dir):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, point, str(save_dir)], stdout=subprocess.PIPE, text=True
        )
        processes.append(process)
        assert process.stdout.readline() == "stopped\n"
        return process

    yield start
    for process in processes:
        process.kill()
        process.wait(timeout=30)
        process.stdout.close()


@pytest.mark.parametrize("point", ["write", "manifest", "sync", "rename"])
def test_kill_9_while_writing_leaves_the_previous_checkpoint(tmp_path, start_writer, point):
    save(CheckpointStore(tmp_path, keep_last=1), 1)
    process = start_writer(point, tmp_path)
    assert len(names(tmp_path)) == 2, "the temporary directory of the writer"
    process.send_signal(signal.SIGKILL)
    assert process.wait(timeout=30) == -signal.SIGKILL
    store = CheckpointStore(tmp_path, keep_last=1)
    assert names(tmp_path) == ["step_00000001"]
    assert store.latest() == store.path(1)
    save(store, 2)
    assert names(tmp_path) == ["step_00000002"]


def test_kill_9_while_pruning_leaves_the_new_checkpoint(tmp_path, start_writer):
    save(CheckpointStore(tmp_path, keep_last=1), 1)
    process = start_writer("prune", tmp_path)
    being_removed, new = names(tmp_path)
    assert being_removed.startswith(".step_00000001.") and new == "step_00000002"
    process.kill()
    process.wait(timeout=30)
    store = CheckpointStore(tmp_path, keep_last=1)
    assert store.latest() == store.path(2)
    assert not [name for name in names(tmp_path) if name.startswith(".")]


def test_who_only_reads_makes_and_removes_nothing(tmp_path):
    reader = CheckpointStore(tmp_path / "none", 1, only_reads=True)
    assert not reader.save_dir.exists()
    store = CheckpointStore(tmp_path, 1)
    with store.writing(1, 10) as temporary:
        (temporary / "file").write_text("x")
        left = temporary.name
    (tmp_path / left).mkdir()  # as a run that prunes has it for a moment
    assert CheckpointStore(tmp_path, 1, only_reads=True).steps() == [1]
    assert (tmp_path / left).exists()
    CheckpointStore(tmp_path, 1)
    assert not (tmp_path / left).exists()


def test_what_a_living_process_is_writing_is_left_alone(tmp_path, start_writer):
    process = start_writer("write", tmp_path)
    (temporary,) = names(tmp_path)
    CheckpointStore(tmp_path, keep_last=1)
    assert names(tmp_path) == [temporary]
    assert (Path(tmp_path) / temporary / "state.json").read_text() == "half of it"
    process.kill()
    process.wait(timeout=30)
    CheckpointStore(tmp_path, keep_last=1)
    assert names(tmp_path) == []


def test_the_best_is_kept_beside_the_newest(store):
    for step in range(1, 8):
        with store.writing(step, size_bytes=10, best_step=3 if step >= 3 else None) as directory:
            (directory / "state.json").write_text("{}")
    assert store.steps() == [3, 6, 7]
    with store.writing(8, size_bytes=10, best_step=8) as directory:
        (directory / "state.json").write_text("{}")
    assert store.steps() == [7, 8]
