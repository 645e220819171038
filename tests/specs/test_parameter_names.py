"""Every rule names a parameter of MindFormers' own Ascend cells, which can be built (not run) on any machine."""

import json
from pathlib import Path

import pytest

from mindrlhf.models.causal_lm import build_model

pytestmark = pytest.mark.usefixtures("mindformers")

MODEL_CONFIGS = Path(__file__).parents[2] / "model_configs"
# What the full models differ in from the small ones built here.
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
}
EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
CASES = {
    "qwen2_5/qwen2_5_7b": {},
    "qwen3/qwen3_8b": {"head_dim": 16},
    "llama3_1/llama3_1_8b": {},
    "llama3_1/llama3_1_70b": {"architectures": ["MistralForCausalLM"], "rope_scaling": None, "head_dim": 16},
    "qwen3/qwen3_30b_a3b": {**EXPERTS, "head_dim": 16, "num_experts": 4},
    "glm4/glm4_9b": {"head_dim": 16},
    "gemma3/gemma3_1b": {"head_dim": 16},
    "glm4_5/glm4_5_air": {**EXPERTS, "num_attention_heads": 6, "head_dim": 16, "n_routed_experts": 4},
    "glm4_5/glm4_5": {**EXPERTS, "head_dim": 16, "n_routed_experts": 4, "first_k_dense_replace": 1},
    "deepseek_v3/deepseek_v3_671b": {
        **EXPERTS,
        "num_key_value_heads": 4,
        "first_k_dense_replace": 1,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "q_lora_rank": 24,
        "kv_lora_rank": 20,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
    },
}
# State of MindFormers' balancing losses, which nothing here trains: made anew at each start.
STATE = ("fi_accu", "expert_load")


@pytest.mark.parametrize("device", ["ascend", "cpu"])
@pytest.mark.parametrize("name", CASES)
def test_rules_are_the_parameters(name, device):
    config = json.loads((MODEL_CONFIGS / name / "config.json").read_text(encoding="utf-8"))
    model = build_model(
        {**config, **SMALL, **CASES[name]},
        seq_length=16,
        device=device,
        compute_dtype="bfloat16" if device == "ascend" else "float32",
    )
    actual = {
        parameter.name: (tuple(parameter.shape), parameter.requires_grad)
        for parameter in model.get_parameters()
        if not parameter.name.endswith(STATE)
    }
    assert actual == {rule.mf_name: (rule.mf_shape(model.dims), rule.trained) for rule in model.spec.rules(model.dims)}
