"""The semi-auto-parallel cells of a run: the one factory behind training, strategy files, plans and their tests."""

import dataclasses
import math
from collections.abc import Callable

from mindspore import nn
from mindspore.nn.utils import no_init_parameters
from mindspore.ops.operations import Morph

from mindrlhf.algorithms.logprobs import PolicyLogProbs
from mindrlhf.algorithms.scores import TokenScores
from mindrlhf.config.memory import WHOLE, MemorySection
from mindrlhf.config.model import ModelSection
from mindrlhf.config.training import OptimizerSection, ParallelSection
from mindrlhf.layout.layout import Layout, parameter_layouts
from mindrlhf.layout.parameter import ParameterLayout
from mindrlhf.layout.rows import num_logprob_micro_batches
from mindrlhf.models.causal_lm import CausalLM, build_model
from mindrlhf.models.lora.model import Lora
from mindrlhf.specs.lora import AdaptedRules, LoraOptions
from mindrlhf.training.optimizers import make_optimizer, matrices_of
from mindrlhf.training.sharded.cells import ParallelLogProbs, ParallelUpdate
from mindrlhf.training.sharded.losses import (
    ShardedCoefficientLoss,
    ShardedLoss,
    ShardedPolicyLoss,
    ShardedSupervisedLoss,
    ShardedValueLoss,
)

_ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}


def layout_of(parallel: ParallelSection) -> Layout:
    """Return the layout of a `parallel_config` whose `data_parallel` is filled in."""
    sizes = (parallel.data_parallel, parallel.model_parallel, parallel.pipeline_stage, parallel.context_parallel)
    return Layout.from_config(parallel, math.prod(sizes))


def build_policy(
    hf_config: dict,
    model: ModelSection,
    parallel: ParallelSection,
    *,
    row_length: int,
    temperature: float,
    memory: MemorySection = WHOLE,
    shared_prompts: bool = False,
    num_image_rows: int = 1,
    lora: LoraOptions | None = None,
) -> PolicyLogProbs:
    """Return the log-probabilities of a model without data: its parameters get shards once a graph is compiled.

    Args:
        hf_config: its config.json.
        model: dtypes and recomputation.
        memory: of its logits and activations.
        parallel: the layout, with `data_parallel` filled in.
        row_length: longest row.
        temperature: of sampling.
        shared_prompts, num_image_rows: of its rows; see :func:`mindrlhf.models.causal_lm.build_model`.
        lora: the adapters that are trained in place of the model; None trains all of it.

    Raises:
        UserError: the model is unknown, or cannot be sharded this way.
    """
    with no_init_parameters():  # they would take the memory of the whole model
        network = _build_network(hf_config, model, parallel, memory, row_length, shared_prompts, lora, num_image_rows)
        policy = PolicyLogProbs(network, temperature, "ascend", memory.head_tile)
    _place_in_last_stage(policy, policy.token_logprobs, parallel)
    return policy


def build_value_model(
    hf_config: dict,
    model: ModelSection,
    parallel: ParallelSection,
    *,
    row_length: int,
    memory: MemorySection = WHOLE,
    shared_prompts: bool = False,
    num_image_rows: int = 1,
    lora: LoraOptions | None = None,
) -> TokenScores:
    """Return a critic without data, from the config.json of its scoring form; else as :func:`build_policy`."""
    with no_init_parameters():
        network = _build_network(hf_config, model, parallel, memory, row_length, shared_prompts, lora, num_image_rows)
        critic = TokenScores(network, after_token=False)
    _place_in_last_stage(critic, critic.projection, parallel)
    return critic


def _build_network(
    hf_config: dict,
    model: ModelSection,
    parallel: ParallelSection,
    memory: MemorySection,
    row_length: int,
    shared_prompts: bool,
    lora: LoraOptions | None,
    num_image_rows: int = 1,
) -> CausalLM:
    network = build_model(
        hf_config,
        seq_length=row_length,
        compute_dtype=model.compute_dtype,
        param_dtype=model.param_dtype,
        device="ascend",
        parallel_config=dataclasses.asdict(parallel),
        recompute=model.recompute,
        memory=memory,
        shared_prompts=shared_prompts,
        num_image_rows=num_image_rows,
    )
    if lora is not None:
        stages = layout_of(parallel).layer_stages(network.dims.num_layers)
        network.lora = Lora(network, lora, model.path, "ascend", stages)
    return network


def _place_in_last_stage(model: nn.Cell, output: nn.Cell, parallel: ParallelSection) -> None:
    if parallel.pipeline_stage > 1:
        output.pipeline_stage = parallel.pipeline_stage - 1
        _forget_side_effects(model)


def build_logprobs(policy: PolicyLogProbs | TokenScores, parallel: ParallelSection) -> ParallelLogProbs:
    """Return the cell that computes the log-probabilities of ``policy``, or a critic's values, without gradients."""
    return ParallelLogProbs(policy, num_logprob_micro_batches(parallel))


def _forget_side_effects(model: nn.Cell) -> None:
    """Tell the compiler that the functions of local shards (Morphs) do no input or output, as it must assume.

    It keeps such calls in order, over all stages; and the last stage of a pipeline without gradients, from which the
    calls of the other stages are cut away, would not compile (MindSpore 2.9.0).
    """
    for _, cell in model.cells_and_names():
        for value in vars(cell).values():
            if isinstance(value, Morph):
                value.del_prim_attr("side_effect_io")


def build_update(
    policy: PolicyLogProbs,
    make_loss: Callable[[nn.Cell], nn.Cell],
    options: OptimizerSection,
    parallel: ParallelSection,
) -> ParallelUpdate:
    """Return the cell of an update of ``policy``.

    Args:
        policy: of :func:`build_policy`.
        make_loss: builds a :class:`mindrlhf.algorithms.losses.PolicyLoss` over a policy.
        options: of the optimiser.
        parallel: as for the policy.
    """
    shares = (parallel.data_parallel, parallel.context_parallel)
    with no_init_parameters():
        return _build_update(ShardedPolicyLoss(policy, make_loss, shares), options, parallel)


def build_value_update(
    critic: TokenScores, clip_range: float, options: OptimizerSection, parallel: ParallelSection
) -> ParallelUpdate:
    """Return the cell of an update of a critic.

    Args:
        critic: of :func:`build_value_model`.
        clip_range: of :class:`mindrlhf.algorithms.value_loss.ValueLoss`.
        options, parallel: of :func:`build_update`.
    """
    shares = (parallel.data_parallel, parallel.context_parallel)
    with no_init_parameters():
        return _build_update(ShardedValueLoss(critic, clip_range, shares), options, parallel)


def build_supervised_update(
    policy: PolicyLogProbs, options: OptimizerSection, parallel: ParallelSection
) -> ParallelUpdate:
    """Return the cell of an update of supervised fine-tuning; arguments as for :func:`build_update`."""
    shares = (parallel.data_parallel, parallel.context_parallel)
    with no_init_parameters():
        return _build_update(ShardedSupervisedLoss(policy, shares), options, parallel)


def build_coefficient_update(
    policy: PolicyLogProbs | TokenScores, options: OptimizerSection, parallel: ParallelSection
) -> ParallelUpdate:
    """Return the cell of an update by derivatives that the host computes, of a policy or of a scoring model.

    Args:
        policy: of :func:`build_policy` or :func:`build_value_model`.
        options, parallel: of :func:`build_update`.
    """
    shares = (parallel.data_parallel, parallel.context_parallel)
    with no_init_parameters():
        return _build_update(ShardedCoefficientLoss(policy, shares), options, parallel)


def _build_update(loss: ShardedLoss, options: OptimizerSection, parallel: ParallelSection) -> ParallelUpdate:
    network, layout = loss.policy.model, layout_of(parallel)
    layouts = {one.name: one for one in network_layouts(network, layout)}
    optimizer = make_optimizer(network.trainable_params(), options, matrices_of(network), layouts)
    num_replicas = {name: one.num_replicas for name, one in layouts.items()}
    return ParallelUpdate(loss, optimizer, options.max_grad_norm, parallel, num_replicas, layout.world_size)


def network_layouts(network: CausalLM, layout: Layout) -> list[ParameterLayout]:
    """Return how the parameters of a model lie on the ranks; see :func:`mindrlhf.layout.layout.parameter_layouts`."""
    element_bytes = _ELEMENT_BYTES[str(network.head_weight.dtype).lower()]
    adapted = network.lora and AdaptedRules(network.spec, network.dims, network.lora.options)
    return parameter_layouts(adapted or network.spec, network.dims, layout, element_bytes)
