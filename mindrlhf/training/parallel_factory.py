"""The semi-auto-parallel cells of a run: the one factory behind training, strategy files, plans and their tests."""

import dataclasses
import math
from collections.abc import Callable

from mindspore import nn
from mindspore.nn.utils import no_init_parameters
from mindspore.ops.operations import Morph

from mindrlhf.algorithms.logprobs import PolicyLogProbs
from mindrlhf.config.sections import ModelSection, OptimizerSection, ParallelSection
from mindrlhf.models.causal_lm import CausalLM, build_model
from mindrlhf.parallel.layout import Layout, parameter_layouts
from mindrlhf.parallel.parameter_layout import ParameterLayout
from mindrlhf.parallel.rows import num_logprob_pieces
from mindrlhf.training.cells import make_optimizer
from mindrlhf.training.parallel_cells import ParallelLogProbs, ParallelUpdate, ShardedPolicyLoss
from mindrlhf.training.parallel_optimizer import WithholdableAdamW

_ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}


def layout_of(parallel: ParallelSection) -> Layout:
    """Return the layout of a `parallel_config` whose `data_parallel` is filled in."""
    sizes = (parallel.data_parallel, parallel.model_parallel, parallel.pipeline_stage, parallel.context_parallel)
    return Layout.from_config(parallel, math.prod(sizes))


def build_policy(
    hf_config: dict, model: ModelSection, parallel: ParallelSection, *, row_length: int, temperature: float
) -> PolicyLogProbs:
    """Return the log-probabilities of a model without data: its parameters get slices once a graph is compiled.

    Args:
        hf_config: its config.json.
        model: dtypes and recomputation.
        parallel: the layout, with `data_parallel` filled in.
        row_length: longest row.
        temperature: of sampling.

    Raises:
        UserError: the model is unknown, or cannot be cut this way.
    """
    with no_init_parameters():  # they would take the memory of the whole model
        network = build_model(
            hf_config,
            seq_length=row_length,
            compute_dtype=model.compute_dtype,
            param_dtype=model.param_dtype,
            device="ascend",
            parallel_config=dataclasses.asdict(parallel),
            recompute=model.recompute,
        )
        policy = PolicyLogProbs(network, temperature, "ascend")
    if parallel.pipeline_stage > 1:
        policy.token_logprobs.pipeline_stage = parallel.pipeline_stage - 1
        _forget_side_effects(policy)
    return policy


def build_logprobs(policy: PolicyLogProbs, parallel: ParallelSection) -> ParallelLogProbs:
    """Return the cell that computes the log-probabilities of ``policy`` without gradients."""
    return ParallelLogProbs(policy, num_logprob_pieces(parallel))


def _forget_side_effects(policy: PolicyLogProbs) -> None:
    """Tell the compiler that the functions of local slices (Morphs) do no input or output, as it must assume.

    It keeps such calls in order, over all stages; and the last stage of a pipeline without gradients, from which the
    calls of the other stages are cut away, would not compile (MindSpore 2.9.0).
    """
    for _, cell in policy.cells_and_names():
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
        options: of AdamW.
        parallel: as for the policy.
    """
    network = policy.model
    with no_init_parameters():
        loss = ShardedPolicyLoss(policy, make_loss, parallel.data_parallel, parallel.context_parallel)
        optimizer = make_optimizer(network.trainable_params(), options, WithholdableAdamW)
        layout = layout_of(parallel)
        num_replicas = {one.name: one.num_replicas for one in network_layouts(network, layout)}
        return ParallelUpdate(loss, optimizer, options.max_grad_norm, parallel, num_replicas, layout.world_size)


def network_layouts(network: CausalLM, layout: Layout) -> list[ParameterLayout]:
    """Return how the parameters of a model lie on the ranks; see :func:`mindrlhf.parallel.layout.parameter_layouts`."""
    element_bytes = _ELEMENT_BYTES[str(network.head_weight.dtype).lower()]
    return parameter_layouts(network.spec, network.dims, layout, element_bytes)
