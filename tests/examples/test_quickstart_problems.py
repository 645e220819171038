"""The quickstart's problems and tokenizer: answers re-computed from the question's numbers, splits, round trips."""

import json
import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from script_files import load_script

from mindrlhf.data.handlers import load_handler
from mindrlhf.data.templates import load_template, response_end_id
from mindrlhf.data.tokenizers import load_tokenizer

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"


problems = load_script("examples/quickstart/problems.py")
make_tokenizer = load_script("examples/quickstart/make_tokenizer.py")

# The answer as a formula of the question's numbers, in the order they stand in the text. Written by hand from the
# questions, apart from the templates' own steps.
FORMULAS = {
    "find": lambda a, b: a + b,
    "give": lambda a, b: a - b,
    "bags": lambda a, b: a * b,
    "share": lambda a, b: Fraction(a, b),
    "together": lambda a, b: a + b,
    "more_than": lambda a, b: a - b,
    "price": lambda a, b: a * b,
    "pages": lambda a, b: a - b,
    "twice": lambda a: 2 * a,
    "find_give": lambda a, b, c: a + b - c,
    "bags_table": lambda a, b, c: a * b + c,
    "bags_lose": lambda a, b, c: a * b - c,
    "more_together": lambda a, b: 2 * a + b,
    "boxes": lambda a, b, c: Fraction(a + b, c),
    "change": lambda a, b, c: c - a * b,
    "earn": lambda a, b, c: a + b * c,
    "times_lose": lambda a, b, c: a * b - c,
    "lose_lose": lambda a, b, c: a - b - c,
    "train": lambda a, b, c: a * b + c,
    "wage": lambda a, b, c: a * b - c,
    "machine": lambda a, b, c: a * b - c,
    "classes": lambda a, b, c: a * b - c,
    "reading": lambda a, b, c: a - b * c,
    "shop": lambda a, b, c: (a + b) * c,
    "savings": lambda a, b, c: Fraction(a * b, c),
    "tank": lambda a, b, c: a - b * c,
    "bus": lambda a, b, c: a - b + c,
}
OPERATIONS = {
    "+": lambda x, y: x + y,
    "-": lambda x, y: x - y,
    "*": lambda x, y: x * y,
    "/": lambda x, y: Fraction(x, y),
}


@pytest.fixture(scope="module")
def train():
    return problems.make_problems("train", 3000, seed=0)


@pytest.fixture(scope="module")
def test_split():
    return problems.make_problems("test", 900, seed=0)


@pytest.fixture(scope="module")
def tokenizer_dir(train, tmp_path_factory):
    directory = tmp_path_factory.mktemp("quickstart")
    problems.write_jsonl(train, directory / "train.jsonl")
    assert make_tokenizer.main(["--data", str(directory / "train.jsonl"), "--out", str(directory / "model")]) == 0
    return directory / "model"


def _parse(answer):
    """Return the equations as (left, operation, right, result) and the final number."""
    *lines, final = answer.split("\n")
    matches = [re.fullmatch(r"(\d+)([-+*/])(\d+)=(\d+)", line) for line in lines]
    equations = [(int(m[1]), m[2], int(m[3]), int(m[4])) for m in matches]
    return equations, int(re.fullmatch(r"#### (\d+)", final)[1])


def _truth(problem):
    return FORMULAS[problem.template](*map(int, re.findall(r"\d+", problem.question)))


def _is_right(equation):
    left, operation, right, result = equation
    return OPERATIONS[operation](left, right) == result


def test_each_answer_is_what_the_question_asks_for(train, test_split):
    for problem in (*train, *test_split):
        equations, final = _parse(problem.answer)
        assert all(map(_is_right, equations)), problem
        assert equations[-1][-1] == final == _truth(problem), problem
        assert len(equations) == (1 if problem.level == 1 else 2), problem


@settings(max_examples=8)
@given(train_seed=st.integers(0, 10**6), test_seed=st.integers(0, 10**6), noise=st.floats(0, 1))
def test_train_and_test_share_no_question_and_no_numbers_whatever_the_seeds(train_seed, test_seed, noise):
    train = problems.make_problems("train", 300, train_seed, noise)
    test = problems.make_problems("test", 150, test_seed)
    assert not {p.question for p in train} & {p.question for p in test}
    assert not {(p.template, p.numbers) for p in train} & {(p.template, p.numbers) for p in test}
    for split in (train, test):
        assert len({p.question for p in split}) == len(split)


@pytest.mark.parametrize("noise", [0.0, 0.25, 1.0])
def test_noise_makes_exactly_its_share_wrong_and_leaves_the_questions(train, noise):
    noisy = problems.make_problems("train", 3000, seed=0, noise=noise)
    assert [p.question for p in noisy] == [p.question for p in train]
    wrong = [p for p in noisy if _parse(p.answer)[1] != _truth(p)]
    assert len(wrong) == round(noise * 3000)
    right = [(p, clean) for p, clean in zip(noisy, train) if _parse(p.answer)[1] == _truth(p)]
    assert all(p == clean for p, clean in right)
    for problem in wrong:
        equations, final = _parse(problem.answer)
        assert equations[-1][-1] == final
        assert all(map(_is_right, equations[:-1])), problem


def _run(script, *arguments):
    command = [sys.executable, str(QUICKSTART / script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_both_scripts_write_the_same_bytes_in_every_process(tmp_path):
    flags = ("--num-train", 400, "--num-test", 60, "--seed", 7, "--noise", 0.5)
    steps = [("problems.py", "--out", tmp_path / "one", *flags)]
    steps += [("make_tokenizer.py", "--data", tmp_path / "one" / "train.jsonl", "--out", tmp_path / "one")]
    for step in steps:
        assert _run(*step).returncode == 0, step
    for module, step in zip((problems, make_tokenizer), steps):
        assert module.main([str(word).replace("/one", "/two") for word in step[1:]]) == 0
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert files == ["test.jsonl", "tokenizer.json", "tokenizer_config.json", "train.jsonl"]
    for name in files:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name
    other = problems.make_problems("train", 400, seed=8, noise=0.5)
    lines = (tmp_path / "one" / "train.jsonl").read_text().splitlines()
    assert [json.loads(line)["question"] for line in lines] != [p.question for p in other]
    tests = [json.loads(line) for line in (tmp_path / "one" / "test.jsonl").read_text().splitlines()]
    assert [(t["question"], t["answer"]) for t in tests] == [
        (p.question, p.answer) for p in problems.make_problems("test", 60, seed=7)
    ]


def test_bad_arguments_end_with_one_line_and_no_file(tmp_path):
    done = _run("problems.py", "--out", tmp_path / "none", "--noise", 2)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert not (tmp_path / "none").exists()
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"question": "1+1?", "answer": "#### 2"}\n{"question": 3}\n')
    done = _run("make_tokenizer.py", "--data", bad, "--out", tmp_path / "none")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "bad.jsonl, line 2" in done.stderr
    assert not (tmp_path / "none").exists()


def test_the_package_reads_problems_and_tokenizer(train, tokenizer_dir):
    tokenizer = load_tokenizer(tokenizer_dir)
    template = load_template("chat", tokenizer)
    assert tokenizer.vocab_size == 512
    assert tokenizer.token_to_id("<|im_end|>") == response_end_id(template, tokenizer)
    assert tokenizer.pad_token_id == tokenizer.token_to_id("<|endoftext|>")
    read = load_handler("gsm8k")
    num_prompt_tokens, num_response_tokens = [], []
    for problem in train[:600]:
        example = read({"question": problem.question, "answer": problem.answer})
        assert Fraction(example.answer) == _truth(problem)
        text = template.render(example)
        assert text == f"<|im_start|>{problem.question}<|im_end|>"
        prompt_ids, response_ids = tokenizer.encode(text), tokenizer.encode(example.response)
        assert tokenizer.decode(prompt_ids, skip_special_tokens=False) == text
        assert tokenizer.decode(response_ids) == problem.answer
        num_prompt_tokens.append(len(prompt_ids))
        num_response_tokens.append(len(response_ids))
    assert 25 <= sum(num_prompt_tokens) / 600 <= 50
    assert max(num_prompt_tokens) <= 80
    assert max(num_response_tokens) <= 40
