"""Commands on paths that are not ASCII, in locales that are not UTF-8, and without docstrings and assertions."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
C = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
ENVIRONMENTS = {
    "C": C,
    "GBK": {"LC_ALL": "zh_CN.GBK"},
    "optimised": {"PYTHONOPTIMIZE": "2"},
    "C, optimised": {**C, "PYTHONOPTIMIZE": "2"},
}
COMMANDS = (
    "data build --input dätâ.jsonl --output ü答.mindrecord --tokenizer modèle --max-prompt-length 200 "
    "--handler map_keys --map question=q,answer=a --processes 1",
    "weights inspect modèle",
    "weights convert modèle --dtype bfloat16 --output mö答",
    "rewards score --verifier accuracy_reward --input sämple.jsonl --output sc答.jsonl",
    "config check cö答.yaml model.path=modèle data.tokenizer_dir=modèle data.eval_file=ü答.mindrecord "
    "run.output_dir=rün",
    "rewards list",
)
# One after the other in one process: each would import the same again.
RUN = """
import sys
from mindrlhf import cli
words = sys.argv[1:]
while words:
    end = words.index("then")
    sys.argv[1:] = words[:end]
    if cli.main():  # which begins all again in UTF-8 first
        sys.exit(f"failed: {ascii(words[:end])}")
    del words[:end + 1]
"""


@pytest.fixture(scope="module")
def gbk(tmp_path_factory) -> dict:
    """Variables by which the locale is there, where the machine can make it."""
    directory = tmp_path_factory.mktemp("locales")
    program = shutil.which("localedef")
    made = program and subprocess.run([program, "-f", "GBK", "-i", "zh_CN", str(directory / "zh_CN.GBK")], check=False)
    if not made or not (directory / "zh_CN.GBK").exists():
        pytest.skip("localedef makes no zh_CN.GBK here")
    return {"LOCPATH": str(directory)}


@pytest.mark.timeout(500)
@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_commands_run_on_paths_that_are_not_ascii(name, tmp_path, request):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **ENVIRONMENTS[name]}
    environment |= request.getfixturevalue("gbk") if name == "GBK" else {}
    place = tmp_path / "wö 答"
    place.mkdir()
    shutil.copytree(ROOT / "examples" / "quickstart" / "checkpoint", place / "modèle")
    (place / "dätâ.jsonl").write_text('{"q": "Wie viel ist 4 + 4, ü答案?", "a": "8"}\n', encoding="utf-8")
    sample = {"completion": "答案是 7。ü", "answer": "7", "prompt": "ü"}
    (place / "sämple.jsonl").write_text(json.dumps(sample, ensure_ascii=False), encoding="utf-8")
    config = (ROOT / "examples" / "quickstart" / "config.yaml").read_text(encoding="utf-8")
    config = config.replace("runs/quickstart/train.mindrecord", "ü答.mindrecord").replace(
        "every_steps: 25", "every_steps: 0"
    )
    (place / "cö答.yaml").write_text(config, encoding="utf-8")
    command = [sys.executable, "-c", RUN, *" then ".join([*COMMANDS, ""]).split()]
    ended = subprocess.run(
        command, cwd=place, env=environment, capture_output=True, timeout=400, stdin=subprocess.DEVNULL
    )
    said = (ended.stdout + ended.stderr).decode(errors="replace")
    assert ended.returncode == 0 and "Traceback" not in said, said[-2000:]
    assert json.loads((place / "sc答.jsonl").read_text(encoding="utf-8"))["rewards"] == {"accuracy_reward": 1.0}
    assert (place / "mö答" / "model.safetensors").is_file()
