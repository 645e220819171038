"""Verifiers by name: the built-in ones, and a user's own by ``path/to/file.py:function``.

A verifier is ``def f(completion: str, answer: str, **context) -> float``, or a list of floats where it rewards steps:
one for each turn of the model, whose texts are ``turn_texts``, or for each token that it wrote, ``token_texts``; one of
the two is a parameter then. Of the context (``prompt``, ``finish_reason``, ``num_tokens``) it is given what its
signature names, or all if it takes ``**context``; ``completions``, the texts of all samples of the prompt, and
``episode_return``, the sum of an environment's rewards, only if it names them. So it is with the columns that a prompt
file keeps (``Prompt.extra``): a parameter of a column's name gets its value, and ``**context`` all of them.

Keyword-only parameters are options as well, which the run's config may set; one that is set is no column. Those of
built-in verifiers are options only, so that no column of a data set changes one by its name.

Built-in verifiers are the functions marked with ``@register`` in the modules of ``mindrlhf.rewards.verifiers``.
"""

import importlib
import inspect
import math
import pkgutil
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mindrlhf.data.handlers import SAMPLE_NAMES
from mindrlhf.errors import UserError
from mindrlhf.sandbox.user_files import declared_signature, load_named

COMPLETIONS = "completions"
# What only those get that name it: it is large, or not there in most runs.
STEP_TEXTS = ("turn_texts", "token_texts")
_BY_NAME = frozenset({COMPLETIONS, "episode_return", *STEP_TEXTS})
CONTEXT_KEYWORDS = tuple(name for name in SAMPLE_NAMES if name not in ("completion", "answer"))

_registered: dict[str, Callable[..., float]] = {}
_comparing: set[str] = set()


@dataclass(frozen=True)
class Reads:
    """Fields of a sample that verifiers read beside completion and answer."""

    context: tuple[str, ...] = ()  # of CONTEXT_KEYWORDS
    columns: tuple[str, ...] = ()  # that it names, if the prompt has them
    required: tuple[str, ...] = ()  # those of them that have no default
    all_columns: bool = False
    texts: tuple[str, ...] = ()  # how it calls completion and answer, which are never columns

    @classmethod
    def together(cls, several: Sequence["Reads"]) -> "Reads":
        """Return what is read by any of several verifiers."""
        context = [name for name in CONTEXT_KEYWORDS if any(name in one.context for one in several)]
        columns, required = (
            dict.fromkeys(name for one in several for name in getattr(one, kind)) for kind in ("columns", "required")
        )
        return cls(tuple(context), tuple(columns), tuple(required), any(one.all_columns for one in several))

    def of_columns(self, extra: Mapping[str, Any]) -> dict[str, Any]:
        """Return those of a prompt's columns that are read."""
        names = [name for name in extra if self.all_columns or name in self.columns]
        return {name: extra[name] for name in names if name not in self.texts}


@dataclass(frozen=True)
class Verifier:
    """A reward function and what it reads."""

    name: str
    function: Callable[..., float]
    reads: Reads
    options: dict[str, Any] = field(default_factory=dict)  # keyword -> value, where the config sets one

    def __call__(
        self, completion: str, answer: str, context: Mapping[str, Any], extra: Mapping[str, Any] = MappingProxyType({})
    ) -> Any:
        """Score one completion; of ``context`` and the columns in ``extra`` the verifier gets what it asks for."""
        given = {name: context[name] for name in self.reads.context if name in context}
        keywords = given | self.reads.of_columns(extra)
        return self.function(completion, answer, **(keywords | self.options))


def register(function: Callable[..., float]) -> Callable[..., float]:
    """Decorator: make ``function`` a built-in verifier under its own name."""
    name = function.__name__
    assert name not in _registered, f"two built-in verifiers are named {name}"
    _registered[name] = function
    return function


def register_comparing(function: Callable[..., float]) -> Callable[..., float]:
    """Decorator: as ``register``, for a verifier that has nothing to go by without an answer."""
    _comparing.add(function.__name__)
    return register(function)


def built_in_names() -> list[str]:
    """The names of all built-in verifiers, sorted."""
    from mindrlhf.rewards import verifiers

    for module in pkgutil.walk_packages(verifiers.__path__, verifiers.__name__ + "."):
        importlib.import_module(module.name)
    return sorted(_registered)


def part_name(specification: str) -> str:
    """The name under which the rewards of ``specification`` are reported: the function's name."""
    return specification.rpartition(":")[2]


def check(specification: str) -> None:
    """Raise what can be known without running a user's file.

    Raises:
        UserError: unknown name (with the nearest valid names), or no such file.
    """
    path, colon, function_name = specification.rpartition(":")
    if colon:
        if not function_name.isidentifier():
            raise UserError(f"verifier '{specification}': write path/to/file.py:function")
        if not Path(path).is_file():
            raise UserError(f"verifier '{specification}': there is no file {path}")
        return
    if specification.endswith(".py"):
        raise UserError(f"verifier '{specification}' names a file only: write {specification}:function")
    names = built_in_names()
    if specification not in names:
        from difflib import get_close_matches

        nearest = get_close_matches(specification, names, n=3, cutoff=0.5) or names
        raise UserError(
            f"unknown verifier '{specification}': did you mean {' or '.join(nearest)}? "
            "A function of your own is given as path/to/file.py:function"
        )


def resolve(specification: str, options: Mapping[str, str] | None = None) -> Verifier:
    """Find the verifier called ``specification``; its options are texts, converted to the types of the parameters.

    Loading a user's file runs it: only reward workers do that; elsewhere use ``check``.

    Raises:
        UserError: unknown name, missing file or function, a file that does not load, a signature that
            cannot take ``(completion, answer)``, an unknown or missing option, or one of the wrong type.
    """
    check(specification)
    path, colon, name = specification.rpartition(":")
    function = load_named(Path(path), name, "verifier") if colon else _registered[specification]
    values = parse_options(specification, function, options or {})
    return Verifier(name, function, _reads(specification, function, values), values)


def built_in(name: str) -> Callable[..., float]:
    """Return the built-in verifier called ``name``.

    Raises:
        UserError: there is none.
    """
    check(name)
    return _registered[name]


def parse_verifiers(names: str, weights: str) -> tuple[list[str], list[float]]:
    """Split ``"a,b"`` and ``"1.0,0.5"`` into verifier names and weights.

    Raises:
        UserError: an empty name, a weight that is not a finite number, or counts that differ.
    """
    parsed_names = [name.strip() for name in names.split(",")]
    parsed_weights = []
    for text in weights.split(","):
        try:
            parsed_weights.append(float(text))
        except ValueError:
            raise UserError(f"verifier weight '{text.strip()}' is not a number: give weights as in 1.0,0.5") from None
    check_selection(parsed_names, parsed_weights)
    return parsed_names, parsed_weights


def check_selection(names: Sequence[str], weights: Sequence[float]) -> None:
    """Check that names and weights belong together.

    Raises:
        UserError: no verifier, an empty or repeated name, weights not finite, or counts that differ.
    """
    if not names or not all(names):
        raise UserError(f"verifiers {list(names)}: give at least one verifier name, and no empty ones")
    if len(names) != len(weights):
        raise UserError(
            f"{len(names)} verifiers ({', '.join(names)}) but {len(weights)} weights "
            f"({', '.join(map(str, weights))}): give one weight per verifier"
        )
    for name, weight in zip(names, weights):
        if not math.isfinite(weight):
            raise UserError(f"the weight of verifier '{name}' is {weight}: it must be a finite number")
    reported = [part_name(name) for name in names]
    for name in reported:
        if reported.count(name) > 1:
            raise UserError(f"two verifiers would both be reported as '{name}': name each verifier once")


def context_of(function: Callable[..., float]) -> tuple[str, ...]:
    """Return what of the context a verifier reads; for one that takes ``**context``, all but what must be named."""
    return _context_of(inspect.signature(function))


def _context_of(signature: inspect.Signature) -> tuple[str, ...]:
    parameters = signature.parameters.values()
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        named |= {*CONTEXT_KEYWORDS} - _BY_NAME
    return tuple(keyword for keyword in CONTEXT_KEYWORDS if keyword in named)


def options_of(function: Callable[..., float]) -> dict[str, inspect.Parameter]:
    """Return the options of a verifier: its keyword-only parameters, but for the context."""
    parameters = inspect.signature(function).parameters
    return {
        name: parameter
        for name, parameter in parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY and name not in CONTEXT_KEYWORDS
    }


def parse_options(specification: str, function: Callable[..., float], texts: Mapping[str, str]) -> dict[str, Any]:
    """Convert the options of one verifier from text, each to the type of its default or annotation.

    Raises:
        UserError: an unknown option, a missing one that has no default, or one of the wrong type.
    """
    parameters = options_of(function)
    for name in texts:
        if name not in parameters:
            raise UserError(
                f"verifier '{specification}' has no option '{name}'; it has {', '.join(parameters) or 'none'}"
            )
    missing = [name for name, p in parameters.items() if p.default is p.empty and name not in texts]
    if missing and ":" not in specification:  # of a user's function it may be a column
        name = f"{part_name(specification)}.{missing[0]}"
        raise UserError(f"verifier '{specification}' needs the option '{name}': set it in reward.options")
    return {name: _option_value(specification, parameters[name], text) for name, text in texts.items()}


def _option_value(specification: str, parameter: inspect.Parameter, text: str) -> Any:
    # Annotations may be strings, after ``from __future__ import annotations``.
    annotated = {"int": int, "float": float, "bool": bool, "str": str}.get(
        getattr(parameter.annotation, "__name__", parameter.annotation), str
    )
    kind = annotated if parameter.default in (parameter.empty, None) else type(parameter.default)
    if kind is bool:
        value = {"true": True, "false": False}.get(text.lower())
    elif kind in (int, float):
        try:
            value = kind(text)
        except ValueError:
            value = None
    else:
        value = text
    if value is None or (kind is float and not math.isfinite(value)):
        words = {int: "an integer", float: "a number", bool: "true or false"}[kind]
        raise UserError(f"option '{parameter.name}' of verifier '{specification}' is '{text}': it must be {words}")
    return value


def _reads(specification: str, function: Callable[..., float], options: Mapping[str, Any]) -> Reads:
    if inspect.iscoroutinefunction(function):
        raise UserError(f"verifier '{specification}' is async: return the number itself, as by asyncio.run(...)")
    signature = inspect.signature(function)
    reads = reads_of(signature, options, is_built_in=":" not in specification)
    keywords = (*reads.context, *reads.columns)
    try:
        signature.bind("", "", **dict.fromkeys(keywords), **options)
    except TypeError as error:
        raise UserError(
            f"verifier '{specification}' cannot be called as f(completion, answer"
            f"{''.join(f', {keyword}=...' for keyword in keywords)}): {error}; "
            f"beyond completion and answer it may take {', '.join(CONTEXT_KEYWORDS)}, and columns of the prompts"
        ) from None
    return reads


def reads_of(signature: inspect.Signature, options: Container[str], *, is_built_in: bool) -> Reads:
    """Return what a verifier reads, from its signature and the names of the options that are set."""
    parameters = list(signature.parameters.values())
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    own = [p for p in positional[2:] if p.kind is not p.POSITIONAL_ONLY]
    own += [p for p in parameters if p.kind is p.KEYWORD_ONLY and not is_built_in]
    columns = [p for p in own if p.name not in SAMPLE_NAMES and p.name not in options]
    return Reads(
        context=_context_of(signature),
        columns=tuple(p.name for p in columns),
        required=tuple(p.name for p in columns if p.default is p.empty),
        all_columns=not is_built_in and any(p.kind is p.VAR_KEYWORD for p in parameters),
        texts=tuple(p.name for p in positional[:2]),
    )


def declared_reads(specification: str, options: Container[str]) -> Reads | None:
    """Return what a verifier reads, without running a user's file; None where that alone would tell."""
    path, colon, name = specification.rpartition(":")
    if colon:
        signature = declared_signature(Path(path), name)
    else:
        signature = inspect.signature(_registered[name]) if name in built_in_names() else None
    return None if signature is None else reads_of(signature, options, is_built_in=not colon)


def needs_answer(name: str) -> bool:
    """Return whether a built-in verifier has nothing to go by without an answer."""
    return name in built_in_names() and name in _comparing


def check_columns(specification: str, reads: Reads, columns: Collection[str], where: str) -> None:
    """Check that a verifier gets a value for each parameter from ``columns``, which ``where`` have.

    Raises:
        UserError: one has none, and no default.
    """
    missing = [name for name in reads.required if name not in columns]
    if missing:
        name, part = missing[0], part_name(specification)
        raise UserError(
            f"verifier '{specification}' has the parameter '{name}', which nothing gives a value: {where} have "
            f"{'the columns ' + ', '.join(sorted(columns)) if columns else 'no columns'}, reward functions also know "
            f"{', '.join(CONTEXT_KEYWORDS)}, and reward.options does not set '{part}.{name}'; keep the column with "
            f"'mindrlhf data build --keep {name}', or give the parameter a default"
        )
