"""Recomputation of a model's activations in the backward pass."""

from mindspore import nn

from mindrlhf.config.memory import ACTIVATION, ATTENTION, MLP, NORMS, MemorySection

# Cells and operators of a layer, by role.
_PATHS = {
    ATTENTION: ("self_attention.core_attention",),
    NORMS: ("input_layernorm", "pre_mlp_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
    # The second product reads a reshaped view, which would keep the operators' result.
    ACTIVATION: tuple(
        f"{mlp}.{name}"
        for mlp in ("mlp", "mlp.shared_experts")
        for name in ("activation_func.silu", "gelu", "mul", "swiglu", "linear_fc2.reshape")
    ),
    MLP: ("mlp",),
}


def set_recompute(model: nn.Cell, memory: MemorySection) -> None:
    """Have ``memory.recompute_layers`` of a GPTModel recomputed, and in the others ``memory.recompute_operators``."""
    chosen = memory.layers
    for number, layer in enumerate(model.decoder.layers):
        if number in chosen:
            layer.recompute()
            continue
        for path in (path for role in memory.recompute_operators for path in _PATHS[role]):
            found = _find(layer, path)
            if found is not None:
                found.recompute()


def _find(layer: nn.Cell, path: str):
    found = layer
    for name in path.split("."):
        found = getattr(found, name, None)
    return found
