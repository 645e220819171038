"""DeepSeek-V3: latent attention, shared and routed experts. arXiv:2412.19437, section 2.1."""

from mindrlhf.errors import UserError
from mindrlhf.specs.dims import ExpertDims, LatentDims, ModelDims, positive_int
from mindrlhf.specs.model import ModelSpec
from mindrlhf.specs.rules import (
    BLOCK,
    EMBEDDING,
    EXPERTS,
    FINAL_NORM,
    INPUT_NORM,
    LAYER,
    MLP,
    MLP_NORM,
    OUTPUT,
    ROUTER,
    SELECTION_BIAS,
    SHARED_EXPERT,
    ParameterRule,
    norm,
)

# The score of a group of experts is the sum of its best two.
_BEST_OF_GROUP = 2


def _read_dims(hf_config: dict) -> dict:
    _check_variant(hf_config)
    latent = LatentDims(
        query_rank=positive_int(hf_config, "q_lora_rank") if hf_config.get("q_lora_rank") is not None else None,
        kv_rank=positive_int(hf_config, "kv_lora_rank"),
        nope_dim=positive_int(hf_config, "qk_nope_head_dim"),
        rope_dim=positive_int(hf_config, "qk_rope_head_dim"),
        value_dim=positive_int(hf_config, "v_head_dim"),
    )
    if latent.value_dim > latent.nope_dim + latent.rope_dim:
        raise UserError(
            f"config.json has v_head_dim={latent.value_dim}: MindFormers wants at most qk_nope_head_dim + "
            f"qk_rope_head_dim = {latent.nope_dim + latent.rope_dim}"
        )
    return {
        "latent": latent,
        "head_dim": latent.nope_dim + latent.rope_dim,
        "experts": sigmoid_experts(hf_config),
        "num_draft_layers": hf_config.get("num_nextn_predict_layers") or 0,
    }


def _check_variant(hf_config: dict) -> None:
    wanted = {
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "moe_layer_freq": 1,
        "rope_interleave": True,
    }
    for key, value in wanted.items():
        if hf_config.get(key, value) != value:
            raise UserError(f"config.json has {key}={hf_config[key]!r}: only {value!r} is supported")


def sigmoid_experts(hf_config: dict) -> ExpertDims:
    """Experts that are chosen by biased sigmoids, beside shared ones, in all layers but the first few.

    Raises:
        UserError: the numbers contradict each other, or MindFormers has no such router.
    """
    num_layers = positive_int(hf_config, "num_hidden_layers")
    num_dense = hf_config.get("first_k_dense_replace", 0)
    num_experts, num_active = (positive_int(hf_config, key) for key in ("n_routed_experts", "num_experts_per_tok"))
    num_groups, num_active_groups = hf_config.get("n_group") or 1, hf_config.get("topk_group") or 1
    size = positive_int(hf_config, "moe_intermediate_size")
    if num_experts % num_groups or num_active_groups > num_groups:
        raise UserError(
            f"config.json has n_group={num_groups} and topk_group={num_active_groups}: the first must divide "
            f"n_routed_experts={num_experts}, the second must not be larger than the first"
        )
    if num_active > num_experts // num_groups * num_active_groups:
        raise UserError(
            f"config.json has num_experts_per_tok={num_active}: {num_active_groups} of {num_groups} groups have only "
            f"{num_experts // num_groups * num_active_groups} experts"
        )
    if num_groups > 1 and num_active != _BEST_OF_GROUP * num_active_groups:
        raise UserError(
            f"config.json has num_experts_per_tok={num_active} and topk_group={num_active_groups}: MindFormers scores "
            f"groups by the best {_BEST_OF_GROUP} experts only when the first is {_BEST_OF_GROUP} times the second"
        )
    return ExpertDims(
        num_experts=num_experts,
        num_active=num_active,
        intermediate_size=size,
        shared_size=size * (hf_config.get("n_shared_experts") or 0),
        layers=tuple(layer >= num_dense for layer in range(num_layers)),
        score_function="sigmoid",
        normalized=bool(hf_config.get("norm_topk_prob", True)),
        scale=float(hf_config.get("routed_scaling_factor", 1.0)),
        num_groups=num_groups,
        num_active_groups=num_active_groups,
        selection_bias=True,
    )


def _query(dims: ModelDims) -> int:
    return dims.num_heads * dims.head_dim


def _projection(hf_name: str, mf_name: str, rows, columns, shard_axis: int | None, **options) -> ParameterRule:
    return ParameterRule(
        (f"{LAYER}self_attn.{hf_name}.weight",),
        f"{BLOCK}self_attention.{mf_name}.weight",
        "copy",
        lambda dims: ((rows(dims), columns(dims)),),
        shard_axis=shard_axis,
        **options,
    )


def _compresses_queries(dims: ModelDims) -> bool:
    return dims.latent.query_rank is not None


# The projections to the small latents are whole on every rank; tensor parallelism splits the heads made of them.
_LATENT_ATTENTION = (
    _projection(
        "q_proj",
        "linear_q_proj",
        _query,
        lambda dims: dims.hidden_size,
        shard_axis=0,
        present=lambda dims: not _compresses_queries(dims),
    ),
    _projection(
        "q_a_proj",
        "linear_q_down_proj",
        lambda dims: dims.latent.query_rank,
        lambda dims: dims.hidden_size,
        shard_axis=None,
        present=_compresses_queries,
    ),
    norm(
        f"{LAYER}self_attn.q_a_layernorm.weight",
        f"{BLOCK}self_attention.q_layernorm.weight",
        lambda dims: dims.latent.query_rank,
        present=_compresses_queries,
    ),
    _projection(
        "q_b_proj",
        "linear_q_up_proj",
        _query,
        lambda dims: dims.latent.query_rank,
        shard_axis=0,
        present=_compresses_queries,
    ),
    _projection(
        "kv_a_proj_with_mqa",
        "linear_kv_down_proj",
        lambda dims: dims.latent.kv_rank + dims.latent.rope_dim,
        lambda dims: dims.hidden_size,
        shard_axis=None,
    ),
    norm(
        f"{LAYER}self_attn.kv_a_layernorm.weight",
        f"{BLOCK}self_attention.kv_layernorm.weight",
        lambda dims: dims.latent.kv_rank,
    ),
    _projection(
        "kv_b_proj",
        "linear_kv_up_proj",
        lambda dims: dims.num_heads * (dims.latent.nope_dim + dims.latent.value_dim),
        lambda dims: dims.latent.kv_rank,
        shard_axis=0,
    ),
    _projection(
        "o_proj",
        "linear_proj",
        lambda dims: dims.hidden_size,
        lambda dims: dims.num_heads * dims.latent.value_dim,
        shard_axis=1,
    ),
)

DEEPSEEK_V3 = ModelSpec(
    name="deepseek_v3",
    hf_architecture="DeepseekV3ForCausalLM",
    mcore_options={"add_qkv_bias": False, "qk_layernorm": True},
    parameter_rules=(
        EMBEDDING,
        INPUT_NORM,
        *_LATENT_ATTENTION,
        MLP_NORM,
        *MLP,
        ROUTER,
        SELECTION_BIAS,
        *EXPERTS,
        *SHARED_EXPERT,
        FINAL_NORM,
        OUTPUT,
    ),
    unsupported={
        "attention_bias": "DeepSeek-V3 with attention biases is not supported",
        "quantization_config": (
            "only float32, float16 and bfloat16 are read: dequantise it, fp8 by mindrlhf weights convert"
        ),
    },
    read_dims=_read_dims,
    rope_types=("yarn",),
)
