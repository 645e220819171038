"""A model that is small enough for a unit test."""

from typing import Any


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
