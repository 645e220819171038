"""What ``tokenizer_config.json`` and its neighbours say about a tokenizer."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mindrlhf.errors import UserError

ADDED_TOKEN_FLAGS = ("special", "normalized", "lstrip", "rstrip", "single_word")


@dataclass(frozen=True)
class AddedTokenSpec:
    """A token that is matched in the text before the model sees it, with the id it must have."""

    token_id: int
    content: str
    flags: Mapping[str, bool] = field(default_factory=dict)


@dataclass(frozen=True)
class TokenizerConfig:
    """The settings this package needs; None where the files say nothing."""

    tokenizer_class: str | None = None
    bos_token: str | None = None
    eos_token: str | None = None
    pad_token: str | None = None
    chat_template: str | None = None
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
    special = {key: _token_text(fields.get(key) or names.get(key)) for key in ("bos_token", "eos_token", "pad_token")}
    return TokenizerConfig(
        tokenizer_class=fields.get("tokenizer_class"),
        chat_template=_chat_template(directory, fields.get("chat_template")),
        add_prefix_space=bool(fields.get("add_prefix_space", False)),
        added_tokens=_added_tokens(path, fields.get("added_tokens_decoder") or {}),
        **special,
    )


def read_json_object(path: Path) -> dict:
    """Return the JSON object in ``path``; anything else is a ``UserError``."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
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


def _chat_template(directory: Path, entry: object) -> str | None:
    """Newer directories keep the template in a file of its own, which comes first; some name several."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"cannot read {path}: {error}") from error
    if isinstance(entry, list):
        templates = {item.get("name"): item.get("template") for item in entry if isinstance(item, Mapping)}
        entry = templates.get("default")
    return entry if isinstance(entry, str) else None


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
