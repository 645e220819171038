"""Parser of what `npu-smi info` prints.

The format is that of Huawei's npu-smi command reference, "Querying basic information": for each NPU a line with its
name and health, then one for each of its chips with bus id and memory in use, then a table of the processes. Boards for
training add the column HBM-Usage(MB), which is then the last one.
"""

import re
from dataclasses import dataclass

_NPU = re.compile(r"^\|\s*(\d+)\s+([A-Za-z0-9_-]*[A-Za-z][\w-]*)\s*\|\s*(\w+)\s*\|")
_CHIP = re.compile(r"^\|\s*(\d+)(?:\s+\d+)?\s*\|\s*(?:[0-9A-Fa-f]{4}:\S+|NA)\s*\|.*?(\d+)\s*/\s*(\d+)\s*\|$")
_PROCESS = re.compile(r"^\|\s*(\d+)\s+(\d+)\s*\|\s*(\d+)\s*\|.*?\|\s*(\d+)\s*\|$")


@dataclass(frozen=True)
class Chip:
    """One device; memory in MB."""

    npu: int
    chip: int
    name: str
    health: str  # OK, Warning, Alarm, Critical or UNKNOWN
    used_mb: int
    total_mb: int


@dataclass(frozen=True)
class DeviceProcess:
    """A process that holds memory of a device."""

    npu: int
    chip: int
    pid: int
    memory_mb: int


@dataclass(frozen=True)
class NpuInfo:
    """Devices and their processes."""

    chips: tuple[Chip, ...]
    processes: tuple[DeviceProcess, ...]


def parse_npu_info(text: str) -> NpuInfo:
    """Read the output of `npu-smi info`; lines of no known form are passed over."""
    chips, processes, npu = [], [], None
    for line in map(str.rstrip, text.splitlines()):
        if found := _PROCESS.match(line):
            processes.append(DeviceProcess(*map(int, found.groups())))
        elif found := _NPU.match(line):
            npu = found.groups()
        elif npu is not None and (found := _CHIP.match(line)):
            chips.append(Chip(int(npu[0]), int(found[1]), npu[1], npu[2], int(found[2]), int(found[3])))
    return NpuInfo(tuple(chips), tuple(processes))
