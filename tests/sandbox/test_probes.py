"""Attempts to leave the sandbox, as root and as an ordinary user, with all layers and with some taken away."""

import ctypes
import errno
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import pytest
import sandbox_probes
from sandbox_probes import HUNGRY, PROBES

from mindrlhf.sandbox.limits import seccomp

pytestmark = pytest.mark.timeout(400)
ROOT = Path(__file__).parents[2]
SYSTEM_PYTHON = "/usr/bin/python3"
NOBODY = 65534
UNSHARE, PR_SET_NO_NEW_PRIVS = (272, 97), 38
USERS = ("this user", "nobody") if os.geteuid() == 0 else ("this user",)

KERNEL_CALLS = {
    f"system call {name}": f"call({numbers[0 if os.uname().machine == 'x86_64' else 1]}, 0, 0, 0, 0, 0, 0)"
    for name, numbers in seccomp._REFUSED.items()
    if numbers[0 if os.uname().machine == "x86_64" else 1] is not None
}


def refuse_namespaces() -> None:
    """Have the kernel refuse this process namespaces, as where unprivileged users may make none."""
    column = list(seccomp._ARCHITECTURES).index(os.uname().machine)
    code = [seccomp._instruction(seccomp._LOAD, seccomp._NUMBER_AT)]
    code += seccomp._if_equal(UNSHARE[column])
    # The C library then takes clone, whose flags a filter can see.
    code += [seccomp._instruction(seccomp._JUMP_EQUAL, seccomp._CLONE3[column], 0, 1), seccomp._fail(errno.ENOSYS)]
    clone = [
        seccomp._argument(0),
        seccomp._instruction(seccomp._JUMP_BITS, seccomp._CLONE_NEW_FLAGS, 0, 1),
        seccomp._fail(errno.EPERM),
    ]
    code += [seccomp._instruction(seccomp._JUMP_EQUAL, seccomp._CLONE[column], 0, len(clone)), *clone]
    ctypes.CDLL(None).prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    seccomp.install(b"".join([*code, seccomp._instruction(seccomp._RETURN, seccomp._ALLOW)]))


@functools.cache
def results(user: str, without: tuple[str, ...] = (), refuses_namespaces: bool = False) -> dict:
    """Make all attempts and return what became of each; ``without`` is told to the sandbox, a refusal is not."""
    hungry = {} if without or refuses_namespaces else HUNGRY
    request = {"probes": PROBES | KERNEL_CALLS, "hungry": hungry, "without": without}
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
            **({"preexec_fn": refuse_namespaces} if refuses_namespaces else {}),
        )
    assert ended.returncode == 0, ended.stderr
    answer = json.loads(ended.stdout)
    lines = [line.split("\t") for line in answer["out"].splitlines()]
    answer["probes"] = {name: (verdict, kind, number) for verdict, kind, number, name in lines}
    return answer


# A mistake in the probe would look like a refusal.
MISTAKES = ("NameError", "SyntaxError", "TypeError", "AttributeError", "KeyError")


def breaches(answer: dict, names: Iterable[str], mistakes: tuple[str, ...] = ()) -> list[tuple]:
    found = [(name, *answer["probes"].get(name, ("not made", ""))) for name in names]
    return [probe for probe in found if probe[1] != "held" or probe[2] in mistakes]


@pytest.mark.parametrize("user", USERS)
def test_the_probes_hold_and_a_process_outside_is_untouched(user):
    answer = results(user)
    assert breaches(answer, [*PROBES, *KERNEL_CALLS], MISTAKES) == []
    assert answer["victim"]
    assert {"namespaces", "seccomp", "watcher"} <= set(answer["layers"])


@pytest.mark.skipif(os.geteuid() != 0, reason="without namespaces an ordinary user's program is the same user")
def test_without_namespaces_the_other_locks_hold():
    assert breaches(results("this user", ("namespaces",)), PROBES) == []


def test_as_an_ordinary_user_whom_the_kernel_refuses_namespaces():
    answer = results(USERS[-1], refuses_namespaces=True)
    assert {"seccomp", "landlock", "watcher"} <= set(answer["layers"]) and "namespaces" not in answer["layers"]
    assert answer["victim"]
    assert breaches(answer, PROBES) == []


@pytest.mark.parametrize("user", USERS)
def test_what_a_program_holds_is_bounded(user):
    endings = results(user)["hungry"]
    assert endings.keys() == HUNGRY.keys()
    for name, ending in endings.items():
        is_counted = "many processes" in name or name in ("orphans", "memory and files together")
        assert ending in (("memory limit",) if is_counted else ("memory limit", "exit code 1", "signal SIGKILL")), name


def test_there_are_enough_probes():
    assert len(PROBES) + len(HUNGRY) >= 100
