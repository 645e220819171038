"""vLLM workers that say what they read of each tensor, and load buffers that hold nothing else; rollout interpreter.

usage: python tests/helpers/required_slices_probe.py < JSON of (config of an engine, tensors as name, dtype, shape)

Prints "probe" and JSON: "required" of each worker, before anything was loaded and later, and of all ("together");
whether tracing left every tensor in its place ("stayed"); after each step what each worker held, as digests ("steps"),
and why it could not load ("errors"); "samples" of the whole buffer and of those with parts.
"""

import hashlib
import json
import os
import sys

import numpy as np
import torch

from mindrlhf.rollout.server.engine import VllmEngine, build_engine
from mindrlhf.rollout.server.worker import WorkerExtension
from mindrlhf.weights.publish.buffer import WeightBuffer, WeightBufferError
from mindrlhf.weights.tensors import TensorInfo

SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "stop_token_ids": []}


def digest(tensor: torch.Tensor) -> str:
    values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(values.numpy().tobytes()).hexdigest()


class Probe(WorkerExtension):
    """What each worker can be asked."""

    def watch(self) -> None:
        """Note the parameters of layers when they are loaded and the kernels, which may repack them, are not set up."""
        self.loaded = loaded = {}
        names = {id(module): name for name, module in self.model_runner.get_model().named_modules()}

        def watching(process):
            def noted(method, layer):
                for name, parameter in layer.named_parameters(recurse=False):
                    loaded[f"{names[id(layer)]}.{name} {tuple(parameter.shape)}"] = digest(parameter)
                return process(method, layer)

            return noted

        methods = [getattr(module, "quant_method", None) for module in self.model_runner.get_model().modules()]
        for kind in {type(method) for method in methods if hasattr(method, "process_weights_after_loading")}:
            kind.process_weights_after_loading = watching(kind.process_weights_after_loading)

    def held(self) -> dict[str, str]:
        """Digests of the model's parameters and buffers, and of the parameters that were loaded since the last call."""
        model, loaded = self.model_runner.get_model(), {f"loaded {name}": value for name, value in self.loaded.items()}
        self.loaded.clear()
        tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        return loaded | {name: digest(tensor) for name, tensor in tensors}

    def places(self) -> list:
        """Which tensors the layers have, in which order, and where."""
        return [
            [name, key, None if tensor is None else [id(tensor), tensor.data_ptr()]]
            for name, module in self.model_runner.get_model().named_modules()
            for tensors in (module._parameters, module._buffers)
            for key, tensor in tensors.items()
        ]

    def load_own(self, paths: list[str], version: int, in_place: bool) -> str | None:
        """Load the buffer of this worker; return why it cannot."""
        try:
            assert self.load_weight_buffer(paths[self.rank], version, in_place), "the buffer has everything at once"
            return None
        except WeightBufferError as error:
            return str(error)


def values_of(infos, seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {
        info.name: (0.08 * random.standard_normal(info.shape) + (len(info.shape) == 1)).astype(np.float32)
        for info in infos
    }


def whole_buffer(infos, values, version) -> WeightBuffer:
    buffer = WeightBuffer.create(infos)
    buffer.begin(version)
    for name, array in values.items():
        buffer.write(name, array)
    buffer.commit()
    return buffer


def partial_buffer(infos, values, version, required) -> WeightBuffer:
    """A buffer with what a worker required, and without numbers everywhere else."""
    buffer = WeightBuffer.create(infos)
    buffer.begin(version)
    for info in infos:
        buffer.view(info.name, [(0, size) for size in info.shape])[...] = np.nan
        boxes = required[info.name]
        for box in [tuple((0, size) for size in info.shape)] if boxes is None else boxes:
            region = tuple(slice(start, stop) for start, stop in box)
            buffer.write(info.name, values[info.name][(*region, ...)], region)
    buffer.commit(required=required)
    return buffer


def samples(engine) -> list:
    prompts = [list(range(3 + i, 13 + i)) for i in range(3)]
    engine.submit(prompts, [2] * 3, [1, 2, 3], [8] * 3, SAMPLING, [[]] * 3)
    finished = []
    while engine.num_pending:
        finished += engine.step()
    return sorted([s.request_id, s.sample_index, s.token_ids.tolist(), s.logprobs.tolist()] for s in finished)


PROBE = "required_slices_probe.Probe"


def probe(config, infos) -> dict:
    arguments = VllmEngine._engine_arguments
    VllmEngine._engine_arguments = lambda *given: arguments(*given) | {"worker_extension_cls": PROBE}
    engine = build_engine(config)
    call, num_workers = engine._engine.collective_rpc, config["tensor_parallel_size"]
    in_place = engine._weights_load_in_place
    call("watch")
    steps, errors = {}, {}

    def update(step, buffers, version):
        errors[step] = call("load_own", args=([buffer.path for buffer in buffers], version, in_place))
        assert engine._engine.reset_prefix_cache()
        steps[step] = call("held")

    first, second = values_of(infos, seed=1), values_of(infos, seed=2)
    required = [call("find_required_slices", args=(infos,))]  # before anything was loaded, and after
    update("first", [whole_buffer(infos, first, 1)] * num_workers, 1)
    before = call("places")
    required.append(call("find_required_slices", args=(infos,)))
    steps["after tracing"] = call("held")
    stayed = before == call("places")
    update("second", [whole_buffer(infos, second, 2)] * num_workers, 2)
    wanted = samples(engine)
    update("first again", [whole_buffer(infos, first, 3)] * num_workers, 3)
    partial = [partial_buffer(infos, second, 4, own) for own in required[0]]
    together = engine.find_required_slices(infos)
    update("second, needed parts alone", partial, 4)
    found = samples(engine)
    if num_workers > 1:
        update("parts of the other", partial[::-1], 4)
    engine.close()
    answers = {"required": required, "together": together, "stayed": stayed, "samples": [wanted, found]}
    return answers | {"steps": steps, "errors": errors}


if __name__ == "__main__":
    given, tensors = json.load(sys.stdin)
    result = probe(given, tuple(TensorInfo(name, dtype, tuple(shape)) for name, dtype, shape in tensors))
    print("probe", json.dumps(result), flush=True)
    os._exit(0)
