"""Estimated activation memory of one decoder layer, and of the vocabulary projection.

The accounting is that of Korthikanti et al. 2022 (arXiv:2205.05198, section 4): add up what each operator must keep for
its backward pass. Their layer, equation (1), is s*b*h*(34 + 5*a*s/h) bytes; tensor parallelism divides some of its
terms, equation (2), sequence parallelism the rest, equation (4). Here it is carried over to today's layers:

- FlashAttention keeps its inputs, its output and two statistics per head and token instead of the a*s*s scores
  (Dao et al. 2022, arXiv:2205.14135), so the term 5*a*s/h is gone;
- grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245): keys and values have a width of their own;
- multi-head latent attention (DeepSeek-AI 2024, arXiv:2412.19437, section 2.1.1): so have the latents, which no rank
  cuts;
- gated MLP: two first projections, their activation and their product; no dropout, no biases that need masks;
- RMSNorm runs in float32: its input is kept with 4 bytes;
- with sequence parallelism MindSpore keeps the gathered inputs of the column-parallel projections (the paper gathers
  them anew), so these are not divided;
- linear attention by the gated delta rule: projections in the compute dtype; rows of the convolution, unit queries and
  keys, values, outputs and gates in float32; a state for each head and chunk of tokens, and no scores;
- experts: each token is held once per expert that it is sent to; tokens are spread evenly, but for
  ``EXPERT_IMBALANCE``.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace

from mindrlhf.config.memory import ACTIVATION, ATTENTION, NORMS
from mindrlhf.layout.layout import Layout
from mindrlhf.specs import CHUNK_TOKENS, LinearDims, ModelDims, ModelSpec

# The fullest rank's tokens over the mean one's. The router balances over a batch, not over a micro-batch.
EXPERT_IMBALANCE = 1.5
# FlashAttention on Ascend keeps maximum and sum of the softmax, each as 8 float32 values per head and token.
SOFTMAX_STATISTICS_BYTES = 2 * 8 * 4
NORM_BYTES = 4
# Arrays of maps in mindrlhf/models/gated_delta.py that live at a time.
MAP_COPIES = 6
_NO_SOFTMAX = dict.fromkeys(("num_heads", "query", "key", "value", "context", "normed_heads"), 0)
# Of every logit, in float32: the logit, its log-softmax, its probability and their product (for the entropy) or the
# gradient; besides the projection's result in the compute dtype.
LOGIT_FLOAT32_COPIES = 4


@dataclass(frozen=True)
class LayerWidths:
    """Channels per token in one decoder layer, before any sharding.

    Attributes:
        hidden: of the residual stream.
        num_heads: query heads.
        query, key, value, context: of the attention's inputs and output.
        latents: of compressed projections that every tensor-parallel rank holds whole (latent attention).
        normed_heads: of queries and keys that are normalised per head.
        normed_outputs: of the results of attention and MLP where they are normalised.
        projected: of linear attention's projections; 0 in a layer of softmax attention, which has those above.
        delta: of what linear attention keeps in float32.
        states: numbers for each token of the states that go from chunk to chunk.
        maps: numbers for each token of what a chunk does to states.
        mlp: of the dense gated MLP; 0 without one.
        shared: of the expert that sees every token, whole on every rank; 0 without one.
        expert: of one routed expert; 0 in dense layers.
        experts_per_token: routed experts that see a token.
        num_experts: routed experts.
    """

    hidden: int
    num_heads: int
    query: int
    key: int
    value: int
    context: int
    latents: int = 0
    normed_heads: int = 0
    normed_outputs: int = 0
    projected: int = 0
    delta: int = 0
    states: int = 0
    maps: int = 0
    mlp: int = 0
    shared: int = 0
    expert: int = 0
    experts_per_token: int = 0
    num_experts: int = 0


def model_widths(spec: ModelSpec, dims: ModelDims, *, shares_prompts: bool = False) -> list[LayerWidths]:
    """Return the widths of every decoder layer; with ``shares_prompts`` linear attention has a prompt's state too."""
    query, key = dims.num_heads * dims.head_dim, dims.num_kv_heads * dims.head_dim
    value, latents = key, 0
    normed_heads = query + key if spec.mcore_config(dims)["qk_layernorm"] else 0
    context = query
    if dims.latent is not None:
        value = context = dims.num_heads * dims.latent.value_dim
        latents = (dims.latent.query_rank or 0) + dims.latent.kv_rank + dims.latent.rope_dim
        normed_heads = 0  # it is the latents that are normalised
    attention = LayerWidths(
        hidden=dims.hidden_size,
        num_heads=dims.num_heads,
        query=query,
        key=key,
        value=value,
        context=context,
        latents=latents,
        normed_heads=normed_heads,
        normed_outputs=2 * dims.hidden_size if dims.norms_outputs else 0,
    )
    dense = replace(attention, mlp=dims.intermediate_size)
    if dims.linear is not None:
        linear = replace(dense, **_NO_SOFTMAX, **_delta_widths(dims.linear, 2 if shares_prompts else 1))
        return [linear if dims.is_linear(layer) else dense for layer in range(dims.num_layers)]
    if dims.experts is None:
        return [dense] * dims.num_layers
    routed = replace(
        attention,
        shared=dims.experts.shared_size,
        expert=dims.experts.intermediate_size,
        experts_per_token=dims.experts.num_active,
        num_experts=dims.experts.num_experts,
    )
    return [routed if dims.has_experts(layer) else dense for layer in range(dims.num_layers)]


def _delta_widths(linear: LinearDims, num_states: int) -> dict[str, int]:
    """Return the widths that layers of linear attention alone have.

    Kept in float32 are the rows of the convolution before and after, queries and keys of length 1, values, outputs
    before and after their norm, the gate, and the inverses of chunks.
    """
    heads, size = linear.value_heads, num_states * linear.key_dim
    return {
        "projected": linear.conv_size + 2 * linear.value_size + 2 * heads,
        "delta": 2 * linear.conv_size + 3 * linear.key_size + 3 * linear.value_size + (4 + CHUNK_TOKENS) * heads,
        "states": heads * size * linear.value_dim // CHUNK_TOKENS,
        "maps": heads * size * size // CHUNK_TOKENS,
    }


def work_bytes(widths: LayerWidths, layout: Layout, num_tokens: int) -> int:
    """Return what the maps of chunks take while they are composed: they are kept by no layer."""
    return MAP_COPIES * 4 * widths.maps * num_tokens // layout.model_parallel


def layer_bytes(
    widths: LayerWidths, layout: Layout, num_tokens: int, element_bytes: int, recomputed: Collection[str] = ()
) -> int:
    """Return what one layer keeps for its backward pass on one rank.

    Args:
        num_tokens: positions of the micro-batch on this rank, after context parallelism.
        element_bytes: of the compute dtype.
        recomputed: operators that are computed again, of `memory.recompute_operators`.
    """
    tensor, sequence = layout.model_parallel, _sequence_split(layout)
    # Two norms: their float32 inputs are sharded by sequence parallelism, their outputs are gathered.
    per_token = 2 * widths.hidden * NORM_BYTES / sequence + 2 * widths.hidden * element_bytes
    # The results of attention and MLP, before they are added to the residual stream.
    per_token += (2 * widths.hidden * element_bytes + widths.normed_outputs * NORM_BYTES) / sequence
    per_token += widths.latents * (element_bytes + NORM_BYTES)
    # Queries and keys are kept before and after the rotation.
    attention = 2 * (widths.query + widths.key) + widths.value + widths.context
    per_token += (attention * element_bytes + widths.normed_heads * NORM_BYTES) / tensor
    per_token += widths.num_heads * SOFTMAX_STATISTICS_BYTES / tensor
    per_token += (widths.projected * element_bytes + 4 * (widths.delta + widths.states)) / tensor
    # Both first projections, the activation of one, the product of both.
    per_token += 4 * widths.mlp * element_bytes / tensor
    per_token += _expert_bytes(widths, element_bytes) / sequence
    per_token -= sum(_recomputed_bytes(operator, widths, layout, element_bytes) for operator in recomputed)
    return round(num_tokens * per_token)


def _recomputed_bytes(operator: str, widths: LayerWidths, layout: Layout, element_bytes: int) -> float:
    """Bytes of one token that recomputing an operator saves: those between its inputs and outputs."""
    tensor = layout.model_parallel
    if operator == NORMS:  # the casts of their inputs to float32; and their outputs, unless those are gathered
        split = _sequence_split(layout)
        gathered = 2 * widths.hidden * (element_bytes if split == 1 else 0)
        return gathered + (2 * widths.hidden + widths.normed_outputs) * (NORM_BYTES - element_bytes) / split
    if operator == ATTENTION:
        return (widths.context * element_bytes + widths.num_heads * SOFTMAX_STATISTICS_BYTES) / tensor
    return (2 if operator == ACTIVATION else 4) * widths.mlp * element_bytes / tensor


def checkpoint_bytes(widths: LayerWidths, layout: Layout, num_tokens: int, element_bytes: int) -> int:
    """Return what one layer keeps with recomputation: its input (Korthikanti et al. 2022, section 5)."""
    return num_tokens * widths.hidden * element_bytes // _sequence_split(layout)


def logit_bytes(dims: ModelDims, layout: Layout, num_tokens: int, element_bytes: int, tile: int = 0) -> int:
    """Return the bytes of the logits that exist at a time, ``tile`` positions or all, with their float32 copies."""
    num_logits = min(tile or num_tokens, num_tokens) * (dims.vocab_size // layout.model_parallel)
    return num_logits * logit_width(element_bytes)


def head_gradient_bytes(dims: ModelDims, layout: Layout, num_tokens: int, element_bytes: int, tile: int) -> int:
    """Return the memory of the head's gradient while it is added up over tiles of positions; 0 where nothing is.

    The sum is float32; a tile's product is in the compute dtype and in float32, and is added into a new array.
    """
    if not 0 < tile < num_tokens:
        return 0
    return (12 + element_bytes) * dims.hidden_size * (dims.vocab_size // layout.model_parallel)


def logit_width(element_bytes: int) -> int:
    """Return the bytes of one logit with its float32 copies."""
    return element_bytes + LOGIT_FLOAT32_COPIES * 4


def _sequence_split(layout: Layout) -> int:
    return layout.model_parallel if layout.use_seq_parallel else 1


def _expert_bytes(widths: LayerWidths, element_bytes: int) -> float:
    """Bytes of one token in its experts: sent there, four times the expert's width, sent back."""
    if not widths.num_experts:
        return 0.0
    routed = widths.experts_per_token * (2 * widths.hidden + 4 * widths.expert) * element_bytes * EXPERT_IMBALANCE
    # The router's scores and probabilities are float32.
    return routed + 4 * widths.shared * element_bytes + 2 * widths.num_experts * 4
