"""AdamW saved and restored, in a fresh process and over used state: the same bits as never stopped."""

import os
import subprocess
import sys

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn

from mindrlhf.config.training import OptimizerSection
from mindrlhf.models.context import prepare_mindformers
from mindrlhf.training.engine.cells import OptimizerStep, make_accumulators
from mindrlhf.training.optimizers import make_optimizer, optimizer_state
from mindrlhf.weights.array_file import load_arrays, save_arrays
from mindrlhf.weights.tensors import array_infos

OPTIONS = OptimizerSection(start_lr=1e-2, weight_decay=0.1)
SHAPES = {"up.weight": (5, 3), "up.bias": (5,), "down.weight": (2, 5), "down.bias": (2,)}


class Network(nn.Cell):
    """A model of two layers; only its parameters matter."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Dense(3, 5), nn.Dense(5, 2)


class Training:
    """A network under an optimiser; the gradients of a step depend on nothing but its number."""

    def __init__(self):
        self.network = Network()
        self.parameters = ms.ParameterTuple(self.network.trainable_params())
        self.optimizer = make_optimizer(self.parameters, OPTIONS, {})
        self.accumulators = make_accumulators(self.parameters)
        self.step_cell = OptimizerStep(self.optimizer, self.accumulators, OPTIONS.max_grad_norm, 1)

    def set_weights(self, arrays):
        for parameter in self.parameters:
            parameter.set_data(ms.Tensor(arrays[parameter.name].copy()))

    def weights(self):
        return {parameter.name: parameter.asnumpy().copy() for parameter in self.parameters}

    def run(self, steps):
        for step in steps:
            for index, accumulator in enumerate(self.accumulators):
                gradient = np.random.default_rng([step, index]).standard_normal(accumulator.shape, np.float32)
                accumulator.set_data(ms.Tensor(gradient))
            self.optimizer.learning_rate.set_data(ms.Tensor(OPTIONS.start_lr / (step + 1), ms.float32))
            self.step_cell()

    def save(self, directory):
        for name, arrays in (("optimizer", self.state()), ("weights", self.weights())):
            save_arrays(directory / f"{name}.safetensors", arrays.items(), array_infos(arrays))

    def state(self):
        return {name: parameter.asnumpy().copy() for name, parameter in optimizer_state(self.optimizer).items()}

    def load(self, directory):
        self.set_weights(load_arrays(directory / "weights.safetensors"))
        saved = load_arrays(directory / "optimizer.safetensors")
        for name, parameter in optimizer_state(self.optimizer).items():
            parameter.set_data(ms.Tensor(saved[name].copy()))


def start_mindspore(log_dir):
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_device("CPU")
    ms.set_context(runtime_num_threads=1)
    prepare_mindformers("cpu", log_dir)


def first_weights():
    return {
        name: np.random.default_rng(index).standard_normal(shape, np.float32)
        for index, (name, shape) in enumerate(SHAPES.items())
    }


def state(training):
    """Copies of all that the next step depends on."""
    return {**training.weights(), **training.state()}


def assert_same_bits(found, expected):
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name].view(np.uint8), array.view(np.uint8), err_msg=name)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run of four steps, saved after two: (directory, state after two, state after four)."""
    start_mindspore(tmp_path_factory.mktemp("logs"))
    directory = tmp_path_factory.mktemp("saved")
    training = Training()
    training.set_weights(first_weights())
    training.run(range(2))
    training.save(directory)
    middle = state(training)
    training.run(range(2, 4))
    return directory, middle, state(training)


def adamw(weights, gradients, decay, steps):
    """AdamW in float64 (Loshchilov and Hutter 2019, algorithm 2), gradients already clipped."""
    mean = square = np.zeros_like(weights, np.float64)
    for step in steps:
        lr = OPTIONS.start_lr / (step + 1)
        mean = OPTIONS.beta1 * mean + (1 - OPTIONS.beta1) * gradients[step]
        square = OPTIONS.beta2 * square + (1 - OPTIONS.beta2) * gradients[step] ** 2
        unbiased = mean / (1 - OPTIONS.beta1 ** (step + 1))
        scale = np.sqrt(square / (1 - OPTIONS.beta2 ** (step + 1))) + OPTIONS.epsilon
        weights = weights - lr * decay * weights - lr * unbiased / scale
    return weights, mean, square


def test_the_saved_arrays_are_the_moments_of_adamw_by_parameter_name(runs):
    directory, _, final = runs
    saved = load_arrays(directory / "optimizer.safetensors")
    assert set(saved) == {"global_step", *(f"{kind}.{name}" for kind in ("exp_avg", "exp_avg_sq") for name in SHAPES)}
    assert saved["global_step"].tolist() == [2]
    gradients = {name: [] for name in SHAPES}
    for step in range(4):
        raw = [np.random.default_rng([step, index]).standard_normal(shape, np.float32).astype(np.float64)
               for index, shape in enumerate(SHAPES.values())]  # fmt: skip
        norm = np.sqrt(sum((gradient**2).sum() for gradient in raw))
        for name, gradient in zip(SHAPES, raw):
            gradients[name].append(gradient * min(1.0, OPTIONS.max_grad_norm / (norm + 1e-6)))
    for name, weights in first_weights().items():
        decay = OPTIONS.weight_decay if weights.ndim > 1 else 0.0
        _, mean, square = adamw(weights, gradients[name], decay, range(2))
        np.testing.assert_allclose(saved[f"exp_avg.{name}"], mean, rtol=1e-4, atol=1e-7)
        np.testing.assert_allclose(saved[f"exp_avg_sq.{name}"], square, rtol=1e-4, atol=1e-9)
        np.testing.assert_allclose(
            final[name], adamw(weights, gradients[name], decay, range(4))[0], rtol=1e-5, atol=1e-6
        )


def test_a_fresh_process_continues_bit_for_bit(runs, tmp_path):
    directory, _, final = runs
    resumed = subprocess.run(
        [sys.executable, __file__, str(directory), str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert resumed.returncode == 0, resumed.stderr
    found = {**load_arrays(tmp_path / "weights.safetensors"), **load_arrays(tmp_path / "optimizer.safetensors")}
    assert_same_bits(found, final)


def test_a_used_optimizer_goes_back(runs):
    directory, middle, final = runs
    training = Training()
    training.run(range(7, 10))
    training.load(directory)
    assert_same_bits(state(training), middle)
    training.run(range(2, 4))
    assert_same_bits(state(training), final)
    # Training on must not reach back into what was loaded from.
    assert load_arrays(directory / "optimizer.safetensors")["global_step"].tolist() == [2]


def resume(directory, out_dir):
    """The fresh process: load, make two more steps, save."""
    start_mindspore(out_dir / "logs")
    training = Training()
    training.load(directory)
    training.run(range(2, 4))
    training.save(out_dir)


if __name__ == "__main__":
    from pathlib import Path

    resume(Path(sys.argv[1]), Path(sys.argv[2]))
