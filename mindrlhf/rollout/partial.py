"""Responses of partial rollout, which are generated segment by segment."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mindrlhf.rollout.types import Completion

# A response that has no token yet.
NOTHING = Completion(0, 0, np.zeros(0, np.int32), np.zeros(0, np.float32), "", 0)


def followed_by(before: Completion, more: Completion, max_length: int) -> Completion:
    """Return a response with what was generated next; its ``finish_reason`` is "" while it may go on.

    Args:
        max_length: of a whole response, in tokens.
    """
    token_ids = np.concatenate([before.token_ids, more.token_ids]).astype(np.int32, copy=False)
    is_cut = more.finish_reason == "length" and len(token_ids) < max_length
    return replace(
        before,
        token_ids=token_ids,
        logprobs=np.concatenate([before.logprobs, more.logprobs]).astype(np.float32, copy=False),
        finish_reason="" if is_cut else more.finish_reason,
        spans=extended_spans(before.spans, more),
        experts=extended_experts(before.experts, more.experts),
        unscored=before.unscored or more.unscored,
    )


def extended_spans(spans: tuple[tuple[int, int], ...], more: Completion) -> tuple[tuple[int, int], ...]:
    """Return the versions of the weights, with their tokens, after what was generated next."""
    version, count = more.weights_version, len(more.logprobs)
    if spans and spans[-1][0] == version:
        return (*spans[:-1], (version, spans[-1][1] + count))
    return (*spans, (version, count))


def extended_experts(before: np.ndarray | None, now: np.ndarray | None) -> np.ndarray | None:
    """Return where tokens were sent: each as when it was first read, not when it was read again as a prefix."""
    return now if before is None or now is None else np.concatenate([before, now[len(before) :]])


def start_of_turn(is_generated: Sequence[bool]) -> int:
    """Return where the turn of a conversation begins that is under way, or was the last."""
    return max((place for place, by_model in enumerate(is_generated, 1) if not by_model), default=0)
