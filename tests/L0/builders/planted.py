"""What the tests of the reports share: planted entries, visible GPUs, the width of a text."""

import json
import os
import shutil
import struct
import zlib

from op_builder.jit.backends import archs
from op_builder.jit.find import cache
from op_builder.jit.find.key import made_of
from op_builder.jit.inspect import facts as report
from op_builder.jit.prebuild import batch


def smallest_library():
    """A shared library of this machine that is whole and has nothing in it."""
    machine = {"x86_64": 62, "aarch64": 183}[os.uname().machine]
    ident = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    header = struct.pack("<16sHHIQQQIHHHHHH", ident, 3, machine, 1, 0, 64, 0, 0, 64, 56, 2, 0, 0, 0)
    segments = [struct.pack("<IIQQQQQQ", kind, 4, 0, 0, 0, 176, 176, 8) for kind in (1, 2)]
    return header + b"".join(segments)


def plant(place, builder, device="cpu", *names, **changes):
    """An entry of ``builder`` for the archs ``names``; ``changes`` go into its manifest."""
    key = changes.pop("key", builder.key(device))
    library = builder.library_name(device)
    entry = place / cache.entry_folder(library, key) / ("_".join(names) or cache.CPU_ENTRY)
    entry.mkdir(parents=True)
    content = smallest_library()
    (entry / f"{library}.so").write_bytes(content)
    manifest = {
        "key": key,
        "op": builder.NAME,
        "device": device,
        "archs": list(names),
        "compiler": "g++ of long ago",
        "flags": builder.key_flags(device),
        **made_of(builder, device),
        "commands": [],
        "seconds": 1.5,
        "size": len(content),
        "crc32": zlib.crc32(content),
        "time": 1_700_000_000,
        **changes,
    }
    (entry / cache.MANIFEST).write_text(json.dumps(manifest))
    for folder in (place, *entry.parents[:2], entry):
        if folder.is_relative_to(place):
            os.chmod(folder, 0o700)
    return entry


def contents(place):
    """Everything below a folder, for a comparison."""
    return sorted(str(path.relative_to(place)) for path in place.rglob("*"))


def copy(source, target):
    """A file or a folder with what is in it."""
    if source.is_dir():
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(source, target, ignore=ignore, symlinks=True)
    elif source.exists():
        shutil.copy(source, target)


def visible_gpus(monkeypatch):
    """A function that sets which GPUs a report sees; none at first."""

    def see(*capabilities):
        for module in (archs, report, batch):
            monkeypatch.setattr(module, "visible_capabilities", lambda: list(capabilities))

    see()
    return see


def too_long(lines):
    """Lines that do not fit a terminal and could have been broken: a path stays in one piece."""
    words = {line: max(map(len, line.split()), default=0) for line in lines}
    return [line for line in lines if len(line) > 80 and words[line] < 69]
