"""What scripts/setup.sh says while pip works: how many files, how large, which one."""

import re
import subprocess
from pathlib import Path

SCRIPT = (Path(__file__).parents[1] / "scripts" / "setup.sh").read_text()
LOG = """
$ .venv/bin/python -m pip install -e .[cpu]
Collecting mindspore==2.9.0 (from mindrlhf)
  Downloading mindspore-2.9.0-cp311-cp311-manylinux1_x86_64.whl (190.4 MB)
Collecting numpy<2
  Downloading numpy-1.26.4-cp311-cp311-manylinux_2_17_x86_64.whl.metadata (61 kB)
"""


def functions(*names: str) -> str:
    found = [re.search(rf"^{name}\(\) \{{.*?(?:^\}}|\}})$", SCRIPT, re.M | re.S)[0] for name in names]
    return "set -euo pipefail\nWIDTH=1000\n" + "\n".join(found) + "\n"


def bash(text: str, *words: str) -> subprocess.CompletedProcess:
    command, place = ["bash", "-c", text, "bash", *words], Path(words[0]).parent
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=place)


def test_the_line_names_files_size_and_what_is_downloaded(tmp_path):
    log, made = tmp_path / "log", tmp_path / "env"
    made.mkdir()
    (made / "file").write_bytes(b"x" * (3 << 20))
    ask = functions("progress_of") + 'progress_of "$1" "$2"'
    for text, expected in (
        ("", ""),
        (LOG, r"2 files, \d+ MB: Downloading numpy-1\.26\.4 \(61 kB\)"),
        ("12 packages to install\n" + LOG, r"2 of 12 files, \d+ MB: Downloading numpy-1\.26\.4 \(61 kB\)"),
        (LOG + "Installing collected packages: a, b, c\n", r"2 files, [3-9] MB: Installing collected packages"),
    ):
        log.write_text(text)
        told = bash(ask, str(log), str(made))
        assert told.returncode == 0, told.stderr
        assert re.fullmatch(expected, told.stdout), told.stdout


def test_a_command_that_takes_long_is_followed_and_one_that_fails_leaves_nobody(tmp_path):
    log = tmp_path / ".setup-train.log"
    text = (
        functions("say", "fail", "progress_of", "follow", "run", "run_quietly")
        + "NETWORK_ERRORS=none\nSETUP_NEWS_S=0.2\n"
    )
    slow = text + 'run "$1" bash -c "echo Downloading torch-2.13 \\(190.4 MB\\); sleep 5"; echo rc $?'
    told = bash(slow, str(log))
    assert re.search(r"^setup: \.venv, \d+ s: 1 file, \d+ MB: Downloading torch-2\.13", told.stdout, re.M), told
    assert told.stdout.endswith("rc 0\n")
    failing = bash(text + 'run "$1" false; echo never', str(log))
    assert failing.returncode == 1 and "'false' failed" in failing.stderr and "never" not in failing.stdout
