"""Choice of OpenBLAS's kernels for a processor."""

from collections.abc import Collection

from mindrlhf.system.processor import OPENBLAS_CORE_VARIABLE, instruction_sets

_AVX512 = frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"})
_AVX2 = frozenset({"avx2", "fma"})


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
