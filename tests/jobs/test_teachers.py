"""Two teachers by the source of the prompt, as a run: every sample has the advantages of its own teacher alone."""

import json
from pathlib import Path

import numpy as np
import pytest
import sanity_inputs
from slow_tests import SLOW

pytestmark = [pytest.mark.timeout(900), SLOW]

OPTIONS = {
    "algorithm__name": "distill",
    "run__max_steps": 2,
    "training__micro_batch_size": 4,
    "training__chunk_size": 8,
    "observe__samples_per_step": 32,
    "observe__sample_tokens": "true",
    "checkpoint__every_steps": 1,
}


@pytest.fixture(scope="module")
def inputs_dir(tmp_path_factory, rollout_python) -> Path:
    """The inputs of other runs, prompts of two files, and two teachers, of which one is smaller than the student."""
    directory = tmp_path_factory.mktemp("inputs")
    sanity_inputs.make(directory)
    lines = (directory / "prompts.jsonl").read_text().splitlines(keepends=True)
    for number, name in enumerate(("even", "odd")):
        (directory / f"{name}.jsonl").write_text("".join(lines[number::2]))
    finished = sanity_inputs.run(
        *("data", "build", "--input", directory / "even.jsonl", directory / "odd.jsonl"),
        *("--output", directory / "two.mindrecord", "--tokenizer", directory / "model", "--handler", "map_keys"),
        *("--map", "question=prompt,answer=answer", "--template", "plain", "--max-prompt-length", 32, "--workers", 1),
        timeout_s=300,
    )
    assert finished.returncode == 0, finished.stderr
    for seed, (name, layers) in enumerate((("first", 2), ("second", 1)), start=5):
        bare = directory / f"bare_{name}"
        bare.mkdir()
        config = json.loads((directory / "bare" / "config.json").read_text())
        (bare / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers}))
        options = ("--config", bare / "config.json", "--tokenizer-dir", directory / "bare", "--seed", seed)
        finished = sanity_inputs.run("weights", "random", *options, "--out", directory / name, timeout_s=100)
        assert finished.returncode == 0, finished.stderr
    return directory


@pytest.fixture(scope="module")
def train(inputs_dir, tmp_path_factory):
    def one(directory=None, *options, **more):
        directory = directory or tmp_path_factory.mktemp("run") / "run"
        values = {**OPTIONS, "data__train_file": inputs_dir / "two.mindrecord", **more}
        finished = sanity_inputs.train(inputs_dir, directory, *options, timeout_s=400, **values)
        return directory, finished

    return one


@pytest.fixture(scope="module")
def together(train, inputs_dir) -> Path:
    teachers = f"{{even.jsonl: {inputs_dir / 'first'}, odd.jsonl: {inputs_dir / 'second'}}}"
    directory, finished = train(None, "--workers", 2, distillation__teachers=teachers)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return directory


def first_step(run: Path) -> list[dict]:
    return [one for one in sanity_inputs.read_lines(run / "samples.jsonl") if one["step"] == 1]


def test_each_sample_has_the_advantages_of_its_teacher_alone(train, together, inputs_dir):
    sources = {}
    for source in ("even", "odd"):
        for line in sanity_inputs.read_lines(inputs_dir / f"{source}.jsonl"):
            sources[line["prompt"]] = source
    alone, seen = {}, set()
    for source, teacher in (("even", "first"), ("odd", "second")):
        directory, finished = train(None, model__reference_path=inputs_dir / teacher)
        assert finished.returncode == 0, finished.stdout + finished.stderr
        alone[source] = first_step(directory)
    advantages = {"even": [], "odd": []}
    for number, sample in enumerate(first_step(together)):
        (source,) = (name for prompt, name in sources.items() if prompt in sample["prompt"])
        expected = alone[source][number]
        assert [sample[key] for key in ("prompt", "completion")] == [expected[key] for key in ("prompt", "completion")]
        ours, theirs = (np.array(one["advantages"]) for one in (sample, expected))
        np.testing.assert_allclose(ours, theirs, atol=2e-5)
        other = alone["odd" if source == "even" else "even"][number]["advantages"]
        assert np.abs(ours - np.array(other)).max() > 1e-3
        advantages[source].extend(-ours)
        seen.add(source)
    assert seen == {"even", "odd"}
    metrics = sanity_inputs.read_lines(together / "metrics.jsonl")[0]
    for source, divergence in advantages.items():
        assert metrics[f"teacher/{source}.jsonl/kl"] == pytest.approx(np.mean(divergence), abs=2e-5)


def test_a_run_is_not_resumed_with_another_teacher(train, together, inputs_dir):
    teachers = f"{{even.jsonl: {inputs_dir / 'first'}, odd.jsonl: {inputs_dir / 'second'}}}"
    other = inputs_dir / "second" / "model.safetensors"
    content = other.read_bytes()
    (together / "final").rename(together / "final_of_two_steps")
    try:
        other.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        options = {"distillation__teachers": teachers, "run__max_steps": 3}
        _, finished = train(together, "--workers", 2, "--resume", **options)
        assert finished.returncode == 2
        said = " ".join((finished.stdout + finished.stderr).split())
        assert "what distillation.teachers.odd.jsonl names holds another model than the run began with" in said, said
    finally:
        other.write_bytes(content)
    _, finished = train(together, "--workers", 2, "--resume", **options)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert len(sanity_inputs.read_lines(together / "metrics.jsonl")) == 3
