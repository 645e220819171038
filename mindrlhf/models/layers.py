"""The class of each decoder layer, the same for both kinds of cells."""

from mindformers.parallel_core.training_graph.device_matrix import layout
from mindformers.parallel_core.training_graph.transformer.transformer_layer import TransformerLayer

from mindrlhf.models.vision.deepstack import DeepstackLayer
from mindrlhf.specs import ModelDims


class SandwichLayer(TransformerLayer):
    """A layer that also normalises what attention and MLP add to the residual stream, as GLM-4 and Gemma 3 do.

    Args:
        config: MindFormers'.
        submodules: MindFormers'; the norms behind are of the class of the one before attention.
        kind: which of the masks and rotary tables are this layer's, where layers differ: ``attention_mask`` and
            ``rotary_pos_emb`` then have those of each kind. None where all layers are alike.
    """

    def __init__(self, config, submodules, *arguments, kind: int | None = None, **options):
        super().__init__(config, submodules, *arguments, **options)
        self.kind = kind
        norm_class, sizes = type(self.input_layernorm), (config.hidden_size, config.layernorm_epsilon)
        self.post_attention_layernorm = norm_class(config, *sizes)
        self.post_mlp_layernorm = norm_class(config, *sizes)
        if config.sequence_parallel or config.context_parallel_size > 1:  # as MindFormers shards the norms before
            for norm in (self.post_attention_layernorm, self.post_mlp_layernorm):
                norm.shard(config, in_strategy=(layout("cp_tp", "dp", "None"), layout("None")))

    def construct(
        self,
        hidden_states,
        attention_mask=None,
        context=None,
        context_mask=None,
        rotary_pos_emb=None,
        prefix_keys_values=None,
        extra_loss=0.0,
        actual_seq_len=None,
        sharded_key=None,
        sharded_value=None,
        attention_loss=0.0,
    ):
        """See MindFormers' layer."""
        if self.kind is not None:
            attention_mask, rotary_pos_emb = attention_mask[self.kind], rotary_pos_emb[self.kind]
        attended, _ = self.self_attention(
            self.input_layernorm(hidden_states), attention_mask=attention_mask, rotary_pos_emb=rotary_pos_emb
        )
        hidden_states = self.add(hidden_states, self.post_attention_layernorm(attended))
        output, _, extra_loss = self.mlp(self.pre_mlp_layernorm(hidden_states), extra_loss=extra_loss)
        output = self.add(hidden_states, self.post_mlp_layernorm(output))
        return self.cast(output, self.compute_dtype), context, extra_loss, attention_loss


def layer_class(dims: ModelDims, layer: int, num_tables: int) -> tuple[type, dict]:
    """The class of a decoder layer, and what it takes beside what all take."""
    if dims.norms_outputs:
        return SandwichLayer, {"kind": int(dims.local.layers[layer]) if dims.local else None}
    if dims.vision and layer < len(dims.vision.deepstack_blocks):
        return DeepstackLayer, {"num_tables": num_tables}
    return TransformerLayer, {}
