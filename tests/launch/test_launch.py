"""The launcher with one rank, which needs neither msrun nor MindSpore, its log filter and its process bookkeeping."""

import io
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from mindrlhf.errors import STOPPED
from mindrlhf.launch.launch import launch, worker_environment
from mindrlhf.launch.logs import LogFollower
from mindrlhf.system import processes
from mindrlhf.system.files import take_directory
from mindrlhf.system.ports import find_free_port
from mindrlhf.system.processor import openblas_environment

pytestmark = pytest.mark.timeout(60)


def write_worker(tmp_path: Path, text: str) -> list[str]:
    path = tmp_path / "worker.py"
    path.write_text(textwrap.dedent(text))
    return [str(path)]


def wait_for(path: Path) -> str:
    deadline = time.monotonic() + 30
    while not path.exists() or not path.read_text(encoding="utf-8"):
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.02)
    return path.read_text(encoding="utf-8")


def is_running(pid: int) -> bool:
    status = processes.read_status(pid)
    return status is not None and status.returncode is None


# Leaves a child in a session of its own that does not react to SIGTERM, as a rollout server might.
STUBBORN_CHILD = """
    import os, pathlib, subprocess, sys, time
    code = "import pathlib, os, signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);" \\
           "pathlib.Path(sys.argv[1]).write_text(str(os.getpid())); time.sleep(600)"
    path = pathlib.Path(__file__).with_name("child.pid")
    subprocess.Popen([sys.executable, "-c", code, str(path)], start_new_session=True)
    while not (path.exists() and path.read_text()):
        time.sleep(0.02)
"""


def test_exit_code_arguments_and_output_of_the_rank_are_passed_on(tmp_path, capsys):
    command = write_worker(tmp_path, "import sys; print('got', sys.argv[1:]); sys.exit(7)")
    out = io.StringIO()
    assert launch([*command, "--steps", "3"], 1, tmp_path / "logs", out=out) == 7
    assert out.getvalue() == "got ['--steps', '3']\n"
    assert (tmp_path / "logs" / "worker_0.log").read_text() == "got ['--steps', '3']\n"
    message = capsys.readouterr().err
    assert "rank 0 ended with exit code 7" in message
    assert str(tmp_path / "logs" / "worker_0.log") in message


@pytest.mark.parametrize("code", [2, 7])
def test_a_failure_says_its_error_once(tmp_path, capsys, code):
    worker = f"import sys; print('error: no such thing', file=sys.stderr); sys.exit({code})"
    advice = {"advice": lambda: "again", "advice_after_mistake": lambda: "mend it"}
    assert launch(write_worker(tmp_path, worker), 1, tmp_path / "logs", **advice) == code
    printed = "".join(capsys.readouterr())
    assert printed.count("no such thing") == 1
    assert printed.splitlines()[-1] == ("  mend it" if code == 2 else "  again")


def test_ctrl_c_says_how_to_go_on(tmp_path):
    worker = "import pathlib, time; pathlib.Path(__file__).with_name('ready').write_text('yes'); time.sleep(600)"
    launcher = start_launcher(tmp_path, write_worker(tmp_path, worker), 20, "advice=lambda: 'step 4 is saved'")
    wait_for(tmp_path / "ready")
    launcher.send_signal(signal.SIGINT)
    _, errors = launcher.communicate(timeout=30)
    assert launcher.returncode == 130
    assert errors.splitlines()[:2] == ["mindrlhf: SIGINT received: stopping all processes", "  step 4 is saved"]


def test_private_directories_that_killed_servers_leave_are_removed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    text = f"""
        import os, signal
        from pathlib import Path
        from mindrlhf.system.files import take_directory
        take_directory(Path({str(tmp_path)!r}), {processes.SERVER_PREFIX!r})
        os.kill(os.getpid(), signal.SIGKILL)
    """
    others, lock = take_directory(tmp_path, processes.SERVER_PREFIX)  # of a run that goes on
    assert launch(write_worker(tmp_path, text), 1, tmp_path / "logs", out=io.StringIO()) == 137
    assert list(tmp_path.glob(f"{processes.SERVER_PREFIX}*")) == [others]
    os.close(lock)


def test_success_returns_zero_and_says_nothing(tmp_path, capsys):
    assert launch(write_worker(tmp_path, "pass"), 1, tmp_path / "logs", out=io.StringIO()) == 0
    assert capsys.readouterr().err == ""


def test_a_killed_rank_is_reported_by_its_signal_and_its_children_are_ended(tmp_path, capsys):
    command = write_worker(tmp_path, STUBBORN_CHILD + "    os.kill(os.getpid(), 9)\n")
    assert launch(command, 1, tmp_path / "logs", grace_s=0.2, out=io.StringIO()) == 128 + signal.SIGKILL
    assert "rank 0 was killed by SIGKILL" in capsys.readouterr().err
    assert not is_running(int((tmp_path / "child.pid").read_text()))


def test_children_left_by_a_rank_that_ended_well_are_ended(tmp_path):
    assert launch(write_worker(tmp_path, STUBBORN_CHILD), 1, tmp_path / "logs", grace_s=0.2, out=io.StringIO()) == 0
    assert not is_running(int((tmp_path / "child.pid").read_text()))


def test_children_of_the_caller_are_left_alone(tmp_path):
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as bystander:
        assert launch(write_worker(tmp_path, "pass"), 1, tmp_path / "logs", out=io.StringIO()) == 0
        assert is_running(bystander.pid)
        bystander.kill()


def test_logs_of_an_earlier_launch_are_put_aside(tmp_path):
    logs = tmp_path / "logs"
    for name in ("worker_3.log", "rollout_0.log"):
        (logs / name).parent.mkdir(exist_ok=True)
        (logs / name).write_text(f"{name} of the first")
    for _ in range(2):
        launch(write_worker(tmp_path, "print('later')"), 1, logs, out=io.StringIO())
    texts = {str(path.relative_to(logs)): path.read_text() for path in logs.rglob("*.log")}
    first = {f"attempt_1/{name}": f"{name} of the first" for name in ("worker_3.log", "rollout_0.log")}
    assert texts == first | {"attempt_2/worker_0.log": "later\n", "worker_0.log": "later\n"}


def start_launcher(tmp_path: Path, command: list[str], grace_s: float, options: str = "") -> subprocess.Popen:
    code = "import signal, sys; from mindrlhf.launch.launch import launch;"
    code += f"sys.exit(launch(sys.argv[2:], 1, sys.argv[1], grace_s={grace_s}, {options}))"
    argv = [sys.executable, "-c", code, str(tmp_path / "logs"), *command]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_lets_the_rank_clean_up_and_gives_the_conventional_exit_code(tmp_path, number):
    command = write_worker(
        tmp_path,
        """
        import pathlib, signal, sys, time
        here = pathlib.Path(__file__).parent
        def clean_up(*_):
            (here / "cleaned").write_text("yes")
            sys.exit(0)
        signal.signal(signal.SIGHUP, clean_up)
        (here / "ready").write_text("yes")
        time.sleep(600)
        """,
    )
    launcher = start_launcher(tmp_path, command, grace_s=20)
    wait_for(tmp_path / "ready")
    launcher.send_signal(number)
    _, errors = launcher.communicate(timeout=30)
    assert launcher.returncode == 128 + number
    assert signal.Signals(number).name in errors
    assert (tmp_path / "cleaned").exists()


LISTENING_WORKER = """
    import pathlib, signal, sys, time
    from mindrlhf.system import heartbeat
    here = pathlib.Path(__file__).parent
    signal.signal(signal.SIGUSR1, lambda *_: (here / "saved").write_text("yes"))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    heartbeat.start()
    heartbeat.takes_requests()
    (here / "ready").write_text("yes")
    while True:
        time.sleep(0.05)
"""
PASS_ON = "rank_0_signals=(signal.SIGTERM, signal.SIGUSR1)"


def test_signals_for_the_lead_are_passed_on_and_the_run_ends_its_own_way(tmp_path):
    launcher = start_launcher(tmp_path, write_worker(tmp_path, LISTENING_WORKER), 20, PASS_ON)
    wait_for(tmp_path / "ready")
    launcher.send_signal(signal.SIGUSR1)
    wait_for(tmp_path / "saved")
    launcher.send_signal(signal.SIGTERM)
    _, errors = launcher.communicate(timeout=30)
    assert (launcher.returncode, errors) == (0, "")


def test_a_lead_that_does_not_listen_yet_is_stopped_and_not_asked_to_save(tmp_path):
    worker = """
        import pathlib, time
        pathlib.Path(__file__).with_name("ready").write_text("yes")
        time.sleep(600)
    """
    launcher = start_launcher(tmp_path, write_worker(tmp_path, worker), 20, PASS_ON)
    wait_for(tmp_path / "ready")
    launcher.send_signal(signal.SIGUSR1)  # would kill a process without a handler
    launcher.send_signal(signal.SIGTERM)
    _, errors = launcher.communicate(timeout=30)
    assert launcher.returncode == STOPPED
    assert errors.startswith("mindrlhf: SIGTERM received: stopping all processes")


def test_a_run_without_progress_is_stopped_with_the_stacks_in_its_log(tmp_path, capsys):
    command = write_worker(tmp_path, LISTENING_WORKER)
    assert launch(command, 1, tmp_path / "logs", out=io.StringIO(), hang_timeout_s=1.0, advice=lambda: "try again") == 1
    report = capsys.readouterr().err.splitlines()
    assert report[0].startswith("mindrlhf: rank 0 has made no progress for ")
    assert report[1:] == ["  rank 0 was in: starting", "  try again"]
    assert "Current thread" in (tmp_path / "logs" / "worker_0.log").read_text()


def test_a_second_interrupt_does_not_wait_for_the_grace_to_end(tmp_path):
    launcher = start_launcher(tmp_path, write_worker(tmp_path, DEAF_WORKER), grace_s=600)
    pid = int(wait_for(tmp_path / "ready"))
    launcher.send_signal(signal.SIGINT)
    assert "SIGINT" in launcher.stderr.readline()
    launcher.send_signal(signal.SIGINT)
    launcher.communicate(timeout=30)
    assert launcher.returncode == 130
    assert not is_running(pid)


DEAF_WORKER = """
    import os, pathlib, signal, time
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    pathlib.Path(__file__).with_name("ready").write_text(str(os.getpid()))
    time.sleep(600)
"""


def test_a_killed_launcher_takes_its_rank_along(tmp_path):
    launcher = start_launcher(tmp_path, write_worker(tmp_path, DEAF_WORKER), grace_s=1)
    pid = int(wait_for(tmp_path / "ready"))
    launcher.kill()
    launcher.communicate(timeout=30)
    deadline = time.monotonic() + 20
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_running(pid)


def test_die_with_parent_acts_at_once_when_the_parent_has_already_gone():
    code = "from mindrlhf.system.processes import die_with_parent; die_with_parent(1 << 22); print('still here')"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=30)
    assert (ended.returncode, ended.stdout) == (-signal.SIGKILL, b"")


def test_die_with_launcher_does_nothing_without_a_launcher():
    code = "from mindrlhf.system.processes import die_with_launcher; die_with_launcher(); print('still here')"
    environment = {name: value for name, value in os.environ.items() if name != processes.LAUNCHER_PID_VARIABLE}
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=30, env=environment)
    assert (ended.returncode, ended.stdout) == (0, b"still here\n")


def test_status_of_a_process_whose_name_holds_brackets_and_spaces(tmp_path):
    program = tmp_path / "a) Z 1 (b"
    program.symlink_to("/bin/sleep")
    with subprocess.Popen([program, "600"]) as process:
        while os.readlink(f"/proc/{process.pid}/exe") == os.readlink("/proc/self/exe"):
            time.sleep(0.01)
        assert processes.read_status(process.pid) == processes.ProcessStatus(process.pid, os.getpid(), None)
        process.kill()


@pytest.mark.parametrize(
    "ending, returncode", [("sys.exit(5)", 5), ("os.kill(os.getpid(), 9)", -9), ("os.abort()", -6)]
)
def test_status_of_a_zombie_tells_how_it_ended(ending, returncode):
    process = subprocess.Popen([sys.executable, "-c", f"import os, sys; {ending}"], stderr=subprocess.DEVNULL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    status = processes.read_status(process.pid)
    assert status is not None
    assert status.returncode == returncode == process.wait()


def test_defaults_of_the_environment_give_way_to_the_users(monkeypatch):
    num_cores = len(os.sched_getaffinity(0))
    for name in ("OMP_NUM_THREADS", "MS_NODE_TIMEOUT", "OPENBLAS_CORETYPE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK_ID", "3")
    environment = worker_environment(1, {})
    assert environment["OMP_NUM_THREADS"] == str(num_cores)
    assert environment["OMP_WAIT_POLICY"] == "PASSIVE"
    assert environment["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)
    assert "RANK_ID" not in environment, "a launch from within another run must not inherit its rank"
    assert worker_environment(num_cores + 1, {})["OMP_NUM_THREADS"] == "1"
    assert openblas_environment().items() <= environment.items()
    monkeypatch.setenv("OPENBLAS_CORETYPE", "")
    assert worker_environment(1, {})["OPENBLAS_CORETYPE"] == "", "the user's choice, which may be to have none"
    monkeypatch.setenv("MS_NODE_TIMEOUT", "60")
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    environment = worker_environment(2, {"OMP_NUM_THREADS": "6"})
    assert (environment["MS_NODE_TIMEOUT"], environment["OMP_NUM_THREADS"]) == ("60", "6")


def test_a_table_of_ranks_of_an_operator_is_not_for_the_ranks(monkeypatch):
    monkeypatch.setenv("RANK_TABLE_FILE", "/user/serverid/devindex/config/hccl.json")
    assert "RANK_TABLE_FILE" not in worker_environment(2, {})


def test_a_found_port_can_be_bound_and_is_not_ephemeral():
    port = find_free_port()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", port))
    assert 1024 <= port < int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="utf-8").split()[0])


CLUSTER_NOISE = (
    "[WARNING] DISTRIBUTED(6513,7fcb,python):2026-01-01-02:02:48.492.325 "
    "[mindspore/ccsrc/cluster/rpc/tcp/tcp_comm.cc:485] Connect] Connection 11 source: 127.0.0.1:1\n"
    "[WARNING] ME(2692:139810163837824,MainProcess):2026-11-28-12:35:35.676.000 [mindspore/runtime/executor.py:215] "
    "set_cpu_affinity is not enabled because the environment does not meet the basic conditions for binding core.\n"
    "[INFO] BLAS kernels: SKYLAKEX; threads: 1\n"
)


def follow(tmp_path: Path, texts: dict[int, str]) -> str:
    paths = {rank: tmp_path / f"worker_{rank}.log" for rank in texts}
    for rank, text in texts.items():
        paths[rank].write_text(text)
    out = io.StringIO()
    LogFollower(paths, out).poll(final=True)
    return out.getvalue()


def test_rank_0_is_plain_and_other_ranks_show_only_trouble(tmp_path):
    traceback = 'Traceback (most recent call last):\n  File "a.py", line 1\n    x\nValueError: bad\ndetails\n'
    shown = follow(
        tmp_path,
        {
            0: CLUSTER_NOISE + "step 1\n" + CLUSTER_NOISE + "step 2\n",
            1: CLUSTER_NOISE + "step 1\n" + traceback + CLUSTER_NOISE + "later\n[ERROR] DEVICE(1) [x.cc] broken\n",
        },
    )
    expected = ["step 1", "step 2", *(f"[rank 1] {line}" for line in traceback.splitlines())]
    assert shown.splitlines() == [*expected, "[rank 1] [ERROR] DEVICE(1) [x.cc] broken"]


def test_the_same_error_of_all_ranks_is_shown_once(tmp_path):
    error = "mindrlhf train: error: learning rate is NaN\n"
    assert follow(tmp_path, {0: error, 1: error, 2: error}) == error


def test_lines_are_shown_once_they_are_whole_and_progress_bars_in_their_last_state(tmp_path):
    path, out = tmp_path / "worker_0.log", io.StringIO()
    follower = LogFollower({0: path}, out)
    follower.poll()
    with path.open("wb", buffering=0) as log:
        log.write(b"first\nsec")
        follower.poll()
        assert out.getvalue() == "first\n"
        log.write("ond\n\r 10%\r 90%\r100%\r\nrest \xff".encode("latin-1"))
        follower.poll()
        assert out.getvalue() == "first\nsecond\n100%\n"
    follower.poll(final=True)
    assert out.getvalue() == "first\nsecond\n100%\nrest \N{REPLACEMENT CHARACTER}\n"
