"""The tiers of the tests: each test is in one, and `-m nightly` runs what MINDRLHF_SLOW_TESTS=1 adds."""

import os
import subprocess
import sys
from pathlib import Path

from slow_tests import VARIABLE

ROOT = Path(__file__).parents[1]
# A file of every day, one with a slow test among others, and one with larger models at night.
FILES = ("tests/test_tiers.py", "tests/cpu/test_multi_step.py", "tests/rewards/code/test_cheats.py")


def collected(*options: str, is_nightly: bool = False) -> set[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment.pop(VARIABLE, None)
    environment |= {VARIABLE: "1"} if is_nightly else {}
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *options]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode in (0, 5), done.stdout + done.stderr
    return {line for line in done.stdout.splitlines() if line.startswith("tests/")}


def test_tests_outside_jobs_are_unit_and_nightly_ones_are_more_of_them():
    by_day, at_night = collected("-m", "not jobs", *FILES), collected("-m", "unit", *FILES, is_nightly=True)
    nightly = collected("-m", "nightly", *FILES)
    assert by_day < at_night and at_night - by_day <= nightly < at_night
    assert {one.partition("::")[0] for one in nightly} == set(FILES[1:])
    assert not any("test_cheats" in one for one in at_night - nightly), "all of a file with more cases is nightly"


def test_a_run_leaves_nothing_and_removes_what_killed_ones_left(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    left, kept = (tmp_path / f"mindrlhf-test-inputs-{pid}-abc" for pid in (ended.pid, os.getpid()))
    for directory in (left, kept, tmp_path / "mindrlhf-test-own"):
        (directory / "full").mkdir(parents=True)
    shared = ("MINDRLHF_GRAPH_CACHE", "MINDRLHF_TEST_INPUTS", "LOCAL_DEFAULT_PATH")
    environment = {name: value for name, value in os.environ.items() if name not in shared}
    command = [sys.executable, "-m", "pytest", "-q", "tests/test_keep_run.py"]
    environment["TMPDIR"] = str(tmp_path)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path.name for path in tmp_path.iterdir() if path.name.startswith("mindrlhf-")} == {
        kept.name, "mindrlhf-test-own"}  # fmt: skip
    assert all(Path(os.environ[name]).is_dir() for name in shared), "MindFormers logs there where nobody says where"
