"""Data sets: raw records, and the MindRecord files made of them."""

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path

import corruption
from fuzz_files import RECORDS, make_prompt_file
from fuzz_target import Case


def records(name: str, text: bytes) -> Callable[[Path], Case]:
    def prepare(directory: Path) -> Case:
        from mindrlhf.data.handlers import HANDLERS, RecordError
        from mindrlhf.data.readers import RawRecord, read_records

        path = directory / name

        def case(rng: random.Random) -> None:
            kind = rng.randrange(3)
            if kind == 0:
                path.write_bytes(corruption.corrupt_bytes(rng, text))
            elif name.endswith("l"):
                path.write_bytes(b"\n".join(corruption.corrupt_json(rng, record) for record in RECORDS))
            else:
                path.write_bytes(corruption.corrupt_json(rng, RECORDS))
            for record in read_records(path):
                if isinstance(record, RawRecord):
                    for handler in HANDLERS.values():
                        try:
                            handler(record.fields)
                        except RecordError:
                            continue

        return case

    return prepare


def parquet(directory: Path) -> Case:
    import pyarrow
    import pyarrow.parquet

    from mindrlhf.data.readers import read_records

    path = directory / "case.parquet"
    rows = [{"question": f"{index} + 1?", "answer": index, "tags": ["a", None], "score": 0.5} for index in range(40)]
    texts = []
    for compression in ("none", "snappy", "zstd"):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, compression=compression)
        texts.append(path.read_bytes())

    def case(rng: random.Random) -> None:
        path.write_bytes(corruption.corrupt_bytes(rng, rng.choice(texts)))
        for _ in read_records(path):
            pass

    return case


def mindrecord_header(directory: Path) -> Case:
    from mindrlhf.data.mindrecord import PromptFile, index_path

    path = make_prompt_file(directory)
    whole = path.read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    layout, rest = json.loads(whole[8 : 8 + length]), whole[8 + length :]
    assert index_path(path).is_file()

    def case(rng: random.Random) -> None:
        kind = rng.randrange(4)
        if kind == 0:
            path.write_bytes(corruption.corrupt_bytes(rng, whole))
        elif kind == 1:
            path.write_bytes(corruption.corrupt_bytes(rng, whole[: 8 + length]) + rest)
        else:
            changed = layout
            if rng.randrange(2):
                description = json.loads(layout["schema"][0]["desc"])
                changed = json.loads(json.dumps(layout))
                damaged = corruption.corrupt_json(rng, description)
                changed["schema"][0]["desc"] = damaged.decode("utf-8", errors="replace")
            text = json.dumps(changed).encode() if changed is not layout else corruption.corrupt_json(rng, layout)
            head = (struct.pack("<Q", len(text)) + text).ljust(8 + length, b"\0")
            path.write_bytes(head + rest[len(head) - 8 - length :])
        PromptFile.open(path)

    return case


def mindrecord_index(directory: Path) -> Case:
    from mindrlhf.data.mindrecord import PromptFile, index_path

    path = make_prompt_file(directory)
    whole = index_path(path).read_bytes()

    def case(rng: random.Random) -> None:
        index_path(path).write_bytes(corruption.corrupt_bytes(rng, whole))
        PromptFile.open(path)

    return case


def mindrecord_pages(directory: Path) -> Case:
    from mindrlhf.data.mindrecord import PromptFile

    path = make_prompt_file(directory)
    whole = path.read_bytes()

    def case(rng: random.Random) -> None:
        first_page = len(whole) // 4
        changed = whole[:first_page] + corruption.corrupt_bytes(rng, whole[first_page:])
        path.write_bytes(changed)
        PromptFile.open(path)
        assert changed == whole, "a damaged page was not noticed"

    return case
