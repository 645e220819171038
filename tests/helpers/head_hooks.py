"""What a learner does about a head whose weight lies outside the graph, for tests that run graphs themselves."""

from types import SimpleNamespace

import numpy as np


def bind(policy) -> None:
    """Have the head's kernels read its weight where it lies now."""
    from mindrlhf.cpu.training import heads

    heads.bind(policy)


def graph_parameters(policy) -> list:
    """Return the trained parameters that the graph of ``policy`` differentiates."""
    from mindrlhf.cpu.training import heads

    return heads.differentiated(policy, policy.model.trainable_params())


def collect_weight_gradient(policy, accumulator: np.ndarray) -> None:
    """Add to ``accumulator`` [vocabulary, width] the part of the head's gradient that the graph lacks."""
    from mindrlhf.cpu.training import heads

    name = policy.model.head_weight.name
    heads.collect_gradients(policy, {name: SimpleNamespace(asnumpy=lambda: accumulator)})
