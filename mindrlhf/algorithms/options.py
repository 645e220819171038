"""Options of single estimators and losses: entries of the mapping `algorithm.options` of a config.

The module that reads an option declares it, as a literal ``OPTIONS = {name: (default, minimum, maximum, meaning)}``
with None for a bound that is not there. An option has the type of its default.
"""

from collections.abc import Mapping

Option = tuple[float, float | None, float | None, str]


def chosen(declared: Mapping[str, Option], given: Mapping[str, float]) -> dict[str, float]:
    """Return the value of each declared option: the one that is given, or its default."""
    return {name: given.get(name, option[0]) for name, option in declared.items()}


def mistake(name: str, value: object, option: Option) -> str:
    """Return why ``value`` is none for an option, as a clause; empty if it is one."""
    default, minimum, maximum, _ = option
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if isinstance(default, bool):
        return "" if isinstance(value, bool) else "must be true or false"
    if not is_number or (isinstance(default, int) and value != int(value)):
        return f"must be {'an integer' if isinstance(default, int) else 'a number'}"
    if minimum is not None and not value >= minimum:
        return f"must be at least {minimum:g}"
    return f"must be at most {maximum:g}" if maximum is not None and not value <= maximum else ""
