"""Learning-rate schedules, as functions of the optimiser update."""

import math

from mindrlhf.config.training import OptimizerSection


def learning_rate(options: OptimizerSection, update: int, num_updates: int) -> float:
    """Return the learning rate of optimiser update ``update`` (from 0) of ``num_updates``.

    A linear warm-up to ``start_lr``, then constant, linear or cosine (Loshchilov and Hutter 2017,
    arXiv:1608.03983, eq. 5 without restarts) down to ``end_lr``, which the last update reaches.
    """
    if update < options.warmup_steps:
        return options.start_lr * (update + 1) / options.warmup_steps
    if options.lr_schedule == "constant":
        return options.start_lr
    span = max(1, num_updates - 1 - options.warmup_steps)
    progress = min(1.0, (update - options.warmup_steps) / span)
    if options.lr_schedule == "cosine":
        progress = (1.0 - math.cos(math.pi * progress)) / 2.0
    return options.start_lr + (options.end_lr - options.start_lr) * progress
