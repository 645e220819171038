"""Actors of a tiny vision-language model, their batches, and gradients against differences of the loss."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from tiny_vl import IMAGE, TinyVl, write_tiny_vl

from mindrlhf.config.load import load_grpo_config
from mindrlhf.data.packing import TokenSequence
from mindrlhf.training.batch import Batch, RowOptions, make_batch
from mindrlhf.training.vision.image_rows import ImageTokens

LENGTH, ROWS = 48, 2
_STEP = 1e-3


def prepare_model(tmp_path_factory) -> Path:
    """Set MindFormers up for the process, and return the directory of a random model."""
    import mindspore as ms

    from mindrlhf.models.context import prepare_mindformers

    prepare_mindformers("cpu", tmp_path_factory.mktemp("mindformers-log"))
    ms.set_context(runtime_num_threads=1)
    model = TinyVl(hidden=32, intermediate=48, layers=1, vision_hidden=32)
    return write_tiny_vl(tmp_path_factory.mktemp("model"), model)


def actor_maker(model: Path, directory: Path, *changes: str) -> Callable[[], object]:
    """Return a function that builds the actor of a rank, as a run does."""
    from mindrlhf.training.engine.build import build_actor
    from mindrlhf.training.runtime import Rank

    path = directory / "config.yaml"
    path.write_text("")
    common = (
        f"model.path={model}",
        f"data.tokenizer_dir={model}",
        "data.train_file=prompts.mindrecord",
        "reward.verifier_function=accuracy_reward",
        "rollout.max_response_length=8",
        f"training.micro_batch_size={ROWS}",
    )
    config = load_grpo_config(path, [*common, *changes])
    return lambda: build_actor(config, (LENGTH,), Rank(0, 1))


def row_options(actor) -> RowOptions:
    """Return how the rows of an actor are made."""
    return RowOptions((LENGTH,), ROWS, 1, True, image_tokens=ImageTokens.of(actor.model.network.dims))


def batch_of(actor, shown: Sequence[tuple[np.ndarray, ...]], num_samples: int, names: Sequence[str]) -> Batch:
    """Return so many samples of each prompt, with random values by ``names``; prompt i shows the images of item i."""
    rng, sequences = np.random.default_rng(7), []
    for number, images in enumerate(shown):
        num_tokens = sum(image.shape[0] * image.shape[1] // 28**2 for image in images)
        prompt = np.array([60 + number, *[IMAGE] * num_tokens, 50], np.int32)
        for _ in range(num_samples):
            response = rng.integers(0, 256, 6).astype(np.int32)
            values = {name: rng.standard_normal(6).astype(np.float32) for name in names}
            values["weights"] = np.ones(6, np.float32)
            sequences.append(TokenSequence(prompt, response, values, images=images))
    return make_batch(sequences, row_options(actor))


def receive(actor, batch: Batch) -> None:
    """Give an actor a batch and its images."""
    actor.receive([batch.part_of(0, 1)])


def slope_and_difference(
    network, gradients: Mapping[str, np.ndarray], loss: Callable[[], float]
) -> tuple[float, float]:
    """Return the slope of a loss along a random direction, from its gradients and from two losses.

    Args:
        gradients: float64, by parameter; the parameters are put back.
    """
    import mindspore as ms

    rng = np.random.default_rng(0)
    direction = {name: rng.standard_normal(gradient.shape) for name, gradient in gradients.items()}
    parameters = {parameter.name: parameter for parameter in network.trainable_params()}
    start = {name: parameters[name].asnumpy().copy() for name in gradients}
    losses = []
    for distance in (_STEP, -_STEP):
        for name, value in start.items():
            parameters[name].set_data(ms.Tensor((value + distance * direction[name]).astype(np.float32)))
        losses.append(loss())
    for name, value in start.items():
        parameters[name].set_data(ms.Tensor(value))
    slope = sum((gradients[name] * direction[name]).sum() for name in gradients)
    return slope, (losses[0] - losses[1]) / (2 * _STEP)
