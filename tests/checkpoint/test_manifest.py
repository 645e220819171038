"""Manifests against damage done on purpose."""

import json
import os

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from mindrlhf.checkpoint.manifest import MANIFEST_NAME, DamagedDirectory, list_files, verify, write_manifest
from mindrlhf.errors import UserError
from mindrlhf.weights.array_file import save_arrays
from mindrlhf.weights.tensors import array_infos

CONTENTS = {"state.json": b'{"step": 3}', "model/config.json": b"{}", "model/model.safetensors": bytes(range(256)) * 9}


def make_directory(directory, contents=CONTENTS):
    for name, data in contents.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    write_manifest(directory)
    return directory


def edit_manifest(directory, change):
    path = directory / MANIFEST_NAME
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


@pytest.fixture
def directory(tmp_path):
    return make_directory(tmp_path / "checkpoint")


def test_a_whole_directory_passes_and_its_manifest_says_sizes_and_checksums(directory):
    verify(directory)
    files = json.loads((directory / MANIFEST_NAME).read_text())["files"]
    assert files == {
        name: {"size_bytes": len(data), "xxh3_64": xxhash.xxh3_64(data).hexdigest()} for name, data in CONTENTS.items()
    }


@pytest.mark.parametrize("size_bytes", [2**20 - 1, 2**20, 2**20 + 1, 2 * 2**20, 3 * 2**20 + 4097])
def test_large_files_are_described_to_their_last_byte(tmp_path, size_bytes):
    data = bytes(np.random.default_rng(size_bytes).integers(0, 256, size_bytes, np.uint8))
    directory = make_directory(tmp_path / "checkpoint", {"large": data})
    files = json.loads((directory / MANIFEST_NAME).read_text())["files"]
    assert files == {"large": {"size_bytes": size_bytes, "xxh3_64": xxhash.xxh3_64(data).hexdigest()}}
    verify(directory)
    (directory / "large").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(DamagedDirectory, match="its checksum differs"):
        verify(directory)


def test_a_known_checksum_is_that_of_the_bytes_in_memory_and_damage_on_the_way_to_the_disk_is_found(tmp_path):
    arrays = {"a": np.arange(5, dtype=np.float32), "b": np.ones((2, 3), np.float32)}
    infos = array_infos(arrays)
    checksum = save_arrays(tmp_path / "arrays", arrays.items(), infos)
    (tmp_path / "small").write_bytes(b"not known")
    write_manifest(tmp_path, {"arrays": checksum})
    verify(tmp_path)
    data = bytearray((tmp_path / "arrays").read_bytes())
    (tmp_path / MANIFEST_NAME).unlink()
    data[-1] ^= 1  # as a failing disk would, before anything is read
    (tmp_path / "arrays").write_bytes(data)
    write_manifest(tmp_path, {"arrays": checksum})
    with pytest.raises(DamagedDirectory, match="arrays is damaged: its checksum differs"):
        verify(tmp_path)


def test_empty_files_and_an_empty_directory_pass(tmp_path):
    (tmp_path / "bare").mkdir()
    verify(make_directory(tmp_path / "one", {"empty": b""}))
    verify(make_directory(tmp_path / "bare", {}))


@pytest.mark.parametrize("name", CONTENTS)
def test_damage_is_an_error_that_names_the_file(directory, name):
    path, data = directory / name, CONTENTS[name]
    for damaged in (data[:-1], data + b"\0", bytes([data[0] ^ 1]) + data[1:], b""):
        path.write_bytes(damaged)
        with pytest.raises(DamagedDirectory, match=str(path)):
            verify(directory)
    path.unlink()
    with pytest.raises(UserError, match=f"{path} is missing"):
        verify(directory)


def test_an_unlisted_file_is_refused(directory):
    (directory / "model" / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(DamagedDirectory, match=r"index\.json is not listed"):
        verify(directory)


def test_without_its_manifest_a_directory_is_unfinished(directory):
    (directory / MANIFEST_NAME).unlink()
    with pytest.raises(DamagedDirectory, match=r"manifest\.json is missing"):
        verify(directory)


def test_a_missing_directory_is_an_error(tmp_path):
    with pytest.raises(DamagedDirectory, match="is not a directory"):
        verify(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["model", "model/config.json", MANIFEST_NAME])
def test_symbolic_links_are_refused_even_to_the_same_content(directory, tmp_path, name):
    path = directory / name
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DamagedDirectory, match=f"{path} is a symbolic link"):
        verify(directory)
    with pytest.raises(DamagedDirectory, match="symbolic link"):
        write_manifest(directory)


def test_a_link_to_a_directory_is_not_the_directory(directory, tmp_path):
    (tmp_path / "link").symlink_to(directory)
    with pytest.raises(DamagedDirectory, match="is not a directory"):
        verify(tmp_path / "link")


def test_special_files_are_refused_without_waiting_for_a_writer(directory):
    os.mkfifo(directory / "pipe")
    with pytest.raises(DamagedDirectory, match="pipe is a special file"):
        verify(directory)


@pytest.mark.parametrize(
    "name", ["../secret", "/etc/passwd", "model/../../secret", "", ".", "model//config.json", "./state.json", "a\0b"]
)
def test_a_listed_path_that_leads_outside_is_refused(directory, tmp_path, name):
    (tmp_path / "secret").write_bytes(b"")
    edit_manifest(directory, lambda manifest: manifest["files"].update({name: {"size_bytes": 0, "xxh3_64": "0" * 16}}))
    with pytest.raises(DamagedDirectory, match="is missing"):
        verify(directory)


@pytest.mark.parametrize(
    "change",
    [
        lambda manifest: manifest.update(format_version=3),
        lambda manifest: manifest.pop("format_version"),
        lambda manifest: manifest.update(files=[]),
        lambda manifest: manifest["files"].update({"state.json": None}),
        lambda manifest: manifest["files"]["state.json"].pop("size_bytes"),
        lambda manifest: manifest["files"]["state.json"].pop("xxh3_64"),
    ],
)
def test_a_manifest_of_another_form_is_an_error_that_names_it(directory, change):
    edit_manifest(directory, change)
    with pytest.raises(DamagedDirectory, match=r"manifest\.json"):
        verify(directory)


@pytest.mark.parametrize("data", [b"", b"[]", b"null", b"{", b"\xff\xfe", b"[" * 100_000, b'{"files": {}}'])
def test_a_manifest_that_is_no_manifest_is_an_error_that_names_it(directory, data):
    (directory / MANIFEST_NAME).write_bytes(data)
    with pytest.raises(DamagedDirectory, match=r"manifest\.json"):
        verify(directory)


names = st.text(st.characters(blacklist_characters="/\0", blacklist_categories=["Cs"]), min_size=1, max_size=20).filter(
    lambda name: name not in (".", "..", MANIFEST_NAME) and len(name.encode()) < 200
)


@settings(max_examples=50)
@given(contents=st.dictionaries(names, st.binary(max_size=50), max_size=5))
def test_any_file_name_can_be_listed(tmp_path_factory, contents):
    directory = make_directory(tmp_path_factory.mktemp("named"), contents)
    verify(directory)
    assert set(list_files(directory)) == {*contents, MANIFEST_NAME}
