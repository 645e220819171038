"""YAML and overrides become a checked config, or one line that says what is wrong and where."""

import pytest

from mindrlhf.config.load import load_config, load_grpo_config
from mindrlhf.config.parse import read, read_yaml
from mindrlhf.config.schema import GrpoConfig
from mindrlhf.errors import UserError

REQUIRED = {
    "model.path": "model",
    "data.train_file": "prompts.mindrecord",
    "data.tokenizer_dir": "tokenizer",
    "reward.verifier_function": "accuracy_reward",
}
ALL_REQUIRED = [f"{key}={value}" for key, value in REQUIRED.items()]


@pytest.fixture
def write(tmp_path):
    def _write(text: str):
        path = tmp_path / "run.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return _write


def _error(path, *overrides: str) -> str:
    with pytest.raises(UserError) as failure:
        load_grpo_config(path, [*ALL_REQUIRED, *overrides])
    message = str(failure.value)
    assert "\n" not in message
    return message


def test_the_documented_defaults_hold(write):
    config = load_grpo_config(write(""), ALL_REQUIRED)
    optimizer, algorithm, rollout = config.optimizer, config.algorithm, config.rollout
    assert (optimizer.start_lr, optimizer.lr_schedule, optimizer.warmup_steps) == (1e-6, "constant", 0)
    assert (optimizer.beta1, optimizer.beta2, optimizer.weight_decay) == (0.9, 0.95, 0.01)
    assert optimizer.max_grad_norm == 1.0
    assert (algorithm.clip_low, algorithm.clip_high, algorithm.beta, algorithm.num_generations) == (0.2, 0.28, 0.0, 8)
    assert (rollout.temperature, rollout.top_p) == (1.0, 1.0)
    assert config.evaluation.before_training is True


@pytest.mark.parametrize("key", [key for key in REQUIRED if not key.startswith("reward.")])
def test_a_required_key_is_asked_for_by_name(write, key):
    others = [override for override in ALL_REQUIRED if not override.startswith(f"{key}=")]
    with pytest.raises(UserError, match=f"^key '{key}' is required: "):
        load_grpo_config(write(""), others)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("rollout: {temprature: 1.0}", "unknown key 'rollout.temprature'; did you mean 'rollout.temperature'?"),
        ("rolout: {temperature: 1.0}", "unknown key 'rolout'; did you mean 'rollout'?"),
        ("training: {beta: 0.1}", "unknown key 'training.beta'; did you mean 'algorithm.beta'?"),
        ("optimizer: {lr: 1e-6}", "unknown key 'optimizer.lr'; did you mean 'optimizer.start_lr'?"),
        ("algorithm: {policy_loss: gspo}", "unknown key 'algorithm.policy_loss'; did you mean 'algorithm.loss'?"),
        ("training: {start_lr: 1e-6}", "unknown key 'training.start_lr'; did you mean 'optimizer.start_lr'?"),
        ("rollout: {stall_timeout_s: 9}", "'rollout.stall_timeout_s' was removed: delete it; a server that is silent"),
        ("training: {pack: true}", "key 'training.pack' was removed: use training.packing: none for false"),
        ("num_generatoins: 4", "unknown key 'num_generatoins'; did you mean 'algorithm.num_generations'?"),
        ("run.max_steps: 3", "unknown key 'run.max_steps'; did you mean 'run: {max_steps: ...}'?"),
        ("observe: {zzz: 1}", "keys of section 'observe': performance_stats, groups_per_step"),
    ],
)
def test_an_unknown_key_comes_with_the_nearest_valid_one(write, text, expected):
    assert expected in _error(write(text))


@pytest.mark.parametrize(
    ("override", "kind", "value"),
    [
        ("training.chunk_size=many", "integer", "'many'"),
        ("training.chunk_size=1.5", "integer", "1.5"),
        ("training.chunk_size=true", "integer", "True"),
        ("data.shuffle=1", "true/false", "1"),
        ("optimizer.start_lr=fast", "number", "'fast'"),
        (
            "data.eval_file=[a, b]",
            "text",
            "['a', 'b'] (MindRecord file of held-out prompts; empty means no evaluation)",
        ),
        ("rollout.env=PATH", "mapping", "'PATH'"),
        ("rollout=5", "section (a mapping of keys)", "5"),
    ],
)
def test_a_wrong_type_names_key_and_value(write, override, kind, value):
    message = _error(write(""), override)
    assert message.startswith(f"'{override.partition('=')[0]}' must be ")
    assert message.endswith(f" {kind}, not {value}")


def test_a_wrong_type_in_a_list_names_its_place(write):
    message = _error(write(""), "training.sequence_lengths=[64, x]")
    assert message.startswith("'training.sequence_lengths[1]' must be ")
    assert message.endswith(" integer, not 'x'")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("rollout.temperature=0", "'rollout.temperature' is 0.0, but must be greater than 0"),
        ("rollout.top_p=1.5", "'rollout.top_p' is 1.5, but must be at most 1"),
        ("training.chunk_size=0", "'training.chunk_size' is 0, but must be at least 1"),
        ("optimizer.beta1=.nan", "'optimizer.beta1' is nan, but must be at least 0"),
        ("training.sequence_lengths=[4]", "'training.sequence_lengths[0]' is 4, but must be at least 8"),
        ("run.device=ascent", "'run.device' is 'ascent', but must be one of cpu, ascend; did you mean 'ascend'?"),
    ],
)
def test_a_value_out_of_range_names_the_bound(write, override, expected):
    assert _error(write(""), override) == expected


def test_overrides_win_over_the_file_and_over_earlier_ones(write):
    path = write("training: {chunk_size: 2, micro_batch_size: 3}")
    config = load_grpo_config(path, [*ALL_REQUIRED, "training.chunk_size=5", "training.chunk_size=7"])
    assert (config.training.chunk_size, config.training.micro_batch_size) == (7, 3)


def test_values_as_people_write_them(write):
    path = write("optimizer: {start_lr: 1e-6}\nreward: {verifier_weight: '1.0, 0.5'}\nrun: {output_dir: 2024}")
    overrides = ["reward.verifier_function=accuracy_reward,format_reward", "training.sequence_lengths=2048"]
    config = load_grpo_config(path, [*ALL_REQUIRED, *overrides])
    assert config.optimizer.start_lr == 1e-6
    assert config.reward.verifier_function == ("accuracy_reward", "format_reward")
    assert config.reward.verifier_weight == (1.0, 0.5)
    assert config.training.sequence_lengths == (2048,)
    assert config.run.output_dir == "2024"


def test_nothing_behind_the_sign_is_the_empty_value_of_the_key(write):
    path = write(
        "data: {eval_file: held_out.mindrecord}\nrollout: {env: {A: b}}\nreward: {by_choice: [accuracy_reward]}"
    )
    overrides = ["data.eval_file=", "rollout.env.A=", "rollout.env.B= ", "reward.by_choice=", "optimizer.end_lr="]
    config = load_grpo_config(path, [*ALL_REQUIRED, *overrides])
    assert (config.data.eval_file, config.reward.by_choice, config.optimizer.end_lr) == ("", (), None)
    assert config.rollout.env == {"A": "", "B": ""}
    assert load_grpo_config(path, [*ALL_REQUIRED, "rollout.env="]).rollout.env == {}
    assert _error(path, "training.chunk_size=") == "'training.chunk_size' must be an integer, not None"


@pytest.mark.parametrize(
    ("text", "overrides", "expected"),
    [
        ("- a\n- b", [], "holds a list"),
        ("a: [", [], "is not valid YAML"),
        ("a: !!python/object:os.system {}", [], "not valid YAML"),
        ("training:\n  chunk_size: 1\n  chunk_size: 2\n", [], "key 'chunk_size' is given twice (line 3)"),
        ("model: {path: m}", ["model.path.deep=1"], "'path' is a value, not a section"),
        *(("", [one], "is not of the form section.key=value") for one in ("training.chunk_size", "=5", " =5")),
    ],
)
def test_what_is_no_mapping_of_keys_is_refused(write, text, overrides, expected):
    assert expected in _error(write(text), *overrides)


def test_a_missing_file_and_a_binary_file_are_refused(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        read_yaml(tmp_path / "absent.yaml")
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00a")
    with pytest.raises(UserError, match="is not UTF-8 text at byte .: save it as UTF-8"):
        read_yaml(binary)


def test_given_keys_are_those_of_file_and_overrides(write):
    reading = read(GrpoConfig, read_yaml(write("training: {chunk_size: 2}")), ALL_REQUIRED)
    assert reading.given == {"training.chunk_size", *REQUIRED}


@pytest.mark.parametrize(
    ("overrides", "dtype"),
    [
        ([], "float32"),
        (["rollout.dtype=bfloat16"], "bfloat16"),
        (["run.device=ascend"], "bfloat16"),
        (["rollout.engine=engine.py:Engine", "rollout.dtype=float32", "run.device=ascend"], "float32"),
    ],
)
def test_a_default_may_be_of_the_device(write, overrides, dtype):
    assert load_grpo_config(write(""), [*ALL_REQUIRED, *overrides]).rollout.dtype == dtype


def test_a_supervised_config_has_its_own_keys(write):
    overrides = [override for override in ALL_REQUIRED if not override.startswith("reward.")]
    config = load_config("sft", write("training: {rows_per_step: 32}"), overrides)
    assert (config.training.rows_per_step, config.training.micro_batch_size) == (32, 4)
    with pytest.raises(UserError, match="^unknown key 'rollout'"):
        load_config("sft", write("rollout: {temperature: 1}"), overrides)


def test_a_merge_gives_its_keys(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("base: &base {a: 1, b: 2}\nrun: {<<: *base, b: 3}\nother: {<<: [*base, {c: 4}]}")
    assert read_yaml(path) == {"base": {"a": 1, "b": 2}, "run": {"a": 1, "b": 3}, "other": {"a": 1, "b": 2, "c": 4}}


def test_the_first_of_several_merged_mappings_wins_and_the_mapping_itself_before_them(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(
        "one: &one {rate: 1}\ntwo: &two {rate: 2, size: 2}\nboth: {<<: [*one, *two]}\nown: {rate: 9, <<: [*two, *one]}"
    )
    found = read_yaml(path)
    assert (found["both"], found["own"]) == ({"rate": 1, "size": 2}, {"rate": 9, "size": 2})


@pytest.mark.parametrize(
    ("value", "message"),
    [('"a\\0b"', "'run.output_dir' is 'a\\x00b', with a NUL character"), ('"a\\ud800b"', "is no character")],
)
def test_a_text_that_no_file_system_takes_is_refused(write, value, message):
    assert message in _error(write(f"run: {{output_dir: {value}}}"))
    assert message in _error(write(""), f"run.output_dir={value}")
