"""The problems of log-normal length, read back from their files."""

import json
import math
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "long_tail" / "problems.py"


def make(directory: Path, *options: str) -> list[dict[str, str]]:
    subprocess.run([sys.executable, str(SCRIPT), "--out", str(directory), *options], check=True, timeout=120)
    return [json.loads(line) for line in (directory / "train.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    return make(tmp_path_factory.mktemp("problems"), "--num-train", "4000", "--unsure", "0.6")


def test_answers_count_down_and_name_the_colour_or_not(records):
    unsure = 0
    for record in records:
        number, colour = record["question"].split()
        *count, mark, word = record["answer"].split()
        assert [int(item) for item in count] == list(range(int(number), 0, -1))
        assert mark == "####" and word in (colour, "unsure")
        unsure += word == "unsure"
    # 4,000 draws: a standard deviation of 0.8 points.
    assert unsure / len(records) == pytest.approx(0.6, abs=0.04)


def test_numbers_are_log_normal(records):
    numbers = [int(record["question"].split()[0]) for record in records]
    logarithms = [math.log(number) for number in numbers]
    assert statistics.median(numbers) == pytest.approx(48, abs=3)
    # Between the quartiles of a normal distribution lie 1.349 standard deviations; cut ends do not move them.
    low, _, high = statistics.quantiles(logarithms, n=4)
    assert (high - low) / 1.349 == pytest.approx(1.0, abs=0.07)
    assert min(numbers) >= 2 and max(numbers) == 800


def test_other_lengths_can_be_asked_for(tmp_path):
    numbers = [
        int(record["question"].split()[0])
        for record in make(tmp_path, "--num-train", "2000", "--median", "24", "--largest", "100")
    ]
    assert statistics.median(numbers) == pytest.approx(24, abs=2)
    assert max(numbers) == 100


def test_the_tokenizer_has_a_token_for_each_word(records, tmp_path):
    from tokenizers import Tokenizer

    make(tmp_path, "--num-train", "10")
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for record in records[:200]:
        for text in record.values():
            encoding = tokenizer.encode(text, add_special_tokens=False)
            assert encoding.tokens == text.split()
