"""Where an exported model stops: in transformers, in vLLM, and as its files say, at the end tokens of training."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from slow_tests import SLOW
from tiny_models import tiny_model

from mindrlhf.data.tokenizers import load_tokenizer
from mindrlhf.system.sizes import read_json_object
from mindrlhf.weights.convert import export_hf, random_hf_weights

CHECKPOINT = Path(__file__).parents[2] / "examples" / "quickstart" / "checkpoint"
CONFIG = tiny_model(hidden_size=64, intermediate_size=32, num_attention_heads=2, num_key_value_heads=1, vocab_size=512)


@pytest.fixture
def tokenizer_dir(tmp_path):
    """The quickstart's tokenizer with two end tokens, as published chat models have them."""
    directory = tmp_path / "tokenizer"
    directory.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(CHECKPOINT / name, directory / name)
    config = read_json_object(directory / "tokenizer_config.json")
    (directory / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": "<|endoftext|>"}))
    return directory


def chain_model(follower):
    """A model that says after each token the one that follows it: its layers add nothing to the embedding."""
    tensors = dict(random_hf_weights(CONFIG, 0))
    generator = np.random.default_rng(1)
    embedding = generator.standard_normal((512, 64)).astype(np.float32)
    head = np.zeros((512, 64), np.float32)
    for token, following in follower.items():
        head[following] += embedding[token]
    for name in tensors:
        if "o_proj" in name or "down_proj" in name:
            tensors[name] = np.zeros_like(tensors[name])
    return tensors | {"model.embed_tokens.weight": embedding, "lm_head.weight": head}


@SLOW  # by day: what is written, below
def test_transformers_and_vllm_stop_where_training_stopped(tmp_path, tokenizer_dir, run_in_rollout):
    chat_end, end = load_tokenizer(tokenizer_dir).eos_token_ids
    assert chat_end != end
    chain = {20: 21, 21: chat_end, chat_end: 22, 22: 23, 30: 31, 31: 32, 32: end, end: 33, 33: 34}
    tensors = chain_model(chain)
    export_hf(iter(tensors.items()), CONFIG, tmp_path / "model", tokenizer_dir=tokenizer_dir)
    script = Path(__file__).with_name("generation_reference.py")
    found = json.loads(run_in_rollout(script, tmp_path / "model", "20", "30").splitlines()[-1])
    assert found["generated"] == {"20": [21, chat_end], "30": [31, 32, end]}
    assert found["vllm"] == sorted([chat_end, end])


def generation_config(tmp_path, tokenizer_dir, config=CONFIG):
    out = tmp_path / "out"
    export_hf(random_hf_weights(config, 0), config, out, tokenizer_dir=tokenizer_dir)
    path = out / "generation_config.json"
    return read_json_object(path) if path.is_file() else None


def test_what_the_tokenizers_files_say_stays_and_end_tokens_only_come_to_it(tmp_path, tokenizer_dir):
    ends = list(load_tokenizer(tokenizer_dir).eos_token_ids)
    given = {"temperature": 0.7, "eos_token_id": [511, ends[1]], "pad_token_id": 3}
    (tokenizer_dir / "generation_config.json").write_text(json.dumps(given))
    assert generation_config(tmp_path, tokenizer_dir) == given | {"eos_token_id": [511, ends[1], ends[0]]}


def test_templates_models_of_the_tokenizer_and_licences_go_along_and_nothing_else(tmp_path, tokenizer_dir):
    (tokenizer_dir / "additional_chat_templates").mkdir()
    kept = ["additional_chat_templates/tool_use.jinja", "chat_template.jinja", "chat_template.json", "spiece.model"]
    kept += ["tekken.json", "qwen.tiktoken", "vocab.txt", "processor_config.json", "video_preprocessor_config.json"]
    kept += ["LICENSE.txt", "NOTICE"]
    dropped = ["README.md", "modeling.py", "trainer_state.json", "model.safetensors.index.json", ".env", "a.jinja"]
    for name in [*kept, *dropped]:
        (tokenizer_dir / name).write_text("{}")
    export_hf(random_hf_weights(CONFIG, 0), CONFIG, tmp_path / "out", tokenizer_dir=tokenizer_dir)
    found = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    own = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert found == {*kept, *own}


def test_one_end_token_is_a_list_too_and_padding_is_named(tmp_path):
    tokenizer = load_tokenizer(CHECKPOINT)
    assert generation_config(tmp_path, CHECKPOINT) == {
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": list(tokenizer.eos_token_ids),
    }


def test_models_that_give_scores_and_directories_without_a_tokenizer_have_none(tmp_path, tokenizer_dir):
    scorer = CONFIG | {"architectures": ["Qwen2ForSequenceClassification"], "num_labels": 1}
    assert generation_config(tmp_path / "scorer", tokenizer_dir, scorer) is None
    (tmp_path / "empty").mkdir()
    assert generation_config(tmp_path / "weights", tmp_path / "empty") is None
