"""Namespaces of untrusted programs: a file system of their own, no network, no other processes. Standard library only.

The launcher builds the file system once: a memory disk that shows the interpreter, the system's libraries and a few
devices, read-only, and nothing else of the machine. So there is no data set to read, no socket to connect to and no
``/dev/shm`` to fill. For each program it is copied, with a memory disk to work in and the program's own ``/proc``.
See namespaces(7), mount_setattr(2) and pivot_root(2).
"""

import ctypes
import os

WORK_DIR = "/sandbox"
SYSTEM_DIRS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
SYSTEM_FILES = tuple(f"/etc/{name}" for name in ("ld.so.cache", "localtime", "passwd", "group", "alternatives"))
DEVICES = tuple(f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom"))

STANDARD_LINKS = {"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}

# linux/sched.h, mount.h, capability.h, prctl.h
_CLONE_NEWNS, _CLONE_NEWIPC, _CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = (
    0x00020000,
    0x08000000,
    0x10000000,
    0x20000000,
    0x40000000,
)
NETWORK_AND_PROCESSES = _CLONE_NEWNS | _CLONE_NEWPID | _CLONE_NEWIPC | _CLONE_NEWNET
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, BIND, _MS_REC, _MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
_MOUNT_ATTR_RDONLY, _MOUNT_ATTR_NOSUID, _AT_RECURSIVE, _MNT_DETACH = 1, 2, 0x8000, 2
_SYS_MOUNT_SETATTR = 442
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_PR_CAPBSET_DROP, _CAPABILITY_VERSION_3, _LAST_CAPABILITY = 24, 0x20080522, 63
# Of empty files, directories and links together; each costs about a kilobyte of the kernel's memory.
_MAX_FILES = 4096

_libc = ctypes.CDLL(None, use_errno=True)


class _MountAttributes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("attr_set", "attr_clr", "propagation", "userns_fd")]


def enter(interpreter_prefix: str) -> bool:
    """Move this process into a file system of its own; return whether the system allows it.

    Where it does not, nothing has changed.
    """
    if os.uname().machine not in _SYS_PIVOT_ROOT:
        return False
    # Tried in a child first: a refusal halfway would leave this process nowhere.
    child = os.fork()
    if child == 0:
        try:
            _enter(interpreter_prefix)
            leave_for_program()
            first = os.fork()
            if first == 0:
                mount_program_dirs(1 << 20)
                os._exit(0)
            os._exit(os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]))
        finally:
            os._exit(1)
    if os.waitpid(child, 0)[1] != 0:
        return False
    _enter(interpreter_prefix)
    return True


def leave_for_program() -> None:
    """Give this copy of the launcher mounts, IPC and a network of its own, and its children process numbers."""
    _check(_libc.unshare(_CLONE_NEWNS | _CLONE_NEWPID | _CLONE_NEWIPC | _CLONE_NEWNET), "unshare")


def leave(flags: int, *, is_root: bool) -> None:
    """Leave namespaces; a user who is not root gets one of its own for that."""
    _check(_libc.unshare(flags | (0 if is_root else _CLONE_NEWUSER)), "unshare")


def mount_own_proc() -> None:
    """As the first process of namespaces that were left for: show their processes, and no others, in ``/proc``."""
    mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    mount("proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)


def mount_program_dirs(disk_bytes: int) -> None:
    """As the first process of a program's namespace: mount the memory disk it works in, and its own ``/proc``."""
    options = f"size={disk_bytes},nr_inodes={_MAX_FILES},mode=0777"
    mount("tmpfs", WORK_DIR, "tmpfs", _MS_NOSUID | _MS_NODEV, options)
    mount("proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)


def drop_capabilities() -> None:
    """Give up all rights over the namespaces this process is in."""
    for capability in range(_LAST_CAPABILITY + 1):
        if _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            break  # the kernel knows no more of them
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    _check(_libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")


def keep_user(user: int, group: int) -> None:
    """In a user namespace just entered, be the same user and group as outside it."""
    for name, line in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w", encoding="utf-8") as file:
            file.write(line)


def _enter(interpreter_prefix: str) -> None:
    user, group = os.geteuid(), os.getegid()
    flags = _CLONE_NEWNS
    if user != 0 or _libc.unshare(flags) != 0:
        _check(_libc.unshare(flags | _CLONE_NEWUSER), "unshare")
        keep_user(user, group)
    mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    # A directory that is on every system, and not above what has to be shown.
    root = next(path for path in ("/tmp", "/mnt", "/run") if not interpreter_prefix.startswith(f"{path}/"))
    shown = filter(os.path.exists, (*SYSTEM_DIRS, *SYSTEM_FILES, *DEVICES, "/proc", interpreter_prefix))
    mount("tmpfs", root, "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,mode=0755")
    for name in ("/tmp", WORK_DIR):
        os.mkdir(root + name)
    for path in shown:
        _show(path, root + path)
    for name, target in STANDARD_LINKS.items():
        os.symlink(target, f"{root}/dev/{name}")
    attributes = _MountAttributes(attr_set=_MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NOSUID)
    size = ctypes.sizeof(attributes)
    _check(
        _libc.syscall(_SYS_MOUNT_SETATTR, -100, root.encode(), _AT_RECURSIVE, ctypes.byref(attributes), size),
        "mount_setattr",
    )
    os.chdir(root)
    # Both at one place: the old root comes to lie on top of the new one, and is taken off.
    _check(_libc.syscall(_SYS_PIVOT_ROOT[os.uname().machine], b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", _MNT_DETACH), "umount")
    os.chdir("/")


def _show(path: str, target: str) -> None:
    if os.path.islink(path) and path in SYSTEM_DIRS:
        os.symlink(os.readlink(path), target)
        return
    if os.path.exists(target):
        return  # it lies below what is shown already
    if os.path.isdir(path):
        os.makedirs(target)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    # With what is mounted below it: the kernel lets nobody look under mounts that are not theirs.
    mount(path, target, None, BIND | _MS_REC)


def mount(source: str | None, target: str, kind: str | None, flags: int, options: str = "") -> None:
    texts = (None if text is None else text.encode() for text in (source, target, kind))
    _check(_libc.mount(*texts, ctypes.c_ulong(flags), options.encode()), f"mounting {target}")


def _check(result: int, what: str) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")
