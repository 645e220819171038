"""The causal language model of every role: MindFormers' GPTModel behind one small interface."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import mindspore as ms
from mindspore import nn, ops
from mindspore.common.initializer import Normal

from mindrlhf.config.memory import ACTIVATION, ATTENTION, MLP, NORMS, WHOLE, MemorySection
from mindrlhf.errors import UserError
from mindrlhf.layout.layout import Layout
from mindrlhf.specs import ModelDims, ModelSpec, find_spec
from mindrlhf.specs.scoring import SCORE_NAME

if TYPE_CHECKING:
    from mindrlhf.models.vision.images import ImageRows

# Keys of `parallel_config` that shape the cells; the others belong to MindSpore's parallel context.
_PARALLEL_KEYS = {
    "data_parallel": "data_parallel_size",
    "model_parallel": "tensor_model_parallel_size",
    "pipeline_stage": "pipeline_model_parallel_size",
    "context_parallel": "context_parallel_size",
    "use_seq_parallel": "sequence_parallel",
    "micro_batch_num": "micro_batch_num",
    "expert_parallel": "expert_model_parallel_size",
}
_SPLITTING_KEYS = ("model_parallel", "pipeline_stage", "context_parallel", "expert_parallel")

# Cells and operators of a layer, by role.
_RECOMPUTED = {
    ATTENTION: ("self_attention.core_attention",),
    NORMS: ("input_layernorm", "pre_mlp_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
    # The second product reads a reshaped view, which would keep the operators' result.
    ACTIVATION: tuple(
        f"{mlp}.{name}"
        for mlp in ("mlp", "mlp.shared_experts")
        for name in ("activation_func.silu", "gelu", "mul", "swiglu", "linear_fc2.reshape")
    ),
    MLP: ("mlp",),
}


class CausalLM(nn.Cell):
    """Hidden states of packed token rows; the vocabulary projection is left to the caller.

    Attributes:
        spec: the architecture.
        dims: its sizes.
        hf_config: the config.json it was built from.
        splits: ranks that share the rows, each row, and the heads, channels and vocabulary.
        score_weight: projection `[1, H]` to a score; models with `spec.is_scorer` only.
        lora: the adapters, of :class:`mindrlhf.models.lora.model.Lora`; None when there are none.
        visual: the vision tower, which runs before the decoder and outside its graph; None in models of text alone.
        images: the images of a step, as the tower has made rows of them; None in models of text alone.
    """

    lora = None

    def __init__(
        self,
        model: nn.Cell,
        inputs: nn.Cell,
        outputs: nn.Cell,
        spec: ModelSpec,
        dims: ModelDims,
        hf_config: dict,
        splits: tuple[int, int, int] = (1, 1, 1),
        visual: nn.Cell | None = None,
        images: "ImageRows | None" = None,
        tokens_and_experts: nn.Cell | None = None,
    ):
        super().__init__(auto_prefix=False)
        self.model = model
        self.inputs = inputs
        self.outputs = outputs
        self.spec = spec
        self.dims = dims
        self.hf_config = hf_config
        self.splits = splits
        self.layers_with_experts = tuple(dims.has_experts(layer) for layer in range(dims.num_layers))
        self.has_experts = any(self.layers_with_experts)
        self.tokens_and_experts = tokens_and_experts
        self.visual = visual
        self.images = images
        if spec.is_scorer:
            dtype = model.embedding.word_embeddings.weight.dtype
            self.score_weight = ms.Parameter(ops.zeros((1, dims.hidden_size), dtype), name=SCORE_NAME)

    @property
    def head_weight(self) -> ms.Parameter:
        """Output projection `[V, H]`: the embedding itself when tied."""
        return self.model.embedding.word_embeddings.weight if self.dims.tied else self.model.output_layer.weight

    def construct(self, input_ids, segment_ids):
        """Return hidden states `[B, S, H]` after the final norm, in the compute dtype.

        Args:
            input_ids: tokens `[B, S]`, int32; or `[B, 3, S]`: tokens, for each the segment that its own continues
                (its own where that continues none), and its position. On the CPU also a tuple of that and the experts
                that the tokens are sent to, int32 `[layers with experts, B*S, K]`; see
                :class:`mindrlhf.models.cpu_expert_cells.Router`; on Ascend one array of both, see
                :class:`mindrlhf.models.ascend_routing.TokensAndExperts`.
                With vision `[B, S, 4]`, see
                :meth:`mindrlhf.models.vision.cpu_inputs.ImageDecoderInputs.construct`.
            segment_ids: `[B, S]`, int32: 0 is padding; tokens attend to earlier tokens of the same number, and of the
                segment that their own continues, only.
        """
        if self.has_experts and isinstance(input_ids, tuple):
            hidden_states, mask, rotary = self.inputs(input_ids[0], segment_ids)
            hidden_states = self._replay(hidden_states, mask, rotary, input_ids[1])
        elif self.tokens_and_experts is not None:
            input_ids, experts = self.tokens_and_experts(input_ids)
            hidden_states, mask, rotary = self.inputs(input_ids, segment_ids)
            hidden_states = self._replay(hidden_states, mask, rotary, experts)
        else:
            hidden_states, mask, rotary = self.inputs(input_ids, segment_ids)
            hidden_states, _, _ = self.model.decoder(hidden_states, mask, rotary)
        return self.outputs(hidden_states, segment_ids)

    def _replay(self, hidden_states, mask, rotary, experts):
        """Run the decoder, each layer with its own of ``experts``."""
        place = 0
        for layer, has_experts in zip(self.model.decoder.layers, self.layers_with_experts):
            extra = 0.0
            if has_experts:
                extra = (experts[place],)
                place += 1
            hidden_states, _, _, _ = layer(hidden_states, mask, rotary_pos_emb=rotary, extra_loss=extra)
        return self.model.decoder.final_layernorm(hidden_states)


class EachLayer(nn.Cell):
    """A model's layers side by side, each with an input of its own."""

    def __init__(self, network: CausalLM):
        super().__init__(auto_prefix=False)
        self.inputs, self.decoder = network.inputs, network.model.decoder

    def construct(self, input_ids, segment_ids, *given):
        """Return the embedded tokens, and the output of each layer and of the norm.

        Args:
            input_ids, segment_ids: see :class:`CausalLM`, of one row.
            given: what they are given, ``[S, H]`` in the compute dtype, one more than there are layers.
        """
        embedded, mask, rotary = self.inputs(input_ids, segment_ids)
        outputs = (embedded,)
        for number, layer in enumerate(self.decoder.layers):
            hidden_states = ops.reshape(given[number], embedded.shape)
            outputs += (layer(hidden_states, mask, rotary_pos_emb=rotary, extra_loss=0.0)[0],)
        return outputs + (self.decoder.final_layernorm(ops.reshape(given[-1], embedded.shape)),)


def build_model(
    hf_config: dict,
    *,
    seq_length: int,
    compute_dtype: str = "float32",
    param_dtype: str = "float32",
    device: str = "cpu",
    parallel_config: Mapping[str, int | bool] | None = None,
    recompute: bool = False,
    memory: MemorySection = WHOLE,
    shared_prompts: bool = False,
    num_image_rows: int = 1, replays_routing: bool = False,
) -> CausalLM:  # fmt: skip
    """Build a randomly initialised model; `prepare_mindformers` must have been called.

    Args:
        hf_config: the model's config.json.
        seq_length: longest row; shorter rows work too (each length compiles once).
        compute_dtype: dtype of activations.
        param_dtype: dtype of parameters.
        device: `cpu` (cells of `cpu_decoder`) or `ascend` (MindFormers' own cells).
        parallel_config: MindFormers' keys (`model_parallel`, `pipeline_stage`, ...); unread on the CPU.
        recompute: keep only layer inputs and compute the rest again in the backward pass.
        memory: what else is computed again.
        shared_prompts, replays_routing: inputs have positions, or experts, see :class:`CausalLM`; cells do either.
        num_image_rows: image tokens in one run of a model with vision, at most.

    Raises:
        UserError: unknown architecture, unsupported variant, or a dtype or split the device cannot do.
    """
    parallel_config = dict(parallel_config or {})
    spec = find_spec(hf_config)
    dims = spec.dims(hf_config)
    if device == "cpu":
        _check_cpu(compute_dtype, param_dtype, parallel_config)
        parallel_config = {}
    config = _transformer_config(
        spec,
        dims,
        parallel_config,
        seq_length=seq_length,
        use_flash_attention=device != "cpu",
        params_dtype=param_dtype,
        compute_dtype=compute_dtype,
        recompute=recompute,
    )
    cells = _cells_for(device)
    decoder_spec, tokens_and_experts = _decoder(cells, config, dims, replays_routing and device != "cpu")
    model = _gpt_model(config, dims, decoder_spec)
    if device != "cpu":
        shares_head = dims.tied and not spec.is_scorer  # a scorer has no output projection
        turns_by_row = shared_prompts or dims.vision is not None
        _adapt_ascend_cells(cells, model, config, dims, parallel_config, shares_head, turns_by_row)
    _recompute(model, memory, parallel_config)
    splits = tuple(parallel_config.get(key, 1) for key in ("data_parallel", "context_parallel", "model_parallel"))
    inputs, *seen = _decoder_inputs(cells, model, config, dims, num_image_rows, device)
    outputs = cells.DecoderOutputs(config)
    return CausalLM(model, inputs, outputs, spec, dims, hf_config, splits, *seen, tokens_and_experts=tokens_and_experts)


@contextlib.contextmanager
def no_random_weights() -> Iterator[None]:
    """Have no values drawn for the weights of cells that the body makes: others are loaded next."""
    draw = Normal._initialize
    Normal._initialize = lambda self, array: array.fill(0)
    try:
        yield
    finally:
        Normal._initialize = draw


def _decoder(cells, config, dims: ModelDims, replays_routing: bool) -> tuple:
    """Return the decoder's specification, and what takes inputs with experts apart."""
    spec = cells.decoder_spec(config, dims)
    if not replays_routing:
        return spec, None
    from mindrlhf.models.ascend_routing import TokensAndExperts, with_replay

    return with_replay(spec), TokensAndExperts(config, sum(dims.experts.layers))


def _cells_for(device: str):
    if device == "cpu":
        from mindrlhf.models import cpu_decoder as cells
    else:
        from mindrlhf.models import ascend_cells as cells
    return cells


def _adapt_ascend_cells(cells, model, config, dims, parallel_config, shares_head: bool, turns_by_row: bool) -> None:
    from mindrlhf.models.ascend_layers import fuse_rotation

    cells.extend_rotation(model, dims)
    if dims.experts:
        cells.drop_balancing_loss(model)
    keeps_whole = parallel_config.get("vocab_emb_dp", False) and not shares_head
    cells.place_embedding(model, config, keeps_whole or parallel_config.get("model_parallel", 1) == 1)
    fuse_rotation(model, turns_by_row)


def _recompute(model, memory: MemorySection, parallel_config: dict) -> None:
    """Have ``memory.recompute_layers`` recomputed in the backward pass, in others ``memory.recompute_operators``."""
    chosen = memory.layers
    for number, layer in enumerate(model.decoder.layers):
        if number in chosen:
            layer.recompute()
            continue
        for path in (path for role in memory.recompute_operators for path in _RECOMPUTED[role]):
            found = _find(layer, path)
            if found is not None:
                found.recompute()
    if parallel_config.get("enable_parallel_optimizer"):
        from mindrlhf.models.ascend_layers import keep_prepared_weights

        keep_prepared_weights(model)


def _find(layer: nn.Cell, path: str):
    found = layer
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


def _decoder_inputs(cells, model, config, dims: ModelDims, num_image_rows: int, device: str) -> tuple:
    """Return the decoder's inputs; with vision also the tower, and what knows the images of a step."""
    if dims.local and device == "cpu":
        from mindrlhf.models.cpu_mixed_inputs import WindowDecoderInputs

        return (WindowDecoderInputs(model, config, config.seq_length, dims),)
    if dims.linear and device == "cpu":
        from mindrlhf.models.cpu_mixed_inputs import LinearDecoderInputs

        return (LinearDecoderInputs(model, config, config.seq_length, dims),)
    if not dims.vision:
        return (cells.DecoderInputs(model, config, config.seq_length, dims),)
    from mindrlhf.models.vision.images import ImageRows
    from mindrlhf.models.vision.tower import VisionTower

    if device == "cpu":
        from mindrlhf.models.vision import cpu_inputs as vision_inputs
        from mindrlhf.models.vision import cpu_tower_cells as tower_cells
    else:
        from mindrlhf.models.vision import ascend_inputs as vision_inputs
        from mindrlhf.models.vision import ascend_tower_cells as tower_cells

    tower = VisionTower(tower_cells, config, dims)
    tower.update_parameters_name("visual.")
    for parameter in tower.get_parameters():
        parameter.requires_grad = False
    inputs = vision_inputs.ImageDecoderInputs(model, config, config.seq_length, dims, num_image_rows)
    runs = tower if device == "cpu" else tower_cells.ByItself(tower)
    return inputs, tower, ImageRows(runs, inputs.image_rows, dims.vision.geometry, dims.vision.window_side)


def _transformer_config(spec: ModelSpec, dims: ModelDims, parallel_config: dict, **options):
    """Return MindFormers' config of the cells; ``options`` are further keys of it."""
    from mindformers.parallel_core.transformer_config import MLATransformerConfig, TransformerConfig

    dims.check_window(options["seq_length"])
    config_class = MLATransformerConfig if dims.latent else TransformerConfig
    return config_class(
        **spec.mcore_config(dims),
        **{mf_key: parallel_config[key] for key, mf_key in _PARALLEL_KEYS.items() if key in parallel_config},
        layernorm_compute_dtype="float32",
        softmax_compute_dtype="float32",
        rotary_dtype="float32",
        offset=list(Layout(pipeline_stage=parallel_config.get("pipeline_stage", 1)).layer_offsets(dims.num_layers)),
        **options,
    )


def _gpt_model(config, dims: ModelDims, decoder_spec) -> nn.Cell:
    from mindformers.parallel_core.training_graph.base_models.gpt import gpt_model

    # MindFormers' own masks, which are not used here, begin with a square of the row length on every rank's host:
    # 17 GB for 131,072 tokens, three times over while it is made.
    unused = gpt_model.PreprocessLabelsAndMasks
    gpt_model.PreprocessLabelsAndMasks = _NoMasks
    try:
        return gpt_model.GPTModel(
            config=config,
            transformer_layer_spec=decoder_spec,
            vocab_size=dims.vocab_size,
            max_sequence_length=config.seq_length,
            position_embedding_type=config.position_embedding_type,
            rotary_base=dims.rope_theta,
            share_embeddings_and_output_weights=dims.tied,
        )
    finally:
        gpt_model.PreprocessLabelsAndMasks = unused


class _NoMasks(nn.Cell):
    """Takes the place of MindFormers' cell for labels and masks."""

    def __init__(self, config):
        super().__init__()


def _check_cpu(compute_dtype: str, param_dtype: str, parallel_config: dict) -> None:
    if (compute_dtype, param_dtype) != ("float32", "float32"):
        raise UserError(f"compute_dtype={compute_dtype}, param_dtype={param_dtype}: the CPU computes in float32 only")
    for key in _SPLITTING_KEYS:
        if parallel_config.get(key, 1) > 1:
            raise UserError(f"parallel_config.{key}={parallel_config[key]}: the CPU has data parallelism only; use 1")
