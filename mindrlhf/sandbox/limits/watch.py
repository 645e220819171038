"""Waits for an untrusted program to end, and counts meanwhile what it holds: memory and files.

Limits per process do not bound what many processes hold together, nor shared memory that none of them has mapped in at
the moment. Standard library only.
"""

import contextlib
import os
import re
import select
from collections.abc import Callable

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_NUM_CPUS = os.cpu_count() or 1
# linux/percpu_counter.c: each processor adds up so many pages before they are in the sum; there are four such sums.
_UNCOUNTED_BYTES = 4 * _NUM_CPUS * max(32, 2 * _NUM_CPUS) * _PAGE_BYTES
_SHARED_MAPPING = re.compile(rb"^\S+ ...s .*$", re.M)
# Between two counts; a new program is looked at early, then at this interval.
_FIRST_WAIT_MS, _INTERVAL_MS = 5, 20
# Without a memory disk of limited size: a directory with more files, or this many bytes above the limit, is too full.
_MAX_FILES = 4096


def wait(program: int, hang_up_fd: int, limit_passed: Callable[[], str]) -> int | str:
    """Reap children until ``program`` ends; return its exit code as a shell would, or why it has to be killed.

    Args:
        program: a child of this process.
        hang_up_fd: readable once nobody waits for the program any more.
        limit_passed: returns the name of the limit passed, or the empty text.
    """
    poll = select.poll()
    poll.register(hang_up_fd, select.POLLIN | select.POLLHUP)
    program_fd = _open_process(program)
    if program_fd is not None:
        poll.register(program_fd, select.POLLIN)
    wait_ms = _FIRST_WAIT_MS
    while True:
        ready = poll.poll(wait_ms)
        code = _reap(program)
        if code is not None:
            return code
        if any(fd == hang_up_fd for fd, _ in ready):
            return "hung up"
        if limit := limit_passed():
            return limit
        wait_ms = _INTERVAL_MS


def hold_more(pids: list[int], limit_bytes: int) -> bool:
    """Return True if processes hold more than so many bytes; costly counts are made only near the limit."""
    return most_bytes(pids) > limit_bytes and memory_bytes(pids) > limit_bytes


def most_bytes(pids: list[int]) -> int:
    """Return a number that ``memory_bytes`` is no greater than: resident and swapped pages, and shared objects.

    The kernel counts these pages for each processor apart, so that their sums may be behind.
    """
    num_bytes, shared_bytes = 0, {}
    for pid in pids:
        with contextlib.suppress(OSError, ValueError):
            with open(f"/proc/{pid}/status", "rb") as file:
                held = re.findall(rb"^Vm(?:RSS|Swap):\s+(\d+) kB", file.read(), re.M)
            num_bytes += 1024 * sum(map(int, held)) + _UNCOUNTED_BYTES
            _add_shared(pid, shared_bytes)
    return num_bytes + sum(shared_bytes.values())


def memory_bytes(pids: list[int]) -> int:
    """Return what processes hold: private pages, swapped ones too, and each shared memory object once, in full.

    A shared object counts by its size, not by what is mapped in: its pages stay when a process unmaps them.
    """
    private_bytes, shared_bytes = 0, {}
    for pid in pids:
        try:
            with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
                fields = dict(line.split()[:2] for line in file.read().splitlines()[1:])
            private_bytes += 1024 * sum(int(fields.get(name, 0)) for name in (b"Pss_Anon:", b"Pss_File:", b"SwapPss:"))
            _add_shared(pid, shared_bytes)
        except (OSError, ValueError):
            private_bytes += _resident_bytes(pid)
    return private_bytes + sum(shared_bytes.values())


def is_directory_full(path: str, limit_bytes: int) -> bool:
    """Return True if a directory without a limit of its own holds too many bytes or files."""
    num_files, num_bytes, directories = 0, 0, [path]
    while directories and num_files <= _MAX_FILES and num_bytes <= limit_bytes:
        with contextlib.suppress(OSError), os.scandir(directories.pop()) as entries:
            for entry in entries:
                num_files += 1
                if num_files > _MAX_FILES:
                    break
                with contextlib.suppress(OSError):
                    num_bytes += entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        directories.append(entry.path)
    return num_files > _MAX_FILES or num_bytes > limit_bytes


def _add_shared(pid: int, sizes: dict[bytes, int]) -> None:
    """Note the size of each shared memory object that a process has mapped, by its inode."""
    with open(f"/proc/{pid}/maps", "rb") as file:
        maps = file.read()
    if b"-s " in maps or b"xs " in maps:  # few programs have any
        for line in _SHARED_MAPPING.findall(maps):
            # proc(5): address, permissions, offset, device, inode, path
            address, _, offset, _, inode, *path = line.split(maxsplit=5)
            if path and not path[0].startswith(b"/dev/null"):
                begin, end = (int(part, 16) for part in address.split(b"-"))
                sizes[inode] = max(sizes.get(inode, 0), int(offset, 16) + end - begin)


def _resident_bytes(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE_BYTES
    except (OSError, ValueError, IndexError):
        return 0  # it has just ended


def _reap(program: int) -> int | None:
    """Reap all that have ended, orphans included, which their first process inherits."""
    while True:
        try:
            ended, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return None
        if ended == 0:
            return None
        if ended == program:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def _open_process(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError):  # an old kernel: the interval has to do
        return None
