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


# The overrides that break a rule; words of the message; overrides that mend it.
RULES = {
    "leave-one-out of one": (
        ["algorithm.name=rloo", "algorithm.num_generations=1"],
        ["'algorithm.num_generations' is 1", "rloo", "set it to 2 or more"],
        ["algorithm.num_generations=2"],
    ),
    "penalties in rewards that are successes": (
        ["algorithm.name=maxrl", "algorithm.beta=0.1", "algorithm.kl_in=reward"],
        ["'algorithm.kl_in' is reward", "maxrl", "set it to loss"],
        ["algorithm.kl_in=loss"],
    ),
    "penalties in rewards that are normalised apart": (
        ["algorithm.name=gdpo", "algorithm.beta=0.1", "algorithm.kl_in=reward"],
        ["'algorithm.kl_in' is reward", "gdpo", "set it to loss"],
        ["algorithm.kl_in=loss"],
    ),
    "lengths in rewards that are successes": (
        ["algorithm.name=maxrl", "algorithm.overlong_buffer=0.2"],
        ["'algorithm.overlong_buffer' is 0.2", "maxrl", "set it to 0"],
        ["algorithm.overlong_buffer=0"],
    ),
    "advantages of tokens under a geometric mean": (
        ["algorithm.name=gmpo", "algorithm.advantage=gae", "critic.path=c"],
        ["'algorithm.loss' is gmpo", "differ from token to token"],
        ["algorithm.loss=ppo_clip"],
    ),
    "covariances that no token has": (
        ["algorithm.name=clip_cov", "algorithm.clip_cov_low=6"],
        ["'algorithm.clip_cov_low' is 6", "above clip_cov_high = 5"],
        ["algorithm.clip_cov_high=7"],
    ),
    "tokens left out of a response that is one action": (
        ["algorithm.name=gspo", "algorithm.clip_cov_ratio=0.001"],
        ["'algorithm.loss' is gspo", "with clip_cov_ratio differ from token to token"],
        ["algorithm.loss=gspo_token"],
    ),
    "advantages of turns under a loss of responses": (
        [
            "algorithm.name=reinforce_pp",
            "algorithm.loss=gspo",
            "tools.environment=gymnasium",
            "rollout.max_response_length=512",
        ],
        ["'algorithm.loss' is gspo", "reinforce_pp of an environment differ from token to token"],
        ["algorithm.loss=gspo_token"],
    ),
    "pass rates of no verifier": (
        ["algorithm.rest_epochs=2", "reward.verifier_function=[]", "reward.model_path=r"],
        ["'algorithm.rest_epochs' is 2", "names no verifier"],
        ["algorithm.rest_epochs=0"],
    ),
    "prompts that rest and segments": (
        ["algorithm.rest_epochs=2", "rollout.segment_tokens=8"],
        ["'algorithm.rest_epochs' is 2", "rollout.segment_tokens"],
        ["rollout.segment_tokens=0"],
    ),
    "prompts that all rest": (
        ["algorithm.rest_epochs=2", "algorithm.rest_easy=0.5", "algorithm.rest_hopeless=0.5"],
        ["'algorithm.rest_hopeless' is 0.5", "every prompt would rest"],
        ["algorithm.rest_hopeless=0.4"],
    ),
    "a curriculum in the file's order": (
        ["algorithm.curriculum=level", "data.shuffle=false"],
        ["'algorithm.curriculum' is level", "keeps the file's order"],
        ["data.shuffle=true"],
    ),
    "no teacher": (
        ["algorithm.name=distill"],
        ["'algorithm.advantage' is distill", "there is no teacher", "'model.reference_path'"],
        ["model.reference_path=teacher"],
    ),
    "a teacher that is not heard": (
        ["algorithm.advantage=distill", "model.reference_path=teacher", "algorithm.beta=1"],
        ["whose advantage is the KL against the teacher", "algorithm.name to distill"],
        ["algorithm.name=distill"],
    ),
    "several teachers and none that asks for them": (
        ["distillation.teachers={math: m}"],
        ["'distillation.teachers' is set", "algorithm.advantage is grpo", "set algorithm.name to distill"],
        ["algorithm.name=distill"],
    ),
    "teachers that the student would replace": (
        ["algorithm.name=distill", "distillation.teachers={math: m, code: c}", "algorithm.sync_ref_model=true"],
        ["'algorithm.sync_ref_model' is true", "over its teachers"],
        ["algorithm.sync_ref_model=false"],
    ),
    "a source without a directory": (
        ["algorithm.name=distill", "distillation.teachers={math: ''}"],
        ["no directory for math"],
        ["distillation.teachers={math: m}"],
    ),
    "a source that cannot be": (
        ["algorithm.name=distill", "distillation.teachers={'math:1': m}"],
        ["'math:1'", "no source has a colon"],
        ["distillation.teachers={math: m}"],
    ),
    "rewards beside a teacher, of one sample": (
        ["algorithm.name=distill", "model.reference_path=t", "algorithm.distill_reward_weight=1"]
        + ["algorithm.num_generations=1"],
        ["'algorithm.num_generations' is 1", "distill_reward_weight", "set it to 2 or more"],
        ["algorithm.num_generations=2"],
    ),
    "a teacher's words without a teacher": (
        ["algorithm.distill_top_k=8"],
        ["'algorithm.distill_top_k' is set", "algorithm.advantage distill, not grpo"],
        ["algorithm.distill_top_k=0"],
    ),
    "sampled words under a loss of whole responses": (
        ["algorithm.name=distill", "model.reference_path=t", "algorithm.loss=gspo"],
        ["'algorithm.loss' is gspo", "distill with KL in the reward differ from token to token"],
        ["algorithm.distill_top_k=8"],
    ),
    "the best of all": (
        ["algorithm.name=pass_at_k", "algorithm.num_generations=4"],
        ["'algorithm.pass_k' is 4", "set 'algorithm.num_generations' above 4", "lower pass_k"],
        ["algorithm.pass_k=2"],
    ),
    "a KL target without a reference": (
        ["algorithm.kl_target=0.1"],
        ["'algorithm.kl_target' is set", "no reference model", "set beta above 0"],
        ["algorithm.beta=0.1"],
    ),
    "an unbiased KL without a reference": (
        ["algorithm.kl_unbiased=true"],
        ["'algorithm.kl_unbiased' is true", "no reference model", "set beta above 0"],
        ["algorithm.beta=0.1"],
    ),
    "an estimator without a KL term": (
        ["algorithm.kl_estimator=k2"],
        ["'algorithm.kl_estimator' is set", "algorithm.beta above 0"],
        ["algorithm.beta=0.1"],
    ),
    "KL in the reward without a reference": (
        ["algorithm.kl_in=reward"],
        ["'algorithm.kl_in' is set", "algorithm.beta above 0"],
        ["algorithm.beta=0.1"],
    ),
    "an unbiased gradient of a reward": (
        ["algorithm.kl_unbiased=true", "algorithm.beta=0.1", "algorithm.kl_in=reward"],
        ["'algorithm.kl_unbiased' is true", "no gradient", "set kl_in to loss"],
        ["algorithm.kl_in=loss"],
    ),
    "an unbiased gradient of a biased estimate": (
        ["algorithm.kl_unbiased=true", "algorithm.beta=0.1", "algorithm.kl_estimator=k2"],
        ["k2 is itself biased", "kl_estimator to k1 or k3"],
        ["algorithm.kl_estimator=k1"],
    ),
    "GSPO with token truncation": (
        ["algorithm.name=gspo", "correction.weight=token"],
        ["'correction.weight' is token", "gspo has one ratio for a whole response", "set it to sequence"],
        ["correction.weight=sequence"],
    ),
    "GSPO with advantages per token": (
        ["algorithm.name=reinforce_pp", "algorithm.beta=0.1", "algorithm.loss=gspo"],
        ["'algorithm.loss' is gspo", "reinforce_pp with KL in the reward", "set it to gspo_token"],
        ["algorithm.loss=gspo_token"],
    ),
    "bypass and correction": (
        ["correction.bypass=true", "correction.veto=0.001"],
        ["'correction.bypass' is true", "nothing to correct", "'correction.veto' to 0"],
        ["correction.veto=0"],
    ),
    "bypass without a ratio": (
        ["correction.bypass=true", "algorithm.loss=reinforce"],
        ["'correction.bypass' is true", "reinforce has no ratio", "set it to false"],
        ["correction.bypass=false"],
    ),
    "old samples without correction": (
        ["rollout.off_policy_steps=1", "correction.weight=none"],
        ["'correction.weight' is none", "rollout.off_policy_steps", "set it to auto, or 'correction.bypass' to true"],
        ["correction.bypass=true"],
    ),
    "old tokens without correction": (
        ["rollout.segment_tokens=64", "correction.weight=none"],
        ["'correction.weight' is none", "rollout.segment_tokens", "set it to auto"],
        ["correction.weight=auto"],
    ),
    "a preset and a loss of other ratios": (
        ["correction.preset=decoupled_token_is", "algorithm.name=gspo"],
        ["'correction.weight' is token", "set it to sequence"],
        ["correction.preset=decoupled_seq_is"],
    ),
    "bounds the wrong way round": (
        ["correction.mask=token", "correction.mask_low=2", "correction.mask_high=1"],
        ["'correction.mask_low' is 2", "mask_high = 1", "lower it"],
        ["correction.mask_low=0.5"],
    ),
    "bounds of no mask": (
        ["correction.mask_low=0.9"],
        ["'correction.mask_low' is set", "correction.mask token, sequence or geometric"],
        ["correction.mask=geometric"],
    ),
    "truncation of no weight": (
        ["correction.max_weight=3"],
        ["'correction.max_weight' is set", "correction.weight token or sequence"],
        ["correction.weight=token"],
    ),
    "a clip that the loss does not have": (
        ["algorithm.name=sapo", "algorithm.clip_low=0.1"],
        ["'algorithm.clip_low' is set", "ppo_clip", "not sapo"],
        ["algorithm.loss=ppo_clip"],
    ),
    "an option of another estimator": (
        ["algorithm.pass_k=2"],
        ["'algorithm.pass_k' is set", "algorithm.advantage pass_at_k, not grpo"],
        ["algorithm.advantage=pass_at_k"],
    ),
    "an overlong penalty without a buffer": (
        ["algorithm.overlong_penalty=0.5"],
        ["'algorithm.overlong_penalty' is set", "an algorithm.overlong_buffer above 0"],
        ["algorithm.overlong_buffer=0.1"],
    ),
    "long responses punished twice": (
        ["algorithm.name=dapo", "reward.verifier_function=[accuracy_reward,overlong_penalty]"],
        ["'algorithm.overlong_buffer' is 0.2", "overlong_penalty", "remove it there, or set overlong_buffer to 0"],
        ["algorithm.overlong_buffer=0"],
    ),
    "dynamic sampling of advantages that learn from equal rewards": (
        ["algorithm.name=dapo", "algorithm.advantage=reinforce_pp"],
        ["'algorithm.dynamic_sampling'", "reinforce_pp learn from those too", "set it to false"],
        ["algorithm.dynamic_sampling=false"],
    ),
    "dynamic sampling without a ratio": (
        ["algorithm.dynamic_sampling=true", "algorithm.loss=reinforce"],
        ["'algorithm.dynamic_sampling'", "the loss reinforce has no ratio", "loss to ppo_clip"],
        ["algorithm.loss=ppo_clip"],
    ),
    "a bound of no sampling": (
        ["algorithm.max_oversampling=3"],
        ["'algorithm.max_oversampling' is set", "algorithm.dynamic_sampling true"],
        ["algorithm.dynamic_sampling=true"],
    ),
    "a gain without a target": (
        ["algorithm.kl_gain=0.5", "algorithm.beta=0.1"],
        ["'algorithm.kl_gain' is set", "an algorithm.kl_target"],
        ["algorithm.kl_target=0.1"],
    ),
}


@pytest.mark.parametrize("rule", RULES)
def test_a_broken_rule_names_the_key_and_the_fix_that_mends_it(load, rule):
    broken, words, mend = RULES[rule]
    with pytest.raises(UserError) as failure:
        load(*broken)
    message = str(failure.value)
    assert "\n" not in message
    for word in words:
        assert word in message
    load(*broken, *mend)


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
    assert load("correction.preset=icepop", "correction.mask_high=3").correction.mask_high == 3


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
    assert is_corrected(load("correction.mask=geometric", "correction.mask_low=0.9"))
    assert is_corrected(load("correction.veto=0.001"))
    assert is_corrected(load("correction.off_policy_mask=0.5"))
