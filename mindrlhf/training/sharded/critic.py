"""The critic of PPO whose model is sharded over the ranks: values of states, and its own updates."""

import numpy as np

from mindrlhf.checkpoint.state import CRITIC_NAME, CRITIC_OPTIMIZER_NAME
from mindrlhf.data.packing import PackedRows
from mindrlhf.training.batch import Batch, UpdateResult
from mindrlhf.training.sharded.learner import ShardedLearner


class ShardedCritic(ShardedLearner):
    """This rank's shard of a critic; what is called is that of :class:`mindrlhf.training.worker.critic.Critic`.

    The token inputs of its graph are :data:`mindrlhf.algorithms.value_loss.VALUE_INPUTS`.
    """

    model_name, optimizer_name = CRITIC_NAME, CRITIC_OPTIMIZER_NAME

    def values(self, rows: PackedRows) -> np.ndarray:
        """Return the values of one micro-batch, float32 [rows, length]; zeros before the last stage."""
        self.count_compile("values", rows)
        return self.model.logprobs(rows)

    def update(self, batch: Batch, lr: float) -> UpdateResult:
        """Make one optimiser update; ``batch`` has the tokens "values" and "returns".

        Returns:
            Statistics [2] (``VALUE_STATISTICS``), of which those of all ranks add up, and a norm that is not finite
            when there was no update; see :meth:`ShardedLearner.update`.
        """
        done = super().update(batch, lr, 0.0)
        self.make_room()
        return UpdateResult(done.statistics, done.grad_norm, self.process_statistics())

    def compile(self, rows: PackedRows) -> None:
        """Compile both graphs for the shape of ``rows``; their cells must be MindSpore's."""
        self.count_compile("values", rows)
        self.model.compile(rows)
        super().compile(rows)

    def warm_up(self, rows: PackedRows) -> None:
        """Run both graphs on rows of weight 0."""
        self.values(rows)
        super().warm_up(rows)
