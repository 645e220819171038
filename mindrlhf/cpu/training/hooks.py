"""Hooks of a rank: see :func:`mindrlhf.system.speed_ups.of_rank`.

``TiledTokenLogProbs`` takes the place of :class:`mindrlhf.algorithms.logprobs.GraphTokenLogProbs`, ``make_host_step``
that of :class:`mindrlhf.training.engine.cells.OptimizerStep`, and ``run_graph`` that of calling a cell.
"""

import contextlib
from collections.abc import Iterator

from mindspore.common.initializer import Normal

from mindrlhf.cpu.training.graph_cache import open_graph_cache, run_graph
from mindrlhf.cpu.training.heads import TiledTokenLogProbs, bind, collect_gradients, in_graph
from mindrlhf.cpu.training.host_optimizer import make_host_step

__all__ = [
    "TiledTokenLogProbs",
    "bind",
    "collect_gradients",
    "in_graph",
    "make_host_step",
    "no_random_weights",
    "open_graph_cache",
    "run_graph",
]


@contextlib.contextmanager
def no_random_weights() -> Iterator[None]:
    """Have no values drawn for the weights of cells that the body makes: others are loaded next."""
    draw = Normal._initialize
    Normal._initialize = lambda self, array: array.fill(0)
    try:
        yield
    finally:
        Normal._initialize = draw
