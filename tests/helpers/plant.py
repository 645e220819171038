"""Plants the faults of tests/planted_faults.md, one at a time, and says which tests see each.

    python tests/helpers/plant.py [--copy DIR] [NUMBER ...]

A line of output for each fault: its number, `seen by` and the first tests that failed, or `NOT SEEN`.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
ROW = re.compile(r"\| (\S+\.py) \| `(.+?)` \| `(.+?)` \| ([^|]+) \| ([^|]+) \|")


def read_faults() -> list[tuple[str, str, str, list[str]]]:
    """The rows of the table: file, line, line with the fault, paths of tests."""
    text = (REPOSITORY / "tests" / "planted_faults.md").read_text(encoding="utf-8")
    return [
        (file, old.replace("\\|", "|"), new.replace("\\|", "|"), tests.split())
        for file, old, new, _, tests in ROW.findall(text)
    ]


def failing_tests(copy: Path, paths: list[str]) -> list[str]:
    """The first tests that fail in ``copy``, of those that exist among ``paths``."""
    known = [f"tests/{path}" for path in paths if (copy / "tests" / path).exists()]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *known]
    environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    return re.findall(r"^(?:FAILED|ERROR) (\S+)", result.stdout, re.MULTILINE)


def main() -> None:
    """Try the faults whose numbers are given, or all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--copy", type=Path, help="an unchanged copy of the repository to plant in")
    parser.add_argument("numbers", nargs="*", type=int)
    options = parser.parse_args()
    faults = read_faults()
    with tempfile.TemporaryDirectory() as scratch:
        copy = options.copy or Path(shutil.copytree(REPOSITORY, Path(scratch, "copy"), symlinks=True))
        for number in options.numbers or range(1, len(faults) + 1):
            file, old, new, tests = faults[number - 1]
            path = copy / "mindrlhf" / file
            text = path.read_text(encoding="utf-8") if path.exists() else ""
            if text.count(old) != 1:
                print(f"{number} {file}: the line is there {text.count(old)} times", flush=True)
                continue
            path.write_text(text.replace(old, new), encoding="utf-8")
            try:
                seen = failing_tests(copy, tests)
            finally:
                path.write_text(text, encoding="utf-8")
            print(f"{number} {file}: {'seen by ' + ' '.join(seen[:3]) if seen else 'NOT SEEN'}", flush=True)


if __name__ == "__main__":
    main()
