"""Python 3.12 with MindFormers 2.1.0: the quickstart has the weights that it has in the environment of the tests."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from slow_tests import SLOW

ROOT = Path(__file__).parents[2]


@SLOW
@pytest.mark.timeout(1800)
def test_the_quickstart_has_the_same_weights_on_the_newer_platform(tmp_path, rollout_python):
    python = find_python()
    if python is None:
        pytest.skip("no Python 3.12 is installed")
    call(python, "-m", "venv", tmp_path / "venv")
    newer = tmp_path / "venv" / "bin" / "python"
    call(newer, "-m", "pip", "install", "--quiet", "-e", f"{ROOT}[cpu]")
    call(newer, "-m", "pip", "install", "--quiet", "--no-deps", "mindformers==2.1.0")
    assert "(3, 12)" in call(newer, "-c", "import sys; print(sys.version_info[:2])")
    call("bash", ROOT / "examples" / "quickstart" / "make_data.sh", cwd=ROOT)
    keys = ("run.max_steps=5", "evaluation.before_training=false")
    config = ("examples/quickstart/config.yaml", "--workers", "2", *keys)
    weights = []
    for name, interpreter in (("older", ROOT / ".venv" / "bin" / "python"), ("newer", newer)):
        output = (f"run.output_dir={tmp_path / name}", f"rollout.python={rollout_python}")
        call(interpreter, "-m", "mindrlhf", "train", *config, *output, cwd=ROOT)
        weights.append((tmp_path / name / "final" / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]


def find_python() -> str | None:
    """Return an interpreter on the path, or beside this one, that is a 3.12 and starts."""
    beside = sorted(Path(sys.base_prefix).glob("../3.12*/bin/python3.12"))
    for path in filter(None, [shutil.which("python3.12"), *map(str, beside)]):
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60)
        if re.match(r"Python 3\.12\.", done.stdout):
            return path
    return None


def call(*words, **options) -> str:
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, timeout=1200, **options)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout
