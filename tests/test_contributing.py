"""The first rows of the table "Where a change goes", tried: each change made in a copy of the repository, by the page.

What the row names is what is written, and the tests that it names are run there.
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from page_blocks import ROOT

PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
ROWS = {
    change: (files, tests)
    for change, files, tests in re.findall(r"^\| ([^|]+) \| ([^|]+) \| ([^|]*) \|$", PAGE, flags=re.MULTILINE)
}
VERIFIER = """
from mindrlhf.rewards.registry import register


@register
def full_stop(completion: str, answer: str) -> float:
    \"\"\"1 for a response that ends with a full stop.\"\"\"
    return float(completion.rstrip().endswith("."))
"""
LOSS = """
from mindspore import nn, ops

RATIO = "none"
OPTIONS = ()


class Surrogate(nn.Cell):
    def construct(self, logprobs, log_ratio, advantages, mask, segment_ids):
        return -0.5 * advantages * logprobs, ops.zeros_like(mask), ops.zeros_like(mask)
"""
ESTIMATOR = """
from mindrlhf.algorithms.advantages import RewardBatch, centred

NEEDS = ("group",)
OPTIONS = ()
PER_TOKEN = "never"


def estimate(batch: RewardBatch):
    return batch.spread(2.0 * centred(batch))
"""


class Copy:
    """A copy of the repository in which commands and tests run on its own package."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        skipped = shutil.ignore_patterns(".git", ".venv*", "runs", "__pycache__", ".*_cache", "jobs", "*.safetensors")
        shutil.copytree(ROOT, directory, ignore=skipped)

    def run(self, *arguments: str) -> str:
        ran = self.attempt(*arguments)
        assert ran.returncode == 0, ran.stdout[-4000:]
        return ran.stdout

    def attempt(self, *arguments: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, "-m", *arguments],
            cwd=self.directory,
            env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(self.directory), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=500,
        )

    def path(self, change: str, name: str = "") -> Path:
        """The file that the table names first for a change."""
        named = re.search(r"`([\w/]+\.py)`", ROWS[change][0])[1]
        return self.directory / "mindrlhf" / named.replace("NAME", name)

    def test(self, change: str, *options: str) -> str:
        """Run the tests that the table names for a change."""
        named = re.findall(r"`(tests/[\w/]+/test_\w+\.py|tests/test_\w+\.py)`", ROWS[change][1])
        assert named
        return self.run("pytest", "-q", *named, *options)

    def append(self, path: str, text: str) -> None:
        with (self.directory / path).open("a", encoding="utf-8") as file:
            file.write(text)

    def replace(self, path: Path, before: str, after: str) -> None:
        text = path.read_text(encoding="utf-8")
        assert text.count(before) == 1, f"{path}: {before}"
        path.write_text(text.replace(before, after), encoding="utf-8")


@pytest.fixture
def copy(tmp_path) -> Copy:
    return Copy(tmp_path / "copy")


def test_the_table_has_the_rows():
    assert len(ROWS) > 15
    assert {"a verifier", "a policy loss", "an advantage estimator", "a data handler", "a metric"} <= ROWS.keys()


def test_a_verifier(copy, tmp_path):
    copy.path("a verifier", "full_stop").write_text(VERIFIER)
    assert "full_stop" in copy.run("mindrlhf.cli", "rewards", "list")
    samples, scored = tmp_path / "samples.jsonl", tmp_path / "scored.jsonl"
    samples.write_text("".join(json.dumps({"completion": text, "answer": ""}) + "\n" for text in ("Yes.", "Yes")))
    files = ("--input", str(samples), "--output", str(scored))
    copy.run("mindrlhf.cli", "rewards", "score", "--verifier", "full_stop", *files)
    assert [json.loads(line)["reward"] for line in scored.read_text().splitlines()] == [1.0, 0.0]
    copy.test("a verifier")
    copy.run("pytest", "-q", "tests/test_layering.py")  # the rules of the repository


def _chosen(copy: Copy, key: str, value: str) -> str:
    return copy.run("mindrlhf.cli", "config", "check", "examples/quickstart/config.yaml", f"algorithm.{key}={value}")


@pytest.mark.timeout(900)
def test_a_policy_loss(copy):
    copy.path("a policy loss", "half").write_text(LOSS)
    tests = copy.directory / "tests" / "algorithms"
    copy.append("tests/algorithms/policy_loss_references.py", "\n\ndef half(logp, frozen, old, advantages):\n")
    copy.append("tests/algorithms/policy_loss_references.py", "    return -advantages * logp / 2\n")
    asked = copy.attempt("pytest", "-q", str(tests / "test_policy_losses.py"), "-k", "every_loss")
    assert asked.returncode == 1 and "half" in asked.stdout, "the test that the page names asks for a row"
    copy.replace(tests / "test_policy_losses.py", "OPTIONS = {\n", 'OPTIONS = {\n    "half": {},\n')
    assert "passed" in copy.test("a policy loss", "-k", "every_loss or (half and paper)")


def test_an_advantage_estimator(copy):
    copy.path("an advantage estimator", "double").write_text(ESTIMATOR)
    formula = "\n\ndef double(batch):\n    return [[2.0 * value for value in part] for part in dr_grpo(batch)]\n"
    tests = copy.directory / "tests" / "algorithms" / "test_advantages.py"
    copy.replace(tests, "\n\nOPTIONS = {", f"{formula}\n\nOPTIONS = {{")
    assert "passed" in copy.test("an advantage estimator", "-k", "double")


def test_a_data_handler(copy, tmp_path):
    handlers = copy.path("a data handler")
    reader = "def read_riddles(fields: Mapping) -> Example:\n"
    reader += '    """Riddles: fields ``riddle`` and ``solution``."""\n'
    reader += '    return Example(_question_messages(fields["riddle"], "riddle"), _answer(fields, "solution"))\n'
    copy.replace(handlers, "\n\nHANDLERS: ", f"\n\n{reader}\n\nHANDLERS: ")
    copy.replace(handlers, '    "verl": read_verl,\n', '    "verl": read_verl,\n    "riddles": read_riddles,\n')
    rows, prompts = tmp_path / "rows.jsonl", str(tmp_path / "prompts.mindrecord")
    rows.write_text(json.dumps({"riddle": "What has 4 legs?", "solution": "a table"}) + "\n")
    options = ("--handler", "riddles", "--tokenizer", "examples/quickstart/checkpoint", "--max-prompt-length", "64")
    copy.run("mindrlhf.cli", "data", "build", "--input", str(rows), "--output", prompts, *options)
    shown = copy.run("mindrlhf.cli", "data", "show", prompts, "--tokenizer", "examples/quickstart/checkpoint")
    assert "a table" in shown and "What has 4 legs?" in shown
    assert "passed" in copy.test("a data handler")


def test_a_metric(copy):
    arithmetic = '        "reward/mean": rewards.mean(),\n'
    copy.replace(copy.path("a metric"), arithmetic, arithmetic + '        "reward/median": np.median(rewards),\n')
    one = ("-k", "every_metric")
    asked = copy.attempt("pytest", "-q", "tests/test_docs.py", *one)
    assert asked.returncode == 1 and "reward/median" in asked.stdout, "the test that the page names asks for a row"
    page = copy.directory / "docs" / "metrics.md"
    line = next(line for line in page.read_text().splitlines(keepends=True) if line.startswith("| `reward/std` "))
    copy.replace(page, line, f"{line}| `reward/median` | reward | median of all samples | rises |\n")
    assert "passed" in copy.test("a metric", *one)
