"""GRPO with an agent that is a program with the plain ``openai`` client: tools, three turns and a sub-agent."""

import json
import math
import shlex
import subprocess

import pytest
import sanity_inputs
from slow_tests import SLOW
from test_tool_runs import make

pytestmark = pytest.mark.timeout(500)
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'tool' %}<tool_response>{{ message.content }}</tool_response>"
    "{% else %}{{ message.content or '' }}{% for call in message.tool_calls or [] %}"
    '<tool_call>{"name":"{{ call.function.name }}","arguments":{{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}{% endif %}<|endoftext|>{% endfor %}"
)
AGENT = """
import json, sys
from openai import OpenAI

record, client = json.load(sys.stdin), OpenAI()
tool = {"type": "function", "function": {"name": "calculator", "parameters": {"type": "object", "properties": {}}}}

def ask(messages, **more):
    return client.chat.completions.create(model="policy", messages=messages, temperature=0.1, **more).choices[0].message

messages = [{"role": "user", "content": record["prompt"]}]
for turn in range(3):
    message = ask(messages, tools=[tool], max_tokens=24)
    messages.append(message.model_dump())
    answers = [
        {"role": "tool", "tool_call_id": call.id, "content": "42"} for call in message.tool_calls or []
    ]
    messages += answers or [{"role": "user", "content": "8"}]
text = ask([{"role": "user", "content": "7"}], max_tokens=8).content or ""
whole = "".join(str(one["content"] or "") for one in messages if one["role"] == "assistant")
print(json.dumps({"reward": sum(letter.isdigit() for letter in whole) / max(1, len(whole)), "text": text}))
"""


def make_for_agents(directory):
    make(directory)
    for name in ("bare", "model"):
        config = {"eos_token": "<|endoftext|>", "chat_template": TEMPLATE}
        (directory / name / "tokenizer_config.json").write_text(json.dumps(config))


def has_openai(python):
    return subprocess.run([python, "-c", "import openai"], capture_output=True, timeout=120).returncode == 0


SCHEDULES = {
    "in step": {"run__max_steps": 2},
    "ahead": {"run__max_steps": 3, "rollout__off_policy_steps": 1},
    "dynamic": {"run__max_steps": 2, "algorithm__dynamic_sampling": "true"},
}


@pytest.mark.parametrize("name", [name if name == "in step" else pytest.param(name, marks=SLOW) for name in SCHEDULES])
def test_training_learns_from_the_tokens_of_an_agent_with_the_openai_client(tmp_path, rollout_python, name):
    schedule = SCHEDULES[name]
    if not has_openai(rollout_python):
        pytest.skip("the rollout environment has no openai")
    make_for_agents(tmp_path)
    (tmp_path / "agent.py").write_text(AGENT)
    finished = sanity_inputs.train(
        tmp_path,
        tmp_path / "run",
        timeout_s=400,
        **schedule,
        tools__agent=shlex.join([str(rollout_python), str(tmp_path / "agent.py")]),
        tools__memory_limit_mib=2048,
        tools__agent_gather_s=20,
        training__chunk_size=2,
        reward__verifier_function="environment_reward",
        rollout__max_response_length=192,
        observe__groups_per_step=16,
    )
    metrics = sanity_inputs.read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in metrics] == list(range(1, schedule["run__max_steps"] + 1))
    for line in metrics:
        assert line["agents/failures"] == line["agents/refused"] == line["agents/rewritten"] == 0, finished.stderr
        assert line["agents/sequences"] == 2 and line["turns/mean"] == 4
        assert line["tools/tokens"] > 0
        # The trainer read the very tokens that the generator wrote.
        if name != "ahead" or line["step"] == 1:  # later samples are of the weights before
            assert line["rollout_diff/max_abs"] < 1e-4 and line["rollout_diff/mean_abs"] < 1e-5
            assert line["rollout_ratio/effective"] == pytest.approx(1.0, abs=1e-6)
        assert math.isfinite(line["loss"]) and line["grad_norm"] > 0
        print({name: line[name] for name in line if name.startswith(("agents/", "rollout_diff/", "turns", "tools/"))})


HANGS_UP = """
import json, os, socket, urllib.request

def ask(url, key, text):
    body = json.dumps({"messages": [{"role": "user", "content": text}], "max_tokens": 12}).encode()
    return body, {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}

def hang_up(url, key, text, reads):
    body, headers = ask(url, key, text)
    connection = socket.create_connection(("127.0.0.1", int(url.split(":")[2].split("/")[0])))
    lines = "".join(f"{name}: {value}\\r\\n" for name, value in headers.items())
    lines = f"POST /v1/chat/completions HTTP/1.1\\r\\nHost: x\\r\\n{lines}Content-Length: {len(body)}\\r\\n\\r\\n"
    connection.sendall(lines.encode() + body)
    for _ in range(reads):
        connection.recv(1)
    connection.close()

def agent(record, url, key):
    texts = []
    for number in range(2):
        if HANGS:
            for reads in (0, 1, 10, 100):
                hang_up(url, key, f"{number} {reads}", reads)
        body, headers = ask(url, key, record["prompt"] + str(number))
        with urllib.request.urlopen(urllib.request.Request(f"{url}/chat/completions", body, headers)) as response:
            texts.append(json.loads(response.read())["choices"][0]["message"]["content"] or "")
    text = "".join(texts)
    return sum(letter.isdigit() for letter in text) / max(1, len(text))
"""


@SLOW
def test_a_run_with_clients_that_hang_up_has_the_weights_of_one_without(tmp_path):
    make_for_agents(tmp_path)
    lines = {}
    for hangs in (True, False):
        (tmp_path / "agent.py").write_text(f"HANGS = {hangs}\n{HANGS_UP}")
        sanity_inputs.train(
            tmp_path,
            tmp_path / f"run{hangs}",
            timeout_s=400,
            run__max_steps=2,
            tools__agent=f"{tmp_path / 'agent.py'}:agent",
            tools__max_turns=20,
            tools__agent_tokens=2000,
            tools__memory_limit_mib=2048,
            tools__agent_gather_s=20,
            training__chunk_size=2,
            reward__verifier_function="environment_reward",
            rollout__max_response_length=64,
        )
        lines[hangs] = sanity_inputs.read_lines(tmp_path / f"run{hangs}" / "metrics.jsonl")
    # Of those that hang up at once some have not been heard of.
    assert all(line["agents/unread"] >= 24 and line["turns/mean"] == 2 for line in lines[True]), lines[True]
    assert all(line["agents/unread"] == 0 and line["grad_norm"] > 0 for line in lines[False])
    for name in ("trajectory.jsonl", "final/model.safetensors"):
        assert (tmp_path / "runTrue" / name).read_bytes() == (tmp_path / "runFalse" / name).read_bytes()
