"""Prompt files of records and headers that a test has made."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from mindrlhf.data.mindrecord import Prompt, PromptFileHeader, columns, write_prompt_file


def header_of(num_records: int, **fields: Any) -> PromptFileHeader:
    """Return the header of a file of prompts; ``fields`` are what a test cares about."""
    usual = {
        "task": "prompts", "tokenizer_fingerprint": "t" * 64, "template": "plain", "template_sha256": "a" * 64,
        "handler": "map_keys", "num_read": num_records, "num_kept": num_records, "num_bad": 0, "num_too_long": 0,
        "max_prompt_length": 64, "max_length": None, "longest_prompt": 4, "longest_response": 0,
    }  # fmt: skip
    return PromptFileHeader(**usual | fields)


def write_with_header(path: Path, header: PromptFileHeader, batches: Iterable[Sequence[Prompt]]) -> None:
    """Write a file with the columns that its header speaks of."""
    schema = columns(
        header.task,
        verifier=bool(header.verifier_choices),
        extra=bool(header.columns),
        images=header.images is not None,
    )
    write_prompt_file(path, schema, batches, lambda: header)
