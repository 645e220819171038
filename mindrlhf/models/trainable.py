"""Choice of the parameters of a model that are trained."""

from collections.abc import Callable

from mindspore import nn


def train_only(network: nn.Cell, is_trained: Callable[[str], bool]) -> None:
    """Leave the parameters whose MindFormers name ``is_trained`` refuses as they are: no gradients, no moments.

    To be called before anything is built over the network that asks for its trained parameters: losses, learners,
    optimisers. What was never trained, such as a router's selection bias, stays so.
    """
    for parameter in network.get_parameters():
        parameter.requires_grad = parameter.requires_grad and is_trained(parameter.name)
