"""One worker of the reward pool; see ``mindrlhf.sandbox.worker`` for how it is started.

In: first the fields of ``WorkerSettings``, then ``[[sequence, failed positions, skipped positions, completion, answer,
context, columns], ...]``, the last two by name. Out: first ``{"reads": [Reads of each verifier]}``
or ``{"error": message}``, then batches of ``[[sequence, [outcome of each verifier, ...], counts], ...]``, where an
outcome is a number, a list of them for steps, null (failed before, or skipped), ``{"failed": reason}`` or
``{"unavailable": reason}``, counts say what it took (``judges.accounting``).
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from time import monotonic
from typing import Any

from mindrlhf.errors import UserError
from mindrlhf.rewards.availability import is_unavailable
from mindrlhf.rewards.judges import accounting
from mindrlhf.rewards.registry import STEP_TEXTS, Verifier, resolve
from mindrlhf.rewards.selection import MAX_MAGNITUDE
from mindrlhf.sandbox.worker import PoolConnection

# Between two calls results older than this are sent on, so that they do not wait for the rest of a slow batch, and
# little has to be done again when the worker is killed.
FLUSH_INTERVAL_S = 0.005
MAX_REASON_CHARS = 500
MAX_SHOWN_CHARS = 80


@dataclass(frozen=True)
class WorkerSettings:
    """Settings of a worker, sent before the first sample; lists are by position of the verifier."""

    verifiers: list[str]
    options: list[dict[str, str]]
    timeout_s: float
    memory_limit_bytes: int  # 0 means none


def main() -> int:
    """Serve until the pool closes its end of the pipe."""
    pool = PoolConnection(sys.argv[1:])
    requests = pool.receive()
    settings = WorkerSettings(**next(requests))
    pool.limit(settings.memory_limit_bytes, settings.timeout_s)
    try:
        verifiers = [resolve(name, options) for name, options in zip(settings.verifiers, settings.options)]
    except UserError as error:
        pool.send({"error": str(error)})
        return 1
    pool.check()
    pool.send({"reads": [asdict(verifier.reads) for verifier in verifiers]})
    for samples in requests:
        _score_batch(verifiers, samples, settings, pool)
    return 0


def _score_batch(
    verifiers: Sequence[Verifier], samples: list[list], settings: WorkerSettings, pool: PoolConnection
) -> None:
    finished: list[list] = []
    flushed_at_s = monotonic()
    for sequence, failed, skipped, *sample in samples:
        outcomes: list[Any] = []
        for position, verifier in enumerate(verifiers):
            if position in failed or position in skipped:
                outcomes.append(None)
                continue
            if finished and monotonic() - flushed_at_s > FLUSH_INTERVAL_S:
                pool.send(finished)
                finished = []
                flushed_at_s = monotonic()
            outcomes.append(pool.call(sequence, position, _outcome, verifier, sample))
        finished.append([sequence, outcomes, accounting.take()])
    pool.send(finished)


def _outcome(verifier: Verifier, sample: list[Any]) -> float | list[float] | dict[str, str]:
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
    return {"failed": f"returned {_describe(value)}, which is no finite number"}


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
        return repr(value)[:MAX_SHOWN_CHARS]
    except Exception:
        return f"an object of type {type(value).__name__}"


if __name__ == "__main__":
    sys.exit(main())
