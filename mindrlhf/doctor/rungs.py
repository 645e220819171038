"""The rungs of ``doctor --device``, each a process of its own: ``python -m mindrlhf.doctor.rungs NAME GROUND``.

A rung tries one thing that a run does, with nothing of a run above it, and says what it found; the next one stands on
it. On a CPU the same rungs try the same things, so that they are tested where there is no NPU.
"""

import json
import os
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from mindrlhf.doctor import toy
from mindrlhf.doctor.toy import DTYPES, Ground
from mindrlhf.launch.launch import launch

FOUND_MARK = "mindrlhf-rung:"
# Mean distance of vLLM's log-probabilities at temperature 1 from transformers' in float32, on the same weights. Logits
# are divided by the temperature, and so are their errors. With bfloat16, where operators run on a host: 0.006, and
# 0.017 with experts, of which a token that is between two may get the other; of the wrong temperature 0.7.
MEAN_GAPS = {"cpu": 2e-5, "ascend": 0.05}
LARGEST_ROLLOUT_DIFFS = {"cpu": 1e-4, "ascend": 0.1}  # rollout_diff/mean_abs, in nats
LARGEST_LOSS_GAPS = {"cpu": 1e-5, "ascend": 0.02}  # relative, against one rank on the CPU
_MEMORY = re.compile(r"mindrlhf: (asleep|awake): GiB free on each NPU: (.*)")
_MOST_RESIDUE_GIB = 0.1  # more memory asleep than after the first sleep
_PROMPTS = [list(range(5, 5 + length)) for length in (3, 17, 60)]
_GIB = 1 << 30


class RungFailed(Exception):
    """Failure of a rung; the arguments are the cause and what to do, a line each."""


def environment(ground: Ground) -> dict[str, Any]:
    """Both interpreters have what a run imports; on an NPU the server loads CANN and NNAL."""
    from mindrlhf.doctor.diagnosis import diagnose

    checks = diagnose(rollout_python=ground.python, device=ground.device).checks
    # Whether MindSpore can use the NPUs is tried on the next rung.
    bad = [check for check in checks if check.status == "error" and check.name != "Ascend"]
    if bad:
        raise RungFailed(f"{bad[0].section} {bad[0].name}: {bad[0].finding}", bad[0].fix)
    warnings = [f"{check.name}: {check.finding}" for check in checks if check.status == "warning"]
    return {"checks": len(checks), "warnings": warnings}


def graph(ground: Ground) -> dict[str, Any]:
    """MindSpore compiles a graph, runs it right, and gives memory back."""
    from mindrlhf.models.context import DEVICE_TARGETS, import_mindspore

    ms = import_mindspore()
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_device(DEVICE_TARGETS[ground.device])

    class Product(ms.nn.Cell):
        def construct(self, first, second):
            return ms.ops.matmul(first, second)

    first, second = np.random.default_rng(0).standard_normal((2, 512, 512), np.float32)
    got = Product()(ms.Tensor(first), ms.Tensor(second)).asnumpy()
    expected = first.astype(np.float64) @ second
    gap = float(np.abs(got - expected).max() / np.abs(expected).max())
    if not gap < 1e-2:
        raise RungFailed(f"a product of matrices is wrong by {gap:.2g} of its size", "see npu-smi info -t health -i 0")
    found: dict[str, Any] = {"largest error": f"{gap:.1e}"}
    if ground.device == "ascend":
        large = ms.ops.ones((1 << 28,), ms.float32) + 1.0
        large.asnumpy()
        del large
        held = ms.runtime.memory_reserved()
        ms.runtime.empty_cache()
        kept = ms.runtime.memory_reserved()
        found["pool before and after empty_cache"] = f"{held / _GIB:.2f}, {kept / _GIB:.2f} GiB"
        if held >= _GIB and kept > held / 2:
            raise RungFailed(
                f"the memory pool keeps {kept / _GIB:.2f} of {held / _GIB:.2f} GiB after empty_cache",
                "update the driver (24 or newer): it has no virtual memory; leave MS_ALLOC_CONF's enable_vmm as it is",
            )
    return found


def collectives(ground: Ground) -> dict[str, Any]:
    """All devices add up."""
    if ground.num_devices == 1:
        return {"skipped": "one device has no collectives"}
    log_dir = Path(ground.directory) / "collectives"
    command = ["-m", "mindrlhf.doctor.rungs", "sum", json.dumps(asdict(ground)), str(log_dir)]
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        code = launch(command, ground.num_devices, log_dir, out=nowhere, computes_on_cpu=ground.device == "cpu")
    if code or not (log_dir / "speed").exists():
        raise RungFailed(
            f"{ground.num_devices} ranks cannot add up; logs: {log_dir}",
            "look for HCCL's error code there; are HCCL_HOST_SOCKET_PORT_RANGE and HCCL_NPU_SOCKET_PORT_RANGE unset?",
        )
    return {"all-reduce": (log_dir / "speed").read_text(encoding="utf-8")}


def all_reduce_rank(ground: Ground, log_dir: str) -> None:
    """Be a rank that adds up with the others, and write how fast."""
    from mindrlhf.models.context import DEVICE_TARGETS, import_mindspore

    ms = import_mindspore()
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_device(DEVICE_TARGETS[ground.device])
    from mindspore.communication import get_group_size, get_rank, init

    init()
    reduce, size = ms.ops.AllReduce(), get_group_size()
    value = ms.Tensor(np.full((1 << 22,), get_rank() + 1, np.float32))
    total = reduce(value).asnumpy()
    assert (total == size * (size + 1) / 2).all(), f"the sum over {size} ranks is {total[0]}"
    rounds, start = 4, time.perf_counter()
    for _ in range(rounds):
        total = reduce(value)
    total.asnumpy()
    seconds = (time.perf_counter() - start) / rounds
    if get_rank() == 0:
        (Path(log_dir) / "speed").write_text(f"{value.nbytes / seconds / 1e9:.2f} GB/s", encoding="utf-8")


def server(ground: Ground) -> dict[str, Any]:
    """A server's log-probabilities are those of transformers, at temperature 1 and at 0.5."""
    found = {}
    for name in toy.MODELS:
        with _Server(ground, name, "server") as running:
            running.publish(0)
            for temperature in (1.0, 0.5):
                found[f"{name}, temperature {temperature}"] = running.check(temperature)
    return found


def sleep(ground: Ground) -> dict[str, Any]:
    """A server that sleeps gives its memory back, as much after each of four rounds."""
    if ground.device == "cpu":
        return {"skipped": "a server on a CPU keeps its memory"}
    with _Server(ground, "dense", "sleep") as running:
        for version in range(3):
            running.generator.sleep()
            running.generator.wake()
            running.publish(version)
        running.generator.sleep()
        asleep = [free for state, free in running.memory() if state == "asleep"]
    residue = max(asleep[0]) - min(asleep[-1])
    if residue > _MOST_RESIDUE_GIB:
        raise RungFailed(
            f"a sleeping server keeps {residue:.2f} GiB more after four rounds than after one",
            "send the report: vLLM-Ascend has other versions; until then lower rollout.gpu_memory_utilization",
        )
    return {"GiB free asleep, by round": [min(free) for free in asleep], "kept": f"{residue:.2f} GiB"}


def hand_over(ground: Ground) -> dict[str, Any]:
    """New weights reach a server through the buffer, three times, dense and with experts."""
    found = {}
    for name in toy.MODELS:
        with _Server(ground, name, "hand_over") as running:
            for version in range(1, 4):
                if version > 1 and ground.device == "ascend":
                    running.generator.sleep()
                    running.generator.wake()
                running.publish(version)
                found[f"{name}, update {version}"] = running.check(1.0)
    return found


def train(ground: Ground) -> dict[str, Any]:
    """Two steps of GRPO on all devices, servers and ranks taking turns on them."""
    output = Path(ground.directory) / "train"
    config = toy.run_config(Path(ground.directory), output, ground.device, ground.num_devices, ground.python)
    _run(ground, "train", config, ground.num_devices)
    metrics = _metrics(output)
    gaps = [line["rollout_diff/mean_abs"] for line in metrics]
    if len(metrics) != 2 or not all(gap < LARGEST_ROLLOUT_DIFFS[ground.device] for gap in gaps):
        raise RungFailed(
            f"on the same weights ranks and servers differ by {gaps} nats a token (rollout_diff)",
            f"send {output}/metrics.jsonl and {output}/logs",
        )
    found: dict[str, Any] = {"rollout_diff/mean_abs": [f"{gap:.1e}" for gap in gaps]}
    found["grad_norm"] = [f"{line['grad_norm']:.3f}" for line in metrics]
    for log in sorted((output / "logs").glob("rollout_*.log")):
        if memory := _memory_of(log):
            found[f"GiB free at hand-overs, {log.stem}"] = [f"{state} {min(free):.2f}" for state, free in memory]
    return found


def same_numbers(ground: Ground) -> dict[str, Any]:
    """Two steps of fine-tuning on all devices have the losses that one rank on the CPU has."""
    directory, losses = Path(ground.directory), {}
    for device, number in ((ground.device, ground.num_devices), ("cpu", 1)):
        output = directory / f"sft_{device}_{number}"
        if not output.exists():
            _run(ground, "sft", toy.supervised_config(directory, output, device, number), number)
        losses[device, number] = [line["loss"] for line in _metrics(output)]
    here, there = losses[ground.device, ground.num_devices], losses["cpu", 1]
    gaps = [abs(one - other) / abs(other) for one, other in zip(here, there, strict=True)]
    if not all(gap < LARGEST_LOSS_GAPS[ground.device] for gap in gaps):
        raise RungFailed(f"losses are {here} here, and {there} on one CPU", f"send {directory}")
    return {"losses here": here, "losses on one CPU": there, "largest gap": f"{max(gaps):.1e}"}


def speed(ground: Ground) -> dict[str, Any]:
    """Speed of the toy's second step, to compare machines by; on Ascend also without deterministic kernels."""
    directory, names = Path(ground.directory), {
        "vllm_tps": "tokens/s sampled", "update_tps": "tokens/s trained", "timing/reshard_to_infer": "s to publish"
    }  # fmt: skip
    line = _metrics(directory / "train")[-1]
    found = {text: f"{line[name]:.3g}" for name, text in names.items()}
    if ground.device == "ascend":
        output = directory / "free"
        config = toy.run_config(directory, output, ground.device, ground.num_devices, ground.python)
        _run(ground, "train", config | {"run": config["run"] | {"deterministic": False}}, ground.num_devices)
        found["tokens/s trained, run.deterministic false"] = f"{_metrics(output)[-1]['update_tps']:.3g}"
    return found


RUNGS: dict[str, Callable[[Ground], dict[str, Any]]] = {
    "environment": environment,
    "graph": graph,
    "collectives": collectives,
    "server": server,
    "sleep": sleep,
    "hand-over": hand_over,
    "train": train,
    "same-numbers": same_numbers,
    "speed": speed,
}

_REFERENCE = """
import json, sys
import torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32, attn_implementation="eager")
for prompt, response in json.load(sys.stdin):
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response])).logits[0].double() / float(sys.argv[2])
    logprobs = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    print("logprobs", json.dumps(logprobs.gather(1, torch.tensor(response)[:, None])[:, 0].tolist()))
"""


class _Server:
    """A rollout server of a toy model, and the buffer that it takes weights from."""

    def __init__(self, ground: Ground, name: str, rung: str):
        from mindrlhf.config.rollout import RolloutSection
        from mindrlhf.rollout.servers import Server
        from mindrlhf.rollout.vllm_options import VllmOptions, devices_of
        from mindrlhf.weights.publish.buffer import TensorInfo, WeightBuffer, buffer_bytes

        self._ground, self._name, self._directory = ground, name, Path(ground.directory) / f"{rung}_{name}"
        self._dtype = DTYPES[ground.device]
        toy.write_weights(name, 0, self._directory / "0", self._dtype)
        self.log = self._directory / "rollout.log"
        infos = [TensorInfo(own, self._dtype, array.shape) for own, array in self._weights(0)]
        self.buffer = WeightBuffer.create(infos, bucket_bytes=buffer_bytes(infos) // 2)
        on_npu = ground.device == "ascend"
        options = VllmOptions(
            ground.python, str(self._directory / "0"), str(self.log), device=ground.device, dtype=self._dtype,
            max_model_len=256, max_num_seqs=8, gpu_memory_utilization=0.3, kv_cache_gib=0.25, enable_sleep=on_npu,
            env=devices_of(RolloutSection(), 0, os.environ) if on_npu else {},
        )  # fmt: skip
        self._version = 0
        self.generator = Server.start(options, self.buffer.path)

    def __enter__(self) -> "_Server":
        return self

    def __exit__(self, *_) -> None:
        self.generator.close()
        self.buffer.close()

    def _weights(self, version: int) -> list[tuple[str, np.ndarray]]:
        from mindrlhf.weights.convert import random_hf_weights

        return list(random_hf_weights(toy.MODELS[self._name], version))

    def publish(self, version: int) -> None:
        self._version = version
        for bucket in range(self.buffer.num_buckets):
            self.buffer.begin(version, bucket)
            for name, array in self._weights(version):
                if self.buffer.wants(name):
                    self.buffer.write(name, array)
            self.buffer.commit()
            self.generator.update_weights(version)

    def check(self, temperature: float) -> str:
        """Sample, and return how far a log-probability is from transformers' at most; raise where that is too far."""
        from mindrlhf.rollout.types import GenerationRequest, SamplingParams

        requests = [GenerationRequest(index, tuple(prompt), 2, seed=index) for index, prompt in enumerate(_PROMPTS)]
        done = list(self.generator.generate(requests, SamplingParams(max_tokens=24, temperature=temperature)))
        directory = self._directory / str(self._version)
        if not directory.exists():
            toy.write_weights(self._name, self._version, directory, self._dtype)
        pairs = [[_PROMPTS[one.request_id], one.token_ids.tolist()] for one in done]
        command = [self._ground.python, "-c", _REFERENCE, str(directory), str(temperature)]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        ended = subprocess.run(command, input=json.dumps(pairs), capture_output=True, text=True, env=environment)
        said = [line.removeprefix("logprobs") for line in ended.stdout.splitlines() if line.startswith("logprobs")]
        if ended.returncode or len(said) != len(pairs):
            raise RungFailed(f"transformers failed: {_last_line(ended.stderr)}", "install it as docs/install.md says")
        gaps = np.concatenate([np.abs(one.logprobs - json.loads(own)) for one, own in zip(done, said)]) * temperature
        mean, most = float(gaps.mean()), float(gaps.max())
        if not mean <= MEAN_GAPS[self._ground.device]:
            raise RungFailed(
                f"{self._name}, update {self._version}, temperature {temperature}: vLLM's log-probabilities are "
                f"{mean / temperature:.3g} from transformers' in the mean, at most {most / temperature:.3g}",
                f"send {self.log}; training on them would be wrong",
            )
        return f"{mean / temperature:.1e}, at most {most / temperature:.1e}"

    def memory(self) -> list[tuple[str, list[float]]]:
        return _memory_of(self.log)


def _memory_of(log: Path) -> list[tuple[str, list[float]]]:
    """Read from a server's log its NPUs' free memory at each hand-over, in GiB."""
    found = _MEMORY.findall(log.read_text(encoding="utf-8", errors="replace"))
    return [(state, [float(part.split()[0]) for part in parts.split(", ")]) for state, parts in found]


def _run(ground: Ground, task: str, config: dict[str, Any], workers: int) -> None:
    """Run a task of `mindrlhf` to its end."""
    import yaml

    directory = Path(ground.directory)
    own_data = directory / Path(config["data"]["train_file"]).name
    if not own_data.exists():
        _call(directory, f"data_{own_data.stem}", toy.data_arguments(directory, own_data.stem))
    name = Path(config["run"]["output_dir"]).name
    (directory / f"{name}.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    extra = ["--oversubscribe"] if config["run"]["device"] == "cpu" else []
    _call(directory, name, [task, str(directory / f"{name}.yaml"), "--workers", str(workers), *extra])


def _call(directory: Path, name: str, arguments: list[str]) -> None:
    command = [sys.executable, "-m", "mindrlhf.cli", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, errors="replace")
    (directory / f"{name}.log").write_text(ended.stdout + ended.stderr, encoding="utf-8")
    if ended.returncode:
        lines = [line for line in ended.stderr.splitlines() if "error:" in line] or [_last_line(ended.stderr)]
        raise RungFailed(lines[0], f"see {directory / name}.log")


def _metrics(output: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no message"])[-1]


def main(argv: list[str]) -> int:
    """Do a rung and print what it found as one line of JSON, or be a rank of one, or of the cells that are compared."""
    name, ground, *more = argv[0], Ground(**json.loads(argv[1])), *argv[2:]
    if more:
        from mindrlhf.doctor.layers import run_cells

        {"sum": all_reduce_rank, "cells": run_cells}[name](ground, *more)
        return 0
    try:
        found = {"found": RUNGS[name](ground)}
    except RungFailed as failure:
        found = dict(zip(("cause", "fix"), failure.args))
    except Exception as failure:
        traceback.print_exc()
        found = {"cause": f"{type(failure).__name__}: {failure}".splitlines()[0], "fix": "see the log of this rung"}
    print(FOUND_MARK + json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
