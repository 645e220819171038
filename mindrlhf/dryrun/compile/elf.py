"""Read the dynamic symbols of x86-64 ELF libraries, and write small ones that only define symbols.

Formats: System V ABI, AMD64 supplement, chapter 5 (dynamic linking), and the generic ABI's symbol hash table.
"""

import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass

_SECTION_DYNAMIC, _SECTION_SYMBOLS, _SECTION_VERSIONS = 6, 11, 0x6FFFFFFF
_NEEDED = 1
_GLOBAL_BINDING = 1
_SYMBOL_BYTES, _SECTION_BYTES = 24, 64
_PAGE = 4096
_CODE_SLOT = 32


@dataclass(frozen=True)
class DynamicSymbols:
    """Imported and exported symbols of a library.

    Attributes:
        needed: names of the libraries it is linked against.
        undefined: global unversioned symbols that another library must define.
        defined: symbols it defines.
        data: the file's bytes.
    """

    needed: tuple[str, ...]
    undefined: frozenset[str]
    defined: frozenset[str]
    data: bytes


def read_dynamic_symbols(path: str | os.PathLike) -> DynamicSymbols:
    """Read the dynamic symbol table of a 64-bit little-endian ELF file."""
    with open(path, "rb") as file:
        data = file.read()
    (section_offset,), (num_sections,) = struct.unpack_from("<Q", data, 40), struct.unpack_from("<H", data, 60)
    sections = [
        struct.unpack_from("<IIQQQQIIQQ", data, section_offset + _SECTION_BYTES * index)
        for index in range(num_sections)
    ]
    by_kind = {section[1]: section for section in sections}
    symbols, dynamic = by_kind[_SECTION_SYMBOLS], by_kind[_SECTION_DYNAMIC]
    versions, strings_offset = by_kind.get(_SECTION_VERSIONS), sections[symbols[6]][4]

    def string(offset: int) -> str:
        start = strings_offset + offset
        return data[start : data.index(b"\0", start)].decode()

    undefined, defined = set(), set()
    for index in range(1, symbols[5] // _SYMBOL_BYTES):
        name, info, _, section, _, _ = struct.unpack_from("<IBBHQQ", data, symbols[4] + _SYMBOL_BYTES * index)
        if section:
            defined.add(string(name))
        elif info >> 4 == _GLOBAL_BINDING:
            # Versioned symbols belong to the C and C++ runtimes.
            version = struct.unpack_from("<H", data, versions[4] + 2 * index)[0] & 0x7FFF if versions else 0
            if version < 2:
                undefined.add(string(name))
    entries = (struct.unpack_from("<QQ", data, dynamic[4] + 16 * index) for index in range(dynamic[5] // 16))
    needed = tuple(string(value) for tag, value in entries if tag == _NEEDED)
    return DynamicSymbols(needed, frozenset(undefined), frozenset(defined), data)


def write_library(path: str | os.PathLike, soname: str, symbols: Mapping[str, str]) -> None:
    """Write an x86-64 shared library.

    Args:
        path: the file; its directory must exist.
        soname: name that other libraries know it by.
        symbols: name of each function to the key of its body in ``BODIES``.
    """
    names = sorted(symbols)
    strings, offsets = bytearray(b"\0"), {}
    for name in (soname, *names):
        offsets[name] = len(strings)
        strings += name.encode() + b"\0"
    strings += b"\0" * (-len(strings) % 8)
    hash_table = _hash_table(names)
    symbols_at = 64 + 56 * 4
    strings_at = symbols_at + _SYMBOL_BYTES * (len(names) + 1)
    hash_at = strings_at + len(strings)
    code_at = (hash_at + len(hash_table) + 15) & ~15
    code_bytes = _CODE_SLOT * len(BODIES)
    dynamic_at = (code_at + code_bytes + _PAGE - 1) & ~(_PAGE - 1)
    zeros_at = dynamic_at + 256

    code, body_at = b"", {}
    for key, body in BODIES.items():
        body_at[key] = code_at + len(code)
        # The body that hands out an object finds it relative to the end of its first instruction (7 bytes).
        body = body.replace(b"ZERO", struct.pack("<i", zeros_at - (body_at[key] + 7)))
        code += body.ljust(_CODE_SLOT, b"\x90")
    table = b"\0" * _SYMBOL_BYTES + b"".join(
        struct.pack("<IBBHQQ", offsets[name], 0x12, 0, 1, body_at[symbols[name]], _CODE_SLOT) for name in names
    )
    dynamic = b"".join(
        struct.pack("<QQ", tag, value)
        for tag, value in (
            (14, offsets[soname]),
            (4, hash_at),
            (5, strings_at),
            (6, symbols_at),
            (10, len(strings)),
            (11, _SYMBOL_BYTES),
            (0, 0),
        )
    )
    header = b"\x7fELF\2\1\1".ljust(16, b"\0")
    header += struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 64, 0, 0, 64, 56, 4, 64, 0, 0)
    header += _segment(1, 5, 0, code_at + code_bytes, _PAGE) + _segment(1, 6, dynamic_at, _PAGE, _PAGE)
    header += _segment(2, 6, dynamic_at, len(dynamic), 8) + _segment(0x6474E551, 6, 0, 0, 16)
    image = bytearray(dynamic_at + _PAGE)
    for offset, part in (
        (0, header),
        (symbols_at, table),
        (strings_at, strings),
        (hash_at, hash_table),
        (code_at, code),
        (dynamic_at, dynamic),
    ):
        image[offset : offset + len(part)] = part
    with open(path, "wb") as file:
        file.write(image)


def _segment(kind: int, flags: int, offset: int, size: int, alignment: int) -> bytes:
    return struct.pack("<IIQQQQQQ", kind, flags, offset, offset, offset, size, size, alignment)


def _hash_table(names: list[str]) -> bytes:
    num_buckets = max(1, len(names))
    buckets, chains = [0] * num_buckets, [0] * (len(names) + 1)
    for index, name in enumerate(names, 1):
        bucket = _symbol_hash(name) % num_buckets
        chains[index], buckets[bucket] = buckets[bucket], index
    return struct.pack(f"<{2 + num_buckets + len(chains)}I", num_buckets, len(chains), *buckets, *chains)


def _symbol_hash(name: str) -> int:
    value = 0
    for byte in name.encode():
        value = (value << 4) + byte
        high = value & 0xF0000000
        value = (value ^ high >> 24) & ~high & 0xFFFFFFFF
    return value


# Machine code of the functions. Arguments and results follow the System V calling convention: the first argument, or
# the address of a result returned in memory, is in rdi; results are in rax.
BODIES = {
    # xor eax, eax; ret
    "zero": b"\x31\xc0\xc3",
    # Clear 16 bytes at rdi (an empty shared pointer, or an object's first two words) and return rdi.
    "clear16": b"\x31\xc0\x48\x89\x07\x48\x89\x47\x08\x48\x89\xf8\xc3",
    # Clear 24 bytes at rdi (an empty vector) and return rdi.
    "clear24": b"\x31\xc0\x48\x89\x07\x48\x89\x47\x08\x48\x89\x47\x10\x48\x89\xf8\xc3",
    # Return a static empty std::map, whose header node is made to point at itself on the first call.
    "empty_map": b"\x48\x8d\x05ZERO\x48\x83\x78\x18\0\x75\x0c\x48\x8d\x48\x08\x48\x89\x48\x18\x48\x89\x48\x20\xc3",
}
