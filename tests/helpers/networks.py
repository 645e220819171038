"""Weights of a model in memory, set and read without what the product does for a run."""

import numpy as np


def set_tensors(network, tensors):
    """Fill every parameter of a `CausalLM` from Hugging Face tensors, float32 by name."""
    import mindspore as ms

    from mindrlhf.specs.fuse import fuse

    parameters = {parameter.name: parameter for parameter in network.get_parameters()}
    for rule in network.spec.rules(network.dims):
        data = np.array(fuse(rule, network.dims, [tensors[name] for name in rule.hf_names]), order="C")
        parameters[rule.mf_name].set_data(ms.Tensor(data).astype(parameters[rule.mf_name].dtype))


def load_random_weights(network, seed):
    """Give a `CausalLM` the weights of `random_hf_weights`."""
    from mindrlhf.weights.convert import random_hf_weights

    set_tensors(network, dict(random_hf_weights(network.hf_config, seed)))


def load_hf_weights(network, directory):
    """Load a directory of weights into a `CausalLM`, as a run does."""
    from mindrlhf.shards.sources import open_scorer_source, open_source
    from mindrlhf.training.checkpoints.models import load
    from mindrlhf.training.engine.model import Whole
    from mindrlhf.training.runtime import Rank

    source = (open_scorer_source if network.spec.is_scorer else open_source)(directory)
    load(Whole(network, Rank(0, 1)), source)


def iter_hf_tensors(network, wants=lambda name: True):
    """Yield every Hugging Face tensor of a `CausalLM`; bfloat16 as uint16 bit patterns."""
    from mindrlhf.specs.fuse import split_parts
    from mindrlhf.weights.tensors import STORAGE_DTYPES

    parameters = {parameter.name: parameter for parameter in network.get_parameters()}
    for rule in network.spec.rules(network.dims):
        parameter = parameters[rule.mf_name]
        fused = parameter.asnumpy().view(STORAGE_DTYPES[str(parameter.dtype).lower()])
        parts = zip(rule.hf_names, split_parts(rule, network.dims, fused))
        yield from ((name, part) for name, part in parts if wants(name))


def iter_adapter_tensors(network):
    """Yield the factors of a model with adapters under PEFT's names, float32."""
    from mindrlhf.specs.fuse import split_parts
    from mindrlhf.weights.adapters.config import PREFIX

    parameters = {parameter.name: parameter.asnumpy() for parameter in network.get_parameters()}
    for adapter in network.lora.adapters:
        for rule in (adapter.down, adapter.up):
            parts = split_parts(rule, network.dims, parameters[rule.mf_name])
            yield from ((PREFIX + name, part) for name, part in zip(rule.hf_names, parts))


def iter_merged_tensors(network):
    """Yield what `iter_hf_tensors` does, with adapters added to the matrices: W + s B A."""
    from mindrlhf.specs.lora import DOWN, UP
    from mindrlhf.weights.adapters.config import PREFIX

    factors = dict(iter_adapter_tensors(network))
    for name, array in iter_hf_tensors(network):
        module = PREFIX + name.removesuffix(".weight")
        if (down := factors.get(f"{module}.{DOWN}.weight")) is not None:
            up = factors[f"{module}.{UP}.weight"].astype(np.float64)
            array = (array + network.lora.options.scale * (up @ down)).astype(np.float32)
        yield name, array


def attach_lora(network, options, seed, base_path):
    """Give a `CausalLM` new adapters, as a run does."""
    from mindrlhf.models.lora.model import Lora
    from mindrlhf.training.checkpoints.models import begin_adapters
    from mindrlhf.training.engine.model import Whole
    from mindrlhf.training.runtime import Rank

    network.lora = Lora(network, options, base_path)
    begin_adapters(Whole(network, Rank(0, 1)), seed, "")


def load_adapter(network, directory):
    """Load an adapter in PEFT's format, or the shards of one, into a `CausalLM` that has adapters, as a run does."""
    from mindrlhf.training.checkpoints.models import restore
    from mindrlhf.training.engine.model import Whole
    from mindrlhf.training.runtime import Rank

    restore(Whole(network, Rank(0, 1)), directory)


def load_model(model, path, run, row_length, lora=None, *, as_scorer=False):
    """Return the network of a run with such sections, loaded."""
    from types import SimpleNamespace

    from mindrlhf.config.memory import WHOLE
    from mindrlhf.config.training import ParallelSection
    from mindrlhf.training.engine.build import Models
    from mindrlhf.training.runtime import Rank

    config = SimpleNamespace(model=model, run=run, memory=WHOLE, parallel_config=ParallelSection())
    models = Models(config, (row_length,), 1, Rank(0, 1))
    made = models.scores(path, lora, after_token=True) if as_scorer else models.policy(path, lora)
    return made[1].network
