"""Weights that a server loads into its live parameters: from the second version on without vLLM's loaders."""

import tempfile
from pathlib import Path

from rollout_probes import ask_probe


def test_copies_are_made_again_and_all_else_is_left_to_the_loader(rollout_python):
    num_asked = {("columns", 1): 2, ("columns", 3): 6}
    num_asked |= {("copies", 1): 2, ("copies", 2): 4, ("skips", 1): 2, ("skips", 2): 2 + 5}
    cases = [*num_asked, *((way, 1) for way in ("computes", "converts", "changes", "overwrites"))]
    with tempfile.TemporaryDirectory(prefix="in-place-") as directory:
        answers = ask_probe("in_place_probe.py", rollout_python, Path(directory), cases)
    for (way, num_buckets), (differences, names, num_loads) in zip(cases, answers, strict=True):
        assert differences == [0.0] * 5, way
        assert names == ["fused", "words"]
        # Each bucket of two buffers is loaded once by the loader where that only copies, else each version is.
        assert num_loads == num_asked.get((way, num_buckets), 5), way
