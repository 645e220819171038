"""Models that are small enough for a unit test."""

from typing import Any

# What a Qwen3.5 has in its config.json beside what all models have, and which of its layers are linear.
LINEAR_ATTENTION = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
}


def tiny_model(**changes: Any) -> dict[str, Any]:
    """Return the config.json of a Qwen2 of one layer, with other values and further keys.

    Its weights begin large, so that attention, ratios and clips are far from flat.
    """
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "initializer_range": 0.2,
        **changes,
    }
