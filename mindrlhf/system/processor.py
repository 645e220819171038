"""Processor model and features, from the kernel, and the choice of OpenBLAS's kernels for it."""

from collections.abc import Collection
from pathlib import Path

OPENBLAS_CORE_VARIABLE = "OPENBLAS_CORETYPE"  # by which OpenBLAS, and so NumPy, takes the kernels of a processor
_AVX512 = frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"})
_AVX2 = frozenset({"avx2", "fma"})


def instruction_sets() -> frozenset[str]:
    """Return the kernel's names of the instruction sets of an x86 processor; of another, nothing."""
    return frozenset(first_entry("flags").split())


def first_entry(name: str, path: str = "/proc/cpuinfo") -> str:
    """Return the first entry of that name of a file of /proc, such as that of the first processor; empty without."""
    try:
        lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")


def openblas_environment(flags: Collection[str] | None = None) -> dict[str, str]:
    """Return the variable by which OpenBLAS takes the kernels for a processor's instruction sets.

    OpenBLAS chooses by a table of processor models. One that is newer than the library, as the one in NumPy 1.26 is by
    now often older, gets kernels of 2004 (Prescott), at a quarter of the speed. The instruction sets decide alike for
    old and new models, of any maker; and unlike a measurement they decide alike on every rank and in a resumed run.

    Returns:
        Nothing on other than x86 processors, and on those without AVX2, whose models all libraries know.
    """
    flags = frozenset(instruction_sets() if flags is None else flags)
    if flags >= _AVX512 | _AVX2:
        return {OPENBLAS_CORE_VARIABLE: "SKYLAKEX"}
    return {OPENBLAS_CORE_VARIABLE: "HASWELL"} if flags >= _AVX2 else {}
