"""DeepStack: rows of images are added behind the first layers of the decoder too (arXiv:2406.04334)."""

from mindformers.parallel_core.training_graph.device_matrix import layout
from mindformers.parallel_core.training_graph.transformer.transformer_layer import TransformerLayer
from mindspore import ops

# Rotary tables before what is added, in what the decoder hands to all of its layers.
NUM_CPU_TABLES, NUM_ASCEND_TABLES = 6, 2


class DeepstackLayer(TransformerLayer):
    """A decoder layer; its output has the part for it of ``rotary_pos_emb`` added, if there is one.

    That is `[B*S, H]` on the CPU, `[S, B, H]` on Ascend, where all layers of a decoder must be of this class: attention
    there takes its tables and no more.

    Args:
        config: MindFormers'.
        num_tables: one of the constants above.
    """

    def __init__(self, config, *arguments, layer_number: int, num_tables: int, **options):
        super().__init__(config, *arguments, layer_number=layer_number, **options)
        self.num_tables, self.place = num_tables, num_tables + layer_number
        self.add_rows = ops.Add()
        if num_tables == NUM_ASCEND_TABLES:
            # As the residual connections are.
            shares_rows = config.sequence_parallel or config.context_parallel_size > 1
            strategy = layout("cp_tp" if shares_rows else "cp", "dp", "None")
            self.add_rows.shard((strategy, strategy))

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
        output, context, extra_loss, attention_loss = super().construct(
            hidden_states,
            attention_mask,
            context,
            context_mask,
            rotary_pos_emb[: self.num_tables],
            prefix_keys_values,
            extra_loss,
            actual_seq_len,
            sharded_key,
            sharded_value,
            attention_loss,
        )
        if self.place < len(rotary_pos_emb):
            output = self.add_rows(output, rotary_pos_emb[self.place])
        return output, context, extra_loss, attention_loss
