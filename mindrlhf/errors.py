"""The two kinds of failure a command can end with, and their exit codes."""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

Result = TypeVar("Result")
STOPPED = 75  # exit code of a run that ended on SIGTERM before it was done: EX_TEMPFAIL of sysexits.h
Rules = Iterable[tuple[Any, str]]  # each: whether it is broken, and what is said then


class UserError(ValueError):
    """The user can mend this: bad config, data, path or value.

    The message is one line that names the offending value and the fix. Commands print it without a
    traceback and exit with code 2.
    """

    exit_code = 2


class RunFailure(RuntimeError):
    """A process or device failed while the run was under way.

    The message is one line that names the process, the cause and the log file to read. Commands print
    it without a traceback and exit with code 1.
    """

    exit_code = 1


class NotThere(UserError):  # noqa: N818 - it need not be an error: what is prepared here may run elsewhere
    """A file that the config names is not on this machine, and may be on another."""


class UserErrors(UserError):
    """Several mistakes found in one go; the text has a line for each."""

    def __init__(self, messages: Sequence[str]) -> None:
        self.messages = tuple(messages)
        super().__init__("\n".join(self.messages))


class Mistakes:
    """Collects what is wrong, so that a user hears of every mistake at once.

    A key that could not be read has a stand-in value: later findings that mention it follow from that and are left
    out. Of findings that begin with the same key only the first counts.
    """

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.not_there: list[str] = []  # those of the messages that say that a file is not on this machine
        self._unreadable: set[str] = set()
        self._blamed: set[str] = set()

    def check(self, check: Callable[..., Result], *arguments: Any, needs: Sequence[str] = ()) -> Result | None:
        """Return ``check(*arguments)``; None when it finds a mistake, or one was found in a key that it ``needs``."""
        if (self._unreadable | self._blamed).intersection(needs):
            return None
        try:
            return check(*arguments)
        except UserError as error:
            for message in messages_of(error):
                self.add(message)
            self.not_there += [str(error)] if isinstance(error, NotThere) else []
            return None

    def add(self, message: str, *unreadable: str) -> None:
        """Note a mistake; ``unreadable`` are the dotted names of the keys that have stand-in values because of it."""
        key = _FIRST_KEY.match(message)
        mentioned = set(_DOTTED.findall(message))
        is_new = message not in self.messages and not (key and key[1] in self._blamed)
        if is_new and not mentioned & self._unreadable:
            self.messages.append(message)
            self._blamed.update([key[1]] if key else [])
        self._unreadable.update(unreadable)

    def hand_over(self, messages: Sequence[str], other: "Mistakes") -> None:
        """Have ``other`` say some of the messages, and not these any more."""
        for message in messages:
            other.add(message)
        self.messages = [one for one in self.messages if one not in messages]

    def judge(self, rules: Rules) -> None:
        """Note every rule that is broken."""
        for is_broken, message in rules:
            if is_broken:
                self.add(message)

    def raise_if_any(self) -> None:
        """Raise what was noted.

        Raises:
            UserError: there is a mistake; a ``UserErrors`` when there are several.
        """
        if self.messages:
            raise UserErrors(self.messages) if len(self.messages) > 1 else UserError(self.messages[0])


def refuse(rules: Rules) -> None:
    """Raise the message of the first rule that is broken.

    Raises:
        UserError: there is one.
    """
    for is_broken, message in rules:
        if is_broken:
            raise UserError(message)


def messages_of(failure: UserError | RunFailure) -> tuple[str, ...]:
    """Return each mistake of an error as one line."""
    return failure.messages if isinstance(failure, UserErrors) else (str(failure),)


_FIRST_KEY = re.compile(r"'([a-z_]+\.[a-z_0-9]+)'")
_DOTTED = re.compile(r"\b[a-z_]+\.[a-z_0-9]+\b")


class Unavailable(RuntimeError):
    """Raised by a verifier, an agent or an environment where it could not do its work, whatever the response was.

    The sample is not scored: it leaves its group and the loss. What a response can cause (its program ends the process,
    takes too long, fills the memory) must stay a failure, or a policy learns to cause it where it would earn less.
    """
