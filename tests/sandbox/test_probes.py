"""Attempts to leave the sandbox, as root and as an ordinary user, with all layers and with some taken away."""

import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import sandbox_probes
from sandbox_probes import HUNGRY, PROBES

from mindrlhf.sandbox.leash import seccomp

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is for Linux"),
]
ROOT = Path(__file__).parents[2]
SYSTEM_PYTHON = "/usr/bin/python3"
NOBODY = 65534
USERS = ("this user", "nobody") if os.geteuid() == 0 else ("this user",)

KERNEL_CALLS = {
    f"system call {name}": f"call({numbers[0 if os.uname().machine == 'x86_64' else 1]}, 0, 0, 0, 0, 0, 0)"
    for name, numbers in seccomp._REFUSED.items()
    if numbers[0 if os.uname().machine == "x86_64" else 1] is not None
}


@functools.cache
def results(user: str, without: tuple[str, ...] = ()) -> dict:
    """Make all attempts and return what became of each."""
    request = {"probes": PROBES | KERNEL_CALLS, "hungry": {} if without else HUNGRY, "without": without}
    with tempfile.TemporaryDirectory() as directory:
        # Where an ordinary user can read it.
        os.chmod(directory, 0o755)
        for name in ("__init__.py", "errors.py", "sandbox", "system"):
            source, target = ROOT / "mindrlhf" / name, Path(directory, "mindrlhf", name)
            target.parent.mkdir(exist_ok=True)
            (shutil.copytree if source.is_dir() else shutil.copy)(source, target)
        driver = shutil.copy(sandbox_probes.__file__, directory)
        uses_system = user == "nobody" or "namespaces" in without
        if uses_system and not os.path.exists(SYSTEM_PYTHON):
            pytest.skip("needs an interpreter that an ordinary user can reach")
        ended = subprocess.run(
            [SYSTEM_PYTHON if uses_system else sys.executable, "-B", driver],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            timeout=300,
            cwd="/tmp",
            env={"PATH": os.environ["PATH"], "PYTHONPATH": directory},
            **({"user": NOBODY, "group": NOBODY, "extra_groups": []} if user == "nobody" else {}),
        )
    assert ended.returncode == 0, ended.stderr
    answer = json.loads(ended.stdout)
    lines = [line.split("\t") for line in answer["out"].splitlines()]
    answer["probes"] = {name: (verdict, kind, number) for verdict, kind, number, name in lines}
    return answer


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("name", [*PROBES, *KERNEL_CALLS])
def test_the_probe_holds(name, user):
    verdict, kind, _ = results(user)["probes"][name]
    # A mistake in the probe would look like a refusal.
    assert verdict == "held" and kind not in ("NameError", "SyntaxError", "TypeError", "AttributeError", "KeyError")


@pytest.mark.skipif(os.geteuid() != 0, reason="without namespaces an ordinary user's program is the same user")
@pytest.mark.parametrize("name", PROBES)
def test_without_namespaces_the_other_locks_hold(name):
    assert results("this user", ("namespaces",))["probes"][name][0] == "held"


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("name", HUNGRY)
def test_what_a_program_holds_is_bounded(name, user):
    ending = results(user)["hungry"][name]
    assert ending in ("memory limit", "exit code 1", "signal SIGKILL"), ending
    if "many processes" in name or name in ("orphans", "memory and files together"):
        assert ending == "memory limit"


@pytest.mark.parametrize("user", USERS)
def test_a_process_outside_is_untouched(user):
    answer = results(user)
    assert answer["victim"]
    assert {"namespaces", "seccomp", "watcher"} <= set(answer["layers"])


def test_there_are_enough_probes():
    assert len(PROBES) + len(HUNGRY) >= 100
