"""Checkpoints that several ranks write while the run goes on: stand-ins for the ranks, the real team and store."""

import errno
import threading
from pathlib import Path

import pytest
import test_checkpoints

from mindrlhf.checkpoint.manifest import verify
from mindrlhf.errors import UserError
from mindrlhf.training.preflight.output import newest_checkpoint


class Run(test_checkpoints.Run):
    def __init__(self, tmp_path):
        super().__init__(tmp_path, "dp=2,mp=2,pp=1")

    def save_slowly(self, rank):
        """Make a step and save it; return the worker whose part is not written before it may."""
        worker = self.team.workers[rank]
        self.step()
        worker.may_write.clear()
        self.checkpoints.save(self.progress)
        return worker

    def names(self):
        return sorted(path.name for path in self.save_dir.iterdir())


def contents(directory):
    verify(directory)
    return [(directory / f"rank_{rank}").read_text() for rank in range(4)]


def test_the_run_goes_on_until_the_slowest_rank_has_written_what_it_held_then(tmp_path):
    run = Run(tmp_path)
    slow = run.save_slowly(rank=2)
    run.step()
    run.step()
    assert newest_checkpoint(run.config) is None and all(worker.num_asked == 2 for worker in run.team.workers)
    slow.may_write.set()
    for worker in run.team.workers:  # on a busy machine another may be the last
        worker._shard_writer._thread.join()
    run.step()
    run.checkpoints._writer.wait()
    assert run.names() == ["step_00000001"]
    assert contents(run.save_dir / "step_00000001") == ["1", "101", "201", "301"]
    run.step()
    assert slow.num_asked == 3, "nothing is being written, so nobody is asked"


def test_the_next_save_and_the_end_wait_for_the_last_one(tmp_path):
    run = Run(tmp_path)
    slow = run.save_slowly(rank=3)
    run.step()
    threading.Timer(0.1, slow.may_write.set).start()
    run.checkpoints.save(run.progress)
    assert contents(run.save_dir / "step_00000001") == ["1", "101", "201", "301"]
    run.checkpoints.wait()
    assert run.names() == ["step_00000001", "step_00000002"]
    assert contents(run.save_dir / "step_00000002") == ["2", "102", "202", "302"]


@pytest.mark.parametrize("rank", [0, 3])
def test_a_rank_that_cannot_write_ends_the_run_and_nothing_is_left(tmp_path, rank):
    run = Run(tmp_path)
    run.step()
    run.checkpoints.save(run.progress)
    run.checkpoints.wait()

    def refuse(directory):
        raise OSError(errno.ENOSPC, "No space left on device", str(directory))

    run.team.workers[rank].state_writer = lambda hold: refuse
    run.step()
    with pytest.raises(UserError, match=r"step_00000002 cannot be written \(No space left on device\): make room"):
        run.checkpoints.save(run.progress)
        for worker in run.team.workers:
            worker._shard_writer._thread.join()
        run.step()  # where it is noticed
    assert run.names() == ["step_00000001"]
    run.checkpoints.close()


def test_a_rank_that_dies_while_it_should_begin_leaves_nothing(tmp_path):
    run = Run(tmp_path)
    run.step()

    def die(directory, copies):
        raise UserError("rank 1: it is gone")

    run.team.workers[1].begin_saving = die
    with pytest.raises(UserError, match="rank 1"):
        run.checkpoints.save(run.progress)
    assert run.names() == []
    assert Path(run.save_dir).is_dir()
