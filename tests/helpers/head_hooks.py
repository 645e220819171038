"""What a learner does about a head whose weight lies outside the graph, for tests that run graphs themselves."""

import numpy as np


def bind(policy) -> None:
    """Have the head's kernels read its weight where it lies now."""
    from mindrlhf.cpu.training import hooks

    hooks.bind(policy)


def graph_parameters(policy) -> list:
    """Return the trained parameters that the graph of ``policy`` differentiates."""
    from mindrlhf.cpu.training import hooks

    return hooks.in_graph(policy, policy.model.trainable_params())


def collect_weight_gradient(policy, accumulator: np.ndarray) -> None:
    """Add to ``accumulator`` [vocabulary, width] the part of the head's gradient that the graph lacks."""
    from mindrlhf.cpu.training import hooks

    hooks.collect_gradients(policy, {policy.model.head_weight.name: accumulator})
