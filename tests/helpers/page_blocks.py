"""The code blocks of the pages: what a reader types, in the order of the page, and what is only shown."""

import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("model_configs/*.md")])
PAGES += sorted(ROOT.glob("examples/**/README.md"))
# With which words a reason begins, for which a block is not run: what it needs, or what it would do.
REASONS = (
    "needs NPUs",
    "needs several machines",
    "needs a model of the hub",  # which a download would give
    "needs data of the hub",
    "needs another package",
    "needs your own",  # a config, a run, a checkpoint that the page cannot bring
    "makes the environments",
    "serves until",
    "takes ",  # longer than a night has for one block
    "measures, on idle cores",
    "is run by tests/",
    "comes before the walk",
)
_FENCE = re.compile(r"^( *)```(\S*)[^\n]*\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
_MARKER = re.compile(r"<!-- not run: ((?:(?!-->).)*?) -->\s*\Z", re.DOTALL)
_FILE = re.compile(r"#\s*(?:file: )?([\w./-]+\.(?:py|yaml|jsonl|txt|sh))\s*$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    ``reason`` says why the page's reader cannot run it here; it is empty for what is run. ``file`` is the name in the
    first line of a block that is no command (`# my_rewards.py`): the reader saves it under that name.
    """

    page: Path
    line: int
    language: str
    text: str
    reason: str
    file: str

    @property
    def is_command(self) -> bool:
        return self.language == "bash"

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """Return the blocks of a page in their order."""
    return blocks_of(page.read_text(encoding="utf-8"), page)


def blocks_of(text: str, page: Path) -> list[Block]:
    """Return the blocks of a page's text in their order."""
    found = []
    for fence in _FENCE.finditer(text):
        indent, language, body = fence.groups()
        body = re.sub(f"^{indent}", "", body, flags=re.MULTILINE)
        marker = _MARKER.search(text[: fence.start()])
        reason = " ".join(marker[1].split()) if marker else ""
        file = "" if language == "bash" else (_FILE.match(body) or ("", ""))[1]
        found.append(Block(page, text[: fence.start()].count("\n") + 1, language, body, reason, file))
    return found


def commands(block: Block) -> list[list[str]]:
    """Return the words of each command of a block, without the variables it sets, its redirections and comments.

    `.venv/bin/mindrlhf` is `mindrlhf`. A block of another language has none.
    """
    found = []
    if not block.is_command:
        return found
    for line in block.text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|<>")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if word in (";", "&&", "||", "|", "&"):
                found.append(_plain(words))
                words = []
            else:
                words.append(word)
    return [words for words in found if words]


def _plain(words: list[str]) -> list[str]:
    while words and re.match(r"[A-Za-z_]+=", words[0]):
        words = words[1:]
    for mark in (">", ">>", "<"):
        words = words[: words.index(mark)] if mark in words else words
    return ["mindrlhf", *words[1:]] if words[:1] == [".venv/bin/mindrlhf"] else words


@cache
def _documented_metrics() -> re.Pattern:
    """Match the names in the first column of docs/metrics.md; `<verifier>` and the like stand for any name."""
    rows = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8").splitlines()
    names = [name for row in rows if row.startswith("| `") for name in re.findall(r"`([^`]+)`", row.split("|")[1])]
    return re.compile("|".join(re.sub("<[a-z]+>|@k", r"[^/]+", name) for name in names))


def undocumented(names: Iterable[str]) -> list[str]:
    """Return the metrics that docs/metrics.md does not have."""
    return [name for name in names if not _documented_metrics().fullmatch(name)]
