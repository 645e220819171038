"""Libraries for agents as they come, in environments of their own: what is trained is what was sampled, token by token.

An environment is made for the test, or named by MINDRLHF_TEST_CLIENTS and MINDRLHF_TEST_LLAMA_INDEX (a Python).
"""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from agent_fakes import CHAT, END, TOKENIZER, Engine, prompt
from slow_tests import SLOW
from test_agent_packages import ROOT, with_package

from mindrlhf.config.reward import ToolSection
from mindrlhf.rollout.agents.source import AgentEpisodes
from mindrlhf.rollout.types import SamplingParams

pytestmark = [pytest.mark.timeout(1800), SLOW]
FILE = Path(ROOT, "tests", "helpers", "agent_clients.py")


def call(name, arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


DOUBLE, JSON = call("double", '{"x":   21}'), '{"value":   42}'
# By client: what the model writes, turn by turn, and in which of them a grammar is asked for.
SCRIPTS = {
    **dict.fromkeys(["openai", "litellm", "anthropic", "langgraph", "pydantic-ai"], ([DOUBLE, "It is 42."], "--")),
    **dict.fromkeys(["openai-agents", "openai-agents streamed"], ([DOUBLE, "It is 42."], "--")),
    "openai-agents typed": ([DOUBLE, JSON], "gg"),
    **dict.fromkeys(["langchain json_schema", "langchain json_mode"], ([JSON], "g")),
    "langchain function_calling": ([call("Answer", JSON)], "g"),
    "langchain-anthropic": ([call("Answer", JSON)], "g"),
    "pydantic-ai tool": ([DOUBLE, call("final_result", JSON)], "gg"),
    "pydantic-ai NativeOutput": ([DOUBLE, JSON], "gg"),
    "pydantic-ai PromptedOutput": ([DOUBLE, JSON], "gg"),
    "smolagents CodeAgent": (["<code>\nfinal_answer(double(21))\n</code>"], "-"),
    "smolagents ToolCallingAgent": ([DOUBLE, call("final_answer", '{"answer": "42"}')], "gg"),
    **dict.fromkeys(["instructor TOOLS", "instructor TOOLS_STRICT"], ([call("Answer", JSON)], "g")),
    **dict.fromkeys(["instructor JSON", "instructor JSON_SCHEMA"], ([JSON], "g")),
    "instructor MD_JSON": ([f"```json\n{JSON}\n```"], "-"),
    "llama-index": ([DOUBLE], "g"),
}
REWRITES = ["smolagents ToolCallingAgent"]  # which tells the model its calls in words of its own: a sequence for each
PACKAGES = {
    "clients": "openai anthropic litellm openai-agents langgraph langchain-openai langchain-anthropic "
    "pydantic-ai-slim[openai] smolagents instructor",
    "llama_index": "llama-index-core>=0.14 llama-index-llms-openai-like",
}


class Scripted(Engine):
    """Gives the turns of a script, one after the other, and keeps what it was asked and what it said."""

    def begin(self, turns):
        self.turns, self.asked, self.said, self.grammars = iter(turns), [], [], ""

    def generate(self, requests, sampling):
        (request,) = requests
        turn = next(self.turns)
        self.reply = lambda text: turn
        self.asked.append(list(request.prompt_ids))
        self.grammars += "g" if sampling.grammar else "-"
        for one in super().generate(requests, sampling):
            self.said.append(one.token_ids.tolist())
            yield dataclasses.replace(one, is_generated=np.ones(len(one.token_ids), bool) if sampling.grammar else None)


@pytest.mark.parametrize("name", PACKAGES)
def test_what_a_librarys_agent_has_sampled_is_trained_as_it_was(name, tmp_path_factory):
    _, python = with_package(name, tmp_path_factory, PACKAGES[name])
    tools = ToolSection(agent=f"{FILE}:agent", agent_python=python, memory_limit_mib=4096, agent_timeout_s=240.0)
    sampling, engine, wrong = SamplingParams(20000, stop_token_ids=(END,)), Scripted(None), []
    with AgentEpisodes(engine, TOKENIZER, CHAT, tools, 20000) as source:
        for client in [one for one in SCRIPTS if ("llama" in name) == ("llama" in one)]:
            turns, grammars = SCRIPTS[client]
            engine.begin(turns)
            request = dataclasses.replace(prompt(), extra={"client": client})
            (found,) = source.generate([request], sampling)
            trained = [own.token_ids[own.is_generated].tolist() for own in found.agent.sequences]
            goes_on = all(
                now[: len(before) + len(said)] == before + said
                for before, said, now in zip(engine.asked, engine.said, engine.asked[1:])
            )
            told = (found.agent.failure, found.episode_return, engine.grammars, found.agent.num_rewritten, goes_on)
            expected, said = ("", 1.0, grammars, 0, True), [sum(engine.said, [])]
            if client in REWRITES:
                expected, said = ("", 1.0, grammars, len(turns) - 1, False), sorted(engine.said)
            if told != expected or sorted(trained) != said:
                wrong.append((client, *told, len(trained)))
    assert not wrong, "\n".join(map(str, wrong))
