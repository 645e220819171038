"""When a run saves, what a checkpoint brings back, and what a broken-off step leaves of it."""

import dataclasses
import os
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
import xxhash
from configs import grpo_config
from fakes import LocalTeam
from made_samples import make_sample

from mindrlhf.checkpoint.algorithm_state import AlgorithmState, KlState, LearningState
from mindrlhf.checkpoint.state import read_progress, read_state
from mindrlhf.data.stream import PromptStream
from mindrlhf.errors import UserError
from mindrlhf.evaluation.heldout import Evaluation
from mindrlhf.layout.layout import Layout
from mindrlhf.training.checkpoints.requests import SaveRequests, StopRequested
from mindrlhf.training.checkpoints.run import Progress, RunCheckpoints, check_continues
from mindrlhf.training.checkpoints.shards import SavesState
from mindrlhf.training.preflight.output import check_output, newest_checkpoint
from mindrlhf.training.replica_team import ReplicaTeam


class RankWorker(SavesState):
    """Stands for the actor of a rank: its weights are one number."""

    def __init__(self, rank=0):
        super().__init__()
        self.rank, self.weights = rank, 100 * rank
        self.may_write = threading.Event()
        self.may_write.set()
        self.size_bytes, self.num_asked = 10, 0

    def state_size_bytes(self):
        return self.size_bytes

    def state_writer(self, hold):
        # The real copies are of arrays; here it matters only when they are made.
        copied = self.weights if hold == self._copies.copy else None

        def write(directory):
            self.may_write.wait(60)
            content = str(self.weights if copied is None else copied).encode()
            path = directory / f"rank_{self.rank}"
            path.write_bytes(content)
            return {path.name: xxhash.xxh3_64_hexdigest(content)}

        return write

    def restore(self, directory):
        self.weights = int(Path(directory, f"rank_{self.rank}").read_text(encoding="utf-8"))

    def is_saving(self):
        self.num_asked += 1
        return super().is_saving()


class Run:
    """A run of one rank, or of the four of a layout."""

    def __init__(self, tmp_path, layout="", seed=0, data=None, train_file="train", **checkpoint):
        self.config = grpo_config(
            run={"output_dir": str(tmp_path), "seed": seed},
            data={"train_file": train_file, "tokenizer_dir": "tokenizer"},
            checkpoint={"every_steps": 0, "keep_last": 9, **checkpoint},
        )
        self.team = LocalTeam([RankWorker(rank) for rank in range(4 if layout else 1)])
        self.lead = self.team.rank_0
        self.stream = PromptStream(10, seed=seed)
        self.requests = SaveRequests()
        team = ReplicaTeam(self.team, Layout.parse(layout)) if layout else self.team
        self.checkpoints = RunCheckpoints(self.config, team, self.stream, self.requests, data)
        self.progress = Progress()
        self.save_dir = self.checkpoints._store.save_dir

    def step(self):
        self.checkpoints.begin_step(self.progress)
        self.stream.next(3)
        for worker in self.team.workers:
            worker.weights += 1
        self.progress.step += 1
        self.progress.weights_version += 1

    def save_step(self):
        self.step()
        self.checkpoints.save(self.progress)
        self.checkpoints.wait()

    def steps(self):
        self.checkpoints.wait()
        return sorted(int(path.name[5:]) for path in self.save_dir.glob("step_*"))


def evaluation(step, accuracy, questions="those"):
    return Evaluation(step, "length", {"length": np.full((4, 1), accuracy)}, 1.0, [], questions)


def test_a_checkpoint_brings_back_everything(tmp_path):
    run = Run(tmp_path)
    run.step()
    run.step()
    run.progress.evaluations.append(evaluation(2, 0.25))
    run.progress.algorithm.kl = KlState(0.125)
    run.progress.leftover = [make_sample([2], [0, 1, 2], 0.5, {"length": 0.5}, prompt="p")]
    run.checkpoints.save(run.progress)
    run.checkpoints.wait()
    following = run.stream.next(20)

    other = Run(tmp_path)
    progress = other.checkpoints.resume()
    assert other.lead.weights == progress.step == 2
    # The loop publishes before its first step, which makes the version that of the run never stopped.
    assert progress.weights_version == 1
    assert other.stream.next(20) == following
    assert progress.algorithm == AlgorithmState(kl=KlState(0.125))
    assert progress.evaluations[0].scores.tolist() == [[0.25]] * 4
    (leftover,) = progress.leftover
    assert (leftover.prompt_text, leftover.reward.parts) == ("p", {"length": 0.5})
    np.testing.assert_array_equal(leftover.completion.token_ids, [0, 1, 2])


def test_a_checkpoint_is_resumed_on_its_own_data_only(tmp_path):
    def data(checksum):
        return {"train_file": {"checksum": checksum, "num_records": 3}, "tokenizer_dir": {"tokenizer": "t"}}

    run = Run(tmp_path, data=data("ab"))
    run.save_step()
    assert Run(tmp_path, data=data("ab"), train_file="moved").checkpoints.resume().step == 1
    other = Run(tmp_path, data=data("cd"))
    with pytest.raises(UserError, match=r"data\.train_file train holds other records \(checksum cd, not ab\)"):
        other.checkpoints.resume()
    assert other.lead.weights == 0, "a refused checkpoint was loaded"


def test_a_checkpoint_with_a_key_that_was_removed_goes_on_and_names_it(tmp_path, capsys):
    run = Run(tmp_path)
    run.checkpoints._config["rollout"]["stall_timeout_s"] = 60.0
    run.save_step()
    check_continues(run.config, {})
    said = "mindrlhf: the checkpoint has 'rollout.stall_timeout_s', which was removed since: it is left out\n"
    assert capsys.readouterr().out == said
    assert Run(tmp_path).checkpoints.resume().step == 1


def test_a_checkpoint_that_knows_nothing_of_its_data_is_resumed_where_its_config_says(tmp_path):
    run = Run(tmp_path)
    run.save_step()
    data = {"train_file": {"checksum": "ab"}}
    assert Run(tmp_path, data=data).checkpoints.resume().step == 1
    with pytest.raises(UserError, match=r"data\.train_file was 'train' and is now 'moved'"):
        Run(tmp_path, data=data, train_file="moved").checkpoints.resume()


def test_the_run_goes_on_while_a_checkpoint_is_written_and_changes_nothing_in_it(tmp_path):
    run = Run(tmp_path)
    run.step()
    run.progress.algorithm.kl = KlState(1.0)
    run.progress.algorithm.learning = LearningState(first_values={"a": 1.0})
    run.lead.may_write.clear()
    run.checkpoints.save(run.progress)
    run.progress.algorithm.kl = KlState(2.0)
    run.progress.algorithm.learning.first_values["a"] = 2.0
    run.progress.evaluations.append(evaluation(2, 0.5))
    run.step()
    assert not list(run.save_dir.glob("step_*"))
    run.lead.may_write.set()
    assert run.steps() == [1]
    directory = newest_checkpoint(run.config)
    assert (directory / "rank_0").read_text() == "1"
    state = read_state(directory)
    assert state.algorithm == AlgorithmState(kl=KlState(1.0), learning=LearningState(first_values={"a": 1.0}))
    assert read_progress(directory) == {"evaluations": [], "leftover": []}


def test_a_failed_write_ends_the_run_at_its_next_step(tmp_path):
    run = Run(tmp_path)
    run.step()
    run.lead.state_writer = lambda hold: lambda directory: Path("/dev/full").write_text("weights", encoding="utf-8")
    run.checkpoints.save(run.progress)
    run.checkpoints._writer._thread.join()
    with pytest.raises(UserError, match="step_00000001 cannot be written"):
        run.checkpoints.begin_step(run.progress)


def test_too_little_room_is_noticed_before_anything_is_copied(tmp_path):
    run = Run(tmp_path)
    run.step()
    run.lead.size_bytes = 10**18
    run.lead.state_writer = None
    with pytest.raises(UserError, match="a checkpoint needs 1000000000000000000 bytes"):
        run.checkpoints.save(run.progress)


def test_checkpoints_are_due_by_plan_for_the_best_accuracy_and_on_request(tmp_path):
    run = Run(tmp_path, every_steps=4, keep_best=True, keep_last=1)
    accuracies = {0: 0.9, 2: 0.3, 3: 0.5, 5: 0.5, 6: 0.2}  # before training does not count; equals do not improve
    run.progress.evaluations.append(evaluation(0, accuracies[0]))
    due = []
    for step in range(1, 8):
        run.step()
        if step in accuracies:
            run.progress.evaluations.append(evaluation(step, accuracies[step]))
        if step == 7:
            run.requests.save = True
        if run.checkpoints.is_due(run.progress):
            due.append(step)
            run.checkpoints.save(run.progress)
    assert due == [2, 3, 4, 7]
    assert run.steps() == [3, 7], "the newest and the best"
    assert not run.requests.save and not run.checkpoints.must_stop


def test_signals_ask_for_checkpoints(tmp_path, capsys):
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM)}
    try:
        run = Run(tmp_path)
        run.requests.listen()
        run.step()
        assert not run.checkpoints.is_due(run.progress)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert run.checkpoints.is_due(run.progress)
        run.checkpoints.save(run.progress)
        assert not run.checkpoints.is_due(run.progress) and not run.checkpoints.must_stop
        run.step()
        os.kill(os.getpid(), signal.SIGTERM)
        assert run.checkpoints.is_due(run.progress) and run.checkpoints.must_stop
        run.checkpoints.save(run.progress)
        assert run.steps() == [1, 2]
        first, second = capsys.readouterr().out.splitlines()
        assert first.startswith("mindrlhf: SIGUSR1: saving step 1 in ")
        assert second.startswith("mindrlhf: SIGTERM: step 2 is saved in ") and second.endswith("with --resume")
        with pytest.raises(SystemExit) as ended:
            os.kill(os.getpid(), signal.SIGTERM)
        assert ended.value.code == 128 + signal.SIGTERM
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_rollout_that_is_broken_off_is_sampled_again(tmp_path):
    run = Run(tmp_path)
    run.step()
    following = PromptStream(10, seed=0)
    following.next(3)
    run.checkpoints.begin_step(run.progress)
    run.stream.next(3)
    with pytest.raises(StopRequested):
        with run.checkpoints.interruptible():
            run.requests._on_stop(signal.SIGTERM, None)
    run.checkpoints.save_broken_off(run.progress)
    other = Run(tmp_path)
    assert other.checkpoints.resume().step == 1
    assert other.stream.next(10) == following.next(10)
    with pytest.raises(StopRequested):
        run.requests.interruptible().__enter__()


def test_outside_of_what_may_be_broken_off_a_request_only_waits():
    requests = SaveRequests()
    with requests.interruptible():
        pass
    requests._on_stop(signal.SIGTERM, None)
    assert requests.stop


def test_a_call_that_other_ranks_wait_for_ends_before_the_request_is_granted():
    requests, done = SaveRequests(), []
    with pytest.raises(StopRequested):
        with requests.interruptible():
            with requests.uninterruptible():
                requests._on_stop(signal.SIGTERM, None)
                done.append("call")
            done.append("not reached")
    assert done == ["call"]
    outside = SaveRequests()
    with outside.uninterruptible():
        outside._on_stop(signal.SIGTERM, None)
    again = SaveRequests()
    with pytest.raises(StopRequested):
        with again.interruptible():
            with again.uninterruptible():
                pass
            again._on_stop(signal.SIGTERM, None)


def test_a_damaged_checkpoint_is_skipped_by_name_and_a_changed_config_refused(tmp_path, capsys):
    run = Run(tmp_path)
    for _ in range(2):
        run.step()
        run.checkpoints.save(run.progress)
    assert run.steps() == [1, 2]
    damaged = tmp_path / "checkpoints" / "step_00000002" / "rank_0"
    damaged.write_text("3")
    other = Run(tmp_path)
    assert other.checkpoints.resume().step == 1
    assert f"{damaged} is damaged" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"run\.seed was 0 and is now 5"):
        Run(tmp_path, seed=5).checkpoints.resume()


def test_the_output_directory_is_checked_before_the_start(tmp_path):
    run = Run(tmp_path)
    unfinished = tmp_path / ".final.partial-123"
    unfinished.mkdir()
    check_output(run.config, resume=False)
    assert not unfinished.exists()
    with pytest.raises(UserError, match="no whole checkpoint to resume from"):
        check_output(run.config, resume=True)
    with pytest.raises(UserError, match="no whole checkpoint to resume from"):
        run.checkpoints.resume()
    run.save_step()
    check_output(run.config, resume=True)
    with pytest.raises(UserError, match="continue it with --resume"):
        check_output(run.config, resume=False)


def test_a_check_of_the_output_makes_nothing(tmp_path):
    config = Run(tmp_path / "other").config
    run_dir, saves = tmp_path / "runs" / "one", tmp_path / "saves"
    config = dataclasses.replace(
        config,
        run=dataclasses.replace(config.run, output_dir=str(run_dir)),
        checkpoint=dataclasses.replace(config.checkpoint, save_dir=str(saves / "of" / "one")),
    )
    check_output(config, resume=False)
    assert newest_checkpoint(config) is None
    with pytest.raises(UserError, match="no whole checkpoint to resume from in .*saves"):
        check_output(config, resume=True)
    assert not run_dir.parent.exists() and not saves.exists()
    saves.write_text("")
    with pytest.raises(UserError, match="'checkpoint.save_dir' is .* is a file"):
        check_output(config, resume=False)


def test_the_best_step_is_that_of_the_prompts_that_the_run_has_now(tmp_path):
    run = Run(tmp_path, keep_best=True, keep_last=1)
    for accuracy, questions in ((0.9, "those"), (0.5, "others"), (0.2, "others")):
        run.step()
        run.progress.evaluations.append(evaluation(run.progress.step, accuracy, questions))
        run.checkpoints.save(run.progress)
    assert run.steps() == [2, 3]
