"""What our part of vLLM-Ascend's workers puts right; its own code is not run."""

from rollout_probes import ask_probe


def test_a_worker_puts_back_what_a_sleep_forgets_and_tells_processed_logprobs(rollout_python, tmp_path):
    found = ask_probe("ascend_worker_probe.py", rollout_python, tmp_path, None)
    assert found == {
        "same parameter": True,
        "shape": [2, 3, 4],
        "new weights": True,
        "table": [1.0, 2.0],
        "modes": ["processed_logprobs", "processed_logprobs"],
    }
