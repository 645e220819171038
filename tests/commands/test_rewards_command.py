import json

import pytest

from mindrlhf.cli import main
from mindrlhf.errors import UserError
from mindrlhf.rewards.sample_files import read_samples

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def samples(tmp_path):
    lines = [
        {"completion": "#### 42", "answer": 42, "id": "x"},
        {"completion": "<think>a</think><answer>41</answer>", "answer": "42", "num_tokens": 3},
        {"completion": "\ud800", "answer": "", "num_tokens": 2},
    ]
    path = tmp_path / "samples.jsonl"
    path.write_text("\n\n".join(map(json.dumps, lines)) + "\n")
    return path


def score(path, *more):
    return main(["rewards", "score", "--verifier", "accuracy_reward", "--input", str(path), *map(str, more)])


def test_list_names_every_verifier(capsys):
    assert main(["rewards", "list"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert len(lines) == 20
    assert lines["qwen_accuracy_reward"].startswith("1 if the content of the last \\boxed{...} equals answer")


def test_show_tells_options_and_context(capsys):
    assert main(["rewards", "show", "overlong_penalty"]) == 0
    shown = capsys.readouterr().out
    assert "arXiv:2503.14476" in shown and "it reads: num_tokens" in shown
    assert "overlong_penalty.max_length  (required)" in shown
    assert main(["rewards", "show", "overlong"]) == 2
    assert "did you mean overlong_penalty" in capsys.readouterr().err


def test_verifiers_and_findings_as_json(tmp_path, capsys):
    assert main(["rewards", "list", "--json"]) == 0
    names = json.loads(capsys.readouterr().out)
    assert len(names) == 20 and names["qwen_accuracy_reward"].startswith("1 if the content")
    assert main(["rewards", "show", "overlong_penalty", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["reads"] == ["num_tokens"] and shown["options"]["max_length"] == {"required": True, "default": None}
    (tmp_path / "mine.py").write_text("def zero(completion, answer):\n    return 'no number'\n")
    assert main(["rewards", "check", f"{tmp_path}/mine.py:zero", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert "error" in {finding["level"] for finding in found["findings"]} and found["verifier"].endswith("mine.py:zero")


def test_scores_go_to_standard_output_in_order(samples, capsys):
    assert score(samples) == 0
    output = capsys.readouterr()
    records = [json.loads(line) for line in output.out.splitlines()]
    assert [record["reward"] for record in records] == [1.0, 0.0, 0.0]
    assert records[0] == {
        "completion": "#### 42",
        "answer": 42,
        "id": "x",
        "reward": 1.0,
        "rewards": {"accuracy_reward": 1.0},
    }
    assert records[2]["failures"] == {"accuracy_reward": "ValueError: the reference answer is empty"}
    assert "3 samples, mean reward 0.333333, 1 failures" in output.err


def test_weights_options_and_an_output_file(samples, tmp_path):
    output = tmp_path / "out.jsonl"
    arguments = ["--verifier", "format_reward,repetition_penalty", "--weight", "2,0.5"]
    arguments += ["--option", "repetition_penalty.ngram_size=1", "--processes", "2", "--output", output]
    assert score(samples, *arguments) == 0
    records = [json.loads(line) for line in output.read_text().splitlines()]
    # Words of the second sample: think a think answer 41 answer.
    assert records[1]["rewards"] == {"format_reward": 1.0, "repetition_penalty": pytest.approx(4 / 6 - 1)}
    assert records[1]["reward"] == pytest.approx(2 - 0.5 * 2 / 6)


def test_windows_keep_the_order(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("mindrlhf.rewards.sample_files.MAX_WINDOW_SAMPLES", 7)
    path = tmp_path / "many.jsonl"
    path.write_text("".join(json.dumps({"completion": f"{i % 3}", "answer": "1"}) + "\n" for i in range(50)))
    assert score(path) == 0
    rewards = [json.loads(line)["reward"] for line in capsys.readouterr().out.splitlines()]
    assert rewards == [float(i % 3 == 1) for i in range(50)]


MALFORMED = {
    b'{"completion": "a"': "the line is not JSON",
    b'{"completion": "\xff", "answer": ""}': "not UTF-8",
    b"[1]": "holds a list",
    b"[" * 100_000: "nested too deeply",
    b'{"answer": "a"}': "there is no field 'completion'",
    b'{"completion": 3, "answer": "a"}': "field 'completion' must be text, found int",
    b'{"completion": "a", "answer": true}': "field 'answer' must be text, found bool",
    b'{"completion": "a", "answer": "a", "num_tokens": "7"}': "field 'num_tokens' must be an integer, found str",
}


def test_malformed_lines_are_named(samples):
    samples.write_bytes(samples.read_bytes() + b"\n".join(MALFORMED) + b"\n")
    errors = [str(line) for line in read_samples(samples) if isinstance(line, UserError)]
    for number, (error, message) in enumerate(zip(errors, MALFORMED.values(), strict=True), 6):
        assert error.startswith(f"{samples}:{number}: ") and message in error


def test_malformed_lines_end_the_command_or_are_left_out(samples, tmp_path, capsys):
    output = tmp_path / "out.jsonl"
    output.write_text("earlier")
    samples.write_bytes(samples.read_bytes() + b"\n".join(MALFORMED) + b"\n")
    assert score(samples, "--output", output) == 2
    assert f"{samples}:6: the line is not JSON" in capsys.readouterr().err
    assert output.read_text() == "earlier"
    assert {path.name for path in tmp_path.iterdir()} == {"out.jsonl", "samples.jsonl"}
    assert score(samples, "--output", output, "--skip-bad") == 0
    assert len(output.read_text().splitlines()) == 3
    assert f"{len(MALFORMED)} malformed lines were left out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--input", "missing.jsonl"], "cannot read missing.jsonl"),
        (["--output", "missing/out.jsonl"], "cannot write missing/out.jsonl"),
        (["--verifier", "length_reward"], ":1: there is no field 'num_tokens'"),
        (["--weight", "1,2"], "1 verifiers (accuracy_reward) but 2 weights"),
        (["--option", "accuracy_reward"], "not of the form verifier.option=value"),
        (["--option", "accuracy_reward.strict=1"], "has no option 'strict'"),
        (["--timeout-s", "0"], "time limit"),
    ],
)
def test_mistakes_are_one_line(samples, capsys, arguments, message):
    assert score(samples, *arguments) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_check_fails_for_a_function_that_is_not_deterministic(samples, tmp_path, capsys):
    path = tmp_path / "mine.py"
    path.write_text("import os\ndef f(completion, answer): return os.getpid()")
    assert main(["rewards", "check", f"{path}:f", "--samples", str(samples)]) == 1
    assert "error    not deterministic: 3 of 3" in capsys.readouterr().out
    assert main(["rewards", "check", f"{path}:g"]) == 2
    assert "has no function 'g'" in capsys.readouterr().err


@pytest.mark.parametrize("action", ["score", "check"])
def test_programs_are_not_run_in_a_weak_sandbox_unless_allowed(action, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("mindrlhf.sandbox.server.active_layers", lambda: frozenset({"limits"}))
    sample = {"completion": "```python\nprint(1)\n```", "answer": '{"inputs": [""], "outputs": ["1"]}'}
    path = tmp_path / "samples.jsonl"
    path.write_text(json.dumps(sample) + "\n")
    source = ["--verifier", "code_execution", "--input"] if action == "score" else ["code_execution", "--samples"]
    command = ["rewards", action, *source, str(path)]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "--allow-weak" in error
    main([*command, "--allow-weak"])
    assert "too few isolation layers" not in capsys.readouterr().err
