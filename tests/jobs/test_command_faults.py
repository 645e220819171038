"""Commands that write files, killed or on a full disk: nothing is half-written, and the same command goes on."""

import contextlib
import json
import shutil
from pathlib import Path

import pytest
import sanity_inputs
import small_disks
from fault_jobs import FaultProcess
from slow_tests import SLOW

from mindrlhf.data.mindrecord import PromptFile

pytestmark = pytest.mark.timeout(900)

TIMEOUT_S = 400  # generous: other work may load the machine
NUM_RECORDS = 4_000
NAME = "prompts.mindrecord"


@pytest.fixture(scope="module")
def many_prompts(tmp_path_factory) -> Path:
    """Raw data that takes a moment to encode and to write."""
    path = tmp_path_factory.mktemp("raw") / "many.jsonl"
    lines = (json.dumps({"prompt": f"{number}: " + "#$%&" * 40, "answer": "none"}) for number in range(NUM_RECORDS))
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def start_command(tmp_path_factory):
    """Start a command in the background: ``start_command("data", "build", ...)``."""
    commands = []

    def start(*arguments: object) -> FaultProcess:
        commands.append(FaultProcess(tmp_path_factory.mktemp("command"), *arguments))
        return commands[-1]

    yield start
    for command in commands:
        command.clean_up()


@pytest.fixture
def small_disk(tmp_path):
    """Mount a disk: ``small_disk("4m")``; skips the test where this user may not."""
    with contextlib.ExitStack() as stack:

        def mount(size: str) -> small_disks.SmallDisk:
            disk = stack.enter_context(small_disks.mounted(tmp_path / "disk", size))
            return disk or pytest.skip("mounting a tmpfs takes root")

        yield mount


def build_arguments(raw: Path, output: Path, tokenizer_dir: Path) -> list[object]:
    return [
        *("data", "build", "--input", raw, "--output", output, "--tokenizer", tokenizer_dir),
        *("--handler", "map_keys", "--map", "question=prompt,answer=answer", "--template", "plain"),
        *("--max-prompt-length", 512, "--processes", 2),
    ]


@SLOW
def test_kill_9_of_a_data_build_leaves_nothing_under_the_final_name(start_command, many_prompts, sanity_dir, tmp_path):
    directory = tmp_path / "out"
    directory.mkdir()
    arguments = build_arguments(many_prompts, directory / NAME, sanity_dir / "model")
    build = start_command(*arguments)
    build.wait_until(lambda: any(directory.glob(".mindrecord-*/*")))
    build.kill()
    assert build.leftovers() == []
    assert not list(directory.glob(f"{NAME}*"))
    build = start_command(*arguments)
    assert build.wait(TIMEOUT_S) == 0, build.text()
    assert sorted(path.name for path in directory.iterdir()) == [NAME, f"{NAME}.db"]
    assert len(PromptFile.open(directory / NAME)) == NUM_RECORDS


@SLOW
@pytest.mark.parametrize(
    ("size", "num_files", "words"),
    [
        ("1m", 0, "No free disk"),
        ("10m", 0, "No free disk"),
        ("64m", 5, "Failed to write mindrecord meta files"),  # when the index is written
    ],
)
def test_a_full_disk_ends_a_data_build_and_spares_the_old_file(
    start_command, many_prompts, sanity_dir, small_disk, size, num_files, words
):
    disk = small_disk(size)
    old = {disk.path / name: b"of an earlier build" for name in (NAME, f"{NAME}.db")}
    for path, content in old.items():
        path.write_bytes(content)
    assert disk.allow_files(num_files)
    build = start_command(*build_arguments(many_prompts, disk.path / NAME, sanity_dir / "model"))
    assert build.wait(TIMEOUT_S) == 2, build.text()
    (line,) = [line for line in build.text().splitlines() if line.startswith("mindrlhf data: error: ")]
    assert words in line
    assert "Traceback" not in build.text()
    assert build.leftovers() == []
    assert {path: path.read_bytes() for path in disk.path.iterdir()} == old


def shard_arguments(model: Path, out: Path) -> list[object]:
    return ["weights", "shard", model, "--parallel", "dp=4,opt=4", "--output", out]


def verified(out: Path, model: Path) -> None:
    finished = sanity_inputs.run("weights", "verify", out, "--against", model, timeout_s=TIMEOUT_S)
    assert finished.returncode == 0, finished.stderr


def test_kill_9_of_sharding_is_made_good_by_the_same_command(start_command, sanity_dir, tmp_path):
    out, model = tmp_path / "out", sanity_dir / "model"
    for _ in range(10):
        shard = start_command(*shard_arguments(model, out))
        shard.wait_until(lambda: any(out.glob("rank_*/*")))
        shard.kill()
        if not (out / "sharded.json").exists():
            break
        shutil.rmtree(out)  # it was done before the kill
    else:
        raise AssertionError("the command was never caught at work")
    assert shard.leftovers() == []
    shard = start_command(*shard_arguments(model, out))
    assert shard.wait(TIMEOUT_S) == 0, shard.text()
    assert not list(out.rglob("*.partial"))
    verified(out, model)


@SLOW
def test_a_full_disk_ends_sharding_and_the_same_command_goes_on(start_command, sanity_dir, small_disk):
    disk = small_disk("64m")
    out, model = disk.path / "out", sanity_dir / "model"
    # Three for the directories and the progress, three for each rank that is done: the last of four ranks fails.
    assert disk.allow_files(12)
    shard = start_command(*shard_arguments(model, out))
    assert shard.wait(TIMEOUT_S) == 2, shard.text()
    (line,) = [line for line in shard.text().splitlines() if "error:" in line]
    assert "No space left on device" in line and "run the same command again" in line
    assert "Traceback" not in shard.text()
    assert shard.leftovers() == []
    assert not list(out.rglob("*.partial")) and not (out / "sharded.json").exists()
    assert disk.allow_files(0)
    shard = start_command(*shard_arguments(model, out))
    assert shard.wait(TIMEOUT_S) == 0, shard.text()
    assert "3 ranks are there already" in shard.text()
    verified(out, model)
