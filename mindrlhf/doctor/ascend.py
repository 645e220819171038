"""What the doctor looks at on a machine with NPUs, beside the two environments: what hurts runs there most.

Nobody has run these checks on an NPU; they are written after the documentation that each names.
"""

import re
import shutil
import socket
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from mindrlhf.doctor.check import Check
from mindrlhf.doctor.npu_smi import NpuInfo, parse_npu_info

ASCEND_DIR = Path("/usr/local/Ascend")
# The release that mindformers 2.0.0 (its VERSION_MAP.json) and vllm-ascend 0.23.0 (its page) both ask for.
CANN_PIN = "9.1"
# CANN 8.5, environment variables, HCCL_IF_BASE_PORT: 32 ports from it on, 16 before that release.
HCCL_BASE_PORT, NUM_HCCL_PORTS = 60000, 32
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
SHARED_FILE_SYSTEMS = ("nfs", "lustre", "gpfs", "ceph", "beegfs", "glusterfs", "cifs", "smb3", "dpc", "fuse")
_NPU_SMI_TIMEOUT_S = 30.0


def ascend_checks(environment: Mapping[str, str]) -> list[Check]:
    """Return the findings on this machine; it has NPUs."""
    return [
        check_driver(ASCEND_DIR),
        check_cann(environment, ASCEND_DIR),
        check_allocator(environment),
        check_weight_format(environment),
        check_hccl_ports(environment, _read("/proc/sys/net/ipv4/ip_local_port_range"), _reserved(), _listening()),
        check_interfaces(environment, [name for _, name in socket.if_nameindex()]),
        check_storage(Path.cwd(), _read("/proc/mounts")),
        *check_devices(_npu_info()),
    ]


def check_driver(ascend_dir: Path) -> Check:
    """Return the finding on driver and firmware, whose versions must go together."""
    versions = {name: _version(ascend_dir / name / "version.info") for name in ("driver", "firmware")}
    missing = [name for name, version in versions.items() if not version]
    finding = ", ".join(f"{name} {version or 'unknown'}" for name, version in versions.items())
    if missing:
        fix = f"install it, or mount {ascend_dir / missing[0]} into the container"
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
            the kind of NPU.
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
    return checks


def cann_version(directory: Path) -> str:
    """Return the version of a CANN installation; empty when it does not say."""
    for pattern in ("version.cfg", "*-linux/ascend_toolkit_install.info", "share/info/runtime/version.info"):
        for path in sorted(directory.glob(pattern)):
            if found := re.search(r"(?im)^.*?version.*?[=:\[]\s*\"?([0-9]+\.[0-9]+[\w.]*)", _read(path)):
                return found[1]
    return ""


def check_allocator(environment: Mapping[str, str]) -> Check:
    """Return the finding on expandable segments, which vLLM's sleep mode does not go with (vllm-ascend 9242)."""
    name, options = "PYTORCH_NPU_ALLOC_CONF", environment.get("PYTORCH_NPU_ALLOC_CONF", "")
    if re.search(r"expandable_segments\s*:\s*true", options, re.IGNORECASE):
        fix = f"export {name}=expandable_segments:False, or set it in rollout.env"
        return Check("machine", "expandable segments", "error", f"on in {name}; vLLM cannot sleep with them", fix)
    return Check("machine", "expandable segments", "ok", "off for the rollout server")


def check_weight_format(environment: Mapping[str, str]) -> Check:
    """Return the finding on the layout NZ of weights, in which they cannot be reloaded."""
    value = environment.get("VLLM_ASCEND_ENABLE_NZ")
    said = "" if value in (None, "0") else f"; VLLM_ASCEND_ENABLE_NZ={value} of this shell does not reach it"
    return Check("machine", "NZ weights", "ok", f"off for the rollout server{said}")


def check_hccl_ports(
    environment: Mapping[str, str], ephemeral: str, reserved: Sequence[range], listening: Iterable[int]
) -> Check:
    """Return the finding on the ports by which HCCL's ranks find each other.

    Args:
        environment: of the ranks; with the range empty CANN takes ports from HCCL_IF_BASE_PORT on.
        ephemeral: first and last port that the system gives away by itself.
        reserved: ports that it does not give away.
        listening: ports on which somebody listens.
    """
    name, variable = "HCCL ports", "HCCL_HOST_SOCKET_PORT_RANGE"
    if environment.get(variable, "auto") == "auto":  # as mindrlhf sets it for ranks and servers
        return Check("machine", name, "ok", f"chosen by the system ({variable}=auto)")
    if environment[variable]:
        return _check_port_range(variable, environment[variable], listening)
    text = environment.get("HCCL_IF_BASE_PORT", str(HCCL_BASE_PORT))
    if not text.isdecimal() or not 1024 <= int(text) <= 65520:
        return Check("machine", name, "error", f"HCCL_IF_BASE_PORT={text}", "give a port between 1024 and 65520")
    ports = range(int(text), min(int(text) + NUM_HCCL_PORTS, 65536))
    finding = f"{ports[0]}-{ports[-1]}"
    taken = sorted(set(listening) & set(ports))
    if taken:
        fix = "end who listens there, or export HCCL_IF_BASE_PORT with 32 free ports from it on"
        return Check("machine", name, "error", f"{finding}, of which {', '.join(map(str, taken))} are taken", fix)
    first, last = (int(word) for word in ephemeral.split()[:2]) if len(ephemeral.split()) >= 2 else (1, 0)
    given_away = [port for port in ports if first <= port <= last and not any(port in part for part in reserved)]
    if given_away:
        fix = f"sysctl -w net.ipv4.ip_local_reserved_ports={finding}"
        return Check("machine", name, "warning", f"{finding}, which the system may give to others", fix)
    return Check("machine", name, "ok", f"{finding}, free and kept from others")


def _check_port_range(variable: str, text: str, listening: Iterable[int]) -> Check:
    try:
        ports = {port for part in parse_ports(text) for port in part}
    except ValueError:
        ports = set()
    finding = f"{variable}={text}, {len(ports - set(listening))} ports free"
    if len(ports - set(listening)) < NUM_HCCL_PORTS:  # ranks and servers share them
        fix = f"unset {variable}, or give a range with {NUM_HCCL_PORTS} free ports, as 60000-60050"
        return Check("machine", "HCCL ports", "error", finding, fix)
    return Check("machine", "HCCL ports", "ok", finding)


def check_interfaces(environment: Mapping[str, str], interfaces: Sequence[str]) -> Check:
    """Return the finding on the interface by which the ranks of several machines meet."""
    name, wanted = "HCCL interface", environment.get("HCCL_SOCKET_IFNAME", "")
    others = [one for one in interfaces if one != "lo" and not one.startswith(("docker", "veth", "br-", "virbr"))]
    if wanted:
        # CANN, HCCL_SOCKET_IFNAME: beginnings of names; = for whole names, ^ for all but these.
        names = wanted.lstrip("^=").split(",")
        fits = [one for one in interfaces if one in names or ("=" not in wanted and one.startswith(tuple(names)))]
        if not fits and not wanted.startswith("^"):
            fix = f"name one of {', '.join(others) or 'lo'}"
            return Check("machine", name, "error", f"HCCL_SOCKET_IFNAME={wanted}, which is not there", fix)
        return Check("machine", name, "ok", f"HCCL_SOCKET_IFNAME={wanted}")
    if len(others) > 1:
        fix = (
            f"for runs over several machines: export HCCL_SOCKET_IFNAME={others[0]} (the one that leads to the others)"
        )
        return Check("machine", name, "warning", f"several ({', '.join(others)}), none chosen", fix)
    return Check("machine", name, "ok", ", ".join(others) or "lo alone")


def check_storage(directory: Path, mounts: str) -> Check:
    """Return the finding on where a run that starts here keeps its checkpoints; ``mounts`` is /proc/mounts."""
    best, kind = Path("/"), "unknown"
    for line in mounts.splitlines():
        words = line.split()
        if len(words) < 3:
            continue
        mount = Path(words[1].encode().decode("unicode_escape"))
        if directory.is_relative_to(mount) and len(mount.parts) >= len(best.parts):
            best, kind = mount, words[2]
    if kind.startswith(SHARED_FILE_SYSTEMS):
        return Check("machine", "storage", "ok", f"{directory} is on {kind}, which machines can share")
    finding = f"{directory} is on {kind}, which is this machine's own"
    fix = "for runs over several machines set run.output_dir and checkpoint.save_dir to shared storage"
    return Check("machine", "storage", "warning", finding, fix)


def check_devices(info: NpuInfo | str) -> list[Check]:
    """Return the findings on the devices from what `npu-smi info` said, or why it could not be asked."""
    if isinstance(info, str):
        return [Check("machine", "devices", "warning", info, "mount npu-smi and the driver into the container")]
    if not info.chips:
        return [
            Check("machine", "devices", "error", "npu-smi names no device", "see npu-smi info, and the driver's log")
        ]
    ill = [f"NPU {one.npu} is {one.health}" for one in info.chips if one.health != "OK"]
    total_gb = sum(one.total_mb for one in info.chips) / 1024
    free_gb = total_gb - sum(one.used_mb for one in info.chips) / 1024
    finding = f"{len(info.chips)} of {info.chips[0].name}, {free_gb:.0f} of {total_gb:.0f} GiB free"
    if ill:
        fix = "see npu-smi info -t health -i NPU; leave them out by ASCEND_RT_VISIBLE_DEVICES"
        return [Check("machine", "devices", "error", f"{finding}; {', '.join(ill)}", fix)]
    checks = [Check("machine", "devices", "ok", finding)]
    if info.processes:
        shown = [
            f"{one.pid} ({one.name or 'no name'}, NPU {one.npu}, {one.memory_mb} MB)" for one in info.processes[:4]
        ]
        more = f" and {len(info.processes) - 4} more" if len(info.processes) > 4 else ""
        fix = "end what an earlier run has left, or leave its devices out by ASCEND_RT_VISIBLE_DEVICES"
        checks.append(Check("machine", "on the devices", "warning", f"processes {', '.join(shown)}{more}", fix))
    busy = {(one.npu, one.chip) for one in info.processes}
    held = [
        one for one in info.chips if one.used_mb > MAX_USED_SHARE * one.total_mb and (one.npu, one.chip) not in busy
    ]
    if held:
        shown = ", ".join(f"NPU {one.npu} {one.used_mb} of {one.total_mb} MB" for one in held[:4])
        fix = "somebody else's container has it, or a process has died badly: npu-smi set -t reset -i NPU -c CHIP"
        checks.append(Check("machine", "device memory", "warning", f"held by no process: {shown}", fix))
    return checks


def _npu_info() -> NpuInfo | str:
    if shutil.which("npu-smi") is None:
        return "npu-smi is not on PATH"
    try:
        ended = subprocess.run(
            ["npu-smi", "info"], capture_output=True, text=True, errors="replace", timeout=_NPU_SMI_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as failure:
        return f"npu-smi info: {type(failure).__name__}"
    if ended.returncode:
        return f"npu-smi info ends with {ended.returncode}: {' '.join((ended.stderr or ended.stdout).split())[:120]}"
    return parse_npu_info(ended.stdout)


def _version(path: Path) -> str:
    found = re.search(r"(?im)^version\s*=\s*(\S+)", _read(path))
    return found[1] if found else ""


def parse_ports(text: str) -> list[range]:
    """Return the ranges of a list of ports such as ``8080,60000-60031``."""
    parts = [part.partition("-") for part in text.strip().split(",") if part.strip()]
    return [range(int(first), int(last or first) + 1) for first, _, last in parts]


def _reserved() -> list[range]:
    return parse_ports(_read("/proc/sys/net/ipv4/ip_local_reserved_ports"))


def _listening() -> set[int]:
    lines = [line.split() for name in ("tcp", "tcp6") for line in _read(f"/proc/net/{name}").splitlines()[1:]]
    return {int(words[1].rpartition(":")[2], 16) for words in lines if len(words) > 3 and words[3] == "0A"}


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
