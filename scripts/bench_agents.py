#!/usr/bin/env python3
"""What the endpoint of agents costs.

    python scripts/bench_agents.py turns --tokenizer DIR [--turns 64]
    python scripts/bench_agents.py requests --model DIR [--episodes 500] [--turns 2] [--max-tokens 16]
        [--dtype bfloat16]

``turns``: the time that the endpoint takes for the prompts of a conversation, beside that of a client that renders and
encodes the whole conversation at every turn; no model is asked. ``requests``: requests per second of the endpoint with
a vLLM rollout server, beside vLLM's own server, by one client, which is a process of its own in both; with the
processor time of the servers, and the memory of the endpoint's process.
"""

import argparse
import asyncio
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import aiohttp
import numpy as np
import psutil

from mindrlhf.config.reward import ToolSection
from mindrlhf.config.rollout import RolloutSection
from mindrlhf.data.templates import CHAT, load_template
from mindrlhf.data.tokenizers import load_tokenizer
from mindrlhf.rollout.agents.episode import Episode, EpisodeLimits
from mindrlhf.rollout.agents.protocols import Call
from mindrlhf.rollout.agents.source import AgentEpisodes
from mindrlhf.rollout.chat_server import Prompts, Question
from mindrlhf.rollout.replicas import find_rollout_python, start_replicas
from mindrlhf.rollout.turn_texts import TurnTexts
from mindrlhf.rollout.types import Completion, GenerationRequest, SamplingParams
from mindrlhf.rollout.vllm_options import _DEFAULTS, _DEVICE_VARIABLES
from mindrlhf.system.processes import kill_tree
from mindrlhf.tools.agents import AgentResult

_START_TIMEOUT_S = 600.0
WORDS = "the agent reads a file and says what is in it, line by line; then it goes on to the next. "


def bench_turns(arguments: argparse.Namespace) -> None:
    """Print the seconds of both ways, and their ratio."""
    tokenizer = load_tokenizer(arguments.tokenizer)
    template = load_template(CHAT, tokenizer)
    prompts, texts = Prompts(tokenizer, template, "auto"), TurnTexts(tokenizer, template)
    reply = [*tokenizer.encode(WORDS * 4), tokenizer.eos_token_ids[0]]

    async def ask(question: Question) -> list[Completion]:
        return [Completion(0, 0, np.array(reply, np.int32), np.zeros(len(reply), np.float32), "stop", 0)]

    messages, chats = [], []
    for _ in range(arguments.turns):
        messages.append({"role": "user", "content": WORDS * 4})
        chats.append(tuple(messages))
        messages.append({"role": "assistant", "content": tokenizer.decode(reply)})
    limits = EpisodeLimits(arguments.turns, 1 << 40, 1 << 40)
    episode = Episode(GenerationRequest(0, (1,), 1, 0), 0, SamplingParams(1), prompts, texts, limits, ask)

    async def by_endpoint() -> None:
        for chat in chats:
            await episode.answer(Call(messages=chat))

    ours = seconds(lambda: asyncio.run(by_endpoint()))
    theirs = seconds(lambda: [prompts.ids(Call(messages=chat)) for chat in chats])
    (sequence, _), *rest = episode.sequences()
    assert not rest, "the turns are one conversation"
    length = len(sequence.prompt_ids) + len(sequence.token_ids)
    print(f"{arguments.turns} turns, {length} tokens: endpoint {ours:.3f} s, rendered anew {theirs:.3f} s")
    print(f"ratio {theirs / ours:.1f}")


def seconds(action: Callable[[], object]) -> float:
    """Return how long an action takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def peak_mib() -> float:
    """Return the most memory that this process has had, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def cpu_seconds(own: bool, leave_out: int) -> float:
    """Return the processor time of the processes that this one has started, but for one, and with its own."""
    me = psutil.Process()
    processes = [one for one in me.children(recursive=True) if one.pid != leave_out] + [me] * own
    return sum(sum(one.cpu_times()[:2]) for one in processes)


class Clients:
    """Runs agents in the client's process: one line with the key begins an episode, one line back ends it."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self.url = ""
        self._ended: dict[str, asyncio.Future] = {}
        self.failures: list[str] = []

    async def start(self) -> None:
        """Nothing: the address of the endpoint is not known yet."""

    async def begin(self) -> None:
        """Start the client."""
        words = (str(self._arguments.turns), str(self._arguments.max_tokens))
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, __file__, "client", self.url, *words, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._following = asyncio.ensure_future(self._follow())

    @property
    def pid(self) -> int:
        """Of the client."""
        return self._process.pid

    async def run(self, record: dict, key: str, timeout_s: float, clock: Callable = time.monotonic) -> AgentResult:
        """Run one episode."""
        self._ended[key] = asyncio.get_running_loop().create_future()
        self._process.stdin.write(f"{key}\n".encode())
        failure = await self._ended[key]
        if failure:
            self.failures.append(failure)
        return AgentResult(1.0, failure=failure)

    async def _follow(self) -> None:
        while line := await self._process.stdout.readline():
            key, _, failure = line.decode().strip().partition(" ")
            self._ended.pop(key).set_result(failure)
        for ended in self._ended.values():
            ended.set_result("the client died")

    async def close(self) -> None:
        """End the client."""
        self._following.cancel()
        self._process.kill()
        await self._process.wait()


def check(clients: Clients) -> None:
    """End the program where episodes have failed: their requests would count as answered."""
    if failures := clients.failures:
        raise SystemExit(f"{len(failures)} episodes failed, such as: {failures[0]}")


async def be_client(url: str, num_turns: int, max_tokens: int) -> None:
    """Read keys, and make an episode of each."""
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(3600)) as session:
        tasks = set()
        while line := await reader.readline():
            task = asyncio.ensure_future(_told(session, url, line.decode().strip(), num_turns, max_tokens))
            tasks.add(task)
            task.add_done_callback(tasks.discard)


async def _told(session: aiohttp.ClientSession, url: str, key: str, num_turns: int, max_tokens: int) -> None:
    """Make an episode, and tell how it ended."""
    failure = ""
    try:
        await _episode(session, url, key, num_turns, max_tokens)
    except Exception as error:
        failure = f"{type(error).__name__} {error}".replace("\n", " ")
    print(key, failure, flush=True)


async def _episode(session: aiohttp.ClientSession, url: str, key: str, num_turns: int, max_tokens: int) -> None:
    messages = [{"role": "user", "content": f"Anna has {zlib.crc32(key.encode())} apples."}]
    for _ in range(num_turns):
        body = {"model": "policy", "messages": messages, "max_tokens": max_tokens, "temperature": 1.0}
        headers = {"Authorization": f"Bearer {key}"}
        async with session.post(f"{url}/chat/completions", json=body, headers=headers) as response:
            answer = await response.json()
            assert response.status == 200, answer
        messages += [answer["choices"][0]["message"], {"role": "user", "content": "And then?"}]
        messages[-2] = {"role": "assistant", "content": messages[-2]["content"] or ""}


def bench_requests(arguments: argparse.Namespace) -> None:
    """Print requests per second of both, and their ratio."""
    count = arguments.episodes * arguments.turns
    found = {}
    measures = {"endpoint": _our_server, "vllm": _vllm_server}
    for name in [arguments.only] if arguments.only else measures:
        taken, cpu_s = measures[name](arguments)
        found[name] = count / taken, count / cpu_s
        print(f"{name}: {count} requests in {taken:.1f} s, {found[name][0]:.1f} requests/s,", end=" ")
        print(f"{cpu_s:.1f} s of processors, {found[name][1]:.1f} requests/s of one", flush=True)
    if not arguments.only:
        for what, (ours, theirs) in zip(("requests/s", "requests/s of one processor"), zip(*found.values())):
            print(f"ratio of {what} {ours / theirs:.2f}")


def _our_server(arguments: argparse.Namespace) -> tuple[float, float]:
    given = {"max_num_seqs": arguments.max_num_seqs, "num_threads": arguments.threads, "dtype": arguments.dtype}
    rollout = RolloutSection(**given, stall_timeout_s=60)
    tokenizer = load_tokenizer(arguments.model)
    tools = ToolSection(agent="unused", max_turns=arguments.turns, agents_at_once=4096, agent_gather_s=5.0)
    requests = [
        GenerationRequest(number, tuple(tokenizer.encode("Anna")), 1, seed=number)
        for number in range(arguments.episodes)
    ]
    with tempfile.TemporaryDirectory() as logs:
        generator = start_replicas(
            rollout,
            model_dir=arguments.model,
            max_model_len=512,
            seed=0,
            device="cpu",
            log_dir=Path(logs),
            load_weights=True,
            tokenizer_dir=arguments.model,
        )
        try:
            generator.wait_ready()
            print("the rollout server is up", flush=True)
            clients = Clients(arguments)
            template = load_template(CHAT, tokenizer)
            with AgentEpisodes(generator, tokenizer, template, tools, 256, clients) as source:
                clients.url = source.url
                source._in_loop(clients.begin()).result()
                sampling = SamplingParams(256, stop_token_ids=tokenizer.eos_token_ids)
                list(source.generate(requests[:8], sampling))
                found: list[Completion] = []
                me, before_s = psutil.Process(), cpu_seconds(True, clients.pid)
                before = me.memory_info().rss / 2**20
                taken = seconds(lambda: found.extend(source.generate(requests, sampling)))
                cpu_s, after = cpu_seconds(True, clients.pid) - before_s, me.memory_info().rss / 2**20
                whole = sum(one.num_turns == arguments.turns and not one.agent.failure for one in found)
                print(f"{whole} of {arguments.episodes} episodes are whole; the endpoint's process:", end=" ")
                print(f"{before:.0f} MiB before, {peak_mib():.0f} at most, {after:.0f} after")
                check(clients)
                return taken, cpu_s
        finally:
            generator.close()


def _vllm_server(arguments: argparse.Namespace) -> tuple[float, float]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    python = find_rollout_python()
    words = ["--model", arguments.model, "--served-model-name", "policy", "--port", str(port), "--host", "127.0.0.1"]
    words += ["--max-model-len", "512", "--max-num-seqs", str(arguments.max_num_seqs), "--dtype", arguments.dtype]
    words += ["--enforce-eager", "--disable-uvicorn-access-log"]
    # As our own server's: neither compiles at the first request, nor binds its threads to cores that others have.
    environment = os.environ | _DEFAULTS["cpu"] | _DEVICE_VARIABLES["cpu"]
    environment |= {"OMP_NUM_THREADS": str(arguments.threads), "VLLM_CPU_KVCACHE_SPACE": "1"}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [python, "-m", "vllm.entrypoints.openai.api_server", *words],
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            deadline_s = time.monotonic() + _START_TIMEOUT_S
            while True:
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                    break
                except OSError:
                    if process.poll() is not None or time.monotonic() > deadline_s:
                        raise SystemExit("vLLM's own server did not start") from None
                    time.sleep(0.5)
            return asyncio.run(_drive(arguments, f"http://127.0.0.1:{port}/v1"))
        except SystemExit as error:
            log.seek(0)
            raise SystemExit(f"{error}; its log ends:\n{log.read()[-4000:].decode(errors='replace')}") from None
        finally:
            kill_tree(process.pid)
            process.wait()


async def _drive(arguments: argparse.Namespace, url: str) -> tuple[float, float]:
    clients = Clients(arguments)
    clients.url = url
    await clients.begin()
    await asyncio.gather(*(clients.run({}, f"warm{number:039d}", 1e9) for number in range(8)))
    start, before_s = time.perf_counter(), cpu_seconds(False, clients.pid)
    await asyncio.gather(*(clients.run({}, f"{number:043d}", 1e9) for number in range(arguments.episodes)))
    taken, cpu_s = time.perf_counter() - start, cpu_seconds(False, clients.pid) - before_s
    await clients.close()
    check(clients)
    return taken, cpu_s


def main(words: Sequence[str]) -> None:
    """Measure what the command line asks for."""
    if words[:1] == ["client"]:
        asyncio.run(be_client(words[1], int(words[2]), int(words[3])))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    turns = commands.add_parser("turns")
    turns.add_argument("--tokenizer", required=True)
    turns.add_argument("--turns", type=int, default=64)
    turns.set_defaults(run=bench_turns)
    requests = commands.add_parser("requests")
    requests.add_argument("--model", required=True)
    requests.add_argument("--episodes", type=int, default=500)
    requests.add_argument("--turns", type=int, default=2)
    requests.add_argument("--max-tokens", type=int, default=16)
    requests.add_argument("--max-num-seqs", type=int, default=128)
    requests.add_argument("--threads", type=int, default=1)
    requests.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    requests.add_argument("--only", choices=("endpoint", "vllm"), help="one of the two")
    requests.set_defaults(run=bench_requests)
    arguments = parser.parse_args(words)
    arguments.run(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
