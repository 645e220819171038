"""One worker of the tool pool: ``python -m mindrlhf.tools.worker PARENT_PID``.

It speaks JSON lines. In: first ``{"tools", "timeout_s", "memory_limit_bytes"}``, then calls ``[name, arguments]``. Out:
first ``{"ready": names}`` or ``{"error": message}``, then ``[text, is failure]`` for each call. The time limit is
enforced from outside, by killing this process.
"""

import inspect
import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from mindrlhf.errors import UserError
from mindrlhf.rewards.worker import limit_memory, send_message, take_pipes
from mindrlhf.sandbox import time_limit
from mindrlhf.system.processes import adopt_orphans, die_with_parent
from mindrlhf.tools.registry import Tool, resolve

MAX_ANSWER_CHARS = 20_000


def main() -> int:
    """Serve until the pool closes its end of the pipe."""
    requests, responses = take_pipes()
    die_with_parent(int(sys.argv[1]))
    adopt_orphans()
    settings = json.loads(requests.readline())
    limit_memory(settings["memory_limit_bytes"])
    clock = time_limit.CallClock(os.memfd_create("mindrlhf-tool-clock"))
    clock.stop()
    time_limit.install(clock, settings["timeout_s"])
    try:
        tools = resolve(settings["tools"])
    except UserError as error:
        send_message(responses, {"error": str(error)})
        return 1
    send_message(responses, {"ready": list(tools)})
    for line in requests:
        name, arguments = json.loads(line)
        clock.begin(0, 0)
        answer = answer_call(tools, name, arguments)
        clock.stop()
        send_message(responses, answer)
    return 0


def answer_call(tools: Mapping[str, Tool], name: str, arguments: Mapping[str, Any]) -> tuple[str, bool]:
    """Call a tool; return the text of its answer, and whether it is an error."""
    if name not in tools:
        return f"Error: there is no tool '{name[:80]}'; there are {', '.join(tools)}", True
    try:
        inspect.signature(tools[name]).bind(**arguments)
    except TypeError as error:
        return f"Error: {name}: {error}"[:MAX_ANSWER_CHARS], True
    try:
        value = tools[name](**arguments)
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        return text[:MAX_ANSWER_CHARS], False
    except ValueError as error:  # the tool's own word on its arguments
        return f"Error: {error}"[:MAX_ANSWER_CHARS], True
    except BaseException as error:  # SystemExit too: a tool must not end its worker
        return f"Error: {type(error).__name__}: {error}"[:MAX_ANSWER_CHARS], True


if __name__ == "__main__":
    sys.exit(main())
