"""One `ModelSpec` per architecture: how MindFormers builds it, its weight names, and how each weight is sharded.

Everything here is plain data and Python: it imports neither MindSpore nor MindFormers, so that conversion,
planning and the weight board can read it anywhere.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from mindrlhf.errors import UserError


@dataclass(frozen=True)
class ModelDims:
    """The sizes and switches of one model, read from its Hugging Face config.json.

    Attributes:
        num_layers: decoder layers.
        hidden_size: width of the residual stream.
        intermediate_size: width of the gated MLP.
        num_heads: query heads.
        num_kv_heads: key/value heads (groups); divides `num_heads`.
        head_dim: channels per head.
        vocab_size: rows of the embedding.
        rms_norm_eps: epsilon of every RMSNorm.
        rope_theta: base of the rotary position embedding.
        initializer_range: standard deviation of random weights.
        tied: the output projection is the embedding itself.
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

    @property
    def heads_per_group(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True)
class ParameterRule:
    """How one MindFormers parameter corresponds to one or more Hugging Face tensors.

    Attributes:
        hf_names: Hugging Face names; `{layer}` stands for the layer index.
        mf_name: MindFormers (mcore) name.
        transform: `copy`, `qkv` (per group: r query heads, one key head, one value head) or `gate_up` (rows alternate).
        shape: Hugging Face shapes, in the order of `hf_names`.
        shard_axis: the axis that tensor parallelism splits, the same in both layouts; None when replicated.
        present: whether a model of these dimensions has the parameter.
        expert_axis: the axis of the MindFormers parameter that expert parallelism splits; None when it does not.
    """

    hf_names: tuple[str, ...]
    mf_name: str
    transform: str
    shape: Callable[[ModelDims], tuple[tuple[int, ...], ...]]
    shard_axis: int | None
    present: Callable[[ModelDims], bool] = lambda dims: True
    expert_axis: int | None = None

    def for_layer(self, layer: int) -> "ParameterRule":
        """Return the rule with `{layer}` filled in."""
        return replace(
            self,
            hf_names=tuple(name.format(layer=layer) for name in self.hf_names),
            mf_name=self.mf_name.format(layer=layer),
        )

    def mf_shape(self, dims: ModelDims) -> tuple[int, ...]:
        """Shape of the MindFormers parameter: the parts stacked along their first axis."""
        shapes = self.shape(dims)
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])


@dataclass(frozen=True)
class ModelSpec:
    """One architecture.

    Attributes:
        name: short name used in messages and file names.
        hf_architecture: the value of `architectures[0]` in config.json.
        model_type: the value of `model_type` in config.json.
        mcore_options: `TransformerConfig` keys that the architecture fixes.
        parameter_rules: rules of the parameters outside and inside (`{layer}`) the decoder layers.
        unsupported: config.json keys whose truth makes a variant that is not supported, with the reason.
    """

    name: str
    hf_architecture: str
    model_type: str
    mcore_options: dict
    parameter_rules: tuple[ParameterRule, ...]
    unsupported: dict[str, str]

    def dims(self, hf_config: dict) -> ModelDims:
        """Read the sizes from config.json.

        Raises:
            UserError: a size is missing, contradictory, or the config asks for an unsupported variant.
        """
        for key, reason in self.unsupported.items():
            if hf_config.get(key):
                raise UserError(f"config.json has {key}={hf_config[key]!r}: {reason}")
        if hf_config.get("hidden_act", "silu") != "silu":
            raise UserError(f"config.json has hidden_act={hf_config['hidden_act']!r}: only 'silu' is supported")
        num_heads = _positive_int(hf_config, "num_attention_heads")
        hidden_size = _positive_int(hf_config, "hidden_size")
        num_kv_heads = hf_config.get("num_key_value_heads") or num_heads
        if num_heads % num_kv_heads:
            raise UserError(
                f"config.json has num_attention_heads={num_heads} and num_key_value_heads={num_kv_heads}: "
                "the second must divide the first"
            )
        head_dim = hf_config.get("head_dim") or hidden_size // num_heads
        if not hf_config.get("head_dim") and hidden_size % num_heads:
            raise UserError(
                f"config.json has hidden_size={hidden_size} and num_attention_heads={num_heads}: "
                "give head_dim, or make the second divide the first"
            )
        return ModelDims(
            num_layers=_positive_int(hf_config, "num_hidden_layers"),
            hidden_size=hidden_size,
            intermediate_size=_positive_int(hf_config, "intermediate_size"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            vocab_size=_positive_int(hf_config, "vocab_size"),
            rms_norm_eps=float(hf_config.get("rms_norm_eps", 1e-6)),
            rope_theta=_rope_theta(hf_config),
            initializer_range=float(hf_config.get("initializer_range", 0.02)),
            tied=bool(hf_config.get("tie_word_embeddings", False)),
        )

    def rules(self, dims: ModelDims) -> list[ParameterRule]:
        """Every rule of a model of these dimensions, `{layer}` filled in, in the order of the forward pass."""
        present = [rule for rule in self.parameter_rules if rule.present(dims)]
        per_layer = [rule for rule in present if "{layer}" in rule.mf_name]
        first = present.index(per_layer[0])
        before = [rule for rule in present[:first] if rule not in per_layer]
        after = [rule for rule in present[first:] if rule not in per_layer]
        return before + [rule.for_layer(layer) for layer in range(dims.num_layers) for rule in per_layer] + after

    def mcore_config(self, dims: ModelDims) -> dict:
        """`TransformerConfig` arguments that depend on the architecture alone (no dtypes, no parallelism)."""
        return {
            "num_layers": dims.num_layers,
            "hidden_size": dims.hidden_size,
            "ffn_hidden_size": dims.intermediate_size,
            "num_attention_heads": dims.num_heads,
            "num_query_groups": dims.num_kv_heads,
            "kv_channels": dims.head_dim,
            "vocab_size": dims.vocab_size,
            "layernorm_epsilon": dims.rms_norm_eps,
            "init_method_std": dims.initializer_range,
            "tie_word_embeddings": dims.tied,
            "untie_embeddings_and_output_weights": not dims.tied,
            "rotary_base": dims.rope_theta,
            "position_embedding_type": "rope",
            "normalization": "RMSNorm",
            "hidden_act": "silu",
            "gated_linear_unit": True,
            "add_bias_linear": False,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            **self.mcore_options,
        }


def _positive_int(hf_config: dict, key: str) -> int:
    value = hf_config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise UserError(f"config.json has {key}={value!r}: give a positive integer")
    return value


def _rope_theta(hf_config: dict) -> float:
    """The rotary base, from either place where transformers writes it (4.x: rope_theta, 5.x: rope_parameters)."""
    parameters = hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind != "default":
        raise UserError(f"config.json asks for rope_type={kind!r}: only the default rotary embedding is supported")
    return float(parameters.get("rope_theta", hf_config.get("rope_theta", 10000.0)))


def _query(dims: ModelDims) -> int:
    return dims.num_heads * dims.head_dim


def _key(dims: ModelDims) -> int:
    return dims.num_kv_heads * dims.head_dim


_LAYER = "model.layers.{layer}."
_BLOCK = "decoder.layers.{layer}."
_QKV = ("q_proj", "k_proj", "v_proj")

_EMBEDDING = ParameterRule(
    ("model.embed_tokens.weight",),
    "embedding.word_embeddings.weight",
    "copy",
    lambda dims: ((dims.vocab_size, dims.hidden_size),),
    shard_axis=0,
)
_FINAL_NORM = ParameterRule(
    ("model.norm.weight",),
    "decoder.final_layernorm.weight",
    "copy",
    lambda dims: ((dims.hidden_size,),),
    shard_axis=None,
)
_OUTPUT = ParameterRule(
    ("lm_head.weight",),
    "output_layer.weight",
    "copy",
    lambda dims: ((dims.vocab_size, dims.hidden_size),),
    shard_axis=0,
    present=lambda dims: not dims.tied,
)
_QKV_WEIGHT = ParameterRule(
    tuple(f"{_LAYER}self_attn.{part}.weight" for part in _QKV),
    f"{_BLOCK}self_attention.linear_qkv.weight",
    "qkv",
    lambda dims: ((_query(dims), dims.hidden_size), (_key(dims), dims.hidden_size), (_key(dims), dims.hidden_size)),
    shard_axis=0,
)
_QKV_BIAS = ParameterRule(
    tuple(f"{_LAYER}self_attn.{part}.bias" for part in _QKV),
    f"{_BLOCK}self_attention.linear_qkv.bias",
    "qkv",
    lambda dims: ((_query(dims),), (_key(dims),), (_key(dims),)),
    shard_axis=0,
)
_QK_NORMS = tuple(
    ParameterRule(
        (f"{_LAYER}self_attn.{part}_norm.weight",),
        f"{_BLOCK}self_attention.{part}_layernorm.weight",
        "copy",
        lambda dims: ((dims.head_dim,),),
        shard_axis=None,
    )
    for part in ("q", "k")
)
_INPUT_NORM, _MLP_NORM = (
    ParameterRule(
        (f"{_LAYER}{hf_name}.weight",),
        f"{_BLOCK}{mf_name}.weight",
        "copy",
        lambda dims: ((dims.hidden_size,),),
        shard_axis=None,
    )
    for hf_name, mf_name in (("input_layernorm", "input_layernorm"), ("post_attention_layernorm", "pre_mlp_layernorm"))
)
_ATTENTION_OUTPUT = ParameterRule(
    (f"{_LAYER}self_attn.o_proj.weight",),
    f"{_BLOCK}self_attention.linear_proj.weight",
    "copy",
    lambda dims: ((dims.hidden_size, _query(dims)),),
    shard_axis=1,
)
_MLP = (
    ParameterRule(
        (f"{_LAYER}mlp.gate_proj.weight", f"{_LAYER}mlp.up_proj.weight"),
        f"{_BLOCK}mlp.linear_fc1.weight",
        "gate_up",
        lambda dims: ((dims.intermediate_size, dims.hidden_size),) * 2,
        shard_axis=0,
    ),
    ParameterRule(
        (f"{_LAYER}mlp.down_proj.weight",),
        f"{_BLOCK}mlp.linear_fc2.weight",
        "copy",
        lambda dims: ((dims.hidden_size, dims.intermediate_size),),
        shard_axis=1,
    ),
)

_SLIDING_WINDOW = {"use_sliding_window": "sliding-window attention is not supported; use full attention"}

QWEN2 = ModelSpec(
    name="qwen2",
    hf_architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    mcore_options={"add_qkv_bias": True, "qk_layernorm": False},
    parameter_rules=(
        _EMBEDDING,
        _INPUT_NORM,
        _QKV_WEIGHT,
        _QKV_BIAS,
        _ATTENTION_OUTPUT,
        _MLP_NORM,
        *_MLP,
        _FINAL_NORM,
        _OUTPUT,
    ),
    unsupported=_SLIDING_WINDOW,
)

QWEN3 = ModelSpec(
    name="qwen3",
    hf_architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    mcore_options={"add_qkv_bias": False, "qk_layernorm": True},
    parameter_rules=(
        _EMBEDDING,
        _INPUT_NORM,
        _QKV_WEIGHT,
        *_QK_NORMS,
        _ATTENTION_OUTPUT,
        _MLP_NORM,
        *_MLP,
        _FINAL_NORM,
        _OUTPUT,
    ),
    unsupported={**_SLIDING_WINDOW, "attention_bias": "Qwen3 with attention biases is not supported"},
)

SPECS = {spec.hf_architecture: spec for spec in (QWEN2, QWEN3)}


def find_spec(hf_config: dict) -> ModelSpec:
    """Return the spec that serves `architectures[0]` of a config.json.

    Raises:
        UserError: the architecture is missing or unknown.
    """
    architectures = hf_config.get("architectures")
    architecture = architectures[0] if isinstance(architectures, list) and architectures else None
    if architecture not in SPECS:
        raise UserError(f"config.json has architectures={architectures!r}: the supported ones are {', '.join(SPECS)}")
    return SPECS[architecture]
