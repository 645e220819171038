"""The section `memory`: computation in parts, or twice, so that a device holds less."""

import re
from dataclasses import dataclass

from mindrlhf.config.keys import key
from mindrlhf.errors import Rules, UserError

ATTENTION, NORMS, ACTIVATION, MLP = OPERATORS = ("attention", "norms", "activation", "mlp")
_LAYERS = re.compile(r"\d{1,4}(-\d{1,4})?(,\d{1,4}(-\d{1,4})?)*")


@dataclass(frozen=True)
class MemorySection:
    """Less device memory for more computation or transfers; see docs/performance.md#memory."""

    logit_tile: int = key(
        0, "positions of a rank's micro-batch whose logits exist at a time (Ascend); 0 means all", minimum=0
    )
    recompute_layers: str = key(
        "", "layers that are recomputed in the backward pass, such as 0-7,20, in the place of all of `model.recompute`"
    )
    recompute_operators: tuple[str, ...] = key(
        (),
        "what is recomputed in the other layers: attention (the kernel), norms, activation (of dense MLPs, with its "
        "product), mlp (all of it)",
        choices=OPERATORS,
    )

    offload_optimizer: bool = key(
        False,
        "keep the optimizer's moments and the gradient sums of a sharded model on the host between updates, so that "
        "the generator's share can be larger",
    )

    swap_moments: bool = key(
        False,
        "keep the optimizer's moments of a sharded model on the host while gradients are computed; its step, which "
        "needs them, is then a call of its own",
    )

    @property
    def recomputes_parts(self) -> bool:
        """Return whether layers or operators are named, which `model.recompute` excludes."""
        return bool(self.recompute_layers or self.recompute_operators)

    @property
    def layers(self) -> frozenset[int]:
        """The numbers in ``recompute_layers``.

        Raises:
            ValueError: it names none.
        """
        numbers: set[int] = set()
        for part in filter(None, self.recompute_layers.split(",")):
            first, _, last = part.partition("-")
            numbers.update(range(int(first), int(last or first) + 1))
        return frozenset(numbers)


WHOLE = MemorySection()  # nothing is computed in parts or again


def memory_rules(
    memory: MemorySection, recompute: bool, device: str, *, has_head: bool, shares_devices: bool
) -> Rules:
    """Yield (is broken, message).

    Args:
        recompute: `model.recompute`.
        device: that trains.
        has_head: the trained model has logits, not scores.
        shares_devices: there is a generator, and it takes turns with training.
    """
    is_cpu, operators, layers = device == "cpu", set(memory.recompute_operators), memory.recompute_layers
    yield is_cpu and memory.logit_tile, (
        f"'memory.logit_tile' is {memory.logit_tile}, but run.device=cpu computes logits in tiles of its own: remove it"
    )
    yield operators and is_cpu, (
        "'memory.recompute_operators' is set, but run.device=cpu recomputes whole layers: remove it"
    )
    yield not has_head and memory.logit_tile, "'memory.logit_tile' is set, but a reward model has no logits: remove it"
    for name in ("offload_optimizer", "swap_moments"):
        yield is_cpu and getattr(memory, name), (
            f"'memory.{name}' is true, but with run.device=cpu all is on the host: remove it"
        )
    yield memory.offload_optimizer and not shares_devices, (
        "'memory.offload_optimizer' is true, but no generator takes turns with training on its devices: remove it"
    )
    yield layers and not _LAYERS.fullmatch(layers), (
        f"'memory.recompute_layers' is {layers[:60]!r}{'...' * (len(layers) > 60)}: write numbers and ranges with "
        "commas between, such as 0-7,20"
    )
    yield any(int(last) < int(first) for first, last in re.findall(r"(\d+)-(\d+)", layers)), (
        f"'memory.recompute_layers' is {layers!r}, where a range ends before it begins: turn it"
    )
    for name in ("recompute_layers", "recompute_operators"):
        yield recompute and getattr(memory, name), (
            f"'memory.{name}' is set, but model.recompute recomputes all layers: set that to false"
        )
    yield len(operators) < len(memory.recompute_operators), (
        "'memory.recompute_operators' names an operator twice: name each once"
    )
    yield {ACTIVATION, MLP} <= operators, (
        "'memory.recompute_operators' has activation, which is in mlp: leave it out"
    )


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
