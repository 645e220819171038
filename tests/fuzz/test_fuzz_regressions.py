"""Inputs on which fuzzing once made a parser end with an error of another kind."""

import sys

import pytest
from fuzz_files import model_config

from mindrlhf.errors import UserError
from mindrlhf.observe.records import read_jsonl
from mindrlhf.observe.run_data import read_run
from mindrlhf.rewards.judges.chat_client import ChatError, _content
from mindrlhf.rewards.sample_files import read_samples
from mindrlhf.rollout.servers import Server
from mindrlhf.rollout.vllm_options import VllmOptions
from mindrlhf.specs import find_spec

MANY_DIGITS = "1" * 5000  # Python refuses to read more than 4300
DEEP = "[" * 100_000


@pytest.mark.parametrize("step", [str(2**63), "-1", MANY_DIGITS, "true", DEEP])
def test_a_record_needs_a_step_that_fits_an_array(tmp_path, step):
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": {step}, "loss": 1}}\n')
    with pytest.raises(UserError, match="line 1"):
        list(read_jsonl(tmp_path / "metrics.jsonl"))


def test_a_metric_beyond_every_float_is_no_number(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1, "loss": 0.5, "huge": {10**400}}}\n')
    assert read_run(tmp_path).series.keys() == {"loss"}


@pytest.mark.parametrize("answer", [MANY_DIGITS, DEEP])
def test_a_sample_with_an_unreadable_answer_is_named(tmp_path, answer):
    path = tmp_path / "samples.jsonl"
    path.write_text(f'{{"completion": "x", "answer": {answer}}}\n{{"completion": "x", "answer": 7}}\n')
    bad, good = read_samples(path)
    assert str(bad).startswith(f"{path}:1: ")
    assert good.sample.answer == "7"


@pytest.mark.parametrize("reply", [DEEP.encode(), b'{"choices": [{"message": {"content": 3}}]}', b"\xff"])
def test_a_reply_that_is_no_completion_is_an_error_of_the_judge(reply):
    with pytest.raises(ChatError):
        _content("http://judge", reply)


@pytest.mark.parametrize(
    "config", ["[]", "{", '{"max_position_embeddings": "4096"}', '{"max_position_embeddings": [1]}']
)
def test_the_rollout_refuses_a_damaged_model_config(tmp_path, config):
    (tmp_path / "config.json").write_text(config)
    options = VllmOptions(
        python=sys.executable, model_dir=str(tmp_path), log_path=str(tmp_path / "log"), max_model_len=8
    )
    with pytest.raises(UserError):
        Server.start(options)


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ("qwen3/qwen3_30b_a3b", {"head_dim": [128]}),
        ("qwen3/qwen3_30b_a3b", {"head_dim": "128"}),
        ("qwen3/qwen3_30b_a3b", {"num_experts": 10**8}),
        ("deepseek_v3/deepseek_v3_671b", {"n_shared_experts": [1]}),
        ("deepseek_v3/deepseek_v3_671b", {"n_shared_experts": "1"}),
        ("deepseek_v3/deepseek_v3_671b", {"n_group": 8.0}),
        ("deepseek_v3/deepseek_v3_671b", {"num_nextn_predict_layers": [1]}),
    ],
)
def test_a_model_config_with_a_size_that_is_none_is_refused(model, changes):
    config = model_config(model)
    spec = find_spec(config)
    assert spec.rules(spec.dims(config))
    with pytest.raises(UserError, match="config.json"):
        spec.dims(config | changes)
