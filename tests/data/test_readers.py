"""Readers: every record with its place, bad ones told apart, whole-file damage as one-line errors."""

import json

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindrlhf.data import readers
from mindrlhf.data.readers import BadRecord, RawRecord, read_records
from mindrlhf.errors import UserError


def _write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def _fields(records):
    return [record.fields for record in records]


def test_json_lines_numbers_count_blank_lines(tmp_path):
    path = _write(tmp_path / "a.jsonl", '{"q": "é"}\n\n  \n{"q": 2}\r\n{"q": 3}')
    records = list(read_records(path))
    assert [(r.number, r.fields["q"]) for r in records] == [(1, "é"), (4, 2), (5, 3)]
    assert records[-1].position_bytes == path.stat().st_size


def test_json_lines_byte_order_mark_is_not_data(tmp_path):
    path = _write(tmp_path / "a.jsonl", b"\xef\xbb\xbf" + b'{"q": 1}\n{"q": 2}\n')
    assert _fields(read_records(path)) == [{"q": 1}, {"q": 2}]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"q": 1', "not valid JSON: Expecting ',' delimiter at column 8"),
        (b'{"q": "\xff"}', "not UTF-8 at byte 7"),
        (b"[1, 2]", "expected a JSON object, found list"),
        (b"[" * 100_000, "not usable JSON: maximum recursion depth"),
        (b'{"q": ' + b"9" * 5000 + b"}", "not usable JSON: Exceeds the limit"),
    ],
)
def test_bad_line_is_reported_with_place_and_reason_and_reading_goes_on(tmp_path, line, reason):
    path = _write(tmp_path / "a.jsonl", b'{"q": 1}\n' + line + b'\n{"q": 3}\n')
    first, bad, last = read_records(path)
    assert (first.fields, last.fields) == ({"q": 1}, {"q": 3})
    assert isinstance(bad, BadRecord)
    assert str(bad).startswith(f"{path}:2: {reason}")


def test_line_without_end_does_not_fill_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "MAX_RECORD_BYTES", 100)
    path = _write(tmp_path / "a.jsonl", '{"q": 1}\n{"q": "' + "x" * 200)
    with pytest.raises(UserError, match=r"a\.jsonl:2: line longer than"):
        list(read_records(path))


def test_json_array_reports_the_line_each_object_starts_on(tmp_path):
    path = _write(tmp_path / "a.json", ' [\n{"q":\n 1},\n\n  {"q": [1, {"x": "]"}]}, {"q": 3} ]\n')
    assert [(r.number, r.fields["q"]) for r in read_records(path)] == [(2, 1), (5, [1, {"x": "]"}]), (5, 3)]


def test_json_array_element_that_is_no_object_is_bad_and_reading_goes_on(tmp_path):
    path = _write(tmp_path / "a.json", '[{"q": 1},\n"text",\n{"q": 3}]')
    first, bad, last = read_records(path)
    assert str(bad) == f"{path}:2: expected a JSON object, found str"
    assert (first.fields, last.fields) == ({"q": 1}, {"q": 3})


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(), children, max_size=4),
    max_leaves=12,
)


@settings(max_examples=100, deadline=None)
@given(
    objects=st.lists(st.dictionaries(st.text(), json_values, max_size=4), min_size=1, max_size=8),
    chunk_chars=st.integers(1, 9),
    indent=st.none() | st.integers(0, 2),
)
def test_json_array_is_the_same_however_the_window_cuts_it(tmp_path_factory, objects, chunk_chars, indent):
    path = _write(tmp_path_factory.mktemp("json") / "a.json", json.dumps(objects, indent=indent))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "JSON_CHUNK_CHARS", chunk_chars)
        assert _fields(read_records(path)) == json.loads(path.read_text())


@pytest.mark.parametrize(
    ("content", "place"),
    [
        ('[{"q": 1},\n{"q": }]', r"a\.json:2: damaged JSON array: Expecting value"),
        ('[{"q": 1}\n{"q": 2}]', r"a\.json:2: damaged JSON array: expected ',' or ']'"),
        ('[{"q": 1},\n', r"a\.json:2: damaged JSON array: Expecting value"),
        ('[{"q": 1}]\n]', r"a\.json:2: damaged JSON array: text after the end"),
        (b'[{"q": "\xff"}]', r"a\.json is not UTF-8"),
        ("[" * 100_000, r"a\.json:1: damaged JSON array: maximum recursion"),
    ],
)
def test_damaged_json_array_names_the_line(tmp_path, content, place):
    with pytest.raises(UserError, match=place):
        list(read_records(_write(tmp_path / "a.json", content)))


def test_json_array_element_without_end_does_not_fill_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "MAX_RECORD_BYTES", 100)
    monkeypatch.setattr(readers, "JSON_CHUNK_CHARS", 16)
    path = _write(tmp_path / "a.json", '[{"q": "' + "x" * 5000)
    with pytest.raises(UserError, match="no complete element within"):
        list(read_records(path))


def test_json_array_window_stays_small_over_many_elements(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "JSON_CHUNK_CHARS", 256)
    path = _write(tmp_path / "a.json", json.dumps([{"q": "x" * 50} for _ in range(500)]))
    reader = readers._JsonArrayReader(path)
    assert max(len(reader._window) for _ in reader.read()) <= 2 * 256


def test_json_suffix_with_lines_inside_is_read_as_lines(tmp_path):
    path = _write(tmp_path / "a.json", '\n{"q": 1}\n{"q": 2}\n')
    assert [(r.number, r.fields["q"]) for r in read_records(path)] == [(2, 1), (3, 2)]


def test_parquet_rows_keep_nesting_and_order_across_batches(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "PARQUET_BATCH_ROWS", 3)
    rows = [{"prompt": [{"role": "user", "content": str(i)}], "reward_model": {"ground_truth": i}} for i in range(10)]
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=4)
    records = list(read_records(path))
    assert _fields(records) == rows
    assert [r.number for r in records] == list(range(1, 11))
    assert records[-1].position_bytes == path.stat().st_size
    assert all(isinstance(record, RawRecord) for record in records)


def test_truncated_parquet_is_one_line(tmp_path):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"q": ["x"] * 100}), path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UserError, match="is not a readable Parquet file") as caught:
        list(read_records(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", "", "is empty"),
        ("a.jsonl", "\n\n", "holds no records"),
        ("a.json", " []\n", "holds no records"),
        ("a.txt", "x", "cannot tell the format"),
    ],
)
def test_nothing_to_read_is_an_error(tmp_path, name, content, message):
    with pytest.raises(UserError, match=message):
        list(read_records(_write(tmp_path / name, content)))


def test_parquet_without_rows_is_an_error(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"q": pyarrow.array([], pyarrow.string())}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match="holds no records"):
        list(read_records(tmp_path / "a.parquet"))


def test_absent_file_and_directory_are_errors(tmp_path):
    with pytest.raises(UserError, match="no such data file"):
        list(read_records(tmp_path / "a.jsonl"))
    with pytest.raises(UserError, match="is a directory"):
        list(read_records(tmp_path))


@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_a_key_that_stands_twice_is_a_bad_record(tmp_path, suffix):
    records = ['{"a": 1}', '{"a": {"b": 1, "c": 2, "b": 3}}', '{"a": 2}']
    path = tmp_path / f"a{suffix}"
    path.write_text("\n".join(records) if suffix == ".jsonl" else "[" + ",\n".join(records) + "]")
    first, bad, last = read_records(path)
    assert (first.fields, last.fields) == ({"a": 1}, {"a": 2})
    assert str(bad) == f"{path}:2: not usable JSON: the key 'b' stands twice"
