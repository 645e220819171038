"""Scoring models (reward models, critics): built from a directory of their own kind, or from a language model."""

import numpy as np

from mindrlhf.config.sections import ModelSection, RunSection
from mindrlhf.models.causal_lm import CausalLM, build_model
from mindrlhf.specs import find_spec
from mindrlhf.specs.scoring import SCORE_NAME, scorer_architecture
from mindrlhf.weights.convert import hf_shapes, ignored_names, load_hf_weights, load_random_weights, load_tensors
from mindrlhf.weights.hf import read_hf_config
from mindrlhf.weights.open import open_tensors
from mindrlhf.weights.tensors import convert_dtype


def scorer_config(hf_config: dict) -> dict:
    """Return the config.json of the scoring form of a model, which transformers and vLLM load as well."""
    architecture = scorer_architecture(find_spec(hf_config).hf_architecture)
    labels = {"id2label": {"0": "score"}, "label2id": {"score": 0}}
    return {**hf_config, "architectures": [architecture], **labels, "tie_word_embeddings": False}


def load_scorer(model: ModelSection, path: str, run: RunSection, row_length: int) -> CausalLM:
    """Build the scoring model of a Hugging Face directory and load its weights.

    From a language model it takes all but the output projection, and the score's weight is 0: every text scores 0 at
    first. With ``model.random_init`` the weights of ``model.path`` are drawn from ``run.seed``.

    Raises:
        UserError: the directory, its config or its weights do not fit.
    """
    hf_config = read_hf_config(path)
    network = build_model(
        scorer_config(hf_config),
        seq_length=row_length,
        compute_dtype=model.compute_dtype,
        param_dtype=model.param_dtype,
        device=run.device,
        recompute=model.recompute,
    )
    if model.random_init and path == model.path:
        load_random_weights(network, run.seed)
    elif find_spec(hf_config).is_scorer:
        load_hf_weights(network, path)
    else:
        _load_language_model(network, path)
    return network


def _load_language_model(network: CausalLM, path: str) -> None:
    checkpoint = open_tensors(path)
    shapes = hf_shapes(network.spec, network.dims)
    score_shape = shapes.pop(SCORE_NAME)
    checkpoint.check_coverage(shapes, ignored_names(network.dims))

    def read(name: str, dtype: str) -> np.ndarray:
        if name == SCORE_NAME:
            return convert_dtype(np.zeros(score_shape, np.float32), "float32", dtype)
        return convert_dtype(checkpoint.read(name), checkpoint.info(name).dtype, dtype)

    load_tensors(network, read)
