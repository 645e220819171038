"""Mistakes at the command line: one line that names the mistake, exit code 2, and no process started for nothing."""

import re

import pytest
import sanity_inputs

pytestmark = pytest.mark.timeout(600)

TIMEOUT_S = 250  # generous: other work may load the machine


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
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_train_refuses(sanity_dir, tmp_path, overrides, words):
    assert_train_refuses(sanity_dir, tmp_path, words, **overrides)


def test_ranks_that_do_not_divide(sanity_dir, tmp_path):
    words = ["data_parallel", "is 3", "2 were started", "set data_parallel to 2"]
    assert_train_refuses(sanity_dir, tmp_path, words, "--workers", 2, parallel_config__data_parallel=3)


def test_data_without_a_usable_record(sanity_dir, tmp_path):
    (tmp_path / "raw.jsonl").write_text('{"prompt": "far too long for the limit", "answer": "x"}\n')
    finished = sanity_inputs.run(
        *("data", "build", "--input", tmp_path / "raw.jsonl", "--output", tmp_path / "out.mindrecord"),
        *("--tokenizer", sanity_dir / "model", "--handler", "map_keys", "--map", "question=prompt,answer=answer"),
        *("--template", "plain", "--max-prompt-length", 3, "--processes", 1),
        timeout_s=TIMEOUT_S,
    )
    assert_one_line(finished, "mindrlhf data: error:")
    assert not list(tmp_path.glob("out.mindrecord*"))
