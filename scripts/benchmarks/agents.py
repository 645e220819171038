"""Requests a second of the agents' endpoint, `mindrlhf rewards serve`, beside vLLM's own server.

Episodes of two turns, all at once, by one client; a random model of examples/sanity, one thread. The endpoint is a
rollout server and the process in front of it, which keeps token ids and log-probabilities.
"""

import asyncio
import contextlib
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import aiohttp
from harness import ROOT, environment, make_sanity, mindrlhf, run

from mindrlhf.rollout.pool import find_rollout_python

NUM_TURNS, MAX_TOKENS, START_TIMEOUT_S = 2, 16, 600.0
TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


def measure(directory: Path, smallest: bool, repeats: int) -> Iterator[dict]:
    make_sanity(directory)
    words = ["--config", directory / "model" / "config.json", "--tokenizer", directory / "model"]
    run(mindrlhf("weights", "random", *words, "--output", directory / "random"))
    (directory / "random" / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    num_episodes = 16 if smallest else 500
    rates: dict[str, float] = {}
    for name in ("endpoint", "vLLM"):
        with _server(name, directory) as url:
            seconds = min(asyncio.run(_drive(url, num_episodes, str(directory / "random"))) for _ in range(repeats))
        rates[name] = num_episodes * NUM_TURNS / seconds
        ratio = rates["endpoint"] / rates[name]
        yield {"server": name, "episodes": num_episodes, "requests/s": rates[name], "endpoint is": ratio}


@contextlib.contextmanager
def _server(name: str, directory: Path) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    model, variables = directory / "random", environment()
    if name == "endpoint":
        words = ["--port", port, "--max-length", 512, "--dtype", "float32", "--log-dir", directory]
        command = mindrlhf("rewards", "serve", model, *words)
    else:
        words = ["--host", "127.0.0.1", "--port", port, "--max-model-len", 512, "--dtype", "float32", "--enforce-eager"]
        command = [find_rollout_python(), "-m", "vllm.entrypoints.openai.api_server", "--model", model, *words]
        variables |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        variables["VLLM_NO_USAGE_STATS"] = "1"
    with (directory / f"{name}.log").open("w+", encoding="utf-8") as log:
        process = subprocess.Popen(
            [*map(str, command)], cwd=ROOT, env=variables, stdout=log, stderr=log, start_new_session=True
        )
        try:
            yield _wait(process, port, directory / f"{name}.log")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 15)
            process.wait(60)


def _wait(process: subprocess.Popen, port: int, log: Path) -> str:
    end = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < end and process.poll() is None:
        if found := re.search(r"serving .* at (http\S+?);? ", log.read_text(encoding="utf-8")):
            return found[1]
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
            return f"http://127.0.0.1:{port}/v1"
        time.sleep(0.5)
    sys.exit(f"benchmark: a server did not start:\n{log.read_text(encoding='utf-8')[-3000:]}")


async def _drive(url: str, num_episodes: int, model: str) -> float:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(3600)) as session:
        await _episode(session, url, model)  # warm-up
        start = time.perf_counter()
        await asyncio.gather(*(_episode(session, url, model) for _ in range(num_episodes)))
        return time.perf_counter() - start


async def _episode(session: aiohttp.ClientSession, url: str, model: str) -> None:
    messages = [{"role": "user", "content": "anna"}]
    for _ in range(NUM_TURNS):
        body = {"model": model, "messages": messages, "max_tokens": MAX_TOKENS, "temperature": 1.0}
        async with session.post(f"{url}/chat/completions", json=body) as response:
            answer = await response.json()
            assert response.status == 200, answer
        reply = answer["choices"][0]["message"]["content"] or ""
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "and then"}]
