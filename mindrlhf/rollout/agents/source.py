"""Agents as a source of completions: each sample of a prompt is an episode of a user's program.

Calls are gathered until every agent that runs waits for the model, and go to the generator together, in an order that
does not depend on when they came: a run whose agents only compute so gives the same samples again, bit for bit. An
agent that is busy for longer keeps the others waiting for ``gather_s`` at most.

In partial rollout a round gathers calls once and gives each a segment of tokens. Agents whose calls are complete then
go on, the others wait for the next round, and for no agent does time pass between rounds.
"""

import asyncio
import contextlib
import os
import secrets
import shutil
import sys
import tempfile
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindrlhf.data.templates import PromptTemplate
from mindrlhf.data.tokenizers import Tokenizer
from mindrlhf.rollout.agents.episode import Episode, EpisodeLimits
from mindrlhf.rollout.agents.nodes import RemoteAgents
from mindrlhf.rollout.chat_server import MODEL_NAME, HttpServer, Prompts, Questions, settled
from mindrlhf.rollout.turn_texts import TurnTexts
from mindrlhf.rollout.types import Cancelled, Completion, CompletionSource, GenerationRequest, SamplingParams
from mindrlhf.system import heartbeat
from mindrlhf.system.files import take_directory
from mindrlhf.system.handshake import SignedConnection
from mindrlhf.system.processes import SERVER_PREFIX
from mindrlhf.system.terminal import visible
from mindrlhf.tools.agents import AgentResult, AgentRunner

if TYPE_CHECKING:
    from mindrlhf.config.reward import ToolSection

_POLL_S, _SETTLED_S = 0.25, 0.005
_MAX_SHOWN = 500


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

    continues = True  # episodes that a request of partial rollout has begun

    def __init__(
        self,
        generator: CompletionSource,
        tokenizer: Tokenizer,
        template: PromptTemplate,
        tools: "ToolSection",
        longest_prompt: int,
        runner: AgentRunner | None = None,
    ):
        self._generator = generator
        self._tools = tools
        self._longest_prompt = longest_prompt
        self._prompts = Prompts(tokenizer, template, tools.dialect)
        self._texts = TurnTexts(tokenizer, template)
        self._questions = Questions(max_waiting=1 << 20)
        self._keys: dict[str, Episode] = {}
        self._running: dict[Episode, Future] = {}
        self._under_way: dict[int, Episode] = {}  # of partial rollout, by the number of the response
        self._rested_s, self._rests_since_s = 0.0, None  # between rounds, when no agent's time passes
        self._is_cancelled = False
        self._directory, self._lock = take_directory(Path(tempfile.gettempdir()), SERVER_PREFIX)
        try:
            self._http = HttpServer(self._keys.get, MODEL_NAME)
        except BaseException:
            shutil.rmtree(self._directory, ignore_errors=True)
            os.close(self._lock)
            raise
        settings = {"is_open": tools.agent_open, "memory_limit_bytes": tools.memory_limit_mib << 20}
        settings["python"] = tools.agent_python
        places = (self._http.port, str(self._directory), self._http.listen)
        runner = runner or AgentRunner(tools.agent, *places, **settings)
        # Of each node, with the number of agents that run there.
        self._runners: dict[AgentRunner | RemoteAgents, int] = {runner: 0}
        try:
            self._in_loop(runner.start()).result()
        except BaseException:
            self.close()
            raise

    @property
    def url(self) -> str:
        return self._http.url

    def __enter__(self) -> "AgentEpisodes":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def admit(self, connection: SignedConnection, name: str) -> None:
        """Have agents run on another node, too; see :class:`mindrlhf.rollout.agents.nodes.RemoteAgents`."""
        remote = RemoteAgents(connection, name, self._keys.get, self._runners.pop)
        self._runners[remote] = 0
        self._in_loop(remote.start()).result()

    def close(self) -> None:
        for runner in [*self._runners]:
            with contextlib.suppress(Exception):
                self._in_loop(runner.close()).result(timeout=10)
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
        """Yield every episode as it ends: ``sum(r.num_samples)`` of them, in any order.

        Of partial rollout each episode, with a segment more; where it goes on, the finish reason is "".
        """
        if any(request.begun is not None for request in requests):
            yield from self._go_on(requests, sampling)
            return
        waiting = deque((request, index) for request in requests for index in range(request.num_samples))
        own: dict[Episode, None] = {}
        silent: list[Episode] = []
        try:
            while waiting or own:
                while waiting and len(own) < self._tools.agents_at_once:
                    own[self._begin(*waiting.popleft(), sampling)] = None
                self._wait(own)
                if questions := self._questions.take(own):
                    self._questions.generate(self._generator, questions)
                for episode in [one for one in own if one not in self._running]:
                    del own[episode]
                    if episode.has_turns:
                        yield episode.completion()
                    else:
                        silent.append(episode)
            yield from self._placeholders(silent, sampling)
        finally:
            for future in [future for one in own if (future := self._running.get(one))]:
                future.cancel()
            self._questions.fail(self._questions.take(own), "the rollout has been broken off")
            with self._questions.news:
                self._questions.news.wait_for(lambda: not any(one in self._running for one in own), timeout=10)

    def _go_on(self, requests: Sequence[GenerationRequest], sampling: SamplingParams) -> Iterator[Completion]:
        """Do one round. Where there are more episodes than may run at a time, the last ones do not begin yet."""
        if self._rests_since_s is not None:
            self._rested_s += time.monotonic() - self._rests_since_s
            self._rests_since_s = None
        own: dict[Episode, GenerationRequest] = {}
        try:
            for request in requests:
                episode = self._under_way.get(request.response)
                if episode is None and len(self._under_way) < self._tools.agents_at_once:
                    named = replace(request, request_id=request.response, max_tokens=0)
                    episode = self._under_way[request.response] = self._begin(named, 0, sampling)
                if episode is None:
                    yield replace(request.begun, request_id=request.request_id, sample_index=0)
                else:
                    own[episode] = request
            self._wait(own, is_round=True)
            for episode in own:
                episode.end_replay()
            if questions := self._questions.take(own):
                for question in questions:
                    question.segment = own[question.owner].max_tokens
                self._questions.generate(self._generator, questions)
                self._wait(own, is_round=True)
            ended = {one for one in own if one not in self._running}
            silent = [one for one in own if one in ended and not one.has_turns]
            placeholders = [*self._placeholders(silent, sampling)]
            for episode, request in own.items():
                if episode in ended:
                    del self._under_way[request.response]
                if episode.has_turns or episode not in ended:
                    found = episode.completion() if episode in ended else episode.under_way()
                    yield replace(found, request_id=request.request_id)
            by_name = {request.response: request.request_id for request in own.values()}
            yield from (replace(one, request_id=by_name[one.request_id]) for one in placeholders)
        finally:
            self._rests_since_s = time.monotonic()

    def _clock(self) -> float:
        """Return the seconds that count for agents of partial rollout."""
        return (self._rests_since_s or time.monotonic()) - self._rested_s

    def _begin(self, request: GenerationRequest, sample_index: int, sampling: SamplingParams) -> Episode:
        limits = EpisodeLimits(
            max_calls=self._tools.max_turns,
            max_tokens=self._tools.agent_tokens or request.token_limit(sampling),
            max_length=self._longest_prompt + request.token_limit(sampling),
        )
        parts = (self._prompts, self._texts, limits, self._questions.ask)
        episode = Episode(request, sample_index, sampling, *parts)
        with self._questions.news:  # it may end at once
            self._running[episode] = self._in_loop(self._run(episode))
        return episode

    async def _run(self, episode: Episode) -> None:
        """Run an episode to its end, whatever happens in it."""
        key = secrets.token_urlsafe(32)
        self._keys[key] = episode
        result = AgentResult(failure="it was broken off")
        clock = time.monotonic if episode.request.begun is None else self._clock
        runner = min(self._runners, key=self._runners.get)
        self._runners[runner] += 1
        try:
            result = await runner.run(self._record(episode), key, self._tools.agent_timeout_s, clock)
            await settled()
        finally:
            if runner in self._runners:  # its node is not lost
                self._runners[runner] -= 1
            result = episode.end(result)
            del self._keys[key]
            if result.failure:
                self._tell_failure(episode, result.failure)
            with self._questions.news:
                self._running.pop(episode, None)
                self._questions.news.notify_all()

    def _record(self, episode: Episode) -> dict[str, Any]:
        request = episode.request
        text = self._prompts.tokenizer.decode(list(request.prompt_ids), skip_special_tokens=False)
        record = {**request.extra, "prompt": text, "answer": request.answer}
        return {name: value for name, value in record.items() if name != "answer" or name in self._tools.agent_sees}

    @staticmethod
    def _tell_failure(episode: Episode, failure: str) -> None:
        place = f"sample {episode.sample_index} of prompt {episode.request.request_id}"
        print(f"mindrlhf: the agent of {place} failed: {visible(failure[:_MAX_SHOWN])}", file=sys.stderr, flush=True)

    def _wait(self, own: Collection[Episode], is_round: bool = False) -> None:
        """Return when an episode has ended, or all that run wait for the model, or some have for ``agent_gather_s``; in
        a round an end counts as waiting, and agents that are run anew come to where they were."""
        since_s = None
        with self._questions.news:
            while True:
                running = {one for one in own if one in self._running}
                has_ended = len(running) < len(own)
                if not running or has_ended and not is_round:
                    return
                if self._is_cancelled:
                    raise Cancelled
                count = len(self._questions.waiting)
                asking = [one.owner for one in self._questions.waiting if one.owner in running]
                busy = running.difference(asking)
                if asking or has_ended:
                    since_s = since_s or time.monotonic()
                    if not busy:
                        # An agent may ask several things at once.
                        self._questions.news.wait(_SETTLED_S)
                        if len(self._questions.waiting) == count:
                            return
                        continue
                    late = time.monotonic() - since_s >= self._tools.agent_gather_s
                    if late and not any(one.is_replaying for one in busy):
                        return
                heartbeat.tick()
                left_s = _POLL_S if since_s is None else self._tools.agent_gather_s + since_s - time.monotonic()
                self._questions.news.wait(max(0.001, min(_POLL_S, left_s)))

    def _placeholders(self, silent: Sequence[Episode], sampling: SamplingParams) -> Iterator[Completion]:
        """Yield the episodes that have asked nothing, with one token each, on which nothing trains."""
        requests = [
            replace(one.request, request_id=number, num_samples=1, max_tokens=1, begun=None)
            for number, one in enumerate(silent)
        ]
        for completion in self._generator.generate(requests, sampling) if requests else ():
            yield silent[completion.request_id].completion(completion)

    def _in_loop(self, coroutine: Any) -> Future:
        return asyncio.run_coroutine_threadsafe(coroutine, self._http.loop)
