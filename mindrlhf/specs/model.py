"""One `ModelSpec` per architecture: how MindFormers builds it, its weight names, and how each weight is sharded."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

from mindrlhf.errors import UserError
from mindrlhf.specs.dims import ModelDims, check_sizes, positive_int, rope_extension, rope_theta
from mindrlhf.specs.rules import ParameterRule

# Lists of this length are made from what a config.json says.
_MAX_LAYERS, _MAX_EXPERTS = 10_000, 1_000_000


@dataclass(frozen=True)
class ModelSpec:
    """One architecture.

    Attributes:
        name: short name used in messages and file names.
        hf_architecture: the value of `architectures[0]` in config.json.
        mcore_options: `TransformerConfig` keys that the architecture fixes, or functions of the sizes for their values.
        parameter_rules: rules of the parameters outside and inside (`{layer}`) the decoder layers.
        unsupported: config.json keys whose truth makes a variant that is not supported, with the reason.
        read_dims: reads the attributes of `ModelDims` that only this architecture has, or has elsewhere.
        rope_types: how rotary embeddings may be extended, by transformers' names.
        yarn_gives_mscale: see :func:`mindrlhf.specs.dims.rope_extension`.
        activation_key, activation: where config.json names the activation of the MLP, and the one that is computed.
        is_scorer: the output is a score for each token instead of a distribution over the next one.
        text_config: the part of config.json that describes the decoder, as config.json of a text model has it, with
            transformers' defaults where they are not those of other architectures.
        text_architecture: what a text model with the same decoder is called; empty where this is one.
        vision_rules: rules of the vision tower; `{layer}` counts its blocks.
    """

    name: str
    hf_architecture: str
    mcore_options: dict
    parameter_rules: tuple[ParameterRule, ...]
    unsupported: dict[str, str]
    read_dims: Callable[[dict], dict] = lambda hf_config: {}
    rope_types: tuple[str, ...] = ()
    yarn_gives_mscale: bool = True
    is_scorer: bool = False
    activation_key: str = "hidden_act"
    activation: str = "silu"
    text_config: Callable[[dict], dict] = lambda hf_config: hf_config
    text_architecture: str = ""
    vision_rules: tuple[ParameterRule, ...] = ()

    def dims(self, hf_config: dict) -> ModelDims:
        """Read the sizes from config.json.

        Raises:
            UserError: a size is missing, contradictory or of the wrong type, or the config asks for an unsupported
                variant.
        """
        hf_config = self.text_config(hf_config)
        if positive_int(hf_config, "num_hidden_layers") > _MAX_LAYERS:
            raise UserError(f"config.json has num_hidden_layers={hf_config['num_hidden_layers']}: it is damaged")
        try:
            dims = self._read_dims(hf_config)
        except UserError:
            raise
        except (TypeError, ValueError, ArithmeticError) as error:
            raise UserError(f"config.json has a size of the wrong type or value ({error}): correct it") from error
        check_sizes(dims)
        if dims.num_layers * dims.num_experts > _MAX_EXPERTS:
            raise UserError(
                f"config.json has {dims.num_experts} experts in each of {dims.num_layers} layers: it is damaged"
            )
        return dims

    def _read_dims(self, hf_config: dict) -> ModelDims:
        for key, reason in self.unsupported.items():
            if hf_config.get(key):
                raise UserError(f"config.json has {key}={hf_config[key]!r}: {reason}")
        if hf_config.get(self.activation_key, self.activation) != self.activation:
            raise UserError(
                f"config.json has {self.activation_key}={hf_config[self.activation_key]!r}: only {self.activation!r} "
                "is supported"
            )
        num_heads = positive_int(hf_config, "num_attention_heads")
        num_kv_heads = (
            positive_int(hf_config, "num_key_value_heads") if hf_config.get("num_key_value_heads") else num_heads
        )
        if num_heads % num_kv_heads:
            raise UserError(
                f"config.json has num_attention_heads={num_heads} and num_key_value_heads={num_kv_heads}: "
                "the second must divide the first"
            )
        sizes = {
            "num_layers": positive_int(hf_config, "num_hidden_layers"),
            "hidden_size": positive_int(hf_config, "hidden_size"),
            "intermediate_size": positive_int(hf_config, "intermediate_size"),
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "vocab_size": positive_int(hf_config, "vocab_size"),
            "rms_norm_eps": float(hf_config.get("rms_norm_eps", 1e-6)),
            "rope_theta": rope_theta(hf_config),
            **rope_extension(hf_config, self.rope_types, gives_mscale=self.yarn_gives_mscale),
            "initializer_range": float(hf_config.get("initializer_range", 0.02)),
            "tied": self.is_scorer or bool(hf_config.get("tie_word_embeddings", False)),
            **self.read_dims(hf_config),
        }
        if "head_dim" not in sizes:
            sizes["head_dim"] = _head_dim(hf_config, num_heads)
        return ModelDims(**sizes)

    def decoder_config(self, hf_config: dict) -> dict:
        """config.json of the text model with this model's decoder: what is compiled where images are not."""
        if not self.text_architecture:
            return hf_config
        return {**self.text_config(hf_config), "architectures": [self.text_architecture]}

    def rules(self, dims: ModelDims) -> list[ParameterRule]:
        """Every rule of a model of these dimensions, `{layer}` filled in, in the order of the forward pass."""
        tower = _filled_in(self.vision_rules, dims, dims.vision.depth) if dims.vision else ()
        return [*tower, *_filled_in(self.parameter_rules, dims, dims.num_layers)]

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
            "hidden_act": dims.activation,
            "gated_linear_unit": True,
            "add_bias_linear": False,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            **_expert_options(dims),
            **_latent_options(dims),
            # Other cells than those for latent attention have no such options, and are given the frequencies instead.
            **(_yarn_options(dims) if dims.latent else {}),
            **{key: value(dims) if callable(value) else value for key, value in self.mcore_options.items()},
        }


def with_num_layers(hf_config: dict, num_layers: int) -> dict:
    """config.json of the same model with another number of decoder layers."""
    changed = {**hf_config, "num_hidden_layers": num_layers}
    if isinstance(hf_config.get("layer_types"), list):
        changed["layer_types"] = hf_config["layer_types"][:num_layers]
    if isinstance(hf_config.get("text_config"), dict):
        changed["text_config"] = {**hf_config["text_config"], "num_hidden_layers": num_layers}
    return changed


@functools.lru_cache(maxsize=16)  # asked for with each publication
def _filled_in(rules: tuple[ParameterRule, ...], dims: ModelDims, num_layers: int) -> tuple[ParameterRule, ...]:
    """Return the rules with those of a layer once for each layer, where the first of them is."""
    present = [rule for rule in rules if rule.present(dims)]
    per_layer = [rule for rule in present if "{layer}" in rule.mf_name]
    first = present.index(per_layer[0])
    before = [rule for rule in present[:first] if rule not in per_layer]
    after = [rule for rule in present[first:] if rule not in per_layer]
    inside = [
        rule.for_layer(layer, dims) for layer in range(num_layers) for rule in per_layer if rule.in_layer(dims, layer)
    ]
    return (*before, *inside, *after)


def _head_dim(hf_config: dict, num_heads: int) -> int:
    hidden_size = hf_config["hidden_size"]
    if not hf_config.get("head_dim") and hidden_size % num_heads:
        raise UserError(
            f"config.json has hidden_size={hidden_size} and num_attention_heads={num_heads}: "
            "give head_dim, or make the second divide the first"
        )
    return hf_config.get("head_dim") or hidden_size // num_heads


def _expert_options(dims: ModelDims) -> dict:
    experts = dims.experts
    if experts is None:
        return {}
    is_grouped = experts.num_groups > 1
    return {
        "num_moe_experts": experts.num_experts,
        "moe_router_topk": experts.num_active,
        "moe_ffn_hidden_size": experts.intermediate_size,
        "shared_expert_num": experts.shared_size // experts.intermediate_size,
        "moe_shared_expert_intermediate_size": experts.shared_size or None,
        "moe_layer_freq": [int(has_experts) for has_experts in experts.layers],
        "moe_router_score_function": experts.score_function,
        "moe_router_pre_softmax": True,
        "norm_topk_prob": experts.normalized,
        "moe_router_topk_scaling_factor": experts.scale,
        "moe_router_num_groups": experts.num_groups if is_grouped else None,
        "moe_router_group_topk": experts.num_active_groups if is_grouped else None,
        "moe_router_enable_expert_bias": experts.selection_bias,
        # The policy loss alone is trained; MindFormers' router wants the name of a balancing loss all the same.
        "moe_router_load_balancing_type": "sub_seq_aux_loss",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_dtype": "float32",
        "moe_grouped_gemm": True,
        "moe_token_dispatcher_type": "alltoall",
    }


def _latent_options(dims: ModelDims) -> dict:
    latent = dims.latent
    if latent is None:
        return {}
    return {
        "multi_latent_attention": True,
        "q_lora_rank": latent.query_rank,
        "kv_lora_rank": latent.kv_rank,
        "qk_head_dim": latent.nope_dim,
        "qk_pos_emb_head_dim": latent.rope_dim,
        "v_head_dim": latent.value_dim,
        "mla_qkv_concat": False,
        # MindFormers scales the scores by YaRN's mscale even without YaRN: a factor of 1 turns that off.
        "rotary_scaling_factor": 1.0,
    }


def _yarn_options(dims: ModelDims) -> dict:
    yarn = dims.yarn
    if yarn is None:
        return {}
    return {
        "position_embedding_type": "yarn",
        "rotary_scaling_factor": yarn.factor,
        "max_position_embeddings": yarn.original_length,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
        "mscale": yarn.mscale,
        "mscale_all_dim": yarn.mscale,
    }
