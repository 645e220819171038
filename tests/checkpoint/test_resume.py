"""Which changes of the config a resumed run may have: every key of the real config is decided here."""

import copy
import dataclasses
import json

import pytest

from mindrlhf.checkpoint.resume import DECAY_KEYS, FREE_KEYS, check_resumable, config_differences
from mindrlhf.config.keys import REMOVED_WITHOUT_EFFECT
from mindrlhf.config.model import ModelSection
from mindrlhf.config.reward import RewardSection
from mindrlhf.config.run import DataSection
from mindrlhf.config.schema import DpoConfig, GrpoConfig, RewardModelConfig, SftConfig
from mindrlhf.config.training import OptimizerSection
from mindrlhf.errors import UserError


def make_config(kind=GrpoConfig, **optimizer):
    reward = {"reward": RewardSection(verifier_function=("accuracy_reward",))} if kind is GrpoConfig else {}
    return dataclasses.asdict(
        kind(
            model=ModelSection(path="models/small"),
            data=DataSection(train_file="train.mindrecord", tokenizer_dir="models/small"),
            optimizer=OptimizerSection(**optimizer),
            **reward,
        )
    )


def keys_of(config):
    return {f"{section}.{name}" for section, values in config.items() for name in values}


def changed(config, key, value):
    config = copy.deepcopy(config)
    section, name = key.split(".", 1)
    config[section][name] = value
    return config


GIVEN = {"model.path", "data.train_file", "data.tokenizer_dir", "reward.verifier_function"}  # by make_config
ALL_KEYS = sorted(keys_of(make_config()))


def is_free(key):
    return key in FREE_KEYS or key.split(".")[0] in FREE_KEYS


def test_the_config_of_a_checkpoint_read_from_json_equals_itself():
    config = make_config()
    assert config_differences(json.loads(json.dumps(config)), config) == []
    check_resumable(json.loads(json.dumps(config)), config)


def test_differences_are_dotted_and_sorted_and_count_what_one_side_lacks():
    old = {"run": {"seed": 1, "gone": 2}, "rollout": {"env": {"A": "1"}}, "same": [1, 2]}
    new = {"run": {"seed": 2}, "rollout": {"env": {"A": "1", "B": "x"}}, "same": (1, 2), "flag": None}
    assert config_differences(old, new) == ["flag", "rollout.env.B", "run.gone", "run.seed"]


def test_the_free_keys_are_keys_of_the_config():
    configs = [make_config(kind) for kind in (GrpoConfig, SftConfig, DpoConfig, RewardModelConfig)]
    assert set().union(*configs, *map(keys_of, configs)) >= FREE_KEYS >= DECAY_KEYS


@pytest.mark.parametrize(
    "key",
    [
        "model.path", "data.train_file", "data.tokenizer_dir", "run.seed", "algorithm.num_generations",
        "algorithm.beta", "training.chunk_size", "training.num_rollouts", "training.micro_batch_size",
        "training.num_minibatches", "rollout.temperature", "reward.verifier_function", "optimizer.start_lr",
    ],
)  # fmt: skip
def test_what_matters_is_refused(key):
    assert key in ALL_KEYS and not is_free(key)
    old = make_config()
    section, name = key.split(".")
    before = list(old[section][name]) if isinstance(old[section][name], tuple) else old[section][name]
    with pytest.raises(UserError) as error:
        check_resumable(old, changed(old, key, "another"))
    assert f"{key} was {before!r} and is now 'another'" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "key", ["run.output_dir", "run.max_steps", "evaluation.every_steps", "checkpoint.keep_last", "observe.sinks",
            "rollout.python", "rollout.num_threads", "reward.timeout_s", "parallel_config.data_parallel"],
)  # fmt: skip
def test_what_does_not_matter_is_allowed(key):
    assert key in ALL_KEYS and is_free(key)
    check_resumable(make_config(), changed(make_config(), key, "another"))


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        (kind, key)
        for kind in (GrpoConfig, SftConfig, DpoConfig, RewardModelConfig)
        for key in sorted(keys_of(make_config(kind)) - GIVEN)
    ],
)
def test_a_checkpoint_older_than_a_key_goes_on_where_the_key_has_its_default(kind, key):
    new = json.loads(json.dumps(make_config(kind)))
    section, name = key.split(".")
    old = copy.deepcopy(new)
    del old[section][name]
    check_resumable(old, new)
    if not is_free(key) and not isinstance(new[section][name], dict):
        with pytest.raises(UserError, match=f"{key} was .* and is now 'another'"):
            check_resumable(old, changed(new, key, "another"))


def test_a_checkpoint_of_a_release_without_a_section_goes_on():
    new = json.loads(json.dumps(make_config()))
    for section in ("correction", "tools", "lora", "critic"):
        old = {name: values for name, values in new.items() if name != section}
        check_resumable(old, new)


def test_a_checkpoint_without_a_key_that_has_no_default_is_refused():
    new = json.loads(json.dumps(make_config()))
    for key in GIVEN - FREE_KEYS - {"reward.verifier_function"}:
        section, name = key.split(".")
        old = copy.deepcopy(new)
        del old[section][name]
        with pytest.raises(UserError, match=f"{key} was not set"):
            check_resumable(old, new)


def test_every_refused_key_is_named():
    old = make_config()
    new = changed(changed(old, "run.seed", 4), "model.path", "models/large")
    message = (
        "model.path was 'models/small' and is now 'models/large'; run.seed was 0 and is now 4: set them back, or start"
    )
    with pytest.raises(UserError, match=message):
        check_resumable(old, new)


def test_a_file_that_is_compared_by_what_it_holds_may_lie_elsewhere():
    old = make_config()
    new = changed(changed(old, "data.train_file", "/elsewhere/train.mindrecord"), "run.seed", 4)
    with pytest.raises(UserError, match="checkpoint: data.train_file was .* and is now '/elsewhere/train.*; run.seed"):
        check_resumable(old, new)
    with pytest.raises(UserError, match="checkpoint: run.seed was 0 and is now 4: set it back"):
        check_resumable(old, new, ("data.train_file",))


def test_a_key_that_one_release_does_not_have_is_refused():
    old = make_config()
    new = changed(old, "algorithm.clip_dual", 3.0)
    with pytest.raises(UserError, match=r"algorithm\.clip_dual was not set and is now 3\.0"):
        check_resumable(old, new)
    with pytest.raises(UserError, match=r"algorithm\.clip_dual was 3\.0 and is now not set"):
        check_resumable(new, old)


def test_a_key_that_was_removed_and_had_no_effect_is_left_out_by_name():
    new = make_config()
    for key in REMOVED_WITHOUT_EFFECT:
        assert key not in ALL_KEYS
        assert check_resumable(changed(new, key, 60.0), new) == [key]
    assert check_resumable(new, new) == []
    with pytest.raises(UserError, match=r"rollout\.draft_tokens was 4 and is now not set"):
        check_resumable(changed(new, "rollout.draft_tokens", 4), new)


@pytest.mark.parametrize("key", sorted(DECAY_KEYS))
@pytest.mark.parametrize("kind", [GrpoConfig, SftConfig, DpoConfig])
def test_the_number_of_steps_is_fixed_while_the_learning_rate_decays_to_it(key, kind):
    constant, decaying = make_config(kind), make_config(kind, lr_schedule="cosine", end_lr=0.0)
    check_resumable(constant, changed(constant, key, 500))
    with pytest.raises(UserError, match=rf"{key} was \d and is now 500"):
        check_resumable(decaying, changed(decaying, key, 500))
