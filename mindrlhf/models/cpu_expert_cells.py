"""Mixture of experts on the CPU: MindFormers' names and layouts, without its Ascend-only dispatch.

Every expert sees every token, and the router's weight of experts that were not chosen is zero: static shapes and three
matrix products, at num_experts / num_active times the arithmetic. The small models that run on a CPU can afford it.
"""

import mindspore as ms
from mindspore import Parameter, nn, ops
from mindspore.common.initializer import initializer

from mindrlhf.models.cpu_cells import ExchangeAxes, GatedMlp

# Larger than any score, so that experts outside the open groups come last.
_CLOSED = 1e9
_BEST_OF_GROUP = 2


class Router(nn.Cell):
    """Weights of the experts for each token, zero where not chosen; the parameters of MindFormers' TopKRouter.

    Softmax: Fedus et al. 2021, arXiv:2101.03961, eq. 1, top-k. Sigmoid with groups and selection bias: DeepSeek-V3,
    arXiv:2412.19437, eqs. 13-16 and section 2.1.2. Gradients reach the router through the weights of the chosen.
    """

    def __init__(self, config):
        super().__init__()
        self.num_experts = config.num_moe_experts
        self.num_active = config.moe_router_topk
        self.num_groups = config.moe_router_num_groups or 1
        self.num_active_groups = config.moe_router_group_topk or 1
        self.is_sigmoid = config.moe_router_score_function == "sigmoid"
        self.is_normalized = config.norm_topk_prob
        self.scale = config.moe_router_topk_scaling_factor
        self.weight = Parameter(config.init_method((self.num_experts, config.hidden_size)), name="weight")
        self.has_bias = config.moe_router_enable_expert_bias
        if self.has_bias:
            self.expert_bias = Parameter(
                initializer("zeros", (self.num_experts,), ms.float32), name="expert_bias", requires_grad=False
            )
        self.matmul_transpose_b = ops.MatMul(transpose_b=True)
        self.top_k = ops.TopK(sorted=True)
        self.softmax = ops.Softmax(-1)
        self.one = ms.Tensor(1.0, ms.float32)
        self.zero = ms.Tensor(0.0, ms.float32)

    def construct(self, rows, replayed=None):
        """rows `[N, H]` -> weights `[N, E]`, float32.

        Experts ``replayed``, int32 `[N, K]`, are taken in the place of the best; numbers that are no expert's leave
        the choice to the router. Their weights are the router's own: gradients reach it as ever.
        """
        logits = self.matmul_transpose_b(rows, self.weight)
        scores = ops.sigmoid(logits) if self.is_sigmoid else self.softmax(logits)
        chosen = self._choose(scores)
        if replayed is not None:
            given = self._mark(replayed, self.num_experts)
            chosen = given + (1.0 - ops.ReduceMax(keep_dims=True)(given, -1)) * chosen
        weights = scores * ops.stop_gradient(chosen)
        if self.is_normalized:
            weights = weights / (ops.ReduceSum(keep_dims=True)(weights, -1) + 1e-20)
        return weights * self.scale

    def _choose(self, scores):
        """1 for the chosen experts, 0 for the others, `[N, E]`."""
        choice = scores + self.expert_bias if self.has_bias else scores
        if self.num_groups > 1:
            group_size = self.num_experts // self.num_groups
            best, _ = self.top_k(ops.reshape(choice, (-1, self.num_groups, group_size)), _BEST_OF_GROUP)
            is_open = self._mark_top(ops.ReduceSum()(best, -1), self.num_active_groups, self.num_groups)
            closed = ops.tile(ops.expand_dims((1.0 - is_open) * _CLOSED, 2), (1, 1, group_size))
            choice = choice - ops.reshape(closed, (-1, self.num_experts))
        return self._mark_top(choice, self.num_active, self.num_experts)

    def _mark_top(self, values, count: int, size: int):
        _, indices = self.top_k(values, count)
        return self._mark(indices, size)

    def _mark(self, indices, size: int):
        return ops.ReduceSum()(ops.OneHot()(indices, size, self.one, self.zero), 1)


class Experts(nn.Cell):
    """Gated MLPs side by side; the parameters of MindFormers' FFNGroupedGEMM."""

    def __init__(self, config):
        super().__init__()
        self.num_experts = config.num_moe_experts
        self.hidden_size = config.hidden_size
        self.size = config.moe_ffn_hidden_size
        self.weight1 = Parameter(
            config.init_method((self.num_experts * self.hidden_size, 2 * self.size)), name="weight1"
        )
        self.weight2 = Parameter(config.init_method((self.num_experts * self.size, self.hidden_size)), name="weight2")
        self.matmul = ops.MatMul()
        self.exchange_axes = ExchangeAxes()
        self.split = ops.Split(1, 2)

    def construct(self, rows, weights):
        """rows `[N, H]`, weights `[N, E]` -> `[N, H]`."""
        stacked = ops.reshape(self.weight1, (1, self.num_experts, self.hidden_size, 2 * self.size))
        side_by_side = ops.reshape(self.exchange_axes(stacked), (self.hidden_size, -1))
        gate, up = self.split(ops.reshape(self.matmul(rows, side_by_side), (-1, 2 * self.size)))
        products = gate * ops.sigmoid(gate) * up * ops.reshape(weights, (-1, 1))
        # The last product also sums over the experts.
        products = ops.reshape(products, (-1, self.num_experts * self.size))
        return self.matmul(products, self.weight2)


class ExpertMlp(nn.Cell):
    """Routed experts and, where the model has one, the shared expert; the interface of MindFormers' MoELayer.

    The experts to be replayed come as a tuple in the place of ``extra_loss``, the only thing beside the hidden states
    that MindFormers' layers hand on.
    """

    def __init__(self, config):
        super().__init__()
        self.router = Router(config)
        self.experts = Experts(config)
        self.has_shared_expert = bool(config.moe_shared_expert_intermediate_size)
        if self.has_shared_expert:
            self.shared_experts = GatedMlp(config, config.moe_shared_expert_intermediate_size)

    def construct(self, hidden_states, extra_loss=0.0):
        replayed = extra_loss[0] if isinstance(extra_loss, tuple) else None
        output = self.experts(hidden_states, self.router(hidden_states, replayed))
        if self.has_shared_expert:
            shared, _, _ = self.shared_experts(hidden_states)
            output = output + shared
        return output, None, extra_loss
