"""Waiting for a rank that looks for the others."""

import json
import threading
import time

import pytest

from mindrlhf.system import heartbeat


def say(path, activity):
    whole = path.with_suffix(".new")
    whole.write_text(json.dumps({"pid": 1, "num_ticks": 0, "activity": activity}))
    whole.replace(path)  # a reader never sees half of it, as of a real one


@pytest.mark.parametrize("activity", [heartbeat.JOINED, "loading MindSpore", None])
def test_nothing_to_wait_for(tmp_path, activity):
    path = tmp_path / "heartbeat_0.json"
    if activity is not None:
        say(path, activity)
    heartbeat.wait_while_joining(path)  # or the test's time limit ends it


def test_waits_until_the_rank_has_found_the_others(tmp_path):
    path = tmp_path / "heartbeat_0.json"
    say(path, heartbeat.STARTING)
    ended = threading.Event()
    waiting = threading.Thread(target=lambda: (heartbeat.wait_while_joining(path, 0.001), ended.set()), daemon=True)
    waiting.start()
    for activity in (heartbeat.STARTING, heartbeat.JOINING):
        say(path, activity)
        time.sleep(0.05)
        assert not ended.is_set()
    say(path, heartbeat.JOINED)
    waiting.join(30)
    assert ended.is_set()
