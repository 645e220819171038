"""A Slurm of its own on pretended machines: machine 0 has the controller, each other one a node of two cores."""

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from machines import Machines

CONFIG = """
ClusterName=test
SlurmctldHost=node0(10.77.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
StateSaveLocation=/tmp/state
SlurmdSpoolDir=/tmp/spool
SlurmctldPidFile=/tmp/slurmctld.pid
SlurmdPidFile=/tmp/slurmd.pid
SlurmdParameters=config_overrides
ProctrackType=proctrack/TRACKING
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SlurmdTimeout=15
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
NodeName=node1 NodeAddr=10.77.0.2 CPUs=2 State=UNKNOWN
NodeName=node2 NodeAddr=10.77.0.3 CPUs=2 State=UNKNOWN
PartitionName=low Nodes=node[1-2] Default=YES PriorityTier=1
PartitionName=grace Nodes=node[1-2] PriorityTier=1 GraceTime=60
PartitionName=high Nodes=node[1-2] PriorityTier=10
"""
HOSTS = "127.0.0.1 localhost\n10.77.0.1 node0\n10.77.0.2 node1\n10.77.0.3 node2\n"
# A node without power comes back where the file `power` is there.
SCRIPT = """
echo "$$|$BASHPID" > {directory}/first_$NODE_RANK
mount --bind {directory}/hosts /etc/hosts
mkdir -p /tmp/state /tmp/spool
export SLURM_CONF={directory}/slurm.conf
if [ $NODE_RANK = 0 ]; then slurmctld -D -c; fi
while :; do
    until [ -e {directory}/power ]; do sleep 0.1; done
    slurmd -D
done
"""
LAST = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
TIMEOUT_S = 400  # generous: other work may load the machine


class Slurm:
    """Slurm's commands, given on the controller's machine.

    Args:
        directory: for its files, which all machines see.
        tracking: of the processes of a step: linuxproc signals all of them, pgid those in the task's process group.
        environment: of the jobs.
    """

    def __init__(self, directory: Path, tracking: str, environment: dict[str, str], keep: tuple[Path, ...]):
        missing = [name for name in ("slurmctld", "slurmd", "sbatch") if not shutil.which(name)]
        if missing or os.getuid():
            pytest.skip(f"{missing} are missing: packages slurmctld, slurmd, slurm-client" if missing else "not root")
        self.directory, self._environment = directory, environment
        (directory / "slurm.conf").write_text(CONFIG.replace("TRACKING", tracking))
        (directory / "hosts").write_text(HOSTS)
        (directory / "power").touch()
        self.machines = Machines(directory, SCRIPT.format(directory=directory), 3, keep)
        self.wait_until(self.is_idle)

    def on(self, node: int, *words: object) -> list[str]:
        """Return the command that runs words on a machine."""
        first = min(self.machines.processes(node), default=0)
        return ["nsenter", "-t", str(first), "-n", "-u", "-i", "-m", "-p", *map(str, words)]

    def call(self, *words: object, check: bool = True) -> str:
        """Run a command on the controller's machine, and return what it prints."""
        environment = {**self._environment, "SLURM_CONF": str(self.directory / "slurm.conf")}
        done = subprocess.run(self.on(0, *words), capture_output=True, text=True, env=environment, timeout=TIMEOUT_S)
        assert not check or done.returncode == 0, done.stderr + self.machines.all_text()
        return done.stdout.strip()

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds."""
        self.machines.wait_for(condition, TIMEOUT_S)

    def is_idle(self) -> bool:
        """Return whether both nodes are there, and nothing of a job is left on them."""
        return self.call("sinfo", "-hN", "-plow", "-o%T", check=False).split() == ["idle"] * 2

    def job(self, number: str) -> dict[str, str]:
        """Return what Slurm says of a job: JobState, ExitCode, Restarts and so on."""
        return dict(re.findall(r"(\w+)=(\S+)", self.call("scontrol", "-o", "show", "job", number)))

    def wait_for(self, number: str, *states: str) -> dict[str, str]:
        """Wait until a job is in one of these states, and return what Slurm says of it."""
        self.wait_until(lambda: self.job(number)["JobState"] in (*states, *LAST))
        job = self.job(number)
        assert job["JobState"] in states, (job, self.machines.all_text())
        return job

    def go_on(self, number: str) -> None:
        """Have a job that was queued again begin soon, unless it has begun, and take as long as it needs."""
        self.call("scontrol", "update", f"jobid={number}", "TimeLimit=UNLIMITED")
        self.wait_until(lambda: self.job(number)["JobState"] != "PENDING" or self.is_idle())
        # Not in the second of its end: slurmd takes no credential that is as old as what it has revoked.
        self.call("scontrol", "update", f"jobid={number}", "StartTime=now+5", check=False)

    def lose_power(self, node: int) -> None:
        """Kill everything on a machine, but for what starts slurmd where the file ``power`` is there."""
        (self.directory / "power").unlink()
        first = (self.directory / f"first_{node}").read_text().strip()
        kill = f"for p in /proc/[0-9]*; do p=${{p#/proc/}}; case $p in 1|{first}|$$) ;; *) kill -9 $p;; esac; done"
        subprocess.run(self.on(node, "bash", "-c", kill), check=False, stderr=subprocess.DEVNULL, timeout=TIMEOUT_S)
