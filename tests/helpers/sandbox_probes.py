# ruff: noqa: E501 -- probes are told apart more easily one a line
"""Attempts to get out of the sandbox, and the driver that makes them: ``python sandbox_probes.py < JSON``.

Each attempt holds if it raises an exception (or is killed), and is a breach if it comes to its end. Targets (sockets,
files, a process) are made by the driver, outside, as the user who runs it.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading

# Runs every probe in a child of its own, inside the sandbox, and prints what became of it.
INSIDE = """
import ctypes, errno, json, mmap, os, signal, socket, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    result = libc.syscall(number, *(ctypes.c_long(a) if isinstance(a, int) else a for a in arguments))
    if result == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
def check(is_breach):
    if not is_breach: raise PermissionError('nothing to be had')
T = json.load(open('targets.json'))
for name, code in json.load(open('probes.json')).items():
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        try:
            exec(code, dict(globals()))
        except BaseException as error:
            print('held', type(error).__name__, getattr(error, 'errno', ''), name, sep='\\t')
            sys.stdout.flush()
            os._exit(0)
        print('breach', '', '', name, sep='\\t')
        sys.stdout.flush()
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        print('held', 'killed', '', name, sep='\\t')
"""

CONNECT = "s = socket.socket(socket.{family}, socket.{kind})\ns.settimeout(2)\ns.connect({address})"
PROBES = {
    # Sockets to what is outside.
    "Unix stream socket on disk": CONNECT.format(family="AF_UNIX", kind="SOCK_STREAM", address="T['stream']"),
    "Unix datagram socket on disk": CONNECT.format(family="AF_UNIX", kind="SOCK_DGRAM", address="T['datagram']"),
    "Unix packet socket": CONNECT.format(family="AF_UNIX", kind="SOCK_SEQPACKET", address="T['stream']"),
    "abstract Unix socket": CONNECT.format(family="AF_UNIX", kind="SOCK_STREAM", address="'\\0' + T['abstract']"),
    "any Unix socket": "socket.socket(socket.AF_UNIX)",
    "Unix socket to listen on": "s = socket.socket(socket.AF_UNIX)\ns.bind('x')\ns.listen()",
    "datagram pair sent elsewhere": "a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)\na.sendto(b'x', T['datagram'])",
    "packet pair": "socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)",
    "stream pair connected elsewhere": "a, b = socket.socketpair()\nb.close()\na.connect(T['stream'])",
    "stream pair sent elsewhere": "a, b = socket.socketpair()\nb.close()\na.sendto(b'x', T['datagram'])",
    "TCP to this machine": CONNECT.format(family="AF_INET", kind="SOCK_STREAM", address="('127.0.0.1', T['port'])"),
    "TCP to the world": CONNECT.format(family="AF_INET", kind="SOCK_STREAM", address="('192.0.2.1', 80)"),
    "TCP over IPv6": CONNECT.format(family="AF_INET6", kind="SOCK_STREAM", address="('::1', T['port'])"),
    "UDP to this machine": "s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\ns.sendto(b'x', ('127.0.0.1', T['port']))",
    "UDP to the world": "s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\ns.sendto(b'x', ('192.0.2.1', 53))",
    "names": "socket.getaddrinfo('localhost.example', 80)",
    "raw socket": "socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)",
    "ping socket": "s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM, 1)\ns.sendto(b'x' * 8, ('127.0.0.1', 0))",
    "packets of the network card": "socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 3)",
    "VSOCK": "socket.socket(40, socket.SOCK_STREAM)",
    "VSOCK datagrams": "socket.socket(40, socket.SOCK_DGRAM)",
    "VSOCK pair": "socket.socketpair(40, socket.SOCK_STREAM)",
    "netlink": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)",
    "kernel cryptography": "socket.socket(38, socket.SOCK_SEQPACKET)",
    "TIPC": "socket.socket(30, socket.SOCK_STREAM)",
    "Bluetooth": "socket.socket(31, socket.SOCK_STREAM, 3)",
    "CAN": "socket.socket(29, socket.SOCK_RAW, 1)",
    "KCM": "socket.socket(41, socket.SOCK_DGRAM)",
    "XDP": "socket.socket(44, socket.SOCK_RAW)",
    "SMC": "socket.socket(43, socket.SOCK_STREAM)",
    "SCTP": "socket.socket(socket.AF_INET, socket.SOCK_SEQPACKET, 132)",
    "all other families": "for family in set(range(3, 46)) - {10}:\n    try: socket.socket(family, socket.SOCK_STREAM)\n"
    "    except OSError: continue\n    break\nelse: check(False)",
    "flags on the family": "call(41 if os.uname().machine == 'x86_64' else 198, 1, 1 | 0o2000000, 0)",
    "32-bit numbers of calls": "check(os.uname().machine == 'x86_64' and call(0x40000000 + 41, 1, 1, 0))\ncheck(False)",
    # Files.
    "a secret of the caller's": "open(T['secret']).read()",
    "the caller's directory": "os.listdir(os.path.dirname(T['secret']))",
    "the caller's home": "check(os.listdir(T['home']))",
    "temporary files": "open('/tmp/x', 'w')",
    "other temporary files": "open('/var/tmp/x', 'w')",
    "shared memory files": "open('/dev/shm/x', 'w')",
    "root directory": "open('/x', 'w')",
    "system directory": "open('/usr/x', 'w')",
    "own interpreter": "open(sys.executable, 'r+b')",
    "own library": "open(os.__file__, 'a')",
    "user list": "open('/etc/passwd', 'a')",
    "passwords": "open('/etc/shadow').read()",
    "disks": "check([n for n in os.listdir('/dev') if n.startswith(('vd', 'sd', 'nvme', 'loop'))])",
    "disk node": "os.mknod('d', 0o60666, os.makedev(254, 0))\nopen('d', 'rb').read(1)",
    "memory node": "os.mknod('m', 0o20666, os.makedev(1, 1))\nopen('m', 'rb').read(1)",
    "KVM": "open('/dev/kvm', 'rb')",
    "fuse": "open('/dev/fuse', 'rb')",
    "terminals": "open('/dev/tty', 'rb')",
    "kernel files": "check(os.listdir('/sys'))",
    "cgroups": "check(os.listdir('/sys/fs/cgroup'))",
    "kernel settings": "open('/proc/sys/kernel/core_pattern', 'wb', 0).write(b'x')",
    "own user map": "open('/proc/self/uid_map', 'wb', 0).write(b'0 0 1')",
    "system request": "open('/proc/sysrq-trigger', 'wb', 0).write(b'h')",
    "out-of-memory score": "open('/proc/self/oom_score_adj', 'wb', 0).write(b'-1000')",
    "old root by link": "open('/proc/1/root' + T['secret']).read()",
    "old root by descriptor": "for n in os.listdir('/proc/1/fd'): check(os.readlink('/proc/1/fd/' + n).startswith('/'))\ncheck(False)",
    "old root upwards": "os.chdir('../../../../../..')\nopen('.' + T['secret']).read()",
    "set-user-id program": "check(os.stat('/proc/self/fd/0') and [p for p in ('/usr/bin/su', '/bin/su') if os.path.exists(p)"
    " and __import__('subprocess').run([p, '-c', 'id'], stdin=-3, capture_output=True).stdout])",
    "own set-user-id file": "open('s', 'w').close()\nos.chown('s', 0, 0)\nos.chmod('s', 0o4755)",
    "extended attributes": "os.setxattr('.', 'user.x', b'x')",
    # Other processes.
    "the caller's processes seen": "check([p for p in os.listdir('/proc') if p.isdigit() and int(p) > 400])",
    "the caller's process by number": "os.kill(T['victim'], 0)",
    "the caller's process killed": "os.kill(T['victim'], 9)",
    "the caller's driver killed": "os.kill(T['driver'], 9)",
    "all processes killed": "check(len(os.listdir('/proc')) and T['victim'] in map(int, filter(str.isdigit, os.listdir('/proc'))))",
    "the caller's memory": "open(f\"/proc/{T['driver']}/mem\", 'rb')",
    "the caller's environment": "open(f\"/proc/{T['driver']}/environ\", 'rb').read()",
    "first process's memory": "open('/proc/1/mem', 'rb')",
    "first process's environment": "open('/proc/1/environ', 'rb').read()",
    "first process killed": "os.kill(1, 9)\ntime.sleep(.1)\ncheck(not os.path.exists('/proc/1'))",
    "priority raised": "os.nice(-5)",
    "real-time priority": "os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))",
    "file limit raised": "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))",
    "memory limit raised": "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
    "process limit raised": "import resource\nresource.setrlimit(resource.RLIMIT_NPROC, (-1, -1))",
    "limits of others": "import resource\nresource.prlimit(T['driver'], resource.RLIMIT_NOFILE, (1, 1))",
    "hiding from the watch": "check(libc.prctl(4, 0, 0, 0, 0) == 0)",
    "becoming root": "os.setuid(0)",
    "becoming another user": "os.setuid(1)",
    "groups": "os.setgroups([0])",
    "capabilities": "lines = dict(l.split(':', 1) for l in open('/proc/self/status') if l.startswith('Cap'))\n"
    "check(any(int(lines[n], 16) for n in ('CapEff', 'CapPrm', 'CapInh', 'CapBnd', 'CapAmb')) and os.getuid() == 0)",
    "ambient capabilities": "check(libc.prctl(47, 2, 21, 0, 0) == 0)",
    # Namespaces and mounts.
    **{
        f"new {name} namespace": f"check(libc.unshare({flag}) == 0)"
        for name, flag in (("user", 0x10000000), ("mount", 0x20000), ("network", 0x40000000), ("process", 0x20000000),
                           ("IPC", 0x08000000), ("UTS", 0x04000000), ("cgroup", 0x02000000), ("user and mount", 0x10020000))
    },
    "clone into a user namespace": "check(libc.syscall(56 if os.uname().machine == 'x86_64' else 220, 0x10000011, 0, 0, 0, 0) > 0)",
    "clone3": "b = ctypes.create_string_buffer(88)\nb[4:8] = b'\\x10\\0\\0\\0'[::-1]\ncall(435, ctypes.byref(b), ctypes.c_long(88))",
    "joining a namespace": "fd = os.open('/proc/self/ns/net', 0)\ncheck(libc.setns(fd, 0) == 0)",
    "memory disk": "check(libc.mount(b'none', b'/sandbox', b'tmpfs', 0, None) == 0)",
    "bind mount": "check(libc.mount(b'/usr', b'/sandbox', None, 4096, None) == 0)",
    "remount to write": "check(libc.mount(None, b'/', None, 32 | 4096, None) == 0)",
    "unmounting the work directory": "check(libc.umount2(b'/sandbox', 2) == 0)",
    "unmounting /proc": "check(libc.umount2(b'/proc', 2) == 0)",
    "changing the root": "os.chroot('.')",
    # Memory that limits do not count.
    "memory file": "os.memfd_create('x')",
    "memory file with huge pages": "os.memfd_create('x', 4)",
    "SysV shared memory": "check(libc.shmget(0, 1 << 20, 0o1666) != -1)",
    "SysV messages": "check(libc.msgget(0, 0o1666) != -1)",
    "SysV semaphores": "check(libc.semget(0, 1, 0o1666) != -1)",
    "POSIX messages": "call(240 if os.uname().machine == 'x86_64' else 180, b'/x', 0o102, 0o666, None)",
    "io_uring": "b = ctypes.create_string_buffer(120)\ncall(425, 8, ctypes.byref(b))",
    "locked memory": "m = mmap.mmap(-1, 1 << 20)\ncheck(libc.mlock(ctypes.addressof(ctypes.c_char.from_buffer(m)), 1 << 20) == 0)",
    "all memory locked": "check(libc.mlockall(3) == 0)",
    "address space": "mmap.mmap(-1, 4 << 30)",
    "inotify": "check(libc.inotify_init() != -1)",
    "descriptors without end": "f = [open('/dev/null') for _ in range(5000)]",
    "a file beyond the limit": "os.truncate(os.open('big', 66, 0o600), 1 << 30)",
    "pending signals": "for i in range(5000): check(libc.sigqueue(os.getpid(), 0, 0) == 0) or None\n",
    # Looking into the kernel.
    "kernel log": "check(libc.klogctl(3, ctypes.create_string_buffer(99), 99) >= 0)",
    "kernel addresses": "check([l for l in open('/proc/kallsyms') if not l.startswith('0000000000000000')])",
    "kernel memory": "open('/proc/kcore', 'rb').read(1)",
    "tracing oneself": "check(libc.ptrace(0, 0, 0, 0) == 0)",
    "tracing the parent": "check(libc.ptrace(16, os.getppid(), 0, 0) == 0)",
    "another personality": "check(libc.personality(0x40000) != -1)",
    "host name": "socket.sethostname('x')",
    "clock": "time.clock_settime(time.CLOCK_REALTIME, 0)",
    "another filter": "check(libc.prctl(22, 1, 0, 0, 0) == 0)",
}  # fmt: skip
del PROBES["pending signals"]

# Each in a sandbox of its own of 160 MiB: whatever they hold, a limit ends them, or they are refused more.
HUNGRY = {
    "private memory of many processes": "import os, time\nfor _ in range(10):\n    if os.fork() == 0:\n"
    "        x = bytearray(40 << 20)\n        time.sleep(60)\ntime.sleep(60)",
    "shared memory of many processes": "import os, mmap, time\nfor _ in range(10):\n    if os.fork() == 0:\n"
    "        m = mmap.mmap(-1, 40 << 20)\n        m.write(b'x' * len(m))\n        time.sleep(60)\ntime.sleep(60)",
    "shared memory that is not mapped in": "import os, mmap, time\nfor _ in range(10):\n    if os.fork() == 0:\n"
    "        m = mmap.mmap(-1, 40 << 20)\n        for i in range(0, len(m), 4096): m[i] = 1\n"
    "        m.madvise(mmap.MADV_DONTNEED)\n        time.sleep(60)\ntime.sleep(60)",
    "orphans": "import os, time\nfor _ in range(10):\n    if os.fork() == 0:\n        if os.fork() == 0:\n            os.setsid()\n"
    "            x = bytearray(40 << 20)\n            time.sleep(60)\n        os._exit(0)\n"
    "    os.wait()\ntime.sleep(60)",  # what is not waited for counts as a process, and 16 are allowed
    "memory and files together": "import os, time\nopen('f', 'wb').write(b'x' * (15 << 20))\nfor _ in range(10):\n"
    "    if os.fork() == 0:\n        x = bytearray(35 << 20)\n        time.sleep(60)\ntime.sleep(60)",
    "one process": "x = bytearray(1 << 30)",
    "growing": "x = []\nwhile True: x.append(bytearray(1 << 20))",
    "threads": "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
    "files": "i = 0\nwhile True:\n    open(f'f{i}', 'wb').write(b'x' * (1 << 20))\n    i += 1",
    "empty files": "i = 0\nwhile True:\n    open(f'f{i}', 'w').close()\n    i += 1",
    "directories": "import os\ni = 0\nwhile True:\n    os.mkdir(f'd{i}')\n    i += 1",
    "deep directories": "import os\nwhile True:\n    os.mkdir('d')\n    os.chdir('d')",
    "links": "import os\nopen('f', 'w').close()\ni = 0\nwhile True:\n    os.link('f', f'l{i}')\n    i += 1",
    "symbolic links": "import os\ni = 0\nwhile True:\n    os.symlink('x' * 4000, f'l{i}')\n    i += 1",
    "pipes": "import os, fcntl\np = []\nwhile True:\n    r, w = os.pipe()\n    os.set_blocking(w, False)\n    p.append(w)\n"
    "    os.write(w, b'x' * 65536)",
    **{
        f"buffers of sockets, {name}": "import socket\nn, pairs = 0, []\nwhile n < 160 << 20:\n"
        f"    pairs.append(socket.socketpair())\n    for one in pairs[-1]:\n        {line}\n"
        "        one.setblocking(False)\n        try:\n            while True: n += one.send(b'x' * (1 << 20))\n"
        "        except BlockingIOError: pass"
        for name, line in {
            "as they come": "pass",
            "made larger": "one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 26)",
            "made larger on both sides": "one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 26)",
        }.items()
    },
    "deleted files": "import os\nf = []\nwhile True:\n    f.append(open('f', 'wb'))\n    f[-1].write(b'x' * (1 << 20))\n    os.unlink('f')",
}  # fmt: skip


def main() -> None:
    from mindrlhf.sandbox import server
    from mindrlhf.sandbox.run import SandboxLimits, run_files, run_python

    request = json.load(sys.stdin)
    if request["without"]:
        server._server = server.LauncherServer(request["without"])
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        targets = make_targets(directory)
        files = {"main.py": INSIDE, "targets.json": json.dumps(targets), "probes.json": json.dumps(request["probes"])}
        limits = SandboxLimits(time_s=120, memory_bytes=512 << 20)
        run = run_files(files, "main.py", limits=limits)
        hungry = {}
        for name, source in request["hungry"].items():
            hungry[name] = run_python(source, limits=SandboxLimits(time_s=20, memory_bytes=160 << 20)).ending
        is_victim_alive = os.path.exists(f"/proc/{targets['victim']}/stat")
        os.kill(targets["victim"], 9)
    layers = sorted(server.shared_server().layers)
    print(json.dumps({"out": run.stdout, "err": run.stderr, "hungry": hungry, "victim": is_victim_alive, "layers": layers}))


def make_targets(directory: str) -> dict:
    """Make what the probes try to reach: sockets that anybody may connect to, a file that anybody may read."""
    paths = {name: os.path.join(directory, name) for name in ("stream", "datagram", "secret")}
    stream, abstract = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    stream.bind(paths["stream"])
    abstract.bind(f"\0mindrlhf-probe-{os.getpid()}")
    datagram = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    datagram.bind(paths["datagram"])
    tcp = socket.create_server(("127.0.0.1", 0))
    with open(paths["secret"], "w", encoding="utf-8") as file:
        file.write("secret")
    for path in paths.values():
        os.chmod(path, 0o777)
    for listener in (stream, abstract, tcp):
        listener.listen()
        threading.Thread(target=_accept, args=(listener,), daemon=True).start()
    victim = subprocess.Popen(["sleep", "300"])
    return paths | {
        "abstract": f"mindrlhf-probe-{os.getpid()}",
        "port": tcp.getsockname()[1],
        "victim": victim.pid,
        "driver": os.getpid(),
        "home": os.path.dirname(directory),
    }


def _accept(listener: socket.socket) -> None:
    while True:
        listener.accept()


if __name__ == "__main__":
    main()
