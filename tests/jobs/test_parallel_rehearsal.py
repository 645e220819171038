"""The actor that `mindrlhf train` builds for a sharded model, on every rank, with real compilations for Ascend.

There is no NPU here, so nothing is computed: what is checked is that the product's own code compiles its graphs, takes
its shards of a Hugging Face directory and of a checkpoint of another layout, and that what all ranks publish and save
is the model, bit for bit. What the graphs compute is checked by test_execution.py.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import xxhash
from execution_cases import ROW_LENGTH, hf_weights, mf_weights
from execution_cases import UNCUT_MODEL as MODEL
from slow_tests import SIMULATES_CANN, SLOW

from mindrlhf.layout.layout import Layout, parameter_layouts
from mindrlhf.shards.save import finish_saving, plan_saving, write_rank
from mindrlhf.specs import find_spec
from mindrlhf.specs.fuse import split
from mindrlhf.weights.convert import export_hf
from mindrlhf.weights.publish.buffer import TensorInfo, WeightBuffer
from mindrlhf.weights.sharded import ShardedDirectory

pytestmark = [pytest.mark.timeout(1500), SIMULATES_CANN]

# Number of ranks, parallel_config, and the model beside the actor.
CASES = {
    "pp2_reference": (2, {"pipeline_stage": 2, "micro_batch_num": 2}, "reference"),
    "pp2_critic": (2, {"pipeline_stage": 2, "micro_batch_num": 2}, "critic"),
    "tp2_dp2_reference": (4, {"model_parallel": 2}, "reference"),
    "tp2_dp2_critic": (4, {"model_parallel": 2, "enable_parallel_optimizer": True}, "critic"),
    "dp2_optimizer_parallel": (2, {"enable_parallel_optimizer": True}, ""),
}
_OF_EVERY_DAY = "dp2_optimizer_parallel"  # stages are executed every day by test_execution.py
CASE_PARAMS = [pytest.param(name, marks=() if name == _OF_EVERY_DAY else SLOW) for name in CASES]
CRITIC = {**MODEL, "architectures": ["Qwen2ForSequenceClassification"], "num_labels": 1}
SAVED_LAYOUT = "dp=2,mp=2,pp=1,opt=1"


def checkpoint_arrays(model: dict = MODEL) -> dict[str, np.ndarray]:
    """Other weights than those of the start, and moments, whole, by MindFormers name."""
    random = np.random.default_rng(1)
    arrays = {name: (array + 1).astype(np.float32) for name, array in mf_weights(model).items()}
    for name, array in list(arrays.items()):
        for prefix in ("exp_avg.", "exp_avg_sq."):
            arrays[prefix + name] = random.standard_normal(array.shape).astype(np.float32)
    return {**arrays, "global_step": np.array([5], np.int32)}


def write_checkpoint(directory: Path, model: dict = MODEL) -> None:
    """What a run in ``SAVED_LAYOUT`` would have saved of a model."""
    spec, arrays = find_spec(model), checkpoint_arrays(model)
    layout = Layout.parse(SAVED_LAYOUT)
    layouts = parameter_layouts(spec, spec.dims(model), layout)
    manifest = plan_saving(model, layouts, layout, "float32", state=("exp_avg.", "exp_avg_sq."))
    for rank in range(layout.world_size):
        names = manifest.infos_of_rank(rank)
        shards = ((name, arrays[name][manifest.arrays[name].layout.shard_of(rank)]) for name in names)
        write_rank(directory, manifest, rank, shards)
    finish_saving(directory, manifest, model, layouts, layout)


def whole(model: dict) -> dict[str, np.ndarray]:
    """The weights of the checkpoint by Hugging Face name."""
    spec, arrays = find_spec(model), checkpoint_arrays(model)
    parts = ((rule, split(rule, spec.dims(model), arrays[rule.mf_name])) for rule in spec.rules(spec.dims(model)))
    return {name: tensor for rule, tensors in parts for name, tensor in zip(rule.hf_names, tensors)}


def make_buffer(model: dict) -> WeightBuffer:
    infos = [TensorInfo(name, "float32", tensor.shape) for name, tensor in hf_weights(model).items()]
    return WeightBuffer.create(infos)


def committed(buffer: WeightBuffer, written: list[list]) -> dict[str, np.ndarray]:
    """What the ranks have written to a buffer, each element once."""
    with buffer:
        buffer.begin(1)
        buffer.commit([one for own in written for one in own])
        buffer.verify(1)
        return {name: array.copy() for name, _, array in buffer.tensors(1)}


@pytest.fixture(scope="module", params=CASE_PARAMS)
def rehearsal(request, tmp_path_factory):
    """The directory that the ranks saved to, the buffers' tensors, the critic's last, and what the ranks report."""
    world_size, parallel, other = CASES[request.param]
    root = tmp_path_factory.mktemp(request.param)
    export_hf(iter(hf_weights(MODEL).items()), MODEL, root / "model")
    write_checkpoint(root / "checkpoint" / "model")
    if other == "critic":
        export_hf(iter(hf_weights(CRITIC).items()), CRITIC, root / "critic")
        write_checkpoint(root / "checkpoint" / "critic", CRITIC)
    ppo = {"name": "ppo", "advantage": "gae"} if other == "critic" else {}
    config = {
        "run": {"output_dir": str(root / "run"), "device": "ascend"},
        "model": {"path": str(root / "model"), "compute_dtype": "bfloat16"},
        "data": {"train_file": "none", "tokenizer_dir": "none"},
        "algorithm": {"beta": 0.04 if other == "reference" else 0.0, **ppo},
        "critic": {"path": str(root / "critic") if ppo else ""},
        "training": {"micro_batch_size": 2},
        "parallel_config": parallel,
    }
    buffers = [make_buffer(MODEL) for _ in range(2)]
    critic_buffer = make_buffer(CRITIC)
    work = {
        "config": config,
        "row_lengths": [ROW_LENGTH],
        "world_size": world_size,
        "checkpoint": str(root / "checkpoint"),
        "save": str(root / "saved"),
        "buffers": [buffer.path for buffer in buffers],
        "critic_buffer": critic_buffer.path if ppo else "",
    }
    (root / "rehearsal.json").write_text(json.dumps(work))
    program = Path(__file__).with_name("rehearsal_rank.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(program.parents[2])}
    finished = subprocess.run(
        [sys.executable, str(program), str(root)],
        cwd=root,  # MindSpore writes its order of kernels there
        env=environment,
        capture_output=True,
        text=True,
        timeout=1400,
    )
    logs = {path.name: path.read_text()[-2000:] for path in root.glob("log_*")}
    assert finished.returncode == 0, (finished.stderr[-2000:], logs)
    reports = [json.loads((root / f"rank_{rank}.json").read_text()) for rank in range(world_size)]
    tensors = [
        committed(buffer, [report["written"][number] for report in reports]) for number, buffer in enumerate(buffers)
    ]
    with critic_buffer:
        tensors.append(committed(critic_buffer, [report["of_critic"] for report in reports]) if ppo else {})
    return root, tensors, reports


def test_ranks_publish_the_model_they_started_from(rehearsal):
    for name, tensor in hf_weights(MODEL).items():
        np.testing.assert_array_equal(rehearsal[1][0][name], tensor, err_msg=name)


def test_ranks_publish_what_they_restored_from_another_layout(rehearsal):
    for name, tensor in whole(MODEL).items():
        np.testing.assert_array_equal(rehearsal[1][1][name], tensor, err_msg=name)
    if rehearsal[1][2]:
        for name, tensor in whole(CRITIC).items():
            np.testing.assert_array_equal(rehearsal[1][2][name], tensor, err_msg=f"critic: {name}")


def test_ranks_save_weights_moments_and_step_count(rehearsal):
    for directory, model in (("model", MODEL), ("critic", CRITIC)):
        if directory == "model" or rehearsal[1][2]:
            saved = ShardedDirectory(rehearsal[0] / "saved" / directory)
            for name, array in checkpoint_arrays(model).items():
                np.testing.assert_array_equal(saved.read_array(name), array, err_msg=name)


def test_ranks_tell_the_checksums_of_their_files(rehearsal):
    root, _, reports = rehearsal
    checksums = {name: value for report in reports for name, value in report["checksums"].items()}
    files = list((root / "saved").rglob("*.safetensors"))
    assert len(files) >= len(reports)
    assert checksums == {
        str(path.relative_to(root / "saved")): xxhash.xxh3_64_hexdigest(path.read_bytes()) for path in files
    }


def test_the_expected_size_of_a_checkpoint_is_that_of_its_data(rehearsal):
    size_bytes = sum(path.stat().st_size for path in (rehearsal[0] / "saved").rglob("*.safetensors"))
    for report in rehearsal[2]:
        # Beside the data there are only headers.
        assert 0.98 * size_bytes < report["state_size_bytes"] <= size_bytes


def test_every_rank_left_mindspores_strategy_file(rehearsal):
    files = list((rehearsal[0] / "run" / "logs" / "strategy").rglob("*.ckpt"))
    assert len(files) == len(rehearsal[2])
