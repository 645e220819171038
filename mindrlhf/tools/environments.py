"""Environments that a model acts in, one episode for each response: classes of a user.

A class given as ``path/to/file.py:Class`` is made anew for each episode and has

- ``reset(self, answer: str)``: begin the episode that the record's ``answer`` describes. Its first observation is the
  prompt, which was built before the run. Further parameters that have the names of columns which the prompts keep are
  given their values, and ``**columns`` all of them.
- ``step(self, action: str) -> tuple[str, float, bool]``: what the model sees next, the reward of its action, and
  whether the episode is over.
- ``close(self)``, if it has anything to give back.

Where a run has several, separated by commas, the column ``environment`` of a record says which is its own, by the
name of the class.

Episodes live in tool processes, which call them by the functions of ``episode_tools``.
"""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from mindrlhf.errors import Unavailable, UserError
from mindrlhf.sandbox.user_files import declared_signature, load_named

PREFIX = "environment:"  # of what tool processes are told
CHOICE = "environment"  # the column that chooses
# As JSON, an answer of a tool process is never cut: a character takes six at the most.
MAX_OBSERVATION_CHARS = 3000
MAX_REWARD = 1e15


def split_names(names: str) -> dict[str, str]:
    """Return the environments of ``tools.environment`` by what a record calls them."""
    return {name.rpartition(":")[2]: name for name in map(str.strip, names.split(",")) if name}


def check_environment(names: str, verifiers: Sequence[str] = ()) -> None:
    """Check what can be known without running a user's file; ``names`` is empty where there is no environment.

    Raises:
        UserError: no such file, two are called the same, or a verifier needs an environment
            and there is none.
    """
    if not names and "environment_reward" in verifiers:
        raise UserError("verifier environment_reward needs 'tools.environment': set it, or leave the verifier out")
    found = split_names(names)
    if len(found) < len([name for name in names.split(",") if name.strip()]):
        raise UserError(f"environments '{names}': two are called the same, so that no record could choose; rename one")
    for name in found.values():
        _check_one(name)


def _check_one(name: str) -> None:
    path, colon, class_name = name.rpartition(":")
    if not colon or not class_name.isidentifier():
        raise UserError(f"environment '{name}': write path/to/file.py:Class")
    if not Path(path).is_file():
        raise UserError(f"environment '{name}': there is no file {path}")


def check_columns(names: str, columns: Collection[str], where: str) -> None:
    """Check that ``reset`` of users' environments gets a value for each parameter; the files are read, not run.

    Raises:
        UserError: one has none, and no default; or there are several, and nothing chooses.
    """
    found = split_names(names)
    if len(found) > 1 and CHOICE not in columns:
        raise UserError(
            f"'tools.environment' has {', '.join(found)}, but {where} have no column '{CHOICE}' that chooses: keep it "
            f"with 'mindrlhf data build --keep {CHOICE}', or name one environment"
        )
    for name in found.values():
        _check_reset(name, columns, where)


def _check_reset(name: str, columns: Collection[str], where: str) -> None:
    path, _, class_name = name.rpartition(":")
    signature = declared_signature(Path(path), f"{class_name}.reset") if path else None
    for parameter in [*signature.parameters.values()][2:] if signature else ():  # after self and the answer
        is_named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if is_named and parameter.default is parameter.empty and parameter.name not in columns:
            raise UserError(
                f"reset of environment '{name}' has the parameter '{parameter.name}', but {where} have "
                f"{'only the columns ' + ', '.join(sorted(columns)) if columns else 'no columns'}: keep it with "
                f"'mindrlhf data build --keep {parameter.name}', or give the parameter a default"
            )


def episode_tools(names: str) -> dict[str, Callable[..., Any]]:
    """Return the functions by which a tool process runs episodes of environments: reset, step and end.

    Raises:
        UserError: as ``check_environment``; a file that does not load, or a class without the methods.
    """
    check_environment(names)
    episodes = _Episodes({label: _load(name) for label, name in split_names(names).items()})
    return {"reset": episodes.reset, "step": episodes.step, "end": episodes.end}


def _load(name: str) -> Callable[[], Any]:
    path, _, class_name = name.rpartition(":")
    environment = load_named(Path(path), class_name)
    missing = [method for method in ("reset", "step") if not callable(getattr(environment, method, None))]
    if missing:
        raise UserError(f"environment '{name}' has no method {missing[0]}(self, ...)")
    return environment


class _Episodes:
    """The episodes under way in one process, by number."""

    def __init__(self, environments: Mapping[str, Callable[[], Any]]):
        self._environments = environments
        self._running: dict[int, Any] = {}
        self._failures: dict[int, str] = {}  # why an episode did not begin

    def reset(self, episode: int, answer: str, extra: Mapping[str, Any]) -> None:
        try:
            environment = self._choose(extra)()
            text, *own = inspect.signature(environment.reset).parameters.values()
            takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in own)
            names = {*extra} if takes_all else {parameter.name for parameter in own}
            environment.reset(answer, **{name: extra[name] for name in extra.keys() & (names - {text.name})})
        except Exception as error:
            self._failures[episode] = f"{type(error).__name__}: {error}"
            raise
        self._running[episode] = environment

    def _choose(self, extra: Mapping[str, Any]) -> Callable[[], Any]:
        """Return the class of a record's environment."""
        if len(self._environments) == 1:
            return next(iter(self._environments.values()))
        chosen = extra.get(CHOICE)
        if chosen not in self._environments:
            raise ValueError(f"the record chooses {chosen!r}, and there are {', '.join(self._environments)}")
        return self._environments[chosen]

    def step(self, episode: int, action: str) -> list[Any] | dict[str, str]:
        """Return observation, reward and whether the episode is over, or why it is lost by no doing of an action."""
        if episode not in self._running:
            return {"lost": f"there is no such episode: {self._failures.get(episode, 'it was lost with its process')}"}
        try:
            observation, reward, is_over = self._running[episode].step(action)
        except Unavailable as error:
            return {"lost": f"Unavailable: {error}"}
        value = float(reward)
        if not isinstance(observation, str) or not abs(value) <= MAX_REWARD:
            raise TypeError(f"step returned {observation!r:.80} and the reward {reward!r:.80}, not text and a number")
        return [observation[:MAX_OBSERVATION_CHARS], value, bool(is_over)]

    def end(self, episode: int) -> None:
        self._failures.pop(episode, None)
        environment = self._running.pop(episode, None)
        if environment is not None and callable(getattr(environment, "close", None)):
            environment.close()
