"""Muon: the momentum of a hidden matrix is orthogonalised before it is added. All else is updated by AdamW.

Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"; the scale and the decay of Liu et al.,
arXiv:2502.16982, section 2.2, with which the learning rate and weight decay of AdamW can stay. Fused parameters are
orthogonalised matrix by matrix, as checkpoints of Hugging Face have them: queries, keys and values apart, gates and
ups, every expert, every factor of an adapter.
"""

import hashlib
from collections.abc import Mapping, Sequence
from functools import cache

import mindspore as ms
from mindspore import nn, ops
from mindspore.communication import create_group, get_rank
from mindspore.ops.operations import Morph

from mindrlhf.config.training import OptimizerSection
from mindrlhf.layout.parameter import ParameterLayout, gathered_ranks
from mindrlhf.specs import Matrices
from mindrlhf.training.optimizers import adamw

# Newton-Schulz: of Jordan et al., which bring all singular values into about [0.7, 1.2] in as many steps.
COEFFICIENTS, NUM_STEPS = (3.4445, -4.7750, 2.0315), 5
# Liu et al., eq. 4: about the root mean square of AdamW's updates.
UPDATE_RMS = 0.2
MOMENTUM = 0.95
_EPSILON = 1e-7


class Optimizer(adamw.Optimizer):
    """Muon of the hidden matrices, AdamW of all else; see :class:`mindrlhf.training.optimizers.adamw.Optimizer`.

    The state of a matrix is its momentum, sharded as the matrix is. A step needs it whole: ranks that share a matrix
    gather it, and each makes the same update of which it keeps its shard.
    """

    def __init__(
        self,
        parameters: Sequence[ms.Parameter],
        options: OptimizerSection,
        matrices: Mapping[str, Matrices | None],
        layouts: Mapping[str, ParameterLayout],
    ):
        super().__init__(parameters, options, matrices, layouts)
        hidden = [bool(matrices.get(parameter.name)) for parameter in parameters]
        steps = [
            MatrixStep(matrices[one.name], layouts.get(one.name), options.weight_decay)
            for one, is_hidden in zip(parameters, hidden)
            if is_hidden
        ]
        self.steps = nn.CellList(steps)
        # By bucket: for each hidden matrix its place in the bucket and among all such; the same of the others.
        counts = {kind: [sum(one == kind for one in hidden[:place]) for place in range(len(hidden))] for kind in (0, 1)}
        self.places = tuple(
            tuple(
                tuple((place - start, counts[kind][place]) for place in range(start, stop) if hidden[place] == kind)
                for kind in (0, 1)
            )
            for start, stop in self.buckets
        )

    def update_bucket(self, index, adamw_step, gradients, decays, lr, scale, applied):
        start, _ = self.buckets[index]
        others, hidden = self.places[index]
        done = ()
        if len(others):
            own, parameters, given = (), (), ()
            for place, _ in others:
                own += (decays[start + place] if self.is_group else decays,)
                parameters += (self._parameters[start + place],)
                given += (gradients[place],)
            first, last = others[0][1], others[-1][1] + 1
            moments = self.exp_avg[first:last], self.exp_avg_sq[first:last]
            done = self.hyper_map(adamw_step, own, parameters, given, moments[0], moments[1])
        momentum = MOMENTUM * applied + (1.0 - applied)
        for place, number in hidden:
            parameter, buffer = self._parameters[start + place], self.momentum_buffer[number]
            done += (self.steps[number](parameter, gradients[place], buffer, lr, scale, momentum),)
        return done


class MatrixStep(nn.Cell):
    """The update of one parameter that is put together of hidden matrices.

    Args:
        matrices: how it is put together.
        layout: how it lies on the ranks; None: this one has all of it.
        decay: of the weights.
    """

    def __init__(self, matrices: Matrices, layout: ParameterLayout | None, decay: float):
        super().__init__(auto_prefix=False)
        self.decay = decay
        self.orthogonalise = Orthogonalise(matrices)
        self.is_sharded = layout is not None
        if self.is_sharded:
            self.shares = Shares(layout, matrices.block_rows)
            # The compiler of sharded graphs follows every path through Newton-Schulz, whose number grows eightfold with
            # each step, unless it is shown one node.
            self.of_shard = Morph(self.shard_of_orthogonal, _same, _same)
            self.of_shard.del_prim_attr("side_effect_io")

    def shard_of_orthogonal(self, update):
        return self.shares.own(self.orthogonalise(self.shares.gather(update)))

    def construct(self, parameter, gradient, buffer, lr, scale, momentum):
        """Update parameter and buffer in place, with ``scale`` times the gradient; all factors are float32 [1]."""
        gradient = ops.nan_to_num(ops.cast(gradient, ms.float32), 0.0, 0.0, 0.0) * scale
        new_buffer = buffer * momentum + gradient
        update = gradient + new_buffer * momentum
        update = self.of_shard(update) if self.is_sharded else self.orthogonalise(update)
        weight = ops.cast(parameter, ms.float32)
        new_weight = weight * (1.0 - lr * self.decay) - update * lr
        done = ops.assign(parameter, ops.cast(new_weight, parameter.dtype))
        return ops.assign(buffer, ops.depend(new_buffer, done))


def _same(*args):
    return args[0]


class Orthogonalise(nn.Cell):
    """The orthogonal factors of all matrices of a parameter, scaled; it is given whole blocks, not always all of them.

    In the optimiser's part of a sharded graph the front end believes that shapes are larger than they are, so the
    number of blocks is never written down.
    """

    def __init__(self, matrices: Matrices):
        super().__init__(auto_prefix=False)
        self.matrices = matrices
        turns = matrices.turns
        self.period = sum(turns)
        self.bounds = tuple((sum(turns[:number]), sum(turns[: number + 1])) for number in range(len(turns)))
        self.shapes = matrices.shapes[:: matrices.side_by_side]
        self.width = matrices.columns // matrices.side_by_side
        self.is_one = matrices.count == 1 and len(turns) == 1 and matrices.side_by_side == 1

    def construct(self, whole):
        if self.is_one:
            return ops.squeeze(newton_schulz(ops.expand_dims(whole, 0), self.shapes[0]), 0)
        rows, columns = (), self.matrices.columns
        if len(self.bounds) > 1:
            whole = ops.reshape(whole, (-1, self.period, columns))
        for number in range(len(self.bounds)):
            start, stop = self.bounds[number]
            height = self.shapes[number][0]
            part = whole[:, start:stop, :] if len(self.bounds) > 1 else whole
            part = ops.reshape(part, (-1, height, columns))
            beside = ()
            for place in range(self.matrices.side_by_side):
                one = part[:, :, place * self.width : (place + 1) * self.width]
                beside += (newton_schulz(one, (height, self.width)),)
            part = ops.concat(beside, 2) if len(beside) > 1 else beside[0]
            rows += (ops.reshape(part, (-1, stop - start, columns)),)
        merged = ops.concat(rows, 1) if len(rows) > 1 else rows[0]
        return ops.reshape(merged, (-1, columns))


def newton_schulz(matrices, shape):
    """Return about the orthogonal factor of each of ``matrices`` [number, *shape], times 0.2 sqrt(max(shape))."""
    a, b, c = COEFFICIENTS
    is_tall = shape[0] > shape[1]
    norm = ops.sqrt(ops.ReduceSum(keep_dims=True)(ops.square(matrices), (1, 2)))
    x = matrices / (norm + _EPSILON)
    gram_of = ops.BatchMatMul(transpose_a=is_tall, transpose_b=not is_tall)
    product = ops.BatchMatMul()
    for _ in range(NUM_STEPS):
        gram = gram_of(x, x)
        polynomial = b * gram + c * product(gram, gram)
        x = a * x + (product(x, polynomial) if is_tall else product(polynomial, x))
    return x * (UPDATE_RMS * max(shape) ** 0.5)


class Shares(nn.Cell):
    """Puts together of the ranks' shards what this rank needs of a parameter, whole blocks; and takes its shard back.
    """

    def __init__(self, layout: ParameterLayout, block_rows: int):
        super().__init__(auto_prefix=False)
        rank = get_rank() % layout.stage_size
        ranks, num_columns = gathered_ranks(layout, rank, block_rows)
        first = (get_rank() - rank) if len(ranks) > 1 else 0
        self.is_whole = len(ranks) == 1
        self.num_columns, self.num_rows = num_columns, len(ranks) // num_columns
        self.column, self.row = divmod(ranks.index(rank), self.num_rows)
        # A group gathers in the order of its ranks, which is not that of shards that two axes divide.
        self.places = tuple(sorted(ranks).index(one) for one in ranks)
        self.is_stacked = num_columns == 1 and ranks == sorted(ranks)
        if not self.is_whole:
            self.all_gather = ops.AllGather(group=_group(tuple(first + one for one in sorted(ranks))))

    def gather(self, shard):
        if self.is_whole:
            return shard
        stacked = self.all_gather(shard)
        if self.is_stacked:
            return stacked
        parts, columns = ops.Split(0, len(self.places))(stacked), ()
        for column in range(self.num_columns):
            rows = ()
            for row in range(self.num_rows):
                rows += (parts[self.places[column * self.num_rows + row]],)
            columns += (ops.concat(rows, 0) if self.num_rows > 1 else rows[0],)
        return ops.concat(columns, 1) if self.num_columns > 1 else columns[0]

    def own(self, whole):
        if self.num_columns > 1:
            whole = ops.Split(1, self.num_columns)(whole)[self.column]
        if self.num_rows > 1:
            whole = ops.Split(0, self.num_rows)(whole)[self.row]
        return whole


@cache
def _group(ranks: tuple[int, ...]) -> str:
    """Create the group of these ranks, once in a process, and return its name."""
    name = hashlib.sha256("-".join(map(str, ranks)).encode()).hexdigest()[:48]
    create_group(name, list(ranks))
    return name
