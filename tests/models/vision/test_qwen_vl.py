"""Qwen2, 2.5 and 3-VL on CPU cells against transformers: image rows, logits, log-probs, all gradients."""

import json
from pathlib import Path

import numpy as np
import pytest
from engines import whole_model
from slow_tests import RUNS_SLOW_TESTS
from tiny_vl import IMAGE, VISION_END, VISION_START, TinyVl, write_tiny_vl

from mindrlhf.data.packing import TokenSequence
from mindrlhf.images.geometry import VisionGeometry
from mindrlhf.images.patches import patch_rows
from mindrlhf.images.pixels import image_digest
from mindrlhf.specs import find_spec
from mindrlhf.training.batch import RowOptions, make_batch
from mindrlhf.training.vision.image_rows import ImageTokens

pytestmark = pytest.mark.usefixtures("mindformers")

LENGTH = 64
TOLERANCE = 1e-5  # of the largest entry
# As few layers as there are kinds of them: both kinds of attention, rows of DeepStack and none.
MODELS = {
    "nested-tied": TinyVl(layers=1),
    "qwen2-flat": TinyVl(family="qwen2_vl", is_flat=True, layers=1, vision_depth=1, seed=3),
    "qwen3-untied": TinyVl(family="qwen3_vl", vision_depth=2, deepstack=(0,), is_tied=False, seed=5),
}
if RUNS_SLOW_TESTS:
    MODELS |= {
        "flat-untied": TinyVl(is_flat=True, is_tied=False, vision_depth=3, seed=1),
        "qwen2-nested": TinyVl(family="qwen2_vl", is_tied=False, seed=2),
        "qwen3-tied": TinyVl(family="qwen3_vl", vision_depth=4, layers=3, seed=4),
    }
# Height and width of the images of each segment: partial windows, whole ones, several images, none. Two sizes of slots
# hold them all, and rows of LENGTH have alike slots: each shape is a graph.
SIZES = ([(112, 168), (56, 84)], [(84, 56)], [(140, 112), (56, 84)], [])


@pytest.fixture(scope="module")
def sequences() -> list[TokenSequence]:
    """Prompts with images, and responses; the response of the first has a token that stands for an image in prompts."""
    rng = np.random.default_rng(5)
    made = []
    for number, sizes in enumerate(SIZES):
        images = tuple(rng.integers(0, 255, (*size, 3), np.uint8) for size in sizes)
        prompt = [40 + number]
        for height, width in sizes:
            prompt += [VISION_START, *[IMAGE] * (height // 28 * (width // 28)), VISION_END, 33]
        response = rng.integers(32, 127, 9 + number)
        values = {"weights": np.full(len(response), (1.0 + number) / 50, np.float32)}
        ids = np.array(prompt, np.int32), response.astype(np.int32)
        made.append(TokenSequence(*ids, values, images=images))
    return made


@pytest.fixture(scope="module")
def models_dir(tmp_path_factory, sequences, run_in_rollout) -> Path:
    """A directory for each model, with what transformers makes of the sequences."""
    directory = tmp_path_factory.mktemp("models")
    for name, model in MODELS.items():
        write_tiny_vl(directory / name, model)
    for name in MODELS:
        config = json.loads((directory / name / "config.json").read_text())
        geometry = find_spec(config).dims(config).vision.geometry
        np.savez(directory / name / "inputs.npz", **reference_inputs(sequences, geometry))
    run_in_rollout(Path(__file__).with_name("vl_reference.py"), *(directory / name for name in MODELS))
    return directory


def reference_inputs(sequences: list[TokenSequence], geometry: VisionGeometry) -> dict[str, np.ndarray]:
    inputs = {}
    for number, sequence in enumerate(sequences):
        ids = np.concatenate([sequence.prompt_ids, sequence.response_ids])
        weights = np.zeros(len(ids) - 1, np.float32)
        weights[len(sequence.prompt_ids) - 1 :] = sequence.values["weights"]
        inputs |= {f"ids/{number}": ids, f"weights/{number}": weights}
        if sequence.images:
            grids = [(1, image.shape[0] // 14, image.shape[1] // 14) for image in sequence.images]
            pixels = [patch_rows(image, geometry) for image in sequence.images]
            inputs |= {f"pixels/{number}": np.concatenate(pixels), f"grids/{number}": np.array(grids)}
    return inputs


@pytest.fixture(scope="module", params=MODELS)
def model_dir(request, models_dir) -> Path:
    return models_dir / request.param


@pytest.fixture(scope="module")
def expected(model_dir) -> dict[str, np.ndarray]:
    return dict(np.load(model_dir / "expected.npz"))


@pytest.fixture(scope="module")
def network(model_dir):
    from networks import load_hf_weights

    from mindrlhf.models.causal_lm import build_model
    from mindrlhf.weights.hf import read_hf_config

    network = build_model(read_hf_config(model_dir), seq_length=LENGTH, num_image_rows=3 * LENGTH)
    load_hf_weights(network, model_dir)
    return network


@pytest.fixture(scope="module")
def batch(sequences, network):
    return make_batch(sequences, RowOptions((LENGTH,), 2, 1, True, image_tokens=ImageTokens.of(network.dims)))


def relative_error(actual: np.ndarray, reference: np.ndarray) -> float:
    assert np.abs(reference).max() > 0, "nothing can be told from zeros"
    return float(np.abs(actual - reference).max() / np.abs(reference).max())


def test_logits_logprobs_and_all_gradients_match_transformers(network, batch, sequences, expected):
    """The graph of an update: the rows that the tower has made are an input, and the tower has no gradients."""
    import mindspore as ms
    from mindspore import nn, ops

    (rows,) = batch.micro_batches
    network.images.see(list(batch.images.values()))
    network.images.place(rows.images)

    class Loss(nn.Cell):
        def __init__(self):
            super().__init__(auto_prefix=False)
            self.network, self.weight = network, network.head_weight

        def construct(self, input_ids, segment_ids, labels, weights):
            hidden = self.network(input_ids, segment_ids)
            logits = ops.MatMul(transpose_b=True)(ops.reshape(hidden, (-1, hidden.shape[-1])), self.weight)
            chosen = ops.gather_elements(ops.log_softmax(logits, -1), 1, ops.reshape(labels, (-1, 1)))
            logprobs = ops.reshape(chosen, labels.shape)
            return -(logprobs * weights).sum(), ops.reshape(logits, (*labels.shape, -1)), logprobs

    parameters = [p for p in network.get_parameters() if p.name in {rule.mf_name for rule in rules(network)}]
    frozen = {parameter.name for parameter in parameters if not parameter.requires_grad}
    assert {name.split(".")[0] for name in frozen} == {"visual"}
    parameters = [parameter for parameter in parameters if parameter.requires_grad]
    inputs = (rows.input_ids, rows.segment_ids, rows.labels, rows.tokens["weights"])
    (loss, logits, logprobs), gradients = ms.value_and_grad(Loss(), None, ms.ParameterTuple(parameters), has_aux=True)(
        *map(ms.Tensor, inputs)
    )
    image_rows = network.inputs.image_rows
    assert float(loss.asnumpy()) == pytest.approx(float(expected["loss"]), rel=TOLERANCE)
    check_segments(batch, sequences, rows, logits.asnumpy(), logprobs.asnumpy(), expected)
    check_image_rows(image_rows.asnumpy(), rows, sequences, expected)
    check_gradients(network, {p.name: g.asnumpy() for p, g in zip(parameters, gradients)}, expected, without=frozen)


@pytest.mark.parametrize("model_dir", MODELS if RUNS_SLOW_TESTS else ["qwen3-untied"], indirect=True)
def test_frozen_tower_runs_once_and_gives_the_same_logprobs(network, batch, sequences, expected):
    """The cells as training has them: the tower's rows are set before a run."""
    from mindrlhf.algorithms.logprobs import PolicyLogProbs

    model = whole_model(PolicyLogProbs(network, 1.0, "cpu"))
    network.images.see(list(batch.images.values()))
    responses = batch.collect([[model.logprobs(rows) for rows in batch.micro_batches]])
    for number, (sequence, response) in enumerate(zip(sequences, responses, strict=True)):
        reference = expected[f"logprobs/{number}"][len(sequence.prompt_ids) - 1 :]
        assert relative_error(response, reference) < TOLERANCE
    network.images.see([np.zeros_like(image) for image in batch.images.values()])
    with pytest.raises(KeyError):  # rows of an image of an earlier step
        model.logprobs(batch.micro_batches[0])


def rules(network):
    return network.spec.rules(network.dims)


def check_segments(batch, sequences, rows, logits, logprobs, expected) -> None:
    for number, (sequence, (_, row, first, last)) in enumerate(zip(sequences, batch.placed, strict=True)):
        start = first - len(sequence.prompt_ids) + 1
        assert relative_error(logits[row, start : last + 1], expected[f"logits/{number}"]) < TOLERANCE
        assert relative_error(logprobs[row, start:last], expected[f"logprobs/{number}"]) < TOLERANCE
    assert rows.segment_ids.max() > 1, "no row holds several sequences"


def check_image_rows(image_rows, rows, sequences, expected) -> None:
    by_digest, start = {}, 0
    sizes = {image_digest(image): image.shape[0] * image.shape[1] // 28**2 for s in sequences for image in s.images}
    for digest in rows.images:
        by_digest[digest] = image_rows[start : start + sizes[digest]]
        start += sizes[digest]
    for number, sequence in enumerate(sequences):
        if sequence.images:
            found = np.concatenate([by_digest[image_digest(image)] for image in sequence.images])
            assert relative_error(found, expected[f"rows/{number}"]) < TOLERANCE


def check_gradients(network, by_name, expected, without=frozenset()) -> None:
    from mindrlhf.specs.fuse import split

    errors = {}
    for rule in (rule for rule in rules(network) if rule.mf_name not in without):
        for name, gradient in zip(rule.hf_names, split(rule, network.dims, by_name[rule.mf_name])):
            errors[name] = relative_error(gradient, expected[f"gradient/{name}"])
    names = {name.removeprefix("gradient/") for name in expected if name.startswith("gradient/")}
    assert names - {name for rule in rules(network) if rule.mf_name in without for name in rule.hf_names} == set(errors)
    assert max(errors.values()) < TOLERANCE, sorted(errors.items(), key=lambda item: -item[1])[:5]
