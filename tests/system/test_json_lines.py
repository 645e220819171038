"""Lines of JSON: what is refused, with which line's number, and how much of a file is ever in memory."""

import json

import pytest

from mindrlhf.errors import UserError
from mindrlhf.system.json_lines import MAX_LINE_BYTES, DuplicateKeyError, read_json_lines


def test_values_come_with_their_place_and_bad_lines_with_their_error(tmp_path):
    texts = [b'\xef\xbb\xbf{"a": 1}\r\n', b"\n", b" \t\n", b'{"a": \n', b'"\xff"\n', b"null\n"]
    texts += [b"[" * 100_000 + b"\n", b"7"]
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"".join(texts))
    lines = list(read_json_lines(path))
    assert [line.number for line in lines] == [1, 4, 5, 6, 7, 8]
    ends = [sum(map(len, texts[:number])) for number in (1, 4, 5, 6, 7, 8)]
    assert [line.end_bytes for line in lines] == ends
    assert [line.has_end for line in lines] == [True] * 5 + [False]
    assert [line.value for line in lines] == [{"a": 1}, None, None, None, None, 7]
    errors = [None, json.JSONDecodeError, UnicodeDecodeError, None, RecursionError, None]
    for line, kind in zip(lines, errors, strict=True):
        assert line.error is None if kind is None else type(line.error) is kind


@pytest.mark.parametrize("text", ['{"a": 1, "a": 1}', '{"b": [{"a": 1, "c": 2, "a": 3}]}', '{"a": 1, "\\u0061": 2}'])
def test_a_key_that_stands_twice_is_an_error_that_names_it(tmp_path, text):
    (tmp_path / "a").write_text(f'{{"a": {{"a": 1}}}}\n{text}\n')
    good, bad = read_json_lines(tmp_path / "a")
    assert good.error is None and bad.number == 2
    assert isinstance(bad.error, DuplicateKeyError) and str(bad.error) == "the key 'a' stands twice"


def test_a_line_beyond_8_mib_is_refused_before_more_of_it_is_read(tmp_path):
    path = tmp_path / "a.jsonl"
    fitting = b'"' + b"x" * (MAX_LINE_BYTES - 3) + b'"\n'
    assert len(fitting) == 8 * 2**20
    path.write_bytes(fitting)
    assert [len(line.value) for line in read_json_lines(path)] == [MAX_LINE_BYTES - 3]
    with open(path, "r+b") as file:
        file.truncate(2**40)  # a hole: reading it all would take a terabyte
    with pytest.raises(UserError, match=r"a\.jsonl:2: line longer than 8 MiB"):
        list(read_json_lines(path))
