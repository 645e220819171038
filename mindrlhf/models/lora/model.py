"""A model with low-rank adapters: attached, initialised, turned off and on."""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import mindspore as ms
import numpy as np
from mindspore import nn

from mindrlhf.models.lora import cpu_cells
from mindrlhf.specs import ModelDims
from mindrlhf.specs.fuse import fuse
from mindrlhf.specs.lora import SCALE_NAME, Adapter, LoraOptions, adapters
from mindrlhf.specs.scoring import SCORE_NAME


class Lora:
    """The adapters of a model.

    Args:
        network: :class:`mindrlhf.models.causal_lm.CausalLM`, its adapters attached to their cells and alone trained,
            but for the projection of a scoring model.
        options: what the adapters are like.
        base_path: Hugging Face directory of the weights that stay as they are.
        device: whose cells the model has, `cpu` or `ascend`.
        layer_stages: the pipeline stage of each layer, where there are several: they can share no parameter.

    Attributes:
        adapters: in the order of the forward pass; ``options`` and ``base_path`` are kept too.
    """

    def __init__(
        self,
        network: nn.Cell,
        options: LoraOptions,
        base_path: str,
        device: str = "cpu",
        layer_stages: Sequence[int] = (),
    ):
        self.options = options
        self.base_path = base_path
        self.adapters: list[Adapter] = adapters(network.spec, network.dims, options)
        # By pipeline stage the factor of every adapter, which the graphs read.
        self._scales = {
            stage: ms.Parameter(ms.Tensor([options.scale], ms.float32), name=scale_name(stage), requires_grad=False)
            for stage in {0, *layer_stages}
        }
        trained = {SCORE_NAME}
        for adapter in self.adapters:
            scale = self._scales[layer_stages[adapter.layer] if layer_stages else 0]
            low_rank = (_attach_on_cpu if device == "cpu" else _attach_on_ascend)(network, adapter, scale)
            # Becoming a part of a cell has given them names of its own.
            low_rank.down.name, low_rank.up.name = adapter.down.mf_name, adapter.up.mf_name
            trained |= {adapter.down.mf_name, adapter.up.mf_name}
        for stage, scale in self._scales.items():
            scale.name = scale_name(stage)
        train_only(network, trained.__contains__)


def train_only(network: nn.Cell, is_trained: Callable[[str], bool]) -> None:
    """Leave the parameters whose MindFormers name ``is_trained`` refuses as they are: no gradients, no moments.

    To be called before anything is built over the network that asks for its trained parameters: losses, learners,
    optimisers. What was never trained, such as a router's selection bias, stays so.
    """
    for parameter in network.get_parameters():
        parameter.requires_grad = parameter.requires_grad and is_trained(parameter.name)


def scale_name(stage: int) -> str:
    """Return the name of the parameter that has the factor s of the adapters of a pipeline stage, float32 [1]."""
    return f"{SCALE_NAME}.{stage}"


@contextlib.contextmanager
def without_adapters(scale: ms.Parameter) -> Iterator[None]:
    """Let the adapters that have this factor, float32 [1], add 0 while the body runs."""
    factor = scale.asnumpy().copy()
    scale.set_data(ms.Tensor([0.0], ms.float32))
    try:
        yield
    finally:
        scale.set_data(ms.Tensor(factor))


def initial_down(adapter: Adapter, dims: ModelDims, seed: int) -> np.ndarray:
    """Return the A that an adapter begins with, whole, which depends on ``seed`` and names only.

    It is uniform in +-1/sqrt(in), Kaiming's for a = sqrt(5), as PEFT has it; B is 0, so that it adds nothing at first.
    """
    rule = adapter.down
    return fuse(rule, dims, [_initial(name, shape, seed) for name, shape in zip(rule.hf_names, rule.shape(dims))])


def _initial(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    bound = 1 / np.sqrt(shape[1])
    return np.random.default_rng([seed, *name.encode()]).uniform(-bound, bound, shape).astype(np.float32)


_CELL_OF = {
    "copy": cpu_cells.LowRankAdapter,
    "qkv": cpu_cells.LowRankAdapter,
    "delta": cpu_cells.LowRankAdapter,
    "gate_up": cpu_cells.GateUpAdapter,
    "halves": cpu_cells.GateUpAdapter,
}


def _attach_on_cpu(network: nn.Cell, adapter: Adapter, scale: ms.Parameter) -> nn.Cell:
    """Give an adapter to the cell that multiplies by its parameter; return what holds the factors."""
    low_rank = _CELL_OF[adapter.base.transform](adapter, network.dims, scale)
    _cell_at(network, adapter.base.mf_name.removesuffix(".weight")).adapter = low_rank
    return low_rank


def _attach_on_ascend(network: nn.Cell, adapter: Adapter, scale: ms.Parameter) -> nn.Cell:
    """The same of MindFormers' cells for Ascend."""
    from mindrlhf.models.lora.ascend_cells import attach

    path, _, _ = adapter.base.mf_name.rpartition(".")
    parent, _, name = path.rpartition(".")
    return attach(_cell_at(network, parent), name, adapter, network.dims, scale)


def _cell_at(network: nn.Cell, path: str) -> nn.Cell:
    cell = network.model
    for name in path.split("."):
        cell = cell[int(name)] if name.isdecimal() else getattr(cell, name)
    return cell
