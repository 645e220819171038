"""Environments of `verifiers` 0.4 as an agent: whatever a taskset's environment plays, its model calls come to us.

    .venv-verifiers/bin/python examples/agents/verifiers_agent.py TASKSET COUNT [KEY=VALUE ...] > train.jsonl

prints records, `question` and `answer`, of the first tasks. As `tools.agent: examples/agents/verifiers_agent.py:agent`,
with `tools.agent_python`, it plays a record's task. A taskset is an id of `verifiers`, or path/to/file.py of
your own, with options of its config.

Each seat of a multi-agent environment is a conversation of its own. Tasks that need tool servers, a container or a
tunnel are not for this file: their harness starts programs, which a closed agent may not fetch. An episode that asks
more often than `tools.max_turns` has failed.
"""

import itertools
import json
import sys
from pathlib import Path

import httpx
import verifiers.v1 as vf
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.runtimes import ProgramResult, subprocess
from verifiers.v1.utils.loaders import env_config_type, load_environment

__all__ = ["ChatHarness"]  # by which verifiers finds the harness of this file


class ChatHarness(vf.Harness[vf.HarnessConfig]):
    """One call of the model for each of the user's turns, in this process."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, **_):
        """Ask once, by way of verifiers' own server, which keeps what was said."""
        system, prompt = self.resolve_prompt(data)
        said = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else map(message_to_wire, prompt or ())
        messages = [{"role": "system", "content": system}] if system else []
        body = {"model": ctx.model, "messages": [*messages, *said]}
        async with httpx.AsyncClient(timeout=None) as client:
            answer = await client.post(
                f"{endpoint}/chat/completions", json=body, headers={"Authorization": f"Bearer {secret}"}
            )
        return ProgramResult(exit_code=int(answer.is_error), stdout="", stderr=answer.text if answer.is_error else "")


def environment(taskset: dict):
    """Return the environment of a taskset, whose seats are all played by this file's harness."""
    path = Path(taskset["id"])
    if path.suffix == ".py":
        sys.path.insert(0, str(path.absolute().parent))
        taskset = {**taskset, "id": path.stem}
    kind = env_config_type(taskset["id"])
    seat = {"harness": {"id": Path(__file__).stem}, "runtime": {"type": "subprocess"}}
    seats = dict.fromkeys(agent_config_fields(kind()), seat)
    return load_environment(kind.model_validate({"taskset": taskset, **seats}))


async def agent(record: dict, base_url: str, api_key: str) -> float:
    """Play the task that a record's answer names; return its reward, the mean over the seats of the episode."""
    subprocess.CACHE_DIR = Path.cwd()  # which is all that an agent may write to
    chosen = json.loads(record["answer"])
    env = environment(chosen["taskset"])
    (task,) = itertools.islice(env.taskset, chosen["task"], chosen["task"] + 1)
    client = vf.EvalClientConfig(base_url=base_url, api_key_var="OPENAI_API_KEY")
    async with env.serving():
        episode = await env.run_episode(task, vf.ModelContext(model="policy", client=client))
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if errors:
        raise RuntimeError(errors[0].message)
    return sum(trace.reward for trace in episode.traces) / len(episode.traces)


def absolute(word: str) -> str:
    """Return a word, whole if it is a file: agents run elsewhere."""
    return str(Path(word).absolute()) if Path(word).exists() else word


def main() -> None:
    """Print records of a taskset."""
    name, count, *options = sys.argv[1:]
    taskset = {"id": absolute(name)} | {key: absolute(value) for key, value in (one.split("=", 1) for one in options)}
    for number, task in enumerate(itertools.islice(environment(taskset).taskset, int(count))):
        answer = json.dumps({"taskset": taskset, "task": number})
        print(json.dumps({"question": task.data.prompt_text, "answer": answer}))


sys.path.insert(0, str(Path(__file__).absolute().parent))
if __name__ == "__main__":
    main()
