"""Small models whose every element is random bits, for tests of what is cut and put together."""

import numpy as np
from tiny_models import tiny_model

from mindrlhf.specs import find_spec
from mindrlhf.weights.convert import export_hf, hf_shapes
from mindrlhf.weights.hf import SafetensorsDirectory
from mindrlhf.weights.tensors import STORAGE_DTYPES

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 8, "num_key_value_heads": 4}
CONFIG = tiny_model(num_hidden_layers=3, vocab_size=32, **SIZES)


def make_model(directory, dtype="float32", seed=0, **changes):
    """Write a Hugging Face directory of random bits, NaN and infinity among them; return it."""
    config = {**CONFIG, **changes}
    spec = find_spec(config)
    generator = np.random.default_rng(seed)
    storage = STORAGE_DTYPES[dtype]
    bits = np.dtype(f"u{storage.itemsize}")
    tensors = {
        name: generator.integers(0, np.iinfo(bits).max, shape, bits, endpoint=True).view(storage)
        for name, shape in hf_shapes(spec, spec.dims(config)).items()
    }
    export_hf(iter(tensors.items()), config, directory, dtype=dtype)
    return directory


def contents(directory):
    """Dtype, shape and bytes of every tensor of a Hugging Face directory."""
    source = SafetensorsDirectory(directory)
    return {name: (source.info(name), source.read(name).tobytes()) for name in source.names()}
