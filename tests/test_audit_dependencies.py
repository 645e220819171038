"""The audit of dependencies: which licences it refuses. Vulnerabilities need a network."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "audit_dependencies.sh"


def _audit(tmp_path: Path, metadata: str) -> subprocess.CompletedProcess:
    """Run the audit of licences in a repository whose training environment has one package."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    script = tmp_path / "scripts" / "audit_dependencies.sh"
    script.write_text(SCRIPT.read_text())
    (tmp_path / "packages" / "extra-1.0.dist-info").mkdir(parents=True)
    (tmp_path / "packages" / "extra-1.0.dist-info" / "METADATA").write_text(
        f"Metadata-Version: 2.4\nName: extra\nVersion: 1.0\n{metadata}\n"
    )
    python = tmp_path / ".venv" / "bin" / "python"
    python.write_text(
        f"#!{sys.executable}\nimport sys\n"
        f"sys.path = [{str(tmp_path / 'packages')!r}, *(path for path in sys.path if 'site-packages' not in path)]\n"
        "exec(sys.stdin.read())\n"
    )
    python.chmod(0o755)
    command = ["bash", str(script), "--licences-only"]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("metadata", "exit_code"),
    [
        ("License-Expression: MIT", 0),
        ("License-Expression: GPL-3.0-only OR Apache-2.0", 0),
        ("License: Apache License, Version 2.0", 0),
        ("Classifier: License :: OSI Approved :: BSD License", 0),
        ("License-Expression: GPL-3.0-only", 1),
        ("License-Expression: MIT AND GPL-3.0-only", 1),
        ("Classifier: License :: OSI Approved :: GNU General Public License v3 (GPLv3)\nLicense: MIT", 1),
        ("License: Apache or so, with exceptions", 1),
        ("Summary: no licence at all", 1),
    ],
)
def test_the_audit_refuses_licences_that_are_not_permissive(tmp_path, metadata, exit_code):
    ended = _audit(tmp_path, metadata)
    assert ended.returncode == exit_code, ended.stdout + ended.stderr
    assert "  extra 1.0: " in ended.stdout
    assert ("refused: extra" in ended.stdout) == bool(exit_code)


def test_the_audit_takes_no_other_options_and_needs_something_to_audit(tmp_path):
    (tmp_path / "scripts").mkdir()
    script = tmp_path / "scripts" / "audit_dependencies.sh"
    script.write_text(SCRIPT.read_text())
    for option, message in (("--licenses", "unknown option --licenses"), ("--licences-only", "nothing to audit")):
        ended = subprocess.run(["bash", str(script), option], capture_output=True, text=True, timeout=120)
        assert (ended.returncode, message in ended.stderr) == (2, True)
