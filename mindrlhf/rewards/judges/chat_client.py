"""Asks an OpenAI-compatible server for a chat completion, with the standard library only."""

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from typing import Any

from mindrlhf.errors import Unavailable
from mindrlhf.rewards.availability import is_unserved
from mindrlhf.rewards.judges import accounting
from mindrlhf.sandbox import time_limit

MAX_REPLY_BYTES = 1 << 20
READ_SIZE_BYTES = 1 << 14
FIRST_PAUSE_S = 0.5
# Of the sample's time limit, left for going on: who is killed at its end has failed, who says so before is not scored.
MARGIN_S = 1.0
RETRIED_STATUSES = (408, 409, 425, 429, 500, 502, 503, 504)
MAX_SHOWN_CHARS = 200
MAX_USAGE = 10_000_000  # tokens of one request


class ChatError(RuntimeError):
    """The server's answer to this question is of no use; the message is one line that names it and the reason."""


class NoAnswer(ChatError, Unavailable):
    """The server was not reached, or answers nobody now; the message as of a ``ChatError``."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would carry the key to a host that the user has not named."""

    def redirect_request(self, *arguments: Any) -> None:
        return None


_opener = urllib.request.build_opener(_NoRedirect)


def ask(url: str, body: dict[str, Any], *, api_key_variable: str, request_timeout_s: float, num_retries: int) -> str:
    """Post ``body`` to ``url/chat/completions`` and return the text of the first choice.

    Busy and failing servers are asked again, after pauses that double or that the server asks for, as long as the
    sample's time limit allows. Attempts, tokens and seconds are counted (``accounting``).

    Raises:
        NoAnswer: the server was not reached in time, or something else answered in its place.
        ChatError: it refused this question, or cut its answer off.
    """
    remaining_s = time_limit.remaining_s()
    deadline_s = time.monotonic() + remaining_s - min(MARGIN_S, max(0.25, remaining_s / 4))
    request = _request(url, body, api_key_variable)
    pause_s = FIRST_PAUSE_S
    for attempt in range(num_retries + 1):
        timeout_s = min(request_timeout_s, deadline_s - time.monotonic())
        if timeout_s <= 0:
            raise NoAnswer(f"{url} gave no answer within the time limit of the sample")
        started_at_s = time.monotonic()
        accounting.add("requests")
        try:
            return _content(url, _post(request, timeout_s))
        except urllib.error.HTTPError as error:
            with error:
                reason = f"HTTP {error.code} {error.read(MAX_SHOWN_CHARS).decode(errors='replace')}".strip()
            if error.code not in RETRIED_STATUSES:
                kind = NoAnswer if is_unserved(error.code) else ChatError
                raise kind(f"{url} answered {reason}") from None
            wanted = error.headers.get("Retry-After", "")
            pause_s = max(pause_s, float(wanted)) if wanted.isascii() and wanted.isdigit() else pause_s
        except (OSError, http.client.HTTPException) as error:
            reason = str(error) or type(error).__name__
        finally:
            accounting.add("wait_s", time.monotonic() - started_at_s)
        if attempt == num_retries or time.monotonic() + pause_s >= deadline_s:
            break
        time.sleep(pause_s)
        pause_s *= 2
    raise NoAnswer(f"{url} gave no answer in {attempt + 1} attempts: {reason}")


def _request(url: str, body: dict[str, Any], api_key_variable: str) -> urllib.request.Request:
    if not url.startswith(("http://", "https://")):
        raise ChatError(f"{url!r} is no address of a server: give http://HOST:PORT/v1")
    headers = {"Content-Type": "application/json"}
    key = os.environ.get(api_key_variable, "")
    if key:
        headers["Authorization"] = f"Bearer {key}"
    return urllib.request.Request(f"{url.rstrip('/')}/chat/completions", json.dumps(body).encode(), headers)


def _post(request: urllib.request.Request, timeout_s: float) -> bytes:
    deadline_s = time.monotonic() + timeout_s
    with _opener.open(request, timeout=timeout_s) as response:
        reply = bytearray()
        # The timeout of the socket is for one read only: a server that sends a byte at a time would never meet it.
        while chunk := response.read1(READ_SIZE_BYTES):
            reply += chunk
            if len(reply) > MAX_REPLY_BYTES:
                raise ChatError(f"{request.full_url} answered more than {MAX_REPLY_BYTES} bytes")
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"the answer took longer than {timeout_s:.1f} s")
        if response.length:  # read1 does not mind a connection that ends early
            raise ConnectionError(f"the answer broke off {response.length} bytes before its end")
        return bytes(reply)


def _content(url: str, reply: bytes) -> str:
    shown, kind = repr(reply[:MAX_SHOWN_CHARS].decode(errors="replace")), NoAnswer
    try:
        answer = json.loads(reply)
        choice = answer["choices"][0]
        kind = ChatError  # it is the judge's, and has refused, say
        content = choice["message"]["content"]
    except (ValueError, LookupError, TypeError, RecursionError):
        content = None
    if not isinstance(content, str):
        raise kind(f"{url} answered no chat completion: {shown}")
    _count_tokens(answer)
    if isinstance(choice, dict) and choice.get("finish_reason") == "length":
        raise ChatError(f"{url} cut its answer off: raise the option max_reply_tokens; it ends {content[-100:]!r}")
    return content


def _count_tokens(answer: dict[str, Any]) -> None:
    """Count what the server says that it used; servers may leave that out, or say nonsense."""
    usage = answer.get("usage")
    for name, counted in (("prompt_tokens", "prompt_tokens"), ("completion_tokens", "reply_tokens")):
        number = usage.get(name) if isinstance(usage, dict) else None
        if type(number) is int and 0 <= number <= MAX_USAGE:
            accounting.add(counted, number)
