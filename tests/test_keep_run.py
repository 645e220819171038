"""Scripts that begin anew keep what an earlier run has left."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_an_earlier_run_is_moved_aside_and_named(tmp_path):
    for number in range(3):
        told = subprocess.run(
            [
                "bash",
                "-c",
                f"set -euo pipefail; source {ROOT}/scripts/keep_run.sh; keep_run runs/x; mkdir -p runs/x; "
                f"echo {number} > runs/x/f",
            ],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        )
        assert told.stdout == ("" if not number else f"== the earlier runs/x is kept as runs/x.{number}\n")
    found = {path.parent.name: path.read_text().strip() for path in sorted(tmp_path.glob("runs/*/f"))}
    assert found == {"x.1": "0", "x.2": "1", "x": "2"}


def test_no_script_of_a_recipe_deletes_a_run():
    scripts = [*ROOT.glob("examples/**/run.sh"), ROOT / "scripts" / "quickstart.sh"]
    found = {str(path.relative_to(ROOT)): re.findall(r"^.*\brm -r.*$", path.read_text(), re.M) for path in scripts}
    assert len(scripts) > 3 and {name: lines for name, lines in found.items() if lines} == {}
