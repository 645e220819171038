"""The stand-ins for CANN: the libraries themselves, and when they are refused."""

import ctypes
import importlib.metadata
import os
import platform

import pytest

from mindrlhf.dryrun.compile import ascend_stubs as simulation
from mindrlhf.dryrun.compile.elf import BODIES, read_dynamic_symbols, write_library
from mindrlhf.errors import UserError

LIBC = f"/lib/{platform.machine()}-linux-gnu/libc.so.6"
needs_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="the stand-ins are x86-64 machine code")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "mindrlhf" / "ascend-stand-ins"


@pytest.mark.skipif(not os.path.exists(LIBC), reason="another place for libc")
def test_symbols_of_a_real_library_are_read():
    libc = read_dynamic_symbols(LIBC)
    assert {"malloc", "memcpy", "pthread_create"} <= libc.defined
    assert not libc.undefined & libc.defined
    assert any(name.startswith("ld-linux") for name in libc.needed)


@needs_x86
def test_every_symbol_is_found_by_the_loader(tmp_path):
    names = [f"symbol_{index}" for index in range(1000)] + ["_ZN2ge5ShapeC1Ev", "x"]
    path = tmp_path / "libexample.so"
    write_library(path, "libexample.so", dict.fromkeys(names, "zero"))
    library = ctypes.CDLL(str(path))
    assert [name for name in names if not hasattr(library, name)] == []
    assert not hasattr(library, "symbol_1000")


@needs_x86
def test_functions_do_what_their_bodies_say(tmp_path):
    path = tmp_path / "libbodies.so"
    write_library(path, "libbodies.so", {f"returns_{key}": key for key in BODIES})
    library = ctypes.CDLL(str(path))
    assert library.returns_zero() == 0
    for key, cleared in (("clear16", 16), ("clear24", 24)):
        memory = ctypes.create_string_buffer(b"\xff" * 32, 32)
        function = library[f"returns_{key}"]
        function.restype, function.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
        assert function(ctypes.addressof(memory)) == ctypes.addressof(memory)
        assert memory.raw == b"\0" * cleared + b"\xff" * (32 - cleared)


@needs_x86
def test_the_empty_map_is_one_object_whose_header_points_at_itself(tmp_path):
    path = tmp_path / "libmap.so"
    write_library(path, "libmap.so", {"instance": "empty_map"})
    function = ctypes.CDLL(str(path)).instance
    function.restype = ctypes.c_void_p
    address = function()
    assert function() == address
    words = (ctypes.c_uint64 * 6).from_address(address)
    # std::map of libstdc++: comparator, then the header node (colour, parent, left, right), then the count.
    assert list(words) == [0, 0, 0, address + 8, address + 8, 0]


@needs_x86
def test_stand_ins_are_written_once_and_define_what_the_wheel_lacks(cache):
    root = simulation.stand_ins()
    assert root.parent == cache and root.name.startswith(f"{importlib.metadata.version('mindspore')}-")
    assert cache.stat().st_mode & 0o777 == 0o700
    library = root / "cann" / "lib64" / "libascendcl.so"
    written = library.stat().st_mtime_ns
    # Not loaded: a later import of MindSpore in this process would take it for CANN.
    defined = set(library.read_bytes().split(b"\0"))
    assert {b"aclrtMalloc", b"aclInit", b"InitHugeMemThreadLocal"} <= defined
    # Shadowing the C++ runtime would break exceptions in the whole process.
    assert not defined & {b"__cxa_throw", b"malloc", b"memcpy", b"pthread_create"}
    assert simulation.stand_ins() == root
    assert library.stat().st_mtime_ns == written
    assert [path.name for path in cache.iterdir()] == [root.name]


def test_a_cache_that_others_can_write_is_refused(cache):
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    with pytest.raises(UserError, match="can be written by others"):
        simulation._private_cache_dir()


def test_a_cache_that_cannot_be_made_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(UserError, match="set XDG_CACHE_HOME"):
        simulation._private_cache_dir()


def test_other_machines_are_refused_plainly(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(UserError, match=r"Linux aarch64 without CANN.*install CANN"):
        simulation.stand_ins()


def test_untested_versions_are_refused_by_name(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.3.1")
    with pytest.raises(UserError, match=r"mindspore 2\.3\.1 .*tested with 2\.9\.0, 2\.10\.0 only"):
        simulation.stand_ins()


def test_cann_is_found_where_its_environment_says(tmp_path, monkeypatch):
    for name in ("ASCEND_TOOLKIT_HOME", "ASCEND_HOME_PATH", "LD_LIBRARY_PATH"):
        monkeypatch.delenv(name, raising=False)
    assert simulation.find_cann() is None
    (tmp_path / "lib64").mkdir()
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    assert simulation.find_cann() is None
    (tmp_path / "lib64" / "libascendcl.so").write_bytes(b"")
    assert simulation.find_cann() == tmp_path / "lib64"
    monkeypatch.delenv("ASCEND_HOME_PATH")
    monkeypatch.setenv("LD_LIBRARY_PATH", os.pathsep.join(("", "/nonexistent", str(tmp_path / "lib64"))))
    assert simulation.find_cann() == tmp_path / "lib64"
