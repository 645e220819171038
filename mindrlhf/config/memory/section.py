"""The section `memory`: what is computed in parts, or again, so that a device holds less."""

from dataclasses import dataclass

from mindrlhf.algorithms.head import HeadTile
from mindrlhf.config.keys import key

ATTENTION, NORMS, ACTIVATION, MLP = OPERATORS = ("attention", "norms", "activation", "mlp")


@dataclass(frozen=True)
class MemorySection:
    """What a device computes in parts, or again in the backward pass, instead of keeping it; see docs/memory.md."""

    logit_positions: int = key(
        0, "positions of a rank's micro-batch whose logits exist at a time (Ascend); 0 means all", minimum=0
    )
    logit_words: int = key(
        0, "words of a rank's part of the vocabulary whose logits exist at a time (Ascend); 0 means all", minimum=0
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
        "keep AdamW's moments and the gradient sums of a sharded model on the host between updates, so that the "
        "generator's share can be larger",
    )

    swap_moments: bool = key(
        False,
        "keep AdamW's moments of a sharded model on the host while gradients are computed; the optimizer's step, which "
        "needs them, is then a call of its own",
    )

    @property
    def head_tile(self) -> HeadTile:
        """Of how many logits there is memory at a time."""
        return HeadTile(self.logit_positions, self.logit_words)

    @property
    def recomputes_parts(self) -> bool:
        """Whether layers or operators are named, which `model.recompute` excludes."""
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
