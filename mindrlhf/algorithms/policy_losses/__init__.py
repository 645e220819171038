"""Policy losses per token: graph cells. One loss is one module of this package.

Each module states in literals what the config must know before MindSpore may be imported:

    RATIO: what the probability ratio spans: "token", "sequence", or "none" when there is none
    KEYS: the keys of the config's `algorithm` section that it reads (none where it is not stated)
    OPTIONS: its options, see :mod:`mindrlhf.algorithms.options` (none where it is not stated)
    NEEDS_ADVANTAGE: False where a token of advantage 0 has a gradient too (True where it is not stated)
    CONSTANT_ADVANTAGE: True where all tokens of a response must have one advantage (False where it is not stated)

and has one cell, ``Surrogate(**keys_and_options)``, whose ``construct(logprobs, log_ratio, advantages, mask,
segment_ids)``
returns three float32 [rows, length]: the loss of each token, and 1 where a lower or an upper bound removed its
gradient. Its arguments:

    logprobs: float32 [rows, length], of the policy; gradients flow through them
    log_ratio: logprobs - old_logprobs, bounded to +-20, 0 where the mask is; gradients flow through it
    advantages, mask: float32 [rows, length]; the mask is 1 at response tokens
    segment_ids: int32 [rows, length], which sequence a position belongs to

A loss that needs further arrays of :data:`mindrlhf.algorithms.losses.POLICY_INPUTS` names them in an attribute
``reads`` of its cell, whose ``construct`` takes them last, float32 [rows, length] each.

Aggregation, KL, entropy and off-policy correction are added by :class:`mindrlhf.algorithms.losses.PolicyLoss`.
"""

import ast
import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

from mindrlhf.algorithms.options import Option


@dataclass(frozen=True)
class Traits:
    """Traits of a loss, which its module states in literals."""

    ratio: str
    keys: tuple[str, ...] = ()
    options: Mapping[str, Option] = field(default_factory=dict)
    needs_advantage: bool = True
    constant_advantage: bool = False


def names() -> tuple[str, ...]:
    """Return the names of all policy losses, sorted."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


def traits(name: str) -> Traits:
    """Read a module's literals from its source, since importing it would import MindSpore."""
    assert name in names(), f"there is no policy loss {name!r}"
    tree = ast.parse((Path(__file__).parent / f"{name}.py").read_text(encoding="utf-8"))
    known = {trait.name.upper() for trait in fields(Traits)}
    literals = {
        statement.targets[0].id.lower(): ast.literal_eval(statement.value)
        for statement in tree.body
        if isinstance(statement, ast.Assign) and statement.targets[0].id in known
    }
    return Traits(**literals)


def surrogate(name: str, **options: float):
    """Return the cell of a policy loss."""
    assert name in names(), f"there is no policy loss {name!r}"
    return importlib.import_module(f"{__name__}.{name}").Surrogate(**options)
