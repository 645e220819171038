"""Kernels of OpenBLAS for processors of several makers, and what NumPy's own copy does with the choice."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from mindrlhf.system import processor

HASWELL = "fpu sse2 avx avx2 fma bmi2"
ZEN_4 = HASWELL + " avx512f avx512dq avx512ifma avx512cd avx512bw avx512vl avx512_bf16"
KNIGHTS_LANDING = HASWELL + " avx512f avx512er avx512cd avx512pf"


@pytest.mark.parametrize(
    "flags, core",
    [(ZEN_4, "SKYLAKEX"), (HASWELL, "HASWELL"), (KNIGHTS_LANDING, "HASWELL"), ("fpu sse2 avx", None), ("", None)],
    ids=["avx512", "avx2", "avx512-without-bw", "avx", "arm"],
)
def test_instruction_sets_decide(flags, core):
    expected = {} if core is None else {"OPENBLAS_CORETYPE": core}
    assert processor.openblas_environment(flags.split()) == expected


def test_numpy_computes_with_the_kernels_of_the_environment():
    """A product under each choice, in a fresh interpreter; the bits may differ, the values may not."""
    script = """
import json, numpy
stream = numpy.random.default_rng(0)
left, right = stream.standard_normal((33, 70)), stream.standard_normal((70, 21))
print(json.dumps((left @ right).tolist()))
"""
    stream = np.random.default_rng(0)
    left, right = stream.standard_normal((33, 70)), stream.standard_normal((70, 21))
    expected = (left[:, :, None] * right).sum(axis=1)
    for kernels in ({"OPENBLAS_CORETYPE": ""}, processor.openblas_environment()):
        environment = os.environ | kernels | {"OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", script]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert not done.stderr, "OpenBLAS does not know the name"
        np.testing.assert_allclose(json.loads(done.stdout), expected, rtol=1e-12, atol=1e-12)
