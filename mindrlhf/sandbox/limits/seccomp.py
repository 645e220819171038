"""A seccomp filter for untrusted programs: which system calls they may not make. Standard library only.

seccomp(2) runs a program of classic BPF on every system call. This one lets through what a Python program needs and
refuses whole classes: memory that no limit counts (memfd, SysV and POSIX queues, asynchronous I/O, io_uring), new
namespaces and mounts, looking into other processes, kernel settings, and sockets to anything outside.
"""

import ctypes
import errno
import os
import struct

# linux/audit.h; x86-64 has a second numbering, x32, from this bit on.
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32_BIT = 0x40000000
# What the kernel adds later is not known here: refused as if it were not there, which libraries cope with.
_LAST_KNOWN_CALL = 450
_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2

# name: number on x86-64, number on aarch64 (asm/unistd_64.h and asm-generic/unistd.h); None: not there.
_REFUSED: dict[str, tuple[int | None, int | None]] = {
    # Memory that the limit on address space does not count, or that outlives its process.
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "userfaultfd": (323, 282), "remap_file_pages": (216, 234),
    "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "shmdt": (67, 197),
    "semget": (64, 190), "semop": (65, 193), "semctl": (66, 191), "semtimedop": (220, 192),
    "msgget": (68, 186), "msgsnd": (69, 189), "msgrcv": (70, 188), "msgctl": (71, 187),
    "mq_open": (240, 180), "mq_unlink": (241, 181), "mq_timedsend": (242, 182), "mq_timedreceive": (243, 183),
    "mq_notify": (244, 184), "mq_getsetattr": (245, 185), "mlockall": (151, 230),
    "vmsplice": (278, 75), "splice": (275, 76), "tee": (276, 77),
    "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7),
    "inotify_init": (253, None), "inotify_init1": (294, 26), "inotify_add_watch": (254, 27),
    "fanotify_init": (300, 262), "fanotify_mark": (301, 263),
    "mbind": (237, 235), "set_mempolicy": (238, 237), "set_mempolicy_home_node": (450, 450),
    "migrate_pages": (256, 238), "move_pages": (279, 239),
    # System calls made by the kernel on the program's behalf, past this filter.
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "io_setup": (206, 0), "io_destroy": (207, 1), "io_submit": (209, 2), "io_cancel": (210, 3),
    "io_getevents": (208, 4), "io_pgetevents": (333, 292),
    # Namespaces and mounts.
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "move_mount": (429, 429), "open_tree": (428, 428), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    # Other processes.
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "process_madvise": (440, 440), "process_mrelease": (448, 448), "pidfd_getfd": (438, 438),
    "perf_event_open": (298, 241),
    # The kernel itself.
    "bpf": (321, 280), "seccomp": (317, 277), "kexec_load": (246, 104), "kexec_file_load": (320, 294),
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106), "create_module": (174, None),
    "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225), "acct": (163, 89), "syslog": (103, 116),
    "quotactl": (179, 60), "quotactl_fd": (443, 443), "nfsservctl": (180, 42), "lookup_dcookie": (212, 18),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "clock_adjtime": (305, 266), "adjtimex": (159, 171),
    "sethostname": (170, 161), "setdomainname": (171, 162), "iopl": (172, None), "ioperm": (173, None),
    "modify_ldt": (154, None), "uselib": (134, None), "ustat": (136, None), "sysfs": (139, None),
    "_sysctl": (156, None), "vhangup": (153, 58), "personality": (135, 92),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
}  # fmt: skip
# Ways to reach processes of the same user, where no process namespace hides them.
_REFUSED_WITHOUT_PROCESS_NAMESPACE: dict[str, tuple[int | None, int | None]] = {
    "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424), "setpriority": (141, 140), "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118), "sched_setattr": (314, 274), "sched_setaffinity": (203, 122), "ioprio_set": (251, 30),
}  # fmt: skip
_CLONE, _CLONE3, _KILL, _SETSOCKOPT = (56, 220), (435, 435), (62, 129), (54, 208)
_SOCKET, _SOCKETPAIR, _PRCTL, _PRLIMIT = (41, 198), (53, 199), (157, 167), (302, 261)
# CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
_CLONE_NEW_FLAGS = 0x7E020000
_UNIX_FAMILY, _AF_INET, _AF_INET6 = 1, 2, 10
_SOCK_STREAM, _SOCK_DGRAM, _SOCK_TYPE_MASK = 1, 2, 0xF
# What fills the buffers of sockets is the kernel's memory, of no process: SO_SNDBUF, SO_RCVBUF, and both by force.
_SOL_SOCKET, _BUFFER_SIZES = 1, (7, 8, 32, 33)
# PR_SET_DUMPABLE (hides a process from the watcher), PR_SET_SECCOMP, PR_SET_MM, PR_SET_PTRACER
_REFUSED_PRCTLS = (4, 22, 35, 0x59616D61)

# linux/bpf_common.h: load a word, jump if equal, greater, any bit set; mask; return.
_LOAD, _JUMP_EQUAL, _JUMP_GREATER, _JUMP_BITS, _AND, _RETURN = 0x20, 0x15, 0x25, 0x45, 0x54, 0x06
# linux/seccomp.h: actions, and where the number, the architecture and the arguments lie.
_KILL_PROCESS, _ALLOW, _FAIL_WITH = 0x80000000, 0x7FFF0000, 0x00050000
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p)]


def is_available() -> bool:
    """Return True if there is a filter for this processor, and the kernel takes filters."""
    return os.uname().machine in _ARCHITECTURES and os.path.exists("/proc/sys/kernel/seccomp/actions_avail")


def build(has_network_namespace: bool, shields_other_processes: bool) -> bytes:
    """Return the filter, 8 bytes an instruction.

    Args:
        has_network_namespace: Internet sockets reach nothing, so they may be made.
        shields_other_processes: no process namespace and no user of its own keeps the program from other processes.
    """
    machine = os.uname().machine
    column = list(_ARCHITECTURES).index(machine)
    code = [_instruction(_LOAD, _ARCHITECTURE_AT), *_unless_equal(_ARCHITECTURES[machine], _KILL_PROCESS)]
    code.append(_instruction(_LOAD, _NUMBER_AT))
    if machine == "x86_64":
        code += [_instruction(_JUMP_GREATER, _X32_BIT - 1, 0, 1), _fail(errno.ENOSYS)]
    code += [_instruction(_JUMP_GREATER, _LAST_KNOWN_CALL, 0, 1), _fail(errno.ENOSYS)]
    refused = _REFUSED | (_REFUSED_WITHOUT_PROCESS_NAMESPACE if shields_other_processes else {})
    for numbers in refused.values():
        if numbers[column] is not None:
            code += [_instruction(_JUMP_EQUAL, numbers[column], 0, 1), _fail(errno.EPERM)]
    # The C library takes clone where clone3 is missing; the flags of clone3 lie in memory, out of a filter's sight.
    code += [_instruction(_JUMP_EQUAL, _CLONE3[column], 0, 1), _fail(errno.ENOSYS)]
    rules = {
        _CLONE[column]: [_argument(0), _instruction(_JUMP_BITS, _CLONE_NEW_FLAGS, 0, 1), _fail(errno.EPERM)],
        _PRLIMIT[column]: [_argument(0), *_unless_equal(0, _FAIL_WITH | errno.EPERM)],
        _PRCTL[column]: [_argument(0), *(line for option in _REFUSED_PRCTLS for line in _if_equal(option))],
        _SETSOCKOPT[column]: [
            _argument(1),
            *_unless_equal(_SOL_SOCKET, _ALLOW),
            _argument(2),
            *(line for option in _BUFFER_SIZES for line in _if_equal(option)),
        ],
        _SOCKET[column]: _socket_rule(has_network_namespace),
        # A connected pair of byte streams; a pair of datagram sockets could still send to any path.
        _SOCKETPAIR[column]: [
            _argument(0),
            *_unless_equal(_UNIX_FAMILY, _FAIL_WITH | errno.EACCES),
            _argument(1),
            _instruction(_AND, _SOCK_TYPE_MASK),
            *_unless_equal(_SOCK_STREAM, _FAIL_WITH | errno.EACCES),
        ],
    }
    if shields_other_processes:
        rules[_KILL[column]] = [_argument(0), *_unless_equal(0, _FAIL_WITH | errno.EPERM)]
    for number, rule in rules.items():
        code += [_instruction(_JUMP_EQUAL, number, 0, len(rule) + 1), *rule, _instruction(_RETURN, _ALLOW)]
    code.append(_instruction(_RETURN, _ALLOW))
    return b"".join(code)


def install(filter_code: bytes) -> None:
    """Put this process, and all it will start, under a filter, for good. Needs PR_SET_NO_NEW_PRIVS.

    Raises:
        OSError: the kernel refuses.
    """
    buffer = ctypes.create_string_buffer(filter_code, len(filter_code))
    program = _Program(len(filter_code) // 8, ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "the kernel refuses the seccomp filter")


def _socket_rule(has_network_namespace: bool) -> list[bytes]:
    if not has_network_namespace:
        return [_fail(errno.EACCES)]
    refuse = _FAIL_WITH | errno.EACCES
    # The first jump of each skips the check for the other value: two instructions.
    is_internet = [_instruction(_JUMP_EQUAL, _AF_INET, 2, 0), *_unless_equal(_AF_INET6, refuse)]
    is_plain = [_instruction(_JUMP_EQUAL, _SOCK_STREAM, 2, 0), *_unless_equal(_SOCK_DGRAM, refuse)]
    return [_argument(0), *is_internet, _argument(1), _instruction(_AND, _SOCK_TYPE_MASK), *is_plain]


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)


def _argument(index: int) -> bytes:
    """Load the lower half of an argument; both processors are little-endian."""
    return _instruction(_LOAD, _ARGUMENTS_AT + 8 * index)


def _fail(number: int) -> bytes:
    return _instruction(_RETURN, _FAIL_WITH | number)


def _if_equal(value: int) -> list[bytes]:
    return [_instruction(_JUMP_EQUAL, value, 0, 1), _fail(errno.EPERM)]


def _unless_equal(value: int, action: int) -> list[bytes]:
    return [_instruction(_JUMP_EQUAL, value, 1, 0), _instruction(_RETURN, action)]
