"""The vision tower compiled for Ascend, executed on a CPU, gives the rows of the CPU's own tower."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from graph_on_cpu.lower import lower_graph
from slow_tests import RUNS_SLOW_TESTS, SIMULATES_CANN
from tiny_vl import TinyVl, config_of, weights_of, write_tiny_vl

from mindrlhf.config.training import ParallelSection
from mindrlhf.dryrun.compile.request import TOWER, CompileRequest, compile_ranks
from mindrlhf.images.slots import fill_slots, slot_rows
from mindrlhf.specs import find_spec

pytestmark = [pytest.mark.timeout(900), SIMULATES_CANN]
# A window that is not full, several windows, a single row of tokens.
SIZES = ((56, 84), (140, 168), (28, 112))
# Attention in windows and beyond them; learned positions, and rows of DeepStack from two blocks. The third family's
# tower has nothing that these have not.
MODELS = {"qwen2_5_vl": TinyVl(), "qwen3_vl": TinyVl(family="qwen3_vl", vision_depth=2, deepstack=(0, 1))}
if RUNS_SLOW_TESTS:
    MODELS |= {f"{family}_deep": TinyVl(family=family, vision_depth=3) for family in ("qwen2_5_vl", "qwen3_vl")}
    MODELS["qwen2_vl"] = TinyVl(family="qwen2_vl", vision_depth=3)


def images_of() -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.integers(0, 256, (*size, 3), np.uint8) for size in SIZES]


def slots_of(model: TinyVl) -> tuple[int, int]:
    """One more than there are images, and patches of each."""
    vision = find_spec(config_of(model)).dims(config_of(model)).vision
    return len(SIZES) + 1, max(slot_rows(image, vision.geometry, vision.window_side) for image in images_of())


@pytest.fixture(scope="module")
def towers(tmp_path_factory) -> Path:
    """Directory of the compiled towers, `NAME.mindir`, of one process that imports MindSpore once.

    Compiled for a rank of a sharded run, alone: the tower has no collectives.
    """
    directory = tmp_path_factory.mktemp("towers")
    parallel = ParallelSection(data_parallel=2, model_parallel=2, pipeline_stage=2, micro_batch_num=2)
    requests = [
        CompileRequest(
            config_of(model),
            dataclasses.asdict(parallel),
            rank=1,
            compute_dtype="float32",
            cell=TOWER,
            slots=slots_of(model),
            mindir_file=str(directory / f"{name}.mindir"),
        )
        for name, model in MODELS.items()
    ]
    for report in compile_ranks(requests):
        assert report.collectives == ()
    return directory


@pytest.mark.parametrize("name", MODELS)
def test_rows_are_those_of_the_cpu(towers, tmp_path, name):
    import mindspore as ms
    from graph_on_cpu.model import LoweredCell
    from networks import load_hf_weights

    from mindrlhf.models.causal_lm import build_model
    from mindrlhf.models.context import prepare_mindformers

    model = MODELS[name]
    config, slots = config_of(model), slots_of(model)
    vision = find_spec(config).dims(config).vision
    prepare_mindformers("cpu", tmp_path / "mindformers")
    lowered = lower_graph(towers / f"{name}.mindir", 0, tmp_path / "lowered.mindir")
    assert lowered.replaced["FlashAttentionScore"] == vision.depth
    cell = LoweredCell(lowered)
    weights = {one.removeprefix("model."): tensor for one, tensor in weights_of(model).items()}
    for parameter_name, parameter in cell.parameters.items():
        if parameter_name.startswith("visual."):
            parameter.set_data(ms.Tensor(weights[parameter_name]))
    laid_out = fill_slots(images_of(), *slots, vision.geometry, vision.window_side)
    arrays = [ms.Tensor(array) for array in (laid_out.patches, laid_out.places, laid_out.is_patch)]
    found = cell(*arrays)[0].asnumpy()
    network = build_model(config, seq_length=8)
    load_hf_weights(network, write_tiny_vl(tmp_path / "model", model))
    expected = network.visual(*arrays).asnumpy()
    for rows in laid_out.outputs:
        error = np.abs(found[rows] - expected[rows]).max() / np.abs(expected[rows]).max()
        assert error < 1e-5
