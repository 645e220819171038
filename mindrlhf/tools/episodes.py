"""Episodes of environments in tool processes, each in the same process from its beginning to its end."""

import json
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mindrlhf.tools.calls import ToolAnswer, ToolCall
from mindrlhf.tools.environments import PREFIX
from mindrlhf.tools.pool import ToolPool

if TYPE_CHECKING:
    from mindrlhf.config.reward import ToolSection


@dataclass(frozen=True)
class Step:
    """Result of one action."""

    observation: str
    reward: float
    is_over: bool
    failure: str = ""  # why there is no more to come, where the environment broke down
    is_unscored: bool = False  # by no doing of the action


class EpisodePool:
    """Runs episodes in ``num_workers`` processes under the limits of ``ToolPool``; one that hangs or dies takes the
    episodes of its process with it.

    Raises:
        UserError: the environment does not load, or limits that make no sense.
    """

    def __init__(self, environment: str, num_workers: int, timeout_s: float, memory_limit_mib: int):
        self._pools: list[ToolPool] = []
        try:
            for _ in range(num_workers):
                self._pools.append(ToolPool([f"{PREFIX}{environment}"], 1, timeout_s, memory_limit_mib))
        except BaseException:
            self.close()
            raise

    @classmethod
    def from_config(cls, tools: "ToolSection") -> "EpisodePool":
        """Start the processes that a config's section describes."""
        return cls(tools.environment, tools.num_workers, tools.timeout_s, tools.memory_limit_mib)

    def __enter__(self) -> "EpisodePool":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def begin(self, episode: int, answer: str, extra: Mapping[str, Any] | None = None) -> "Future[ToolAnswer]":
        """Begin an episode by its prompt's answer and columns; nothing need wait for it, since steps come after it."""
        return self._submit("reset", episode, answer=answer, extra=dict(extra or {}))

    def step(self, episode: int, action: str) -> "Future[ToolAnswer]":
        """Take one step; ``read_step`` reads what comes of it."""
        return self._submit("step", episode, action=action)

    def end(self, episode: int) -> None:
        self._submit("end", episode)

    def close(self) -> None:
        for pool in self._pools:
            pool.close()

    def _submit(self, name: str, episode: int, **arguments: Any) -> "Future[ToolAnswer]":
        return self._pools[episode % len(self._pools)].submit(ToolCall(name, {"episode": episode, **arguments}))


def read_step(answer: ToolAnswer) -> Step:
    if answer.is_failure:
        return Step("", 0.0, True, failure=answer.text)
    try:
        match json.loads(answer.text):
            case {"lost": str(reason)}:
                return Step("", 0.0, True, failure=reason, is_unscored=True)
            case [observation, reward, is_over]:
                return Step(str(observation), float(reward), bool(is_over))
    except (ValueError, TypeError):
        pass
    return Step("", 0.0, True, failure=f"the environment answered {answer.text[:80]!r}")
