"""MindFormers' experts on Ascend (2.0.0), whose router takes the experts of tokens, as the generator chose them."""

from dataclasses import replace

from mindformers.parallel_core.training_graph.device_matrix import layout_moe
from mindformers.parallel_core.training_graph.transformer.moe.moe_layer import MoELayer
from mindformers.parallel_core.training_graph.transformer.moe.router import TopKRouter
from mindspore import nn, ops
from mindspore.ops.operations import Morph


def with_replay(spec):
    """Return the decoder's specification with the experts of this module."""
    for number, layer in enumerate(spec.layer_specs):
        mlp = layer.submodules.mlp
        if mlp.module is MoELayer:
            submodules = replace(layer.submodules, mlp=replace(mlp, module=ReplayingExperts))
            spec.layer_specs[number] = replace(layer, submodules=submodules)
    return spec


class TokensAndExperts(nn.Cell):
    """Tokens `[B, S]`, and of each of L layers their experts `[B, S, K]`, from one array `[B, S, 1 + L * K]`.

    In one array, so that every micro-batch, stage and rank gets of the experts what it gets of the tokens.
    """

    def __init__(self, config, num_layers: int):
        super().__init__(auto_prefix=False)
        self.num_layers, self.num_active = num_layers, config.moe_router_topk
        rows = (config.data_parallel_size, config.context_parallel_size, 1)
        self.slice, self.squeeze = ops.StridedSlice().shard((rows,)), ops.Squeeze(2).shard((rows,))

    def construct(self, inputs):
        experts = ()
        for number in range(self.num_layers):
            experts += (self._channels(inputs, 1 + number * self.num_active, self.num_active),)
        return self.squeeze(self._channels(inputs, 0, 1)), experts

    def _channels(self, inputs, first, size):
        batch, length, _ = inputs.shape
        return self.slice(inputs, (0, 0, first), (batch, length, first + size), (1, 1, 1))


class ReplayingRouter(TopKRouter):
    """MindFormers' router; see :class:`mindrlhf.models.cpu_expert_cells.Router`."""

    def __init__(self, config):
        super().__init__(config)
        tokens = layout_moe("dp_cp", "None", "None")
        # On each rank: MindSpore 2.10 shards no Select this way ("operator Select init failed").
        self.choose = Morph(self._choose, _first, _first).add_prim_attr("self_define_shard", True)
        self.choose.shard(in_strategy=(tokens, tokens), out_strategy=(tokens,))
        self.gather = ops.GatherD().add_prim_attr("self_define_shard", True)
        self.gather.shard(in_strategy=(tokens, layout_moe(), tokens), out_strategy=(tokens,))

    def construct(self, inputs, replayed):
        """Return experts and their weights, `[ranks, N, K]`, of tokens `[ranks, N, H]`.

        Experts ``replayed`` are taken in the place of the best; numbers that are no expert's leave them.
        """
        scores = self.gating_activation(self.gating(inputs))
        wanted = self.afb_add_topk_bias(scores, self.expert_bias) if self.moe_router_enable_expert_bias else scores
        own = self._group_limited_topk(scores, wanted) if self.enable_group_limited else self._topk(scores, wanted)
        chosen = self.choose(replayed, own[1])
        weights = self.gather(scores, 2, chosen)
        if self.num_experts_chosen > 1 and self.config.norm_topk_prob:
            weights = self._normalize(weights)
        return chosen, self.mul(self.config.moe_router_topk_scaling_factor, weights)


    def _choose(self, replayed, own):
        return ops.select(replayed < self.expert_dim, replayed, own)


def _first(first, second):
    return first


class ReplayingExperts(MoELayer):
    """MindFormers' layer; the experts of its tokens come as a tuple in the place of ``extra_loss``."""

    def __init__(self, config, submodules=None, layer_number=None):
        super().__init__(config, submodules, layer_number)
        self.router = ReplayingRouter(config)

    def construct(self, hidden_states, extra_loss=0.0, seq_chunk=None):
        """Return the outputs `[S, B, H]`, no bias, and no balancing loss."""
        rows = self.local_reshape_permute(self.transpose(hidden_states, (1, 0, 2)), (1, -1, self.hidden_size))
        replayed = self.local_reshape_permute(extra_loss[0], (1, -1, self.router.num_experts_chosen))
        chosen, weights = self.router(rows, replayed)
        shape = (-1, self.seq_length // (self.tp * self.cp), self.hidden_size)
        output = self.local_reshape_unpermute(self.experts(rows, weights, chosen), shape)
        output = self.transpose2(output, (1, 0, 2))
        if self.use_shared_expert:
            output = self.add(output, self.shared_experts(hidden_states)[0])
        return output, None, 0.0
