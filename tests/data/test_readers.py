"""Readers: every record with its place, bad ones told apart, whole-file damage as one-line errors."""

import json
import resource
import subprocess
import sys

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
        (b'{"q": 1', "not valid JSON in column 8: Expecting ',' delimiter"),
        (b'{"q": "\xff"}', "not UTF-8 at byte 7 of the line: iconv"),
        (b"\x1f\x8b\x08", "not UTF-8 at byte 1 of the line: it is compressed, unpack it: gunzip"),
        (b"{", "not valid JSON in column 2: Expecting property name enclosed in double quotes; one line is one record"),
        (b"[1, 2]", "expected a JSON object, found list; a list of records is a file that ends in .json"),
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


@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_a_key_that_stands_twice_is_a_bad_record(tmp_path, suffix):
    records = ['{"a": 1}', '{"a": {"b": 1, "c": 2, "b": 3}}', '{"a": 2}']
    path = tmp_path / f"a{suffix}"
    path.write_text("\n".join(records) if suffix == ".jsonl" else "[" + ",\n".join(records) + "]")
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


def repeated_text(rows: int, num_bytes: int, **more) -> pyarrow.Table:
    """A table whose rows all hold one long text, which its file holds once."""
    texts = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * rows, pyarrow.int32()), ["a" * num_bytes])
    return pyarrow.table({"question": texts, "answer": ["1"] * rows, **more})


def repeated_items(num_values: int, num_bytes: int, *, in_objects: bool) -> pyarrow.Table:
    """A table of one row, a list of one long text that its file holds once."""
    texts = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * num_values, pyarrow.int32()), ["a" * num_bytes])
    values = pyarrow.StructArray.from_arrays([texts], ["content"]) if in_objects else texts
    return pyarrow.table({"messages": pyarrow.ListArray.from_arrays(pyarrow.array([0, num_values], "int32"), values)})


def long_list(num_values: int) -> pyarrow.Table:
    values = pyarrow.repeat(pyarrow.scalar(0, pyarrow.int8()), num_values)
    lists = pyarrow.ListArray.from_arrays(pyarrow.array([0, num_values], pyarrow.int32()), values)
    return pyarrow.table({"question": ["q"], "numbers": lists})


# Each file is small, and unpacks to gigabytes of Python's objects: nested texts and lists count once for each place.
BOMBS = {
    "a text in all rows": lambda: (repeated_text(300, 8 << 20), {}),
    "a text in a list": lambda: (repeated_items(300, 8 << 20, in_objects=False), {}),
    "a text in objects of a list": lambda: (repeated_items(5000, 1 << 20, in_objects=True), {}),
    "a text anew": lambda: (pyarrow.table({"question": ["a" * (8 << 20)] * 40}), {"use_dictionary": False}),
    "one text": lambda: (pyarrow.table({"question": ["a" * (300 << 20)]}), {"use_dictionary": False}),
    "texts in a list": lambda: (pyarrow.table({"question": [["a" * (1 << 20)] * 320]}), {}),
    "one list": lambda: (long_list(60_000_000), {}),
    "texts in records in lists": lambda: (pyarrow.table({"messages": [[{"content": "a" * (1 << 20)}] * 40] * 8}), {}),
    "bytes": lambda: (pyarrow.table({"image": [b"a" * (8 << 20)] * 40}), {}),
    "rows of nothing": lambda: (pyarrow.table({"question": pyarrow.nulls(30_000_000, pyarrow.string())}), {}),
}
READ = """
import resource, sys
from pathlib import Path
from mindrlhf.data import readers
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    for _ in readers.read_records(Path(sys.argv[1])): pass
except readers.UserError as error:
    print(error)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""


@pytest.mark.parametrize("name", BOMBS)
def test_a_small_parquet_file_that_unpacks_to_gigabytes_takes_bounded_memory(tmp_path, name):
    path = tmp_path / "a.parquet"
    table, options = BOMBS[name]()
    pyarrow.parquet.write_table(table, path, compression="zstd", **options)
    del table
    assert path.stat().st_size < 100_000
    ended = subprocess.run([sys.executable, "-c", READ, str(path)], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    *messages, peak_mib = ended.stdout.splitlines()
    refusals = ("bytes and unpacks to more than 1000 times", "rows of which 256 take more than 256 MiB")
    assert len(messages) == 1 and any(refusal in messages[0] for refusal in refusals)
    assert int(peak_mib) < 1100


@pytest.mark.parametrize("name", ["a text in all rows", "one text", "texts in a list"])
def test_a_file_that_lies_about_its_sizes_meets_the_limit_of_memory(tmp_path, monkeypatch, name):
    monkeypatch.setattr(readers, "PARQUET_FREE_BYTES", 1 << 40)
    monkeypatch.setattr(readers, "MEMORY_BYTES", 256 << 20)
    path = tmp_path / "a.parquet"
    table, options = BOMBS[name]()
    pyarrow.parquet.write_table(table, path, compression="zstd", **options)
    del table
    limits = resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(UserError, match="rows of which 256 take more than 256 MiB"):
        list(read_records(path))
    assert resource.getrlimit(resource.RLIMIT_AS) == limits


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


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
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
