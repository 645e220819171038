"""Tokenizers from Hugging Face directories and SentencePiece models, behind one small interface.

The ids are those of transformers' AutoTokenizer, which takes 0.9 s more of processor time to start, in every rank and
data worker (docs/install.md).
"""

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
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
QWEN2_END_TOKEN = "<|endoftext|>"
# Whether these classes of transformers 4.57 put bos before a text where tokenizer_config.json does not say.
ADDS_BOS = {"LlamaTokenizer": True, "CodeLlamaTokenizer": True, "GemmaTokenizer": True, "CohereTokenizer": True}
ADDS_BOS |= {"GPTNeoXTokenizer": False}
# Published tokenizers leave some hundreds of ids unused.
_MAX_UNUSED_IDS = 100_000
MAX_TOKENIZER_BYTES = 256 << 20


class Tokenizer(ABC):
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

    def __init__(self, config: TokenizerConfig, added_ids: dict[str, int], special: set[str], vocab_size: int):
        """``added_ids`` maps the special and added tokens to their ids; ``special`` are those marked as special."""
        self.vocab_size = vocab_size
        self.special_tokens = config.special_tokens
        self.bos_token = config.special_tokens.get("bos_token")
        self.eos_token = config.special_tokens.get("eos_token")
        pad_token = config.special_tokens.get("pad_token")
        self.chat_templates = config.chat_templates
        self.template_files = config.template_files
        self.chat_template = config.chat_templates.get(DEFAULT_TEMPLATE)
        self.chat_end_token = next((token for token in CHAT_END_TOKENS if token in added_ids), None)
        named = {self.bos_token, self.eos_token, pad_token, self.chat_end_token} - {None}
        self.control_tokens = frozenset(special | named)
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
        """The text of what the tokenizer's own file puts before a text."""
        return ""

    def _special_id(self, token: str) -> int:
        token_id = self.token_to_id(token)
        if token_id is None:
            raise UserError(f"tokenizer_config.json names the token {token!r}, which is not in the vocabulary")
        return token_id

    @abstractmethod
    def token_to_id(self, token: str) -> int | None:
        """Return the id of one token of the vocabulary, or None."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Return the ids of ``text``; special tokens written out in it become their ids."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    @abstractmethod
    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ``ids``; ids outside the vocabulary (unused embedding rows) give nothing."""

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of all that decides which ids a text becomes.

        The same for the same tokenizer on any machine, in any place, and stored as tokenizer.json or as
        vocab.json and merges.txt. The chat template is not part of it.
        """
        canonical = json.dumps(self._definition(), sort_keys=True, ensure_ascii=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    @abstractmethod
    def _definition(self) -> dict:
        """Return JSON values that define the tokenization."""


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer run by the ``tokenizers`` library."""

    def __init__(self, backend: tokenizers.Tokenizer, config: TokenizerConfig):
        # Saved tokenizers may carry settings that would cut or fill every text.
        backend.no_truncation()
        backend.no_padding()
        _add_tokens(backend, config.added_tokens)
        self._backend = backend
        added_ids = {token.content: token_id for token_id, token in backend.get_added_tokens_decoder().items()}
        special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
        super().__init__(config, added_ids, special, vocab_size=_checked_vocab_size(backend.get_vocab()))

    def _saved_prefix(self) -> str:
        if self._backend.post_processor is None:
            return ""
        try:
            ids, plain = (self._backend.encode("a", add_special_tokens=adds).ids for adds in (True, False))
        except Exception:  # the library's, of a vocabulary of words that has no such one: nobody can tell
            return ""
        places = [place for place in range(len(ids) - len(plain) + 1) if ids[place : place + len(plain)] == plain]
        return self.decode(ids[: places[0]], skip_special_tokens=False) if places and plain else ""

    def token_to_id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    def encode(self, text: str) -> list[int]:
        return self._backend.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self._backend.decode([int(token_id) for token_id in ids], skip_special_tokens=skip_special_tokens)

    def _definition(self) -> dict:
        saved = json.loads(self._backend.to_str())
        model = saved["model"]
        # Older releases of the library write a merge as one string.
        merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model.pop("merges", None) or ()]
        return {
            "vocab": model.pop("vocab", None),
            "merges": merges,
            "model": _without_defaults(model),
            "added_tokens": _without_defaults(saved["added_tokens"]),
            "normalizer": _without_defaults(saved["normalizer"]),
            "pre_tokenizer": _without_defaults(saved["pre_tokenizer"]),
        }


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model, plus the added tokens that a tokenizer_config.json beside it names.

    Text between special tokens is encoded piece by piece, each with the model's own normalisation (as
    transformers' ``LlamaTokenizer`` does with ``legacy=True``).
    """

    def __init__(self, path: Path, config: TokenizerConfig):
        import sentencepiece

        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(read_bounded(path, MAX_TOKENIZER_BYTES))
        except (OSError, RuntimeError, ValueError) as error:
            raise UserError(f"{path} is not a readable SentencePiece model: {error}") from error
        model = self._processor
        self._num_pieces = model.GetPieceSize()
        control_ids = [piece_id for piece_id in range(self._num_pieces) if model.IsControl(piece_id)]
        self._special_ids = {model.IdToPiece(piece_id): piece_id for piece_id in control_ids}
        if not config.is_given:
            named = (("bos_token", model.bos_id()), ("eos_token", model.eos_id()))
            pieces = {name: model.IdToPiece(piece_id) for name, piece_id in named if piece_id >= 0}
            config = replace(config, special_tokens={**pieces, **config.special_tokens})
        for spec in config.added_tokens:
            self._check_added(path, spec)
            self._special_ids[spec.content] = spec.token_id
        self._id_to_added = {token_id: token for token, token_id in self._special_ids.items()}
        self._skipped_ids = {*control_ids, *(s.token_id for s in config.added_tokens if s.flags.get("special", True))}
        longest_first = sorted(map(re.escape, self._special_ids), key=len, reverse=True)
        self._splitter = re.compile("(" + "|".join(longest_first) + ")") if longest_first else None
        vocab_size = max(self._num_pieces, *(token_id + 1 for token_id in self._special_ids.values()), 0)
        special = {token for token, token_id in self._special_ids.items() if token_id in self._skipped_ids}
        super().__init__(config, self._special_ids, special, vocab_size)

    def _check_added(self, path: Path, spec: AddedTokenSpec) -> None:
        if spec.token_id >= self._num_pieces:
            return
        if (piece := self._processor.IdToPiece(spec.token_id)) != spec.content:
            raise UserError(
                f"{path.parent / 'tokenizer_config.json'} gives {spec.content!r} the id {spec.token_id}, "
                f"which is {piece!r} in {path.name}"
            )

    def token_to_id(self, token: str) -> int | None:
        if token in self._special_ids:
            return self._special_ids[token]
        piece_id = self._processor.PieceToId(token)
        return piece_id if self._processor.IdToPiece(piece_id) == token else None

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for part in self._splitter.split(text) if self._splitter else [text]:
            if part in self._special_ids:
                ids.append(self._special_ids[part])
            elif part:
                ids.extend(self._processor.EncodeAsIds(part))
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        texts: list[str] = []
        pieces: list[int] = []
        for token_id in map(int, ids):
            if token_id in self._id_to_added:
                texts.append(self._processor.DecodeIds(pieces))
                pieces = []
                if not (skip_special_tokens and token_id in self._skipped_ids):
                    texts.append(self._id_to_added[token_id])
            elif token_id < self._num_pieces:
                pieces.append(token_id)
        return "".join([*texts, self._processor.DecodeIds(pieces)])

    def _definition(self) -> dict:
        model_hash = hashlib.sha256(self._processor.serialized_model_proto()).hexdigest()
        return {"sentencepiece": model_hash, "special_tokens": self._special_ids}


def load_tokenizer(path: str | Path, merges_path: str | Path | None = None) -> Tokenizer:
    """Load the tokenizer at ``path``, with the end tokens of the model's configs beside it.

    Args:
        path: a directory with tokenizer.json, vocab.json and merges.txt, or a SentencePiece ``.model``; or
            the ``.model`` file itself; or, with ``merges_path``, a vocab.json file.
        merges_path: merges.txt of a vocabulary file that may lie anywhere.

    Raises:
        UserError: there is no tokenizer, or a file of it or of the configs is damaged.
    """
    path = Path(path)
    tokenizer = _load(path) if merges_path is None else _load_vocab_and_merges(path, Path(merges_path))
    tokenizer.end_at(end_ids(path if path.is_dir() else path.parent))
    return tokenizer


def _load(path: Path) -> Tokenizer:
    if path.is_file() and path.suffix == ".model":
        return SentencePieceTokenizer(path, read_tokenizer_config(path.parent))
    if not path.is_dir():
        expected = f"expected a directory or a SentencePiece .model file{advice(str(path))}"
        raise UserError(f"no tokenizer at {path}: {expected}")
    if (path / "tokenizer.json").is_file():
        return _load_tokenizer_json(path / "tokenizer.json")
    if (path / "vocab.json").is_file() and (path / "merges.txt").is_file():
        return _load_vocab_and_merges(path / "vocab.json", path / "merges.txt")
    models = sorted(path.glob("*.model"))
    if len(models) == 1:
        return SentencePieceTokenizer(models[0], read_tokenizer_config(path))
    if models:
        raise UserError(f"{path} holds several SentencePiece models; name one of {', '.join(m.name for m in models)}")
    raise NotThere(f"no tokenizer in {path}: looked for tokenizer.json, vocab.json with merges.txt, and *.model")


def _load_tokenizer_json(path: Path) -> Tokenizer:
    try:
        backend = tokenizers.Tokenizer.from_buffer(read_bounded(path, MAX_TOKENIZER_BYTES))
    except Exception as error:  # the library raises bare Exception
        raise UserError(f"{path} is not a readable tokenizer: {error}") from error
    return HuggingFaceTokenizer(backend, read_tokenizer_config(path.parent))


def _load_vocab_and_merges(vocab_path: Path, merges_path: Path) -> Tokenizer:
    """Build Qwen2's byte-level BPE; settings come from a tokenizer_config.json beside the vocabulary."""
    for path in (vocab_path, merges_path):
        if not path.is_file():
            raise UserError(f"no such tokenizer file: {path}")
    config = read_tokenizer_config(vocab_path.parent)
    # The files do not say how text is cut into words, so the class must: guessing would give wrong ids.
    tokenizer_class = config.tokenizer_class or "Qwen2Tokenizer"
    if tokenizer_class not in ("Qwen2Tokenizer", "Qwen2TokenizerFast"):
        raise UserError(
            f"{vocab_path} belongs to a {tokenizer_class}; from vocab.json and merges.txt only Qwen2Tokenizer can be "
            "built, so save it with transformers as tokenizer.json"
        )
    try:
        model = tokenizers.models.BPE.from_file(str(vocab_path), str(merges_path))
    except Exception as error:  # the library raises bare Exception
        raise UserError(f"{vocab_path} and {merges_path} are not a readable vocabulary: {error}") from error
    backend = tokenizers.Tokenizer(model)
    if not config.is_given:
        # What Qwen2Tokenizer does without a configuration.
        end_token = AddedTokenSpec(backend.get_vocab_size(), QWEN2_END_TOKEN, {"special": True, "normalized": False})
        special = {"eos_token": QWEN2_END_TOKEN, "pad_token": QWEN2_END_TOKEN}
        config = replace(config, special_tokens={**special, **config.special_tokens}, added_tokens=(end_token,))
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(QWEN2_SPLIT), behavior="isolated")
    to_bytes = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=config.add_prefix_space, use_regex=False)
    backend.normalizer = tokenizers.normalizers.NFC()
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, to_bytes])
    backend.decoder = tokenizers.decoders.ByteLevel()
    return HuggingFaceTokenizer(backend, config)


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
