"""A user's own reward function, as `path/to/file.py:function`."""


def lowercase_share(completion: str, answer: str) -> float:
    """Return the share of characters that are lower-case ASCII letters, 0 for an empty response."""
    if not completion:
        return 0.0
    return sum("a" <= character <= "z" for character in completion) / len(completion)
