"""The parameters of functions in a user's file, read without running it."""

import ast
from inspect import Parameter, Signature
from pathlib import Path

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def declared_signature(path: Path, name: str) -> Signature | None:
    """Return the signature of ``function``, or of ``Class.method``, that a file defines at its top.

    Defaults are only known to be there: each is None. What only running the file would tell is None as a whole: a
    function that is imported, made by a call, or decorated.
    """
    try:
        nodes = ast.parse(path.read_bytes()).body
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None
    *outer, last = name.split(".")
    for part in outer:
        classes = [node for node in nodes if isinstance(node, ast.ClassDef) and node.name == part]
        nodes = classes[-1].body if classes else []
    found = [node for node in nodes if isinstance(node, _FUNCTIONS) and node.name == last]
    return _signature(found[-1].args) if found and not found[-1].decorator_list else None


def _signature(names: ast.arguments) -> Signature:
    kinds = [(one.arg, Parameter.POSITIONAL_ONLY) for one in names.posonlyargs]
    kinds += [(one.arg, Parameter.POSITIONAL_OR_KEYWORD) for one in names.args]
    first_default = len(kinds) - len(names.defaults)
    parameters = [
        Parameter(name, kind, default=Parameter.empty if place < first_default else None)
        for place, (name, kind) in enumerate(kinds)
    ]
    parameters += [Parameter(names.vararg.arg, Parameter.VAR_POSITIONAL)] if names.vararg else []
    parameters += [
        Parameter(one.arg, Parameter.KEYWORD_ONLY, default=Parameter.empty if value is None else None)
        for one, value in zip(names.kwonlyargs, names.kw_defaults, strict=True)
    ]
    return Signature(parameters + ([Parameter(names.kwarg.arg, Parameter.VAR_KEYWORD)] if names.kwarg else []))
