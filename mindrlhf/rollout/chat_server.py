"""Chat completions over HTTP from our own rollout server: a judge, or any model that verifiers ask.

It answers the part of OpenAI's protocol that ``rewards.judges.chat_client`` speaks, on 127.0.0.1 only. Threads of the
HTTP server put questions on a queue; the thread that owns the generator answers all that wait together.
"""

import hmac
import json
import math
import queue
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, BinaryIO

from mindrlhf.data.control_tokens import control_token_pattern, neutralised, neutralised_value
from mindrlhf.data.handlers import Example, Message, RecordError
from mindrlhf.data.templates import CHAT, load_template, record_options
from mindrlhf.data.tokenizers import Tokenizer
from mindrlhf.errors import RunFailure, UserError
from mindrlhf.rollout.types import CompletionSource, GenerationRequest, SamplingParams
from mindrlhf.system.handshake import Unproven

ROLES = ("system", "user", "assistant")
MAX_HEAD_BYTES = 64 << 10
MAX_BODY_BYTES = 8 << 20
MAX_LENGTH_DIGITS = 10
MAX_WAITING = 1024
DEFAULT_REPLY_TOKENS = 1024
MAX_SEED = (1 << 63) - 1
# How long a client may take to send its question, and how many may be about it at a time.
READ_TIMEOUT_S = 30.0
MAX_CLIENTS = 256
_POLL_S = 0.5


class BadQuestion(ValueError):
    """A request that cannot be answered; the message says why."""


@dataclass(frozen=True)
class Question:
    """One request, as the generator takes it."""

    prompt_ids: tuple[int, ...]
    max_tokens: int
    temperature: float
    seed: int
    answer: Future = field(default_factory=Future, compare=False)  # of (token ids, finish reason)


class ChatServer:
    """Serves one model's chat completions at ``url`` until ``close``; ``run`` answers, in the caller's thread.

    Args:
        generator: has the model.
        tokenizer: of the model, with a chat template.
        name: of the model, as replies give it; requests may name any.
        max_model_len: longest prompt and reply together, in tokens.
        port: 0 takes any that is free.
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
        self._tokenizer = tokenizer
        self._template = load_template(CHAT, tokenizer, options=template_options)
        self._control_tokens = control_token_pattern(tokenizer.control_tokens)
        self._max_model_len = max_model_len
        self._questions: queue.Queue[Question] = queue.Queue(MAX_WAITING)
        self._is_closed = False
        try:
            self._http = _Server(("127.0.0.1", port), _handler(self, name, api_key))
        except OSError as error:
            raise UserError(f"cannot listen on port {port}: {error.strerror}; give another --port, or 0") from None
        self.url = f"http://127.0.0.1:{self._http.server_port}/v1"
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def run(self) -> None:
        """Answer questions until ``close`` is called, from another thread.

        Raises:
            RunFailure: the generator is gone for good; what waits is answered with the reason.
        """
        while not self._is_closed:
            try:
                questions = [self._questions.get(timeout=_POLL_S)]
            except queue.Empty:
                continue
            while not self._questions.empty():
                questions.append(self._questions.get_nowait())
            for temperature in dict.fromkeys(question.temperature for question in questions):
                self._generate([one for one in questions if one.temperature == temperature], temperature)

    def close(self) -> None:
        """Stop listening. Questions that wait are answered with an error."""
        self._is_closed = True
        self._http.shutdown()
        self._http.server_close()
        while not self._questions.empty():
            self._questions.get_nowait().answer.set_exception(RunFailure("the server is closing"))

    def ask(self, body: Any) -> tuple[str, str, int, int]:
        """Answer one request's body; return text, finish reason, and tokens of prompt and reply.

        Raises:
            BadQuestion: the body is not as expected, or its prompt too long.
            RunFailure: the generator failed.
            queue.Full: too many questions wait.
        """
        question = self._question(body)
        self._questions.put_nowait(question)
        token_ids, finish_reason = question.answer.result()
        return self._tokenizer.decode(token_ids), finish_reason, len(question.prompt_ids), len(token_ids)

    def _generate(self, questions: Sequence[Question], temperature: float) -> None:
        requests = [
            GenerationRequest(number, one.prompt_ids, 1, one.seed, max_tokens=one.max_tokens)
            for number, one in enumerate(questions)
        ]
        longest = max(one.max_tokens for one in questions)
        sampling = SamplingParams(longest, temperature, stop_token_ids=self._tokenizer.eos_token_ids)
        try:
            for completion in self._generator.generate(requests, sampling):
                answer = (completion.token_ids.tolist(), completion.finish_reason)
                questions[completion.request_id].answer.set_result(answer)
        except BaseException as error:
            for question in questions:
                if not question.answer.done():
                    question.answer.set_exception(RunFailure(f"the generator failed: {error}"))
            raise

    def _question(self, body: Any) -> Question:
        if not isinstance(body, dict):
            raise BadQuestion("the body is no JSON object")
        prompt_ids = self._prompt_ids(body.get("messages"), body)
        room = self._max_model_len - len(prompt_ids)
        if room < 1:
            raise BadQuestion(f"the prompt has {len(prompt_ids)} tokens, {self._max_model_len} is for it and reply")
        max_tokens = body.get("max_tokens") or DEFAULT_REPLY_TOKENS
        temperature, seed = body.get("temperature", 0), body.get("seed", 0)
        if type(max_tokens) is not int or max_tokens < 1:
            raise BadQuestion(f"max_tokens is {max_tokens!r}: it must be an integer of at least 1")
        if type(temperature) not in (int, float) or not 0 <= temperature < math.inf:
            raise BadQuestion(f"temperature is {temperature!r}: it must be a number of at least 0")
        if type(seed) is not int or not 0 <= seed <= MAX_SEED:
            raise BadQuestion(f"seed is {seed!r}: it must be an integer from 0 to {MAX_SEED}")
        for name, only in (("n", 1), ("stream", False), ("tools", None)):
            if body.get(name, only) not in (only, None):
                raise BadQuestion(f"{name} is not supported here")
        return Question(prompt_ids, min(max_tokens, room), float(temperature), seed)

    def _prompt_ids(self, messages: Any, body: dict[str, Any]) -> tuple[int, ...]:
        if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
            raise BadQuestion(f"messages must be a list of objects with role ({', '.join(ROLES)}) and text content")
        example = Example(tuple(Message(one["role"], one["content"]) for one in messages), answer="")
        try:
            options = record_options(body)
            if self._control_tokens is not None:  # or the graded text could end its own turn
                example = neutralised(example, self._control_tokens)
                options = neutralised_value(options, self._control_tokens)
            return tuple(self._tokenizer.encode(self._template.render(example, options)))
        except RecordError as error:
            raise BadQuestion(str(error)) from None


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and value.get("role") in ROLES and isinstance(value.get("content"), str)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = MAX_CLIENTS  # as many reward workers may ask at once

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self.asking = Unproven(MAX_CLIENTS)
        super().__init__(address, handler)

    def process_request(self, request: socket.socket, client_address: Any) -> None:
        """Answer by a thread, as long as not too many others are still being asked."""
        self.asking.add(request)
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Hang up on clients that send their question byte by byte; called about twice a second."""
        self.asking.hang_up_after(2 * READ_TIMEOUT_S)

    def shutdown_request(self, request: socket.socket) -> None:
        """Forget a client that has its answer, or has gone."""
        self.asking.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a client that has gone; of anything else, what it was."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Head:
    """The first lines of a request, bounded together: http.server itself takes a hundred of 64 KiB each."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._num_left = MAX_HEAD_BYTES

    def readline(self, size: int) -> bytes:
        line = self._file.readline(min(size, self._num_left))
        self._num_left -= len(line)
        return line

    def close(self) -> None:
        self._file.close()


def _handler(server: ChatServer, name: str, api_key: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = READ_TIMEOUT_S

        def setup(self) -> None:
            super().setup()
            self.body, self.rfile = self.rfile, _Head(self.rfile)

        def do_POST(self) -> None:
            status, answer = self._answer()
            content = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def _answer(self) -> tuple[int, dict[str, Any]]:
            if self.path != "/v1/chat/completions":
                return 404, _error(f"there is only /v1/chat/completions, not {self.path[:100]}")
            if api_key and not hmac.compare_digest(self._given_key(), f"Bearer {api_key}".encode()):
                return 401, _error("the key is missing or wrong")
            length = self.headers.get("Content-Length", "")
            if not length.isdecimal() or len(length) > MAX_LENGTH_DIGITS or int(length) > MAX_BODY_BYTES:
                return 413, _error(f"the body must have a Content-Length of at most {MAX_BODY_BYTES} bytes")
            try:
                body = self.body.read(int(length))
                self.server.asking.discard(self.connection)
                text, finish_reason, num_prompt, num_reply = server.ask(json.loads(body))
            except (ValueError, RecursionError) as error:  # of a body that is no JSON, too
                return 400, _error(str(error))
            except TimeoutError:
                return 408, _error(f"the body did not come within {READ_TIMEOUT_S:g} s")
            except queue.Full:
                return 429, _error(f"{MAX_WAITING} questions wait")
            except RunFailure as error:
                return 503, _error(str(error))
            choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish_reason}
            usage = {
                "prompt_tokens": num_prompt,
                "completion_tokens": num_reply,
                "total_tokens": num_prompt + num_reply,
            }
            return 200, {"object": "chat.completion", "model": name, "choices": [choice], "usage": usage}

        def _given_key(self) -> bytes:
            return self.headers.get("Authorization", "").encode(errors="replace")

        def log_message(self, *arguments: object) -> None:
            pass  # one line for each question would bury everything else

    return Handler


def _error(message: str) -> dict[str, Any]:
    return {"error": {"message": message}}
