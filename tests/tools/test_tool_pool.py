"""Tools in their processes: answers, errors, time limits, deaths; limits here are generous, machines are busy."""

import os
import time

import pytest
from example_tools import CALCULATOR

from mindrlhf.errors import UserError
from mindrlhf.tools.calls import ToolAnswer, ToolCall
from mindrlhf.tools.pool import ToolPool

TOOLS = '''
import os, time

def echo(text: str, times: int = 1):
    """Say it again."""
    return {"said": [text] * times}

def hang():
    os.system("sleep 600 &")
    time.sleep(600)

def die():
    os._exit(3)

def leave():
    raise SystemExit("bye")

def flood():
    print("noise on standard output")
    return "x" * 1_000_000

def surrogate():
    return "a\\ud800b"

def pid():
    return os.getpid()
'''
NAMES = ("echo", "hang", "die", "leave", "flood", "surrogate", "pid")


@pytest.fixture
def pool(tmp_path):
    (tmp_path / "tools.py").write_text(TOOLS)
    with ToolPool([*(f"{tmp_path}/tools.py:{name}" for name in NAMES), CALCULATOR], timeout_s=6.0) as pool:
        yield pool


def ask(pool, name, **arguments):
    return pool.submit(ToolCall(name, arguments)).result(timeout=60)


def test_answers_and_errors(pool):
    assert ask(pool, "echo", text="hä", times=2) == ToolAnswer('{"said": ["hä", "hä"]}')
    assert ask(pool, "calculator", expression="6*7") == ToolAnswer("42")
    for name, arguments, reason in [
        ("search", {}, "there is no tool 'search'; there are echo, hang"),
        ("echo", {}, "missing a required argument: 'text'"),
        ("echo", {"text": "a", "by": 1}, "unexpected keyword argument 'by'"),
        ("calculator", {"expression": "1/0"}, "Error: division by zero"),
        ("calculator", {"expression": 5}, "Error: "),
        ("leave", {}, "SystemExit: bye"),
    ]:
        answer = ask(pool, name, **arguments)
        assert answer.is_failure and reason in answer.text, answer
    assert ask(pool, "flood") == ToolAnswer("x" * 20_000)
    assert ask(pool, "surrogate") == ToolAnswer("a?b")


def test_a_tool_that_hangs_or_dies_costs_its_own_call_only(pool):
    first = int(ask(pool, "pid").text)
    calls = [pool.submit(ToolCall(name, {})) for name in ("hang", "pid", "die", "pid")]
    hung, second, died, third = (call.result(timeout=120) for call in calls)
    assert hung == ToolAnswer("Error: hang: no answer within 6 s", is_failure=True)
    assert died == ToolAnswer("Error: die: worker died: exit code 3", is_failure=True)
    assert len({first, int(second.text), int(third.text)}) == 3
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)


def test_close_kills_what_is_running(tmp_path):
    (tmp_path / "tools.py").write_text(TOOLS)
    pool = ToolPool([f"{tmp_path}/tools.py:pid", f"{tmp_path}/tools.py:hang"], timeout_s=300.0)
    worker = int(ask(pool, "pid").text)
    running = pool.submit(ToolCall("hang", {}))
    time.sleep(0.2)
    pool.close()
    pool.close()
    assert running.result(timeout=60).is_failure
    with pytest.raises(ProcessLookupError):
        os.kill(worker, 0)


def test_python_runs_in_the_sandbox():
    with ToolPool(["python"], timeout_s=20.0) as pool:
        assert ask(pool, "python", code="print(sum(range(10)))") == ToolAnswer("45\n")
        broken = ask(pool, "python", code="print('so far')\nraise KeyError('x')")
    assert broken.is_failure
    assert "so far" in broken.text and "KeyError: 'x'" in broken.text and "exit code 1" in broken.text


@pytest.mark.timeout(120)
def test_an_endless_program_is_ended_by_the_sandbox_before_its_worker():
    with ToolPool(["python"], timeout_s=4.0) as pool:
        answer = ask(pool, "python", code="print('begun', flush=True)\nwhile True: pass")
    assert answer.is_failure and "ended by time limit" in answer.text


def test_a_file_that_does_not_load_is_found_at_once(tmp_path):
    (tmp_path / "bad.py").write_text("import nothing_of_this_name\n\ndef f(): ...\n")
    with pytest.raises(UserError, match="does not load: ModuleNotFoundError"):
        ToolPool([f"{tmp_path}/bad.py:f"])
    for options in ({"num_workers": 0}, {"timeout_s": 0.0}, {"timeout_s": float("inf")}):
        with pytest.raises(UserError):
            ToolPool(["python"], **options)
