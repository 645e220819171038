"""Readers: every record with its place, bad ones told apart, whole-file damage as one-line errors."""

import json

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
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
    monkeypatch.setattr(readers, "MAX_LINE_BYTES", 100)
    path = _write(tmp_path / "a.jsonl", '{"q": 1}\n{"q": "' + "x" * 200)
    with pytest.raises(UserError, match=r"a\.jsonl:2: line longer than"):
        list(read_records(path))


def test_elements_of_a_json_array_are_numbered_and_one_that_is_no_object_is_bad(tmp_path):
    path = _write(tmp_path / "a.json", ' [\n{"q":\n 1},\n\n "text", {"q": [1, {"x": "]"}]} ]\n')
    first, bad, last = read_records(path)
    assert str(bad) == f"{path}:2: expected a JSON object, found str"
    assert (first.number, first.fields, last.number, last.fields) == (1, {"q": 1}, 3, {"q": [1, {"x": "]"}]})


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(), children, max_size=4),
    max_leaves=12,
)


@settings(max_examples=100, deadline=None)
@given(
    objects=st.lists(st.dictionaries(st.text(), json_values, max_size=4), min_size=1, max_size=8),
    indent=st.none() | st.integers(0, 2),
)
def test_json_array_is_what_json_makes_of_it(tmp_path_factory, objects, indent):
    path = _write(tmp_path_factory.mktemp("json") / "a.json", json.dumps(objects, indent=indent))
    records = list(read_records(path))
    assert _fields(records) == json.loads(path.read_text())
    assert records[-1].position_bytes <= path.stat().st_size


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('[{"q": 1},\n{"q": }]', "Expecting value: line 2"),
        ('[{"q": 1},\n', "Expecting value: line 2"),
        ('[{"q": 1}]\n]', "Extra data: line 2"),
        (b'[{"q": "\xff"}]', "codec can't decode"),
        ("[" * 100_000, "maximum recursion"),
        ('[{"a": {"b": 1, "c": 2, "b": 3}}]', "the key 'b' stands twice"),
    ],
)
def test_a_damaged_json_array_is_refused_as_a_whole(tmp_path, content, reason):
    with pytest.raises(UserError, match=f"a.json is a damaged JSON array .*{reason}"):
        list(read_records(_write(tmp_path / "a.json", content)))


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


def parquet(table: pyarrow.Table) -> bytes:
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(table, sink)
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"", "is empty"),
        ("a.jsonl", b"\n\n", "holds no records"),
        ("a.json", b" []\n", "holds no records"),
        ("a.txt", b"x", "cannot tell the format"),
        ("a.parquet", parquet(pyarrow.table({"q": ["x"] * 100}))[:-20], "is not a readable Parquet file"),
        ("a.parquet", parquet(pyarrow.table({"q": pyarrow.array([], "string")})), "holds no records"),
        ("a.jsonl", None, "no such data file"),
        (".", None, "is a directory"),
    ],
)
def test_what_cannot_be_read_is_an_error_of_one_line(tmp_path, name, content, message):
    if content is not None:
        _write(tmp_path / name, content)
    with pytest.raises(UserError, match=message) as caught:
        list(read_records(tmp_path / name))
    assert "\n" not in str(caught.value)


def test_a_key_that_stands_twice_is_a_bad_record(tmp_path):
    path = _write(tmp_path / "a.jsonl", '{"a": 1}\n{"a": {"b": 1, "c": 2, "b": 3}}\n{"a": 2}')
    first, bad, last = read_records(path)
    assert (first.fields, last.fields) == ({"a": 1}, {"a": 2})
    assert str(bad) == f"{path}:2: not usable JSON: the key 'b' stands twice"


def test_parquet_rows_lack_the_nulls_that_other_rows_objects_made(tmp_path):
    """Arrow unites the fields of all objects in a column; JSON lines of the same rows keep what they have."""
    call = {"function": {"name": "weather", "arguments": {"city": "Rome", "days": 2}}}
    other = {"function": {"name": "add", "arguments": {"terms": [{"value": 1}, {"name": "x"}]}}}
    rows = [
        {"tools": [{"name": "weather", "parameters": {"properties": {"city": {"type": "string"}}}}], "note": "a"},
        {"tools": [{"name": "add", "parameters": {"properties": {"terms": {"items": {"a": 1}}}}}], "note": None},
        {"messages": [{"role": "assistant", "tool_calls": [call, other]}, {"role": "tool", "content": "3"}]},
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows[:2]), tmp_path / "a.parquet")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows[2:]), tmp_path / "b.parquet")
    assert _fields(read_records(tmp_path / "a.parquet")) + _fields(read_records(tmp_path / "b.parquet")) == rows


JSON_ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "question": st.one_of(st.none(), st.text(max_size=30)),
            "image": st.binary(max_size=30),
            "number": st.one_of(st.none(), st.integers(-(2**60), 2**60)),
            "messages": st.lists(
                st.fixed_dictionaries({"role": st.sampled_from(["user", "tool"]), "content": st.text(max_size=9)}),
                max_size=3,
            ),
            "lists": st.lists(st.lists(st.one_of(st.none(), st.text(max_size=3)), max_size=3), max_size=3),
        }
    ),
    min_size=1,
    max_size=20,
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=JSON_ROWS, batch_bytes=st.sampled_from([1, 500, 1 << 20]))
def test_parquet_rows_are_what_arrow_makes_of_them_however_they_are_cut(tmp_path, rows, batch_bytes):
    schema = pyarrow.schema(
        {
            "question": pyarrow.string(),
            "image": pyarrow.binary(),
            "number": pyarrow.int64(),
            "messages": pyarrow.list_(pyarrow.struct({"role": pyarrow.string(), "content": pyarrow.string()})),
            "lists": pyarrow.list_(pyarrow.list_(pyarrow.string())),
        }
    )
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema), path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "PARQUET_BATCH_BYTES", batch_bytes)
        assert [record.fields for record in read_records(path)] == rows
