"""What the files of a model's directory say about it: config.json, generation_config.json, and the tokenizer's own."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mindrlhf.data.tokenizer_config import read_json_object
from mindrlhf.errors import UserError

CONFIG_NAME, GENERATION_NAME = "config.json", "generation_config.json"


def read_if_there(directory: Path, name: str) -> dict[str, Any]:
    """Return the JSON object in a file of a directory, {} where there is no such file.

    Raises:
        UserError: the file holds something else.
    """
    path = directory / name
    return read_json_object(path) if path.is_file() else {}


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a config.json says of the text model; models with vision keep it in a part of its own."""
    part = config.get("text_config")
    return {**config, **part} if isinstance(part, Mapping) else config


def end_ids(directory: str | Path) -> tuple[int, ...]:
    """Return the ids at which config.json and generation_config.json end a response, those of the latter first.

    Ids that the model has no row for can never be sampled, and are left out.

    Raises:
        UserError: a file is damaged, or an id is no whole number.
    """
    config = read_if_there(Path(directory), CONFIG_NAME)
    found = []
    for name, fields in ((GENERATION_NAME, read_if_there(Path(directory), GENERATION_NAME)), (CONFIG_NAME, config)):
        found += ids_of(text_config(fields).get("eos_token_id"), f"{Path(directory) / name}: eos_token_id")
    num_rows = text_config(config).get("vocab_size")
    limit = num_rows if type(num_rows) is int else 2**31
    return tuple(dict.fromkeys(one for one in found if one < limit))


def ids_of(value: Any, where: str) -> list[int]:
    """Return the ids that ``eos_token_id`` and the like stand for: one, a list, or nothing.

    Raises:
        UserError: it is something else; ``where`` names it.
    """
    ids = [] if value is None else list(value) if isinstance(value, list) else [value]
    for one in ids:
        if type(one) is not int or not 0 <= one < 2**31:
            raise UserError(f"{where} is {value!r}: give the id of a token, or a list of them")
    return ids
