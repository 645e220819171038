"""Random damage to the input of every parser: it is accepted or refused with an error of its own, and nothing else."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import corruption
import fuzz_cases
import pytest
from fuzz_cases import run_cases
from fuzz_target import Target
from fuzz_targets import TARGETS

from mindrlhf.errors import UserError

NUM_CASES = int(os.environ.get("MINDRLHF_FUZZ_CASES", "100"))
SCRIPT = Path(__file__).parents[2] / "scripts" / "fuzz.py"


@pytest.mark.parametrize("name", TARGETS)
def test_damage_is_refused_or_harmless(name, tmp_path):
    outcome = run_cases(name, tmp_path, seed=1, cases=range(NUM_CASES))
    again = f"python scripts/fuzz.py --targets '{name}' --seed 1 --only CASE"
    assert outcome.unexpected == [], again
    assert outcome.num_accepted + outcome.num_refused == NUM_CASES


@pytest.mark.parametrize("name", TARGETS)
def test_the_input_is_valid_before_it_is_damaged(name, tmp_path, monkeypatch):
    monkeypatch.setattr(corruption, "corrupt_bytes", lambda rng, data, max_edits=4: data)
    monkeypatch.setattr(corruption, "corrupt_json", lambda rng, tree: json.dumps(tree).encode())

    def num_accepted(cases):
        directory = tmp_path / str(len(cases))
        directory.mkdir()
        return run_cases(name, directory, seed=1, cases=cases).num_accepted

    # Of keys and values that are drawn together, few fit.
    assert num_accepted(range(8)) or num_accepted(range(8, 200))


def test_an_error_of_another_kind_is_reported_with_its_case(tmp_path, monkeypatch):
    def prepare(directory):
        def case(rng):
            if rng.randrange(2):
                raise KeyError("of the parser")
            raise UserError("of ours")

        return case

    monkeypatch.setitem(fuzz_cases.TARGETS, "broken", Target(prepare))
    outcome = run_cases("broken", tmp_path, seed=0, cases=range(10))
    assert len(outcome.unexpected) + outcome.num_refused == 10
    assert {error for _, error in outcome.unexpected} == {"KeyError: 'of the parser'"}
    assert [case for case, _ in outcome.unexpected] == [
        case for case in range(10) if random.Random(f"0/broken/{case}").randrange(2)
    ]


def test_the_script_counts_every_case():
    command = [sys.executable, str(SCRIPT), "--cases", "40", "--targets", "rollout message", "JSONL records"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    for line, name in zip(ended.stdout.splitlines()[1:], ("rollout message", "JSONL records"), strict=True):
        assert line.startswith(name)
        cases, accepted, refused, unexpected = map(int, line.removeprefix(name).split()[:4])
        assert (cases, accepted + refused, unexpected) == (40, 40, 0)
