"""All checkpoints of a run: found in order, whole models and adapters alike, told as a table and a curve."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny_models import tiny_model

from mindrlhf.cli import main
from mindrlhf.errors import UserError
from mindrlhf.evaluation import checkpoints
from mindrlhf.evaluation.heldout import Evaluation, accuracy_verifier
from mindrlhf.specs import find_spec
from mindrlhf.specs.lora import LoraOptions
from mindrlhf.weights.adapters.peft import adapter_config, adapter_shapes, write_adapter
from mindrlhf.weights.convert import export_hf, random_hf_weights

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
MODEL = tiny_model(vocab_size=40, tie_word_embeddings=True, **SIZES)
OPTIONS = LoraOptions(2, 4.0)


@pytest.fixture
def save_dir(tmp_path):
    """A whole model at step 20, an adapter at step 100, and what is no checkpoint."""
    export_hf(random_hf_weights(MODEL, 1), MODEL, tmp_path / "base")
    export_hf(random_hf_weights(MODEL, 2), MODEL, tmp_path / "run" / "step_00000020" / "model")
    spec = find_spec(MODEL)
    dims = spec.dims(MODEL)
    shapes, stream = adapter_shapes(spec, dims, OPTIONS), np.random.default_rng(0)
    tensors = [(name, stream.standard_normal(shape).astype(np.float32)) for name, shape in shapes.items()]
    (tmp_path / "run" / "step_00000100").mkdir()
    config = adapter_config(spec, dims, OPTIONS, str(tmp_path / "base"))
    write_adapter(tensors, shapes, config, tmp_path / "run" / "step_00000100" / "model")
    (tmp_path / "run" / "step_00000030").mkdir()  # without a model
    (tmp_path / "run" / ".step_00000040.partial").mkdir()
    return tmp_path / "run"


@pytest.fixture
def seen(monkeypatch):
    """The models that were evaluated: accuracy rises from one to the next."""
    models = []

    def evaluate(job, model_dirs, out_dir):
        models.append((load_file(f"{model_dirs[0]}/model.safetensors"), out_dir))
        right = np.zeros((8, 1))
        right[: 2 * len(models)] = 1
        return [Evaluation(0, "accuracy", {"accuracy": right}, 5.0, [], "same")]

    monkeypatch.setattr(checkpoints, "evaluate_models", evaluate)
    return models


def test_every_checkpoint_is_evaluated_as_a_whole_model(save_dir, seen, tmp_path):
    evaluations = checkpoints.evaluate_checkpoints(None, save_dir, tmp_path / "out")
    assert [one.step for one in evaluations] == [20, 100]
    whole, merged = (tensors for tensors, _ in seen)
    np.testing.assert_array_equal(whole["model.norm.weight"], np.ones(16))
    base = load_file(tmp_path / "base" / "model.safetensors")
    factors = load_file(save_dir / "step_00000100" / "model" / "adapter_model.safetensors")
    module = "base_model.model.model.layers.0.self_attn.o_proj"
    added = 2.0 * factors[f"{module}.lora_B.weight"].astype(np.float64) @ factors[f"{module}.lora_A.weight"]
    name = "model.layers.0.self_attn.o_proj.weight"
    np.testing.assert_allclose(merged[name], base[name] + added, atol=1e-5)
    # Nothing of the merged model is left.
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["curve.svg", "metrics.jsonl"]
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["eval/accuracy"]) for line in lines] == [(20, 0.25), (100, 0.5)]
    assert "Held-out accuracy" in (tmp_path / "out" / "curve.svg").read_text()


def test_the_command_prints_a_table(save_dir, seen, tmp_path, capsys):
    config = tmp_path / "config.yaml"
    config.write_text("data: {tokenizer_dir: t}\nreward: {verifier_function: accuracy_reward}\n")
    arguments = ["eval", str(config), "--data", "prompts", "--output", str(tmp_path / "out")]
    assert main([*arguments, "--checkpoints", str(save_dir)]) == 0
    text = capsys.readouterr().out
    first, second = (line.split() for line in text.splitlines()[2:4])
    assert (first[0], first[1], second[0], second[1], second[5]) == ("20", "25.0%", "100", "50.0%", "+25.0")
    assert main([*arguments, "--checkpoints", str(save_dir), "--baseline", "b"]) == 2
    assert "--baseline goes with --model" in capsys.readouterr().err


def test_the_table_has_pass_at_k_of_several_samples():
    right = np.array([[1, 0, 0], [0, 0, 0], [1, 1, 1], [0, 1, 0]], np.float64)
    evaluations = [Evaluation(step, "v", {"v": right}, 5.0, [], "same") for step in (1, 2)]
    title, first, second = checkpoints.table_lines(evaluations)
    assert "pass@3" in title
    assert first.split()[1] == "41.7%" and first.split()[5] == "75.0%"
    assert second.split()[5] == "75.0%"


def test_a_set_of_the_config_is_evaluated_by_its_own_verifier(save_dir, tmp_path, monkeypatch, capsys):
    jobs = []

    def evaluate(job, model_dirs, out_dir):
        jobs.append((job, accuracy_verifier(job.config, job.set_name)))
        return [Evaluation(0, "format_reward", {"format_reward": np.ones((8, 1))}, 5.0, [], "same")]

    monkeypatch.setattr(checkpoints, "evaluate_models", evaluate)
    config = tmp_path / "config.yaml"
    config.write_text(
        "data: {tokenizer_dir: t, eval_file: main}\nreward: {verifier_function: [accuracy_reward, format_reward]}\n"
        "evaluation: {sets: {hard: hard.mindrecord}, verifiers: {hard: format_reward}}\n"
    )
    arguments = ["eval", str(config), "--checkpoints", str(save_dir), "--output", str(tmp_path / "out")]
    assert main([*arguments, "--set", "hard"]) == 0
    assert {(job.data_file, verifier) for job, verifier in jobs} == {("hard.mindrecord", "format_reward")}
    assert main([*arguments, "--set", "easy"]) == 2
    assert "'easy' is not in evaluation.sets (hard)" in capsys.readouterr().err


def test_a_directory_without_checkpoints_is_refused(tmp_path):
    with pytest.raises(UserError, match="has no checkpoints"):
        checkpoints.find_checkpoints(tmp_path)
