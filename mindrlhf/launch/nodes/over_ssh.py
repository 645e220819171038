"""The same command on every host of a file, through ssh: what a cluster's own scheduler does where there is one.

The secret goes through ssh's standard input, which stays open as a lifeline: numbers of signals for the run follow, and
when it ends, because this process or the network has gone, the launcher there ends its ranks.
"""

import contextlib
import io
import os
import secrets
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from mindrlhf.errors import RunFailure, UserError
from mindrlhf.launch.failure_report import exit_code, say
from mindrlhf.launch.nodes.place import DEFAULT_PORT
from mindrlhf.launch.nodes.secret import SECRET_VARIABLE
from mindrlhf.system.child import PIPE, Child
from mindrlhf.system.processes import handling

LIFELINE_VARIABLE = "MINDRLHF_LIFELINE"
_SSH = ("ssh", "-o", "BatchMode=yes")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_POLL_INTERVAL_S = 0.2


def read_hosts(path: str) -> list[str]:
    """Return the hosts of a file, one to a line; what follows a # is a comment.

    Raises:
        UserError: it cannot be read, or holds something else.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--hostfile {path} cannot be read ({error})") from None
    hosts = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if len(words) > 1 or (words and words[0].startswith("-")):
            raise UserError(
                f"--hostfile {path}, line {number} is {line.strip()!r}: give one host a line, HOST or USER@HOST"
            )
        hosts += words
    if not hosts or len(set(hosts)) < len(hosts):
        raise UserError(
            f"--hostfile {path} names {len(set(hosts))} different hosts in {len(hosts)} lines: name each once"
        )
    return hosts


def run_over_ssh(words: Sequence[str], hosts: Sequence[str], master: str | None, num_spares: int = 0) -> int:
    """Run ``python -m mindrlhf.cli WORDS`` on all hosts, in this directory, and return node 0's exit code.

    Args:
        master: where node 0 listens; None for the first host and the default port.
        num_spares: the last hosts, that wait to take the place of others.

    Raises:
        UserError: they are more than the hosts allow.
    """
    if not 0 <= num_spares <= max(0, len(hosts) - 2):
        raise UserError(f"--spares is {num_spares}, but --hostfile names {len(hosts)} hosts, of which 2 have to train")
    master = master or f"{hosts[0].rpartition('@')[2]}:{DEFAULT_PORT}"
    secret = os.environ.get(SECRET_VARIABLE) or secrets.token_hex(32)
    shape = ["--nodes", str(len(hosts) - num_spares), *(["--spares", str(num_spares)] if num_spares else [])]
    nodes = [_start(host, _remote_command([*words, *shape], node, master), secret) for node, host in enumerate(hosts)]
    readers = [
        threading.Thread(target=_show, args=(process.output, f"[node {node}] " if node else ""), daemon=True)
        for node, process in enumerate(nodes)
    ]
    for reader in readers:
        reader.start()
    with passing_signals(lambda number: _tell(nodes[0], number)):
        while any(process.poll() is None for process in nodes):
            next(process for process in nodes if process.poll() is None).wait(_POLL_INTERVAL_S)
    for reader in readers:
        reader.join()
    codes = [exit_code(process.poll()) for process in nodes]
    for node, code in enumerate(codes):
        if code == 255:
            say(f"ssh to node {node} ({hosts[node]}) failed: try ssh -o BatchMode=yes {hosts[node]} true")
    # With spares the run may have done without some of them.
    return codes[0] if num_spares else codes[0] or max(codes)


def hold_on_to_lifeline() -> str:
    """In a launcher started over ssh or Ray: take signals from there, and end when it has gone; return its name."""
    if (starter := os.environ.pop(LIFELINE_VARIABLE, None)) is None:
        return ""

    def read() -> None:
        for line in sys.stdin:
            os.kill(os.getpid(), int(line))
        is_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN  # as under nohup
        os.kill(os.getpid(), signal.SIGTERM if is_ignored else signal.SIGHUP)

    threading.Thread(target=read, daemon=True).start()
    return starter


def _remote_command(words: Sequence[str], node: int, master: str) -> str:
    place = ["--node-rank", str(node), "--master", master]
    names = sorted(name for name in os.environ if name.startswith("MINDRLHF_") or name == "PYTHONPATH")
    settings = [f"{name}={os.environ[name]}" for name in names if name != SECRET_VARIABLE]
    command = ["env", f"{LIFELINE_VARIABLE}=ssh", *settings, sys.executable, "-P", "-m", "mindrlhf.cli", *words, *place]
    return (
        f"cd {shlex.quote(os.getcwd())} && IFS= read -r {SECRET_VARIABLE} && export {SECRET_VARIABLE} && "
        f"exec {shlex.join(command)}"
    )


def _start(host: str, command: str, secret: str) -> Child:
    try:
        process = Child([*_SSH, host, command], input=PIPE, output=PIPE)
    except OSError as error:
        raise RunFailure(f"ssh cannot be started ({error})") from None
    _tell(process, secret)
    return process


def _tell(process: Child, line: object) -> None:
    with contextlib.suppress(OSError, ValueError):  # it has ended
        process.input.write(f"{line}\n".encode())
        process.input.flush()


def passing_signals(tell: Callable[[int], None]) -> contextlib.AbstractContextManager[None]:
    """Pass signals on to node 0, which sees to the others."""
    return handling(_SIGNALS, lambda number, _: tell(int(number)))


def _show(stream: IO[bytes], prefix: str) -> None:
    for line in io.TextIOWrapper(stream, errors="replace", encoding="utf-8"):
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.write(f"{prefix}{line}")
            sys.stdout.flush()
