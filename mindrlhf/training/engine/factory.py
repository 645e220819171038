"""The semi-auto-parallel cells of a run: the one factory behind training, strategy files, plans and their tests."""

import dataclasses
import math
from typing import Any

from mindspore import nn
from mindspore.nn.utils import no_init_parameters
from mindspore.ops.operations import Morph

from mindrlhf.algorithms.logprobs import PolicyLogProbs
from mindrlhf.algorithms.losses import Loss
from mindrlhf.algorithms.scores import TokenScores
from mindrlhf.config.memory import WHOLE, MemorySection
from mindrlhf.config.model import ModelSection
from mindrlhf.config.training import OptimizerSection, ParallelSection
from mindrlhf.layout.layout import Layout
from mindrlhf.layout.rows import num_logprob_micro_batches, updates_return_outputs
from mindrlhf.models.causal_lm import CausalLM, build_model
from mindrlhf.models.lora.model import Lora
from mindrlhf.specs.lora import LoraOptions
from mindrlhf.training.engine.sharded_cells import ParallelLogProbs, ParallelUpdate
from mindrlhf.training.engine.sharded_losses import RepeatedLoss, ShardedLoss
from mindrlhf.training.optimizers import make_optimizer, matrices_of
from mindrlhf.training.placement import network_layouts

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
    temperature: float,
    memory: MemorySection = WHOLE,
    **options: Any,
) -> PolicyLogProbs:
    """Return the log-probabilities of a model without data: its parameters get shards once a graph is compiled.

    Raises:
        UserError: the model is unknown, or cannot be sharded this way.
    """
    with no_init_parameters():  # they would take the memory of the whole model
        network = _build_network(hf_config, model, parallel, memory, **options)
        policy = PolicyLogProbs(network, temperature, "ascend", memory.logit_tile)
    _place_in_last_stage(policy, policy.token_logprobs, parallel)
    return policy


def build_scores(
    hf_config: dict, model: ModelSection, parallel: ParallelSection, *, memory: MemorySection = WHOLE, **options: Any
) -> TokenScores:
    """Return a scoring model without data, from the config.json of that form; else as :func:`build_policy`."""
    with no_init_parameters():
        network = _build_network(hf_config, model, parallel, memory, **options)
        scores = TokenScores(network, after_token=False)
    _place_in_last_stage(scores, scores.projection, parallel)
    return scores


def _build_network(
    hf_config: dict,
    model: ModelSection,
    parallel: ParallelSection,
    memory: MemorySection,
    *,
    row_length: int,
    shared_prompts: bool = False,
    num_image_rows: int = 1,
    replays_routing: bool = False,
    lora: LoraOptions | None = None,
) -> CausalLM:
    """Return a model without data.

    Args:
        row_length: longest row.
        shared_prompts, num_image_rows, replays_routing: of its rows; see :func:`mindrlhf.models.causal_lm.build_model`.
        lora: the adapters that are trained in place of the model; None trains all of it.
    """
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
        replays_routing=replays_routing,
    )
    if lora is not None:
        stages = layout_of(parallel).layer_stages(network.dims.num_layers)
        network.lora = Lora(network, lora, model.path, "ascend", stages)
    return network


def _place_in_last_stage(model: nn.Cell, output: nn.Cell, parallel: ParallelSection) -> None:
    """Put what follows the decoder into the last stage of a pipeline.

    The compiler is told that the functions of local shards (Morphs) do no input or output, as it must assume: it keeps
    such calls in order, over all stages; and the last stage of a pipeline without gradients, from which the calls of
    the other stages are cut away, would not compile (MindSpore 2.9.0).
    """
    if parallel.pipeline_stage == 1:
        return
    output.pipeline_stage = parallel.pipeline_stage - 1
    for _, cell in model.cells_and_names():
        for value in vars(cell).values():
            if isinstance(value, Morph):
                value.del_prim_attr("side_effect_io")


def build_logprobs(policy: PolicyLogProbs | TokenScores, parallel: ParallelSection) -> ParallelLogProbs:
    """Return the cell that computes the log-probabilities of ``policy``, or scores, without gradients."""
    return ParallelLogProbs(policy, num_logprob_micro_batches(parallel))


def build_update(loss: Loss, options: OptimizerSection, parallel: ParallelSection) -> ParallelUpdate:
    """Return the cell of an update."""
    network, layout = loss.policy.model, layout_of(parallel)
    layouts = {one.name: one for one in network_layouts(network, layout)}
    with no_init_parameters():
        kind = RepeatedLoss if parallel.micro_batch_num > 1 else ShardedLoss
        shares = (parallel.data_parallel, parallel.context_parallel)
        sharded = kind(loss, shares, updates_return_outputs(parallel))
        optimizer = make_optimizer(network.trainable_params(), options, matrices_of(network), layouts)
        num_replicas = {name: one.num_replicas for name, one in layouts.items()}
        return ParallelUpdate(sharded, optimizer, options.max_grad_norm, parallel, num_replicas, layout.world_size)
