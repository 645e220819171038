"""The record of an asynchronous run from which it can be repeated; see :mod:`.asynchronous`."""

from pathlib import Path

from mindrlhf.errors import UserError
from mindrlhf.observe.records import read_jsonl

ORDER_NAME = "rollout_order.jsonl"


def read_order(run: str) -> dict[int, int] | None:
    """Return, by step, before which round a run loaded its weights; None when there is none to replay.

    Raises:
        UserError: the run has left no order.
    """
    if not run:
        return None
    path = Path(run) / ORDER_NAME
    if not path.exists():
        raise UserError(
            f"'rollout.replay_order' is {run}, which has no {ORDER_NAME}: give the output directory of a "
            "run with rollout.asynchronous"
        )
    return {line["step"]: line["round"] for line in read_jsonl(path)}
