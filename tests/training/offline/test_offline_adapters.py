"""Adapters in runs on fixed data: they learn, the base is the reference, and their files are a whole model with it."""

import json

import numpy as np
import pytest
from engines import export
from offline_cases import export_model, write_config
from safetensors.numpy import load_file
from slow_tests import SLOW
from test_preference import make_trainer, run

from mindrlhf.config.load import load_config

LORA = {"rank": 4, "alpha": 8.0}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return export_model(tmp_path_factory)


def base_tensors(learner):
    return {p.name: p.asnumpy().copy() for p in learner.model.network.get_parameters() if "lora" not in p.name}


def test_dpo_learns_against_the_base_and_an_adapter_goes_on_where_it_was(model_dir, tmp_path):
    path = write_config(tmp_path / "dpo.yaml", model_dir, dpo={"beta": 0.5}, lora=LORA)
    trainer, learner = make_trainer(load_config("dpo", path, ["optimizer.start_lr=1e-2"]))
    before = base_tensors(learner)
    metrics, _ = run(trainer)
    assert metrics[0]["eval/loss"] == pytest.approx(np.log(2))
    assert metrics[30]["eval/accuracy"] > 0.9
    for name, array in base_tensors(learner).items():
        np.testing.assert_array_equal(array, before[name], err_msg=name)
    export(learner, tmp_path / "final")
    # A new run from this adapter, whose reference is the base as before.
    trainer, _ = make_trainer(load_config("dpo", path, [f"lora.path={tmp_path / 'final_adapter'}"]))
    evaluation, _ = trainer._evaluate_held_out()
    assert evaluation["eval/loss"] == pytest.approx(metrics[30]["eval/loss"], rel=1e-5)


@SLOW
def test_a_reward_model_learns_and_its_files_are_the_merged_model(model_dir, tmp_path):
    from networks import iter_hf_tensors, load_adapter, load_model

    path = write_config(tmp_path / "rm.yaml", model_dir, lora=LORA)
    config = load_config("reward-model", path, ["optimizer.start_lr=1e-2"])
    trainer, learner = make_trainer(config)
    metrics, _ = run(trainer)
    assert metrics[0]["eval/loss"] == pytest.approx(np.log(2))  # all scores are 0
    assert metrics[30]["eval/accuracy"] > 0.8
    export(learner, tmp_path / "final")
    assert json.loads((tmp_path / "final" / "config.json").read_text())["architectures"] == [
        "Qwen2ForSequenceClassification"
    ]
    # The merged model is loaded without knowing of adapters; the base with the adapter's files is the trained one.
    merged = load_file(tmp_path / "final" / "model.safetensors")
    again = load_model(config.model, str(model_dir), config.run, 32, config.lora, as_scorer=True)
    load_adapter(again, tmp_path / "final_adapter")
    np.testing.assert_array_equal(again.score_weight.asnumpy(), merged["score.weight"])
    names = {name for name, array in iter_hf_tensors(again) if not np.array_equal(array, merged[name])}
    assert names == {name for name in merged if "proj.weight" in name}  # what adapters were added to
