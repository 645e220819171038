"""Wrap the prose of Markdown pages at 110 characters; tables, code, headings and links stay as they are.

    python scripts/wrap_docs.py [--check] [FILE ...]     (default: README, docs, examples, model_configs)
"""

import argparse
import re
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[1]
WIDTH = 110
# What is not broken over lines: code and links; and what would begin a list or a heading at the start of a line.
_SOLID = re.compile(r"`[^`]*`|!?\[[^\]]*\]\([^)]*\)")
_MARKER = re.compile(r"^(\s*)((?:[-*+]|\d+\.)\s+|>\s+)?(.*)$")
_STARTS_BLOCK = re.compile(r" (?=(?:[-*+>#]|\d+\.)(?: |$))")


def pages() -> list[Path]:
    """Return every page of the repository."""
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
    for pattern in ("docs/**/*.md", "examples/**/README.md", "model_configs/*.md"):
        found += sorted(ROOT.glob(pattern))
    return [path for path in found if path.name != "config.md"]  # that one is generated


def wrap(text: str) -> str:
    """Return a page with every paragraph that has a longer line filled anew."""
    lines, paragraph, is_code = [], [], False

    def flush() -> None:
        lines.extend(_filled(paragraph) if any(len(line) > WIDTH for line in paragraph) else paragraph)
        paragraph.clear()

    for line in text.splitlines():
        is_fence = line.lstrip().startswith("```")
        is_solid = is_code or is_fence or not line.strip() or line.lstrip()[:1] in "|#<"
        if is_solid:
            flush()
            lines.append(line)
            is_code ^= is_fence
            continue
        if paragraph and _MARKER.match(line)[2]:
            flush()
        paragraph.append(line)
    flush()
    return "\n".join(lines) + "\n"


def _filled(paragraph: list[str]) -> list[str]:
    indent, marker, first = _MARKER.match(paragraph[0]).groups(default="")
    text = " ".join([first.rstrip(), *(line.strip().removeprefix("> ") for line in paragraph[1:])])
    text = _SOLID.sub(lambda found: found[0].replace(" ", "\0"), text)
    text = _STARTS_BLOCK.sub("\0", text)
    rest = indent + (marker if marker.startswith(">") else " " * len(marker))
    filled = textwrap.wrap(
        text,
        WIDTH,
        initial_indent=indent + marker,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace("\0", " ") for line in filled]


def main() -> int:
    """Wrap, or with ``--check`` say which pages need it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 if a page needs it")
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    needy = [(path, text) for path in arguments.files or pages() if wrap(text := path.read_text("utf-8")) != text]
    for path, text in needy:
        print(path)
        if not arguments.check:
            path.write_text(wrap(text), encoding="utf-8")
    return int(arguments.check and bool(needy))


if __name__ == "__main__":
    sys.exit(main())
