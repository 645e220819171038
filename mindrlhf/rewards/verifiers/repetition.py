"""Does the completion go round in circles?"""

import re

from mindrlhf.rewards.registry import register

# Loops run to the end of a response, and the count of distinct n-grams needs memory.
MAX_CHARS = 200_000
# Chinese and Japanese write no spaces: each character counts as a word. So does each of a word
# longer than there is, and each of as many signs, or of 100 blanks, without a word between.
_LONG = 40
_WORD = re.compile(
    r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff]|[^\W\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff]+"
    rf"|(?:[^\w\s]\s*){{{_LONG + 1},}}|\s{{100,}}"
)


@register
def repetition_penalty(completion: str, answer: str, *, ngram_size: int = 3) -> float:
    """``distinct / all - 1`` over the word n-grams: 0 without repetition, towards -1 for a loop.

    Yeo et al. 2025 (arXiv:2502.03373), appendix B.2, spread over the response as Open-R1 does. Only the last
    200,000 characters are looked at; fewer than ``ngram_size`` words give 0.

    Raises:
        ValueError: ``ngram_size`` is below 1.
    """
    if ngram_size < 1:
        raise ValueError(f"ngram_size is {ngram_size}: it must be at least 1")
    found = _WORD.findall(completion[-MAX_CHARS:].lower())
    words = [part for word in found for part in (word if len(word) > _LONG else (word,))]
    num_ngrams = len(words) - ngram_size + 1
    if num_ngrams < 1:
        return 0.0
    return len(set(zip(*(words[i:] for i in range(ngram_size))))) / num_ngrams - 1.0
