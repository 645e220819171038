"""The leash of untrusted programs: ``python -I -S -B sandbox_launcher.py SETTINGS``, standard library only.

Three processes, since only the first process of a process namespace takes all others with it when it ends:

1. the launcher leaves the namespaces of the caller (network, processes, mounts, IPC; see namespaces(7)) and waits;
2. the namespace's first process makes the file system read-only but for a small memory disk, and waits;
3. the program runs with limits on memory, CPU time, processes, file sizes and open files.

Where namespaces are refused, as in some containers, what remains is the limits, and the caller's hunt for
descendants. ``ISOLATED`` or ``NOT_ISOLATED`` goes to the status pipe before the program starts.

``SETTINGS`` is JSON: the fields of ``sandbox.LaunchSettings``.
"""

import ctypes
import json
import os
import resource
import shutil
import signal
import sys

ISOLATED, NOT_ISOLATED = b"i", b"n"
CANNOT_START_EXIT_CODE = 126
# Beside the directory the program works in.
INTERPRETER_DIR = "python"

# include/uapi/linux/sched.h, mount.h, prctl.h
_CLONE_NEWNS, _CLONE_NEWIPC, _CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = (
    0x00020000,
    0x08000000,
    0x10000000,
    0x20000000,
    0x40000000,
)
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
_MOUNT_ATTR_RDONLY, _AT_RECURSIVE, _SYS_MOUNT_SETATTR = 1, 0x8000, 442
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 36, 38
_MAX_OPEN_FILES = 64

_libc = ctypes.CDLL(None, use_errno=True)


class _MountAttributes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("attr_set", "attr_clr", "propagation", "userns_fd")]


def main() -> int:
    settings = json.loads(sys.argv[1])
    is_isolated = _leave_namespaces()
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if os.getppid() != settings["parent_pid"]:
        return 1
    # Closed by the kernel when the launcher ends: the sign of life that a process in another namespace can see.
    alive_read, alive_write = os.pipe()
    first = os.fork()
    if first == 0:
        os.close(alive_write)
        os._exit(_be_first_process(settings, is_isolated, alive_read))
    os.close(alive_read)
    return _wait(first)


def _leave_namespaces() -> bool:
    flags = _CLONE_NEWNS | _CLONE_NEWIPC | _CLONE_NEWPID | _CLONE_NEWNET
    user, group = os.geteuid(), os.getegid()
    if user == 0 and _libc.unshare(flags) == 0:
        return True
    if _libc.unshare(flags | _CLONE_NEWUSER) != 0:
        return False
    for name, line in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(line)
    return True


def _be_first_process(settings: dict, is_isolated: bool, alive_fd: int) -> int:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.set_blocking(alive_fd, False)
    try:
        os.read(alive_fd, 1)
        return 1  # end of file: the launcher died before it could take this process along
    except BlockingIOError:
        pass
    interpreter = [settings["interpreter"]]
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": settings["work_dir"]}
    stdin_fd = os.open(settings["stdin_file"], os.O_RDONLY)
    if is_isolated:
        _close_file_system(settings, environment)
    for name in os.listdir(settings["source_dir"]):
        shutil.copy(os.path.join(settings["source_dir"], name), settings["work_dir"])
        os.chmod(os.path.join(settings["work_dir"], name), 0o644)
    _share_interpreter(settings, interpreter, environment, is_isolated)
    os.write(settings["status_fd"], ISOLATED if is_isolated else NOT_ISOLATED)
    program = os.fork()
    if program == 0:
        _become_program(settings, stdin_fd, [*interpreter, "-I", "-B", settings["main"]], environment)
    os.close(stdin_fd)
    return _wait(program)


def _close_file_system(settings: dict, environment: dict) -> None:
    """Let everything be read-only but the working directory, a memory disk that ends with the namespace."""
    _libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
    attributes = _MountAttributes(attr_set=_MOUNT_ATTR_RDONLY)
    _libc.syscall(_SYS_MOUNT_SETATTR, -100, b"/", _AT_RECURSIVE, ctypes.byref(attributes), ctypes.sizeof(attributes))
    options = f"size={settings['disk_bytes']},mode=0777".encode()
    _libc.mount(b"tmpfs", settings["work_dir"].encode(), b"tmpfs", _MS_NOSUID | _MS_NODEV, options)
    # The namespace's own processes only; a container that masks parts of /proc does not allow it.
    _libc.mount(b"proc", b"/proc", b"proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, None)


def _share_interpreter(settings: dict, interpreter: list, environment: dict, is_isolated: bool) -> None:
    """Give an unprivileged program an interpreter that only root may read where it lies."""
    if os.geteuid() != 0 or not is_isolated:
        return
    mount_point = settings["interpreter_dir"].encode()
    if _libc.mount(settings["base_prefix"].encode(), mount_point, None, _MS_BIND, None) == 0:
        relative = os.path.relpath(settings["interpreter"], settings["base_prefix"])
        interpreter[0] = os.path.join(settings["interpreter_dir"], relative)
        environment["LD_LIBRARY_PATH"] = os.path.join(settings["interpreter_dir"], "lib")


def _become_program(settings: dict, stdin_fd: int, command: list, environment: dict) -> None:
    try:
        os.setsid()
        os.dup2(stdin_fd, 0)
        # Descriptors of Python are closed on exec; these two were handed over on purpose.
        os.set_inheritable(settings["status_fd"], False)
        os.set_inheritable(stdin_fd, False)
        os.chdir(settings["work_dir"])
        _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        if os.geteuid() == 0:
            _drop_privileges(settings["user_id"])
        num_seconds = settings["cpu_s"]
        for limit, value in (
            (resource.RLIMIT_AS, settings["memory_bytes"]),
            (resource.RLIMIT_CPU, num_seconds),
            (resource.RLIMIT_FSIZE, settings["disk_bytes"]),
            (resource.RLIMIT_NOFILE, _MAX_OPEN_FILES),
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_NPROC, settings["num_processes"]),
        ):
            resource.setrlimit(limit, (value, value))
        os.execve(command[0], command, environment)
    except OSError as error:
        os.write(2, f"the sandbox cannot start the program: {error}".encode())
    finally:
        os._exit(CANNOT_START_EXIT_CODE)


def _drop_privileges(user_id: int) -> None:
    """Become a user that nobody else is: the kernel limits the number of processes per user, and root's never."""
    os.setgroups([])
    for user in (user_id, 65534):
        try:
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
            return
        except OSError:  # a container that maps fewer users
            continue
    raise PermissionError("no unprivileged user to run the program as")


def _wait(pid: int) -> int:
    """Reap until ``pid`` ends, orphans of others included, and return its exit code as a shell would."""
    while True:
        ended, status = os.waitpid(-1, 0)
        if ended == pid:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
