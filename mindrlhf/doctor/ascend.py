"""Checks of a machine with NPUs, beside the two environments; written after the documentation that each names."""

import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from mindrlhf.doctor.check import Check

ASCEND_DIR = Path("/usr/local/Ascend")
# The release that mindformers 2.0.0 (its VERSION_MAP.json) and vllm-ascend 0.23.0 (its page) both ask for.
CANN_PIN = "9.1"
GRAPHS_DRIVER = "25.5.1"  # vllm_ascend/compilation/acl_graph.py
_VLLM_ASCEND = "vllm-ascend==0.23.0"
# What a server loads of CANN (its Python package), of NNAL (its operators) and of vLLM-Ascend, and how to have it.
_SERVER_NEEDS = {
    "acl": f"load CANN {CANN_PIN} before you start: its set_env.sh puts its Python packages on PYTHONPATH",
    "libatb.so": f"install NNAL {CANN_PIN} (with CANN) and load it: source {ASCEND_DIR}/nnal/atb/set_env.sh",
    "vllm_ascend.worker.worker": "install vllm and vllm-ascend as docs/install.md says",
}
# torch_npu's numbers of the kinds of NPU (vllm_ascend/utils.py of 0.23.0).
SOC_VERSIONS = {"A2": range(220, 226), "A3": range(250, 256)}
MAX_USED_SHARE = 0.1  # of an idle device's memory; the driver itself keeps about 3 of 64 GB


def ascend_checks(environment: Mapping[str, str]) -> list[Check]:
    """Return the findings on this machine; it has NPUs."""
    return [
        check_driver(ASCEND_DIR),
        check_cann(environment, ASCEND_DIR),
        check_hccl_ports(environment),
        check_interfaces(environment, [name for _, name in socket.if_nameindex()]),
    ]


def check_driver(ascend_dir: Path) -> Check:
    """Return the finding on driver and firmware, whose versions must go together."""
    versions = {name: _version(ascend_dir / name / "version.info") for name in ("driver", "firmware")}
    missing = [name for name, version in versions.items() if not version]
    finding = ", ".join(f"{name} {version or 'unknown'}" for name, version in versions.items())
    if missing:
        fix = f"install it, or mount {ascend_dir / missing[0]} into the container"
        return Check("machine", "NPU driver", "warning", finding, fix)
    if _numbers(versions["driver"]) < _numbers(GRAPHS_DRIVER):
        fix = f"graphs of vLLM-Ascend want {GRAPHS_DRIVER}: update it, or set rollout.engine_args.enforce_eager=true"
        return Check("machine", "NPU driver", "warning", finding, fix)
    return Check("machine", "NPU driver", "ok", finding)


def check_cann(environment: Mapping[str, str], ascend_dir: Path) -> Check:
    """Return the finding on CANN: the release that is loaded, or those that are installed."""
    name, home = "CANN", environment.get("ASCEND_HOME_PATH") or environment.get("ASCEND_TOOLKIT_HOME")
    loaded = cann_version(Path(home)) if home else ""
    if loaded.startswith(f"{CANN_PIN}."):
        return Check("machine", name, "ok", f"{loaded}, loaded from {home}")
    directories = {*ascend_dir.glob("ascend-toolkit/*"), *ascend_dir.glob("cann*"), *ascend_dir.glob("*/cann*")}
    installed = {version: path for path in sorted(directories) if (version := cann_version(path))}
    found = f"{loaded} is loaded" if loaded else "none is loaded"
    have = f", installed are {', '.join(sorted(installed))}" if installed else ""
    fitting = [path for version, path in installed.items() if version.startswith(f"{CANN_PIN}.")]
    fix = f"load it: source {fitting[0]}/set_env.sh" if fitting else f"install CANN {CANN_PIN} and load its set_env.sh"
    return Check("machine", name, "warning", f"{found}{have}; both environments ask for {CANN_PIN}", fix)


def check_server(probe: Mapping[str, object] | str) -> list[Check]:
    """Return the findings on what a rollout server loads, from what its interpreter answered with its environment.

    Args:
        probe: `failures` by name, `built_for` (A2 or A3) of the wheel of vllm-ascend, and `soc`, torch_npu's number of
            the kind of NPU, and `memory`; see :func:`check_memory`.
    """
    if isinstance(probe, str):
        return [Check("rollout", "on this NPU", "error", probe, "see docs/install.md, On Ascend")]
    checks = []
    for name, fix in _SERVER_NEEDS.items():
        failure = probe["failures"].get(name)
        finding = f"cannot be loaded by the server: {failure}" if failure else "loaded as the server does"
        checks.append(Check("rollout", name, "error" if failure else "ok", finding, fix if failure else ""))
    built, soc = probe.get("built_for"), probe.get("soc")
    kind = next((kind for kind, numbers in SOC_VERSIONS.items() if soc in numbers), None)
    if built and kind and built != kind:
        fix = f"build it here: SOC_VERSION=<this NPU's> python -m pip install --no-binary vllm-ascend {_VLLM_ASCEND}"
        checks.append(Check("rollout", "vllm-ascend build", "error", f"built for {built}, this NPU is an {kind}", fix))
    return [*checks, check_memory(probe["memory"])] if probe.get("memory") else checks


def cann_version(directory: Path) -> str:
    """Return the version of a CANN installation; empty when it does not say."""
    for pattern in ("version.cfg", "*-linux/ascend_toolkit_install.info", "share/info/runtime/version.info"):
        for path in sorted(directory.glob(pattern)):
            if found := re.search(r"(?im)^.*?version.*?[=:\[]\s*\"?([0-9]+\.[0-9]+[\w.]*)", _read(path)):
                return found[1]
    return ""


def check_hccl_ports(environment: Mapping[str, str]) -> Check:
    """Return the finding on the ports by which HCCL's ranks find each other."""
    variable = "HCCL_HOST_SOCKET_PORT_RANGE"
    chosen = environment.get(variable, "auto")  # as mindrlhf sets it for ranks and servers
    if chosen == "auto":
        return Check("machine", "HCCL ports", "ok", f"chosen by the system ({variable}=auto)")
    finding = f"{variable}={chosen or 'empty'}, which two runs on a machine would share"
    return Check("machine", "HCCL ports", "warning", finding, f"unset {variable}: the system chooses free ports then")


def check_interfaces(environment: Mapping[str, str], interfaces: Sequence[str]) -> Check:
    """Return the finding on the interface by which the ranks of several machines meet."""
    variable, text = "HCCL_SOCKET_IFNAME", environment.get("HCCL_SOCKET_IFNAME", "")
    others = [name for name in interfaces if name != "lo" and not name.startswith(("docker", "veth", "br-", "virbr"))]
    if text.startswith("^") or not text and len(others) < 2:
        finding = f"{variable}={text}" if text else ", ".join(others) or "lo alone"
        return Check("machine", "HCCL interface", "ok", finding)
    if not text:
        fix = f"for runs over several machines: export {variable}={others[0]} (the one that leads to the others)"
        return Check("machine", "HCCL interface", "warning", f"several ({', '.join(others)}), none chosen", fix)
    # CANN: beginnings of names; = for whole names, ^ for all but these.
    names = text.lstrip("=").split(",")
    if any(name in names or "=" not in text and name.startswith(tuple(names)) for name in interfaces):
        return Check("machine", "HCCL interface", "ok", f"{variable}={text}")
    fix = f"name one of {', '.join(others) or 'lo'}"
    return Check("machine", "HCCL interface", "error", f"{variable}={text}, which is not there", fix)


def check_memory(memory: list[tuple[int, int]]) -> Check:
    """Return the finding on the devices' bytes, free and all, as a server sees them."""
    gib = [(free / 2**30, whole / 2**30) for free, whole in memory]
    finding = f"{len(gib)} NPUs, {sum(free for free, _ in gib):.0f} of {sum(whole for _, whole in gib):.0f} GiB free"
    held = [number for number, (free, whole) in enumerate(gib) if whole - free > MAX_USED_SHARE * whole]
    if not held:
        return Check("machine", "device memory", "ok", finding)
    shown = ", ".join(f"{gib[number][0]:.0f} of NPU {number}" for number in held)
    fix = "npu-smi info says by whom: end what an earlier run has left, or set ASCEND_RT_VISIBLE_DEVICES"
    return Check("machine", "device memory", "warning", f"{finding}; {shown}", fix)


def _numbers(version: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", version)]


def _version(path: Path) -> str:
    found = re.search(r"(?im)^version\s*=\s*(\S+)", _read(path))
    return found[1] if found else ""


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
