"""A process that compiles the cells of a teacher's top-k tokens for a simulated NPU; prints what was compiled.

Usage: top_k_compile.py; each line is the name of a cell and its planned memory in bytes.
"""

import types

from mindrlhf.dryrun.compile import ascend_stubs

ascend_stubs.activate(0, 1, ascend_stubs.LEVEL_PLAN_MEMORY)

import mindspore as ms  # noqa: E402
import numpy as np  # noqa: E402
from mindspore import nn, ops  # noqa: E402

from mindrlhf.algorithms import policy_losses  # noqa: E402
from mindrlhf.algorithms.head import WHOLE_HEAD, HeadTile  # noqa: E402
from mindrlhf.algorithms.logprobs import PolicyLogProbs  # noqa: E402
from mindrlhf.algorithms.top_k.cells import TopKLogProbs, TopTokens  # noqa: E402
from mindrlhf.algorithms.top_k.loss import TopKPolicyLoss  # noqa: E402
from mindrlhf.dryrun.compile.graph import plan_memory  # noqa: E402

VOCABULARY, WIDTH, ROWS, LENGTH, K = 1024, 64, 4, 32, 8


class Embedding(nn.Cell):
    """A model that is its embedding, in bfloat16, as hidden states are on an NPU."""

    def __init__(self):
        super().__init__()
        weights = np.full((VOCABULARY, WIDTH), 0.01, np.float32)
        self.table = ms.Parameter(weights, name="table")
        self.head_weight = ms.Parameter(weights.copy(), name="head")
        self.dims = types.SimpleNamespace(tied=False)
        self.splits = (1, 1, 1)

    def construct(self, input_ids, segment_ids):
        return ops.cast(ops.gather(self.table, input_ids, 0), ms.bfloat16)


class Gradients(nn.Cell):
    """The loss and its gradients."""

    def __init__(self, loss):
        super().__init__(auto_prefix=False)
        parameters = ms.ParameterTuple(loss.policy.model.trainable_params())
        self.function = ops.value_and_grad(loss, None, parameters, has_aux=True)

    def construct(self, *inputs):
        return self.function(*inputs)


ms.set_context(mode=ms.GRAPH_MODE)
ms.set_device("Ascend")
mask, ids = np.ones((ROWS, LENGTH), np.float32), np.ones((ROWS, LENGTH), np.int32)
rows = [ms.Tensor(one) for one in (ids, ids, ids, mask)]
for tile in (WHOLE_HEAD, HeadTile(48, 300)):
    policy = TopKLogProbs(Embedding(), 0.9, "ascend", tile)
    surrogate = policy_losses.surrogate("ppo_clip", clip_low=0.2, clip_high=0.2)
    loss = TopKPolicyLoss(policy, surrogate, K, on_policy=True)
    scalars = [ms.Tensor(value, ms.float32) for value in (1.0, 9.0)]
    given = [ms.Tensor(one) for one in loss.token_arrays({}, mask)]
    teacher = PolicyLogProbs(Embedding(), 0.9, "ascend", tile)
    cells = {"update": (Gradients(loss), [*rows, *given, *scalars])}
    cells |= {"logprobs": (policy, rows), "tokens": (TopTokens(teacher, K, VOCABULARY - 10, tile), rows)}
    for name, (cell, inputs) in cells.items():
        print("tiled" if tile else "whole", name, plan_memory(cell, inputs))
