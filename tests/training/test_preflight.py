"""What is checked before a run: each mistake by one line that names it, and nothing computed."""

import json

import pytest
from preflight_cases import NUM_PROMPTS, changed

from mindrlhf.config.model import ModelSection
from mindrlhf.config.run import DataSection
from mindrlhf.config.schema import GrpoConfig, SftConfig
from mindrlhf.errors import UserError
from mindrlhf.training.preflight import check_grpo_inputs, check_offline_inputs
from mindrlhf.training.preflight.output import check_free
from mindrlhf.weights.convert import export_hf, random_hf_weights

PPO = {"algorithm": {"name": "ppo", "advantage": "gae"}}
DISTILL = {"algorithm": {"name": "distill", "advantage": "distill", "beta": 1.0, "kl_in": "reward"}}
KL = {"algorithm": {"beta": 0.1}}


def with_changes(config, inputs_dir, changes: dict):
    """Return a config with other values, by section and key; {} stands for the directory of inputs."""
    for section, values in changes.items():
        given = {name: v.format(inputs_dir) if isinstance(v, str) else v for name, v in values.items()}
        config = changed(config, section, **given)
    return config


@pytest.fixture
def sft_config(inputs_dir) -> SftConfig:
    return SftConfig(
        model=ModelSection(path=str(inputs_dir / "model")),
        data=DataSection(train_file=str(inputs_dir / "sft.mindrecord"), tokenizer_dir=str(inputs_dir / "tokenizer")),
    )


def assert_refused(config, *words: str) -> None:
    check = check_grpo_inputs if isinstance(config, GrpoConfig) else check_offline_inputs
    with pytest.raises(UserError) as caught:
        check(config)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_a_good_config_gives_the_inputs(config, inputs_dir):
    inputs = check_grpo_inputs(config)
    assert len(inputs.prompts) == NUM_PROMPTS and inputs.held_out is None
    assert inputs.row_lengths == (32,)  # 12 + 20
    assert inputs.num_steps == 8  # 15 prompts, two at a time
    assert inputs.tokenizer.vocab_size == 512
    with_eval = changed(config, "data", eval_file=str(inputs_dir / "train.mindrecord"))
    assert len(check_grpo_inputs(with_eval).held_out) == NUM_PROMPTS
    with_sets = changed(with_eval, "evaluation", sets={"long": str(inputs_dir / "long.mindrecord")})
    assert check_grpo_inputs(with_sets).more_held_out["long"].header.longest_prompt == 40
    assert check_grpo_inputs(with_sets).row_lengths == (64,)  # 40 + 20


@pytest.mark.parametrize(
    ("training", "max_steps", "num_steps"),
    [
        ({"epochs": 1, "chunk_size": 5}, 0, 1),
        ({"epochs": 1, "chunk_size": 6}, 0, 1),
        ({"epochs": 1, "chunk_size": 2, "num_rollouts": 2}, 0, 2),
        ({"epochs": 3, "chunk_size": 2}, 4, 4),
        ({"epochs": 3, "chunk_size": 2}, 100, 8),
    ],
)
def test_steps_are_counted(config, training, max_steps, num_steps):
    config = changed(changed(config, "training", **training), "run", max_steps=max_steps)
    assert check_grpo_inputs(config).num_steps == num_steps


def test_held_out_prompts_must_fit_too(config, inputs_dir):
    """The server is started for the longest row: a longer held-out prompt would end the run at its first evaluation."""
    config = changed(config, "data", eval_file=str(inputs_dir / "long.mindrecord"))
    # Without fixed row lengths they can grow; with fixed ones the user must choose.
    assert check_grpo_inputs(config).row_lengths[-1] >= 40 + 20
    assert_refused(changed(config, "training", sequence_lengths=(32,)), "40", "60")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data": {"eval_file": "nowhere.mindrecord"}}, ["nowhere.mindrecord"]),
        ({"data": {"train_file": "{}/model/config.json"}}, ["config.json", "not a prompt file"]),
        ({"model": {"path": "{}/bare"}}, ["bare"]),
        ({"model": {"path": "{}/small_vocabulary"}}, ["512", "500", "small_vocabulary"]),
        ({"reward": {"verifier_function": ("format_reward", "format_reward")}}, ["format_reward"]),
        ({"reward": {"verifier_weight": (float("nan"),)}}, ["nan"]),
        ({"reward": {"model_path": "nowhere"}}, ["nowhere"]),
        ({"reward": {"model_path": "{}/wide"}}, ["'reward.model_path'", "Qwen2ForCausalLM", "tokens, not scores"]),
        (
            {"training": {"sequence_lengths": (24, 31)}},
            ["sequence_lengths ends at 31", "12 tokens", "max_response_length = 20", "32"],
        ),
        ({**PPO, "critic": {"path": "nowhere"}}, ["nowhere"]),
        ({**PPO, "critic": {"path": "{}/small_vocabulary"}}, ["512", "500", "small_vocabulary"]),
        ({**PPO, "critic": {"path": "{}/bare"}}, ["bare"]),
        (
            {**PPO, "critic": {"path": "{}/model", "warmup_steps": 8}},
            ["'critic.warmup_steps' is 8", "8 steps", "never trained", "lower it"],
        ),
        ({**DISTILL, "model": {"reference_path": "{}/small_vocabulary"}}, ["small_vocabulary", "512"]),
        ({**DISTILL, "model": {"reference_path": "nowhere"}}, ["nowhere"]),
        ({**KL, "model": {"reference_path": "{}/bare"}}, ["bare"]),
        # random_init is about model.path alone: a named reference has weights of its own.
        ({**KL, "model": {"random_init": True, "reference_path": "{}/bare"}}, ["bare"]),
        (
            {"algorithm": {"beta": 0.1, "sync_ref_model": True}, "model": {"reference_path": "{}/wide"}},
            ["sync_ref_model", "wide"],
        ),
    ],
)
def test_mistakes_are_named(config, inputs_dir, changes, words):
    assert_refused(with_changes(config, inputs_dir, changes), *words)


@pytest.mark.parametrize(
    "changes",
    [
        {**PPO, "critic": {"path": "{}/model"}},  # a critic begins as a language model, or a reward model, of any size
        {**PPO, "critic": {"path": "{}/wide"}},
        {**DISTILL, "model": {"reference_path": "{}/wide"}},
        {"model": {"path": "{}/bare", "random_init": True}},
        {"model": {"reference_path": "{}/bare"}},  # which is not used
        {**KL, "model": {"reference_path": "{}/wide"}},
    ],
)
def test_models_that_fit_are_taken(config, inputs_dir, changes):
    assert check_grpo_inputs(with_changes(config, inputs_dir, changes)).num_steps == 8


def test_an_agent_that_is_not_there_is_found_and_gives_the_reward_of_environments(config, tmp_path):
    def asked(agent):
        return changed(changed(config, "tools", agent=agent), "reward", verifier_function=("environment_reward",))

    (tmp_path / "mine.py").write_text("def solve(record, base_url, api_key): pass\ndef two(a, b): pass\n")
    # Its turns need a chat template, which the prompts here were made without.
    assert_refused(asked(f"{tmp_path / 'mine.py'}:solve"), "neither were the prompts", "--template FILE")
    assert_refused(asked(f"{tmp_path / 'none.py'}:solve"), f"there is no file {tmp_path / 'none.py'}")
    assert_refused(asked(f"{tmp_path / 'mine.py'}:two"), "it is called as two(record, base_url, api_key)")


def test_rewards_and_environments_that_name_columns_need_prompts_that_keep_them(config, inputs_dir, tmp_path):
    (tmp_path / "mine.py").write_text(
        "raise SystemExit('it was run')\n"
        "def by_level(completion, answer, *, level): ...\n"
        "class Game:\n    def reset(self, answer, board): ...\n    def step(self, action): ...\n"
    )
    levelled = changed(config, "reward", verifier_function=(f"{tmp_path / 'mine.py'}:by_level",))
    played = changed(config, "tools", environment=f"{tmp_path / 'mine.py'}:Game")
    kept = inputs_dir / "kept.mindrecord"
    for asking, name in ((levelled, "level"), (played, "board")):
        assert_refused(asking, f"'{name}'", f"prompts of {inputs_dir / 'train.mindrecord'} have no columns", "--keep")
        check_grpo_inputs(changed(asking, "data", train_file=str(kept)))
        held_out = str(inputs_dir / "train.mindrecord")
        assert_refused(changed(asking, "data", train_file=str(kept), eval_file=held_out), f"prompts of {held_out}")


def test_a_tensor_that_is_missing_or_of_another_shape(config, inputs_dir, tmp_path):
    model = json.loads((inputs_dir / "model" / "config.json").read_text())
    broken = tmp_path / "deeper"
    broken.mkdir()
    for file in (inputs_dir / "model").iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    (broken / "config.json").write_text(json.dumps({**model, "num_hidden_layers": 2}))
    assert_refused(changed(config, "model", path=str(broken)), "model.layers.1.")
    (broken / "config.json").write_text(json.dumps({**model, "intermediate_size": 48}))
    assert_refused(changed(config, "model", path=str(broken)), "mlp", "48")


def test_a_teacher_reads_the_actors_tokens(config, inputs_dir, tmp_path):
    for file in (*(inputs_dir / "model").iterdir(), *(inputs_dir / "tokenizer").iterdir()):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    good = with_changes(config, inputs_dir, {**DISTILL, "model": {"reference_path": str(tmp_path)}})
    assert check_grpo_inputs(good).num_steps == 8
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    tokenizer["normalizer"] = {"type": "Lowercase"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert_refused(good, "'model.reference_path'", "another vocabulary", "the reference model reads the actor's tokens")


@pytest.fixture
def reward_model_dir(inputs_dir, tmp_path):
    model = json.loads((inputs_dir / "wide" / "config.json").read_text())
    model |= {"architectures": ["Qwen2ForSequenceClassification"], "tie_word_embeddings": False}
    export_hf(random_hf_weights(model, 0), model, tmp_path / "reward")
    for file in (inputs_dir / "tokenizer").iterdir():
        (tmp_path / "reward" / file.name).write_bytes(file.read_bytes())
    return tmp_path / "reward"


def test_a_scoring_model_brings_its_tokenizer_and_weights(config, inputs_dir, reward_model_dir):
    critic = with_changes(config, inputs_dir, {**PPO, "critic": {"path": str(reward_model_dir)}})
    assert check_grpo_inputs(critic).num_steps == 8
    scored = changed(config, "reward", model_path=str(reward_model_dir))
    tokenizer = json.loads((reward_model_dir / "tokenizer.json").read_text())
    tokens = tokenizer["model"]["vocab"]
    tokens["x"], tokens["y"] = tokens["y"], tokens["x"]
    (reward_model_dir / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert_refused(scored, "'reward.model_path' is", "another vocabulary", "data.tokenizer_dir")
    assert_refused(critic, "'critic.path' is", "another vocabulary", "data.tokenizer_dir")
    (reward_model_dir / "tokenizer.json").unlink()
    (reward_model_dir / "model.safetensors").unlink()
    assert_refused(scored, str(reward_model_dir))


def test_supervised_inputs(sft_config, inputs_dir):
    inputs = check_offline_inputs(sft_config)
    assert len(inputs.prompts) == 3
    assert inputs.row_lengths == (24,)  # 12 + 9, rounded up
    short = changed(sft_config, "training", sequence_lengths=(16, 20))
    assert_refused(short, "sequence_lengths ends at 20", "21 tokens")
    prompts = str(inputs_dir / "train.mindrecord")
    assert_refused(changed(sft_config, "data", train_file=prompts), "train.mindrecord", "--task sft")


def test_an_export_directory_must_be_free(tmp_path):
    check_free(tmp_path / "absent")
    check_free(tmp_path)
    (tmp_path / "config.json").touch()
    with pytest.raises(UserError, match=r"holds the model of an earlier run: --resume run.max_steps=N trains"):
        check_free(tmp_path)


def test_rows_longer_than_a_sliding_window_are_refused_for_training_and_for_a_reference(config, inputs_dir, tmp_path):
    hf_config = json.loads((inputs_dir / "model" / "config.json").read_text())
    for window in (16, 32):
        mistral = {**hf_config, "architectures": ["MistralForCausalLM"], "sliding_window": window}
        export_hf(random_hf_weights(mistral, 0), mistral, tmp_path / str(window))
    fits, narrow = str(tmp_path / "32"), str(tmp_path / "16")
    message = "sliding_window=16, but rows of 32 tokens are trained with full attention: make them 16 at most"
    assert check_grpo_inputs(changed(config, "model", path=fits)).row_lengths == (32,)
    with pytest.raises(UserError, match=message):
        check_grpo_inputs(changed(config, "model", path=narrow))
    judged = changed(changed(config, "model", path=fits, reference_path=narrow), "algorithm", beta=0.1)
    with pytest.raises(UserError, match=message):
        check_grpo_inputs(judged)
