"""Keys that had another name in earlier releases: files, overrides and checkpoints may still have the old ones."""

from collections.abc import Iterable, Mapping
from typing import Any

from mindrlhf.errors import Mistakes

# Old name -> the name of today, which is in the same section.
RENAMED: dict[str, str] = {
    "training.row_lengths": "training.sequence_lengths",
    "supervised.row_lengths": "supervised.sequence_lengths",
    "preference.row_lengths": "preference.sequence_lengths",
    "training.batch_size": "training.micro_batch_size",
    "supervised.batch_size": "supervised.micro_batch_size",
    "preference.batch_size": "preference.micro_batch_size",
    "memory.logit_words": "memory.logit_vocabulary",
    "rollout.ahead": "rollout.off_policy_steps",
    "rollout.max_spans": "rollout.max_segments",
    "rollout.span_tokens": "rollout.segment_tokens",
    "rollout.weights_carrier": "rollout.weights_transport",
    "rollout.board_gib": "rollout.weight_buffer_gib",
}


def current_names(content: Mapping[str, Any], where: str = "", mistakes: Mistakes | None = None) -> dict[str, Any]:
    """Return the content of a config, or of its section ``where`` (with a dot behind it), under the names of today.

    Of a key that is given by both names the new one counts, and ``mistakes`` are told.
    """
    current = {}
    for name, value in content.items():
        old = f"{where}{name}"
        new = RENAMED.get(old, old).removeprefix(where)
        if old in RENAMED and new in content:
            if mistakes is not None:
                mistakes.add(both_given(old))
            continue
        is_section = not where and isinstance(value, Mapping)
        current[new if old in RENAMED else name] = current_names(value, f"{name}.", mistakes) if is_section else value
    return current


def old_names(content: Mapping[str, Any]) -> list[str]:
    """Return the old names that a config has, dotted."""
    sections = {name: keys for name, keys in content.items() if isinstance(keys, Mapping)}
    return [old for name, keys in sections.items() for key in keys if (old := f"{name}.{key}") in RENAMED]


def both_given(old: str) -> str:
    """Return what is said of a key that is given by its old name and by the new one."""
    return f"'{old}' is the old name of '{RENAMED[old]}', and both are set: leave out the old one"


def renaming(names: Iterable[str]) -> str:
    """Return one line that tells the new names of old ones; empty when there are none."""
    told = [f"'{old}' is now '{RENAMED[old]}'" for old in sorted(set(names))]
    return f"{', '.join(told)}: change it in the config; the old name is still read" if told else ""
