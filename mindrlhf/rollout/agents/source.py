"""Agents as a source of completions: each sample of a prompt is an episode of a user's program.

Calls are gathered until every agent that runs waits for the model, and go to the generator together, in an order that
does not depend on when they came: a run whose agents only compute so gives the same samples again, bit for bit. An
agent that is busy for longer keeps the others waiting for ``gather_s`` at most.
"""

import asyncio
import contextlib
import dataclasses
import os
import secrets
import shutil
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from mindrlhf.data.templates import PromptTemplate
from mindrlhf.data.tokenizers import Tokenizer
from mindrlhf.rollout.agents.episode import Episode, EpisodeLimits
from mindrlhf.rollout.chat_server import HttpServer, Keys, Prompts, Questions
from mindrlhf.rollout.turn_texts import TurnTexts
from mindrlhf.rollout.types import Cancelled, Completion, CompletionSource, GenerationRequest, SamplingParams
from mindrlhf.system import heartbeat
from mindrlhf.system.files import take_directory
from mindrlhf.system.processes import SERVER_PREFIX
from mindrlhf.tools.agents import AgentResult, AgentRunner

if TYPE_CHECKING:
    from mindrlhf.config.reward import ToolSection

MODEL_NAME = "policy"
_POLL_S, _SETTLED_S = 0.25, 0.005
_MAX_SHOWN = 500


class Runner(Protocol):
    """Whatever runs agents: ``tools.agents.AgentRunner``."""

    async def start(self) -> None:
        """Be ready to run some."""

    async def run(self, record: dict[str, Any], key: str, timeout_s: float) -> AgentResult:
        """Run one to its end; it raises nothing."""

    async def close(self) -> None:
        """End all that run."""


class AgentEpisodes:
    """Samples episodes of agents, which ask ``generator`` by way of an endpoint of this process.

    Args:
        generator: has the model.
        tokenizer: of the model.
        template: a chat template of the model.
        tools: the section of the config.
        longest_prompt: of the data, in tokens: with the longest response it bounds a prompt and its reply.
        runner: runs agents in place of ``AgentRunner``.

    Raises:
        UserError: the agent cannot be started.
    """

    def __init__(
        self,
        generator: CompletionSource,
        tokenizer: Tokenizer,
        template: PromptTemplate,
        tools: "ToolSection",
        longest_prompt: int,
        runner: Runner | None = None,
    ):
        self._generator = generator
        self._tools = tools
        self._longest_prompt = longest_prompt
        self._prompts = Prompts(tokenizer, template, tools.dialect)
        self._texts = TurnTexts(tokenizer, template)
        self._questions = Questions(max_waiting=1 << 20)
        self._keys = Keys()
        self._running: dict[Episode, Future] = {}
        self._ended: deque[Episode] = deque()
        self._is_cancelled = False
        # In the temporary directory, since the path of a Unix socket must be short.
        self._directory, self._lock = take_directory(Path(tempfile.gettempdir()), SERVER_PREFIX)
        path = str(self._directory / "e.sock")
        try:
            self._http = HttpServer(self._keys.find, MODEL_NAME, path=path)
        except BaseException:
            shutil.rmtree(self._directory, ignore_errors=True)
            os.close(self._lock)
            raise
        settings = {"is_open": tools.agent_open, "memory_limit_bytes": tools.memory_limit_mib << 20}
        settings["python"] = tools.agent_python
        self._runner = runner or AgentRunner(tools.agent, self._http.port, path, str(self._directory), **settings)
        try:
            self._in_loop(self._runner.start()).result()
        except BaseException:
            self.close()
            raise

    @property
    def url(self) -> str:
        """Where the endpoint is."""
        return self._http.url

    def __enter__(self) -> "AgentEpisodes":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End all agents and the endpoint."""
        with contextlib.suppress(Exception):
            self._in_loop(self._runner.close()).result(timeout=10)
        self._http.close()
        shutil.rmtree(self._directory, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def cancel(self) -> None:
        """Have ``generate``, in the thread that consumes it, raise ``Cancelled`` within a second, now and later."""
        self._is_cancelled = True
        self._generator.cancel()

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingParams) -> Iterator[Completion]:
        """Yield every episode as it ends: ``sum(r.num_samples)`` of them, in any order."""
        waiting = deque((request, index) for request in requests for index in range(request.num_samples))
        silent: list[Episode] = []
        try:
            while waiting or self._running or self._ended:
                while waiting and len(self._running) < self._tools.agents_at_once:
                    self._begin(*waiting.popleft(), sampling)
                self._wait()
                if questions := self._questions.take():
                    self._questions.generate(self._generator, questions)
                while self._ended:
                    episode = self._ended.popleft()
                    if episode.has_turns:
                        yield episode.completion()
                    else:
                        silent.append(episode)
            yield from self._placeholders(silent, sampling)
        finally:
            for future in [*self._running.values()]:
                future.cancel()
            self._questions.fail(self._questions.take(), "the rollout has been broken off")
            self._wait_until_none_runs()

    def _begin(self, request: GenerationRequest, sample_index: int, sampling: SamplingParams) -> None:
        limits = EpisodeLimits(
            max_calls=self._tools.max_turns,
            max_tokens=self._tools.agent_tokens or request.token_limit(sampling),
            max_length=self._longest_prompt + request.token_limit(sampling),
        )
        parts = (self._prompts, self._texts, limits, self._questions.ask)
        episode = Episode(request, sample_index, sampling, *parts)
        with self._questions.news:  # it may end at once
            self._running[episode] = self._in_loop(self._run(episode))

    async def _run(self, episode: Episode) -> None:
        """Run an episode to its end, whatever happens in it."""
        key = secrets.token_urlsafe(32)
        self._keys.add(key, episode)
        result = AgentResult(failure="it was broken off")
        try:
            result = await self._runner.run(self._record(episode), key, self._tools.agent_timeout_s)
        finally:
            result = episode.end(result)
            self._keys.remove(key)
            if result.failure:
                self._tell_failure(episode, result.failure)
            with self._questions.news:
                self._running.pop(episode, None)
                self._ended.append(episode)
                self._questions.news.notify_all()

    def _record(self, episode: Episode) -> dict[str, Any]:
        request = episode.request
        text = self._prompts.tokenizer.decode(list(request.prompt_ids), skip_special_tokens=False)
        return {**request.extra, "prompt": text, "answer": request.answer}

    @staticmethod
    def _tell_failure(episode: Episode, failure: str) -> None:
        place = f"sample {episode.sample_index} of prompt {episode.request.request_id}"
        print(f"mindrlhf: the agent of {place} failed: {failure[:_MAX_SHOWN]}", file=sys.stderr, flush=True)

    def _wait(self) -> None:
        """Return when an episode has ended, or all that run wait for the model, or some have for ``agent_gather_s``."""
        since_s = None
        with self._questions.news:
            while not self._ended and self._running:
                if self._is_cancelled:
                    raise Cancelled
                if count := len(self._questions.waiting):
                    since_s = since_s or time.monotonic()
                    if len({one.order[:2] for one in self._questions.waiting}) == len(self._running):
                        # An agent may ask several things at once.
                        self._questions.news.wait(_SETTLED_S)
                        if len(self._questions.waiting) == count:
                            return
                        continue
                    if time.monotonic() - since_s >= self._tools.agent_gather_s:
                        return
                heartbeat.tick()
                left_s = _POLL_S if since_s is None else self._tools.agent_gather_s + since_s - time.monotonic()
                self._questions.news.wait(max(0.001, min(_POLL_S, left_s)))

    def _placeholders(self, silent: Sequence[Episode], sampling: SamplingParams) -> Iterator[Completion]:
        """Yield the episodes that have asked nothing, with one token each, on which nothing trains."""
        requests = [
            dataclasses.replace(one.request, request_id=number, num_samples=1, max_tokens=1)
            for number, one in enumerate(silent)
        ]
        for completion in self._generator.generate(requests, sampling) if requests else ():
            yield silent[completion.request_id].completion(completion)

    def _wait_until_none_runs(self) -> None:
        with self._questions.news:
            self._questions.news.wait_for(lambda: not self._running, timeout=10)
            self._ended.clear()

    def _in_loop(self, coroutine: Any) -> Future:
        return asyncio.run_coroutine_threadsafe(coroutine, self._http.loop)
