"""The comparison of the algorithms: what its recipes are, which runs it repeats, and the table it makes of results."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest
from script_files import load_script

from mindrlhf.config.parse import write_config
from mindrlhf.errors import UserError

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script():
    return load_script("scripts/compare_algorithms.py")


@pytest.fixture
def at_root(monkeypatch):
    """Recipes name files from the top of the repository."""
    monkeypatch.chdir(ROOT)


def _finish(run, *, before, after, low, high, last_metrics):
    run.directory.mkdir(parents=True)
    write_config(run.config(), run.directory)
    summary = {
        "before": {"accuracy": before},
        "after": {"accuracy": after},
        "difference": {"mean": after - before, "low": low, "high": high},
    }
    (run.directory / "summary.json").write_text(json.dumps(summary))
    (run.directory / "metrics.jsonl").write_text(json.dumps({"step": 0}) + "\n" + json.dumps(last_metrics) + "\n")


def test_recipes_are_the_algorithms_they_are_called(script, at_root, tmp_path):
    estimators = {
        "GRPO": ("grpo", "ppo_clip"),
        "DAPO": ("grpo", "ppo_clip"),
        "GSPO": ("grpo", "gspo"),
        "RLOO": ("rloo", "sequence_clip"),
        "REINFORCE++": ("reinforce_pp", "ppo_clip"),
        "PPO": ("gae", "ppo_clip"),
    }
    configs = {name: script.Run(name, 0, tmp_path).config() for name in script.TABLES["algorithms"]}
    assert {name: (config.algorithm.advantage, config.algorithm.loss) for name, config in configs.items()} == estimators
    assert [name for name, config in configs.items() if config.algorithm.dynamic_sampling] == ["DAPO"]
    # The same start, the same problems and the same number of responses in a step, or the table compares nothing.
    assert len({(config.model.path, config.data.train_file, config.data.eval_file) for config in configs.values()}) == 1
    assert {
        config.training.chunk_size * config.training.num_rollouts * config.algorithm.num_generations
        for config in configs.values()
    } == {128}
    assert {config.training.num_minibatches for config in configs.values()} == {4}


def test_presets_change_the_objective_and_nothing_else(script, at_root, tmp_path):
    plain = dataclasses.asdict(script.Run("GRPO", 0, tmp_path).config())
    recipes = [name for name in script.TABLES["presets"] if name != "GRPO"]
    assert len(recipes) == 9
    for recipe in recipes:
        config = dataclasses.asdict(script.Run(recipe, 0, tmp_path).config())
        differing = {name for name in plain if config[name] != plain[name]} - {"run"}
        assert differing and differing <= {"algorithm", "correction"}, recipe


def test_schedules_adapters_and_optimizers_change_nothing_else(script, at_root, tmp_path):
    changed = {"schedules": ("in step", {"rollout"}), "adapters": ("GRPO", {"lora", "optimizer"})}
    changed["optimizers"] = ("GRPO", {"optimizer"})
    for name, (first, sections) in changed.items():
        plain = dataclasses.asdict(script.Run(first, 0, tmp_path).config())
        for recipe in script.TABLES[name]:
            config = dataclasses.asdict(script.Run(recipe, 0, tmp_path).config())
            differing = {section for section in plain if config[section] != plain[section]} - {"run"}
            assert differing <= sections, recipe
            assert bool(differing) == (recipe != first)
    assert len({script.Run(recipe, 0, tmp_path).directory for recipe in script.RECIPES}) == len(script.RECIPES)


def test_table(script, at_root, tmp_path):
    for seed, after in ((0, 0.75), (7, 0.65)):
        run = script.Run("DAPO", seed, tmp_path)
        last = {"step": 12, "samples/total_generated": 5000.0 + seed}
        _finish(run, before=0.35, after=after, low=after - 0.4, high=after - 0.3, last_metrics=last)
    _finish(script.Run("RLOO", 0, tmp_path), before=0.35, after=0.3, low=-0.1, high=0.02, last_metrics={"step": 12})
    assert script.table(["DAPO"], [0, 7], tmp_path).splitlines() == [
        "| recipe | config | steps | samples | seed 0 | seed 7 | mean change |",
        "|---|---|---|---|---|---|---|",
        "| DAPO | [dapo](../examples/dapo/config.yaml) | 12 | 5,000 to 5,007 | "
        "35.0 to 75.0 (+40.0; +35.0 to +45.0) | 35.0 to 65.0 (+30.0; +25.0 to +35.0) | +35.0 |",
    ]
    # 12 steps of 32 prompts with 4 responses each.
    assert "| 12 | 1,536 | 35.0 to 30.0 (-5.0; -10.0 to +2.0) | -5.0 |" in script.table(["RLOO"], [0], tmp_path)


def test_a_finished_run_is_not_repeated(script, at_root, tmp_path, monkeypatch, capsys):
    run = script.Run("GSPO", 1, tmp_path)
    assert not run.is_finished()
    _finish(run, before=0.35, after=0.75, low=0.35, high=0.45, last_metrics={"step": 12})
    assert run.is_finished()
    monkeypatch.setattr(script, "train", lambda run: pytest.fail(f"{run} is trained again"))
    monkeypatch.setattr(
        sys, "argv", ["compare_algorithms.py", "--recipes", "GSPO", "--seeds", "1", "--output-dir", str(tmp_path)]
    )
    assert script.main() == 0
    assert capsys.readouterr().out == script.table(["GSPO"], [1], tmp_path) + "\n"


def test_a_run_of_another_config_is_refused(script, at_root, tmp_path):
    run = script.Run("PPO", 0, tmp_path)
    _finish(run, before=0.35, after=0.75, low=0.35, high=0.45, last_metrics={"step": 12})
    path = run.directory / "config.yaml"
    path.write_text(path.read_text().replace("warmup_steps: 3\n", "warmup_steps: 4\n"))
    with pytest.raises(UserError, match=r"another config \(critic.warmup_steps\)"):
        run.is_finished()
