"""State of an optimiser for each parameter, by name: for config, plan, checkpoints and shards, without MindSpore.

Its step is the cell of the same name in :mod:`mindrlhf.training.optimizers`. State is float32, in the shape of its
parameter, and called ``STATE.PARAMETER`` in files.
"""

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True)
class Optimizer:
    """An optimiser.

    Attributes:
        name: value of `optimizer.type`.
        title: what people call it.
        matrix_state: names of its state of a hidden matrix (:meth:`mindrlhf.specs.rules.ParameterRule.matrices`).
        other_state: of every other parameter.
    """

    name: str
    title: str
    matrix_state: tuple[str, ...]
    other_state: tuple[str, ...]

    def state_of(self, is_matrix: bool) -> tuple[str, ...]:
        return self.matrix_state if is_matrix else self.other_state


_ADAM_STATE = ("exp_avg", "exp_avg_sq")
OPTIMIZERS = {
    one.name: one
    for one in (
        Optimizer("adamw", "AdamW", _ADAM_STATE, _ADAM_STATE),
        Optimizer("muon", "Muon", ("momentum_buffer",), _ADAM_STATE),
    )
}
STATE_NAMES = tuple(dict.fromkeys(name for one in OPTIMIZERS.values() for name in one.matrix_state + one.other_state))
STATE_PREFIXES = tuple(f"{name}." for name in STATE_NAMES)
GLOBAL_STEP_NAME = "global_step"  # updates so far, int32 [1], of every optimiser
# What begins the names of parameters in graphs: MindFormers' for AdamW's moments.
GRAPH_NAMES = {name: name for name in STATE_NAMES} | {"exp_avg": "adam_m", "exp_avg_sq": "adam_v"}


def optimizer_of(names: Collection[str]) -> Optimizer:
    """Return the optimiser whose state has these names, which may be of a part of a model."""
    kinds = {name.partition(".")[0] for name in names}
    return min(OPTIMIZERS.values(), key=lambda one: len(kinds ^ {*one.matrix_state, *one.other_state}))
