"""A run whose references match nothing says within ten steps that it learns nothing, at its end, and in its report."""

import json
from pathlib import Path

import pytest
import sanity_inputs
from slow_tests import SLOW

pytestmark = [pytest.mark.timeout(300), SLOW]

SAID = "verifier accuracy_reward gave 0 to all"


@pytest.fixture(scope="module")
def inputs_dir(tmp_path_factory, rollout_python) -> Path:
    directory = tmp_path_factory.mktemp("inputs")
    sanity_inputs.make(directory)
    # The references are of another column than meant: no number that a model of random weights could hit.
    rows = [{**row, "label": f"n{row['answer']}n"} for row in sanity_inputs.read_lines(directory / "prompts.jsonl")]
    (directory / "wrong.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sanity_inputs.run(
        *("data", "build", "--input", directory / "wrong.jsonl", "--output", directory / "wrong.mindrecord"),
        *("--tokenizer", directory / "model", "--handler", "map_keys", "--map", "question=prompt,answer=label"),
        *("--template", "plain", "--max-prompt-length", 32, "--processes", 1),
        timeout_s=120,
    )
    return directory


def test_a_run_whose_references_match_nothing_is_told_so(inputs_dir, tmp_path):
    more = {"data__train_file": inputs_dir / "wrong.mindrecord", "reward__verifier_function": "accuracy_reward"}
    finished = sanity_inputs.train(inputs_dir, tmp_path / "run", timeout_s=200, run__max_steps=6, **more)
    said = finished.stdout + finished.stderr
    assert said.count(f"warning: step 5: {SAID}") == 1 and said.count(f"warning: at the end of the run: {SAID}") == 1
    assert said.count("warning: nothing was learned in 6 steps") == 1
    events = [
        event for event in sanity_inputs.read_lines(tmp_path / "run" / "guards.jsonl") if event["event"] == "alarm"
    ]
    assert {(event["step"], event["alarm"]) for event in events} >= {(5, "constant accuracy_reward"), (5, "no_signal")}
    assert f"<li><strong>from step 5 on</strong>: {SAID}" in (tmp_path / "run" / "report.html").read_text()
