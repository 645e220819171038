"""What processes hold: the number that is cheap to have is never below the one that counts."""

import subprocess
import sys

import pytest

from mindrlhf.sandbox.limits import watch

MIB = 1 << 20
HOLDS = {
    "nothing": "",
    "private": "held = bytearray(40 << 20)",
    "shared, touched": "held = mmap.mmap(-1, 40 << 20); held[:] = bytes(40 << 20)",
    # Its pages stay, though one of them is mapped.
    "shared, a window": (
        "fd = os.memfd_create('held'); os.ftruncate(fd, 40 << 20)\n"
        "for start in range(0, 40 << 20, 4 << 20):\n"
        "    with mmap.mmap(fd, 4 << 20, offset=start) as part: part[:] = bytes(4 << 20)\n"
        "held = mmap.mmap(fd, 4096, offset=(40 << 20) - 4096)"
    ),
    "shared, to be run": "held = mmap.mmap(-1, 40 << 20, prot=mmap.PROT_READ | mmap.PROT_EXEC)",
}


@pytest.fixture(params=HOLDS)
def holding(request):
    program = f"import mmap, os, sys\n{HOLDS[request.param]}\nprint(flush=True); sys.stdin.read()"
    process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process.stdout.readline()
    yield request.param, process.pid
    process.stdin.close()
    process.wait()


def test_what_processes_hold_at_most_is_no_less_than_what_they_hold(holding):
    kind, pid = holding
    held = watch.memory_bytes([pid])
    assert (held > 40 * MIB) == (kind != "nothing")
    assert watch.most_bytes([pid]) >= held
    for limit in (0, held - MIB, held + MIB, watch.most_bytes([pid]) + 8 * MIB):
        assert watch.hold_more([pid], limit) == (held > limit)


def test_pages_are_counted_where_they_may_be_too_many_only(monkeypatch, holding):
    _, pid = holding
    monkeypatch.setattr(watch, "memory_bytes", lambda pids: 1 << 50)
    assert not watch.hold_more([pid], 512 * MIB)
    assert watch.hold_more([pid], MIB)


def test_a_process_that_is_gone_holds_nothing():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert watch.most_bytes([process.pid]) == 0 and not watch.hold_more([process.pid], 0)
