"""DeepStack: rows of images are added behind the first layers of the decoder too (arXiv:2406.04334)."""

from mindformers.parallel_core.training_graph.transformer.transformer_layer import TransformerLayer

# Rotary tables before what is added, in what the decoder hands to all of its layers.
NUM_TABLES = 6


class DeepstackLayer(TransformerLayer):
    """A decoder layer; its output has the part `[B*S, H]` for it of ``rotary_pos_emb`` added."""

    def __init__(self, *arguments, layer_number: int, **options):
        super().__init__(*arguments, layer_number=layer_number, **options)
        self.place = NUM_TABLES + layer_number

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
            rotary_pos_emb,
            prefix_keys_values,
            extra_loss,
            actual_seq_len,
            sharded_key,
            sharded_value,
            attention_loss,
        )
        return output + rotary_pos_emb[self.place], context, extra_loss, attention_loss
