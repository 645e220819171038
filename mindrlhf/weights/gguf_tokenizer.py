"""The tokenizer of a GGUF file, as the files that a Hugging Face directory has for it.

How text is cut into words before byte pairs are merged is not in the file: `tokenizer.ggml.pre` names it. The patterns
are those of the models' published tokenizer.json, by the names that llama.cpp gives them (llama-vocab.cpp).
"""

import json
from collections.abc import Mapping

import tokenizers
from tokenizers import decoders, normalizers, pre_tokenizers

from mindrlhf.data.tokenizers import QWEN2_SPLIT
from mindrlhf.errors import UserError
from mindrlhf.weights.gguf_file import GgufFile, Value

_LLAMA3_SPLIT = QWEN2_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {
    "llama-bpe": _LLAMA3_SPLIT, "llama3": _LLAMA3_SPLIT, "llama-v3": _LLAMA3_SPLIT,
    "qwen2": QWEN2_SPLIT, "deepseek-r1-qwen": QWEN2_SPLIT,
    "tekken": _TEKKEN_SPLIT,
}  # fmt: skip
_TAKES_WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "tekken")  # a word of the vocabulary is not merged anew
_DIGIT_BY_DIGIT = ("smollm",)
_BYTE_LEVEL_ALONE = ("gpt-2",)
_PRE_TOKENIZERS = (*_SPLITS, *_DIGIT_BY_DIGIT, *_BYTE_LEVEL_ALONE)
# Of llama.cpp's token types.
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
_MAX_MERGED_CHARACTERS = 256
_BLANK = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's
_NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def tokenizer_files(file: GgufFile) -> dict[str, str]:
    """Return the contents of tokenizer.json, tokenizer_config.json and generation_config.json by their names.

    Raises:
        UserError: the file has no tokenizer, one of a kind that is not read, or a damaged one.
    """
    try:
        return _files(file)
    except UserError:
        raise
    except Exception as error:  # metadata of a wrong type, or the library, which raises bare Exception
        raise UserError(f"{file.path} has a tokenizer that cannot be made ({error}): download it again") from error


def _files(file: GgufFile) -> dict[str, str]:
    tokens = _texts(file, "tokens")
    if len(set(tokens)) < len(tokens):
        raise UserError(f"{file.path} is damaged, its tokenizer has a token twice: download it again")
    kinds = list(file.metadata.get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens)))
    if len(kinds) != len(tokens):
        raise UserError(f"{file.path} is damaged, it has {len(kinds)} types of {len(tokens)} tokens: download it again")
    builders = {"gpt2": _byte_level, "llama": _sentence_pieces}
    model = file.metadata.get("tokenizer.ggml.model")
    if model not in tuple(builders):
        raise UserError(f"{file.path} has a tokenizer of the model {model!r}: {' and '.join(builders)} are read")
    backend = builders[model](file, tokens, kinds)
    for wanted, is_special in ((_CONTROL, True), (_USER_DEFINED, False)):
        added = [token for token, kind in zip(tokens, kinds) if kind == wanted and token]
        backend.add_tokens([tokenizers.AddedToken(token, special=is_special, normalized=False) for token in added])
    ids = {key: _token_id(file, key, len(tokens)) for key in ("bos", "eos", "eot", "unknown", "padding")}
    if file.metadata.get("tokenizer.ggml.add_bos_token", model == "llama") and ids["bos"] is not None:
        # What transformers adds when it is asked for special tokens; templates write their own.
        bos = tokens[ids["bos"]]
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", f"{bos}:1", "$B:1"], special_tokens=[(bos, ids["bos"])]
        )
    config = {name: tokens[ids[key]] for name, key in _NAMED.items() if ids[key] is not None}
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    if templates := _chat_templates(file.metadata):
        config["chat_template"] = templates
    ends = [ids[key] for key in ("eos", "eot") if ids[key] is not None]
    generation = {"bos_token_id": ids["bos"], "eos_token_id": list(dict.fromkeys(ends)), "pad_token_id": ids["padding"]}
    kept = {key: value for key, value in generation.items() if value not in (None, [])}
    return {
        "tokenizer.json": backend.to_str(pretty=True),
        "tokenizer_config.json": json.dumps(config, indent=2, ensure_ascii=False) + "\n",
        "generation_config.json": json.dumps(kept, indent=2) + "\n",
    }


def _texts(file: GgufFile, name: str) -> list[str]:
    found = file.metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(found, list) or not found:
        raise UserError(f"{file.path} has no tokenizer.ggml.{name}: give a file with its tokenizer")
    return found


def _token_id(file: GgufFile, key: str, num_tokens: int) -> int | None:
    name = f"tokenizer.ggml.{key}_token_id"
    found = file.metadata.get(name)
    if found is not None and not (type(found) is int and 0 <= found < num_tokens):
        raise UserError(f"{file.path} is damaged, it has {name} = {found!r} of {num_tokens} tokens: download it again")
    return found


def _byte_level(file: GgufFile, tokens: list[str], _: list[int]) -> tokenizers.Tokenizer:
    pre = file.metadata.get("tokenizer.ggml.pre")
    if pre not in _PRE_TOKENIZERS:
        raise UserError(
            f"{file.path} has tokenizer.ggml.pre = {pre!r}, and how that cuts text into words is not known here: "
            f"{', '.join(_PRE_TOKENIZERS)} are; convert the original instead"
        )
    merges = [tuple(merge.split(" ")) for merge in _texts(file, "merges")]
    if any(len(merge) != 2 for merge in merges):
        raise UserError(f"{file.path} is damaged, a merge of its tokenizer is no pair: download it again")
    vocabulary = {token: place for place, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges, ignore_merges=pre in _TAKES_WHOLE_WORDS))
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre not in _SPLITS)
    if pre in _SPLITS:
        split = pre_tokenizers.Split(tokenizers.Regex(_SPLITS[pre]), behavior="isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    elif pre in _DIGIT_BY_DIGIT:
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), to_bytes])
    else:
        backend.pre_tokenizer = to_bytes
    if _SPLITS.get(pre) == QWEN2_SPLIT:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentence_pieces(file: GgufFile, tokens: list[str], kinds: list[int]) -> tokenizers.Tokenizer:
    """SentencePiece's byte pairs, as Llama 2's tokenizer.json has them: what is merged first has the highest score."""
    scores = file.metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise UserError(f"{file.path} is damaged, its tokenizer has no score for each token: download it again")
    unknown = _token_id(file, "unknown", len(tokens))
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            {token: place for place, token in enumerate(tokens)},
            _merges_by_score(tokens, kinds, scores),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    begins_blank = file.metadata.get("tokenizer.ggml.add_space_prefix", True)
    prefix = [normalizers.Prepend(_BLANK)] if begins_blank else []
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _BLANK)])
    parts = [decoders.Replace(_BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if begins_blank else parts)
    return backend


def _merges_by_score(tokens: list[str], kinds: list[int], scores) -> list[tuple[str, str]]:
    places = {token: place for place, token in enumerate(tokens)}
    found = []
    for token, kind, score in zip(tokens, kinds, scores):
        if kind != _NORMAL or len(token) > _MAX_MERGED_CHARACTERS:
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in places and right in places:
                found.append((-float(score), places[token], places[left], left, right))
    return [(left, right) for *_, left, right in sorted(found)]


def _chat_templates(metadata: Mapping[str, Value]) -> str | list[dict[str, str]] | None:
    """As tokenizer_config.json has them: the text of the only one, or a list of them by name."""
    prefix = "tokenizer.chat_template"
    found = {
        name.removeprefix(prefix).removeprefix("."): text for name, text in metadata.items() if name.startswith(prefix)
    }
    named = {name or "default": text for name, text in found.items() if isinstance(text, str)}
    if set(named) <= {"default"}:
        return named.get("default")
    return [{"name": name, "template": text} for name, text in named.items()]
