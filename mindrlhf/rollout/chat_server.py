"""HTTP for whoever asks our own rollout server: agents in training, and verifiers that ask a judge.

It speaks the paths of ``agents.protocols`` on 127.0.0.1, and on the loopbacks of agents, which are not ours. What a
request may ask, and what is kept of it, its key decides. One thread does all of HTTP; the thread that owns the
generator takes the questions that wait together (``Questions``).
"""

import asyncio
import contextlib
import hashlib
import hmac
import json
import logging
import socket
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from aiohttp import web

from mindrlhf.config.reward import AUTO_DIALECT
from mindrlhf.data.control_tokens import control_token_pattern, neutralised_value
from mindrlhf.data.handlers import RecordError
from mindrlhf.data.templates import CHAT, PromptTemplate, load_template, record_options
from mindrlhf.data.tokenizers import Tokenizer
from mindrlhf.errors import RunFailure, UserError
from mindrlhf.rollout.agents import protocols
from mindrlhf.rollout.agents.forms import THOUGHT, grammar_of
from mindrlhf.rollout.agents.protocols import Answer, BadQuestion, Call, Reply, error_body
from mindrlhf.rollout.agents.responses import RESPONSES
from mindrlhf.rollout.partial import NOTHING, followed_by
from mindrlhf.rollout.samples import derived_seed
from mindrlhf.rollout.types import Completion, CompletionSource, GenerationRequest, SamplingParams
from mindrlhf.system.ports import listen
from mindrlhf.tools.agents import BACKLOG
from mindrlhf.tools.calls import called, dialect_of

PROTOCOLS = {
    "/v1/chat/completions": protocols.CHAT,
    "/v1/completions": protocols.COMPLETION,
    "/v1/messages": protocols.ANTHROPIC,
    "/v1/v1/messages": protocols.ANTHROPIC,  # of clients that put /v1 behind a base that has it already
    "/v1/responses": RESPONSES,
}
MODEL_NAME = "policy"  # of agents
MAX_BODY_BYTES = 8 << 20
MAX_WAITING = 1024
DEFAULT_REPLY_TOKENS = 1024
# How long a client may take to send its question or to read its answer.
READ_TIMEOUT_S = 30.0
_POLL_S = 0.5
_STOP_TIMEOUT_S = 5.0
_TIMEOUTS = (TimeoutError, asyncio.TimeoutError)  # two until Python 3.11
# The end of what a turn follows, in which the template may have opened a thought.
PROMPT_END = 200


# Of requests that are no HTTP aiohttp would write a traceback each.
_quiet = logging.getLogger("mindrlhf.http")
_quiet.addHandler(logging.NullHandler())
_quiet.propagate = False


class Refused(Exception):
    """A request that is not answered: the status and the message say why."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


REFUSALS = (Refused, ValueError, RecursionError, RecordError, RunFailure)


def as_refused(error: Exception) -> Refused:
    """Return one of ``REFUSALS`` as what a client gets."""
    if isinstance(error, Refused):
        return error
    return Refused(503 if isinstance(error, RunFailure) else 400, str(error))


async def settled() -> None:
    """Return when it is known, of connections that have ended, that they have."""
    for _ in range(8):  # turns of the loop: one reads, one closes
        await asyncio.sleep(0)


class Caller(Protocol):
    """The caller behind a key."""

    num_refused: int  # calls that were answered with an error

    async def answer(self, call: Call) -> Answer:
        """Answer one request.

        Raises:
            BadQuestion, RecordError: it cannot be answered.
            Refused: it may not be.
            RunFailure: the generator failed.
        """


@dataclass(eq=False)
class Question:
    """Generation asked for by one call; ``order`` is its rank among those that wait together."""

    prompt_ids: tuple[int, ...]
    num_samples: int
    max_tokens: int
    sampling: SamplingParams
    seed: int
    order: tuple = ()
    owner: Any = None  # who asks
    segment: int = 0  # tokens that a sample is given at a time; 0: all
    samples: dict[int, Completion] = field(default_factory=dict)  # by index, complete or begun
    future: "asyncio.Future[None] | None" = None

    @property
    def is_answered(self) -> bool:
        """True once all samples are complete."""
        return len(self.samples) == self.num_samples and all(one.finish_reason for one in self.samples.values())

    def requests(self) -> list[tuple[int, GenerationRequest]]:
        """Return what is to be generated next, each with the index of its first sample."""
        limit = min(self.max_tokens, self.segment or self.max_tokens)
        if len(self.samples) < self.num_samples:  # or the generator failed among their first segments
            self.samples.clear()
            return [(0, GenerationRequest(0, self.prompt_ids, self.num_samples, self.seed, max_tokens=limit))]
        found = []
        for index, begun in sorted(self.samples.items()):
            if not begun.finish_reason:
                length = len(begun.token_ids)
                seed = derived_seed(self.seed, index, length)
                ids = (*self.prompt_ids, *begun.token_ids.tolist())
                limit = max(1, min(self.segment or self.max_tokens, self.max_tokens - length))
                found.append((index, GenerationRequest(0, ids, 1, seed, max_tokens=limit, num_begun=length)))
        return found

    def add(self, completion: Completion) -> None:
        """Take a sample, or the next segment of it."""
        if self.segment:
            before = self.samples.get(completion.sample_index) or replace(NOTHING, sample_index=completion.sample_index)
            completion = followed_by(before, completion, self.max_tokens)
        self.samples[completion.sample_index] = completion


class Questions:
    """Questions that wait for the generator: the thread of HTTP puts them in, the generator's takes them out."""

    def __init__(self, max_waiting: int = MAX_WAITING) -> None:
        self.news = threading.Condition()
        self.waiting: list[Question] = []
        self._max_waiting = max_waiting

    async def ask(self, question: Question) -> list[Completion]:
        """Return the samples of a question, in the order of their indices."""
        if not question.is_answered:
            question.future = asyncio.get_running_loop().create_future()
            with self.news:
                if len(self.waiting) >= self._max_waiting:
                    raise Refused(429, f"{self._max_waiting} questions wait")
                self.waiting.append(question)
                self.news.notify_all()
            try:
                await question.future
            finally:
                with self.news, contextlib.suppress(ValueError):
                    self.waiting.remove(question)
        return [sample for _, sample in sorted(question.samples.items())]

    def take(self, owners: Collection[Any] | None = None) -> list[Question]:
        """Return what waits now (of some alone), in the order of the questions; those whose clients have gone are left
        out."""
        with self.news:
            taken = [one for one in self.waiting if owners is None or one.owner in owners]
            self.waiting = [one for one in self.waiting if owners is not None and one.owner not in owners]
        return sorted((one for one in taken if not one.future.done()), key=lambda one: one.order)

    def generate(self, generator: CompletionSource, questions: Sequence[Question]) -> None:
        """Answer questions, those of one way of sampling together. Those that have segments, and of which something is
        missing after this one, wait again.

        Raises:
            RunFailure: the generator failed; whoever asked is told, but where questions wait again.
        """
        try:
            for sampling in dict.fromkeys(question.sampling for question in questions):
                own = [question for question in questions if question.sampling == sampling]
                parts = [(question, *part) for question in own for part in question.requests()]
                requests = [replace(request, request_id=number) for number, (*_, request) in enumerate(parts)]
                longest = max(one.max_tokens for one in own)
                for completion in generator.generate(requests, replace(sampling, max_tokens=longest)):
                    question, first, _ = parts[completion.request_id]
                    question.add(replace(completion, sample_index=first + completion.sample_index))
                    if question.is_answered:
                        _settle(question.future, None)
        except BaseException as error:
            self.fail([one for one in questions if not one.segment], f"the generator failed: {error}")
            raise
        finally:
            with self.news:
                under_way = [one for one in questions if one.segment and not one.is_answered]
                self.waiting += [one for one in under_way if not one.future.done()]

    def fail(self, questions: Collection[Question], reason: str) -> None:
        """Tell those who asked why there is no answer."""
        for question in questions:
            _settle(question.future, RunFailure(reason))


def _settle(future: "asyncio.Future[None]", error: Exception | None) -> None:
    def settle() -> None:
        if not future.done():
            future.set_result(None) if error is None else future.set_exception(error)

    with contextlib.suppress(RuntimeError):  # the loop is closed
        future.get_loop().call_soon_threadsafe(settle)


class HttpServer:
    """Answers HTTP at ``url`` until ``close``.

    Args:
        find: returns who has a key, None where nobody has.
        name: of the model, as replies give it; requests may name any.
        port: of 127.0.0.1; 0 takes any that is free, of `run.ports` in a run.

    Raises:
        UserError: the port is taken.
    """

    def __init__(self, find: Callable[[str], Caller | None], name: str, port: int = 0):
        self._find = find
        self._name = name
        self.loop = asyncio.new_event_loop()
        try:
            if port:
                listener = socket.create_server(("127.0.0.1", port), backlog=BACKLOG)
            else:
                listener = listen("127.0.0.1", backlog=BACKLOG)
        except OSError as error:
            self.loop.close()
            raise UserError(f"cannot listen on port {port}: {error.strerror}; give another --port, or 0") from None
        self.port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/v1"
        started: Future = Future()
        self._thread = threading.Thread(target=self._run, args=(listener, started), daemon=True, name="http")
        self._thread.start()
        started.result()

    def close(self) -> None:
        """Stop listening and hang up on everybody."""
        if self.loop.is_closed():
            return
        self.loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(_STOP_TIMEOUT_S)

    def _run(self, listener: socket.socket, started: Future) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_until_complete(self._serve(listener, started))
            tasks = asyncio.all_tasks(self.loop)
            for task in tasks:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        finally:
            self.loop.close()

    async def listen(self, listener: socket.socket, key: str) -> asyncio.Server:
        """Take connections of a listener too, on which nothing is asked but with one key."""
        # Without the number asyncio takes 100, whatever the socket had: of more at once some would be reset.
        return await self.loop.create_server(partial(self._connect, key), sock=listener, backlog=BACKLOG)

    async def _serve(self, listener: socket.socket, started: Future) -> None:
        self._ended = asyncio.Event()
        self._http = web.Server(self._answer, request_factory=self._request, handler_cancellation=True)
        server = await self.listen(listener, "")
        started.set_result(None)
        await self._ended.wait()
        server.close()
        for protocol in [*self._http.connections]:
            if protocol.transport is not None:
                protocol.transport.abort()

    def _connect(self, key: str) -> "_Connection":
        options = {"access_log": None, "auto_decompress": False, "logger": _quiet}
        connection = _Connection(self._http, loop=self.loop, **options)
        connection.key = key
        return connection

    def _request(self, message, payload, protocol, writer, task) -> web.BaseRequest:
        return web.BaseRequest(message, payload, protocol, writer, task, self.loop, client_max_size=MAX_BODY_BYTES)

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request; what goes wrong with it costs its connection alone."""
        connection, key = request.protocol, _given_key(request)
        connection.unread = None  # whoever asks again has read the last reply
        call, protocol, caller = None, PROTOCOLS.get(request.path), self._find(key)
        try:
            if caller is None:
                raise Refused(401, "the key is missing or wrong")
            if connection.key not in ("", key):
                raise Refused(403, "the key is another agent's")
            if request.method == "GET" and request.path == "/v1/models":
                status, content = 200, {"object": "list", "data": [{"id": self._name, "object": "model"}]}
            elif protocol is None or request.method != "POST":
                raise Refused(404, f"there are POST {', '.join(PROTOCOLS)}, not {request.method} {request.path[:100]}")
            else:
                if (request.content_length or 0) > MAX_BODY_BYTES:
                    raise web.HTTPRequestEntityTooLarge(MAX_BODY_BYTES, request.content_length)
                body = await asyncio.wait_for(request.read(), READ_TIMEOUT_S)
                call = protocol.read(json.loads(body))
                if request.headers.get("x-stainless-retry-count", "0") != "0":
                    call = replace(call, is_retry=True)
                answer = await caller.answer(call)
                connection.unread, connection.is_written = answer.unread, False
                status, content = 200, protocol.write(self._name, call, answer)
        except REFUSALS as error:  # of a body that is no JSON, too
            status, content = as_refused(error).status, error_body(str(error))
        except web.HTTPRequestEntityTooLarge:
            status, content = 413, error_body(f"the body is longer than {MAX_BODY_BYTES} bytes")
        except _TIMEOUTS:
            status, content = 408, error_body(f"the body did not come within {READ_TIMEOUT_S:g} s")
        owner = self._find(connection.key or key)
        if status != 200 and owner is not None:
            owner.num_refused += 1
        if status == 200 and call is not None and call.stream:
            texts = protocol.stream(self._name, call, answer)
            return await self._write(request, 200, "text/event-stream", "".join(texts))
        return await self._write(request, status, "application/json", json.dumps(content))

    async def _write(self, request: web.BaseRequest, status: int, kind: str, text: str) -> web.StreamResponse:
        response = web.Response(status=status, body=text.encode(errors="replace"), content_type=kind)
        if status in (401, 408, 413):
            response.force_close()  # what it goes on sending is not read
        try:
            await response.prepare(request)
            await asyncio.wait_for(response.write_eof(), READ_TIMEOUT_S)
            request.protocol.is_written = True
            if not request.keep_alive:  # who hangs up first would not see a reset
                request.transport.write_eof()
                await asyncio.sleep(READ_TIMEOUT_S)  # it is cancelled when the client hangs up
        except _TIMEOUTS:  # it does not read
            request.protocol.break_off()
        return response


class _Connection(web.RequestHandler):
    """A client's connection, which notices that the client has gone with its last reply unread."""

    key = ""  # the only one that may be used here; "" means any
    unread: Callable[[], None] | None = None  # takes back the last reply
    is_written = True  # the whole of it

    def connection_lost(self, exc: BaseException | None) -> None:
        """See ``asyncio.Protocol``: a peer that closes with bytes unread, or before they come, resets."""
        peer = self.transport.get_extra_info("socket")
        is_left = not self.is_written or self.transport.get_write_buffer_size() > 0
        if exc is not None or is_left or peer.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._take_back()
        super().connection_lost(exc)

    def break_off(self) -> None:
        """Hang up on a client that does not read."""
        self._take_back()
        if self.transport is not None:
            self.transport.abort()

    def _take_back(self) -> None:
        if self.unread is not None:
            self.unread()


def _given_key(request: web.BaseRequest) -> str:
    given = request.headers.get("Authorization", "")
    return given.removeprefix("Bearer ") if given else request.headers.get("x-api-key", "")


class Prompts:
    """Messages to tokens and tokens to replies, by the chat template and tokenizer of a model."""

    def __init__(self, tokenizer: Tokenizer, template: PromptTemplate, dialect: str):
        self.tokenizer = tokenizer
        self.template = template
        self._dialect = dialect_of(template.source) if dialect == AUTO_DIALECT else dialect
        self._control_tokens = control_token_pattern(tokenizer.control_tokens)

    def as_data(self, value: Any) -> Any:
        """Return what a client says with control tokens written apart, or its texts could end their turn."""
        return value if self._control_tokens is None else neutralised_value(value, self._control_tokens)

    def options(self, call: Call) -> dict[str, Any]:
        """Return the variables of the template that a call sets.

        Raises:
            RecordError: one is not the client's to set.
        """
        return self.as_data(record_options({"chat_template_kwargs": dict(call.options)}))

    def ids(self, call: Call) -> list[int]:
        """Return the prompt of a call as it stands, in tokens.

        Raises:
            RecordError: the template refuses it.
            BadQuestion: a token that the model has not.
        """
        if isinstance(call.prompt, str):
            return self.tokenizer.encode(call.prompt)
        if call.prompt is not None:
            if bad := [token for token in call.prompt if not 0 <= token < self.tokenizer.vocab_size]:
                raise BadQuestion(f"the prompt has the token {bad[0]}; there are 0 to {self.tokenizer.vocab_size - 1}")
            return list(call.prompt)
        messages = [self.as_data(dict(one)) for one in call.messages]
        text = self.template.render_messages(messages[: len(messages) - call.is_continued], self.options(call))
        return self.tokenizer.encode(self.begun(call, text))

    def begun(self, call: Call, text: str) -> str:
        """Return the text in front of a turn with what the client has the model go on with, which is no thought."""
        if not call.is_continued:
            return text
        is_thought = text.rstrip().endswith(THOUGHT)
        return text + ("\n</think>\n\n" if is_thought else "") + self.as_data(call.messages[-1]["content"])

    def grammar(self, call: Call, prompt_end: Sequence[int]) -> str:
        """Return the grammar that the reply to a call keeps to, see ``forms``; "" where it asks for none."""
        prompt = self.tokenizer.decode(list(prompt_end), skip_special_tokens=False).rstrip()
        may_think = THOUGHT in self.template.source and not prompt.endswith("</think>")
        return grammar_of(call.form, self._dialect, thinks=prompt.endswith(THOUGHT), may_think=may_think)

    def reply(self, call: Call, completion: Completion, prompt_end: Sequence[int]) -> Reply:
        """Return a sample as a client reads it: without its end token, and without the client's stop string."""
        ids, logprobs = completion.token_ids.tolist(), completion.logprobs.tolist()
        text, reason, calls, ended_by = self.tokenizer.decode(ids), completion.finish_reason, (), ""
        if reason == "stop" and call.stop and ids[-1] not in self.tokenizer.eos_token_ids:
            place, ended_by = min(((text.find(stop), stop) for stop in call.stop if stop in text), default=(None, ""))
            text = text[:place]
        prompt = self.tokenizer.decode(list(prompt_end), skip_special_tokens=False)
        if call.reads_calls and reason == "stop":
            raw = self.tokenizer.decode(ids, skip_special_tokens=False)
            said, found = called(raw, self._dialect, prompt)
            if found:
                text = _without(said, [self.tokenizer.decode([one], skip_special_tokens=False) for one in ids[-1:]])
                calls = tuple(
                    {
                        "id": f"call{hashlib.sha256(f'{prompt}{raw}{number}'.encode()).hexdigest()[:8]}",
                        "type": "function",
                        "function": {"name": one.name, "arguments": json.dumps(dict(one.arguments))},
                    }
                    for number, one in enumerate(found)
                )
        tokens = tuple(self.tokenizer.decode([one], skip_special_tokens=False) for one in ids) if call.logprobs else ()
        thought = ""
        if call.prompt is None and (prompt.rstrip().endswith(THOUGHT) or text.lstrip().startswith(THOUGHT)):
            thought, _, text = text.partition("</think>")
            thought, text = thought.lstrip().removeprefix(THOUGHT).strip(), text.lstrip()
        ids, logprobs = tuple(ids), tuple(logprobs)
        return Reply(text, thought, calls, "tool_calls" if calls else reason, ids, logprobs, tokens, ended_by)


def _without(text: str, ends: Sequence[str]) -> str:
    for end in ends:
        text = text.removesuffix(end)
    return text.strip("\n")


class ChatServer:
    """Serves one model's completions at ``url`` until ``close``; ``run`` answers, in the caller's thread.

    Args:
        generator: has the model.
        tokenizer: of the model, with a chat template.
        name: of the model.
        max_model_len: longest prompt and reply together, in tokens.
        port: see ``HttpServer``.
        api_key: what requests must bear; "" lets every process of this machine ask.
        template_options: values of variables of the chat template; a request's ``chat_template_kwargs``, as vLLM's
            server takes them, come before them.

    Raises:
        UserError: the tokenizer has no chat template, that reads no such variable, or the port is taken.
    """

    def __init__(
        self,
        generator: CompletionSource,
        tokenizer: Tokenizer,
        name: str,
        max_model_len: int,
        port: int = 0,
        api_key: str = "",
        template_options: Mapping[str, Any] | None = None,
    ):
        self._generator = generator
        template = load_template(CHAT, tokenizer, options=template_options)
        self._prompts = Prompts(tokenizer, template, dialect_of(template.source))
        self._max_model_len = max_model_len
        self._questions = Questions()
        self._is_closed, self.num_refused = False, 0
        self._http = HttpServer(lambda key: self if _is_right(key, api_key) else None, name, port)
        self.url = self._http.url

    def run(self) -> None:
        """Answer questions until ``close`` is called, from another thread.

        Raises:
            RunFailure: the generator is gone for good; what waits is answered with the reason.
        """
        while not self._is_closed:
            with self._questions.news:
                self._questions.news.wait_for(lambda: self._questions.waiting or self._is_closed, _POLL_S)
            if questions := self._questions.take():
                self._questions.generate(self._generator, questions)

    def close(self) -> None:
        """Stop listening. Questions that wait are answered with an error."""
        self._is_closed = True
        with self._questions.news:
            self._questions.news.notify_all()
        self._questions.fail(self._questions.take(), "the server is closing")
        self._http.close()

    async def answer(self, call: Call) -> Answer:
        prompts = self._prompts
        if call.form:
            raise BadQuestion("response_format is not supported here, nor a required tool_choice: it is for agents")
        prompt_ids = await asyncio.get_running_loop().run_in_executor(None, prompts.ids, call)
        room = self._max_model_len - len(prompt_ids)
        if room < 1:
            raise BadQuestion(f"the prompt has {len(prompt_ids)} tokens, {self._max_model_len} is for it and reply")
        limit = min(call.max_tokens or DEFAULT_REPLY_TOKENS, room)
        ends = prompts.tokenizer.eos_token_ids
        top_k = max(0, int(call.sampling.get("top_k", 0)))
        chosen = (call.sampling.get("temperature", 0), call.sampling.get("top_p", 1))
        sampling = SamplingParams(0, *map(float, chosen), top_k, ends, call.stop)
        question = Question(tuple(prompt_ids), call.num_samples, limit, sampling, call.seed)
        completions = await self._questions.ask(question)
        replies = [prompts.reply(call, one, prompt_ids[-PROMPT_END:]) for one in completions]
        return Answer(tuple(replies), tuple(prompt_ids))


def _is_right(key: str, api_key: str) -> bool:
    return not api_key or hmac.compare_digest(key.encode(errors="replace"), api_key.encode())
