"""Optimisers as graph cells: one is one module of this package, found by the value of `optimizer.type`.

Each has a cell ``Optimizer(parameters, options, matrices, layouts)``; see :class:`.adamw.Optimizer`, which others may
extend. What it keeps for each parameter is in :mod:`mindrlhf.algorithms.optimizers`.
"""

import importlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from mindrlhf.algorithms.optimizers import GLOBAL_STEP_NAME
from mindrlhf.config.training import OptimizerSection
from mindrlhf.layout.parameter import ParameterLayout
from mindrlhf.models.causal_lm import CausalLM
from mindrlhf.specs import Matrices
from mindrlhf.specs.lora import AdaptedRules

if TYPE_CHECKING:
    from mindspore import Parameter

    from mindrlhf.training.optimizers.adamw import Optimizer


def make_optimizer(
    parameters: "Sequence[Parameter]",
    options: OptimizerSection,
    matrices: Mapping[str, Matrices | None],
    layouts: Mapping[str, ParameterLayout] | None = None,
) -> "Optimizer":
    """Return the optimiser of the trained parameters.

    Args:
        matrices: how each is put together of hidden matrices, None for one that is not.
        layouts: how each lies on the ranks; None: every rank has all.
    """
    module = importlib.import_module(f"{__name__}.{options.type}")
    return module.Optimizer(parameters, options, matrices, layouts or {})


def optimizer_state(optimizer: "Optimizer") -> "dict[str, Parameter]":
    """Return the parameters that hold the state of an optimiser, by their names in a checkpoint.

    ``STATE.NAME``, float32 in the shape of parameter NAME, such as ``exp_avg.NAME`` and ``exp_avg_sq.NAME``, the
    moments m and v of AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 2), and ``global_step``, int32
    [1], its t. The learning rate, set anew for each update, is not among them.
    """
    return {GLOBAL_STEP_NAME: optimizer.global_step, **optimizer.state}


def matrices_of(network: CausalLM) -> dict[str, Matrices | None]:
    """Return how the parameters of a model are put together of hidden matrices, by name."""
    adapted = network.lora and AdaptedRules(network.spec, network.dims, network.lora.options)
    return {rule.mf_name: rule.matrices(network.dims) for rule in (adapted or network.spec).rules(network.dims)}
