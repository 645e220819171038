"""`mindrlhf plan` and `strategy` of every file in model_configs and examples that says `ascend`.

So no published layout meets the compiler for the first time on a cluster.
"""

import json
import re
from pathlib import Path

import pytest
from slow_tests import SIMULATES_CANN, SLOW

from mindrlhf.cli import main
from mindrlhf.config.load import load_layout_config

ROOT = Path(__file__).parents[2]
pytestmark = [SIMULATES_CANN, pytest.mark.timeout(3000)]
_ASCEND = re.compile(r"^\s*device: *ascend", re.M)
FILES = sorted(
    path
    for folder in ("model_configs", "examples")
    for path in (ROOT / folder).rglob("*.yaml")
    if _ASCEND.search(path.read_text(encoding="utf-8"))
)
# Tensor parallel, optimiser state sharded over data-parallel ranks; the others nightly.
OF_EVERY_DAY = ("examples/grpo/qwen2_5_7b_8npu.yaml",)
TUTORIAL_RANKS = 8


def words_of(path) -> list[str]:
    """Return the arguments of `plan` and `strategy` for a file: a user's keys, and the ranks of its name."""
    match = re.search(r"_(\d+)npu", path.stem)
    name = re.sub(r"^(grpo|predict)_|_\d+npu.*$", "", path.stem)
    models = {file.parent.name: file.parent for file in (ROOT / "model_configs").rglob("config.json")}
    model = name if name in models else next((other for other in sorted(models) if other.startswith(name)), "")
    words = [str(path), "--workers", match[1] if match else str(TUTORIAL_RANKS)]
    words.append(f"model.path={models[model or 'qwen2_5_7b']}")
    config = load_layout_config(path, ["model.path=model"])
    if not config.training.sequence_lengths:
        words.append(f"training.sequence_lengths=[{2 * config.rollout.max_response_length}]")
    return words


def test_the_files_are_there():
    assert len(FILES) > 20 and {*OF_EVERY_DAY} <= {str(path.relative_to(ROOT)) for path in FILES}


def training_files():
    for path in FILES:
        if path.stem.startswith("grpo_") or path.parent.name == "grpo":
            is_daily = str(path.relative_to(ROOT)) in OF_EVERY_DAY
            yield pytest.param(path, id=path.stem, marks=() if is_daily else SLOW)


@pytest.mark.parametrize("path", training_files())
def test_no_layout_is_5_percent_slower_than_the_best_that_fits(path, capsys):
    """By the product's own plan: the first of its search that leaves a tenth of the device."""
    main(["plan", *words_of(path), "--json", "--search"])
    plan = json.loads(capsys.readouterr().out)
    seconds = sum(plan["seconds"]["phases"].values())
    best = next((found["seconds"] for found in plan["search"]["best"] if found["slack"] >= 0.1), seconds)
    assert seconds <= 1.05 * best


@SLOW
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_file_is_planned(path, capsys):
    code = main(["plan", *words_of(path), "--json"])
    fits = json.loads(capsys.readouterr().out)["verdict"]["fits"]
    assert code == (0 if fits else 1)
    assert fits or path.stem.startswith("predict"), "those train nothing, and have devices enough for their servers"


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=() if str(path.relative_to(ROOT)) in OF_EVERY_DAY else SLOW) for path in FILES],
    ids=[path.stem for path in FILES],
)
def test_the_strategy_of_a_file_is_compiled(path, tmp_path, capsys):
    directory = tmp_path / "strategy"
    assert main(["strategy", *words_of(path), "--output", str(directory), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert all(stage["num_parameters"] and stage["collectives"] is not None for stage in report["stages"])
    assert {found.name for found in directory.iterdir()} == {"merged.ckpt", "rollout", "stages", "strategy.json"}
    assert all(found.suffix == ".ckpt" for found in (directory / "stages").iterdir())
