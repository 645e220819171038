"""Renders chat templates as transformers does, in a process of its own under limits: templates are programs of others.

The process loads ``transformers.utils.chat_template_utils``, the module behind ``apply_chat_template``, without the
package around it (0.2 s instead of 0.7 s). It serves all templates of the process that started it and lives as long;
one that passes a limit costs a new process. Beside Jinja's sandbox, which is part of what transformers does, it reads
Python's own modules and nothing else where the kernel has Landlock.
"""

import atexit
import contextlib
import ctypes
import importlib.util
import json
import math
import os
import random
import resource
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from types import ModuleType
from typing import Any

from mindrlhf.errors import UserError
from mindrlhf.sandbox.limits import landlock
from mindrlhf.system.hollow import hollow_packages

MAX_CPU_S = 3  # of one compilation or rendering
MAX_MEMORY_BYTES = 512 << 20  # on top of what the loaded modules take
MAX_TEXT_CHARS = 1 << 24
_MAX_REASON_CHARS = 500
_PR_SET_NO_NEW_PRIVS = 38

_lock = threading.Lock()
_process: subprocess.Popen | None = None
_owner = 0  # the process that has started it: a fork starts its own


class TemplateFailure(Exception):
    """A template cannot be compiled or rendered; the message is the reason, in one line."""


def find_variables(source: str) -> frozenset[str]:
    """Compile a template and return the names that it may read: also those that it sets itself, but not always before.

    Raises:
        TemplateFailure: it has a fault, or passes a limit.
        UserError: transformers is not installed.
    """
    with _lock:
        answer = _ask({"source": source}, 1)[0]
    if isinstance(answer, TemplateFailure):
        raise answer
    return frozenset(answer)


def render(source: str, chats: Sequence[tuple[Sequence[Mapping], Mapping[str, Any]]]) -> list[str | TemplateFailure]:
    """Return the text of each chat, ready for the assistant's next turn (without its variable ``add_generation_prompt``
    being false), or why there is none: the template refuses or fails, passes a limit, or gives too long a text.

    Args:
        source: the template, in Jinja.
        chats: pairs of the messages, with role and content as ``apply_chat_template`` takes them, and of what else the
            template can read: JSON values by name. Among these ``strftime_now`` is a date in ISO 8601, which the
            template gets in place of the clock.

    Raises:
        UserError: transformers is not installed.
    """
    answers: list[str | TemplateFailure] = []
    with _lock:
        while len(answers) < len(chats):
            rest = chats[len(answers) :]
            answers += _ask({"source": source, "chats": rest}, len(rest))
    return answers


def _ask(request: dict[str, Any], num_answers: int) -> list[Any]:
    """Return the answers to one request: all, or those before the end of the process and the reason of its end."""
    global _process, _owner
    if _process is None or _owner != os.getpid():
        _process, _owner = _start(), os.getpid()
    answers: list[Any] = []
    try:
        _process.stdin.write(json.dumps(request).encode() + b"\n")
        _process.stdin.flush()
        while len(answers) < num_answers and (line := _process.stdout.readline()).endswith(b"\n"):
            answer = json.loads(line)
            answers.append(TemplateFailure(answer["failure"]) if "failure" in answer else answer["result"])
    except BrokenPipeError:
        pass
    except BaseException:  # an interrupt: what it still answers would be taken for the answer to something else
        _stop()
        raise
    if len(answers) < num_answers:
        answers.append(TemplateFailure(_reason_of_end(_stop())))
    return answers


def _start() -> subprocess.Popen:
    if importlib.util.find_spec("transformers") is None:
        raise UserError("chat templates need transformers, which is not installed: pip install transformers")
    return subprocess.Popen(
        [sys.executable, "-m", "mindrlhf.sandbox.template_process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "USE_TORCH": "0"},  # PyTorch would be imported for the name of a type
        start_new_session=True,  # so that an interrupt from the keyboard does not reach it
    )


@atexit.register
def _stop() -> int:
    """End the process, if this one has started it; return its exit code."""
    global _process
    process, _process = _process, None
    if process is None or _owner != os.getpid():
        return 0
    process.kill()
    code = process.wait()
    process.stdout.close()
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    return code


def _reason_of_end(code: int) -> str:
    if code == -signal.SIGXCPU:
        return f"it takes more than {MAX_CPU_S} s of processor time"
    return f"its process ended with {signal.Signals(-code).name if code < 0 else f'exit code {code}'}"


def _serve() -> None:
    """Answer requests, lines of JSON on standard input, until it is closed: a line for each answer."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    hollow_packages("transformers", "transformers.utils")
    from transformers.utils import chat_template_utils

    _give_up_rights()
    for line in sys.stdin.buffer:
        for answer in _answers(chat_template_utils, **json.loads(line)):
            replies.write(json.dumps(answer).encode() + b"\n")
            replies.flush()


def _give_up_rights() -> None:
    with open("/proc/self/statm", encoding="ascii") as file:
        size_bytes = int(file.read().split()[0]) * resource.getpagesize()
    for limit, value in ((resource.RLIMIT_AS, size_bytes + MAX_MEMORY_BYTES), (resource.RLIMIT_CORE, 0)):
        most = resource.getrlimit(limit)[1]
        value = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.setrlimit(limit, (value, value))
    if landlock.version():
        ctypes.CDLL(None).prctl(_PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), 0, 0, 0)
        modules = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
        landlock.restrict(modules, (), allows_network=False)  # Jinja imports some when it needs them


def _answers(library: ModuleType, source: str, chats: Sequence[tuple] | None = None) -> Iterator[dict[str, Any]]:
    calls = [(_find_variables, ())] if chats is None else [(_render, chat) for chat in chats]
    for function, arguments in calls:
        _allow_time()
        try:
            answer = {"result": function(library, source, *arguments)}
        except MemoryError:
            answer = {"failure": f"it takes more than {MAX_MEMORY_BYTES >> 20} MiB of memory"}
        # Compilers and expressions can raise anything.
        except Exception as error:
            answer = {"failure": _reason(error)}
        yield answer


def _allow_time() -> None:
    """Have the kernel end this process when a call takes too long, be it within one operation."""
    soft, most = math.ceil(time.process_time()) + MAX_CPU_S, resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (soft if most == resource.RLIM_INFINITY else min(soft, most), most))


def _find_variables(library: ModuleType, source: str) -> list[str]:
    import jinja2.meta

    tree = library._compile_jinja_template(source).environment.parse(source)
    clock = {"strftime_now"} & {node.name for node in tree.find_all(jinja2.nodes.Name)}  # to Jinja a global name
    return sorted(jinja2.meta.find_undeclared_variables(tree) | clock)


def _render(library: ModuleType, source: str, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
    random.seed(0)  # Jinja has a filter that chooses, and prompts must repeat
    variables["strftime_now"] = datetime.fromisoformat(variables["strftime_now"]).strftime
    (text,), _ = library.render_jinja_template(
        [messages], chat_template=source, **{"add_generation_prompt": True, **variables}
    )
    if len(text) > MAX_TEXT_CHARS:
        raise ValueError(f"{len(text)} characters, above {MAX_TEXT_CHARS}")
    return text


def _reason(error: Exception) -> str:
    place = f"line {error.lineno}" if getattr(error, "lineno", None) else type(error).__name__
    return " ".join(f"{place}: {getattr(error, 'message', error)}"[:_MAX_REASON_CHARS].split())


if __name__ == "__main__":
    _serve()
