"""What goes wrong while sharding, and damage found afterwards: one line with the fix, and nothing half-written."""

import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from sharding_models import CONFIG, make_model
from slow_tests import SLOW

from mindrlhf.cli import main
from mindrlhf.errors import UserError
from mindrlhf.shards import shard as sharding
from mindrlhf.shards.merge import merge_directory
from mindrlhf.shards.shard import shard_directory
from mindrlhf.shards.verify import verify_directory

LAYOUT = "dp=2,mp=2,pp=2"
NUM_RANKS = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "hf", "bfloat16")


@pytest.fixture(scope="module")
def whole(tmp_path_factory, model):
    directory = tmp_path_factory.mktemp("whole") / "sharded"
    shard_directory(model, directory, parallel=LAYOUT)
    return directory


@pytest.fixture
def sharded(tmp_path, whole):
    return shutil.copytree(whole, tmp_path / "sharded")


def refused(action, *arguments, **options):
    with pytest.raises(UserError) as raised:
        action(*arguments, **options)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def run_shard(model, out, before):
    """Shard in a process of its own, which first runs ``before``."""
    command = ["weights", "shard", str(model), "--parallel", LAYOUT, "--output", str(out)]
    program = f"{before}\nimport sys\nfrom mindrlhf.cli import main\nsys.exit(main({command!r}))"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)


KILL = """
import os, signal
import mindrlhf.{module} as place
calls, original = [], place.{name}
def killing(*arguments, **options):
    calls.append(1)
    if len(calls) == {call}:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*arguments, **options)
place.{name} = killing
"""


@pytest.mark.parametrize(
    ("module", "name", "call", "finished"),
    [
        ("weights.file_writer", "TensorFileWriter.write_summed", 30, 0),  # in the first batch
        ("weights.file_writer", "TensorFileWriter.finish", 4, 2),  # after the first batch of two ranks
        # Four are written, and two of the others linked to them.
        pytest.param("shards.shard", "_Sharding._link_rank", 3, 6, marks=SLOW),
        pytest.param("shards.shard", "_Sharding._copy_companions", 1, 8, marks=SLOW),
        ("shards.shard", "_Sharding._finished_manifest", 1, 8),
    ],
)
def test_killed_and_run_again(tmp_path, model, module, name, call, finished):
    out = tmp_path / "out"
    killed = run_shard(model, out, KILL.format(module=module, name=name, call=call))
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not (out / "sharded.json").exists()
    assert "run that command again" in refused(verify_directory, out)
    before = {path: path.stat().st_mtime_ns for path in out.glob("rank_*/checkpoint_*.safetensors")}
    assert finished <= len(before) <= finished + 1
    lines = []
    shard_directory(model, out, parallel=LAYOUT, report=lines.append)
    assert not before or f"{len(before)} ranks are there already" in lines
    assert {path: path.stat().st_mtime_ns for path in before} == before, "finished ranks were written again"
    verify_directory(out, against=model)
    assert not list(out.rglob("*.partial")) and not (out / "progress.json").exists()
    lines.clear()
    shard_directory(model, out, parallel=LAYOUT, report=lines.append)
    assert lines == [f"{out} holds all {NUM_RANKS} ranks already"]


def test_a_disk_that_fills_up(tmp_path, model):
    """The limit on file sizes stands for a full disk: the same kind of error from the same calls."""
    out = tmp_path / "out"
    largest = max(path.stat().st_size for path in Path(model).glob("*.safetensors")) // 16
    failed = run_shard(
        model, out, f"import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, ({largest}, {largest}))"
    )
    assert failed.returncode == 2, failed.stderr
    (line,) = [line for line in failed.stderr.splitlines() if "error:" in line]
    assert "cannot be written" in line and "run the same command again" in line
    assert (
        not list(out.rglob("*.partial")) and not list(out.rglob("checkpoint_*")) and not (out / "sharded.json").exists()
    )
    shard_directory(model, out, parallel=LAYOUT)
    verify_directory(out, against=model)


def test_a_disk_that_is_too_small_is_noticed_first(tmp_path, model, sharded, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(sharding.shutil, "disk_usage", lambda path: usage)
    message = refused(shard_directory, model, tmp_path / "out", parallel=LAYOUT)
    assert "the shards need" in message and "make room" in message
    assert not list((tmp_path / "out").rglob("*.safetensors"))
    assert "make room" in refused(merge_directory, sharded, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_two_commands_at_once(tmp_path, model):
    with sharding._locked(tmp_path / "out"):
        assert "another command is writing" in refused(shard_directory, model, tmp_path / "out", parallel=LAYOUT)


def test_the_output_directory_is_not_taken_over(tmp_path, model, sharded):
    assert "of another model, layout" in refused(shard_directory, model, sharded, parallel="mp=2")
    assert "of another model, layout" in refused(shard_directory, sharded, sharded, parallel="mp=2")
    other = make_model(tmp_path / "other", "bfloat16", seed=1)
    assert "of another model, layout" in refused(shard_directory, other, sharded, parallel=LAYOUT)
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").touch()
    assert "is no sharded directory" in refused(shard_directory, model, tmp_path / "used", parallel=LAYOUT)
    assert "exists already" in refused(merge_directory, sharded, tmp_path / "used")


def test_a_source_that_changes_meanwhile(tmp_path, model, monkeypatch):
    reads = []
    original = sharding.HuggingFaceSource.read

    def changing(self, name):
        array, checksums = original(self, name)
        reads.append(name)
        return array, checksums if reads.count(name) == 1 else dict.fromkeys(checksums, "0" * 16)

    monkeypatch.setattr(sharding.HuggingFaceSource, "read", changing)
    monkeypatch.setattr(sharding._Sharding, "_stage_bytes", lambda self, stage: 1)  # each rank reads the arrays anew
    message = refused(shard_directory, model, tmp_path / "out", parallel=LAYOUT)
    assert "changed in" in message and "meanwhile" in message


def damage_file(path, position=-1):
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def cut_file(path):
    path.write_bytes(path.read_bytes()[:-1])


def edit(path, change):
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: damage_file(d / "rank_5" / "checkpoint_5.safetensors"), r"checkpoint_5\.safetensors is damaged at"),
        (lambda d: cut_file(d / "rank_1" / "checkpoint_1.safetensors"), r"checkpoint_1\.safetensors is truncated"),
        (lambda d: shutil.rmtree(d / "rank_3"), "rank_3 is missing, of 8 ranks"),
        (lambda d: (d / "rank_3" / "manifest.json").unlink(), r"manifest\.json is missing"),
        (lambda d: shutil.copytree(d / "rank_0", d / "rank_8"), "rank_8 does not belong to a layout of 8 ranks"),
        (lambda d: damage_file(d / "rank_2" / "checkpoint_2.safetensors", 20), "rank_2"),
        (lambda d: (d / "sharded.json").unlink(), r"has no sharded\.json"),
        (lambda d: (d / "sharded.json").write_text("{"), "cannot be read as JSON"),
        (lambda d: edit(d / "sharded.json", lambda v: v.update(format_version=9)), "format version 9"),
        (lambda d: edit(d / "sharded.json", lambda v: v.pop("arrays")), "is damaged"),
        (lambda d: edit(d / "rank_4" / "manifest.json", lambda v: v.update(plan="x")), "rank_4 is of another run"),
        (lambda d: edit(d / "config.json", lambda v: v.update(hidden_size=32)), "it is of another model"),
        (
            lambda d: edit(
                d / "rank_6" / "manifest.json",
                lambda v: v["arrays"]["output_layer.weight"].update(offset=[1, 0]),
            ),
            "which is not its place",
        ),
        (
            lambda d: edit(d / "sharded.json", lambda v: v["tensors"]["lm_head.weight"].__setitem__(1, "0" * 16)),
            "do not make the original",
        ),
    ],
)
def test_verify_finds_damage(sharded, damage, message):
    damage(sharded)
    found = refused(verify_directory, sharded)
    assert re.search(message, found), found


def test_a_swap_of_two_ranks_is_found(sharded):
    for name in ("checkpoint_{}.safetensors", "manifest.json"):
        first, second = sharded / "rank_0" / name.format(0), sharded / "rank_1" / name.format(1)
        first.rename(sharded / "aside")
        second.rename(first)
        (sharded / "aside").rename(second)
    assert "which is not its place" in refused(verify_directory, sharded)


def test_reading_for_merge_and_reshard_checks_too(tmp_path, sharded):
    damage_file(sharded / "rank_0" / "checkpoint_0.safetensors")
    assert "is damaged at" in refused(merge_directory, sharded, tmp_path / "merged")
    assert "is damaged at" in refused(shard_directory, sharded, tmp_path / "resharded", parallel="mp=4")
    assert not (tmp_path / "merged").exists() and not list(tmp_path.glob(".merged*"))


def test_a_rank_that_was_lost_is_made_again(model, sharded):
    shutil.rmtree(sharded / "rank_3")
    damage_file(sharded / "rank_5" / "checkpoint_5.safetensors")
    shutil.rmtree(sharded / "rank_5")
    shard_directory(model, sharded, parallel=LAYOUT)
    verify_directory(sharded, against=model)


def test_verify_tells_another_model(tmp_path, sharded):
    same_sizes = make_model(tmp_path / "same", "bfloat16", seed=1)
    assert "differs from" in refused(verify_directory, sharded, against=same_sizes)
    other = make_model(tmp_path / "other", "bfloat16", num_hidden_layers=2)
    assert "config.json differ" in refused(verify_directory, sharded, against=other)


def test_ckpt_files_that_are_damaged(tmp_path, model):
    shard_directory(model, tmp_path / "out", parallel="mp=2", file_format="ckpt")
    path = tmp_path / "out" / "rank_1" / "checkpoint_1.ckpt"
    good = path.read_bytes()
    for position, expected in ((-1, "is damaged at"), (0, "truncated or no ckpt"), (40, "rank_1")):
        damage_file(path, position)
        assert expected in refused(verify_directory, tmp_path / "out")
        path.write_bytes(good)
    cut_file(path)
    assert "is truncated" in refused(verify_directory, tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"parallel": "mp=3"}, "8 query heads"),
        ({"strategy": "/nonexistent"}, "does not exist"),
    ],
)
def test_wrong_options(tmp_path, model, options, message):
    assert message in refused(shard_directory, model, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_a_strategy_of_another_model_and_of_another_config(tmp_path, model, sharded):
    deeper = make_model(tmp_path / "deeper", "bfloat16", num_hidden_layers=CONFIG["num_hidden_layers"] + 1)
    message = refused(shard_directory, deeper, tmp_path / "out", strategy=sharded / "strategy")
    assert "strategy of another model (num_layers is 3" in message
    shard_directory(model, tmp_path / "other", parallel="mp=4")
    shutil.copy(tmp_path / "other" / "strategy" / "merged.ckpt", sharded / "strategy" / "merged.ckpt")
    message = refused(shard_directory, model, tmp_path / "out", strategy=sharded / "strategy")
    assert "damaged or of another config" in message


def test_the_command_end_to_end(tmp_path, model, capsys):
    out, back = str(tmp_path / "out"), str(tmp_path / "back")
    assert main(["weights", "shard", str(model), "--parallel", "dp=2,mp=2", "--output", out, "--processes", "1"]) == 0
    assert main(["weights", "verify", out, "--against", str(model)]) == 0
    printed = capsys.readouterr().out
    assert "each element of each array lies in exactly one shard" in printed and "to the bit" in printed
    assert main(["weights", "reshard", out, "--strategy", f"{out}/strategy", "--output", str(tmp_path / "again")]) == 0
    assert main(["weights", "merge", out, "--output", back]) == 0
    assert main(["weights", "inspect", out]) == 0
    assert "shards of Hugging Face tensors" in capsys.readouterr().out
    shutil.rmtree(f"{out}/rank_1")
    assert main(["weights", "verify", out]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "rank_1 is missing" in error


MEASURE = """
import resource, sys
import mindspore
from mindrlhf.shards.shard import shard_directory
from mindrlhf.shards.verify import verify_directory
from mindrlhf.shards.merge import merge_directory
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
ballast = bytearray(64 * 2**20)  # lifts the peak of the imports, so that growth shows
before = peak()
shard_directory({hf!r}, {out!r}, parallel="mp=2,pp=2", num_workers=2)
verify_directory({out!r}, against={hf!r}, num_workers=2)
merge_directory({out!r}, {back!r}, num_workers=2)
print("grew", peak() - before)
"""


def test_memory_is_that_of_tensors_not_of_the_model(tmp_path):
    """200 MiB of tensors of 4 MiB each."""
    sizes = {"hidden_size": 1024, "intermediate_size": 1024, "num_hidden_layers": 14, "vocab_size": 1024}
    hf_dir = make_model(tmp_path / "hf", "float32", **sizes)
    assert sum(path.stat().st_size for path in hf_dir.glob("*.safetensors")) > 200 * 2**20
    program = MEASURE.format(hf=str(hf_dir), out=str(tmp_path / "out"), back=str(tmp_path / "back"))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    grown_mib = int(done.stdout.rpartition("grew")[2])
    assert grown_mib < 120, f"the peak grew by {grown_mib} MiB"
