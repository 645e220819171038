"""A judge: the server and model that verifiers ask, how often, and where its answers are kept."""

import functools
import hashlib
import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any, TypeVar

from mindrlhf.rewards.answers.extraction import behind_thoughts
from mindrlhf.rewards.judges import accounting
from mindrlhf.rewards.judges.cache import open_cache
from mindrlhf.rewards.judges.chat_client import ChatError, NoAnswer, ask

# Both ends of a longer response are shown.
MAX_COMPLETION_CHARS = 20_000
# Votes at temperature 0 would all be alike.
VOTE_TEMPERATURE = 0.7

Opinion = TypeVar("Opinion")
Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Judge:
    """The options that all verifiers have which ask another model.

    ``url`` is that of an OpenAI-compatible server up to and including ``/v1``; the key, if it wants one, is read from
    the environment variable that ``api_key_variable`` names. All attempts and votes for a sample share
    ``reward.timeout_s``.
    """

    url: str
    model: str
    votes: int = 1  # how many times each question is asked
    cache: str = ""  # file of answers by content, shared by workers and runs; empty: none
    max_reply_tokens: int = 1024
    api_key_variable: str = "OPENAI_API_KEY"
    request_timeout_s: float = 60.0
    num_retries: int = 2

    def opinions(self, question: Callable[[int], Messages], read: Callable[[str, int], Opinion]) -> list[Opinion]:
        """Ask ``votes`` times and return what ``read`` makes of the replies that it can use: more than half.

        Args:
            question: the messages of a vote, by its number.
            read: of a reply and the number of its vote; raises ValueError for a reply that is not as asked for.

        Raises:
            ChatError, ValueError: half of the replies or more could not be used; the reason of the last, or of the last
                that the server did not give (``NoAnswer``).
        """
        if self.votes < 1:
            raise ValueError(f"votes is {self.votes}: it must be at least 1")
        found: list[Opinion] = []
        failure: Exception | None = None
        for vote in range(self.votes):
            try:
                found.append(self._opinion(question(vote), functools.partial(_read_vote, read, vote), vote))
            except (ValueError, ChatError) as error:
                accounting.add("unusable")
                failure = failure if isinstance(failure, NoAnswer) and not isinstance(error, NoAnswer) else error
        if 2 * len(found) <= self.votes:
            raise failure
        return found

    def _opinion(self, messages: Messages, read: Callable[[str], Opinion], vote: int) -> Opinion:
        body: dict[str, Any] = {"model": self.model, "messages": messages, "temperature": 0}
        if self.votes > 1:
            body |= {"temperature": VOTE_TEMPERATURE, "seed": vote}
        body["max_tokens"] = self.max_reply_tokens

        def reply() -> str:
            return ask(
                self.url,
                body,
                api_key_variable=self.api_key_variable,
                request_timeout_s=self.request_timeout_s,
                num_retries=self.num_retries,
            )

        if not self.cache:
            return read(reply())
        # Not the address: the same judge may be served elsewhere tomorrow.
        key = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        opinion, was_there = open_cache(self.cache).answer(key, reply, read)
        if was_there:
            accounting.add("cached")
        return opinion


def _read_vote(read: Callable[[str, int], Opinion], vote: int, reply: str) -> Opinion:
    return read(reply, vote)


def asks_a_judge(*, needs_cache: bool = False) -> Callable[[Callable[..., float]], Callable[..., float]]:
    """Decorator: the options of a verifier are those of ``Judge`` beside its own; it gets the judge as ``judge``.

    Args:
        needs_cache: the option ``cache`` has no default: the samples of a prompt ask the same questions.
    """

    def decorate(function: Callable[..., float]) -> Callable[..., float]:
        options = fields(Judge)
        names = {option.name for option in options}

        @functools.wraps(function)
        def verifier(completion: str, answer: str, **keywords: Any) -> float:
            settings = {name: keywords.pop(name) for name in names & keywords.keys()}
            return function(completion, answer, judge=Judge(**settings), **keywords)

        signature = inspect.signature(function)
        own = [parameter for parameter in signature.parameters.values() if parameter.name != "judge"]
        verifier.__signature__ = signature.replace(
            parameters=[
                *own,
                *(
                    inspect.Parameter(
                        option.name,
                        inspect.Parameter.KEYWORD_ONLY,
                        default=inspect.Parameter.empty
                        if option.default is MISSING or (option.name == "cache" and needs_cache)
                        else option.default,
                        annotation=option.type,
                    )
                    for option in options
                ),
            ]
        )
        return verifier

    return decorate


def messages(instructions: str, parts: Sequence[tuple[str, str]]) -> Messages:
    """Return a question: the instructions, with ``{mark}`` filled in, and the material between such marks.

    Args:
        instructions: say that what stands between lines of ``{mark}`` is material.
        parts: heading and text of each.
    """
    mark = _unused_mark("".join(text for _, text in parts))
    return [
        {"role": "system", "content": instructions.replace("{mark}", mark)},
        {"role": "user", "content": "".join(f"{name}:\n{mark}\n{text}\n{mark}\n\n" for name, text in parts)},
    ]


def shortened(completion: str, max_chars: int = MAX_COMPLETION_CHARS) -> str:
    """Return a response as judges see it: of a longer one both ends."""
    if len(completion) <= max_chars:
        return completion
    half = max_chars // 2
    return f"{completion[:half]}\n[...]\n{completion[-half:]}"


def conclusion(reply: str) -> str:
    """Return what stands behind the judge's thoughts, if it is a model that thinks aloud in tags."""
    return behind_thoughts(reply)


def _unused_mark(text: str) -> str:
    """A line that the graded text cannot contain, so that it cannot end its own part."""
    length = 3
    while "=" * length in text:
        length += max(1, length // 2)
    return "=" * length
