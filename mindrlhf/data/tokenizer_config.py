"""Settings of a tokenizer in ``tokenizer_config.json`` and its neighbours in a model's directory."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mindrlhf.errors import UserError
from mindrlhf.system.sizes import read_bounded, read_json_object

CONFIG_NAME, GENERATION_NAME = "config.json", "generation_config.json"
TOKENIZER_CONFIG_NAME, SPECIAL_TOKENS_NAME = "tokenizer_config.json", "special_tokens_map.json"
# Templates that a tokenizer does not name.
DEFAULT_TEMPLATE = "default"
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
ADDED_TOKEN_FLAGS = ("special", "normalized", "lstrip", "rstrip", "single_word")


@dataclass(frozen=True)
class AddedTokenSpec:
    """A token that is matched in the text before the model sees it, with the id it must have."""

    token_id: int
    content: str
    flags: Mapping[str, bool] = field(default_factory=dict)


@dataclass(frozen=True)
class TokenizerConfig:
    """The settings this package needs; None or empty where the files say nothing.

    Attributes:
        special_tokens: by the names that chat templates know them by: ``bos_token`` and the like,
            ``additional_special_tokens`` (a list), and those of ``extra_special_tokens``.
        other_eos_token: what the file that does not count names as eos, where that is another token.
        chat_templates: Jinja sources by name; one without a name is the ``default``.
        template_files: the file that each of them is from.
        add_bos_token: None where the tokenizer's class says it.
        is_given: there is a tokenizer_config.json.
    """

    tokenizer_class: str | None = None
    special_tokens: Mapping[str, str | list[str]] = field(default_factory=dict)
    other_eos_token: str | None = None
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    template_files: Mapping[str, str] = field(default_factory=dict)
    add_bos_token: bool | None = None
    added_tokens: tuple[AddedTokenSpec, ...] = ()
    is_given: bool = True


def read_tokenizer_config(directory: Path) -> TokenizerConfig:
    """Return the settings found in ``directory``: tokenizer_config.json, special_tokens_map.json and chat templates.

    Where the first has ``added_tokens_decoder``, its special tokens come before those of the second; in older files it
    is the other way round, as in transformers.

    Raises:
        UserError: a file is damaged or an entry has the wrong form.
    """
    path = directory / TOKENIZER_CONFIG_NAME
    fields = read_if_there(directory, TOKENIZER_CONFIG_NAME)
    given = {key: value for key, value in fields.items() if value}
    names = {key: value for key, value in read_if_there(directory, SPECIAL_TOKENS_NAME).items() if value}
    first, second = (given, names) if "added_tokens_decoder" in fields else (names, given)
    tokens, others = _special_tokens({**second, **first}), _special_tokens(second)
    templates, files = _chat_templates(directory, fields.get("chat_template"))
    adds_bos = fields.get("add_bos_token")
    return TokenizerConfig(
        tokenizer_class=kind if isinstance(kind := fields.get("tokenizer_class"), str) else None,
        special_tokens=tokens,
        other_eos_token=other if (other := others.get("eos_token")) != tokens.get("eos_token") else None,
        chat_templates=templates,
        template_files=files,
        add_bos_token=None if adds_bos is None else bool(adds_bos),
        added_tokens=_added_tokens(path, fields.get("added_tokens_decoder") or {}),
        is_given=path.is_file(),
    )


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
    """Return the ids at which generation_config.json and config.json end a response.

    Ids that the model has no row for can never be sampled, and are left out.

    Raises:
        UserError: a file is damaged, or an id is no whole number.
    """
    directory, found = Path(directory), []
    for name in (GENERATION_NAME, CONFIG_NAME):
        found += ids_of(text_config(read_if_there(directory, name)).get("eos_token_id"), directory / name)
    num_rows = text_config(read_if_there(directory, CONFIG_NAME)).get("vocab_size")
    limit = num_rows if type(num_rows) is int else 2**31
    return tuple(dict.fromkeys(one for one in found if one < limit))


def ids_of(value: Any, path: Path) -> list[int]:
    """Return the ids that the ``eos_token_id`` of a file stands for: one, a list, or nothing.

    Raises:
        UserError: it is something else.
    """
    ids = [] if value is None else list(value) if isinstance(value, list) else [value]
    for one in ids:
        if type(one) is not int or not 0 <= one < 2**31:
            raise UserError(f"{path} has eos_token_id={value!r}: give the id of a token, or a list of them")
    return ids


def _token_text(token: object) -> str | None:
    """A token is written either as its text or as an object with its text and flags."""
    if isinstance(token, Mapping):
        token = token.get("content")
    if not isinstance(token, str) or not token:
        return None
    _check_encodable(token)
    return token


def _check_encodable(token: str) -> None:
    """Refuse half of a surrogate pair, which JSON can hold and no tokenizer can take."""
    try:
        token.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"tokenizer_config.json holds the token {token!r}, which is no text: {error.reason}") from error


def _special_tokens(fields: Mapping[str, object]) -> dict[str, str | list[str]]:
    extra = fields.get("extra_special_tokens")
    named = {**(extra if isinstance(extra, Mapping) else {}), **{name: fields.get(name) for name in SPECIAL_TOKENS}}
    tokens: dict[str, str | list[str]] = {name: text for name, one in named.items() if (text := _token_text(one))}
    more = fields.get("additional_special_tokens")
    if isinstance(more, list) and (texts := [text for one in more if (text := _token_text(one))]):
        tokens["additional_special_tokens"] = texts
    return tokens


def _chat_templates(directory: Path, entry: object) -> tuple[dict[str, str], dict[str, str]]:
    """Look for chat templates where transformers 4.57 does: files of their own come before tokenizer_config.json, and a
    processor's chat_template.json, where there is a processor, before both.

    Returns:
        The templates by name, and the file of each.
    """
    files = {path.stem: path for path in sorted(directory.glob("additional_chat_templates/*.jinja"))}
    if (default := directory / "chat_template.jinja").is_file():
        files[DEFAULT_TEMPLATE] = default
    if files:
        templates: dict[str, object] = {name: _read_text(path) for name, path in files.items()}
        origins = {name: str(path.relative_to(directory)) for name, path in files.items()}
    elif isinstance(entry, list):
        templates = {item.get("name"): item.get("template") for item in entry if isinstance(item, Mapping)}
    else:
        templates = dict(entry) if isinstance(entry, Mapping) else {DEFAULT_TEMPLATE: entry}
    if not files:
        origins = dict.fromkeys(map(str, templates), TOKENIZER_CONFIG_NAME)
    legacy = directory / "chat_template.json"
    if legacy.is_file() and (not templates.get(DEFAULT_TEMPLATE) or (directory / "preprocessor_config.json").is_file()):
        templates[DEFAULT_TEMPLATE] = read_json_object(legacy).get("chat_template")
        origins[DEFAULT_TEMPLATE] = legacy.name
    found = {str(name): source for name, source in templates.items() if isinstance(source, str)}
    return found, {name: origins[name] for name in found}


def _read_text(path: Path) -> str:
    try:
        return read_bounded(path).decode()
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}") from error


def _added_tokens(path: Path, entries: object) -> tuple[AddedTokenSpec, ...]:
    try:
        specs = [
            AddedTokenSpec(
                token_id=int(token_id),
                content=entry["content"],
                flags={flag: bool(entry[flag]) for flag in ADDED_TOKEN_FLAGS if flag in entry},
            )
            for token_id, entry in entries.items()
        ]
        for spec in specs:
            if not isinstance(spec.content, str) or not 0 <= spec.token_id < 2**31:
                raise ValueError(f"token {spec.token_id} is {spec.content!r}")
            _check_encodable(spec.content)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: added_tokens_decoder must map ids to objects with 'content' ({error})") from error
    return tuple(sorted(specs, key=lambda spec: spec.token_id))
