"""Who waits for whom while the ranks look for each other."""

import signal
import time

import pytest

from mindrlhf.launch.joining import JoiningWatch, Meeting, Rouser, may_be_a_foreign_connections_doing
from mindrlhf.launch.processes import SCHEDULER
from mindrlhf.system import processes
from mindrlhf.system.heartbeat import JOINED, JOINING, ROUSE_SIGNAL, STARTING


@pytest.mark.parametrize(
    "activities, looking, absent",
    [
        ({}, (), ("rank 0", "rank 1")),
        ({"rank 0": STARTING, "rank 1": JOINING}, ("rank 1",), ("rank 0",)),
        ({"rank 0": JOINING, "rank 1": JOINING}, ("rank 0", "rank 1"), ()),
        ({"rank 0": JOINED, "rank 1": JOINING}, ("rank 1",), ()),
        ({"rank 0": "step 1: rollout", "rank 1": "waiting for rank 0"}, (), ()),
    ],
)
def test_ranks_that_look_and_ranks_that_are_not_there(activities, looking, absent):
    meeting = JoiningWatch(2, 10).look(activities)
    assert (meeting.looking, meeting.absent, meeting.is_over) == (looking, absent, not looking and not absent)
    assert meeting.is_stuck_at_scheduler == (bool(looking) and not absent)


def test_who_waits_for_whom():
    said = "has not begun to join: rank 0 and rank 2 wait for rank 1"
    assert Meeting(("rank 0", "rank 2"), ("rank 1",)).describe(7) == ("rank 1", said)
    said = "has not begun to join: nobody waits for rank 0 and rank 1"
    assert Meeting((), ("rank 0", "rank 1")).describe(7) == ("rank 0", said)
    said = "has not brought the ranks together: rank 1 waits for it at 127.0.0.1:7"
    assert Meeting(("rank 1",), ()).describe(7) == (SCHEDULER, said)


def test_the_limit_counts_until_all_have_met(monkeypatch):
    now_s = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    watches = {
        "late": JoiningWatch(2, 10),
        "met": JoiningWatch(2, 10),
        "alone": JoiningWatch(1, 10),
        "free": JoiningWatch(2, 0),
    }
    watches["met"].look({"rank 0": JOINED, "rank 1": JOINED})
    late_after_s = {}
    for second in range(20):
        for name, watch in watches.items():
            if watch.is_late():
                late_after_s.setdefault(name, second)
        now_s += 1.0
    assert late_after_s == {"late": 11}


@pytest.mark.parametrize(
    "name, returncode, looking, absent, expected",
    [
        (SCHEDULER, 1, ("rank 0", "rank 1"), (), True),
        (SCHEDULER, 1, ("rank 0",), ("rank 1",), True),
        (SCHEDULER, -signal.SIGSEGV, ("rank 0", "rank 1"), (), True),
        (SCHEDULER, 1, (), (), False),  # they had met
        ("rank 1", 1, ("rank 0", "rank 1"), (), True),
        ("rank 1", 1, ("rank 0",), ("rank 1",), False),  # it failed on its way
        ("rank 1", 2, ("rank 0", "rank 1"), (), False),  # a mistake of the user's
        ("rank 1", -signal.SIGKILL, ("rank 0", "rank 1"), (), False),
    ],
)
def test_what_another_port_may_mend(name, returncode, looking, absent, expected):
    assert may_be_a_foreign_connections_doing(name, returncode, Meeting(looking, absent)) == expected


def test_only_ranks_that_look_for_others_who_are_there_are_woken_and_not_for_ever(monkeypatch):
    now_s, woken = 0.0, []
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    monkeypatch.setattr(processes, "signal_all", lambda pids, number: woken.append((tuple(pids), number)))
    pids = {"rank 0": 10, "rank 1": 11}
    rouser = Rouser(2)
    for activities in ({}, {"rank 0": JOINING}, {"rank 0": JOINING, "rank 1": STARTING}):
        rouser.rouse(activities, pids)
    assert woken == []
    rouser.rouse({"rank 0": JOINING, "rank 1": JOINING}, pids)
    rouser.rouse({"rank 0": JOINING, "rank 1": JOINED}, pids)  # at the same moment
    now_s += 1
    rouser.rouse({"rank 0": JOINING, "rank 1": JOINED}, pids)
    now_s += 1
    rouser.rouse({"rank 0": JOINED, "rank 1": JOINED}, pids)
    assert woken == [((10, 11), ROUSE_SIGNAL), ((10,), ROUSE_SIGNAL)]
    for _ in range(100):
        now_s += 1
        rouser.rouse({"rank 0": JOINING, "rank 1": JOINING}, pids)
    assert len(woken) == 20, "a rank has dozens of tries, and must not lose them all"
    Rouser(0).rouse({"rank 0": JOINING, "rank 1": JOINING}, pids)
    assert len(woken) == 20
