"""PPO from end to end: a critic beside the actor, on one and on two ranks, resumed and exported."""

import json
import math
import shutil

import pytest
import sanity_inputs
from slow_tests import SLOW

pytestmark = pytest.mark.timeout(900)

CRITIC_METRICS = {
    *("value/loss", "value/clip_fraction", "value/explained_variance", "value/mean", "value/grad_norm", "value/lr"),
    *("timing/values", "timing/update_critic", "kl"),
}
ACTOR_METRICS = {"loss", "grad_norm", "lr", "clip_fraction/low", "entropy"}


def train(sanity_dir, output_dir, *options, **more):
    sanity_inputs.train(
        sanity_dir,
        output_dir,
        *options,
        timeout_s=400,
        **{
            "run__max_steps": 3,
            "algorithm__name": "ppo",
            "algorithm__beta": 0.05,
            "critic__path": sanity_dir / "model",
            "critic__start_lr": 0.003,
            "critic__warmup_steps": 1,
            "training__num_minibatches": 2,
            "checkpoint__every_steps": 2,
            **more,
        },
    )
    return {line["step"]: line for line in sanity_inputs.read_lines(output_dir / "metrics.jsonl")}


@pytest.fixture(scope="module")
def run(sanity_dir, tmp_path_factory):
    """Directory and metrics of three steps, the first of which trains the critic alone."""
    directory = tmp_path_factory.mktemp("ppo") / "run"
    return directory, train(sanity_dir, directory)


def weights(directory):
    return (directory / "model.safetensors").read_bytes()


def test_a_run_reports_and_exports_both_models(run, sanity_dir):
    directory, metrics = run
    assert sorted(metrics) == [1, 2, 3]
    for step, line in metrics.items():
        assert all(math.isfinite(value) for value in line.values() if isinstance(value, float)), line
        assert line.keys() >= CRITIC_METRICS
        assert (line.keys() >= ACTOR_METRICS) == (step > 1)
        assert line["rollout_diff/max_abs"] < 1e-4
    # A critic made of a language model knows nothing at first: every value is 0, and it explains nothing.
    assert metrics[1]["value/mean"] == metrics[1]["value/explained_variance"] == 0
    assert metrics[2]["value/mean"] > 0
    # The actor did not change in the first step, nor its distance from the reference.
    assert metrics[1]["kl"] == pytest.approx(0, abs=1e-6) == metrics[2]["kl"]
    assert metrics[3]["kl"] != 0
    critic = json.loads((directory / "critic" / "config.json").read_text())
    assert critic["architectures"] == ["Qwen2ForSequenceClassification"] and critic["id2label"] == {"0": "score"}
    assert (directory / "critic" / "tokenizer.json").exists()
    assert weights(directory / "final") != weights(sanity_dir / "model")


@SLOW
def test_a_resumed_run_ends_with_the_same_bits(run, sanity_dir, tmp_path):
    directory, metrics = run
    again = tmp_path / "again"
    shutil.copytree(directory, again, ignore=shutil.ignore_patterns("final"))
    shutil.rmtree(again / "critic")
    resumed = train(sanity_dir, again, "--resume")
    timed = ("timing/", "memory/", "recompiles")
    for step in (2, 3):
        found, expected = (
            {name: value for name, value in line.items() if not name.startswith(timed) and not name.endswith("_tps")}
            for line in (resumed[step], metrics[step])
        )
        assert found == expected
    for name in ("final", "critic"):
        assert weights(again / name) == weights(directory / name)
