"""Fingerprint of a run's data, so that a run is not resumed on files that were replaced meanwhile.

A fingerprint is JSON: for each key of the config's data section what its file holds. A prompt file is known by its own
checksum, which covers its records and its header; tokenizer and template are named beside it for the message.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mindrlhf.data.mindrecord import read_identity
from mindrlhf.data.tokenizers import load_tokenizer
from mindrlhf.errors import UserError

TRAIN_FILE, EVAL_FILE, TOKENIZER_DIR = "train_file", "eval_file", "tokenizer_dir"
# What a run may not change; of another file for evaluation, named in the config, it makes another evaluation.
FIXED_KEYS = (TRAIN_FILE, TOKENIZER_DIR)


def data_fingerprint(data: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the fingerprint of a run's data.

    Raises:
        UserError: a file is missing, or its header damaged; whether its records are is not looked at.
    """
    found = {key: _file_fingerprint(data[key]) for key in (TRAIN_FILE, EVAL_FILE) if data[key]}
    return found | {TOKENIZER_DIR: {"tokenizer": load_tokenizer(data[TOKENIZER_DIR]).fingerprint}}


def check_same_data(
    old: Mapping[str, Any], old_data: Mapping[str, Any], new: Mapping[str, Any], data: Mapping[str, Any]
) -> tuple[str, ...]:
    """Check that a run is resumed on the data with which it began, in the same place or moved.

    Returns:
        The keys, such as "data.train_file", of what a run may not change and was compared: their paths may differ.

    Raises:
        UserError: a file holds something else; the message names each such file and what has changed.
    """
    changes = []
    for key in old.keys() & new.keys():
        if key in FIXED_KEYS or data[key] == old_data.get(key):
            changes += [f"data.{key} {data[key]} {how}" for how in _changes(old[key], new[key])]
    if changes:
        raise UserError(
            f"cannot resume the checkpoint: {'; '.join(sorted(changes))}: put back what the run began with, or start a "
            "new run"
        )
    return tuple(f"data.{key}" for key in FIXED_KEYS if key in old)


def _file_fingerprint(path: str) -> dict[str, Any]:
    header, checksum = read_identity(Path(path))
    return {
        "checksum": checksum,
        "num_records": header.num_kept,
        "task": header.task,
        "tokenizer": header.tokenizer_fingerprint,
        "template": header.template,
        "template_sha256": header.template_sha256,
    }


def _changes(old: Any, new: Mapping[str, Any]) -> Iterator[str]:
    """Yield what has changed, in words: the causes if there are any, else that it is something else."""
    if old == new:
        return
    old = old if isinstance(old, Mapping) else {}
    causes = []
    if old.get("tokenizer") != new.get("tokenizer"):
        causes.append(f"has tokenizer {_short(new, 'tokenizer')}, not {_short(old, 'tokenizer')}")
    if old.get("template_sha256") != new.get("template_sha256"):
        names = [f"{one.get('template')!r} ({_short(one, 'template_sha256')})" for one in (new, old)]
        causes.append(f"was built with template {names[0]}, not {names[1]}")
    if old.get("num_records") != new.get("num_records"):
        causes.append(f"has {new.get('num_records')} records, not {old.get('num_records')}")
    yield from causes or [f"holds other records (checksum {_short(new, 'checksum')}, not {_short(old, 'checksum')})"]


def _short(values: Mapping[str, Any], name: str) -> str:
    return str(values.get(name))[:12]
