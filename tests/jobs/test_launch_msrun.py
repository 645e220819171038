"""The launcher over real msrun jobs: workers of the test's own, most of them without MindSpore, to stay quick."""

import os
import signal
import time
from pathlib import Path

import pytest
from slow_tests import SLOW

from mindrlhf.system.processes import read_status

pytestmark = pytest.mark.timeout(600)

TIMEOUT_S = 250  # generous: other work may load the machine

# Rank 0 starts a child in its own session that ignores SIGTERM; every process writes its pid; the scheduler waits.
PATIENT_WORKER = """
import os, pathlib, subprocess, sys, time
here = pathlib.Path(__file__).parent
if os.environ["MS_ROLE"] == "MS_SCHED":
    time.sleep(600)
from mindrlhf.system.processes import die_with_launcher
die_with_launcher()
rank = os.environ["RANK_ID"]
if rank == "0":
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MS_")}
    subprocess.Popen([sys.executable, "-c", code], start_new_session=True, env=environment)
print("rank", rank, "works", flush=True)
(here / f"pid_{rank}.new").write_text(str(os.getpid()))
os.replace(here / f"pid_{rank}.new", here / f"pid_{rank}")
time.sleep(600)
"""


@pytest.mark.parametrize("rank", [pytest.param(0, marks=SLOW), 1])
def test_kill_9_of_a_rank_ends_the_run_with_cause_and_log_and_no_process_left(start, rank):
    job = start(PATIENT_WORKER)
    pids = [job.wait_for_rank(0), job.wait_for_rank(1)]
    # Launcher, msrun, scheduler, two ranks and the child of rank 0.
    assert len(job.running()) == 6, [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in job.running()]
    os.kill(pids[rank], signal.SIGKILL)
    assert job.wait(TIMEOUT_S) == 128 + signal.SIGKILL
    assert job.running() == []
    assert f"rank {rank} was killed by SIGKILL" in job.errors()
    assert str(job.dir / "logs" / f"worker_{rank}.log") in job.errors()
    assert job.output() == "rank 0 works\n"


@pytest.mark.parametrize("victim", ["launcher", "msrun"])
def test_kill_9_of_launcher_or_msrun_leaves_no_rank_behind(start, victim):
    job = start(PATIENT_WORKER)
    ranks = [job.wait_for_rank(0), job.wait_for_rank(1)]
    if victim == "launcher":
        job.launcher.kill()
    else:
        os.kill(read_status(ranks[0]).parent_pid, signal.SIGKILL)
    assert job.wait(TIMEOUT_S) == (-signal.SIGKILL if victim == "launcher" else 128 + signal.SIGKILL)
    deadline = time.monotonic() + TIMEOUT_S
    while set(ranks) & set(job.running()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not set(ranks) & set(job.running())
    if victim == "msrun":
        assert job.running() == []
        assert "msrun was killed by SIGKILL" in job.errors()
