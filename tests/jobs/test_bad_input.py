"""Mistakes at the command line: one line that names the mistake, exit code 2, and no process started for nothing."""

import json
import re
import shutil
from functools import partial

import pytest
import sanity_inputs
from slow_tests import SLOW

pytestmark = pytest.mark.timeout(600)

TIMEOUT_S = 250  # generous: other work may load the machine
slow = partial(pytest.param, marks=SLOW)


def assert_one_line(finished, *words: str) -> None:
    assert finished.returncode == 2, finished.stdout + finished.stderr
    # How long a stage has lasted is said on a busy machine alone.
    (line,) = [line for line in finished.stderr.splitlines() if not re.search(r", for \d+ s$", line)]
    for word in words:
        assert word in line
    assert "Traceback" not in finished.stdout


def assert_train_refuses(sanity_dir, tmp_path, words, *options, **overrides) -> None:
    output_dir = tmp_path / "run"
    finished = sanity_inputs.train(sanity_dir, output_dir, *options, timeout_s=TIMEOUT_S, **overrides)
    assert_one_line(finished, "mindrlhf train: error:", *words)
    # Nothing but the stage under way; on a busy machine how long it has lasted, too.
    assert re.fullmatch(r"(mindrlhf: checking examples/sanity/config\.yaml(, for \d+ s)?\n)+", finished.stdout)
    # Logs are made when ranks are started: none were.
    assert not (output_dir / "logs").exists()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"data__train_file": "no/such.mindrecord"}, ["no/such.mindrecord", "mindrlhf data build"]),
        ({"training__chunksize": 4}, ["training.chunksize", "did you mean 'training.chunk_size'"]),
        slow({"data__tokenizer_dir": "no/such/tokenizer"}, ["no/such/tokenizer"]),
        slow(
            {"training__sequence_lengths": "[16]", "rollout__max_response_length": 12},
            ["sequence_lengths", "16", "8 tokens"],
        ),
        slow({"reward__verifier_function": "acuracy_reward"}, ["acuracy_reward", "did you mean accuracy_reward"]),
        slow({"reward__verifier_function": "no/such.py:reward"}, ["no/such.py"]),
        slow({"algorithm__num_generations": 1}, ["algorithm.num_generations", "2 or more"]),
        slow({"optimizer__start_lr": "fast"}, ["optimizer.start_lr", "number", "fast"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_train_refuses(sanity_dir, tmp_path, overrides, words):
    assert_train_refuses(sanity_dir, tmp_path, words, **overrides)


def test_ranks_that_do_not_divide(sanity_dir, tmp_path):
    words = ["data_parallel", "is 3", "2 were started", "set data_parallel to 2"]
    assert_train_refuses(sanity_dir, tmp_path, words, "--workers", 2, parallel_config__data_parallel=3)


@SLOW
def test_a_missing_tensor(sanity_dir, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(sanity_dir / "model", model)
    config = json.loads((model / "config.json").read_text())
    num_layers = config["num_hidden_layers"]
    (model / "config.json").write_text(json.dumps({**config, "num_hidden_layers": num_layers + 1}))
    assert_train_refuses(sanity_dir, tmp_path, [str(model), f"model.layers.{num_layers}."], model__path=model)


@SLOW
def test_another_tokenizer_than_the_datas(sanity_dir, tmp_path):
    tokenizer = tmp_path / "tokenizer"
    shutil.copytree(sanity_dir / "bare", tokenizer)
    content = json.loads((tokenizer / "tokenizer.json").read_text())
    content["model"]["merges"].pop()
    (tokenizer / "tokenizer.json").write_text(json.dumps(content))
    assert_train_refuses(sanity_dir, tmp_path, ["prompts.mindrecord", "tokenizer"], data__tokenizer_dir=tokenizer)


@pytest.mark.parametrize("text", [slow(""), '{"prompt": "far too long for the limit", "answer": "x"}\n'])
def test_data_without_a_usable_record(sanity_dir, tmp_path, text):
    (tmp_path / "raw.jsonl").write_text(text)
    finished = sanity_inputs.run(
        *("data", "build", "--input", tmp_path / "raw.jsonl", "--output", tmp_path / "out.mindrecord"),
        *("--tokenizer", sanity_dir / "model", "--handler", "map_keys", "--map", "question=prompt,answer=answer"),
        *("--template", "plain", "--max-prompt-length", 3, "--processes", 1),
        timeout_s=TIMEOUT_S,
    )
    assert_one_line(finished, "mindrlhf data: error:")
    assert not list(tmp_path.glob("out.mindrecord*"))


@SLOW  # every day tests/rewards/test_reward_pool.py, and test_fault_matrix.py with a value in its place
def test_a_reward_that_is_not_a_number(sanity_dir, tmp_path, rollout_python):
    """It gets the default, is counted and kept with its sample; the run goes on."""
    verifier = tmp_path / "broken.py"
    verifier.write_text('def reward(completion, answer):\n    return float("nan")\n')
    output_dir = tmp_path / "run"
    finished = sanity_inputs.train(
        sanity_dir, output_dir, timeout_s=TIMEOUT_S, run__max_steps=2, reward__verifier_function=f"{verifier}:reward"
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    steps = [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
    num_failures = sum(step.get("reward/failures", 0) for step in steps)
    failures = [json.loads(line) for line in (output_dir / "reward_failures.jsonl").read_text().splitlines()]
    # Those of held-out prompts are in the file too.
    assert len(failures) >= num_failures > 0
    assert {(failure["verifier"], failure["reason"]) for failure in failures} == {
        ("reward", "returned nan, which is no finite number")
    }
    assert all(failure["prompt"] for failure in failures)
    assert (output_dir / "final").exists()


@SLOW
def test_a_verifier_file_that_does_not_load_ends_the_run_before_it_trains(sanity_dir, tmp_path, rollout_python):
    verifier = tmp_path / "broken.py"
    verifier.write_text("import no_such_module\n")
    finished = sanity_inputs.train(
        sanity_dir, tmp_path / "run", timeout_s=TIMEOUT_S, reward__verifier_function=f"{verifier}:reward"
    )
    assert finished.returncode == 2
    (line,) = [line for line in finished.stdout.splitlines() if "error:" in line]
    assert "broken.py" in line and "no_such_module" in line
    assert "Traceback" not in finished.stdout + finished.stderr
