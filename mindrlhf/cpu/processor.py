"""Choice of the kernels of matrix products for a processor.

It is this machine's, unless ``flags``, names as in ``/proc/cpuinfo``, or ``made_by`` are given.
"""

from collections.abc import Collection

from mindrlhf.system.processor import OPENBLAS_CORE_VARIABLE, instruction_sets, of_first_processor

_AVX512 = frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"})
_AVX2 = frozenset({"avx2", "fma"})


def maker() -> str:
    """Return who made an x86 processor, by its own name (``GenuineIntel``, ``AuthenticAMD``); of another, nothing."""
    return of_first_processor("vendor_id")


def has_avx2(flags: Collection[str] | None = None) -> bool:
    """Return whether a processor multiplies eight float32 numbers at once, and adds them in the same instruction."""
    return frozenset(instruction_sets() if flags is None else flags) >= _AVX2


def mkl_holds_back(flags: Collection[str] | None = None, made_by: str | None = None) -> bool:
    """Return whether MKL, by which PyTorch multiplies float32, leaves AVX-512 unused although the processor has it.

    MKL takes its AVX-512 kernels on Intel's processors only. On a Zen 4 it reached 60 to 95 GFLOPS on one thread where
    oneDNN, which goes by the instruction sets, reached 115 to 180.
    """
    flags = frozenset(instruction_sets() if flags is None else flags)
    made_by = maker() if made_by is None else made_by
    return flags >= _AVX512 | _AVX2 and made_by != "GenuineIntel"


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
    return {OPENBLAS_CORE_VARIABLE: "HASWELL"} if has_avx2(flags) else {}
