"""A process of a node that works for rank 0 on another."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

_END_LIMIT_S = 5.0


class NodeHelper:
    """Starts ``python -m module``, which reads a line with its settings, then one that says where rank 0 listens. When
    its standard input ends, so does it: with whoever has started it."""

    def __init__(self, module: str, settings: Mapping[str, Any]):
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module],
            stdin=subprocess.PIPE,
            stdout=2,  # of the rank: its log
            text=True,
            start_new_session=True,
        )
        self._tell(settings)

    def connect(self, host: str, port: int, token: str, node: int) -> None:
        """Have it connect to rank 0, which accepts when all have been asked to."""
        self._tell({"host": host, "port": port, "token": token, "node": node})

    def close(self) -> None:
        """End it, with what it has started."""
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _tell(self, message: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError):  # it has ended: rank 0 waits for it in vain, and says so
            self._process.stdin.write(f"{json.dumps(message)}\n")
            self._process.stdin.flush()
