"""Hidden states of vLLM behind each layer, for `mindrlhf doctor --compare-layers`."""

import re
from typing import Any

import numpy as np
import torch

EMBEDDING, NORM = "embedding", "norm"


def record_layers(model: torch.nn.Module, path: str) -> None:
    """Have the next pass of a model that is not compiled written to a file.

    It gets float32 [tokens, width] by name: what the first layer is given, "layer 0" and so on (each with its residual,
    which vLLM hands on beside it), and the last norm.
    """
    names = [name for name, _ in model.named_modules() if re.search(r"(^|\.)layers\.\d+$", name)]
    decoder = model.get_submodule(names[0].rpartition("layers.")[0].removesuffix("."))
    kept: dict[str, np.ndarray] = {}

    def keep(name: str, values: Any) -> None:
        values = values if isinstance(values, tuple) else (values,)
        states = [one.float() for one in values if isinstance(one, torch.Tensor) and one.is_floating_point()]
        kept[name] = sum(states).cpu().numpy()

    def end(_module: Any, _given: Any, value: Any) -> None:
        keep(NORM, value[0] if isinstance(value, tuple) else value)
        for hook in hooks:
            hook.remove()
        np.savez(path, **kept)

    def given(_module: Any, values: tuple, named: dict) -> None:
        keep(EMBEDDING, (*values, *named.values()))

    hooks = [model.get_submodule(names[0]).register_forward_pre_hook(given, with_kwargs=True)]
    for number, name in enumerate(names):
        after = model.get_submodule(name).register_forward_hook
        hooks.append(after(lambda _module, _given, value, number=number: keep(f"layer {number}", value)))
    hooks.append(decoder.norm.register_forward_hook(end))
