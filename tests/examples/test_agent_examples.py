"""The agents of examples/agents as they are started in a run, from their own processes, with a script for a model."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from agent_fakes import END, TOKENIZER, Engine, decoded, prompt
from slow_tests import SLOW

from mindrlhf.config.reward import ToolSection
from mindrlhf.data.templates import load_template
from mindrlhf.rollout.agents.source import AgentEpisodes
from mindrlhf.rollout.types import SamplingParams
from mindrlhf.sandbox.server import active_layers

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(300)
TEMPLATE = load_template(str(ROOT / "examples" / "agents" / "chat.jinja"), TOKENIZER)


def reply(text):
    """Call the calculator, and repeat what it answers; 12 times 11 is guessed wrong."""
    last = text.split("<|im_start|>")[-2]
    if told := re.search(r"<tool_response>\n(.*)\n", last):
        return f"#### {told[1]}"
    first, second = re.findall(r"\d+", last)
    if (first, second) == ("12", "11"):
        return "#### 100"
    return f'<tool_call>{{"name": "calculator", "arguments": {{"expression": "{first}*{second}"}}}}</tool_call>'


def run(agent, questions):
    """Return the completions of an agent's episodes, one for each question."""
    keys = {"agent_open": "namespaces" not in active_layers(), "agent_sees": ("answer",), "max_turns": 6}
    tools = ToolSection(agent=agent, agent_gather_s=20.0, **keys)
    requests = [prompt(question, number) for number, question in enumerate(questions)]
    requests = [
        type(one)(**{**vars(one), "answer": str(eval(re.sub(r"\D+", "*", one.extra["question"]).strip("*")))})
        for one in requests
    ]
    with AgentEpisodes(Engine(reply), TOKENIZER, TEMPLATE, tools, 200) as source:
        found = list(source.generate(requests, SamplingParams(400, stop_token_ids=(END,))))
    return sorted(found, key=lambda one: one.request_id)


QUESTIONS = ["What is 12 times 34?", "What is 11 times 12?", "What is 12 times 11?"]


def test_the_agent_with_the_openai_client(rollout_python):
    if subprocess.run([rollout_python, "-c", "import openai"], capture_output=True, timeout=120).returncode:
        pytest.skip("the rollout environment has no openai")
    found = run(f"{rollout_python} {ROOT / 'examples/agents/agent.py'}", QUESTIONS)
    assert [one.agent.failure for one in found] == [""] * 3
    # Half for the own answer, half for that of the sub-agent, which is asked the other way round.
    assert [one.episode_return for one in found] == [1.0, 0.5, 0.5]
    assert [one.num_turns for one in found] == [4, 3, 3] and [len(one.agent.sequences) for one in found] == [2] * 3
    assert found[0].agent.text == "#### 408" and found[0].agent.num_rewritten == 0
    calls = decoded(found[0].agent.sequences[0].token_ids)
    assert calls.startswith('<tool_call>{"name": "calculator"') and calls.endswith("#### 408<|im_end|>")


def test_the_shell_program_with_curl():
    if not (shutil.which("curl") and shutil.which("jq")):
        pytest.skip("curl or jq is not there")
    found = run(f"sh {ROOT / 'examples/agents/agent.sh'}", QUESTIONS)
    assert [one.agent.failure for one in found] == [""] * 3
    assert [one.episode_return for one in found] == [1.0, 1.0, 0.0]
    assert [one.num_turns for one in found] == [2, 2, 1] and [len(one.agent.sequences) for one in found] == [1] * 3


ANTHROPIC = """
import json, sys
from anthropic import Anthropic
record, client = json.load(sys.stdin), Anthropic()
tool = {"name": "calculator", "description": "d", "input_schema": {"type": "object", "properties": {}}}
messages = [{"role": "user", "content": record["question"]}]
for stream in (False, True):
    options = {"model": "policy", "max_tokens": 300, "messages": messages, "tools": [tool]}
    if stream:
        with client.messages.stream(**options) as events:
            answer = events.get_final_message()
    else:
        answer = client.messages.create(**options)
    messages.append({"role": "assistant", "content": [block.model_dump() for block in answer.content]})
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": str(eval(block.input["expression"]))}
        for block in answer.content if block.type == "tool_use"
    ]
    messages.append({"role": "user", "content": results})
print(json.dumps({"text": answer.content[0].text, "reward": 1}))
"""

OPENAI_STREAM = """
import json, sys
from openai import OpenAI
record, client = json.load(sys.stdin), OpenAI()
tool = {"type": "function", "function": {"name": "calculator", "parameters": {"type": "object", "properties": {}}}}
messages = [{"role": "user", "content": record["question"]}]
name = arguments = text = ""
for chunk in client.chat.completions.create(model="policy", messages=messages, tools=[tool], stream=True):
    delta = chunk.choices[0].delta
    text += delta.content or ""
    for call in delta.tool_calls or []:
        name, arguments, number = call.function.name, arguments + call.function.arguments, call.id
call = {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}
messages += [{"role": "assistant", "content": text, "tool_calls": [call]}]
messages += [{"role": "tool", "tool_call_id": number, "content": "408"}]
print(client.chat.completions.create(model="policy", messages=messages, tools=[tool]).choices[0].message.content)
"""


@pytest.mark.parametrize(
    ("client", "source"), [pytest.param("anthropic", ANTHROPIC, marks=SLOW), ("openai", OPENAI_STREAM)]
)
def test_clients_of_others_and_their_streams(client, source, tmp_path, rollout_python):
    if subprocess.run([rollout_python, "-c", f"import {client}"], capture_output=True, timeout=120).returncode:
        pytest.skip(f"the rollout environment has no {client}")
    (tmp_path / "agent.py").write_text(source)
    (found,) = run(f"{rollout_python} {tmp_path / 'agent.py'}", QUESTIONS[:1])
    assert found.agent.failure == "" and found.agent.text == "#### 408"
    assert found.num_turns == 2 and len(found.agent.sequences) == 1
