"""Engines and models that are whole, as a run would have them, of cells that a test has made."""

from dataclasses import replace


def whole_model(policy):
    """Return a model of log-probabilities or scores; see :class:`mindrlhf.training.engine.model.Model`."""
    from mindrlhf.training.engine.model import Model, Whole
    from mindrlhf.training.runtime import Rank

    return Model(Whole(policy.model, Rank(0, 1)), policy)


def whole_engine(loss, optimizer=None):
    """Return what trains the policy of a loss on one rank."""
    from mindrlhf.config.training import OptimizerSection
    from mindrlhf.training.engine.engine import WholeEngine
    from mindrlhf.training.runtime import Rank

    return WholeEngine(whole_model(loss.policy), loss, optimizer or OptimizerSection(), Rank(0, 1))


def accumulate(engine, rows, values, num_tokens, kl_coefficient=0.0):
    """Add the gradients of a micro-batch whose loss reads ``values``, in its order; return statistics and outputs."""
    given = replace(rows, tokens=dict(zip(engine.inputs, values, strict=True)))
    return engine.add(given, num_tokens, kl_coefficient)


def export(worker, directory, of=""):
    """Export a model of a worker that is alone, and its adapters beside it, as a run does."""
    from mindrlhf.training.checkpoints.shards import export_adapters
    from mindrlhf.training.team import Team
    from mindrlhf.weights.publish.export import sharded_tensors

    team = Team(worker)
    tensors = sharded_tensors(team, team, [[0]], of)
    if worker.model.network.lora is not None:
        export_adapters(team, {of or "model": directory})
    worker.export(directory, None, tensors, of)
