"""Models that are small enough for a test: the keys of their config.json."""

from collections.abc import Mapping
from typing import Any

# A Qwen2 of one layer. Its weights begin large, so that attention, ratios and clips are far from flat.
TINY = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": False, "initializer_range": 0.2,
}  # fmt: skip
# Heads of 32 are the smallest that vLLM's attention on a CPU takes.
WIDE = TINY | {
    "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "max_position_embeddings": 256,
    "initializer_range": 0.1, "rope_theta": 10000.0, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "torch_dtype": "float32",
}  # fmt: skip
# Felt within a row: some channels kept, some slowed, some in part.
LLAMA3_ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3_ROPE |= {"original_max_position_embeddings": 64}
_EXPERTS = {"num_experts_per_tok": 2, "norm_topk_prob": True, "moe_intermediate_size": 64}
_SIGMOID_EXPERTS = _EXPERTS | {
    "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 0,
}  # fmt: skip
# The keys of a family beside those that all have.
FAMILIES = {
    "qwen2": {"architectures": ["Qwen2ForCausalLM"]},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "head_dim": 32},
    "qwen3_moe": _EXPERTS | {
        "architectures": ["Qwen3MoeForCausalLM"], "head_dim": 32, "num_experts": 4, "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "qwen3_5_text": {
        "architectures": ["Qwen3_5ForCausalLM"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 8, "linear_value_head_dim": 6,
    },
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": None},
    # Pairs of neighbouring channels in half of each head, norms behind attention and MLP.
    "glm4": {
        "architectures": ["Glm4ForCausalLM"], "head_dim": 32, "attention_bias": True, "partial_rotary_factor": 0.5,
    },
    # Half of each head rotated, norms of queries and keys, a dense layer, then experts chosen by biased sigmoids.
    "glm4_moe": _SIGMOID_EXPERTS | {
        "architectures": ["Glm4MoeForCausalLM"], "head_dim": 32, "attention_bias": True, "partial_rotary_factor": 0.5,
        "use_qk_norm": True,
    },
    # A layer with a window, and one without.
    "gemma3_text": {
        "architectures": ["Gemma3ForCausalLM"], "head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 7,
        "sliding_window_pattern": 2, "rope_local_base_freq": 50.0, "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
    },
    # The sizes of latent and rotated part are the only ones that vLLM's CPU kernel takes.
    "deepseek_v3": _SIGMOID_EXPERTS | {
        "architectures": ["DeepseekV3ForCausalLM"], "num_key_value_heads": 4, "q_lora_rank": 48, "kv_lora_rank": 512,
        "qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 32, "n_routed_experts": 8,
        "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    },
}  # fmt: skip
# What a Qwen3.5 has beside what all models have, and which of its layers are linear.
LINEAR_ATTENTION = {"model_type": "qwen3_5_text", **FAMILIES["qwen3_5_text"]}


def tiny_model(model_type: str = "qwen2", base: Mapping[str, Any] = TINY, **changes: Any) -> dict[str, Any]:
    """Return the config.json of a model of a family, with the sizes of ``base``, other values and further keys."""
    config = {**base, "model_type": model_type, **FAMILIES[model_type], **changes}
    if "hidden_activation" in config:
        config.pop("hidden_act", None)
    return config
