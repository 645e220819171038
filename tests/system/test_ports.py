"""Ports of a run: those that `run.ports` names, and no other."""

import contextlib
import os
import socket
import subprocess
import sys

import pytest

from mindrlhf.cli import main
from mindrlhf.errors import RunFailure, UserError
from mindrlhf.system import ports as module
from mindrlhf.system.ports import PORTS_VARIABLE, find_free_port, listen, parse_ports, use_ports


@pytest.mark.parametrize(
    "text", ["20000", "20000-", "a-b", "80-200", "20100-20000", "20000-70000", "20000-20005", "-1-5"]
)
def test_senseless_ranges_are_one_line(text, capsys):
    with pytest.raises(UserError, match="'run.ports' is"):
        parse_ports(text)
    assert main(["config", "check", "examples/sanity/config.yaml", f"run.ports={text}"]) == 2
    assert sum("'run.ports'" in line for line in capsys.readouterr().err.splitlines()) == 1


def test_all_listeners_are_within_the_range_and_it_can_be_used_up(monkeypatch):
    first = find_free_port()
    text = f"{first}-{first + 15}"
    monkeypatch.setenv(PORTS_VARIABLE, text)
    with contextlib.ExitStack() as stack:
        taken = set()
        with pytest.raises(RunFailure, match=f"among those of {text}: give a wider 'run.ports'"):
            while len(taken) < 17:
                port = stack.enter_context(listen("127.0.0.1", backlog=1)).getsockname()[1]
                assert port not in taken
                taken.add(port)
        assert taken and taken <= set(range(first, first + 16))
        with pytest.raises(RunFailure):
            find_free_port()


def test_without_a_range_the_kernel_chooses(monkeypatch):
    monkeypatch.delenv(PORTS_VARIABLE, raising=False)
    with listen("127.0.0.1") as one, listen("::1") as other:
        assert one.getsockname()[1] > 0 and other.family == socket.AF_INET6


def test_what_is_started_gets_the_range_and_what_the_user_set_stays():
    environment = {"VLLM_PORT": "5000"}
    use_ports("20000-20099", environment)
    assert environment == {
        PORTS_VARIABLE: "20000-20099",
        "VLLM_PORT": "5000",
        "HCCL_HOST_SOCKET_PORT_RANGE": "20000-20099",
    }
    use_ports("", untouched := {})
    assert untouched == {}
    code = "from mindrlhf.system.ports import listen; print(listen('127.0.0.1').getsockname()[1])"
    started = subprocess.run([sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True)
    assert 20000 <= int(started.stdout) <= 20099


def test_no_module_listens_beside_the_one_that_knows_the_ports():
    root = os.path.dirname(os.path.dirname(module.__file__))
    found = subprocess.run(
        ["grep", "-rlE", r"create_server\(\([^)]*, 0\)", root, "--include=*.py"], capture_output=True, text=True
    )
    assert [os.path.basename(path) for path in found.stdout.split()] == ["ports.py"]
