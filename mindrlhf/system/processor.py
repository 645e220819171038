"""Processor model and features, from the kernel."""

from pathlib import Path

OPENBLAS_CORE_VARIABLE = "OPENBLAS_CORETYPE"  # by which OpenBLAS, and so NumPy, takes the kernels of a processor


def instruction_sets() -> frozenset[str]:
    """Return the kernel's names of the instruction sets of an x86 processor; of another, nothing."""
    return frozenset(of_first_processor("flags").split())


def of_first_processor(name: str) -> str:
    """Return an entry of ``/proc/cpuinfo``, of the first processor; empty where there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")
