"""The launcher of untrusted programs: ``python -I -B launcher.py SETTINGS``, standard library only.

One launcher waits, warm, for each process that runs programs. For every program it forks, so that no interpreter has to
start, and there are then three processes more:

1. the watch leaves the namespaces of the launcher and waits, so that the end of all the others is seen;
2. the namespace's first process reads the request, mounts what the program may write to, counts what it holds, and
   kills it at a limit: with it ends the namespace and all that is in it;
3. the program runs without rights, under limits, a Landlock ruleset and a seccomp filter (``limits/``).

A program gets a copy of all memory of the processes it was forked from, freed parts too. So the launcher and the watch
never read a request: they pass on descriptors, and the only process that reads it has no descendants but that program's
(``tests/sandbox/test_launcher_memory.py`` looks). What a system refuses is left out and told in the first line on the
control socket: ``{"layers": [...]}``.

``SETTINGS`` is JSON: ``control_fd`` and ``without``, layers not to use. The control socket brings one byte at a time,
with descriptors:

- ``p``, a program: its channel, standard input, output, error and, if it has one, its link to a judge. The channel
  brings the request, one line of JSON with the fields of ``run.LaunchRequest``, and takes the answers: the watch's
  process id, then how the program ended.
- ``m``, a main file of this package, to be compiled once for all programs whose request names its number. It is the
  same every time and holds nothing of any request.
"""

import atexit
import contextlib
import dataclasses
import gc
import json
import os
import random
import resource
import signal
import socket
import sys
import tempfile
import threading
import types

_HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.join(_HERE, "limits"), os.path.join(os.path.dirname(_HERE), "system")]
import landlock  # noqa: E402
import namespaces  # noqa: E402
import processes  # noqa: E402
import seccomp  # noqa: E402
import watch  # noqa: E402

del sys.path[:2]

CANNOT_START_EXIT_CODE = 126
_NO_REQUEST_EXIT_CODE = 125
LINK_FD = 3
# Imported once, here, instead of in every program.
WARM_MODULES = (
    "abc array ast bisect cmath collections contextlib copy dataclasses datetime decimal enum fractions functools "
    "heapq inspect io itertools math numbers operator queue random re statistics string struct textwrap threading "
    "traceback typing"
)
_MAX_OPEN_FILES, _MAX_PENDING_SIGNALS, _LOCKED_BYTES = 64, 256, 64 << 10
_NOBODY = 65534  # where a container maps fewer users

_main_files: list[types.CodeType] = []


# What a program's process goes on with: the compiled main file, if it is ours, and the namespace to run it in.
Started = tuple[types.CodeType | None, dict]


@dataclasses.dataclass
class Launch:
    """One program to start."""

    channel: socket.socket
    descriptors: list[int]  # 0, 1, 2 of the program, and its link
    layers: set[str]
    seccomp_filter: bytes  # where there is one
    work_dir: str = namespaces.WORK_DIR
    request: dict = dataclasses.field(default_factory=dict)  # read by the first process of the program's namespaces


def main() -> Started | None:
    """Serve until the caller hangs up. Returns only in a program's process: its code, if ours, and its namespace."""
    settings = json.loads(sys.argv[1])
    control = socket.socket(fileno=settings["control_fd"])
    control.set_inheritable(False)
    processes.adopt_orphans()
    # The low numbers are for what programs are given.
    while os.open(os.devnull, os.O_RDWR) <= LINK_FD:
        pass
    layers = _take_layers(set(settings["without"]))
    seccomp_filter = b""
    if "seccomp" in layers:
        seccomp_filter = seccomp.build("namespaces" in layers, not layers & {"namespaces", "user"})
    for name in WARM_MODULES.split():
        __import__(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the watches
    gc.collect()
    gc.freeze()
    control.sendall(json.dumps({"layers": sorted(layers)}).encode() + b"\n")
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1, 8)
        if not message:
            return None
        if message == b"m":
            with open(descriptors[0], "rb") as file:
                _main_files.append(compile(file.read(), "main.py", "exec"))
        elif os.fork() == 0:
            control.close()
            channel = socket.socket(fileno=descriptors.pop(0))
            try:
                return _be_watch(Launch(channel, descriptors, layers, seccomp_filter))
            except BaseException as error:  # of the watch or the first process: what the program raises is later
                with contextlib.suppress(OSError):
                    _tell(channel, failure=f"{type(error).__name__}: {error}")
                os._exit(1)
        else:
            for fd in descriptors:
                os.close(fd)


def _take_layers(without: set[str]) -> set[str]:
    """Leave the file system, if the system lets us, and return the names of all layers in force."""
    layers = {"limits", "watcher"}
    if landlock.version() > 0:
        layers.add("landlock")
    if seccomp.is_available():
        layers.add("seccomp")
    if os.geteuid() == 0:
        layers.add("user")
    if "namespaces" not in without and namespaces.enter(os.path.realpath(sys.base_prefix)):
        layers.add("namespaces")
    return layers - without


def _be_watch(launch: Launch) -> Started:
    """Start the first process of the program's namespaces and wait for its end, which is the end of all of them."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    processes.die_with_parent()
    processes.adopt_orphans()
    if "namespaces" in launch.layers:
        namespaces.leave_for_program()
    else:
        launch.work_dir = tempfile.mkdtemp(prefix="mindrlhf-sandbox-")
    _tell(launch.channel, pid=os.getpid(), work_dir=launch.work_dir)
    first = os.fork()
    if first == 0:
        return _be_first_process(launch)
    for fd in launch.descriptors:
        os.close(fd)
    _, status = os.waitpid(first, 0)
    if "namespaces" not in launch.layers and os.waitstatus_to_exitcode(status) == _NO_REQUEST_EXIT_CODE:
        os.rmdir(launch.work_dir)
        os._exit(0)
    while "namespaces" not in launch.layers:
        signal.pause()  # daemons may be left below this process: the caller finds them there and kills all
    os._exit(0)


def _be_first_process(launch: Launch) -> Started:
    """Read the request, prepare what the program sees, start it, and see to it that it ends."""
    processes.die_with_parent()
    processes.adopt_orphans()
    processes.hide_from_others()  # a program of the same user cannot look into this process
    launch.request = _read_request(launch.channel)
    is_isolated = "namespaces" in launch.layers
    if is_isolated:
        namespaces.mount_program_dirs(launch.request["disk_bytes"])
    elif os.geteuid() == 0 and "user" in launch.layers:
        _give_to_user(launch.work_dir, launch.request["user_id"])
    for name, text in launch.request["files"].items():
        with open(os.path.join(launch.work_dir, name), "wb") as file:
            file.write(text.encode(errors="surrogatepass"))
    program = os.fork()
    if program == 0:
        return _become_program(launch)
    for fd in launch.descriptors:
        os.close(fd)

    def limit_passed() -> str:
        if "watcher" not in launch.layers:
            return ""
        most_bytes = launch.request["memory_bytes"]
        if is_isolated:
            pids = [int(name) for name in os.listdir("/proc") if name.isdigit() and name != "1"]
            disk = os.statvfs(launch.work_dir)
            most_bytes -= (disk.f_blocks - disk.f_bfree) * disk.f_frsize
        else:
            pids = [status.pid for status in processes.descendants(os.getpid())]
            if watch.is_directory_full(launch.work_dir, launch.request["disk_bytes"]):
                return "disk limit"
        return "memory limit" if watch.hold_more(pids, most_bytes) else ""

    ending = watch.wait(program, launch.channel.fileno(), limit_passed)
    with contextlib.suppress(OSError):
        _tell(launch.channel, ending=ending)
    os._exit(0)


def _read_request(channel: socket.socket) -> dict:
    """Return the request; end this process when the caller has gone away."""
    line = b""
    with contextlib.suppress(OSError), channel.makefile("rb") as file:
        line = file.readline()
    if not line.endswith(b"\n"):
        os._exit(_NO_REQUEST_EXIT_CODE)
    return json.loads(line)


def _become_program(launch: Launch) -> Started:
    try:
        os.setsid()
        for target, fd in enumerate(launch.descriptors):
            os.dup2(fd, target)
        os.closerange(len(launch.descriptors), launch.channel.fileno())
        os.closerange(launch.channel.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
        os.chdir(launch.work_dir)
        os.environ["HOME"] = launch.work_dir
        processes.refuse_new_rights()
        if os.geteuid() == 0:
            if "user" in launch.layers:
                _drop_privileges(launch.request["user_id"])
        elif "namespaces" in launch.layers:
            namespaces.drop_capabilities()
        processes.hide_from_others(False)
        processes.die_with_parent()
        os.stat(os.__file__)  # modules are still to be imported
        _limit(launch.request)
        if "landlock" in launch.layers:
            _restrict_files(launch)
        if "seccomp" in launch.layers:
            seccomp.install(launch.seccomp_filter)
    except OSError as error:
        _tell(launch.channel, failure=f"the sandbox cannot start the program: {error}")
        os._exit(CANNOT_START_EXIT_CODE)
    launch.channel.close()
    return _prepare_interpreter(launch)


def _limit(request: dict) -> None:
    for limit, value in (
        (resource.RLIMIT_AS, request["memory_bytes"]),
        (resource.RLIMIT_CPU, request["cpu_s"]),
        (resource.RLIMIT_FSIZE, request["disk_bytes"]),
        (resource.RLIMIT_NOFILE, _MAX_OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, request["num_processes"]),
        (resource.RLIMIT_SIGPENDING, _MAX_PENDING_SIGNALS),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_MEMLOCK, _LOCKED_BYTES),
    ):
        _, most = resource.getrlimit(limit)
        value = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.setrlimit(limit, (value, value))


def _restrict_files(launch: Launch) -> None:
    if "namespaces" in launch.layers:
        landlock.restrict(["/"], [launch.work_dir, "/dev/null"], allows_network=True)
        return
    prefix = os.path.realpath(sys.base_prefix)
    readable = [*namespaces.SYSTEM_DIRS, *namespaces.SYSTEM_FILES, *namespaces.DEVICES, "/proc/self", prefix]
    landlock.restrict(readable, [launch.work_dir, "/dev/null"], allows_network=False)


def _give_to_user(path: str, user_id: int) -> None:
    """Let nobody but the program's user into a directory."""
    for user in (user_id, _NOBODY):
        with contextlib.suppress(OSError):
            os.chown(path, user, user)
            return


def _drop_privileges(user_id: int) -> None:
    """Become a user that nobody else is: the kernel limits the number of processes per user, and root's never."""
    os.setgroups([])
    for user in (user_id, _NOBODY):
        try:
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
            return
        except OSError:  # a container that maps fewer users
            continue
    raise PermissionError("no unprivileged user to run the program as")


def _prepare_interpreter(launch: Launch) -> Started:
    """Make this process look as if an interpreter had just been started on the program."""
    path = os.path.join(launch.work_dir, launch.request["main"])
    for name in ("landlock", "namespaces", "processes", "seccomp", "watch"):
        del sys.modules[name]
    random.seed()
    sys.argv = [path]
    sys.excepthook = _show_without_launcher
    encoding = {"encoding": "utf-8", "errors": "surrogateescape", "closefd": False}
    sys.stdin = sys.__stdin__ = open(0, **encoding)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", **encoding)  # noqa: SIM115
    encoding["errors"] = "backslashreplace"
    sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, **encoding)  # noqa: SIM115
    module = types.ModuleType("__main__")
    module.__file__ = path
    sys.modules["__main__"] = module
    number = launch.request["main_number"]
    return None if number is None else _main_files[number], vars(module)


def _show_without_launcher(kind: type, error: BaseException, trace: types.TracebackType | None) -> None:
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    sys.__excepthook__(kind, error.with_traceback(trace), trace)


def _run(code: types.CodeType | None, namespace: dict) -> None:
    """Run a program and end this process as an interpreter ends, but for one thing.

    An interpreter takes all its objects apart in the end; here it would take apart, and so copy, those that all
    programs share, which takes longer than most programs run. Only the program's own are.
    """
    exit_code = 0
    try:
        if code is None:
            with open(namespace["__file__"], "rb") as file:
                code = compile(file.read(), file.name, "exec", dont_inherit=True)
        exec(code, namespace)
    except SystemExit as error:
        exit_code = _exit_code(error.code)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        exit_code = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    for end in (threading._shutdown, atexit._run_exitfuncs):
        try:
            end()
        except BaseException as error:
            sys.excepthook(type(error), error, error.__traceback__)
    exit_code = _flush(exit_code)
    if threading.active_count() == 1:
        # Files that the program has left open are written out when they go.
        del code
        namespace.clear()
        gc.collect()
        exit_code = _flush(exit_code)
    os._exit(exit_code)


def _exit_code(code: object) -> int:
    if code is None or isinstance(code, int):
        return (code or 0) & 0xFF
    print(code, file=sys.stderr)
    return 1


def _flush(exit_code: int) -> int:
    """Write out the standard streams; return the exit code, or that of an interpreter that cannot write."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name, None)
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except BaseException as error:
            if name == "stdout":
                exit_code = 120
                with contextlib.suppress(OSError, ValueError):
                    os.write(2, f"standard output cannot be written: {error}\n".encode())
    return exit_code


def _tell(channel: socket.socket, **fields: object) -> None:
    channel.sendall(json.dumps(fields).encode() + b"\n")


if __name__ == "__main__":
    started = main()
    if started is not None:
        _run(*started)
