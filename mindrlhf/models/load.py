"""Models with their weights, from a Hugging Face directory: language models, and the scoring models made of them."""

import contextlib
from collections.abc import Iterator

import numpy as np
from mindspore.common.initializer import Normal

from mindrlhf.config.memory import WHOLE, MemorySection
from mindrlhf.config.model import LoraSection, ModelSection
from mindrlhf.config.run import RunSection
from mindrlhf.models.causal_lm import CausalLM, build_model
from mindrlhf.models.lora.model import attach_lora
from mindrlhf.specs import find_spec, scorer_config
from mindrlhf.specs.scoring import SCORE_NAME
from mindrlhf.weights.adapters.peft import load_adapter
from mindrlhf.weights.convert import hf_shapes, ignored_names, load_hf_weights, load_random_weights, load_tensors
from mindrlhf.weights.hf import read_hf_config
from mindrlhf.weights.open import open_tensors
from mindrlhf.weights.tensors import convert_dtype


def has_random_weights(model: ModelSection, path: str) -> bool:
    """Return whether a model's weights are initialised from ``run.seed``: only those of ``model.path`` are."""
    return model.random_init and path == model.path


def load_model(
    model: ModelSection,
    path: str,
    run: RunSection,
    row_length: int,
    lora: LoraSection | None = None,
    *,
    memory: MemorySection = WHOLE,
    num_image_rows: int = 1,
) -> CausalLM:
    """Build the model of a Hugging Face directory and load its weights, or initialise them; see ``has_random_weights``.

    Args:
        lora: gives a model that is trained its adapters, if the section asks for them.
        memory: which activations are computed again.
        num_image_rows: for a model with vision; see :func:`mindrlhf.models.causal_lm.build_model`.

    Raises:
        UserError: the directory, its config, its weights or its adapter do not fit.
    """
    network = _build(read_hf_config(path), model, memory, run, row_length, num_image_rows)
    _fill(network, model, path, run)
    _attach(network, lora, path, run)
    return network


def load_scorer(
    model: ModelSection,
    path: str,
    run: RunSection,
    row_length: int,
    lora: LoraSection | None = None,
    *,
    memory: MemorySection = WHOLE,
    num_image_rows: int = 1,
) -> CausalLM:
    """Build the scoring model (reward model, critic) of a Hugging Face directory; load its weights, or initialise them.

    From a language model it takes all but the output projection, and the score's weight is 0: every text scores 0 at
    first. For the others see :func:`load_model`.

    Raises:
        UserError: the directory, its config, its weights or its adapter do not fit.
    """
    hf_config = read_hf_config(path)
    network = _build(scorer_config(hf_config), model, memory, run, row_length, num_image_rows)
    if has_random_weights(model, path) or find_spec(hf_config).is_scorer:
        _fill(network, model, path, run)
    else:
        _load_language_model(network, path)
    _attach(network, lora, path, run)
    return network


def _build(
    hf_config: dict, model: ModelSection, memory: MemorySection, run: RunSection, row_length: int, num_image_rows: int
) -> CausalLM:
    with _no_random_weights() if run.device == "cpu" else contextlib.nullcontext():
        return build_model(
            hf_config,
            seq_length=row_length,
            compute_dtype=model.compute_dtype,
            param_dtype=model.param_dtype,
            device=run.device,
            recompute=model.recompute,
            memory=memory,
            num_image_rows=num_image_rows,
        )


@contextlib.contextmanager
def _no_random_weights() -> Iterator[None]:
    """Have no values drawn for the weights of cells that the body makes: others are loaded next."""
    draw = Normal._initialize
    Normal._initialize = lambda self, array: array.fill(0)
    try:
        yield
    finally:
        Normal._initialize = draw


def _fill(network: CausalLM, model: ModelSection, path: str, run: RunSection) -> None:
    if has_random_weights(model, path):
        load_random_weights(network, run.seed)
    else:
        load_hf_weights(network, path)


def _attach(network: CausalLM, lora: LoraSection | None, path: str, run: RunSection) -> None:
    if lora is not None and lora.options is not None:
        attach_lora(network, lora.options, run.seed, path)
        if lora.path:
            load_adapter(network, lora.path)


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
