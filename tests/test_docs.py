"""The pages, as far as a machine can check them: links, commands, configs, keys and metrics."""

import argparse
import re
import shlex
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from page_blocks import PAGES, REASONS, ROOT, blocks, blocks_of, commands, undocumented

from mindrlhf import cli
from mindrlhf.config.load import CONFIGS, read_config, tasks_of
from mindrlhf.config.parse import dotted_keys, read_yaml
from mindrlhf.config.schema import DpoConfig, GrpoConfig, RewardModelConfig, SftConfig
from mindrlhf.observe import metrics as measure

KEYS = {
    dotted for config in (GrpoConfig, SftConfig, DpoConfig, RewardModelConfig) for dotted, _, _ in dotted_keys(config)
}
SECTIONS = {dotted.partition(".")[0] for dotted in KEYS}
FOREIGN_KEYS = {"reward_model.ground_truth"}  # verl's data sets
FILE_ENDINGS = {"json", "jsonl", "md", "mindrecord", "py", "safetensors", "sh", "svg", "yaml"}
LANGUAGES = {"bash", "yaml", "json", "python", "text"}
# First words that a block which the walk runs may begin a command with.
PROGRAMS = {"mindrlhf", "bash", "echo", "source", "python", ".venv/bin/python", ".venv-rollout/bin/python"}
TAKES_A_CONFIG = {*CONFIGS, "plan", "eval", "strategy", "config"}
PARSER = cli.build_parser()
PROSE = [*PAGES, *(ROOT / name for name in ("AGENTS.md", "CHANGELOG.md", "CONTRIBUTING.md"))]


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _text(page: Path) -> str:
    return re.sub(r"<!--.*?-->", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def _prose(page: Path) -> str:
    return re.sub(r"^ *```.*?^ *```", "", _text(page), flags=re.DOTALL | re.MULTILINE)


def _commands(page: Path, *, run: bool = False) -> list[list[str]]:
    """The words of the commands on a page; with ``run``, of those that the nightly walk runs."""
    return [words for block in blocks(page) if not (run and block.reason) for words in commands(block)]


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", _prose(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _arguments(words: list[str]) -> argparse.Namespace:
    try:
        return cli._parse(words[1:])
    except SystemExit:
        pytest.fail(shlex.join(words))


@pytest.fixture(autouse=True)
def _one_parser(monkeypatch):
    """To build one takes longer than to parse a page's commands."""
    monkeypatch.setattr(cli, "build_parser", lambda: PARSER)


@pytest.mark.parametrize("page", PROSE, ids=_name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", _prose(page)):
        if re.match(r"[a-z]+://", target):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{target} does not exist"
        assert not anchor or anchor in _anchors(linked), f"{target}: no such heading"


def test_pages_named_in_messages_exist():
    patterns = ("mindrlhf/**/*.py", "examples/**/*.yaml", "scripts/**/*.py", "scripts/**/*.sh")
    sources = [path for pattern in patterns for path in ROOT.glob(pattern)]
    for path in sources:
        for name, anchor in re.findall(r"(?<![\w/])(docs/\w+\.md)(?:#([\w-]+))?", path.read_text(encoding="utf-8")):
            assert (ROOT / name).is_file(), f"{_name(path)}: {name}"
            assert not anchor or anchor in _anchors(ROOT / name), f"{_name(path)}: {name}#{anchor}"


def test_every_page_is_in_the_index():
    listed = set(re.findall(r"\]\(([\w/]+\.md)[)#]", _text(ROOT / "docs" / "README.md")))
    assert {page.name for page in ROOT.glob("docs/*.md")} - {"README.md"} <= listed


@pytest.mark.parametrize("page", PROSE, ids=_name)
def test_commands_parse(page):
    (subparsers,) = (action for action in PARSER._actions if isinstance(action, argparse._SubParsersAction))
    for command in re.findall(r"`mindrlhf ([a-z-]+)", _prose(page)):
        assert command in subparsers.choices, f"there is no command mindrlhf {command}"
    for words in _commands(page):
        for path in (word.rpartition("=")[2].partition(":")[0] for word in words):
            if re.match(r"(examples|model_configs|scripts)/", path):
                assert (ROOT / path).exists(), f"{path} does not exist"
        if words[0] == "mindrlhf":
            assert callable(_arguments(words).run)


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_configs_of_commands_are_read(page, monkeypatch):
    """Keys, values and the rules between them, of runs that need NPUs too."""
    monkeypatch.chdir(ROOT)
    for words in _commands(page):
        if words[0] != "mindrlhf" or not (path := next((Path(w) for w in words if w.endswith(".yaml")), None)):
            continue
        arguments = _arguments(words)
        if not path.is_file() or words[1] not in TAKES_A_CONFIG or not hasattr(arguments, "overrides"):
            continue
        ranks = (getattr(arguments, "workers", None) or 1) * int(getattr(arguments, "nodes", None) or 1)
        if words[1] == "plan":  # whose data axis follows the number of devices
            arguments.overrides.append("parallel_config.data_parallel=0")
        config = read_config(tasks_of(read_yaml(path))[0], path, arguments.overrides, world_size=ranks)
        config.mistakes.raise_if_any()


@pytest.mark.parametrize("page", [page for page in PROSE if page.name != "CHANGELOG.md"], ids=_name)
def test_keys_exist(page):
    for section, key in re.findall(r"(?<![\w./*])([a-z_]+)\.([a-z_0-9]+)(?![\w/(])", _text(page)):
        name = f"{section}.{key}"
        if section in SECTIONS and key not in FILE_ENDINGS and name not in FOREIGN_KEYS:
            assert name in KEYS, f"there is no key {name}"


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_every_block_is_run_or_says_why_not(page):
    for block in blocks(page):
        assert block.language in LANGUAGES, f"{block}: '{block.language}' is none of {sorted(LANGUAGES)}"
        if block.reason:
            assert block.is_command, f"{block}: only commands need a reason"
            assert block.reason.startswith(REASONS), f"{block}: '{block.reason}' begins with none of REASONS"
        elif block.is_command:
            programs = {words[0] for words in commands(block)}
            assert programs <= PROGRAMS, f"{block}: {programs - PROGRAMS}: run it in the walk, or say why not"


def test_no_run_takes_the_directory_of_another():
    """Neither on its page, after the quickstart, nor on another page of the same clone."""
    taken: dict[str, set[str]] = {"runs/quickstart/grpo": {"scripts/quickstart.sh"}}
    for page in PAGES:
        begun = Counter()
        for words in _commands(page, run=True):
            if words[:2] == ["mindrlhf", "config"] and words[2] == "new":
                taken.setdefault(_arguments(words).output, set()).add(_name(page))
            elif words[0] == "mindrlhf" and words[1] in CONFIGS and not _arguments(words).resume:
                arguments = _arguments(words)
                overrides = dict(word.split("=", 1) for word in arguments.overrides)
                path = ROOT / arguments.config
                written = read_yaml(path)["run"]["output_dir"] if path.is_file() else None
                begun[overrides.get("run.output_dir") or written] += 1
        begun.pop(None, None)
        assert not [directory for directory, times in begun.items() if times > 1], _name(page)
        for directory in begun:
            taken.setdefault(directory, set()).add(_name(page))
    assert {directory: pages for directory, pages in taken.items() if len(pages) > 1} == {}


def test_metrics_are_documented():
    """Those of samples; jobs and the page walk check what their runs write."""
    rewards, ones = np.array([0.0, 1.0]), np.ones(2)
    metrics = measure.combine_metrics(
        measure.reward_metrics(rewards, np.zeros(2, int), {"accuracy_reward": rewards}),
        measure.length_metrics(ones, ones, ones > 1),
        measure.rollout_diff_metrics(ones, ones, ones),
        measure.rollout_ratio_metrics([ones], [ones]),
        measure.packing_metrics([1], [8]),
    )
    assert undocumented(metrics) == []
    assert undocumented(["reward/none", "timing/none", "reward/mean"]) == ["reward/none", "timing/none"]


def test_how_blocks_are_read():
    text = """
<!-- not run: needs NPUs, or
     many -->
```bash
a \\
  b # c
```

- in a list:

  ```bash
  A=1 .venv/bin/mindrlhf d "$(cat e)" > f; g && h
  ```

```python
# tools/my.py
x = 1
```
"""
    first, second, third = blocks_of(text, Path("page"))
    assert (first.line, first.reason, first.is_command, first.file) == (4, "needs NPUs, or many", True, "")
    assert commands(first) == [["a", "b"]]
    assert second.reason == "" and commands(second) == [["mindrlhf", "d", "$(cat e)"], ["g"], ["h"]]
    assert (third.file, third.is_command, third.text) == ("tools/my.py", False, "# tools/my.py\nx = 1\n")
