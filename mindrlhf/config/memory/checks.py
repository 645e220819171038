"""Rules of the section `memory`."""

import re

from mindrlhf.config.memory.section import ACTIVATION, MLP, MemorySection
from mindrlhf.errors import Mistakes, UserError

_LAYERS = re.compile(r"\d{1,4}(-\d{1,4})?(,\d{1,4}(-\d{1,4})?)*")


def check_memory(memory: MemorySection, recompute: bool, device: str, has_head: bool, shares_devices: bool) -> None:
    """Check the section.

    Args:
        recompute: `model.recompute`.
        device: that trains.
        has_head: the trained model has logits, not scores.
        shares_devices: there is a generator, and it takes turns with training.

    Raises:
        UserError: all broken rules.
    """
    mistakes = Mistakes()
    if device == "cpu":
        for name in ("logit_positions", "logit_words"):
            if getattr(memory, name):
                mistakes.add(
                    f"'memory.{name}' is {getattr(memory, name)}, but run.device=cpu always computes logits in tiles "
                    "of its own: remove it"
                )
    if memory.recompute_operators and device == "cpu":
        mistakes.add("'memory.recompute_operators' is set, but run.device=cpu recomputes whole layers: remove it")
    if not has_head and memory.head_tile:
        mistakes.add("'memory.logit_positions' or logit_words is set, but a reward model has no logits: remove it")
    if memory.offload_optimizer and device == "cpu":
        mistakes.add("'memory.offload_optimizer' is true, but with run.device=cpu all is on the host: remove it")
    elif memory.offload_optimizer and not shares_devices:
        mistakes.add(
            "'memory.offload_optimizer' is true, but no generator takes turns with training on its devices: remove it"
        )
    if memory.swap_moments and device == "cpu":
        mistakes.add("'memory.swap_moments' is true, but with run.device=cpu all is on the host: remove it")
    mistakes.check(_check_layers, memory.recompute_layers)
    for name in ("recompute_layers", "recompute_operators"):
        if recompute and getattr(memory, name):
            mistakes.add(f"'memory.{name}' is set, but model.recompute recomputes all layers: set that to false")
    if len(set(memory.recompute_operators)) < len(memory.recompute_operators):
        mistakes.add("'memory.recompute_operators' names an operator twice: name each once")
    if {ACTIVATION, MLP} <= set(memory.recompute_operators):
        mistakes.add("'memory.recompute_operators' has activation, which is in mlp: leave it out")
    mistakes.raise_if_any()


def _check_layers(text: str) -> None:
    if text and not _LAYERS.fullmatch(text):
        raise UserError(
            f"'memory.recompute_layers' is {text!r}: write numbers and ranges with commas between, such as 0-7,20"
        )
    if any(int(last) < int(first) for first, last in re.findall(r"(\d+)-(\d+)", text)):
        raise UserError(f"'memory.recompute_layers' is {text!r}, where a range ends before it begins: turn it")


def check_num_layers(memory: MemorySection, num_layers: int, has_dense_mlps: bool = True) -> None:
    """Check that the model has what is named: layers, and MLPs that are no routed experts.

    Raises:
        UserError: it does not.
    """
    if ACTIVATION in memory.recompute_operators and not has_dense_mlps:
        raise UserError(
            "'memory.recompute_operators' has activation, but the model has routed experts only: take mlp, or leave it "
            "out"
        )
    last = max(memory.layers, default=0)
    if last >= num_layers:
        raise UserError(
            f"'memory.recompute_layers' names layer {last}, but the model has {num_layers}: 0 to {num_layers - 1}"
        )
