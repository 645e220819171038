"""Environments of `openenv` 0.10 as an agent: each reply of the model is an action.

    .venv-openenv/bin/python examples/agents/openenv_agent.py SERVER COUNT [KEY=VALUE ...] > train.jsonl

prints records, `question` and `answer`, of resets with the seeds from 0 on and further arguments. As `tools.agent:
examples/agents/openenv_agent.py:agent`, with `tools.agent_python`, it plays a record's
episode. A server is path/to/file.py:NAME of an app that `openenv.core.env_server.create_app` has made, which is served
on the loopback for this episode alone, or the address of one that runs (with `tools.agent_open: true`).

The model reads an observation's text if it has one field of text, else all of it as JSON. It writes an action as JSON,
or the text of the one field that an action must have.
"""

import asyncio
import contextlib
import importlib.util
import json
import socket
import sys
from pathlib import Path

import httpx
import uvicorn
from openenv import GenericEnvClient

ASK_TIMEOUT_S = 3600.0


@contextlib.asynccontextmanager
async def serving(server: str):
    """Yield the address of a server."""
    if server.startswith(("http://", "https://")):
        yield server
        return
    path, _, name = server.rpartition(":")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    listener = socket.create_server(("127.0.0.1", 0))
    app = uvicorn.Server(uvicorn.Config(getattr(module, name), log_level="error"))
    task = asyncio.ensure_future(app.serve([listener]))
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        app.should_exit = True
        await task


def shown(observation: dict) -> str:
    """Return what the model reads of an observation."""
    fields = {name: value for name, value in observation.items() if name not in ("done", "reward", "metadata")}
    texts = [value for value in fields.values() if isinstance(value, str)]
    return texts[0] if len(texts) == len(fields) == 1 else json.dumps(fields)


def action_of(reply: str, schema: dict) -> dict:
    """Return the action that a reply is."""
    with contextlib.suppress(ValueError):
        if isinstance(action := json.loads(reply), dict):
            return action
    required = schema.get("required", [])
    if len(required) != 1:
        raise ValueError(f"an action has the fields {', '.join(required)}, and the reply is no JSON object: {reply!r}")
    return {required[0]: reply}


async def play(server: str, reset: dict, ask) -> float:
    """Play one episode; return the sum of its rewards. ``ask`` is told the messages and returns a reply."""
    async with serving(server) as url:
        async with httpx.AsyncClient() as http:
            schema = (await http.get(f"{url}/schema")).raise_for_status().json()["action"]
        async with GenericEnvClient(base_url=url) as env:
            result = await env.reset(**reset)
            messages, total = [], 0.0
            while not result.done:
                messages.append({"role": "user", "content": shown(result.observation)})
                reply = await ask(messages)
                if reply is None:
                    break
                messages.append({"role": "assistant", "content": reply})
                result = await env.step(action_of(reply, schema))
                total += result.reward or 0.0
    return total


async def agent(record: dict, base_url: str, api_key: str) -> float:
    """Play the episode that a record's answer names; it ends where the model may write no more."""
    chosen = json.loads(record["answer"])
    headers = {"Authorization": f"Bearer {api_key}"}
    async with httpx.AsyncClient(base_url=base_url, headers=headers, timeout=ASK_TIMEOUT_S) as client:

        async def ask(messages):
            answer = await client.post("/chat/completions", json={"model": "policy", "messages": messages})
            if answer.status_code in (400, 403):  # too long, or a budget is used up
                return None
            return answer.raise_for_status().json()["choices"][0]["message"]["content"] or ""

        return await play(chosen["server"], chosen["reset"], ask)


def absolute(word: str) -> str:
    """Return a word, whole if it is a file: agents run elsewhere."""
    return str(Path(word).absolute()) if Path(word).exists() else word


async def main() -> None:
    """Print records of a server."""
    server, count, *options = sys.argv[1:]
    given = {key: absolute(value) for key, value in (one.split("=", 1) for one in options)}
    path, colon, name = server.rpartition(":")
    for seed in range(int(count)):
        chosen = {"server": absolute(path) + colon + name, "reset": {**given, "seed": seed}}
        question: list[str] = []

        async def ask(messages, question=question):
            question.append(messages[0]["content"])

        await play(server, chosen["reset"], ask)
        print(json.dumps({"question": question[0], "answer": json.dumps(chosen)}))


if __name__ == "__main__":
    asyncio.run(main())
