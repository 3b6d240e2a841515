"""ELF tables of a shared library: whether it is complete, its CPU, what it needs to load."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

from ..platform import machine

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")  # Elf64_Ehdr
_SEGMENT = struct.Struct("<IIQQQQQQ")  # Elf64_Phdr
_SECTION = struct.Struct("<IIQQQQIIQQ")  # Elf64_Shdr
_SHARED_OBJECT, _LOADED, _DYNAMIC, _NO_BITS = 3, 1, 2, 8
_NEEDED_VERSIONS, _DYNAMIC_SECTION = 0x6FFFFFFE, 6
_MACHINES = {"x86_64": 62, "aarch64": 183}
_NAMES = {number: name for name, number in _MACHINES.items()}

Version = tuple[int, ...]


def _table(entry: struct.Struct, content: bytes, at: int, count: int) -> list[tuple[Any, ...]]:
    return [entry.unpack_from(content, at + index * entry.size) for index in range(count)]


def file_problem(path: str | int) -> str:
    """Returns why a file is not a complete shared library for this CPU, "" if it is one."""
    try:
        with open(path, "rb", closefd=isinstance(path, str)) as file:
            content = file.read()
    except OSError as error:
        return error.strerror or str(error)
    size = len(content)
    if size < _HEADER.size or content[:4] != b"\x7fELF":
        return f"it is no ELF file ({size} bytes)"
    header = _HEADER.unpack_from(content)
    (ident, kind, found), (segments_at, sections_at) = header[:3], header[5:7]
    segment_size, segments, section_size, sections = header[9:13]
    if ident[4:6] != b"\x02\x01" or kind != _SHARED_OBJECT:
        return "it is no 64-bit shared library"
    expected = _MACHINES.get(machine())
    if expected is not None and found != expected:
        return f"it is for another machine than {machine()} (ELF machine {found})"
    tables = ((segments_at, segment_size, segments), (sections_at, section_size, sections))
    if any(at + each * count > size for at, each, count in tables):
        return f"it ends after {size} bytes, before its tables do"
    if segment_size != _SEGMENT.size or (sections and section_size != _SECTION.size):
        return "its tables have entries of an unknown size"
    parts = _table(_SEGMENT, content, segments_at, segments)
    if any(part[2] + part[5] > size for part in parts):
        return f"it ends after {size} bytes, inside a segment"
    stored = [s for s in _table(_SECTION, content, sections_at, sections) if s[1] != _NO_BITS]
    if any(section[4] + section[5] > size for section in stored):
        return f"it ends after {size} bytes, inside a section"
    if not {_LOADED, _DYNAMIC} <= {part[0] for part in parts}:
        return "it has nothing that could be loaded"
    return ""


class Needs(NamedTuple):
    """Libraries and highest symbol versions, as ``{"GLIBC": (2, 34)}``, that a library needs."""

    machine: str
    libraries: frozenset[str]
    versions: dict[str, Version]


def _text(content: bytes, offset: int) -> str:
    return content[offset : content.index(b"\0", offset)].decode()


def _version_names(content: bytes, offset: int, count: int, strings: int) -> Iterator[str]:
    """Yields the names in a table of needed versions, such as "GLIBC_2.34"."""
    for _ in range(count):
        _, auxiliaries, _, first, following = struct.unpack_from("<HHIII", content, offset)
        at = offset + first
        for _ in range(auxiliaries):
            _, _, _, name, further = struct.unpack_from("<IHHII", content, at)
            yield _text(content, strings + name)
            at += further
        offset += following


def needs(content: bytes) -> Needs:
    """Returns what a shared library needs of the system."""
    if content[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a 64-bit ELF file")
    header = _HEADER.unpack_from(content)
    machine, at, count = _NAMES.get(header[2], ""), header[6], header[12]
    if not machine:
        raise ValueError(f"ELF machine {header[2]} is neither x86-64 nor aarch64")
    sections = _table(_SECTION, content, at, count)
    libraries, versions = set(), dict[str, Version]()
    for _, kind, _, _, offset, length, link, entries, _, _ in sections:
        if kind == _DYNAMIC_SECTION:
            for tag, value in struct.iter_unpack("<qQ", content[offset : offset + length]):
                if tag == 1:  # DT_NEEDED
                    libraries.add(_text(content, sections[link][4] + value))
        elif kind == _NEEDED_VERSIONS:
            for name in _version_names(content, offset, entries, sections[link][4]):
                family, _, number = name.rpartition("_")
                if re.fullmatch(r"\d+(\.\d+)+", number):
                    found = tuple(map(int, number.split(".")))
                    versions[family] = max(found, versions.get(family, ()))
    return Needs(machine, frozenset(libraries), versions)


def needed_glibc(content: bytes) -> str:
    """Returns the oldest glibc that a library loads with, such as "2.34"; "" if it is not known."""
    try:
        return ".".join(map(str, needs(content).versions.get("GLIBC", ())))
    except (ValueError, IndexError, struct.error):
        return ""
