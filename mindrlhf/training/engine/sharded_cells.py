"""The update of a model as one semi-auto-parallel graph: loss, gradients, clip, optimiser; and its outputs alone.

MindSpore shards what is written here for whole tensors: operators carry `.shard()` strategies, and it adds the
collectives. Pipeline micro-batches are made inside the graph, as its scheduler demands.
"""

import math
from collections.abc import Mapping

import mindspore as ms
from mindspore import lazy_inline, nn, ops
from mindspore.nn.wrap.cell_wrapper import _MicroBatch, _VirtualDatasetCell
from mindspore.parallel.nn import GradAccumulation, Pipeline

from mindrlhf.algorithms.logprobs import PolicyLogProbs
from mindrlhf.algorithms.scores import TokenScores
from mindrlhf.config.training import ParallelSection
from mindrlhf.training.engine.sharded_losses import RepeatedLoss, ShardedLoss
from mindrlhf.training.optimizers.adamw import Optimizer

# Parameters of the update that are neither weights nor optimiser state.
IS_LAST_NAME, DEFECT_NAME = "is_last", "defect"


class ParallelUpdate(nn.Cell):
    """Gradients of a micro-batch of all ranks, and with the last one of an update, the update itself.

    An update has as many calls as its rows need. What they find is added up in ``totals``, shards like the optimiser's
    state; the call before which ``is_last`` was set to 1 measures the norm, clips, updates and clears. An update whose
    norm or loss is not finite is withheld on every rank: weights, moments and step count stay as they are.

    Attributes:
        is_last: 1 or 0, a parameter so that the host can set it between calls, as it sets the learning rate.
        totals: gradients summed so far, float32.
    """

    def __init__(
        self,
        loss: ShardedLoss,
        optimizer: Optimizer,
        max_grad_norm: float,
        parallel: ParallelSection,
        num_replicas: Mapping[str, int],
        world_size: int,
    ):
        super().__init__(auto_prefix=False)
        self.returns_outputs = loss.returns_outputs
        self.network = _VirtualDatasetCell(split_into_micro_batches(loss, parallel))
        self.network.set_train(True)
        self.network.set_grad()
        self.optimizer = optimizer
        self.weights = optimizer.parameters
        self.buckets = optimizer.buckets
        self.max_grad_norm = max_grad_norm
        self.accumulates = parallel.pipeline_stage > 1 or parallel.micro_batch_num > 1
        self.keeps_shards = parallel.enable_parallel_optimizer
        # The compiler recognises accumulators by this prefix. It sums them over the ranks in each call, so they cannot
        # be carried from one to the next.
        self.accumulators = self.weights.clone(prefix="accu_grads", init="zeros") if self.accumulates else ()
        self.totals = optimizer.clone_state("grad", self.weights)
        self.is_last = ms.Parameter(ms.Tensor([1.0], ms.float32), name=IS_LAST_NAME, requires_grad=False)
        # 0, or not a number once a loss was not finite.
        self.defect = ms.Parameter(ms.Tensor([0.0], ms.float32), name=DEFECT_NAME, requires_grad=False)
        self.grad = ops.GradOperation(get_by_list=True, sens_param=True)
        # All ranks of a stage have the loss and pass its gradient back. MindSpore divides it by their number; beside a
        # second output it finds a loss only where those of micro-batches are added up.
        is_missed = loss.returns_outputs and not isinstance(loss, RepeatedLoss)
        repeats = math.prod((*loss.shares, parallel.model_parallel)) if is_missed else 1
        self.sens = ms.Tensor([1.0 / repeats] * loss.num_statistics, ms.float32)
        self.hyper_map = ops.HyperMap()
        # The optimiser's part of the graph is not sharded by the compiler: gradients are the shards of this rank there.
        self.shares = tuple(1.0 / num_replicas[weight.name] for weight in self.weights)
        self.all_reduce = ops.AllReduce() if world_size > 1 else None

    def construct(self, *inputs):
        """Return the statistics, zeros before the last stage, the gradient norm so far [1], and the model's outputs."""
        statistics, outputs, totals, defect = self.gather(*inputs)
        norm = self._norm(totals, defect)
        applies = self.is_last * ops.cast(ops.isfinite(norm), ms.float32)
        scale = applies
        if self.max_grad_norm > 0:
            scale = ops.minimum(self.max_grad_norm / (norm + 1e-6), ops.ones_like(norm)) * applies
        scale = ops.select(applies > 0.5, scale, ops.zeros_like(scale))
        updated = self.optimizer(totals, scale, applies)
        kept = self._multiply(self.totals, 1.0 - self.is_last, updated)
        defect = ops.select(self.is_last > 0.5, ops.zeros_like(norm), defect + norm * 0.0)
        statistics = ops.depend(statistics, (updated, kept, ops.assign(self.defect, defect)))
        return (self.cleared(statistics), norm) + outputs

    def gather(self, *inputs):
        """Add the gradients of a call to the totals.

        Returns:
            Its statistics; the model's outputs of this rank's rows, for each pipeline micro-batch float32 [1, its
            rows, length], in the last stage, where the loss returns them; the totals; and the defect so far.
        """
        found, sens = self.network(*inputs), self.sens
        statistics, outputs = found, ()
        if self.returns_outputs:
            statistics, outputs = found[0], found[1:]
            # All of the first output: else the gradients of a micro-batch would wait for the forward pass of the last.
            sens = (sens,) + (ops.zeros_like(outputs[0]),) * len(outputs)
        gradients = self.grad(self.network, self.weights)(*inputs, sens)
        accumulated = gradients
        if self.accumulates and not self.keeps_shards:
            accumulated = ops.depend(self.accumulators, gradients)
        return statistics, outputs, self._add(accumulated), self.defect + ops.reshape(statistics[0] * 0.0, (1,))

    def cleared(self, statistics):
        """Return the statistics once the accumulators of the call are empty."""
        if self.accumulates:
            return ops.depend(statistics, self._multiply(self.accumulators, self.is_last * 0.0, statistics))
        return statistics

    # What follows is outside of the network, where the graph is not sharded and the front end believes that gradients
    # are whole: no shape may be written down, nor a constant in the shape of a gradient. Such as zeros_like gives would
    # also be as large in the graph and on the device as the gradients: the compiler turns it into data.
    #
    # All goes from bucket to bucket of the parameters, as in the optimiser.

    def _add(self, gradients):
        """Add to the totals, in place, and return them."""
        totals, done = (), ()
        # Last parameters first, as the backward pass finds their gradients.
        for start, stop in self.buckets[::-1]:
            done = self.hyper_map(_accumulate, self.totals[start:stop], ops.depend(gradients[start:stop], done))
            totals = done + totals
        return totals

    def _norm(self, totals, defect):
        squares = defect
        for start, stop in self.buckets:
            parts = ops.depend(totals[start:stop], squares)
            # A pipeline stage may have no parameter of a bucket, and a sum must have terms.
            squares = ops.addn((squares,) + self.hyper_map(_square_share, self.shares[start:stop], parts))
        return ops.sqrt(squares if self.all_reduce is None else self.all_reduce(squares))

    def _multiply(self, targets, factor, done):
        """Multiply by 0 or 1, in place, and make 0 what is not finite."""
        for start, stop in self.buckets:
            multiply = ops.partial(_scale, ops.depend(factor, done))
            done = self.hyper_map(multiply, targets[start:stop])
        return done


class ParallelGradients(nn.Cell):
    """The calls of an update before its last one, as a graph without the optimiser, whose state it leaves alone."""

    def __init__(self, update: ParallelUpdate):
        super().__init__(auto_prefix=False)
        self.update = update

    def construct(self, *inputs):
        """Return the statistics, zeros before the last stage, 0 or not a number [1], and the model's outputs."""
        statistics, outputs, totals, defect = self.update.gather(*inputs)
        kept = ops.assign(self.update.defect, defect)
        return (self.update.cleared(ops.depend(statistics, (totals, kept))), ops.depend(defect, kept)) + outputs


def _accumulate(total, gradient):
    return ops.assign_add(total, ops.cast(gradient, ms.float32))


def _square_share(share, gradient):
    """This rank's share [1] in the square of a gradient, shards of which several ranks hold."""
    # Collectives take no scalars.
    return ops.ExpandDims()(ops.ReduceSum()(ops.square(gradient), ()) * share, 0)


def _scale(factor, target):
    return ops.assign(target, ops.nan_to_num(ops.depend(target, factor), 0.0, 0.0, 0.0) * factor)


class ParallelLogProbs(nn.Cell):
    """Log-probabilities, or values, of the rows of all data-parallel ranks, as one semi-auto-parallel graph without
    gradients.

    Args:
        policy: log-probabilities, or a critic; its operators sharded.
        num_micro_batches: pipeline micro-batches of every rank's rows, which the stages work on in turn.
    """

    def __init__(self, policy: PolicyLogProbs | TokenScores, num_micro_batches: int):
        super().__init__(auto_prefix=False)
        kind = _RepeatedOutput if num_micro_batches > 1 else _FirstOutput
        self.network = _VirtualDatasetCell(_MicroBatchByMicroBatch(kind(policy), num_micro_batches))
        self.set_train(False)

    def construct(self, input_ids, segment_ids, labels, mask):
        """Return for each pipeline micro-batch float32 [its rows, length], rank after rank; whole in the last stage."""
        return self.network(input_ids, segment_ids, labels, mask)


class _MicroBatchByMicroBatch(nn.Cell):
    def __init__(self, network: nn.Cell, num_micro_batches: int):
        super().__init__(auto_prefix=False)
        self.network = network
        self.micro_batches = nn.CellList([_MicroBatch(num_micro_batches) for _ in range(num_micro_batches)])
        self.num_micro_batches = num_micro_batches

    def construct(self, input_ids, segment_ids, labels, mask):
        if self.num_micro_batches == 1:
            return (self.network(input_ids, segment_ids, labels, mask),)
        outputs = ()
        for index in range(self.num_micro_batches):
            micro_batch = self.micro_batches[index](index, input_ids, segment_ids, labels, mask)
            outputs = (*outputs, self.network(*micro_batch))
        return outputs


class _FirstOutput(nn.Cell):
    def __init__(self, policy: PolicyLogProbs | TokenScores):
        super().__init__(auto_prefix=False)
        self.policy = policy

    def construct(self, input_ids, segment_ids, labels, mask):
        return self.policy(input_ids, segment_ids, labels, mask)[0]


class _RepeatedOutput(_FirstOutput):
    # See RepeatedLoss.
    @lazy_inline
    def __init__(self, policy: PolicyLogProbs | TokenScores):
        super().__init__(policy)


class _Pipeline(Pipeline):
    """Adds up the statistics of micro-batches as MindSpore's own cell does; the outputs come one after the other."""

    def construct(self, *inputs):
        found = self.network(*self.micro_inputs[0](0, *inputs))
        statistics, outputs = found[0], found[1:]
        for index in range(1, self.micro_size):
            found = self.network(*self.micro_inputs[index](index, *inputs))
            statistics = self.add_list[index](statistics, found[0])
            outputs += found[1:]
        return (statistics,) + outputs


def split_into_micro_batches(network: ShardedLoss, parallel: ParallelSection) -> nn.Cell:
    """Wrap ``network``, whose statistics are added up, so that its inputs are split along their rows."""
    if parallel.pipeline_stage > 1:
        return (_Pipeline if network.returns_outputs else Pipeline)(network, parallel.micro_batch_num)
    return GradAccumulation(network, parallel.micro_batch_num) if parallel.micro_batch_num > 1 else network
