"""Check by its ELF tables that a shared library is complete and for this kind of CPU."""

from __future__ import annotations

import struct

from ..platform import machine

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")  # Elf64_Ehdr
_SEGMENT = struct.Struct("<IIQQQQQQ")  # Elf64_Phdr
_SECTION = struct.Struct("<IIQQQQIIQQ")  # Elf64_Shdr
_SHARED_OBJECT, _LOADED, _DYNAMIC, _NO_BITS = 3, 1, 2, 8
_MACHINES = {"x86_64": 62, "aarch64": 183}


def _truncation(file_size: int, content: bytes) -> str:
    """Returns the reason why a file is no complete shared library, "" if it is one.

    Args:
        file_size: bytes of the file.
        content: the file's content.
    """
    if len(content) < _HEADER.size or content[:4] != b"\x7fELF":
        return f"it is no ELF file ({file_size} bytes)"
    header = _HEADER.unpack_from(content)
    ident, kind, found = header[:3]
    segments_at, sections_at = header[5:7]
    segment_size, segments, section_size, sections = header[9:13]
    if ident[4:6] != b"\x02\x01" or kind != _SHARED_OBJECT:
        return "it is no 64-bit shared library"
    expected = _MACHINES.get(machine())
    if expected is not None and found != expected:
        return f"it is for another machine than {machine()} (ELF machine {found})"
    tables = ((segments_at, segment_size, segments), (sections_at, section_size, sections))
    if any(at + size * count > file_size for at, size, count in tables):
        return f"it ends after {file_size} bytes, before its tables do"
    if segment_size != _SEGMENT.size or (sections and section_size != _SECTION.size):
        return "its tables have entries of an unknown size"
    kinds = set()
    for index in range(segments):
        kind, _, offset, _, _, size, _, _ = _SEGMENT.unpack_from(
            content, segments_at + index * segment_size
        )
        kinds.add(kind)
        if offset + size > file_size:
            return f"it ends after {file_size} bytes, inside a segment"
    for index in range(sections):
        _, kind, _, _, offset, size, _, _, _, _ = _SECTION.unpack_from(
            content, sections_at + index * section_size
        )
        if kind != _NO_BITS and offset + size > file_size:
            return f"it ends after {file_size} bytes, inside a section"
    if not {_LOADED, _DYNAMIC} <= kinds:
        return "it has nothing that could be loaded"
    return ""


def file_problem(path: str) -> str:
    """Returns the reason why a file is no complete shared library for this CPU, "" if it is one."""
    try:
        with open(path, "rb") as file:
            content = file.read()
    except OSError as error:
        return error.strerror or str(error)
    return _truncation(len(content), content)
