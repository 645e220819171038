"""A process of a node that works for rank 0 on another."""

import contextlib
import json
from collections.abc import Mapping
from typing import Any

from mindrlhf.system.child import PIPE, Child, module_words

_END_LIMIT_S = 5.0


class NodeHelper:
    """Starts ``main`` of a module, which reads a line with its settings, then one that says where rank 0 listens. When
    its standard input ends, so does it: with whoever has started it."""

    def __init__(self, module: str, settings: Mapping[str, Any]):
        self._process = Child(module_words(module), input=PIPE, output=2)  # of the rank: its log
        self._tell(settings)

    def connect(self, host: str, port: int, token: str, node: int) -> None:
        """Have it connect to rank 0, which accepts when all have been asked to."""
        self._tell({"host": host, "port": port, "token": token, "node": node})

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._process.input.close()
        if self._process.wait(_END_LIMIT_S) is None:
            self._process.kill()

    def _tell(self, message: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError):  # it has ended: rank 0 waits for it in vain, and says so
            self._process.input.write(f"{json.dumps(message)}\n".encode())
            self._process.input.flush()
