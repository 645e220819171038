"""Every code block of the pages is run by the nightly walk (tests/jobs/test_page_walk.py) or says why it is not.

What can be told of a block without running it is told here every day: its commands and options are parsed, its config
and overrides are read, and a run does not take the directory of another.
"""

import re
import shlex
from collections import Counter
from pathlib import Path

import pytest
from page_blocks import PAGES, REASONS, ROOT, blocks, blocks_of, commands

from mindrlhf.cli import _parse
from mindrlhf.config.load import CONFIGS, read_config, tasks_of
from mindrlhf.config.parse import read_yaml

LANGUAGES = {"bash", "yaml", "json", "python", "text"}
# What the first word of a line may be in a block that is run, but for `mindrlhf`.
PROGRAMS = {"bash", "echo", "source", "python", ".venv/bin/python", ".venv-rollout/bin/python"}
TAKES_A_CONFIG = {*CONFIGS, "plan", "eval", "strategy", "check"}
QUICKSTART = {"runs/quickstart/grpo"}  # its run is there before the first command of a page


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_every_block_is_run_or_says_why_not(page):
    for block in blocks(page):
        assert block.language in LANGUAGES, f"{block}: {block.language or 'no language'}: one of {sorted(LANGUAGES)}"
        if block.reason:
            assert block.is_command, f"{block}: only commands need a reason"
            assert block.reason.startswith(REASONS), f"{block}: '{block.reason}' begins with none of REASONS"
        elif block.is_command:
            programs = {words[0] for words in commands(block)} - {"mindrlhf"}
            assert programs <= PROGRAMS, f"{block}: {programs - PROGRAMS}: run it in the walk, or say why not"


def _arguments(words: list[str]):
    try:
        return _parse(words[1:])
    except SystemExit:
        pytest.fail(shlex.join(words))


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_the_configs_of_commands_are_read(page, monkeypatch):
    """Keys, their values, and the rules between them; also of commands that need NPUs, where the file is there."""
    monkeypatch.chdir(ROOT)
    for words in (words for block in blocks(page) for words in commands(block)):
        if words[0] != "mindrlhf" or not (path := next((Path(w) for w in words if w.endswith(".yaml")), None)):
            continue
        arguments = _arguments(words)
        if not path.is_file() or words[1] not in TAKES_A_CONFIG | {"config"} or not hasattr(arguments, "overrides"):
            continue
        (task, *_) = tasks_of(read_yaml(path))
        ranks = (getattr(arguments, "workers", None) or 1) * int(getattr(arguments, "nodes", None) or 1)
        read_config(task, path, arguments.overrides, world_size=ranks).mistakes.raise_if_any()


def _output_dir(words: list[str]) -> str | None:
    """The directory of a run that the command begins; None where it continues one or its config is not there."""
    arguments = _arguments(words)
    path = ROOT / arguments.config
    if not path.is_file() or arguments.resume:
        return None
    given = dict(word.split("=", 1) for word in arguments.overrides)
    return given.get("run.output_dir") or read_yaml(path)["run"]["output_dir"]


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_no_run_takes_the_directory_of_an_earlier_one(page):
    """Each reader has run the quickstart, and runs a page's commands one after the other."""
    lines = [words for block in blocks(page) if not block.reason for words in commands(block)]
    begun = [_output_dir(words) for words in lines if words[:2] and words[0] == "mindrlhf" and words[1] in CONFIGS]
    counts = Counter(filter(None, begun))
    assert {directory for directory in counts if counts[directory] > 1 or directory in QUICKSTART} == set()


def test_pages_take_no_directory_or_file_of_another():
    """A reader goes from one page to the next in one clone."""
    taken: dict[str, set[str]] = {}
    for page in PAGES:
        for words in (words for block in blocks(page) if not block.reason for words in commands(block)):
            if words[0] != "mindrlhf" or words[1] not in CONFIGS and words[1:3] != ["config", "new"]:
                continue
            made = _arguments(words).output if words[1] == "config" else _output_dir(words)
            taken.setdefault(made, set()).add(_name(page))
    taken.pop(None, None)
    assert {made: pages for made, pages in taken.items() if len(pages) > 1} == {} and len(taken) > 20


def test_every_example_is_walked_or_named_by_a_test():
    """A folder without commands that run here is one that a test reads by its name."""
    named = "\n".join(path.read_text(encoding="utf-8") for path in ROOT.glob("tests/**/*.py"))
    for folder in sorted(path for path in (ROOT / "examples").iterdir() if path.is_dir()):
        pages = folder.rglob("README.md")
        is_walked = any(block.is_command and not block.reason for page in pages for block in blocks(page))
        by_test = rf'examples/{folder.name}\b|"examples" / "{folder.name}"'
        assert is_walked or re.search(by_test, named), f"no page walks {_name(folder)}, and no test names it"


SAMPLE = """
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

<!-- not run: x --> Text.

```text
nothing
```
"""


def test_how_blocks_are_read():
    first, second, third, fourth = blocks_of(SAMPLE, Path("page"))
    assert (first.line, first.reason, first.is_command, first.file) == (4, "needs NPUs, or many", True, "")
    assert commands(first) == [["a", "b"]]
    assert second.reason == "" and second.text == 'A=1 .venv/bin/mindrlhf d "$(cat e)" > f; g && h\n'
    assert commands(second) == [["mindrlhf", "d", "$(cat e)"], ["g"], ["h"]]
    assert (third.file, third.is_command, third.text) == ("tools/my.py", False, "# tools/my.py\nx = 1\n")
    assert (fourth.language, fourth.reason) == ("text", "")
