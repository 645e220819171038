"""The server's products against float64, in every way that a layer may multiply."""

import itertools
import tempfile
from pathlib import Path

from rollout_probes import ask_probe


def test_products_are_right_before_and_after_an_update(rollout_python):
    ways = ["COLUMNS", "PACKED", "LEFT"]
    shapes = list(itertools.product([1, 5, 64, 97], [96, 640], [33, 1000], [False, True], ways))
    with tempfile.TemporaryDirectory(prefix="linear-") as directory:
        *answers, other_bits, growth, held_back, free, old = ask_probe(
            "linear_probe.py", rollout_python, Path(directory), shapes
        )
    for (num_rows, _, _, has_bias, way), answer in zip(shapes, answers, strict=True):
        assert max(answer["errors"]) < 1e-6
        assert answer["stale"] == (way == "PACKED")
        assert all(answer["by rows"])
        assert answer["by columns"] == (way == "LEFT" and not has_bias and 1 < num_rows <= 96)
    # Rows are added to most numbers of them: for each oneDNN would keep kernels, here of 1 MiB for the two weights.
    assert other_bits == {way: [] for way in ways}
    assert growth[0] < 150 and growth[1] < 60, growth
    # A small weight, a large one, and one that is large and narrow, four times; there is room for five packed copies.
    assert held_back[0] == ["COLUMNS", "PACKED", "PACKED"] * 2 + ["COLUMNS", "PACKED"] + ["COLUMNS"] * 4
    assert free[0] == ["COLUMNS", "LEFT", "PACKED"] * 4
    assert old[0] == ["COLUMNS"] * 12
    assert all(first == again for first, again in (held_back, free, old))
