"""The verifiers' part of a worker (``mindrlhf.sandbox.worker``).

An item is ``[completion, answer, context, columns]``, the last two by name, a step the position of a verifier.
An outcome is a number, a list of them for steps of a response, ``{"failed": reason}`` or ``{"unavailable": reason}``;
where judges were asked it is ``{"outcome", "counts"}`` with what that took (``judges.accounting``).
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from mindrlhf.rewards.availability import is_unavailable
from mindrlhf.rewards.judges import accounting
from mindrlhf.rewards.registry import STEP_TEXTS, Verifier, resolve
from mindrlhf.rewards.selection import MAX_MAGNITUDE

MAX_REASON_CHARS = 500
MAX_SHOWN_CHARS = 80


def setup(settings: Mapping[str, Any]) -> tuple[list[dict[str, Any]], Callable[[int, Sequence[Any]], Any]]:
    """Load verifiers; return what each reads, and the function that scores.

    Args:
        settings: "verifiers", and "options" by position of the verifier.

    Raises:
        UserError: one does not load.
    """
    verifiers = [resolve(name, options) for name, options in zip(settings["verifiers"], settings["options"])]

    def handle(position: int, sample: Sequence[Any]) -> Any:
        outcome = _outcome(verifiers[position], sample)
        counts = accounting.take()
        return {"outcome": outcome, "counts": counts} if counts else outcome

    return [asdict(verifier.reads) for verifier in verifiers], handle


def _outcome(verifier: Verifier, sample: Sequence[Any]) -> float | list[float] | dict[str, str]:
    try:
        value = verifier(*sample)
    except BaseException as error:  # SystemExit too: a verifier must not end its worker
        kind = "unavailable" if is_unavailable(error) else "failed"
        return {kind: f"{type(error).__name__}: {error}"[:MAX_REASON_CHARS]}
    steps = [len(sample[2][name]) for name in STEP_TEXTS if name in verifier.reads.context]
    if steps and isinstance(value, (list, tuple)):
        return _step_outcome(value, steps)
    try:
        # NumPy scalars are converted; text that happens to spell a number is not a reward.
        reward = math.nan if isinstance(value, (str, bytes)) else float(value)
    except Exception:
        reward = math.nan
    if abs(reward) <= MAX_MAGNITUDE:
        return reward
    what = f"beyond {MAX_MAGNITUDE:g}" if math.isfinite(reward) else "no finite number"
    return {"failed": f"returned {_describe(value)}, which is {what}"}


def _step_outcome(values: Sequence[Any], allowed: Sequence[int]) -> list[float] | dict[str, str]:
    if len(values) not in allowed:
        return {"failed": f"returned {len(values)} numbers for {' or '.join(map(str, allowed))} turns or tokens"}
    try:
        rewards = [math.nan if isinstance(value, (str, bytes)) else float(value) for value in values]
    except Exception:
        rewards = [math.nan]
    if math.fsum(map(abs, rewards)) <= MAX_MAGNITUDE:
        return rewards
    return {"failed": f"returned {_describe(values)}, which are no finite numbers"}


def _describe(value: Any) -> str:
    try:
        return re.sub(" at 0x[0-9a-f]+", "", repr(value))[:MAX_SHOWN_CHARS]
    except Exception:
        return f"an object of type {type(value).__name__}"
