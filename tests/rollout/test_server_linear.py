"""The server's products against float64, from plain weights and from packed copies."""

import itertools
import tempfile
from pathlib import Path

from rollout_probes import ask_probe

from mindrlhf.system.processor import mkl_holds_back


def test_products_are_right_before_and_after_an_update(rollout_python):
    # Packed copies are oneDNN's, which is asked where MKL holds back.
    packs = [False, True] if mkl_holds_back() else [False]
    shapes = list(itertools.product([1, 5, 64], [96, 640], [33, 1000], [False, True], packs))
    with tempfile.TemporaryDirectory(prefix="linear-") as directory:
        *answers, room = ask_probe("linear_probe.py", rollout_python, Path(directory), shapes)
    for (*_, packed), answer in zip(shapes, answers, strict=True):
        assert answer["before"] < 1e-6 and answer["after"] < 1e-6
        assert answer["stale"] == packed
    # Every second weight is large, and there is room for three of them.
    assert room[0] == [False, True] * 3 + [False] * 4
    assert room[1] == room[0]
