"""The algorithm section: what presets fill in, and each combination that is refused, with the fix that mends it."""

import json

import pytest
import yaml

from mindrlhf.algorithms import advantages, policy_losses
from mindrlhf.config.algorithm import CORRECTIONS, PRESETS, AlgorithmSection, CorrectionSection
from mindrlhf.config.derived import correction_weight, is_corrected, is_on_policy
from mindrlhf.config.load import load_grpo_config
from mindrlhf.config.parse import write_config
from mindrlhf.errors import UserError

BASE = ["model.path=m", "data.train_file=p", "data.tokenizer_dir=t", "reward.verifier_function=accuracy_reward"]
BFLOAT16 = ["run.device=ascend", "rollout.dtype=bfloat16", "model.compute_dtype=bfloat16"]


def model_of(preset):
    """Return the overrides that a preset with a critic or a teacher cannot do without."""
    needed = {"gae": ["critic.path=c"], "distill": ["model.reference_path=r"]}
    return needed.get(PRESETS[preset].get("advantage"), [])


@pytest.fixture
def load(tmp_path):
    path = tmp_path / "empty.yaml"
    path.write_text("")
    return lambda *overrides: load_grpo_config(path, [*BASE, *overrides])


@pytest.mark.parametrize("name", ["advantage", "loss", "aggregation", "kl_estimator", "kl_in", "name"])
def test_a_mistyped_part_is_met_with_the_choices(load, name):
    with pytest.raises(UserError, match=f"'algorithm.{name}' is 'sapoo', but must be one of"):
        load(f"algorithm.{name}=sapoo")


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_fills_in_what_is_not_given(load, preset):
    plain = AlgorithmSection()
    algorithm = load(f"algorithm.name={preset}", *model_of(preset)).algorithm
    for name, value in PRESETS[preset].items():
        assert getattr(algorithm, name) == value
        assert value is not None and name != "num_generations"
    untouched = AlgorithmSection.__dataclass_fields__.keys() - PRESETS[preset].keys() - {"name"}
    assert {name: getattr(algorithm, name) for name in untouched} == {name: getattr(plain, name) for name in untouched}
    assert algorithm.advantage in advantages.names() and algorithm.loss in policy_losses.names()


def test_what_is_given_stays(load):
    algorithm = load("algorithm.name=gspo", "algorithm.clip_high=0.1", "algorithm.aggregation=token_mean").algorithm
    assert (algorithm.clip_low, algorithm.clip_high, algorithm.aggregation) == (3e-4, 0.1, "token_mean")


@pytest.mark.parametrize("preset", PRESETS)
def test_what_a_run_wrote_loads_again(load, preset, tmp_path):
    config = load(f"algorithm.name={preset}", *model_of(preset))
    write_config(config, tmp_path)
    lines = (tmp_path / "config.yaml").read_text().splitlines()
    # Other sections refuse keys that are written out but not used.
    begin, end = lines.index("algorithm:"), lines.index("training:")
    kept = [line for line in lines[begin:end] if "ref_model_sync_steps" not in line]
    path = tmp_path / "again.yaml"
    path.write_text("\n".join(kept))
    assert load_grpo_config(path, [*BASE, *model_of(preset)]).algorithm == config.algorithm


@pytest.mark.parametrize("preset", CORRECTIONS)
def test_a_preset_of_the_correction_fills_in_what_is_not_given_and_loads_again(load, preset, tmp_path):
    plain = CorrectionSection()
    config = load(f"correction.preset={preset}", "rollout.off_policy_steps=1")
    for name in CorrectionSection.__dataclass_fields__.keys() - {"preset"}:
        assert getattr(config.correction, name) == CORRECTIONS[preset].get(name, getattr(plain, name))
    write_config(config, tmp_path)
    values = yaml.safe_load((tmp_path / "config.yaml").read_text())["correction"]
    written = [f"correction.{name}={json.dumps(value)}" for name, value in values.items()]
    again = load("rollout.off_policy_steps=1", *written)
    assert again.correction == config.correction
    assert load("correction.preset=icepop", "correction.mask_bounds=0.5,3").correction.mask_bounds == (0.5, 3)


def test_old_samples_are_corrected_and_old_logprobs_are_the_updates_own(load):
    older = load("rollout.off_policy_steps=1")
    assert correction_weight(older) == "token" and is_corrected(older)
    assert correction_weight(load("rollout.off_policy_steps=1", "algorithm.name=gspo")) == "sequence"
    assert not is_corrected(load("rollout.off_policy_steps=1", "correction.bypass=true"))
    assert is_on_policy(older) and is_on_policy(load("rollout.off_policy_steps=1", "algorithm.name=dapo"))
    assert not is_on_policy(load("algorithm.name=dapo"))
    assert not is_on_policy(load("rollout.off_policy_steps=1", "training.num_iterations=2"))


def test_correction_is_on_where_the_numerics_differ(load):
    assert correction_weight(load()) == "none" and not is_corrected(load())
    assert correction_weight(load(*BFLOAT16)) == "token" and is_corrected(load(*BFLOAT16))
    assert correction_weight(load(*BFLOAT16, "algorithm.name=gspo")) == "sequence"
    assert not is_corrected(load(*BFLOAT16, "correction.weight=none"))
    assert not is_corrected(load(*BFLOAT16, "correction.bypass=true"))
    assert is_corrected(load("correction.mask=geometric", "correction.mask_bounds=[0.9,1.1]"))
    assert is_corrected(load("correction.veto=0.001"))
    assert is_corrected(load("correction.off_policy_mask=0.5"))


@pytest.mark.parametrize(
    "parts, message",
    [
        ({"keys": ("softness",)}, "KEYS has softness, no key of the section algorithm: declare it in OPTIONS"),
        ({"options": ("softness",)}, "OPTIONS must be {name: (default, minimum, maximum, meaning)}"),
    ],
)
def test_a_new_loss_that_declares_what_nothing_fills_is_refused(load, monkeypatch, parts, message):
    monkeypatch.setattr(policy_losses, "traits", lambda name: policy_losses.Traits("token", **parts))
    with pytest.raises(UserError) as caught:
        load("algorithm.loss=sapo")
    assert str(caught.value).startswith(f"algorithms/policy_losses/sapo.py: {message}")
