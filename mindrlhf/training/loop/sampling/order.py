"""The record of an asynchronous run from which it can be repeated, bit for bit.

One thing alone is up to the clock: before which round of segments the weights of a step were loaded. All else follows
from it.
"""

from pathlib import Path

from mindrlhf.checkpoint.algorithm_state import AsynchronousState
from mindrlhf.config.schema import GrpoConfig
from mindrlhf.errors import UserError
from mindrlhf.observe.records import JsonlWriter, read_jsonl

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


class LoadOrder:
    """Writes the order of a run, of which ``num_rounds`` are done, and follows that of another in a replay."""

    def __init__(self, config: GrpoConfig, state: AsynchronousState | None):
        state = state or AsynchronousState(num_rounds=0, version=0)
        self.num_rounds = state.num_rounds
        self._restored_version = self._noted = state.version
        self._replayed = read_order(config.rollout.replay_order)
        self.is_replay = self._replayed is not None
        self._writer = JsonlWriter(Path(config.run.output_dir) / ORDER_NAME, first_step=state.version)

    def may_load(self, version: int) -> bool:
        """Return whether weights may be loaded before the next round.

        Raises:
            UserError: the run that is repeated had loaded them before.
        """
        if self._replayed is None or version == self._restored_version:
            return True
        due = self._replayed.get(version - 1, self.num_rounds)
        if due < self.num_rounds:
            raise UserError(
                f"'rollout.replay_order': step {version} of that run began after {due} rounds, here {self.num_rounds} "
                "are done: give the run of this config, from its beginning"
            )
        return due == self.num_rounds

    def waits_for_next(self, version: int) -> bool:
        """Return whether the weights after ``version`` come before the next round."""
        return self.is_replay and self._replayed.get(version) == self.num_rounds

    def note(self, version: int) -> None:
        """Write that weights are loaded."""
        if version != self._noted:  # before the run was resumed, with the rounds of then, or with an earlier bucket
            self._noted = version
            self._writer.write({"step": version - 1, "round": self.num_rounds})

    def close(self) -> None:
        self._writer.close()
