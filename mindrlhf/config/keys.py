"""Declarations of config keys: default, range, and the sentence that documents it."""

import dataclasses
import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

REQUIRED = dataclasses.MISSING
TASKS = ("train", "sft", "dpo", "reward-model")  # commands that train
# What holds for every key with numbers, where it has no closer bounds: what 32 bits hold, and what the arithmetic of
# single precision and the timers of the operating system take.
_MAX_MEANT_CHARS = 64  # a comparison takes the product of the lengths
MAX_INTEGER, MAX_NUMBER, MIN_NUMBER, MAX_SECONDS = 2**31 - 1, 1e9, 1e-30, 2e6


# What people call a choice elsewhere; "" for what looks like one and means another.
_OTHER_NAMES = {
    **dict.fromkeys(("npu", "davinci", "cann", "huawei", "910b", "ascend910b"), "ascend"),
    **dict.fromkeys(("gpu", "cuda", "rocm", "xpu", "tpu", "mps"), ""),
    **dict.fromkeys(("bf16", "half"), "bfloat16"),
    **dict.fromkeys(("fp32", "f32", "float", "full", "single"), "float32"),
    "fp16": "float16",
    "reinforce++": "reinforce_pp",
    "reinforce++_baseline": "reinforce_pp_baseline",
    "tb": "tensorboard",
    "weights_and_biases": "wandb",
    "cos": "cosine",
    "warmup_stable_decay": "wsd",
}


def nearest_choice(value: object, choices: Iterable[object]) -> str | None:
    """Return which of a few values was meant, by its meaning and then by its letters; None where neither tells."""
    names = {_plain_name(str(choice)): str(choice) for choice in choices}
    word = re.sub(r"[\s-]+", "_", str(value).strip().lower())
    if word in _OTHER_NAMES:
        return names.get(_plain_name(_OTHER_NAMES[word]))
    if _plain_name(word) in names:
        return names[_plain_name(word)]
    near = difflib.get_close_matches(_plain_name(word), names, n=1) if len(word) <= _MAX_MEANT_CHARS else []
    return names[near[0]] if near else None


def _plain_name(text: str) -> str:
    return re.sub(r"[\s_-]+", "", text.lower())


class RunConfig(Protocol):
    """A whole config, as the rules beside a section read the others: ``config.rollout.dtype``.

    Its classes are in :mod:`mindrlhf.config.schema`, which is made of the sections, so that these cannot name them.
    """

    def __getattr__(self, section: str) -> Any: ...


def key(
    default: Any,
    doc: str,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    choices: Sequence[Any] = (),
    exclusive_minimum: bool = False,
    is_model: bool = False,
    read_with: str = "",
    on_ascend: Any = None,
) -> Any:
    """Declare one key of a section.

    Args:
        default: value when the YAML leaves the key out; ``REQUIRED`` when it may not.
        doc: what the key means, with its unit; it goes to docs/config.md as it stands.
        minimum, maximum: closed bounds of a number (``exclusive_minimum`` opens the lower one).
        choices: the allowed values, when they are few.
        is_model: a directory, or the name of a model on a hub, which becomes its directory in the hub's cache.
        read_with: the condition under which anything reads the key; see :mod:`mindrlhf.config.unread`.
        on_ascend: the default with `run.device: ascend`; None where it is ``default`` there too.
    """
    metadata = {
        "doc": doc,
        "minimum": minimum,
        "maximum": maximum,
        "choices": tuple(choices),
        "exclusive_minimum": exclusive_minimum,
        "is_model": is_model,
        "read_with": read_with,
        "on_ascend": on_ascend,
    }
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def section(cls: type, doc: str, *, read_with: str = "") -> Any:
    """Declare a nested section whose keys are the fields of ``cls``; all of them have the condition ``read_with``."""
    return dataclasses.field(default_factory=cls, metadata={"doc": doc, "section": cls, "read_with": read_with})
