"""The vision tower compiled for Ascend, executed on a CPU, gives the rows of the CPU's own tower."""

import dataclasses
import platform

import numpy as np
import pytest
from cpu_execution.lower import lower_graph
from cpu_execution.model import LoweredCell
from tiny_vl import TinyVl, config_of, weights_of, write_tiny_vl

from mindrlhf.config.sections import ParallelSection
from mindrlhf.dryrun.compile.request import TOWER, CompileRequest, compile_ranks
from mindrlhf.images.slots import fill_slots, slot_rows
from mindrlhf.specs import find_spec

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the simulation of CANN is x86-64 only"),
]
# A window that is not full, several windows, a single row of tokens.
SIZES = ((56, 84), (140, 168), (28, 112))


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen2_vl", "qwen3_vl"])
def test_rows_are_those_of_the_cpu(tmp_path, family):
    """Compiled for a rank of a sharded run, alone: the tower has no collectives."""
    import mindspore as ms

    from mindrlhf.models.causal_lm import build_model
    from mindrlhf.models.context import prepare_mindformers
    from mindrlhf.weights.convert import load_hf_weights

    model = TinyVl(family=family, vision_depth=3)
    config = config_of(model)
    vision = find_spec(config).dims(config).vision
    random = np.random.default_rng(0)
    images = [random.integers(0, 256, (*size, 3), np.uint8) for size in SIZES]
    slots = (len(images) + 1, max(slot_rows(image, vision.geometry, vision.window_side) for image in images))
    parallel = ParallelSection(data_parallel=2, model_parallel=2, pipeline_stage=2, micro_batch_num=2)
    path = tmp_path / "tower.mindir"
    request = CompileRequest(
        config,
        dataclasses.asdict(parallel),
        rank=1,
        compute_dtype="float32",
        cell=TOWER,
        slots=slots,
        mindir_file=str(path),
    )
    (report,) = compile_ranks([request])
    assert report.collectives == ()
    prepare_mindformers("cpu", tmp_path / "mindformers")
    lowered = lower_graph(path, 0, tmp_path / "lowered.mindir")
    assert lowered.replaced["FlashAttentionScore"] == vision.depth
    cell = LoweredCell(lowered)
    weights = {name.removeprefix("model."): tensor for name, tensor in weights_of(model).items()}
    for name, parameter in cell.parameters.items():
        if name.startswith("visual."):
            parameter.set_data(ms.Tensor(weights[name]))
    laid_out = fill_slots(images, *slots, vision.geometry, vision.window_side)
    arrays = [ms.Tensor(array) for array in (laid_out.patches, laid_out.places, laid_out.is_patch)]
    found = cell(*arrays)[0].asnumpy()
    network = build_model(config, seq_length=8)
    load_hf_weights(network, write_tiny_vl(tmp_path / "model", model))
    expected = network.visual(*arrays).asnumpy()
    for rows in laid_out.outputs:
        error = np.abs(found[rows] - expected[rows]).max() / np.abs(expected[rows]).max()
        assert error < 1e-5
