"""What our part of vLLM-Ascend's workers puts right; its own code is not run."""

import numpy as np
import pytest
from rollout_probes import ask_probe
from slow_tests import SLOW


@pytest.fixture(scope="module")
def found(rollout_python, tmp_path_factory):
    return ask_probe("ascend_worker_probe.py", rollout_python, tmp_path_factory.mktemp("probe"), None)


def test_rows_are_sampled_at_once_each_by_its_own_seed(found):
    shares = np.array([0, 0.5, 0, 0.25, 0.125, 0, 0.125, 0])
    assert not np.array(found["shares"])[shares == 0].any(), "what is masked"
    # Five standard deviations of 20,000 and of 2,000 draws.
    np.testing.assert_array_less(np.abs(found["shares"] - shares), 5 * np.sqrt(0.25 / 20_000))
    np.testing.assert_array_less(np.abs(np.array(found["shares of each draw"]) - shares), 5 * np.sqrt(0.25 / 2000))
    same = float((shares**2).sum())
    assert found["pairs"] == pytest.approx([0.25, same], abs=0.02), "draws and rows know nothing of each other"
    of_one, repeated, among_others = found["alone"]
    assert of_one == repeated == among_others, "a function of seed and draw, whoever else is there"
    assert found["turned"][0] == found["turned"][1], "whatever the row"
    few, many = found["operators"]
    assert few == many, "as many launches for 64 rows as for one"
    assert found["unlikely"] == 0, "where sums fall on the way, as in blocks of float32"
    assert found["ours where all have seeds"] == [True, "theirs"]


def test_a_worker_puts_back_what_a_sleep_forgets_and_tells_processed_logprobs(found):
    kept = ("same parameter", "shape", "new weights", "table", "modes")
    assert {name: found[name] for name in kept} == {
        "same parameter": True,
        "shape": [2, 3, 4],
        "new weights": True,
        "table": [1.0, 2.0],
        "modes": ["processed_logprobs", "processed_logprobs"],
    }


@SLOW
def test_arguments_of_vllm_are_added_to_ours(rollout_python, tmp_path):
    assert ask_probe("ascend_worker_probe.py", rollout_python, tmp_path, "arguments") == {
        "compilation_config": {"cudagraph_mode": "PIECEWISE", "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 48]},
        "additional_config": {"enable_cpu_binding": False, "weight_prefetch_config": {}},
        "async_scheduling": False,
        "seed": 0,
    }
