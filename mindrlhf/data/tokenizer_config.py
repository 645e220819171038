"""What ``tokenizer_config.json`` and its neighbours say about a tokenizer."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mindrlhf.errors import UserError
from mindrlhf.system.sizes import read_bounded

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
        chat_templates: Jinja sources by name; one without a name is the ``default``.
    """

    tokenizer_class: str | None = None
    special_tokens: Mapping[str, str | list[str]] = field(default_factory=dict)
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    add_prefix_space: bool = False
    added_tokens: tuple[AddedTokenSpec, ...] = ()


def read_tokenizer_config(directory: Path) -> TokenizerConfig | None:
    """Return the settings found in ``directory``, or None when it holds no tokenizer_config.json.

    Raises:
        UserError: a file is damaged or an entry has the wrong form.
    """
    path = directory / "tokenizer_config.json"
    if not path.is_file():
        return None
    fields = read_json_object(path)
    names_path = directory / "special_tokens_map.json"
    names = read_json_object(names_path) if names_path.is_file() else {}
    return TokenizerConfig(
        tokenizer_class=fields.get("tokenizer_class"),
        special_tokens=_special_tokens({**names, **{key: value for key, value in fields.items() if value}}),
        chat_templates=_chat_templates(directory, fields.get("chat_template")),
        add_prefix_space=bool(fields.get("add_prefix_space", False)),
        added_tokens=_added_tokens(path, fields.get("added_tokens_decoder") or {}),
    )


def read_json_object(path: Path) -> dict:
    """Return the JSON object in ``path``; anything else is a ``UserError``."""
    try:
        fields = json.loads(read_bounded(path).decode())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    if not isinstance(fields, dict):
        raise UserError(f"{path} must hold a JSON object, found {type(fields).__name__}")
    return fields


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


def _chat_templates(directory: Path, entry: object) -> dict[str, str]:
    """Look for chat templates where transformers 4.57 does: files of their own come before tokenizer_config.json, and a
    processor's chat_template.json, where there is a processor, before both."""
    files = {path.stem: path for path in sorted(directory.glob("additional_chat_templates/*.jinja"))}
    if (default := directory / "chat_template.jinja").is_file():
        files[DEFAULT_TEMPLATE] = default
    if files:
        templates: dict[str, object] = {name: _read_text(path) for name, path in files.items()}
    elif isinstance(entry, list):
        templates = {item.get("name"): item.get("template") for item in entry if isinstance(item, Mapping)}
    else:
        templates = dict(entry) if isinstance(entry, Mapping) else {DEFAULT_TEMPLATE: entry}
    legacy = directory / "chat_template.json"
    if legacy.is_file() and (not templates.get(DEFAULT_TEMPLATE) or (directory / "preprocessor_config.json").is_file()):
        templates[DEFAULT_TEMPLATE] = read_json_object(legacy).get("chat_template")
    return {str(name): source for name, source in templates.items() if isinstance(source, str)}


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
