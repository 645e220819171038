"""Prompt files of records and headers that a test has made."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from mindrlhf.data.mindrecord import Prompt, PromptFileHeader, columns, write_prompt_file


def write_with_header(path: Path, header: PromptFileHeader, batches: Iterable[Sequence[Prompt]]) -> None:
    """Write a file with the columns that its header speaks of."""
    schema = columns(
        header.task,
        verifier=bool(header.verifier_choices),
        extra=bool(header.columns),
        images=header.images is not None,
    )
    write_prompt_file(path, schema, batches, lambda: header)
