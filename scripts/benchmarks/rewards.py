"""Scores a second of verifiers, by `mindrlhf rewards score` of so many and of four times as many samples.

The difference leaves the start of the command out. Programs run in the sandbox.
"""

import json
from collections.abc import Iterator
from pathlib import Path

from harness import mindrlhf, timed

FUNCTION = "```python\ndef add(a, b):\n    return a + b\n```"
SCRIPT = "```python\nimport sys\nprint(sum(map(int, sys.stdin.read().split())))\n```"
CALLS = {"fn_name": "add", "inputs": [[1, 2], [3, 4], [5, 6]], "outputs": [3, 7, 11]}
STREAMS = {"inputs": ["1 2", "3 4", "5 6"], "outputs": ["3", "7", "11"]}
# Verifier, completion and answer with N for the number of the sample, samples.
CASES = {
    "integers": ("accuracy_reward", "so N more are #### N", "N", 4096),
    "expressions": ("qwen_accuracy_reward", r"so it is \boxed{(x+N)(x+1)}", "x^2+(N+1)x+N", 128),
    "calls": ("code_execution", FUNCTION, json.dumps(CALLS), 32),
    "streams": ("code_execution", SCRIPT, json.dumps(STREAMS), 32),
}


def measure(directory: Path, smallest: bool, repeats: int) -> Iterator[dict]:
    for name, (verifier, completion, answer, size) in CASES.items():
        size = size // 8 if smallest else size * repeats
        for processes in (1,) if smallest else (1, 2):
            seconds = []
            for count in (size, 4 * size):
                path, scored = directory / "samples.jsonl", directory / "scored.jsonl"
                with path.open("w", encoding="utf-8") as file:
                    for number in range(1, count + 1):
                        sample = {"completion": completion, "answer": answer}
                        texts = {key: text.replace("N", str(number)) for key, text in sample.items()}
                        file.write(json.dumps(texts) + "\n")
                words = ["--verifier", verifier, "--input", path, "--output", scored, "--processes", processes]
                seconds.append(timed(mindrlhf("rewards", "score", *words))[0])
                if any(json.loads(line)["reward"] != 1.0 for line in scored.read_text(encoding="utf-8").splitlines()):
                    raise SystemExit(f"benchmark: {verifier} does not pay a right answer of {name}")
                scored.unlink()
            yield {"case": name, "processes": processes, "scores/s": 3 * size / max(seconds[1] - seconds[0], 1e-9)}
