"""The causal language model of every role: MindFormers' GPTModel behind one small interface."""

import mindspore as ms
from mindspore import nn, ops

from mindrlhf.errors import UserError
from mindrlhf.models.spec import ModelDims, ModelSpec, find_spec

DTYPES = {"float32": ms.float32, "float16": ms.float16, "bfloat16": ms.bfloat16}


class CausalLM(nn.Cell):
    """Hidden states of packed token rows; the vocabulary projection is left to the caller.

    Attributes:
        spec: the architecture.
        dims: its sizes.
        hf_config: the config.json it was built from.
    """

    def __init__(self, model: nn.Cell, inputs: nn.Cell, spec: ModelSpec, dims: ModelDims, hf_config: dict):
        super().__init__(auto_prefix=False)
        self.model = model
        self.inputs = inputs
        self.spec = spec
        self.dims = dims
        self.hf_config = hf_config

    @property
    def head_weight(self) -> ms.Parameter:
        """Output projection `[V, H]`: the embedding itself when tied."""
        return self.model.embedding.word_embeddings.weight if self.dims.tied else self.model.output_layer.weight

    def construct(self, input_ids, segment_ids):
        """Return hidden states `[B, S, H]` after the final norm, in the compute dtype.

        Args:
            input_ids: tokens `[B, S]`, int32.
            segment_ids: `[B, S]`, int32: 0 is padding; tokens attend to earlier tokens of the same number only.
        """
        hidden_states, mask, rotary = self.inputs(input_ids, segment_ids, self.model.embedding.word_embeddings.weight)
        hidden_states, _, _ = self.model.decoder(hidden_states, mask, rotary)
        return ops.reshape(hidden_states, input_ids.shape + (-1,))


class CausalLMLogits(nn.Cell):
    """Float32 logits `[B, S, V]` of a `CausalLM`, for tests and the plain generator."""

    def __init__(self, language_model: CausalLM):
        super().__init__(auto_prefix=False)
        self.language_model = language_model
        self.head_weight = language_model.head_weight

    def construct(self, input_ids, segment_ids):
        hidden_states = self.language_model(input_ids, segment_ids)
        weight = ops.cast(self.head_weight, hidden_states.dtype)
        rows = ops.reshape(hidden_states, (-1, hidden_states.shape[-1]))
        logits = ops.cast(ops.MatMul(transpose_b=True)(rows, weight), ms.float32)
        return ops.reshape(logits, input_ids.shape + (-1,))


def build_model(
    hf_config: dict,
    *,
    seq_length: int,
    compute_dtype: str = "float32",
    param_dtype: str = "float32",
    device: str = "cpu",
) -> CausalLM:
    """Build a randomly initialised model; `prepare_mindformers` must have been called.

    Raises:
        UserError: unknown architecture, unsupported variant, or a dtype the device cannot compute.
    """
    from mindformers.parallel_core.training_graph.base_models.gpt.gpt_model import GPTModel
    from mindformers.parallel_core.transformer_config import TransformerConfig

    from mindrlhf.models import cpu_cells

    if device == "cpu" and (compute_dtype, param_dtype) != ("float32", "float32"):
        raise UserError(f"compute_dtype={compute_dtype}, param_dtype={param_dtype}: the CPU computes in float32 only")
    spec = find_spec(hf_config)
    dims = spec.dims(hf_config)
    config = TransformerConfig(
        **spec.mcore_config(dims),
        seq_length=seq_length,
        use_flash_attention=False,
        params_dtype=param_dtype,
        compute_dtype=compute_dtype,
        layernorm_compute_dtype="float32",
        softmax_compute_dtype="float32",
        rotary_dtype="float32",
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=cpu_cells.decoder_spec(dims.num_layers),
        vocab_size=dims.vocab_size,
        max_sequence_length=seq_length,
        position_embedding_type="rope",
        rotary_base=dims.rope_theta,
        share_embeddings_and_output_weights=dims.tied,
    )
    return CausalLM(model, cpu_cells.DecoderInputs(config, seq_length, dims.rope_theta), spec, dims, hf_config)
