"""Tokenizers of model directories, run by the ``tokenizers`` library.

tokenizer.json is read by that library alone; vocab.json with merges.txt and SentencePiece models are converted by
transformers, which takes 0.9 s more of processor time to start.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import tokenizers

from mindrlhf.data.tokenizer_config import (
    DEFAULT_TEMPLATE,
    AddedTokenSpec,
    TokenizerConfig,
    end_ids,
    read_tokenizer_config,
)
from mindrlhf.errors import NotThere, UserError
from mindrlhf.hub.cache import advice
from mindrlhf.system.sizes import read_bounded

# Tokens with which chat models end a turn; a chat model stops on it, whatever its eos token is.
CHAT_END_TOKENS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>")

# Qwen2's way of cutting text into words before byte-pair merging (transformers' Qwen2Tokenizer, Apache-2.0).
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Whether these classes of transformers 4.57 put bos before a text where tokenizer_config.json does not say.
ADDS_BOS = {"LlamaTokenizer": True, "CodeLlamaTokenizer": True, "GemmaTokenizer": True, "CohereTokenizer": True}
ADDS_BOS |= {"GPTNeoXTokenizer": False}
# Published tokenizers leave some hundreds of ids unused.
_MAX_UNUSED_IDS = 100_000
MAX_TOKENIZER_BYTES = 256 << 20
_MAX_GROWTH, _MAX_PROBE_CHARS, _MAX_POST_PROCESSOR_CHARS = 100, 10_000, 100_000
# Around one step of a normaliser.
_ALONE = {"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}, "added_tokens": []}


class Tokenizer:
    """Text to token ids and back. Nothing is added or cut: no bos, no eos, no padding, no truncation.

    Attributes:
        vocab_size: one more than the highest id that ``encode`` can give. (A model's embedding may have
            more rows.)
        bos_token, eos_token: their text, None when there is none.
        special_tokens, chat_templates, template_files: see ``TokenizerConfig``.
        turn_end_id, eos_token_id: ids of the chat end token and of eos; None when there is none.
        eos_token_ids: every id that ends a response: the chat end token first, then eos, where they exist, then what
            generation_config.json and config.json name beside them.
        pad_token_id: the pad token, else eos, else 0. Padding is masked everywhere, so any valid id serves.
        chat_template: Jinja source of the default one, None when the tokenizer has none.
        bos_prefix: text of the tokens that transformers puts before a text by itself, "" where there are none. Chat
            templates write them out.
        control_tokens: the texts that steer a model rather than say something: special tokens, and all of the above.
    """

    def __init__(self, backend: tokenizers.Tokenizer, config: TokenizerConfig):
        # Saved tokenizers may carry settings that would cut or fill every text.
        backend.no_truncation()
        backend.no_padding()
        _add_tokens(backend, config.added_tokens)
        self._backend = backend
        self.vocab_size = _checked_vocab_size(backend.get_vocab())
        added = {token.content: token.special for token in backend.get_added_tokens_decoder().values()}
        self.special_tokens = config.special_tokens
        self.bos_token = config.special_tokens.get("bos_token")
        self.eos_token = config.special_tokens.get("eos_token")
        pad_token = config.special_tokens.get("pad_token")
        self.chat_templates = config.chat_templates
        self.template_files = config.template_files
        self.chat_template = config.chat_templates.get(DEFAULT_TEMPLATE)
        self.chat_end_token = next((token for token in CHAT_END_TOKENS if token in added), None)
        named = {self.bos_token, self.eos_token, pad_token, self.chat_end_token} - {None}
        self.control_tokens = frozenset({token for token, is_special in added.items() if is_special} | named)
        self.turn_end_id, self.eos_token_id = (
            self._special_id(token) if token else None for token in (self.chat_end_token, self.eos_token)
        )
        ends = [token_id for token_id in (self.turn_end_id, self.eos_token_id) if token_id is not None]
        other = self.token_to_id(config.other_eos_token) if config.other_eos_token else None
        self.eos_token_ids = tuple(dict.fromkeys(ends if other is None else [*ends, other]))
        if pad_token:
            self.pad_token_id = self._special_id(pad_token)
        else:
            self.pad_token_id = ends[-1] if ends else 0
        self.bos_prefix = self._bos_prefix(config)

    def end_at(self, token_ids: Sequence[int]) -> None:
        """Have responses end at further ids, those of a model's configs (``end_ids``)."""
        self.eos_token_ids = tuple(dict.fromkeys((*self.eos_token_ids, *token_ids)))

    def _bos_prefix(self, config: TokenizerConfig) -> str:
        """Classes of these families go by ``add_bos_token``, whatever the file of the tokenizer says."""
        by_default = ADDS_BOS.get((config.tokenizer_class or "").removesuffix("Fast"))
        if by_default is None:
            return self._saved_prefix()
        adds = by_default if config.add_bos_token is None else config.add_bos_token
        return self.bos_token or "" if adds else ""

    def _saved_prefix(self) -> str:
        """Return the text of what the tokenizer's own file puts before a text."""
        if self._backend.post_processor is None:
            return ""
        try:
            ids, plain = (self._backend.encode("a", add_special_tokens=adds).ids for adds in (True, False))
        except Exception:  # the library's, of a vocabulary of words that has no such one: nobody can tell
            return ""
        starts = [start for start in range(len(ids) - len(plain) + 1) if ids[start : start + len(plain)] == plain]
        return self.decode(ids[: starts[0]], skip_special_tokens=False) if starts and plain else ""

    def _special_id(self, token: str) -> int:
        token_id = self.token_to_id(token)
        if token_id is None:
            raise UserError(f"tokenizer_config.json names the token {token!r}, which is not in the vocabulary")
        return token_id

    def token_to_id(self, token: str) -> int | None:
        """Return the id of one token of the vocabulary, or None."""
        return self._backend.token_to_id(token)

    def encode(self, text: str) -> list[int]:
        """Return the ids of ``text``; special tokens written out in it become their ids."""
        with _one_line("the tokenizer fails on a text"):
            return self._backend.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        with _one_line("the tokenizer fails on a text"):
            encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ``ids``; ids outside the vocabulary (unused embedding rows) give nothing."""
        return self._backend.decode([int(token_id) for token_id in ids], skip_special_tokens=skip_special_tokens)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of all that decides which ids a text becomes.

        The same for the same tokenizer on any machine, in any place, and stored as tokenizer.json or as
        vocab.json and merges.txt. The chat template is not part of it.
        """
        saved = json.loads(self._backend.to_str())
        model = saved["model"]
        # Older releases of the library write a merge as one string.
        merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model.pop("merges", None) or ()]
        parts = {name: saved[name] for name in ("added_tokens", "normalizer", "pre_tokenizer")}
        definition = {"vocab": model.pop("vocab", None), "merges": merges}
        definition |= {name: _without_defaults(value) for name, value in (parts | {"model": model}).items()}
        canonical = json.dumps(definition, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()


@contextmanager
def _one_line(what: str) -> Iterator[None]:
    """Make a UserError of what the library raises: bare Exception, and panics of Rust, which are not even that."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise UserError(f"{what}: {error}") from error
        raise


def load_tokenizer(path: str | Path, merges_path: str | Path | None = None) -> Tokenizer:
    """Load the tokenizer at ``path``, with the end tokens of the model's configs beside it.

    Args:
        path: a directory with tokenizer.json; with vocab.json and merges.txt, or with tokenizer.model, of a class of
            transformers that tokenizer_config.json names; or, with ``merges_path``, a vocab.json file.
        merges_path: merges.txt of a vocabulary file that may lie anywhere.

    Raises:
        UserError: there is no tokenizer, or a file of it or of the configs is damaged.
    """
    path = Path(path)
    directory = path.parent if merges_path else path
    if not directory.is_dir():
        raise UserError(f"no tokenizer at {directory}: expected a directory{advice(str(directory))}")
    config = read_tokenizer_config(directory)
    file = directory / "tokenizer.json"
    if merges_path is None and file.is_file():
        with _one_line(f"{file} is not a readable tokenizer"):
            data = read_bounded(file, MAX_TOKENIZER_BYTES)
            _check_growth(json.loads(data))
            backend = tokenizers.Tokenizer.from_buffer(data)
    else:
        backend, config = _converted(directory, config, path if merges_path else None, merges_path)
    tokenizer = Tokenizer(backend, config)
    tokenizer.end_at(end_ids(directory))
    return tokenizer


def _check_growth(definition: dict) -> None:
    """Refuse replacements whose results others replace, so that a short text becomes endless, or many special tokens.

    Such a chain goes by what its own steps write: they are run on that, one by one, before the library takes the file.

    Raises:
        ValueError: a text would grow too much.
    """
    if len(json.dumps(definition.get("post_processor"))) > _MAX_POST_PROCESSOR_CHARS:
        raise ValueError("its post_processor adds thousands of tokens to a text")
    for name in ("normalizer", "decoder"):
        steps = list(_steps(definition.get(name)))
        text = "".join(part for step in steps for part in _texts(step))[:_MAX_PROBE_CHARS]
        most = _MAX_GROWTH * max(1, len(text))
        for step in steps if text else ():
            if name == "normalizer" or step.get("type") == "Replace":
                alone = tokenizers.Tokenizer.from_str(json.dumps(_ALONE | {"normalizer": step}))
                text = alone.normalizer.normalize_str(text)
            if len(text) > most:
                raise ValueError(f"the replacements of its {name} make more than {_MAX_GROWTH} characters of one")


def _steps(part: object) -> Iterator[dict]:
    """Yield the steps of a normaliser or decoder in order."""
    if isinstance(part, dict):
        nested = part.get("normalizers", part.get("decoders"))
        if isinstance(nested, list):
            for item in nested:
                yield from _steps(item)
        else:
            yield part


def _texts(step: dict) -> Iterator[str]:
    """Yield the texts that a step writes or looks for."""
    pattern = step.get("pattern")
    for text in (step.get("content"), step.get("prepend"), *(pattern.values() if isinstance(pattern, dict) else ())):
        if isinstance(text, str):
            yield text


def _converted(
    directory: Path, config: TokenizerConfig, vocab: Path | None, merges: str | Path | None
) -> tuple[tokenizers.Tokenizer, TokenizerConfig]:
    """Have transformers build a tokenizer from the files of its class; without a class it is Qwen2's."""
    files = [vocab, Path(merges)] if vocab else [directory / "vocab.json", directory / "merges.txt"]
    has_vocab = all(file.is_file() for file in files)
    if vocab and not has_vocab:
        raise UserError(f"no such tokenizer file: {next(file for file in files if not file.is_file())}")
    if not has_vocab and not (directory / "tokenizer.model").is_file():
        raise NotThere(
            f"no tokenizer in {directory}: looked for tokenizer.json, vocab.json with merges.txt, and tokenizer.model"
        )
    for file in files if has_vocab else [directory / "tokenizer.model"]:
        if file.stat().st_size > MAX_TOKENIZER_BYTES:
            raise UserError(f"{file} has more than {MAX_TOKENIZER_BYTES >> 20} MiB")
    # Without PyTorch, which nothing here needs, transformers says so when it is imported.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    import transformers

    transformers.logging.set_verbosity_error()  # it explains older classes at length
    # The files do not say how text is cut into words, so the class must: guessing would give wrong ids.
    name = config.tokenizer_class or ("Qwen2Tokenizer" if has_vocab else "none")
    kind = getattr(transformers, f"{name.removesuffix('Fast')}Fast", None)
    if kind is None:
        raise UserError(
            f"{directory} has the tokenizer class {name!r} in tokenizer_config.json, which transformers cannot "
            "convert: save the tokenizer as tokenizer.json"
        )
    with _one_line(f"{directory} has no readable tokenizer of class {name}"):
        if config.is_given and not vocab:
            theirs = kind.from_pretrained(directory, local_files_only=True)
        else:
            theirs = kind(*map(str, files))
    if not config.is_given:
        config = replace(config, special_tokens={**theirs.special_tokens_map, **config.special_tokens})
    return theirs.backend_tokenizer, config


def _checked_vocab_size(ids: dict[str, int]) -> int:
    """The largest id and one. The library keeps a slot for each id below it, so a wild one would fill the memory."""
    token, largest = max(ids.items(), key=lambda item: item[1], default=("", -1))
    if largest >= 2 * len(ids) + _MAX_UNUSED_IDS:
        raise UserError(
            f"the tokenizer gives {token!r} the id {largest}, though it has only {len(ids)} tokens: its file is damaged"
        )
    return largest + 1


def _add_tokens(backend: tokenizers.Tokenizer, specs: Sequence[AddedTokenSpec]) -> None:
    """Add the tokens that ``backend`` does not know as added tokens yet, in the order of their ids."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    missing = [spec for spec in specs if spec.content not in known]
    backend.add_tokens([tokenizers.AddedToken(spec.content, **spec.flags) for spec in missing])
    for spec in specs:
        token_id = backend.token_to_id(spec.content)
        if token_id != spec.token_id:
            raise UserError(
                f"tokenizer_config.json gives {spec.content!r} the id {spec.token_id}, but it comes out as {token_id}: "
                "the vocabulary is of another tokenizer"
            )


def _without_defaults(value: object) -> object:
    """Drop what does not change the ids: unset keys, which releases write differently, and offset trimming."""
    if isinstance(value, dict):
        kept = {key: _without_defaults(item) for key, item in value.items() if key != "trim_offsets"}
        return {key: item for key, item in kept.items() if not (item is None or item is False or item == "")}
    if isinstance(value, list):
        return [_without_defaults(item) for item in value]
    return value
