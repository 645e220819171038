"""Comparing dumps that are written by hand: order, tolerance of NaN, one-sided parts, damage."""

import json

import numpy as np
import pytest

from mindrlhf.cli import main
from mindrlhf.debugging.dump_diff import compare_dumps, is_dump
from mindrlhf.debugging.dump_paths import rank_dir
from mindrlhf.debugging.statistics import describe
from mindrlhf.errors import UserError

INPUT, CELL, LOSS = "advantages.0.debug", "Cell.net.Net.forward.0", "loss.0.debug"


def write(directory, stage="update", step=2, rank=0, *, saved=(), **arrays):
    """Write a rank's part: a cell with "input" and "output", values under the other names."""
    target = rank_dir(directory, stage, step, rank)
    (target / "dump_tensor_data").mkdir(parents=True)

    def save(name, array):
        np.save(target / "dump_tensor_data" / f"{name}.npy", array)
        return f"{name}.npy"

    described = {
        name: describe(np.asarray(array), name, save if name in saved else None) for name, array in arrays.items()
    }
    # The loss stands first, to tell the order of the file from that of the computation.
    key_data = {
        f"{name}.0.debug": [described[name]] for name in ("loss", "advantages", "logprobs") if name in described
    }
    cell = {"input_args": [described.get("input")], "output": [described.get("output")]}
    (target / "debug.json").write_text(json.dumps({"task": "statistics", "data": key_data}))
    (target / "dump.json").write_text(json.dumps({"task": "statistics", "data": {CELL: cell}}))
    return directory


VALUES = {"advantages": [1.0, 2.0], "input": [[3.0]], "output": [4.0, 5.0], "loss": 0.5}


def changed(name, value):
    return {**VALUES, name: value}


@pytest.mark.parametrize(
    "name, value, expected",
    [
        ("advantages", [1.0, 2.5], "advantages.0.debug.0"),
        ("input", [[3.5]], f"{CELL}.input.0"),
        ("output", [5.0, 4.0], f"{CELL}.output.0"),  # the same statistics: only the checksum tells
        ("loss", 0.25, "loss.0.debug.0"),
    ],
)
def test_the_changed_value_is_named(tmp_path, name, value, expected):
    one, other = write(tmp_path / "a", **VALUES), write(tmp_path / "b", **changed(name, value))
    found = compare_dumps(one, other)
    assert (found.step, found.stage, found.rank, found.name) == (2, "update", 0, expected)
    assert [(count.num_different, count.num_compared) for count in found.stages] == [(1, 4)]


def test_what_was_computed_first_is_first(tmp_path):
    order = ["advantages", "input", "output", "loss"]
    while order:
        one = write(tmp_path / f"a{len(order)}", **VALUES)
        other = write(tmp_path / f"b{len(order)}", **{**VALUES, **{name: [9.0] for name in order}})
        assert order.pop(0) in compare_dumps(one, other).name


def test_cells_of_all_ranks_come_before_the_loss_and_stages_and_steps_in_order(tmp_path):
    one, other = tmp_path / "a", tmp_path / "b"
    for directory, value in ((one, 0.0), (other, 1.0)):
        write(directory, step=10, logprobs=[value])
        write(directory, step=9, stage="update", loss=value)
        write(directory, step=9, stage="update", rank=1, output=[value])
        write(directory, step=9, stage="rollout", logprobs=[1.0])
    found = compare_dumps(one, other)
    assert (found.step, found.stage, found.rank, found.name) == (9, "update", 1, f"{CELL}.output.0")
    assert [(count.step, count.stage, count.num_different) for count in found.stages] == [
        (9, "rollout", 0),
        (9, "update", 2),
        (10, "update", 1),
    ]


def test_nan_is_nan_and_differences_of_saved_tensors_are_measured(tmp_path):
    nan = float("nan")
    one = write(tmp_path / "a", output=[1.0, nan, 3.0], saved=["output"])
    assert compare_dumps(one, write(tmp_path / "b", output=[1.0, nan, 3.0])).is_same
    found = compare_dumps(one, write(tmp_path / "c", output=[1.5, nan, nan], saved=["output"]))
    assert found.details[-1] == "2 of 3 elements differ, most at [2]: 3 and nan"


def test_a_part_that_only_one_has(tmp_path):
    one, other = write(tmp_path / "a", **VALUES), write(tmp_path / "b", **VALUES)
    write(one, step=3, loss=1.0)
    found = compare_dumps(one, other)
    assert found.is_same and found.one_sided == (f"only {one} has step 3, update, rank 0",)
    shorter = write(tmp_path / "c", **{name: VALUES[name] for name in ("advantages", "input", "output")})
    found = compare_dumps(other, shorter)
    assert found.name == "loss.0.debug.0" and found.details == (f"only {rank_dir(other, 'update', 2, 0)} has it",)


def test_a_dump_of_msprobe_itself_has_no_checksums(tmp_path):
    one, other = write(tmp_path / "a", **VALUES), write(tmp_path / "b", **VALUES)
    path = rank_dir(other, "update", 2, 0) / "dump.json"
    content = json.loads(path.read_text())
    del content["data"][CELL]["output"][0]["crc32"]
    path.write_text(json.dumps(content))
    assert compare_dumps(one, other).is_same


def test_command_says_it_and_returns_1(tmp_path, capsys):
    one, other = write(tmp_path / "a", **VALUES), write(tmp_path / "b", **changed("output", [4.0, 6.0]))
    assert main(["diff", str(one), str(one)]) == 0
    assert capsys.readouterr().out == "the dumps are the same\n"
    assert main(["diff", str(one), str(other)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"dump: step 2, update, rank 0: {CELL}.output.0 differs first"
    assert "  Max: 5.0 and 6.0" in lines and "  Mean: 4.5 and 5.0" in lines
    assert lines[-1] == "  step 2, update: 1 of 4 values differ"


def test_what_is_no_dump_is_said_in_one_line(tmp_path):
    one = write(tmp_path / "a", **VALUES)
    (tmp_path / "empty").mkdir()
    assert not is_dump(tmp_path / "empty")
    with pytest.raises(UserError, match="holds no dump"):
        compare_dumps(one, tmp_path / "empty")
    with pytest.raises(UserError, match="no stage of a step in common"):
        compare_dumps(one, write(tmp_path / "b", step=5, loss=0.0))


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"data": 3}',
        '{"data": {"Cell.a": 3}}',
        '{"data": {"Cell.a": {"output": ' + "[" * 60 + "]" * 60 + "}}}",
        "[" * 100_000,
        "\x00\xff",
    ],
)
def test_a_damaged_file_is_a_users_error(tmp_path, text):
    one, other = write(tmp_path / "a", **VALUES), write(tmp_path / "b", **VALUES)
    (rank_dir(other, "update", 2, 0) / "dump.json").write_text(text, encoding="latin-1")
    with pytest.raises(UserError, match="dump"):
        compare_dumps(one, other)


def test_a_damaged_tensor_is_a_users_error(tmp_path):
    one, other = (write(tmp_path / key, output=[value], saved=["output"]) for key, value in (("a", 1.0), ("b", 2.0)))
    header = b"{'descr': '(,)f8', 'fortran_order': False, 'shape': (1,), }\n"
    bad_dtype = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(8)
    for content in (b"", b"\x93NUMPY\x01\x00", b"no array", bad_dtype):
        (rank_dir(other, "update", 2, 0) / "dump_tensor_data" / "output.npy").write_bytes(content)
        with pytest.raises(UserError, match="damaged"):
            compare_dumps(one, other)


@pytest.mark.parametrize("name", ["../../../../secret.npy", "/etc/passwd", "..", 3, None])
def test_a_name_that_leads_out_of_the_dump_is_not_followed(tmp_path, name):
    np.save(tmp_path / "secret.npy", np.zeros(2))
    one, other = (write(tmp_path / key, output=[value, value]) for key, value in (("a", 1.0), ("b", 2.0)))
    for directory in (one, other):
        path = rank_dir(directory, "update", 2, 0) / "dump.json"
        content = json.loads(path.read_text())
        content["data"][CELL]["output"][0]["data_name"] = name
        path.write_text(json.dumps(content))
    assert not any("elements differ" in line for line in compare_dumps(one, other).details)
