"""``reward_failures.jsonl``: every sample that a verifier gave no value, with the reason."""

import contextlib
import json
from pathlib import Path

import jsonlines

from mindrlhf.errors import RunFailure, UserError
from mindrlhf.rewards.types import RewardInput

# A verifier that fails on everything must not fill the disk.
MAX_RECORDS = 1000
MAX_TEXT_CHARS = 4000


class FailureLog:
    """Appends one JSON line per failure; after ``MAX_RECORDS`` of one process they are only counted elsewhere.

    Raises:
        UserError: the file cannot be opened.
    """

    def __init__(self, path: Path):
        try:
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}") from None
        self._writer = jsonlines.Writer(self._file, dumps=json.dumps, flush=True)
        self._path = path
        self._num_records = 0

    def write(self, sample: RewardInput, failures: dict[str, str]) -> None:
        """Append the failures (reason, by verifier) of one sample; long texts keep their beginning and end.

        Raises:
            RunFailure: the disk is full, or the like.
        """
        for verifier, reason in failures.items():
            if self._num_records >= MAX_RECORDS:
                return
            self._num_records += 1
            record = {
                "verifier": verifier,
                "reason": reason,
                "index": sample.index,
                "prompt": _shortened(sample.prompt),
                "completion": _shortened(sample.completion),
                "answer": _shortened(sample.answer),
            }
            if sample.extra:
                record["extra"] = dict(sample.extra)
            # Escaped, so that lone surrogates in a completion can be written.
            try:
                self._writer.write(record)
            except OSError as error:
                raise RunFailure(f"cannot write {self._path}: {error.strerror}") from error

    def close(self) -> None:
        with contextlib.suppress(OSError):  # what could not be written has been reported
            self._file.close()


def _shortened(text: str) -> str:
    if len(text) <= MAX_TEXT_CHARS:
        return text
    half = MAX_TEXT_CHARS // 2
    return f"{text[:half]} [... {len(text) - 2 * half} characters ...] {text[-half:]}"
