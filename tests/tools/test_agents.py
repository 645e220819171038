"""Agents as processes: functions and commands, what they are given, what they may reach, and how they end."""

import asyncio
import json
import os
import shutil
import socket
import sys
import tempfile
import time
import venv
from pathlib import Path

import pytest

from mindrlhf.config.reward import ToolSection
from mindrlhf.errors import UserError
from mindrlhf.sandbox.server import active_layers
from mindrlhf.system.processes import descendants
from mindrlhf.tools.agents import AgentResult, AgentRunner, check_agent, command_words, read_result

pytestmark = pytest.mark.timeout(120)
NEEDS_NAMESPACES = pytest.mark.skipif("namespaces" not in active_layers(), reason="this system allows no namespaces")


@pytest.fixture
def endpoint(tmp_path):
    """A port, and a directory."""
    directory = tempfile.mkdtemp(prefix="agents-test-")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1], directory
    shutil.rmtree(directory, ignore_errors=True)


def run_all(
    agent, endpoint, records, timeout_s=60.0, is_open=False, memory_limit_bytes=1 << 30, during=None,
    clock=time.monotonic, **more,
):  # fmt: skip
    """Return what agents that run at once end with; what they connect to answers with what came."""
    port, directory = endpoint

    async def echo(reader, writer):
        writer.write(b"echo " + await reader.readline())
        await writer.drain()
        writer.close()

    async def run():
        options = {"is_open": is_open, "memory_limit_bytes": memory_limit_bytes, **more}
        runner = AgentRunner(
            agent, port, directory, lambda listener, key: asyncio.start_server(echo, sock=listener), **options
        )
        try:
            await runner.start()
            limits = timeout_s if isinstance(timeout_s, list) else [timeout_s] * len(records)
            runs = [runner.run(one, f"key{n}", limits[n], clock) for n, one in enumerate(records)]
            tasks = [asyncio.ensure_future(one) for one in runs]
            if during is not None:
                await during(runner, tasks)
            return await asyncio.gather(*tasks)
        finally:
            await runner.close()
            os.rmdir(f"{directory}/agents")  # nothing is left in it

    return asyncio.run(run())


def file_of(tmp_path, source):
    path = tmp_path / "agent.py"
    path.write_text(source)
    return f"{path}:agent"


@pytest.mark.parametrize("is_open", [True, pytest.param(False, marks=NEEDS_NAMESPACES)])
@pytest.mark.parametrize("prefix", ["", "async "])
def test_a_function_gets_record_url_and_key_and_gives_a_reward(tmp_path, endpoint, prefix, is_open):
    source = (
        f"{prefix}def agent(record, base_url, api_key):\n"
        "    import os\n"
        "    same = os.environ['OPENAI_BASE_URL'] == base_url and os.environ['OPENAI_API_KEY'] == api_key\n"
        "    return {'reward': record['x'] / 2, 'text': f'{base_url} {api_key} {same}'}\n"
    )
    found = run_all(file_of(tmp_path, source), endpoint, [{"x": 1}, {"x": 3}], is_open=is_open)
    url = f"http://127.0.0.1:{endpoint[0]}/v1"
    assert found == [AgentResult(0.5, f"{url} key0 True"), AgentResult(1.5, f"{url} key1 True")]
    assert os.listdir(endpoint[1]) == [], "their directories are gone"


@pytest.mark.parametrize("is_open", [True, pytest.param(False, marks=NEEDS_NAMESPACES)])
def test_a_function_runs_in_an_environment_of_its_own(tmp_path, endpoint, is_open):
    venv.create(tmp_path / "own", with_pip=False)
    (packages,) = tmp_path.glob("own/lib/python*/site-packages")
    (packages / "only_there.py").write_text("VALUE = 2.5\n")
    (packages / "yaml.py").write_text("VALUE = 'its own yaml'\n")
    source = (
        "import importlib.util, sys, only_there, yaml\n"
        "def agent(record, base_url, api_key):\n"
        "    ours = importlib.util.find_spec('mindspore') is not None\n"
        "    return {'reward': only_there.VALUE, 'text': f'{sys.prefix} {yaml.VALUE} {ours}'}\n"
    )
    python = str(tmp_path / "own" / "bin" / "python")
    found = run_all(file_of(tmp_path, source), endpoint, [{}], is_open=is_open, python=python)
    assert found == [AgentResult(2.5, f"{tmp_path / 'own'} its own yaml False")]


@pytest.mark.parametrize("is_open", [True, pytest.param(False, marks=NEEDS_NAMESPACES)])
def test_a_command_reads_its_record_and_prints_its_reward(tmp_path, endpoint, is_open):
    script = tmp_path / "agent.sh"
    script.write_text('read -r record; echo "$record $OPENAI_API_KEY $1"; cmp -s record.json - ; echo 0.75\n')
    found = run_all(f"sh {script} 'an argument'", endpoint, [{"q": "a"}], is_open=is_open)
    assert found == [AgentResult(0.75)]
    (found,) = run_all("sh -c 'cat record.json; echo; pwd >&2; echo done'", endpoint, [{"q": "a"}], is_open=is_open)
    assert found.text == '{"q": "a"}\ndone' and found.reward is None


@NEEDS_NAMESPACES
def test_only_the_endpoint_can_be_reached_and_only_the_own_directory_written(tmp_path, endpoint):
    outside = tmp_path / "outside"
    source = (
        "import os, socket\n"
        "def agent(record, base_url, api_key):\n"
        "    found = {}\n"
        "    def attempt(name, function):\n"
        "        try:\n"
        "            found[name] = str(function())\n"
        "        except OSError as error:\n"
        "            found[name] = type(error).__name__\n"
        "    def ask(port):\n"
        "        with socket.create_connection(('127.0.0.1', port), 5) as connection:\n"
        "            connection.sendall(b'hello\\n')\n"
        "            return connection.makefile().readline()\n"
        "    attempt('endpoint', lambda: ask(int(base_url.split(':')[2].split('/')[0])))\n"
        "    attempt('another port', lambda: ask(record['port']))\n"
        "    attempt('another host', lambda: socket.create_connection(('192.0.2.1', 80), 5))\n"
        f"    attempt('outside', lambda: open({str(outside)!r}, 'w'))\n"
        "    attempt('shared memory', lambda: open('/dev/shm/x', 'w'))\n"
        "    attempt('inside', lambda: open('inside', 'w').write('x'))\n"
        "    attempt('processes', lambda: len([n for n in os.listdir('/proc') if n.isdigit()]))\n"
        "    return __import__('json').dumps(found)\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        (result,) = run_all(file_of(tmp_path, source), endpoint, [{"port": port}])
    assert json.loads(result.text) == {
        "endpoint": "echo hello\n",
        "another port": "ConnectionRefusedError",
        "another host": "OSError",
        "outside": "PermissionError",
        "shared memory": "PermissionError",
        "inside": "1",
        "processes": "2",
    }
    assert not outside.exists()


FAILING = {
    "raise ValueError('no')": "ValueError: no",
    "import os; os._exit(3)": "exit status 3",
    "import os, signal; os.kill(os.getpid(), signal.SIGKILL)": "exit status -9",
    "import sys; sys.exit('bye')": "SystemExit: bye",
    "return object()": "not JSON serializable",
    "return 'x' * 100_000": "100002 bytes",
    "return float('nan')": "and not a reward",
    "return [1]": "and not a reward",
    "return {'reward': 1, 'more': 2}": "and not a reward",
    "return {'reward': '1'}": "and not a reward",
    "x = bytearray(1 << 30); return 1": "MemoryError",
    "import time; time.sleep(60)": "had not ended after 2 s",
    "while True: pass": "had not ended after 2 s",
    "return 1": "",
}


@pytest.mark.parametrize("is_open", [True, pytest.param(False, marks=NEEDS_NAMESPACES)])
def test_agents_that_fail_fail_alone(tmp_path, endpoint, is_open):
    ways = [f"    if record['n'] == {number}:\n        {body}\n" for number, body in enumerate(FAILING)]
    agent = file_of(tmp_path, "".join(["def agent(record, base_url, api_key):\n", *ways]))
    records = [{"n": number} for number in range(len(FAILING))]
    limits = [2.0 if "2 s" in failure else 60.0 for failure in FAILING.values()]
    options = {"timeout_s": limits, "is_open": is_open, "memory_limit_bytes": 256 << 20}
    *bad, good = run_all(agent, endpoint, records, **options)
    failures = [failure for failure in FAILING.values() if failure]
    assert [(one, failure) for one, failure in zip(bad, failures, strict=True) if failure not in one.failure] == []
    assert all(one.failure for one in bad) and good == AgentResult(1.0)


@pytest.mark.parametrize("rests", [True, False])
def test_the_time_of_an_agent_is_that_of_its_clock(tmp_path, endpoint, rests):
    source = "def agent(record, base_url, api_key):\n    import time\n    time.sleep(1.5)\n    return 1.0\n"
    begun_s = time.monotonic()
    clock = (lambda: begun_s + min(0.2, time.monotonic() - begun_s)) if rests else time.monotonic
    (found,) = run_all(file_of(tmp_path, source), endpoint, [{}], timeout_s=0.5, is_open=True, clock=clock)
    assert found == (AgentResult(1.0) if rests else AgentResult(failure=found.failure)), found


@pytest.mark.parametrize("is_open", [True, pytest.param(False, marks=NEEDS_NAMESPACES)])
@pytest.mark.parametrize("timeout_s", [1.0, 20.0], ids=["time is up", "it returns"])
def test_nothing_of_an_agent_outlives_it(tmp_path, endpoint, is_open, timeout_s):
    source = (
        "import os, subprocess, time\n"
        "def agent(record, base_url, api_key):\n"
        "    for _ in range(3):\n"
        "        subprocess.Popen(['sleep', '300'], start_new_session=True)\n"
        "    if os.fork() == 0:\n"
        "        os.setsid()\n"
        "        if os.fork() == 0:\n"
        "            time.sleep(300)\n"
        "        os._exit(0)\n"
        f"    time.sleep({60 if timeout_s < 5 else 0})\n"
        "    return 1\n"
    )
    left = []

    async def look(runner, tasks):
        await asyncio.wait(tasks)
        deadline_s = time.monotonic() + 30
        while time.monotonic() < deadline_s:
            left[:] = [one.pid for one in descendants(runner._process.pid) if one.returncode is None]
            if not left:
                return
            await asyncio.sleep(0.05)

    run_all(file_of(tmp_path, source), endpoint, [{}], timeout_s=timeout_s, is_open=is_open, during=look)
    assert left == []


def test_a_host_that_dies_costs_what_runs_and_the_next_gets_another(tmp_path, endpoint, capfd):
    source = "import time\ndef agent(record, base_url, api_key):\n    time.sleep(record['s'])\n    return 1\n"

    async def kill(runner, tasks):
        while len(descendants(runner._process.pid)) < 6:  # three of each
            await asyncio.sleep(0.05)
        runner._process.kill()
        await asyncio.wait(tasks)
        assert await runner.run({"s": 0}, "k", 20.0) == AgentResult(1.0)

    found = run_all(file_of(tmp_path, source), endpoint, [{"s": 60}] * 2, is_open=True, during=kill)
    assert [one.failure for one in found] == ["the process that starts agents died"] * 2
    assert "the process that starts agents has ended, and another takes its place" in capfd.readouterr().err


def test_the_environment_holds_no_more_than_named(endpoint, monkeypatch):
    monkeypatch.setenv("SECRET_OF_THE_RUN", "x")
    (found,) = run_all("env SEARCH_KEY=given env", endpoint, [{}], is_open=True)
    names = {line.partition("=")[0] for line in found.text.splitlines()}
    assert "SECRET_OF_THE_RUN" not in names and {"SEARCH_KEY", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL"} <= names


@pytest.mark.parametrize(
    ("agent", "python", "message"),
    [
        ("agents/none.py:f", "", "there is no file agents/none.py"),
        ("no-such-program --x", "", "there is no program no-such-program"),
        ("sh -c 'x", "", "no closing quotation"),
        ("{file}:two", "", "it is called as two(record, base_url, api_key), but too many positional arguments"),
        ("{file}:good", "no/such/python", "there is no such program; give the path of a Python"),
        ("sh -c true", sys.executable, "a command, which names its own interpreter: remove it"),
    ],
)
def test_agents_that_cannot_be_are_errors_of_one_line(tmp_path, agent, python, message):
    (tmp_path / "a.py").write_text("def two(a, b): pass\ndef good(record, base_url, api_key): pass\n")
    check_agent(f"{tmp_path / 'a.py'}:good")
    check_agent(f"{tmp_path / 'a.py'}:good", sys.executable)
    check_agent("sh -c true")
    check_agent("")
    with pytest.raises(UserError, match="tools.agent") as caught:
        check_agent(agent.replace("{file}", str(tmp_path / "a.py")), python)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_that_does_not_load_is_an_error(tmp_path, endpoint):
    with pytest.raises(UserError, match="does not load: NameError"):
        run_all(file_of(tmp_path, "nothing\n"), endpoint, [{}], is_open=True)


def test_files_in_a_command_are_named_whole(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("agents").mkdir()
    Path("agents/a.py").write_text("", encoding="utf-8")
    assert command_words("python agents/a.py -x 'b c'") == ["python", str(tmp_path / "agents/a.py"), "-x", "b c"]
    assert ToolSection(agent="x").agent == "x" and sys.executable


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (None, AgentResult()),
        (1, AgentResult(1.0)),
        (True, AgentResult(1.0)),
        ("left", AgentResult(text="left")),
        ({"reward": 0.5}, AgentResult(0.5)),
        ({"text": "t", "reward": None}, AgentResult(text="t")),
        ({"reward": {"white": -1, "black": 1}}, AgentResult(-1.0, rewards={"white": -1.0, "black": 1.0})),
    ],
)
def test_what_an_agent_may_give(result, expected):
    assert read_result({"result": result}) == expected


@pytest.mark.parametrize("reward", [{}, {"white": None}, {"white": 1, "black": "won"}, {"white": 1e16}])
def test_rewards_of_roles_are_numbers(reward):
    assert "and not a reward" in read_result({"result": {"reward": reward}}).failure


@pytest.mark.parametrize("is_open", [True, pytest.param(False, marks=NEEDS_NAMESPACES)])
def test_many_at_once_all_end(tmp_path, endpoint, is_open, capfd):
    """The garbage collector of the process that starts them takes none away that it waits for."""
    source = (
        "import gc, time\n"
        "gc.set_threshold(1)\n"
        "async def agent(record, base_url, api_key):\n"
        "    gc.collect()\n"
        "    time.sleep(0.01 * record['x'])\n"
        "    return record['x']\n"
    )
    records = [{"x": number} for number in range(60)]
    found = run_all(file_of(tmp_path, source), endpoint, records, timeout_s=60.0, is_open=is_open)
    assert found == [AgentResult(float(number)) for number in range(60)]
    assert capfd.readouterr().err == ""
