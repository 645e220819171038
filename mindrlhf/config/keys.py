"""How a configuration key is declared: its default, its range and the sentence that documents it."""

import dataclasses
from collections.abc import Sequence
from typing import Any

REQUIRED = dataclasses.MISSING


def key(
    default: Any,
    doc: str,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    choices: Sequence[Any] = (),
    exclusive_minimum: bool = False,
    is_path: bool = False,
    is_model: bool = False,
) -> Any:
    """Declare one key of a section.

    Args:
        default: value when the YAML leaves the key out; ``REQUIRED`` when it may not.
        doc: what the key means, with its unit; it goes to docs/config.md as it stands.
        minimum, maximum: closed bounds of a number (``exclusive_minimum`` opens the lower one).
        choices: the allowed values, when they are few.
        is_path: the text names a file or a directory.
        is_model: it may also be the name of a model on a hub, which becomes its directory in the hub's cache.
    """
    metadata = {
        "doc": doc,
        "minimum": minimum,
        "maximum": maximum,
        "choices": tuple(choices),
        "exclusive_minimum": exclusive_minimum,
        "is_path": is_path or is_model,
        "is_model": is_model,
    }
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def section(cls: type, doc: str) -> Any:
    """Declare a nested section whose keys are the fields of ``cls``."""
    return dataclasses.field(default_factory=cls, metadata={"doc": doc, "section": cls})
