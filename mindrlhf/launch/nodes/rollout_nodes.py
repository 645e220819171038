"""Nodes for rollout only, as node 0 knows them: they run no ranks, and come and go while the run goes on.

Node 0 compares them with itself as it does with all nodes, and tells those that pass where rank 0 listens: the
address at which rank 0 accepts them (:mod:`mindrlhf.rollout.newcomers`). Its key, one for each start of the
ranks, both derive from the secret, so that it never travels.
"""

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mindrlhf.launch.failure_report import say
from mindrlhf.system.handshake import derived_key
from mindrlhf.system.ports import find_free_port
from mindrlhf.system.rpc import LOST, Link

ROLLOUT_ROLE = "rollout"
LISTENER_VARIABLE = "MINDRLHF_ROLLOUT_LISTENER"
_NUMBER_BYTES = 16
_PURPOSE = "rollout nodes"


@dataclass(frozen=True)
class ListenerAddress:
    """The address at which rank 0 accepts rollout-only nodes.

    Attributes:
        host, port: the address that all nodes reach node 0 by, and a port of this start.
        key: hexadecimal; of this start.
    """

    host: str
    port: int
    key: str

    @classmethod
    def of_order(cls, order: Mapping[str, Any], secret: bytes) -> "ListenerAddress":
        """Return what node 0's order to start means to those who know the secret."""
        return cls(str(order["host"]), int(order["port"]), derived_key(secret, _PURPOSE, str(order["number"])).hex())


class RolloutNodes:
    """The launchers of nodes for rollout only, on node 0.

    Args:
        host: address of node 0, on which rank 0 may listen as well.
        secret: that all know.
    """

    def __init__(self, host: str, secret: bytes) -> None:
        self._host = host
        self._secret = secret
        self._names: dict[Link, str] = {}
        self._order: dict[str, Any] | None = None  # while the ranks run
        self._is_over = False

    def __len__(self) -> int:
        return len(self._names)

    def accept(self, channel: Link, host: str, lines: Sequence[str]) -> None:
        """Accept one that has come, or turn it away for the reasons in ``lines``."""
        if lines:
            say("\n  ".join([f"rollout node {host} cannot take part:", *lines]))
            return channel.send("refused", lines=list(lines))
        self._names[channel] = host
        say(f"rollout node {host} has come")
        if self._order is not None:
            channel.send("go", **self._order)
        return None

    def hear(self, channel: Link, message: Mapping[str, Any]) -> None:
        if message["kind"] not in ("leaving", LOST) or channel not in self._names:
            return
        host = self._names.pop(channel)
        if message["kind"] == "leaving":
            channel.close()
        if not self._is_over:
            say(f"rollout node {host} {message.get('how', 'has left')}")

    def open(self) -> dict[str, str]:
        """Have them start their servers, as the ranks start; return the variables by which rank 0 finds its address."""
        self._order = {
            "host": self._host,
            "port": find_free_port(self._host),
            "number": secrets.token_hex(_NUMBER_BYTES),
        }
        for channel in self._names:
            channel.send("go", **self._order)
        return {LISTENER_VARIABLE: json.dumps(asdict(ListenerAddress.of_order(self._order, self._secret)))}

    def shut(self) -> None:
        """Have them end their servers, since the ranks have ended."""
        self._order = None
        for channel in self._names:
            channel.send("stop", line="the ranks have ended", code=0)

    def say_goodbye(self, code: int) -> None:
        """Tell them that the run is over; they close their connections."""
        self._is_over = True
        for channel in self._names:
            channel.send("over", code=code)

    def close(self) -> None:
        for channel in self._names:
            channel.close()
        self._names = {}
