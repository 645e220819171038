"""The sizes of a model, read from its Hugging Face config.json."""

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from mindrlhf.errors import UserError
from mindrlhf.images.geometry import VisionGeometry


@dataclass(frozen=True)
class ExpertDims:
    """A mixture of experts in place of the MLP.

    Attributes:
        num_experts: routed experts of a layer.
        num_active: routed experts that see one token.
        intermediate_size: width of one routed expert.
        shared_size: width of the expert that sees every token; 0 when there is none.
        layers: for each decoder layer, whether it has experts; the others have a dense MLP.
        score_function: `softmax` or `sigmoid` of the router's logits.
        normalized: the weights of a token's experts are divided by their sum.
        scale: factor of the routed experts' sum.
        num_groups: groups of experts, of which only `num_active_groups` are open to a token; 1 for no such limit.
        num_active_groups: see above.
        selection_bias: a bias for each expert, not trained by gradients, is added to the scores to choose experts.
    """

    num_experts: int
    num_active: int
    intermediate_size: int
    shared_size: int
    layers: tuple[bool, ...]
    score_function: str
    normalized: bool
    scale: float = 1.0
    num_groups: int = 1
    num_active_groups: int = 1
    selection_bias: bool = False


@dataclass(frozen=True)
class LatentDims:
    """Multi-head latent attention: DeepSeek-V2, arXiv:2405.04434, section 2.1.

    Attributes:
        query_rank: width of the compressed query; None when queries are projected directly.
        kv_rank: width of the latent that keys and values are made of.
        nope_dim: channels per head of queries and keys without position.
        rope_dim: channels per head of queries, and of the one key that heads share, with rotary position.
        value_dim: channels per head of values.
    """

    query_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int


@dataclass(frozen=True)
class YarnDims:
    """YaRN context extension of rotary embeddings: Peng et al. 2023, arXiv:2309.00071.

    Attributes:
        factor: how many times longer the context is.
        original_length: context length before the extension.
        beta_fast: rotations over the original length above which a frequency is kept.
        beta_slow: rotations below which it is divided by `factor`.
        mscale: attention scores are multiplied by (0.1 * mscale * ln(factor) + 1)^2. config.json says 1 of a model
            whose whole heads are rotated by giving none.
    """

    factor: float
    original_length: int
    beta_fast: float
    beta_slow: float
    mscale: float


@dataclass(frozen=True)
class Llama3Dims:
    """Llama 3.1's context extension (arXiv:2407.21783, section 3.4.2; transformers' rope_type `llama3`).

    Attributes:
        factor: what the frequencies of slow channels are divided by.
        low_freq_factor: rotations over the original length below which a frequency is divided in full.
        high_freq_factor: rotations above which it is kept.
        original_length: context length before the extension.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_length: int


@dataclass(frozen=True)
class LocalDims:
    """Layers that attend to a sliding window, with rotary positions of their own: Gemma 3, arXiv:2503.19786.

    Attributes:
        layers: for each decoder layer, whether it is one of them.
        window: tokens back, itself among them, that a token attends to there.
        rope_theta: base of the rotary position embedding there, which no context extension changes.
    """

    layers: tuple[bool, ...]
    window: int
    rope_theta: float


# Tokens that linear attention computes at once.
CHUNK_TOKENS = 64


@dataclass(frozen=True)
class LinearDims:
    """Layers of linear attention by the gated delta rule: Yang et al. 2024, arXiv:2412.06464.

    Attributes:
        layers: for each decoder layer, whether it is one of them; the others have softmax attention.
        key_heads: heads of queries and of keys; divides `value_heads`.
        value_heads: heads of values, each with a state.
        key_dim: channels per head of queries and keys.
        value_dim: channels per head of values.
        conv_width: tokens that the causal convolution sees, the newest among them.
    """

    layers: tuple[bool, ...]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int

    @property
    def key_size(self) -> int:
        """Channels of all queries, or of all keys."""
        return self.key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        """Channels of all values."""
        return self.value_heads * self.value_dim

    @property
    def group_rows(self) -> tuple[int, int, int]:
        """Channels of a key head: its query, its key, and the values that share them."""
        return self.key_dim, self.key_dim, self.value_size // self.key_heads

    @property
    def conv_size(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_size + self.value_size


@dataclass(frozen=True)
class VisionDims:
    """The vision tower of Qwen2.5-VL (arXiv:2502.13923, section 2.1) or its kin, and how images enter the decoder.

    Attributes:
        depth: blocks of the tower.
        hidden_size: width of the tower.
        intermediate_size: width of its MLP.
        num_heads: attention heads; divides `hidden_size`.
        in_channels: colours of a pixel.
        patch_size: pixels along each side of a patch.
        temporal_patch_size: frames in a patch; a still image is repeated.
        merge_size: patches along each side of the square that one token stands for.
        window_size: pixels along each side of the square within which most blocks attend.
        full_attention_blocks: blocks that attend to the whole image.
        image_token: token that stands for a merged patch in prompts.
        mrope_sections: pairs of the decoder's rotary channels that turn with time, row and column.
        activation: of the MLP: `silu` is gated and comes with RMSNorm; `quick_gelu` and `gelu_tanh` are of plain MLPs
            behind LayerNorm.
        num_positions: learned positions of a square grid, which is stretched over each image; 0 for none.
        deepstack_blocks: blocks whose outputs are projected too and added behind the first decoder layers, one each
            (DeepStack, arXiv:2406.04334).
        is_interleaved: channels turn with time, row and column in turn, instead of section by section.
        pixel_mean, pixel_std: what pixels are normalised by.
    """

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    in_channels: int
    patch_size: int
    temporal_patch_size: int
    merge_size: int
    window_size: int
    full_attention_blocks: tuple[int, ...]
    image_token: int
    mrope_sections: tuple[int, int, int]
    activation: str = "silu"
    num_positions: int = 0
    deepstack_blocks: tuple[int, ...] = ()
    is_interleaved: bool = False
    pixel_mean: tuple[float, float, float] = VisionGeometry.mean
    pixel_std: tuple[float, float, float] = VisionGeometry.std

    @property
    def is_gated(self) -> bool:
        """True when its MLP is gated and its norms have no bias."""
        return self.activation == "silu"

    @property
    def geometry(self) -> VisionGeometry:
        """Geometry of images as patches."""
        normalised = self.pixel_mean, self.pixel_std
        return VisionGeometry(self.patch_size, self.merge_size, self.temporal_patch_size, *normalised)

    @property
    def head_dim(self) -> int:
        """Channels per head."""
        return self.hidden_size // self.num_heads

    @property
    def patch_channels(self) -> int:
        """Numbers in one patch."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def merged_size(self) -> int:
        """Width of one merged patch before the projection to the decoder."""
        return self.hidden_size * self.merge_size**2

    @property
    def window_side(self) -> int:
        """Merged patches along each side of an attention window."""
        return self.window_size // self.merge_size // self.patch_size


@dataclass(frozen=True)
class ModelDims:
    """The sizes and switches of one model, read from its Hugging Face config.json.

    Attributes:
        num_layers: decoder layers.
        hidden_size: width of the residual stream.
        intermediate_size: width of the gated MLP in layers without experts.
        num_heads: query heads.
        num_kv_heads: key/value heads (groups); divides `num_heads`.
        head_dim: channels per head of queries and keys.
        vocab_size: rows of the embedding.
        rms_norm_eps: epsilon of every RMSNorm.
        rope_theta: base of the rotary position embedding.
        initializer_range: standard deviation of random weights.
        tied: no output projection of its own: it is the embedding itself, or the model gives scores.
        experts: the mixture of experts; None in a dense model.
        latent: latent attention; None when queries, keys and values are projected directly.
        yarn: context extension; None for plain rotary embeddings.
        llama3: context extension in Llama 3.1's way; None for plain rotary embeddings.
        window: tokens back, itself among them, that a token attends to; None for all. Rows are no longer than that.
        rotary_dim: channels at the beginning of each head that are rotated; None for all.
        qk_norms: heads of queries and keys are normalised, where the architecture leaves that to config.json.
        qkv_bias: queries, keys and values have a bias, where the architecture leaves that to config.json.
        rope_factor: what the rotary frequencies are divided by (transformers' rope_type `linear`).
        rotates_neighbours: channels 2i and 2i + 1 are rotated as a pair, not i and i + rotary_dim / 2.
        norms_outputs: what attention and MLP add to the residual stream is normalised first.
        zero_centred_norms: norms multiply by 1 + weight.
        score_divisor: scores are divided by its square root; None for `head_dim`.
        scales_embedding: embeddings are multiplied by the square root of `hidden_size`.
        activation: of the gated MLP: `silu`, or `gelu` by its tanh approximation.
        local: layers that attend to a sliding window; None where all layers are alike.
        linear: layers of linear attention; None where all have softmax attention.
        gates_output: what attention gives is multiplied by the sigmoid of a gate, which lies behind each head's query.
        num_draft_layers: multi-token prediction layers that a checkpoint may hold after the others; they are not used.
        vision: the vision tower; None in models of text alone.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    initializer_range: float
    tied: bool
    experts: ExpertDims | None = None
    latent: LatentDims | None = None
    yarn: YarnDims | None = None
    llama3: Llama3Dims | None = None
    window: int | None = None
    rotary_dim: int | None = None
    qk_norms: bool = False
    qkv_bias: bool = False
    rope_factor: float = 1.0
    rotates_neighbours: bool = False
    norms_outputs: bool = False
    zero_centred_norms: bool = False
    score_divisor: float | None = None
    scales_embedding: bool = False
    activation: str = "silu"
    local: LocalDims | None = None
    linear: LinearDims | None = None
    gates_output: bool = False
    num_draft_layers: int = 0
    vision: VisionDims | None = None

    def cached_numbers(self, tensor_parallel: int = 1) -> int:
        """Return the numbers of one token in the KV cache of each of ``tensor_parallel`` devices, in all layers.

        Key and value heads are cut down to one per device; of latent attention every device caches the whole latent.
        """
        if self.latent is not None:
            return (self.latent.kv_rank + self.latent.rope_dim) * self.num_layers
        num_layers = self.num_layers - (sum(self.linear.layers) if self.linear else 0)
        return 2 * -(-self.num_kv_heads // tensor_parallel) * self.head_dim * num_layers

    def state_numbers(self, tensor_parallel: int = 1) -> int:
        """Return the numbers that each of ``tensor_parallel`` devices keeps of a sequence, whatever its length."""
        if self.linear is None:
            return 0
        linear = self.linear
        one_layer = linear.value_size * linear.key_dim + linear.conv_size * (linear.conv_width - 1)
        return sum(linear.layers) * -(-one_layer // tensor_parallel)

    def is_linear(self, layer: int) -> bool:
        """Return whether a decoder layer has linear attention."""
        return self.linear is not None and self.linear.layers[layer]

    def check_window(self, row_length: int) -> None:
        """Raise ``UserError`` where a sliding window would hide a part of a row: the cells attend to all of it."""
        if self.window is not None and row_length > self.window:
            raise UserError(
                f"config.json has sliding_window={self.window}, but rows of {row_length} tokens are trained with full "
                f"attention: make them {self.window} at most (training.sequence_lengths, rollout.max_response_length)"
            )

    @property
    def of_local_layers(self) -> "ModelDims":
        """The same with the rotary embedding of the local layers."""
        return replace(self, rope_theta=self.local.rope_theta, rope_factor=1.0, local=None)

    @property
    def heads_per_group(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def query_rows(self) -> int:
        """Rows of the query projection for one key/value head: queries, and gates where there are any."""
        return self.heads_per_group * self.head_dim * (2 if self.gates_output else 1)

    @property
    def num_experts(self) -> int:
        """Routed experts of a layer; 0 in a dense model."""
        return self.experts.num_experts if self.experts else 0

    def has_experts(self, layer: int) -> bool:
        """Return whether a decoder layer has experts instead of a dense MLP."""
        return self.experts is not None and self.experts.layers[layer]

    @property
    def has_dense_mlps(self) -> bool:
        """Return whether a layer has an MLP that every token sees, alone or beside routed experts."""
        return self.experts is None or bool(self.experts.shared_size) or not all(self.experts.layers)


def positive_int(hf_config: dict, key: str) -> int:
    """Read a positive integer.

    Raises:
        UserError: it is missing or something else.
    """
    value = hf_config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**31:
        raise UserError(f"config.json has {key}={value!r}: give a positive integer")
    return value


def check_sizes(dims: Any) -> None:
    """Check that every whole number of dimensions is one, those of parts included.

    Raises:
        UserError: naming one that is not.
    """
    for known in fields(dims):
        value = getattr(dims, known.name)
        is_optional = known.type == int | None
        if is_dataclass(value):
            check_sizes(value)
        elif (known.type is int or is_optional and value is not None) and (
            type(value) is not int or not 0 <= value < 2**31
        ):
            raise UserError(f"config.json gives {known.name} as {value!r}: give a whole number")


def rope_theta(hf_config: dict) -> float:
    """The rotary base, from either place where transformers writes it (4.x: rope_theta, 5.x: rope_parameters)."""
    return float(rope_options(hf_config).get("rope_theta", hf_config.get("rope_theta", 10000.0)))


def rope_extension(hf_config: dict, supported: tuple[str, ...], *, gives_mscale: bool) -> dict:
    """The context extension that config.json asks for, as the attribute of `ModelDims`; empty where there is none.

    Args:
        supported: transformers' names of the kinds that the model may have; Llama 3.1's is left to its spec.
        gives_mscale: whether its scores are scaled by what the config calls mscale_all_dim; else its tables of cosines
            and sines are, by transformers' default, which comes to the same where whole heads are rotated.

    Raises:
        UserError: a kind that is not ``supported``, or variants of YaRN that MindFormers lacks.
    """
    options = rope_options(hf_config)
    kind = options.get("rope_type", options.get("type", "default"))
    if kind == "default":
        return {}
    if kind not in supported:
        choices = " and ".join(map(repr, ("default", *supported)))
        are = f"{choices} are" if supported else "only the default rotary embedding is"
        raise UserError(f"config.json asks for rope_type={kind!r}: {are} supported")
    if kind == "linear":
        factor = float(options["factor"]) if "factor" in options else _missing("factor", kind)
        if not factor > 0:
            raise UserError(f"config.json asks for rope_type 'linear' with factor={factor!r}: give a positive number")
        return {"rope_factor": factor}
    return {"yarn": _yarn_dims(hf_config, options, gives_mscale)} if kind == "yarn" else {}


def _yarn_dims(hf_config: dict, options: dict, gives_mscale: bool) -> YarnDims:
    mscale = float(options.get("mscale") or 1.0)
    if not gives_mscale:
        given = [key for key in ("mscale", "mscale_all_dim") if options.get(key) is not None]
        if given:
            raise UserError(f"config.json has {given[0]} for YaRN, which is not supported for this model: remove it")
    elif float(options.get("mscale_all_dim") or 0.0) != mscale:
        raise UserError(
            f"config.json has mscale={options.get('mscale')!r} and mscale_all_dim={options.get('mscale_all_dim')!r}: "
            "only equal ones are supported"
        )
    if options.get("truncate", True) is not True or options.get("attention_factor") is not None:
        raise UserError("config.json has truncate or attention_factor for YaRN: only their defaults are supported")
    return YarnDims(
        factor=float(options["factor"]) if "factor" in options else _missing("factor"),
        original_length=positive_int({**hf_config, **options}, "original_max_position_embeddings"),
        beta_fast=float(options.get("beta_fast") or 32),
        beta_slow=float(options.get("beta_slow") or 1),
        mscale=mscale,
    )


def rope_options(hf_config: dict) -> dict:
    """Return the rotary settings of config.json, in the place of transformers 5 or 4."""
    options = hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {}
    if not isinstance(options, dict):
        raise UserError(f"config.json has rope parameters {options!r}: give a mapping")
    return options


def rotary_dim(hf_config: dict) -> int | None:
    """Channels of a head that are rotated, by `partial_rotary_factor`; None for all."""
    heads = positive_int(hf_config, "num_attention_heads")
    head_dim = hf_config.get("head_dim") or positive_int(hf_config, "hidden_size") // heads
    share = rope_options(hf_config).get("partial_rotary_factor", hf_config["partial_rotary_factor"])
    size = int(head_dim * share)
    if not 0 < size <= head_dim or size % 2:
        raise UserError(
            f"config.json has partial_rotary_factor={share!r} of heads of {head_dim} channels: an even number of "
            "channels, at most all, must be rotated"
        )
    return size if size < head_dim else None


def _missing(key: str, kind: str = "YaRN"):
    raise UserError(f"config.json asks for {kind} without {key!r}: add it to rope_scaling")
