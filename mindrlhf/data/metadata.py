"""Metadata of a model directory that steers prompts and responses: each value, and the file that it is from."""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindrlhf.data.tokenizer_config import (
    CONFIG_NAME,
    GENERATION_NAME,
    TOKENIZER_CONFIG_NAME,
    ids_of,
    read_if_there,
    text_config,
)
from mindrlhf.data.tokenizers import Tokenizer, load_tokenizer
from mindrlhf.errors import UserError
from mindrlhf.hub.cache import no_directory
from mindrlhf.specs import find_spec
from mindrlhf.system.files import write_json

_NONE = "none"


@dataclass(frozen=True)
class Fact:
    """A property of a model as text, the files that say it ("" where none does), and contradictions and refusals."""

    name: str
    value: str
    source: str
    notes: tuple[str, ...] = ()


def read_metadata(directory: str | Path) -> list[Fact]:
    """Return what the files of a model's directory say.

    Raises:
        UserError: there is no such directory, or one of its files is damaged.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise UserError(no_directory(str(directory)))
    config, generation = (read_if_there(directory, name) for name in (CONFIG_NAME, GENERATION_NAME))
    facts = [_architecture(config)] if config else []
    try:
        tokenizer = load_tokenizer(directory)
    except UserError as error:
        if not facts:
            raise
        return [*facts, Fact("tokenizer", _NONE, "", (str(error),))]
    return [*facts, *_tokenizer_facts(directory, tokenizer, config, generation)]


def _architecture(config: Mapping[str, Any]) -> Fact:
    refused = ()
    try:
        find_spec(dict(config)).dims(dict(config))
    except UserError as error:
        refused = (f"refused: {error}",)
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else _NONE
    return Fact("architecture", str(name), f"{CONFIG_NAME}: architectures", refused)


def _tokenizer_facts(
    directory: Path, tokenizer: Tokenizer, config: Mapping[str, Any], generation: Mapping[str, Any]
) -> Iterator[Fact]:
    rows = text_config(config).get("vocab_size")
    notes = ()
    if type(rows) is int and tokenizer.vocab_size > rows:
        notes = (f"contradiction: the model has {rows} rows, so that it cannot read the last tokens",)
    kind = read_if_there(directory, TOKENIZER_CONFIG_NAME).get("tokenizer_class") or "class not named"
    yield Fact("tokenizer", f"{tokenizer.vocab_size} tokens, {kind}", TOKENIZER_CONFIG_NAME, notes)
    yield _ends(directory, tokenizer, config, generation)
    adds = f", put before a text: {tokenizer.bos_prefix!r}" if tokenizer.bos_prefix else ", not put before a text"
    yield Fact("begin", f"{tokenizer.bos_token!r}{adds}" if tokenizer.bos_token else _NONE, TOKENIZER_CONFIG_NAME)
    by_end = "" if tokenizer.special_tokens.get("pad_token") else ", the end token, as none is named"
    yield Fact("padding", f"{_shown(tokenizer, tokenizer.pad_token_id)}{by_end}", TOKENIZER_CONFIG_NAME)
    for name, source in tokenizer.chat_templates.items():
        label = "template" if name == "default" else f"template {name}"
        yield Fact(label, f"{len(source)} characters", tokenizer.template_files[name])
    if not tokenizer.chat_templates:
        yield Fact("template", _NONE, "", ("--template plain or r1 needs none",))


def _shown(tokenizer: Tokenizer, token_id: int) -> str:
    return f"{token_id} {tokenizer.decode([token_id], skip_special_tokens=False)!r}"


def _ends(directory: Path, tokenizer: Tokenizer, config: Mapping[str, Any], generation: Mapping[str, Any]) -> Fact:
    named = {
        "the tokenizer": [one for one in (tokenizer.eos_token_id,) if one is not None],
        GENERATION_NAME: ids_of(text_config(generation).get("eos_token_id"), directory / GENERATION_NAME),
        CONFIG_NAME: ids_of(text_config(config).get("eos_token_id"), directory / CONFIG_NAME),
    }
    if tokenizer.turn_end_id is not None:
        named["the chat end token"] = [tokenizer.turn_end_id]
    ends, notes = tokenizer.eos_token_ids, []
    for name in (GENERATION_NAME, CONFIG_NAME):
        missing = [one for one in ends if one not in named[name]]
        if named[name] and missing:
            notes.append(f"contradiction: {name} does not name {', '.join(map(str, missing))}; all of them count")
    for one in ends:
        if (text := tokenizer.decode([one], skip_special_tokens=False)) not in tokenizer.control_tokens:
            notes.append(f"{one} is the ordinary token {text!r}: responses end where it is said")
    for name, ids in named.items():
        if lost := [one for one in ids if one not in ends]:
            notes.append(f"{name} names {', '.join(map(str, lost))}, which the model has no row for: left out")
    sources = [name for name, ids in named.items() if set(ids) & set(ends)]
    value = ", ".join(_shown(tokenizer, one) for one in ends) or _NONE
    return Fact("end", value, ", ".join(sources), tuple(notes) or (() if ends else ("responses would never end",)))


def generation_config(tokenizer_dir: str | Path) -> dict | None:
    """generation_config.json of a model that ends its answers at every end token of a tokenizer; None without any."""
    try:
        tokenizer = load_tokenizer(tokenizer_dir)
    except UserError:
        return None  # a directory of weights alone, or with a tokenizer of a kind that is copied unread
    if not tokenizer.eos_token_ids:
        return None
    given = read_if_there(Path(tokenizer_dir), GENERATION_NAME)
    named = ids_of(given.get("eos_token_id"), Path(tokenizer_dir) / GENERATION_NAME)
    ends = list(dict.fromkeys((*named, *tokenizer.eos_token_ids)))
    return {"pad_token_id": tokenizer.pad_token_id} | given | {"eos_token_id": ends}


def with_padding(config: dict, tokenizer_dir: str | Path) -> dict:
    """config.json of a model that scores, with the padding behind whose last other token a batch is read; of other
    models as it is."""
    is_scorer = any(name.endswith("ForSequenceClassification") for name in config.get("architectures") or ())
    if not is_scorer or isinstance(config.get("pad_token_id"), int):
        return config
    try:
        return {**config, "pad_token_id": load_tokenizer(tokenizer_dir).pad_token_id}
    except UserError:
        return config  # as above


def add_generation(directory: Path, model_dir: str | Path) -> None:
    """Add to the generation_config.json of an exported model what that of the model it was says beside it.

    The tokenizer that it was exported with may be from another directory.
    """
    own, base = (read_if_there(Path(one), GENERATION_NAME) for one in (directory, model_dir))
    if not own or not base:
        return
    lists = [ids_of(fields.get("eos_token_id"), Path(model_dir) / GENERATION_NAME) for fields in (own, base)]
    merged = {**base, **own, "eos_token_id": list(dict.fromkeys(itertools.chain(*lists)))}
    if merged != own:
        write_json(directory / GENERATION_NAME, merged)
