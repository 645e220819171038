"""Models with a fault in their second layer, for the comparison of layers."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file
from tiny_models import WIDE, tiny_model

from mindrlhf.doctor.layers import LIMITS, compare_cells
from mindrlhf.doctor.rungs import Ground
from mindrlhf.specs import find_spec
from mindrlhf.weights.convert import hf_shapes

SIZES = {"vocab_size": 512, "num_hidden_layers": 3, "intermediate_size": 256, "max_position_embeddings": 512}
MODEL = tiny_model(base=WIDE, **SIZES)
LAYER = "model.layers.1."


def rotated_by_neighbours(tensors: dict) -> None:
    """Channels of queries and keys lie as in a model whose neighbouring channels are a pair."""
    head = MODEL["hidden_size"] // MODEL["num_attention_heads"]
    order = np.arange(head).reshape(2, -1).T.ravel()
    for name in ("q_proj", "k_proj"):
        weight = tensors[f"{LAYER}self_attn.{name}.weight"]
        heads = weight.reshape(-1, head, weight.shape[1])
        tensors[f"{LAYER}self_attn.{name}.weight"] = heads[:, order].reshape(weight.shape)


def another_norm(tensors: dict) -> None:
    """The norm before the MLP has the weights of the one before attention."""
    tensors[f"{LAYER}post_attention_layernorm.weight"] = tensors[f"{LAYER}input_layernorm.weight"]


def transposed(tensors: dict) -> None:
    name = f"{LAYER}self_attn.o_proj.weight"
    tensors[name] = tensors[name].T.copy()


def write_model(directory: Path, weights: dict[str, np.ndarray] | None = None) -> Path:
    """Write a model, of random weights unless told; norms are not of ones."""
    random, spec = np.random.default_rng(0), find_spec(MODEL)
    if weights is None:
        shapes = hf_shapes(spec, spec.dims(MODEL))
        weights = {name: random.normal(name.endswith("norm.weight"), 0.1, shape) for name, shape in shapes.items()}
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(MODEL))
    tensors = {name: np.ascontiguousarray(one, np.float32) for name, one in weights.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


FAULTS = (None, rotated_by_neighbours, another_norm, transposed)


def check_each_is_found(ground: Ground, model: Path, faults: tuple = FAULTS) -> None:
    """Of a server that has read the model: nothing is far from it but what our cells have of the layer at fault."""
    limit = LIMITS[ground.device]
    for fault in faults:
        name = fault.__name__ if fault else "none"
        tensors = load_file(model / "model.safetensors")
        if fault:
            fault(tensors)
        broken = write_model(Path(ground.directory) / name, tensors)
        found = {one.name: one.median for one in compare_cells(replace(ground, device="cpu"), str(broken))}
        print(name, {layer: f"{median:.1e}" for layer, median in found.items()})
        assert [*found] == ["embedding", "layer 0", "layer 1", "layer 2", "norm"]
        assert (found.pop("layer 1") > 2 * limit) == bool(fault), name
        assert max(found.values()) < limit / 4, name
