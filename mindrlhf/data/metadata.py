"""All that the files of a model's directory say about it beside the weights: each value, and the file that it is from.

It is what every command goes by: tokens and templates as ``load_tokenizer`` has read them, sizes as the ``ModelSpec``
reads them.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindrlhf.data.tokenizer_config import (
    CONFIG_NAME,
    GENERATION_NAME,
    SPECIAL_TOKENS_NAME,
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

_SAMPLING = ("temperature", "top_p", "top_k", "repetition_penalty", "min_p")
_NONE = "none"


@dataclass(frozen=True)
class Fact:
    """One thing that is known of a model.

    Attributes:
        name: of the thing.
        value: as a text.
        source: the files that it is from, "" where none says it.
        notes: contradictions, and what is refused.
    """

    name: str
    value: str
    source: str
    notes: tuple[str, ...] = ()


def read_metadata(directory: str | Path) -> list[Fact]:
    """Return what the files of a model's directory say.

    Raises:
        UserError: there is no such directory, it holds none of these files, or one of them is damaged.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise UserError(no_directory(str(directory)))
    config, generation = (read_if_there(directory, name) for name in (CONFIG_NAME, GENERATION_NAME))
    facts = list(_model_facts(config)) if config else []
    try:
        tokenizer = load_tokenizer(directory)
    except UserError as error:
        facts.append(Fact("tokenizer", _NONE, "", (str(error),)))
    else:
        facts += _tokenizer_facts(directory, tokenizer, config, generation)
    if sampling := [f"{key} {generation[key]}" for key in _SAMPLING if generation.get(key) is not None]:
        note = "not read here: the keys of 'rollout' say how samples are made"
        facts.append(Fact("sampling", ", ".join(sampling), GENERATION_NAME, (note,)))
    return facts


def _model_facts(config: Mapping[str, Any]) -> Iterator[Fact]:
    text = text_config(config)
    architecture = config.get("architectures")
    refused = ()
    try:
        find_spec(dict(config)).dims(dict(config))
    except UserError as error:
        refused = (f"refused: {error}",)
    name = architecture[0] if isinstance(architecture, list) and architecture else _NONE
    yield Fact("architecture", str(name), f"{CONFIG_NAME}: architectures", refused)
    yield _first_of("dtype", text, "dtype", "torch_dtype")
    yield Fact("embedding", f"{text.get('vocab_size')} rows", f"{CONFIG_NAME}: vocab_size")
    tied = "output tied to the embedding" if config.get("tie_word_embeddings") else "output of its own"
    yield Fact("output", tied, f"{CONFIG_NAME}: tie_word_embeddings")
    yield _first_of("positions", text, "max_position_embeddings")
    yield _rope(text)
    yield _sliding_window(text)
    quantised = config.get("quantization_config") or config.get("compression_config")
    method = quantised.get("quant_method", "of an unknown kind") if isinstance(quantised, Mapping) else quantised
    advice = () if not quantised else ("dequantise it first: fp8 by `mindrlhf weights convert`",)
    yield Fact("quantisation", str(method or _NONE), f"{CONFIG_NAME}: quantization_config" * bool(quantised), advice)
    if config.get("auto_map"):
        yield Fact("own code", "named", f"{CONFIG_NAME}: auto_map", ("it is never run",))


def _first_of(name: str, fields: Mapping[str, Any], *keys: str) -> Fact:
    """A fact that newer and older releases of transformers write under different keys, the newer first."""
    found = {key: fields[key] for key in keys if fields.get(key) is not None}
    notes = ()
    if len({str(value) for value in found.values()}) > 1:
        notes = (f"contradiction: {', '.join(f'{key} is {value}' for key, value in found.items())}",)
    key = next(iter(found), "")
    return Fact(name, str(found.get(key, _NONE)), f"{CONFIG_NAME}: {key}" if key else "", notes)


def _rope(text: Mapping[str, Any]) -> Fact:
    key = next((one for one in ("rope_parameters", "rope_scaling") if text.get(one)), "")
    options = text[key] if key and isinstance(text[key], Mapping) else {}
    inner, outer = options.get("rope_theta"), text.get("rope_theta")
    kind = options.get("rope_type", options.get("type", "default"))
    base = inner if inner is not None else 10000.0 if outer is None else outer
    notes = ()
    if inner is not None and outer is not None and inner != outer:
        notes = (f"contradiction: rope_theta is {outer}, and {key} says {inner}, which counts",)
    factor = f", factor {options['factor']}" if options.get("factor") else ""
    keys = [one for one in (key, "rope_theta" if outer is not None else "") if one]
    return Fact("rotary", f"{kind}, base {base}{factor}", f"{CONFIG_NAME}: {', '.join(keys)}" if keys else "", notes)


def _sliding_window(text: Mapping[str, Any]) -> Fact:
    window, is_used = text.get("sliding_window"), text.get("use_sliding_window", True)
    if window is None or not is_used:
        return Fact("window", "full attention", f"{CONFIG_NAME}: use_sliding_window" if not is_used else "")
    return Fact("window", f"{window} tokens", f"{CONFIG_NAME}: sliding_window")


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
    bos = tokenizer.token_to_id(tokenizer.bos_token) if tokenizer.bos_token else None
    names = {CONFIG_NAME: text_config(config), GENERATION_NAME: generation}
    clash = _clashes("bos_token_id", bos, names, tokenizer)
    yield Fact("begin", f"{tokenizer.bos_token!r}{adds}" if bos is not None else _NONE, _of(directory, bos), clash)
    pad = tokenizer.special_tokens.get("pad_token")
    clash = _clashes("pad_token_id", tokenizer.token_to_id(pad), names, tokenizer) if pad else ()
    shown = _shown(tokenizer, tokenizer.pad_token_id)
    yield Fact("padding", shown if pad else f"{shown}, the end token, as none is named", _of(directory, pad), clash)
    side = read_if_there(directory, TOKENIZER_CONFIG_NAME).get("padding_side")
    if side:
        yield Fact("padding side", str(side), TOKENIZER_CONFIG_NAME, ("sequences are packed: no side matters",))
    yield from _templates(directory, tokenizer)


def _of(directory: Path, token: Any) -> str:
    """The files of the tokenizer's special tokens that there are."""
    files = [name for name in (TOKENIZER_CONFIG_NAME, SPECIAL_TOKENS_NAME) if (directory / name).is_file()]
    return ", ".join(files) if token is not None else ""


def _shown(tokenizer: Tokenizer, token_id: Any) -> str:
    if type(token_id) is not int or not 0 <= token_id < 2**31:
        return repr(token_id)
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


def _clashes(
    key: str, own: int | None, files: Mapping[str, Mapping[str, Any]], tokenizer: Tokenizer
) -> tuple[str, ...]:
    found = {name: fields.get(key) for name, fields in files.items() if fields.get(key) is not None}
    return tuple(
        f"contradiction: {name} says {_shown(tokenizer, value)}, which does not count"
        for name, value in found.items()
        if value != own and own is not None
    )


def _templates(directory: Path, tokenizer: Tokenizer) -> Iterator[Fact]:
    for name, source in tokenizer.chat_templates.items():
        file = tokenizer.template_files[name]
        entry = read_if_there(directory, TOKENIZER_CONFIG_NAME).get("chat_template")
        notes = ()
        if file != TOKENIZER_CONFIG_NAME and entry and name == "default" and entry != source:
            notes = (f"contradiction: {TOKENIZER_CONFIG_NAME} has another one; {file} counts, as in transformers",)
        yield Fact("template" if name == "default" else f"template {name}", f"{len(source)} characters", file, notes)
    if not tokenizer.chat_templates:
        yield Fact("template", _NONE, "", ("--template plain or r1 needs none",))


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
