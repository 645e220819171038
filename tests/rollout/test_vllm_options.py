"""What is checked before a rollout server is started."""

import json

import pytest

from mindrlhf.errors import UserError
from mindrlhf.rollout.vllm_options import check_head_size

MODEL = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 100,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}


def test_heads_that_the_attention_on_a_cpu_cannot_compute_are_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    with pytest.raises(UserError, match="heads of 16 channels, but vLLM's attention on a CPU is for 32, 64, "):
        check_head_size(str(tmp_path), "cpu")
    check_head_size(str(tmp_path), "ascend")
    (tmp_path / "config.json").write_text(json.dumps({**MODEL, "num_attention_heads": 2}))
    check_head_size(str(tmp_path), "cpu")
