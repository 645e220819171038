import dataclasses
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from mindrlhf.errors import UserError
from mindrlhf.sandbox import server
from mindrlhf.sandbox.run import SandboxLimits, run_files, run_python

pytestmark = pytest.mark.timeout(120)
LIMITS = SandboxLimits(time_s=20.0)
SYSTEM_PYTHON = "/usr/bin/python3"
SHORT = dataclasses.replace(LIMITS, time_s=2.0)


def processes_named(mark: str) -> list[int]:
    """Running processes with ``mark`` on their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            command = (entry / "cmdline").read_bytes()
        except (OSError, ValueError):
            continue
        if entry.name.isdigit() and mark.encode() in command:
            found.append(int(entry.name))
    return found


def gone(mark: str, limit_s: float = 20.0) -> bool:
    deadline_s = time.monotonic() + limit_s
    while processes_named(mark):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.02)
    return True


@pytest.fixture
def without_namespaces(monkeypatch):
    """A launcher that is refused all locks but the limits, as in a container without the rights."""
    if os.geteuid() == 0 and os.path.exists(SYSTEM_PYTHON):
        # Programs run as another user, who may not reach this interpreter.
        monkeypatch.setattr(sys, "executable", SYSTEM_PYTHON)
    weak = functools.partial(server.LauncherServer, without=("namespaces", "seccomp", "landlock"))
    monkeypatch.setattr(server, "LauncherServer", weak)
    monkeypatch.setattr(server, "_server", None)
    monkeypatch.setattr(server, "_has_warned", False)
    yield
    if server._server is not None:
        server._server.close()


def is_isolated() -> bool:
    return "namespaces" in server.shared_server().layers


def test_output_input_and_exit_code():
    run = run_python("import sys\nprint(input())\nprint('oops', file=sys.stderr)\nsys.exit(3)", "h\u00e9\n", LIMITS)
    assert (run.stdout, run.stderr, run.ending, run.succeeded) == ("h\u00e9\n", "oops\n", "exit code 3", False)
    assert run_python("print(1)", limits=LIMITS).succeeded


@pytest.mark.parametrize(
    ("source", "outcome"),
    [
        ("import sys\nsys.exit()", ("", "exit code 0")),
        ("import sys\nsys.exit(True)", ("", "exit code 1")),
        ("import sys\nsys.exit(259)", ("", "exit code 3")),
        ("import sys\nsys.exit('words')", ("", "exit code 1")),
        ("raise KeyboardInterrupt", ("", "signal SIGINT")),
        ("def f(:", ("", "exit code 1")),
        ("out = open(1, 'w', closefd=False)\nout.write('left open')", ("left open", "exit code 0")),
        ("class A:\n    def __del__(self): print('gone')\na = A()", ("gone\n", "exit code 0")),
        ("import atexit\natexit.register(print, 'end')\nprint('begin')", ("begin\nend\n", "exit code 0")),
        ("import atexit\natexit.register(lambda: 1 / 0)", ("", "exit code 0")),
        ("import threading, time\nthreading.Timer(0.1, print, ['late']).start()", ("late\n", "exit code 0")),
        (
            "import threading, time\nthreading.Thread(target=time.sleep, args=(99,), daemon=True).start()\nprint(1)",
            ("1\n", "exit code 0"),
        ),
        ("import sys\nsys.stdout.close()", ("", "exit code 0")),
        ("import os\nos.close(1)\nprint(1)", ("", "exit code 120")),
    ],
)
def test_a_program_ends_as_an_interpreter_ends(source, outcome):
    run = run_python(source, limits=LIMITS)
    assert (run.stdout, run.ending) == outcome
    script = subprocess.run([sys.executable, "-I", "-c", source], capture_output=True, text=True, timeout=60)
    code = int(run.ending.split()[-1]) if "code" in run.ending else -signal.SIGINT
    assert (script.stdout, script.returncode) == (run.stdout, code)
    assert bool(script.stderr) == bool(run.stderr)


def test_several_files_and_text_that_utf8_cannot_hold():
    files = {"main.py": "from helper import f\nprint(f())", "helper.py": "def f(): return 7"}
    # Isolated mode keeps the working directory off the path, so files are read, not imported.
    assert "ModuleNotFoundError" in run_files(files, "main.py", limits=LIMITS).stderr
    reading = {"main.py": "print(open('data', encoding='utf-8').read())", "data": "seven"}
    assert run_files(reading, "main.py", limits=LIMITS).stdout == "seven\n"
    assert not run_python("print('\ud800')", "\ud800", LIMITS).succeeded


@pytest.mark.parametrize(
    ("source", "ending"),
    [
        ("while True: pass", "time limit"),
        ("import os, time\nos.close(1)\nos.close(2)\ntime.sleep(1000)", "time limit"),
        ("import os\nwhile True: os.write(1, b'x' * 65536)", "output limit"),
        ("import os\nwhile True: os.write(2, b'x' * 65536)", "output limit"),
        ("x = bytearray(2 << 30)", "exit code 1"),
        ("import ctypes\nctypes.string_at(0)", "signal SIGSEGV"),
        ("f = open('big', 'wb')\nwhile True: f.write(b'x' * 1000000)", "exit code 1"),
    ],
)
def test_hostile_programs_end(source, ending):
    limits = SHORT if ending == "time limit" else LIMITS
    assert run_python(source, limits=limits).ending == ending


FORKING = """
import os
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv({python!r}, [{python!r}, "-c", "import time; time.sleep(1000)", {mark!r}])
    os._exit(0)
os.wait()
{rest}
"""
BOMB = "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass\n# "


@pytest.mark.parametrize("rest", ["", "import time; time.sleep(1000)", "while True: os.write(1, b'x' * 65536)"])
def test_no_daemon_is_left(rest):
    mark = f"mindrlhf-daemon-{os.getpid()}"
    run_python(FORKING.format(python="/proc/self/exe", mark=mark, rest=rest), limits=SHORT)
    assert gone(mark)


def test_a_fork_bomb_is_over_at_the_time_limit():
    name = f"bomb{os.getpid()}.py"
    run = run_files({name: BOMB}, name, limits=SHORT)
    assert run.ending == "time limit"
    assert gone(name)


def test_the_number_of_processes_is_limited():
    source = """
import os
children = 0
try:
    while True:
        if os.fork() == 0:
            os.read(0, 1)
            import time
            time.sleep(1000)
        children += 1
except OSError:
    print(children)
"""
    run = run_python(source, limits=dataclasses.replace(LIMITS, num_processes=8))
    assert int(run.stdout) <= 8


def test_neither_network_nor_files_nor_environment_are_in_reach(monkeypatch):
    if not is_isolated():
        pytest.skip("this system allows no namespaces")
    monkeypatch.setenv("MINDRLHF_TEST_SECRET", "a secret of the caller")
    target = Path(tempfile.gettempdir(), f"mindrlhf-test-{os.getpid()}")
    source = f"""
import os, socket
for address in (("127.0.0.1", 9), ("192.0.2.1", 80)):
    try:
        socket.create_connection(address, timeout=1)
    except OSError as error:
        print(error.errno)
try:
    open({str(target)!r}, "w")
except OSError as error:
    print(error.errno)
open("allowed", "w").write("x")
print("SECRET" in str(os.environ))
print(os.getpid() < 10)
"""
    run = run_python(source, limits=LIMITS)
    # Network unreachable, twice; read-only file system.
    assert run.stdout.split() == ["101", "101", "30", "False", "True"], run
    assert not target.exists()


def test_without_namespaces_the_limits_remain(without_namespaces, capfd):
    try:
        run = run_python("print(1)", limits=LIMITS)
    except OSError as error:
        pytest.skip(f"as root, without namespaces, an interpreter that others may not read: {error}")
    assert run.stdout == "1\n"
    assert "no namespaces" in capfd.readouterr().err
    mark = f"mindrlhf-loose-{os.getpid()}"
    assert run_python("while True: pass", limits=SHORT).ending == "time limit"
    run_python(FORKING.format(python="/proc/self/exe", mark=mark, rest="import time; time.sleep(1000)"), limits=SHORT)
    assert gone(mark)
    assert "no namespaces" not in capfd.readouterr().err, "one warning is enough"


def leave_before_the_request() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, open(os.devnull, "r+b") as null:
        server.shared_server().launch([theirs.fileno(), *[null.fileno()] * 3])
        theirs.close()
        told = json.loads(ours.makefile("rb").readline())
    deadline_s = time.monotonic() + 20
    while (Path(f"/proc/{told['pid']}").exists() or Path(told["work_dir"]).exists()) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert not Path(f"/proc/{told['pid']}").exists()
    assert told["work_dir"] == "/sandbox" or not Path(told["work_dir"]).exists()


def test_a_caller_that_goes_away_before_its_request_leaves_nothing():
    leave_before_the_request()
    assert run_python("print(1)", limits=LIMITS).stdout == "1\n"


def test_nor_without_namespaces(without_namespaces):
    leave_before_the_request()


def test_too_few_locks_are_refused_unless_allowed(monkeypatch):
    for layers in ({"limits", "watcher"}, {"limits", "watcher", "landlock"}, {"limits", "seccomp"}, set()):
        monkeypatch.setattr(server, "active_layers", lambda layers=layers: frozenset(layers))
        with pytest.raises(UserError, match=r"sandbox\.allow_weak=true"):
            server.check_strong(allow_weak=False)
        assert server.check_strong(allow_weak=True) == ", ".join(sorted(layers))
    for layers in ({"namespaces"}, {"seccomp", "landlock"}, {"seccomp", "user"}):
        monkeypatch.setattr(server, "active_layers", lambda layers=layers: frozenset(layers))
        assert server.check_strong(allow_weak=False) == ", ".join(sorted(layers))
