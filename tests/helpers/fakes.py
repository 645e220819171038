"""Stand-ins that several test modules share."""

from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from mindrlhf.system.records import decode, encode

END = 0


class Characters:
    """A tokenizer with a token for each character; END ends a turn."""

    eos_token_ids = (END,)

    def __init__(self, control_tokens: Collection[str] = ()):
        self.control_tokens = frozenset(control_tokens)

    def token_to_id(self, token: str) -> None:
        return None

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(token) if token else "" if skip_special_tokens else "$" for token in ids)


class LocalTeam:
    """A team (:class:`mindrlhf.training.team.Team`) without connections: ranks in this process, called in turn.

    Args:
        workers: of the ranks, in order.
    """

    def __init__(self, workers: Sequence[Any]):
        self.workers = list(workers)

    @property
    def rank_0(self) -> Any:
        """The worker of rank 0."""
        return self.workers[0]

    @property
    def world_size(self) -> int:
        """Number of ranks, which share the rows."""
        return len(self.workers)

    num_devices = world_size

    @property
    def ranks(self) -> "LocalTeam":
        """All ranks, each for itself."""
        return self

    def call(self, method: str, per_rank: Sequence[dict[str, Any]] | None = None, **common: Any) -> list[Any]:
        """Call a method of all workers and return the results by rank."""
        own = per_rank or [{}] * self.world_size
        return [getattr(one, method)(**{**common, **given}) for one, given in zip(self.workers, own, strict=True)]


class ThreadedTeam(LocalTeam):
    """The same with ranks that work at the same time; what passes between them is encoded as on a connection."""

    def call(self, method: str, per_rank: Sequence[dict[str, Any]] | None = None, **common: Any) -> list[Any]:
        """Call a method of all workers at once and return the results by rank."""
        arguments = [decode(*encode({**common, **own})) for own in per_rank or [{}] * self.world_size]
        with ThreadPoolExecutor(self.world_size) as pool:
            done = [pool.submit(getattr(one, method), **given) for one, given in zip(self.workers, arguments)]
            return [decode(*encode({"result": one.result()}))["result"] for one in done]
