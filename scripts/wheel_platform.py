"""Finds the platform tag of a wheel: the oldest C and C++ libraries that its libraries run with.

The rules are PEP 600's: ``manylinux_2_34_x86_64`` promises to run on every x86-64 Linux with glibc
2.34 or later and the libstdc++ of that time.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from typing import NamedTuple

# Libraries of the system that every Linux in question has.
SYSTEM_LIBRARIES = re.compile(
    r"(libc|libm|libdl|librt|libpthread|libgcc_s|libstdc\+\+|ld-linux-[\w-]+)\.so\.\d+"
)
# The newest GLIBCXX and CXXABI versions that systems of a glibc version have, as auditwheel's
# policies list them.
_POLICIES = {
    (2, 17): ((3, 4, 19), (1, 3, 7)),
    (2, 24): ((3, 4, 22), (1, 3, 10)),
    (2, 27): ((3, 4, 24), (1, 3, 11)),
    (2, 31): ((3, 4, 28), (1, 3, 12)),
    (2, 34): ((3, 4, 29), (1, 3, 13)),
    (2, 35): ((3, 4, 30), (1, 3, 13)),
    (2, 39): ((3, 4, 33), (1, 3, 15)),
}
_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_NEEDED_VERSION, _DYNAMIC = 0x6FFFFFFE, 6
_MACHINES = {62: "x86_64", 183: "aarch64"}

Version = tuple[int, ...]


class Needs(NamedTuple):
    """Libraries and symbol versions that a shared library needs of the system.

    Attributes:
        machine: CPU architecture, such as "x86_64".
        libraries: names of the libraries that it is linked with.
        versions: the highest version of each kind of symbols, such as ``{"GLIBC": (2, 34)}``.
    """

    machine: str
    libraries: frozenset[str]
    versions: dict[str, Version]


def _text(content: bytes, offset: int) -> str:
    """Returns the string that ends with the first zero byte after ``offset``."""
    return content[offset : content.index(b"\0", offset)].decode()


def _version_names(content: bytes, offset: int, count: int, strings: int) -> Iterator[str]:
    """Yields the names in a table of needed versions, such as "GLIBC_2.34".

    Args:
        content: the library.
        offset: offset of the table, a list of ``Elf64_Verneed`` with ``Elf64_Vernaux`` each.
        count: number of entries.
        strings: offset of the table's strings.
    """
    for _ in range(count):
        _, auxiliaries, _, first, following = struct.unpack_from("<HHIII", content, offset)
        at = offset + first
        for _ in range(auxiliaries):
            _, _, _, name, further = struct.unpack_from("<IHHII", content, at)
            yield _text(content, strings + name)
            at += further
        offset += following


def needs(content: bytes) -> Needs:
    """Returns what a shared library needs of the system.

    Args:
        content: content of the file.

    Raises:
        ValueError: the file is no 64-bit shared library for x86-64 or aarch64.
    """
    if content[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a 64-bit ELF file")
    header = _HEADER.unpack_from(content)
    machine, at, size, count = _MACHINES.get(header[2], ""), header[6], header[11], header[12]
    if not machine:
        raise ValueError(f"ELF machine {header[2]} is neither x86-64 nor aarch64")
    sections = [_SECTION.unpack_from(content, at + index * size) for index in range(count)]
    libraries, versions = set(), dict[str, Version]()
    for _, kind, _, _, offset, length, link, entries, _, _ in sections:
        if kind == _DYNAMIC:
            for tag, value in struct.iter_unpack("<qQ", content[offset : offset + length]):
                if tag == 1:  # DT_NEEDED
                    libraries.add(_text(content, sections[link][4] + value))
        elif kind == _NEEDED_VERSION:
            for name in _version_names(content, offset, entries, sections[link][4]):
                family, _, number = name.rpartition("_")
                if re.fullmatch(r"\d+(\.\d+)+", number):
                    found = tuple(map(int, number.split(".")))
                    versions[family] = max(found, versions.get(family, ()))
    return Needs(machine, frozenset(libraries), versions)


def tag(libraries: dict[str, bytes]) -> str:
    """Returns the platform tag of a wheel with shared libraries, such as "manylinux_2_34_x86_64".

    Args:
        libraries: contents of the libraries by name.

    Raises:
        ValueError: there is none, they are for several machines, or one is linked with a library
            that not every system has or has a newer libstdc++ than any known system.
    """
    found = {name: needs(content) for name, content in libraries.items()}
    machines = {each.machine for each in found.values()}
    if len(machines) != 1:
        raise ValueError(f"libraries must be for one machine, got {sorted(machines)}")
    for name, each in found.items():
        strange = sorted(x for x in each.libraries if not SYSTEM_LIBRARIES.fullmatch(x))
        if strange:
            raise ValueError(f"{name} is linked with {', '.join(strange)}, which systems may lack")

    def highest(family: str) -> Version:
        return max((each.versions.get(family, ()) for each in found.values()), default=())

    glibc, glibcxx, abi = highest("GLIBC"), highest("GLIBCXX"), highest("CXXABI")
    for policy, (policy_glibcxx, policy_abi) in sorted(_POLICIES.items()):
        if glibcxx <= policy_glibcxx and abi <= policy_abi:
            major, minor = max(policy, glibc[:2])
            return f"manylinux_{major}_{minor}_{machines.pop()}"
    raise ValueError(f"GLIBCXX {glibcxx} and CXXABI {abi} are newer than those of known systems")
