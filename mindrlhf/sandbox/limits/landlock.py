"""Landlock: which files a process may read and write, decided by the process itself and for good (landlock(7)).

The second lock where namespaces hold, and the only one on files where a container refuses namespaces. Standard
library only.
"""

import ctypes
import os
from collections.abc import Iterable

# The numbers are the same on all architectures.
_SYS_CREATE_RULESET, _SYS_ADD_RULE, _SYS_RESTRICT_SELF = 444, 445, 446
_CREATE_RULESET_VERSION, _RULE_PATH_BENEATH = 1, 1
# linux/landlock.h, rights on files and directories: how many of them each version of the interface knows.
_NUM_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _TRUNCATE, _IOCTL = (1 << bit for bit in (0, 1, 2, 3, 14, 15))
_ON_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL
_NETWORK_VERSION, _NETWORK_RIGHTS = 4, 3  # binding and connecting TCP sockets
_SCOPE_VERSION, _SCOPES = 6, 3  # abstract Unix sockets and signals, to processes that are not under the same rules

_libc = ctypes.CDLL(None, use_errno=True)


class _Ruleset(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("files", "network", "scopes")]


class _PathRule(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("rights", ctypes.c_uint64), ("directory_fd", ctypes.c_int32)]


def version() -> int:
    """Return the kernel's version of the interface; 0 where there is none, or it is switched off."""
    return max(0, _libc.syscall(_SYS_CREATE_RULESET, None, 0, _CREATE_RULESET_VERSION))


def restrict(
    readable: Iterable[str], writable: Iterable[str], allows_network: bool, listable: Iterable[str] = ()
) -> None:
    """Let this process and its children read below ``readable``, read and write below ``writable``, and no more but the
    names below ``listable``.

    Paths that do not exist are left out. Needs PR_SET_NO_NEW_PRIVS.

    Raises:
        OSError: the kernel refuses.
    """
    known = version()
    all_rights = (1 << _NUM_FILE_RIGHTS.get(known, 16)) - 1
    network = _NETWORK_RIGHTS if known >= _NETWORK_VERSION and not allows_network else 0
    ruleset = _Ruleset(all_rights, network, _SCOPES if known >= _SCOPE_VERSION else 0)
    size = 24 if known >= _SCOPE_VERSION else 16 if known >= _NETWORK_VERSION else 8
    ruleset_fd = _check(_libc.syscall(_SYS_CREATE_RULESET, ctypes.byref(ruleset), size, 0))
    try:
        for path in listable:
            _allow(ruleset_fd, path, _READ_DIR)
        for path in readable:
            _allow(ruleset_fd, path, (_READ_FILE | _READ_DIR | _EXECUTE) & all_rights)
        for path in writable:
            _allow(ruleset_fd, path, all_rights)
        _check(_libc.syscall(_SYS_RESTRICT_SELF, ruleset_fd, 0))
    finally:
        os.close(ruleset_fd)


def _allow(ruleset_fd: int, path: str, rights: int) -> None:
    try:
        path_fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        rule = _PathRule(rights if os.path.isdir(path) else rights & _ON_FILES, path_fd)
        _check(_libc.syscall(_SYS_ADD_RULE, ruleset_fd, _RULE_PATH_BENEATH, ctypes.byref(rule), 0))
    finally:
        os.close(path_fd)


def _check(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"Landlock: {os.strerror(ctypes.get_errno())}")
    return result
