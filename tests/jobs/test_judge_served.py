"""`mindrlhf rewards serve`: a real vLLM server behind the HTTP front, asked by verifiers in their worker processes."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from slow_tests import SLOW

from mindrlhf.rewards.judges.chat_client import ask
from mindrlhf.rewards.pool import RewardPool
from mindrlhf.rewards.selection import Selection
from mindrlhf.rewards.types import RewardInput

pytestmark = [pytest.mark.timeout(400), SLOW]
ROOT = Path(__file__).resolve().parents[2]
CHECKPOINT = ROOT / "examples" / "quickstart" / "checkpoint"


def test_a_model_directory_is_a_judge(tmp_path, rollout_python):
    environment = os.environ | {"JUDGE_KEY": "sesame", "PYTHONPATH": str(ROOT)}
    options = ["--port", "0", "--max-length", "512", "--dtype", "float32", "--log-dir", str(tmp_path)]
    process = subprocess.Popen(
        [sys.executable, "-m", "mindrlhf.cli", "rewards", "serve", str(CHECKPOINT), *options]
        + ["--python", str(rollout_python), "--api-key-variable", "JUDGE_KEY"],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=tmp_path,
        # What a shell runs in the background ignores Ctrl-C, and so would what it starts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        line = next(line for line in process.stdout if "serving" in line)
        url = re.search(r"http://127\.0\.0\.1:\d+/v1", line)[0]
        os.environ["JUDGE_KEY"] = "sesame"
        body = {"messages": [{"role": "user", "content": "3 + 4 = ?"}], "max_tokens": 200, "temperature": 0}
        replies = {ask(url, body, api_key_variable="JUDGE_KEY", request_timeout_s=120, num_retries=2) for _ in range(3)}
        assert len(replies) == 1 and next(iter(replies)), "greedy, so the same each time"
        # This model works out sums and knows nothing of rubrics: its answers are refused, not taken for rewards.
        names = ("rubric_judge.url", "rubric_judge.model", "rubric_judge.api_key_variable")
        selection = Selection(("rubric_judge",), (1.0,), options=dict(zip(names, (url, "judge", "JUDGE_KEY"))))
        with RewardPool(selection, num_workers=4, timeout_s=120.0, failure_value=-1.0) as pool:
            results = pool.score([RewardInput(i, f"{i}", json.dumps(["is short"])) for i in range(8)])
            counts = pool.take_counts()
        assert [result.total for result in results] == [-1.0] * 8
        assert all("the judge says" in result.failures["rubric_judge"] or "cut its answer off" in
                   result.failures["rubric_judge"] for result in results)  # fmt: skip
        assert counts["requests"] == counts["unusable"] == 8 and counts["prompt_tokens"] > 0
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    finally:
        os.environ.pop("JUDGE_KEY", None)
        if process.poll() is None:
            process.kill()
            process.wait()
