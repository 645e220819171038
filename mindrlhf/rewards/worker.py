"""One worker of the reward pool: ``python -m mindrlhf.rewards.worker CLOCK_FD PARENT_PID``.

It speaks JSON lines. In: first the fields of ``WorkerSettings``, then batches of samples ``[[sequence, failed
positions, skipped positions, completion, answer, context values...], ...]``. Out: first ``{"context": keywords}`` or
``{"error": message}``, then batches of ``[[sequence, [outcome of each verifier, ...]], ...]``, where an outcome is a
number, null (failed before, or skipped) or ``{"failed": reason}``.

The time limit is enforced from outside, by killing this process.
"""

import json
import math
import os
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from mindrlhf.errors import UserError
from mindrlhf.rewards.registry import CONTEXT_KEYWORDS, Verifier, resolve
from mindrlhf.rewards.selection import MAX_MAGNITUDE
from mindrlhf.sandbox import time_limit
from mindrlhf.system.processes import adopt_orphans, die_with_parent

# Between two calls results older than this are sent on, so that they do not wait for the rest of a slow batch, and
# little has to be done again when the worker is killed.
FLUSH_INTERVAL_S = 0.005
MAX_REASON_CHARS = 500
MAX_SHOWN_CHARS = 80


@dataclass(frozen=True)
class WorkerSettings:
    """What a worker is told before the first sample; lists are by position of the verifier."""

    verifiers: list[str]
    options: list[dict[str, str]]
    gates: list[int | None]  # position of the verifier's gate
    closed_gate_value: float
    timeout_s: float
    memory_limit_bytes: int  # 0 means none


def main() -> int:
    """Serve until the pool closes its end of the pipe."""
    clock_fd, parent_pid = int(sys.argv[1]), int(sys.argv[2])
    requests, responses = take_pipes()
    die_with_parent(parent_pid)
    adopt_orphans()
    settings = WorkerSettings(**json.loads(requests.readline()))
    limit_memory(settings.memory_limit_bytes)
    clock = time_limit.CallClock(clock_fd)
    time_limit.install(clock, settings.timeout_s)
    try:
        verifiers = [resolve(name, options) for name, options in zip(settings.verifiers, settings.options)]
    except UserError as error:
        send_message(responses, {"error": str(error)})
        return 1
    keywords = [keyword for keyword in CONTEXT_KEYWORDS if any(keyword in v.context_keywords for v in verifiers)]
    send_message(responses, {"context": keywords})
    for line in requests:
        _score_batch(verifiers, keywords, json.loads(line), settings, clock, responses)
    return 0


def take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Move the pool's pipes out of reach of verifiers that read standard input or print."""
    requests = os.fdopen(os.dup(0), "rb")
    responses = os.fdopen(os.dup(1), "wb", buffering=0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return requests, responses


def limit_memory(limit_bytes: int) -> None:
    """Limit what this process, and each that it starts, may allocate; mapped libraries do not count."""
    if limit_bytes:
        resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))


def send_message(responses: BinaryIO, message: Any) -> None:
    """Write one JSON line, whatever the pipe takes at a time."""
    unsent = memoryview(json.dumps(message).encode() + b"\n")
    while unsent:
        unsent = unsent[responses.write(unsent) :]


def _score_batch(
    verifiers: Sequence[Verifier],
    keywords: Sequence[str],
    samples: list[list],
    settings: WorkerSettings,
    clock: time_limit.CallClock,
    responses: BinaryIO,
) -> None:
    finished: list[list] = []
    flushed_at_s = time.monotonic()
    for sequence, failed, skipped, completion, answer, *context_values in samples:
        context = dict(zip(keywords, context_values))
        outcomes: list[Any] = []
        for position, verifier in enumerate(verifiers):
            if position in failed or position in skipped:
                outcomes.append(None)
                continue
            gate = settings.gates[position]
            if gate is not None and gate not in skipped and not _is_open(outcomes[gate]):
                outcomes.append(settings.closed_gate_value)
                continue
            if finished and time.monotonic() - flushed_at_s > FLUSH_INTERVAL_S:
                send_message(responses, finished)
                finished = []
                flushed_at_s = time.monotonic()
            clock.begin(sequence, position)
            outcomes.append(_outcome(verifier, completion, answer, context))
            clock.stop()
        finished.append([sequence, outcomes])
    send_message(responses, finished)


def _is_open(outcome: float | dict[str, str] | None) -> bool:
    return isinstance(outcome, float) and outcome > 0


def _outcome(verifier: Verifier, completion: str, answer: str, context: dict[str, Any]) -> float | dict[str, str]:
    try:
        value = verifier(completion, answer, context)
    except BaseException as error:  # SystemExit too: a verifier must not end its worker
        return {"failed": f"{type(error).__name__}: {error}"[:MAX_REASON_CHARS]}
    try:
        # NumPy scalars are converted; text that happens to spell a number is not a reward.
        reward = math.nan if isinstance(value, (str, bytes)) else float(value)
    except Exception:
        reward = math.nan
    if abs(reward) <= MAX_MAGNITUDE:
        return reward
    return {"failed": f"returned {_describe(value)}, which is no finite number"}


def _describe(value: Any) -> str:
    try:
        return repr(value)[:MAX_SHOWN_CHARS]
    except Exception:
        return f"an object of type {type(value).__name__}"


if __name__ == "__main__":
    sys.exit(main())
