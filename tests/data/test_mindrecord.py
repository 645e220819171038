"""Prompt files: round trip, MindDataset compatibility, and every way a file can be unfit."""

import os
import shutil
import stat
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prompt_files import header_of, write_with_header

from mindrlhf.data import mindrecord
from mindrlhf.data.mindrecord import Prompt, PromptFile
from mindrlhf.errors import UserError

FINGERPRINT = "ab" * 32


def _header(num_kept, task="prompts"):
    fields = {"template": "r1 \"'\\ ü", "template_sha256": "cd" * 32, "num_read": num_kept + 5, "num_bad": 2}
    fields |= {"tokenizer_fingerprint": FINGERPRINT, "num_too_long": 3, "longest_prompt": 9}
    return header_of(num_kept, task=task, **fields)


def _records(count, task="prompts"):
    return [
        Prompt(
            prompt_ids=np.arange(i + 1, dtype=np.int32) * 1000,
            response_ids=np.full(i % 3 + 1 if task == "sft" else 0, -i, np.int32),
            answer=f"{i}",
            source_id=f"train.jsonl:{i}",
        )
        for i in range(count)
    ]


def _same(left, right):
    return (
        np.array_equal(left.prompt_ids, right.prompt_ids)
        and np.array_equal(left.response_ids, right.response_ids)
        and left.prompt_ids.dtype == left.response_ids.dtype == np.int32
        and (left.answer, left.source_id) == (right.answer, right.source_id)
    )


@pytest.fixture
def prompt_path(tmp_path):
    path = tmp_path / "train.mindrecord"
    write_with_header(path, _header(7), [_records(7)[:4], _records(7)[4:]])
    return path


@pytest.mark.parametrize("task", ["prompts", "sft"])
def test_round_trip_in_any_order(tmp_path, task):
    path = tmp_path / "train set.mindrecord"
    records = _records(20, task)
    write_with_header(path, _header(20, task), [records[:7], [], records[7:]])
    prompts = PromptFile.open(path, FINGERPRINT)
    assert prompts.header == _header(20, task)
    assert len(prompts) == 20
    order = np.array([19, 0, 0, 5, 19, *range(20)])
    read = prompts.read(order)
    assert len(read) == 25
    assert all(_same(record, records[index]) for record, index in zip(read, order))
    assert prompts.read([]) == []
    for outside in (20, -1):
        with pytest.raises(IndexError, match="which has 20"):
            prompts.read([0, outside])


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    texts=st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")), min_size=1, max_size=20),
    ids=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=50),
)
def test_any_text_and_id_survives(tmp_path, texts, ids):
    path = tmp_path / "any.mindrecord"
    records = [Prompt(np.array(ids, np.int32), np.zeros(0, np.int32), text, text + "'\":1") for text in texts]
    write_with_header(path, _header(len(records)), [records])
    assert all(_same(*pair) for pair in zip(PromptFile.open(path).read(range(len(records))), records, strict=True))


def test_minddataset_loads_the_file(prompt_path):
    from mindspore.dataset import MindDataset

    rows = list(MindDataset(str(prompt_path), shuffle=False).create_dict_iterator(num_epochs=1, output_numpy=True))
    assert [row["prompt_ids"].tolist() for row in rows] == [record.prompt_ids.tolist() for record in _records(7)]
    assert sorted(rows[0]) == ["answer", "prompt_ids", "source_id"]


def test_pages_overflow_into_further_pages(tmp_path, monkeypatch):
    monkeypatch.setattr(mindrecord, "PAGE_SIZE_BYTES", 32 << 10)
    path = tmp_path / "pages.mindrecord"
    rng = np.random.default_rng(0)
    records = [replace(r, prompt_ids=rng.integers(0, 2**31, 3000, dtype=np.int32)) for r in _records(30)]
    write_with_header(path, _header(30), [records])
    assert path.stat().st_size > 5 * (32 << 10)
    assert all(_same(*pair) for pair in zip(PromptFile.open(path).read(range(30)), records, strict=True))


def test_record_above_the_page_size_is_an_error_that_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(mindrecord, "PAGE_SIZE_BYTES", 32 << 10)
    record = replace(_records(1)[0], prompt_ids=np.arange(100_000, dtype=np.int32))
    with pytest.raises(UserError, match=r"write big.mindrecord \(if its disk is full, .*\): .*[Pp]age size") as caught:
        write_with_header(tmp_path / "big.mindrecord", _header(1), [[record]])
    assert "\n" not in str(caught.value)
    assert os.listdir(tmp_path) == []


def test_failed_rewrite_keeps_the_old_file(prompt_path):
    def batches():
        yield _records(3)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_with_header(prompt_path, _header(9), batches())
    assert sorted(os.listdir(prompt_path.parent)) == ["train.mindrecord", "train.mindrecord.db"]
    assert PromptFile.open(prompt_path).read([6])[0].answer == "6"


def test_rewrite_replaces_both_files_and_others_may_read_them(prompt_path):
    write_with_header(prompt_path, _header(2), [_records(2)])
    assert len(PromptFile.open(prompt_path).read([0, 1])) == 2
    plain = prompt_path.with_name("plain")
    plain.touch()
    for path in (prompt_path, mindrecord.index_path(prompt_path)):
        assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


def test_machine_that_dies_between_the_renames_leaves_an_unreadable_file_not_a_mixed_one(prompt_path, monkeypatch):
    renames = []

    def die_at_second(source, target):
        if renames:
            raise OSError("power cut")
        renames.append(target)
        shutil.move(source, target)

    monkeypatch.setattr(mindrecord.os, "replace", die_at_second)
    with pytest.raises(OSError, match="power cut"):
        write_with_header(prompt_path, _header(7), [_records(7)])
    with pytest.raises(UserError, match="has no index train.mindrecord.db"):
        PromptFile.open(prompt_path)


def test_wrong_count_in_the_header_is_caught(tmp_path):
    with pytest.raises(AssertionError, match="wrote 3 records, the header says 4"):
        write_with_header(tmp_path / "a.mindrecord", _header(4), [_records(3)])
    with pytest.raises(AssertionError, match="wrote 2 records"):  # MindRecord drops the float row with a warning
        bad = replace(_records(1)[0], prompt_ids=np.zeros(3))
        write_with_header(tmp_path / "a.mindrecord", _header(3), [[*_records(2), bad]])


def test_both_files_may_move_but_not_be_renamed(prompt_path, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    index = mindrecord.index_path(prompt_path)
    moved = shutil.move(prompt_path, elsewhere)
    with pytest.raises(UserError, match="has no index"):
        PromptFile.open(moved)
    shutil.move(index, elsewhere)
    assert PromptFile.open(moved).read([3])[0].answer == "3"
    for path in (elsewhere / "train.mindrecord", elsewhere / "train.mindrecord.db"):
        path.rename(str(path).replace("train", "test"))
    with pytest.raises(UserError, match=r"was renamed: .* rename both files to train.mindrecord\[.db\]"):
        PromptFile.open(elsewhere / "test.mindrecord")


def test_other_tokenizer_is_named(prompt_path):
    with pytest.raises(UserError, match="was built with tokenizer abababababab, this run has 1234567890ab"):
        PromptFile.open(prompt_path, "1234567890abcdef")


@pytest.mark.parametrize("content", [b"", b"abc", b"\xff" * 64, b'{"question": "q"}' * 9, b"\x02" + b"\0" * 7 + b"{}"])
def test_empty_and_foreign_files(tmp_path, content):
    path = tmp_path / "a.mindrecord"
    path.write_bytes(content)
    with pytest.raises(UserError, match="is not a prompt file" if content else "is empty"):
        PromptFile.open(path)
    with pytest.raises(UserError, match="no prompt file at"):
        PromptFile.open(tmp_path / "absent")


def test_mindrecord_of_another_program_is_foreign(tmp_path):
    from mindspore.mindrecord import FileWriter

    for name, description in (("a", "images"), ("b", '{"format": "other"}')):
        writer = FileWriter(str(tmp_path / name), shard_num=1)
        writer.add_schema({"label": {"type": "int32"}}, description)
        writer.write_raw_data([{"label": 1}])
        writer.commit()
        with pytest.raises(UserError, match="is not a prompt file"):
            PromptFile.open(tmp_path / name)


@pytest.mark.parametrize("kept", [0.02, 0.5, 0.999])
def test_truncated_file(prompt_path, kept):
    content = prompt_path.read_bytes()
    prompt_path.write_bytes(content[: int(len(content) * kept)])
    with pytest.raises(UserError, match="is truncated|is not a prompt file"):
        PromptFile.open(prompt_path)


def test_damaged_or_foreign_index(prompt_path, tmp_path):
    index = mindrecord.index_path(prompt_path)
    good = index.read_bytes()
    index.write_bytes(good[:100])
    with pytest.raises(UserError, match="index .* is damaged"):
        PromptFile.open(prompt_path)
    index.write_bytes(b"")
    with pytest.raises(UserError, match="index .* is damaged"):
        PromptFile.open(prompt_path)
    (tmp_path / "other").mkdir()
    write_with_header(tmp_path / "other" / prompt_path.name, _header(3), [_records(3)])
    shutil.copy(mindrecord.index_path(tmp_path / "other" / prompt_path.name), index)
    with pytest.raises(UserError, match="index .* is damaged or of another build"):
        PromptFile.open(prompt_path)


def test_file_that_vanishes_after_opening_is_one_line(prompt_path):
    prompts = PromptFile.open(prompt_path)
    prompt_path.unlink()
    with pytest.raises(UserError, match="cannot read .*train.mindrecord, build it again") as caught:
        prompts.read(range(7))
    assert "\n" not in str(caught.value)


def test_output_path_is_checked(tmp_path):
    for path, message in (
        (tmp_path, "is a directory; name a file"),
        (tmp_path / "absent" / "a.mindrecord", "no such directory for the output"),
        (tmp_path / "a:b.mindrecord", "does not take the file name 'a:b.mindrecord'"),
        (tmp_path / "a.mindrecord ", "does not take the file name"),
    ):
        with pytest.raises(UserError, match=message):
            mindrecord.check_output_path(path)
