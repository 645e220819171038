"""Nothing of a request is left in the memory that later programs start with.

Texts of requests could be in pages that programs get by fork, freed or not. So the tests do not ask Python for objects:
they read all of the memory that a program, or the launcher itself, has.
"""

import json
import os
import re
import sys
import time
from pathlib import Path

import pytest
from code_rewards import fenced, reward

from mindrlhf.rewards.pool import RewardPool
from mindrlhf.rewards.selection import Selection
from mindrlhf.rewards.types import RewardInput
from mindrlhf.sandbox import server
from mindrlhf.sandbox.run import Program, SandboxLimits, run_files, run_python

pytestmark = pytest.mark.timeout(120)
SYSTEM_PYTHON = "/usr/bin/python3"
LIMITS = SandboxLimits(time_s=30.0)

# Calls look(memory) for each readable part of this process's memory; no pattern of what is looked for may stand in it.
READ_MEMORY = """
def read_memory(look):
    with open('/proc/self/maps') as file:
        lines = file.read().splitlines()
    with open('/proc/self/mem', 'rb', buffering=0) as memory:
        for line in lines:
            fields = line.split()
            begin, end = (int(part, 16) for part in fields[0].split('-'))
            if not fields[1].startswith('r') or fields[-1] in ('[vvar]', '[vsyscall]', '[vvar_vclock]'):
                continue
            while begin < end:
                try:
                    memory.seek(begin)
                    part = memory.read(min(end - begin, 1 << 24))
                except OSError:
                    break
                if not part:
                    break
                look(part)
                begin += len(part)
"""
# Looks for what earlier requests may have left: the expected values of tests, or a sibling's program.
SCANNER = (
    READ_MEMORY
    + r"""
import re
found = {}
def look(part):
    for arguments, value in re.findall(rb'assert f\((\d+)\) =[=] (\d+)', part):
        found[int(arguments)] = int(value)
    for body in re.findall(rb'def f\(x\):(?:\\n|\n) +return {([^{}]*)}\[x[]]', part):
        found.update((int(key), int(value)) for key, value in re.findall(rb'(\d+): (\d+)', body))
read_memory(look)
def f(x):
    return found[x]
if __name__ == '__main__':
    print(f(int(input())))
"""
)
HONEST = (
    "def f(x):\n    return {3: 1729, 10: 887}[x]\nclass Solution:\n    f = staticmethod(f)\n"
    "if __name__ == '__main__':\n    print(f(int(input())))"
)
TESTS = {
    "statements": ["assert f(3) == 1729", "assert f(10) == 887"],
    "check": "def check(g):\n    assert f(3) == 1729\n    assert f(10) == 887\n    assert g(3) == 1729\ncheck(f)",
    "entry point": {"test": "def check(g):\n    assert g(3) == 1729\n    assert g(10) == 887", "entry_point": "f"},
    "pytest": "from solution import f\ndef test_f():\n    assert f(3) == 1729\n    assert f(10) == 887",
    "unittest": "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        assert f(3) == 1729\n",
    "setup": {"test_list": ["assert f(3) == 1729", "assert f(10) == 887"], "test_setup_code": "x = 1"},
    "functional": [{"input": "3", "output": "1729", "testtype": "functional", "fn_name": "f"}],
    "calls": {"fn_name": "f", "inputs": [[3], [10]], "outputs": [1729, 887]},
    "streams": {"inputs": ["3\n", "10\n"], "outputs": ["1729\n", "887\n"]},
}


@pytest.mark.parametrize("kind", TESTS)
def test_a_program_that_reads_its_memory_earns_nothing_after_honest_ones(kind):
    assert reward(fenced(HONEST), TESTS[kind]) == 1.0
    assert reward(fenced(SCANNER), TESTS[kind], partial="true") == 0.0


def test_the_same_through_the_reward_pool():
    kinds = list(TESTS.values())
    answers = [kind if isinstance(kind, str) else json.dumps(kind) for kind in kinds for _ in range(4)]
    programs = [HONEST, SCANNER, SCANNER, SCANNER] * len(kinds)
    samples = [
        RewardInput(index, fenced(program), answer) for index, (program, answer) in enumerate(zip(programs, answers))
    ]
    with RewardPool(Selection(("code_execution",), (1.0,)), timeout_s=60.0) as pool:
        totals = [result.total for result in pool.score(samples)]
    assert totals == [1.0, 0.0, 0.0, 0.0] * len(kinds)


def test_the_scanner_finds_what_is_in_its_memory():
    # Written as no text of the scanner's own, so that what it earns nothing with above is that nothing is there.
    planted = f"kept = bytes([b ^ 1 for b in {bytes(byte ^ 1 for byte in b'assert f(3) == 1729')!r}])\n"
    assert run_python(planted + SCANNER, "3\n", LIMITS).stdout == "1729\n"


CANARY = "canary-of-an-earlier-request"
COUNTER = READ_MEMORY + "canary, count = bytes([b ^ 1 for b in {turned!r}]), 0\n"
COUNT = """
def look(part):
    global count
    # Its own copy, and those of the search, are not preceded by a mark.
    count += sum(part.count(mark + canary) for mark in (b'=', b'-'))
read_memory(look)
print(count)
"""


def counter(planted: str = "") -> str:
    return COUNTER.format(turned=bytes(byte ^ 1 for byte in CANARY.encode())) + planted + COUNT


@pytest.fixture(scope="module")
def canaries() -> None:
    """Have the canary in every place of a request, in programs that end well, fail, and are killed."""
    marked = f"={CANARY}-{CANARY}"
    program = f"kept = '{marked}' * 1000\ndef f(x):\n    return '{marked}'\nprint(input())\n"
    files = {"main.py": program, "data": marked * 5000}
    run_files(files, "main.py", stdin=marked, limits=LIMITS)
    run_python(program + "1 / 0", marked, LIMITS)
    run_python(program + "while True: pass", marked, SandboxLimits(time_s=0.5))
    completion = fenced(program)
    reward(completion, [f"assert f('{marked}') == '{marked}'"] * 20)
    reward(completion, {"test": f"def check(g):\n    assert g(1) == '{marked}'", "entry_point": "f"})
    reward(completion, {"test_list": [f"assert f(1) == '{marked}'"], "test_setup_code": f"x = '{marked}'"})
    reward(completion, {"fn_name": "f", "inputs": [[marked]] * 5, "outputs": [marked] * 5})
    reward(completion, {"inputs": [marked] * 2, "outputs": [marked] * 2})


def test_a_fresh_program_has_no_text_of_earlier_requests_in_all_its_memory(canaries):
    assert int(run_python(counter("kept = b'=' + canary\n"), limits=LIMITS).stdout) >= 1
    assert run_python(counter(), limits=LIMITS).stdout == "0\n"


def test_the_launcher_itself_never_has_the_text_of_a_request(canaries):
    pid = server.shared_server()._process.pid
    found, num_bytes = 0, 0
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines()
        with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
            for line in lines:
                begin, end = (int(part, 16) for part in re.match(r"(\w+)-(\w+)", line).groups())
                if line.split()[1].startswith("r") and "[v" not in line:
                    memory.seek(begin)
                    part = memory.read(end - begin)
                    found, num_bytes = found + part.count(CANARY.encode()), num_bytes + len(part)
    except PermissionError:
        pytest.skip("this system lets nobody look into the memory of a process of the same user")
    assert num_bytes > 1 << 20
    assert found == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="without root, programs are one user, and Landlock keeps them apart")
def test_files_of_a_program_are_not_for_others_even_without_namespaces_and_landlock(monkeypatch):
    if os.path.exists(SYSTEM_PYTHON):
        monkeypatch.setattr(sys, "executable", SYSTEM_PYTHON)  # the program's user may not reach this interpreter
    launcher = server.LauncherServer(without=("namespaces", "landlock"))
    monkeypatch.setattr(server, "_server", launcher)
    search = """
import glob, sys
found = glob.glob('/tmp/mindrlhf-sandbox-*')
for path in found:
    try:
        print(open(path + '/secret').read())
    except PermissionError:
        print('refused')
    except FileNotFoundError:
        print('this program')
"""
    try:
        files = {"main.py": "import time\ntime.sleep(100)", "secret": CANARY}
        with Program(files, "main.py", LIMITS) as other:
            other._hear_until(lambda: "pid" in other._told)
            deadline_s = time.monotonic() + 30
            while not (Path(other._told["work_dir"]) / "secret").exists() and time.monotonic() < deadline_s:
                time.sleep(0.01)
            run = run_python(search, limits=LIMITS)
            if not run.succeeded:
                pytest.skip(f"an interpreter that others may not read: {run.stderr}")
            assert "refused" in run.stdout and CANARY not in run.stdout
    finally:
        launcher.close()
