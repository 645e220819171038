"""Who takes memory of an NPU first: MindSpore's limit is 15/16 of what is free when a rank joins."""

import contextlib
import json
from types import SimpleNamespace

import pytest

from mindrlhf.config.run import RunSection
from mindrlhf.rollout.processes import server
from mindrlhf.rollout.vllm_options import VllmOptions
from mindrlhf.system import heartbeat
from mindrlhf.training import runtime


@pytest.mark.parametrize("device", ["cpu", "ascend"])
def test_a_server_is_told_whom_to_wait_for(device, monkeypatch, tmp_path):
    started = []
    monkeypatch.setattr(server, "Child", lambda command, **_: started.append(command) or SimpleNamespace())
    monkeypatch.setattr(heartbeat, "own_path", lambda: tmp_path / "heartbeat_0.json")
    (tmp_path / "config.json").write_text("{}")
    process = server.ServerProcess(VllmOptions("python3", str(tmp_path), str(tmp_path / "log"), device=device))
    process._remove_private_dir()
    config = json.loads(started[0][started[0].index("--config") + 1])
    assert config["starter_heartbeat"] == str(tmp_path / "heartbeat_0.json")


class _Loaded(Exception):
    """MindSpore is about to be loaded."""


@pytest.mark.parametrize("device, waits", [("cpu", False), ("ascend", True)])
def test_one_rank_alone_is_waited_for_on_an_npu(device, waits, monkeypatch, tmp_path):
    path = tmp_path / "heartbeat_0.json"

    def say(activity):
        path.write_text(json.dumps({"pid": 1, "num_ticks": 0, "activity": activity}))

    @contextlib.contextmanager
    def loaded():
        raise _Loaded
        yield

    monkeypatch.delenv("MS_WORKER_NUM", raising=False)
    monkeypatch.setattr(heartbeat, "enter", say)
    monkeypatch.setattr(runtime, "quick_imports", loaded)
    say(heartbeat.STARTING)
    with pytest.raises(_Loaded):
        runtime.start_runtime(RunSection(device=device), tmp_path)
    assert (heartbeat.read_beat(path).activity in (heartbeat.STARTING, heartbeat.JOINING)) == waits
