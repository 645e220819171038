"""An audit finds the holes that a made-up policy uses, and nothing in the samples of an honest one."""

import json
import tracemalloc

import numpy as np
import pytest
from scipy.stats import spearmanr

from mindrlhf.cli import main
from mindrlhf.errors import UserError
from mindrlhf.evaluation.reward_audit import MIN_SAMPLES, audit, audit_run, spearman
from mindrlhf.observe.samples import SampleRecord, SampleWriter
from mindrlhf.rewards.types import RewardResult

VERIFIER = "accuracy_reward"


def sample(index: int, completion: str, *, right: bool, reward: float | None = None, answer: str = "") -> SampleRecord:
    return SampleRecord(
        step=index // 4 + 1,
        prompt=f"question {index}",
        completion=completion,
        answer=answer or str(index),
        reward=float(right) if reward is None else reward,
        rewards={VERIFIER: float(right)},
        finish_reason="stop",
    )


def honest_samples(num: int = 200) -> list[SampleRecord]:
    rng = np.random.default_rng(0)
    words = ["so", "we", "add", "both", "and", "find", "that", "it", "is"]
    return [
        sample(i, f"{' '.join(rng.choice(words, rng.integers(3, 12)))} #### {i}", right=bool(rng.random() < 0.5))
        for i in range(num)
    ]


def test_rank_correlation_is_that_of_scipy_with_ties():
    rng = np.random.default_rng(1)
    first = rng.integers(0, 5, 60).astype(float)
    second = first + rng.integers(0, 8, 60)
    rho, p_value = spearman(first, second)
    expected = spearmanr(first, second)
    assert rho == pytest.approx(expected.statistic, abs=1e-12)
    assert p_value < 0.01 and expected.pvalue < 0.01
    unrelated = spearman(first, rng.permutation(second))
    assert unrelated[1] > 0.05


def test_an_honest_run_raises_no_finding():
    found = audit(honest_samples(), VERIFIER)
    assert found.correlations == () and found.clusters == ()
    assert (found.num_samples, found.num_steps, found.num_rescored) == (200, 50, 0)


def test_a_reward_that_pays_for_length_is_found_among_the_wrong_answers_too():
    samples = [
        sample(one.step * 4 + k, one.completion, right=one.reward > 0, reward=one.reward + len(one.completion) / 100)
        for k, one in enumerate(honest_samples())
    ]
    found = {(one.feature, one.within): one.rho for one in audit(samples, VERIFIER).correlations}
    assert found["length in characters", "wrong ones"] == pytest.approx(1.0)
    assert found["length in characters", "right ones"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("feature", "trick"),
    [
        ("repeated phrases", "the answer is of course clear " * 6),
        ("digits", "0123456789" * 3),
        ("code tokens", "```python\nprint(1)\n```"),
        ("tags", "<think></think><answer></answer>"),
        ("lines", "\n" * 9),
    ],
)
def test_each_feature_finds_its_trick(feature, trick):
    samples = [
        sample(i, f"{one.completion} {trick}" if i % 2 else one.completion, right=bool(i % 2))
        for i, one in enumerate(honest_samples())
    ]
    strongest = {one.feature: one.rho for one in audit(samples, VERIFIER).correlations}
    assert strongest[feature] > 0.85  # two rewards against different numbers: at most sqrt(3) / 2


def test_one_text_that_is_right_for_every_question_is_found():
    samples = honest_samples(100) + [sample(1000 + i, "It  is ALL of them", right=True) for i in range(30)]
    (cluster,) = audit(samples, VERIFIER).clusters
    assert (cluster.completion, cluster.num_samples, cluster.num_prompts) == ("It  is ALL of them", 30, 30)


def test_few_samples_show_no_correlation():
    samples = [sample(i, "x" * i, right=i > 8) for i in range(MIN_SAMPLES - 1)]
    assert audit(samples, VERIFIER).correlations == ()


class CaseSensitive:
    """A verifier that reads one spelling only."""

    def score(self, samples):
        return [RewardResult(one.index, {"yes": float("yes" in one.completion)}, 0.0) for one in samples]


def test_a_verifier_that_minds_the_case_is_found():
    samples = [sample(i, "yes" if i % 2 else "no", right=bool(i % 2)) for i in range(10)]
    found = audit(samples, VERIFIER, CaseSensitive())
    (flip,) = found.flips
    assert (flip.verifier, flip.rewriting, flip.num_flipped, flip.num_samples) == ("yes", "upper case", 5, 10)
    assert flip.example.completion == "yes"


@pytest.fixture
def run_dir(tmp_path):
    (tmp_path / "config.yaml").write_text("reward: {verifier_function: [accuracy_reward]}\n")
    lines = [json.dumps(vars(one)) for one in honest_samples(40)]
    (tmp_path / "samples.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_the_command_scores_again_with_the_verifiers_of_the_run(run_dir, capsys):
    assert main(["rewards", "audit", str(run_dir), "--max-rescored", "10"]) == 0
    text = capsys.readouterr().out
    assert "40 samples of 10 steps" in text and "(10 samples scored again)" in text
    assert main(["rewards", "audit", str(run_dir), "--max-rescored", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_rescored"] == 4


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("samples.jsonl", "", "holds no samples"),
        ("samples.jsonl", None, "does not exist"),
        ("samples.jsonl", '{"step": 1}\n', "a sample without 'prompt'"),
        ("config.yaml", None, "does not exist"),
        ("config.yaml", "reward: {verifiers: x}", "unknown key 'reward.verifiers'"),
    ],
)
def test_a_directory_that_is_no_run_is_one_line(run_dir, file, content, message):
    if content is None:
        (run_dir / file).unlink()
    else:
        (run_dir / file).write_text(content)
    with pytest.raises(UserError) as refused:
        audit_run(run_dir)
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_samples_of_a_run_with_text_alone_are_read_as_they_are_written(tmp_path):
    writer = SampleWriter(tmp_path / "samples.jsonl", first_step=0)
    writer.write(sample(index, "#### 1", right=True) for index in range(MIN_SAMPLES))
    writer.close()
    (tmp_path / "config.yaml").write_text("reward: {model_path: somewhere}\n")
    assert audit_run(tmp_path).num_samples == MIN_SAMPLES


def test_the_memory_of_an_audit_does_not_grow_with_the_texts_of_a_run(tmp_path):
    (tmp_path / "config.yaml").write_text("reward: {model_path: somewhere}\n")
    text = "x" * 75_000
    writer = SampleWriter(tmp_path / "samples.jsonl", first_step=0)
    writer.write(sample(index, f"{text}{index}", right=index % 3 == 0) for index in range(200))
    writer.close()
    audit_run(tmp_path)  # what it imports
    tracemalloc.start()
    try:
        found = audit_run(tmp_path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found.num_samples == 200
    assert peak < 6 << 20 < 200 * len(text)
