"""Checkpoints of which each node keeps a part, on a disk of its own: stand-ins for the ranks, two on each node."""

import shutil
from pathlib import Path

import pytest
import xxhash
from configs import grpo_config
from fakes import LocalTeam

from mindrlhf.checkpoint.manifest import verify
from mindrlhf.config.load import load_config
from mindrlhf.data.stream import PromptStream
from mindrlhf.errors import RunFailure, UserError
from mindrlhf.layout.layout import Layout
from mindrlhf.training.checkpoints.requests import SaveRequests
from mindrlhf.training.checkpoints.run import Progress, RunCheckpoints
from mindrlhf.training.checkpoints.shards import SavesState
from mindrlhf.training.replica_team import ReplicaTeam
from mindrlhf.training.results import Machine

NUM_RANKS, RANKS_PER_NODE = 4, 2


class RankWorker(SavesState):
    """Its shard is one number; the disk of its node is a directory."""

    def __init__(self, rank: int, is_cut: bool):
        super().__init__()
        self.rank, self.is_cut = rank, is_cut
        self.node = rank // RANKS_PER_NODE
        self.shard = 100 * rank
        self.fails = False
        self.restored: list[str] = []

    def machine(self):
        return Machine(f"node{self.node}")

    def keep_part(self, save_dir, keep_last):
        return super().keep_part(f"{save_dir}_{self.node}" if save_dir else "", keep_last)

    def close_part(self, files, checksums):
        if self.fails:
            raise RunFailure(f"rank {self.rank} died")
        super().close_part(files, checksums)

    def state_size_bytes(self):
        return 10

    def state_writer(self, hold):
        def write(directory):
            name = f"model/rank_{self.rank}/shards" if self.is_cut else "model/whole"
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(str(self.shard))
            if self.rank == 0:
                (directory / "model" / "sharded.json").write_text("what all nodes need")
            return {name: xxhash.xxh3_64_hexdigest(str(self.shard).encode())}

        return write

    def restore(self, directory):
        self.restored.append(directory)


def team_of(is_cut: bool) -> LocalTeam:
    return LocalTeam([RankWorker(rank, is_cut) for rank in range(NUM_RANKS)])


class Run:
    def __init__(self, tmp_path: Path, *, is_cut: bool = True, layout: str = "dp=2,mp=2,pp=1"):
        parallel = Layout.parse(layout)
        save_dir = {"save_dir": str(tmp_path / "disk")}
        self.config = grpo_config(
            run={"output_dir": str(tmp_path / "out")},
            checkpoint={"every_steps": 1, "keep_last": 2, "node_local": True, **save_dir},
            parallel_config={"data_parallel": parallel.data_parallel, "model_parallel": parallel.model_parallel},
        )
        self.team = team_of(is_cut)
        team = ReplicaTeam(self.team, parallel) if is_cut else self.team
        self.checkpoints = RunCheckpoints(self.config, team, PromptStream(10, seed=0), SaveRequests())
        self.progress = Progress()
        self.disks = tmp_path / "disk", tmp_path / "disk_1"

    def save(self) -> None:
        self.checkpoints.begin_step(self.progress)
        self.progress.step += 1
        for worker in self.team.workers:
            worker.shard += 1
        self.checkpoints.save(self.progress)
        self.checkpoints.wait()

    def names(self) -> list[list[str]]:
        # What is half-written goes when nobody is writing it; here the process that wrote it lives on.
        return [sorted(path.name for path in disk.iterdir() if path.name[0] != ".") for disk in self.disks]

    def resumed_step(self) -> int:
        return self.checkpoints.resume().step


def files(directory: Path) -> set[str]:
    return {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}


def test_each_node_keeps_what_its_ranks_hold_and_what_is_small(tmp_path):
    run = Run(tmp_path)
    for _ in range(3):
        run.save()
    small = {"manifest.json", "model/sharded.json", "state.json"}
    assert run.names() == [["step_00000002", "step_00000003"]] * 2, "both remove what is too old"
    for disk, ranks in zip(run.disks, ((0, 1), (2, 3))):
        verify(disk / "step_00000003")
        assert files(disk / "step_00000003") == small | {f"model/rank_{rank}/shards" for rank in ranks}
    again = Run(tmp_path)
    assert again.resumed_step() == 3
    assert all(worker.restored == [str(run.disks[0] / "step_00000003")] for worker in again.team.workers)


def test_a_whole_model_is_written_by_the_first_rank_of_each_node(tmp_path):
    run = Run(tmp_path, is_cut=False)
    run.save()
    assert [(disk / "step_00000001" / "model" / "whole").read_text() for disk in run.disks] == ["1", "201"]
    assert Run(tmp_path, is_cut=False).resumed_step() == 1


@pytest.mark.parametrize("rank", [0, 2])
def test_a_node_that_dies_while_parts_are_closed_costs_the_step_that_was_being_saved(tmp_path, rank):
    run = Run(tmp_path)
    run.save()
    run.team.workers[rank].fails = True
    with pytest.raises(RunFailure):
        run.save()
    assert "step_00000002" not in run.names()[0], "rank 0's node is the last to take it over"
    again = Run(tmp_path)
    assert again.resumed_step() == 1
    again.progress.step = 1
    again.save()
    assert Run(tmp_path).resumed_step() == 2
    assert Run(tmp_path).names() == [["step_00000001", "step_00000002"]] * 2


def test_damage_on_one_node_costs_the_step_on_all(tmp_path, capsys):
    run = Run(tmp_path)
    run.save()
    run.save()
    (run.disks[1] / "step_00000002" / "model" / "rank_3" / "shards").write_text("999")
    assert Run(tmp_path).resumed_step() == 1
    assert "warning: checkpoint 2 is skipped: node 1: " in capsys.readouterr().err


def test_a_node_without_its_disk_is_named(tmp_path):
    run = Run(tmp_path)
    run.save()
    shutil.rmtree(run.disks[1])
    with pytest.raises(UserError, match=r"no step of which every node .*: node 0 has 1; node 1 has none\. Copy"):
        Run(tmp_path).resumed_step()


def test_another_layout_says_what_to_copy_where_and_goes_on_when_that_is_done(tmp_path):
    run = Run(tmp_path)
    run.save()
    with pytest.raises(UserError) as refused:
        Run(tmp_path, layout="dp=1,mp=4,pp=1").resumed_step()
    directory = run.disks[0] / "step_00000001" / "model"
    wanted = [(rank, 1 - rank // 2) for rank in (2, 3, 0, 1)]
    assert str(refused.value).splitlines()[1:] == [
        f"  copy {directory}/rank_{rank} of node {1 - node} to the same place on node {node}" for rank, node in wanted
    ]
    for rank, node in wanted:
        parts = [disk / "step_00000001" / "model" / f"rank_{rank}" for disk in run.disks]
        shutil.copytree(parts[1 - node], parts[node])
    assert Run(tmp_path, layout="dp=1,mp=4,pp=1").resumed_step() == 1


def test_parts_that_were_copied_together_are_a_checkpoint_for_one_machine(tmp_path):
    run = Run(tmp_path)
    run.save()
    model, other = (disk / "step_00000001" / "model" for disk in run.disks)
    for rank in (2, 3):
        shutil.copytree(other / f"rank_{rank}", model / f"rank_{rank}")
    again = team_of(is_cut=True)
    for worker in again.workers:
        worker.node = 0
    team = ReplicaTeam(again, Layout.parse("dp=2,mp=2,pp=1"))
    checkpoints = RunCheckpoints(run.config, team, PromptStream(10, seed=0), SaveRequests())
    assert checkpoints.resume().step == 1


def test_what_cannot_work_is_refused():
    overrides = ["checkpoint.node_local=true", "checkpoint.keep_last=1"]
    with pytest.raises(UserError) as refused:
        load_config("train", "examples/sanity/config.yaml", overrides, world_size=1)
    assert "but checkpoint.save_dir is empty" in str(refused.value) and "give at least 2" in str(refused.value)
