"""Hostile bytes of an ``_extra_state``: time, memory and messages stay within the file's size."""

import io
import itertools
import pickle
import random
import resource
import struct
import sys
import warnings
import zipfile
from pathlib import Path

import pytest
import torch
from programs import captured
from te_blobs import FORMS, as_uint8, pickled_with_recipe, saved, tensors

from apex_te.integrations.te_state import TEStateError, load_te_extra_state, read_te_extra_state
from apex_te.module.linear import Linear

MEGABYTE = 1 << 20
MEMORY = 256 * MEGABYTE  # above what the process has when it starts to read
SECONDS = 20  # of CPU time for one blob, on a loaded machine; most take a tenth of one
LONGEST = 500  # characters of a message
STORAGE = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpu"
REBUILD = b"ctorch._utils\n_rebuild_tensor_v2\n"
LOAD = b"ctorch.storage\n_load_from_bytes\n"
RECIPE = b"ctransformer_engine.common.recipe\nDelayedScaling\n"


def text(value):
    return b"X" + struct.pack("<I", len(value)) + value


def long(value):
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little")
    return b"\x8b" + struct.pack("<i", len(raw)) + raw


def doubled(depth=60):
    """A tuple of twice the tuple before, which has 2**depth leaves."""
    return b"N" + b"2\x86" * depth


def nested(depth=200_000):
    return b")" + b"\x85" * depth


def old_file(pickled, keys=(), tail=b""):
    """A file of torch.save's earlier format around one pickle."""
    genuine = saved(None, _use_new_zipfile_serialization=False).getvalue()
    start = genuine.rindex(pickle.dumps(None, protocol=2)[:2] + b"N.")
    return genuine[:start] + b"\x80\x02" + pickled + b"." + pickle.dumps(list(keys), 2) + tail


def long_bytes(value):
    return b"B" + struct.pack("<I", len(value)) + value


def matryoshka(depth=300):
    inner = b"N"
    for _ in range(depth):
        inner = LOAD + long_bytes(old_file(inner)) + b"\x85R"
    return inner


def repeated_file():
    """One file of half a megabyte within the pickle, read again and again."""
    file = old_file(STORAGE + b"J" + struct.pack("<i", 1 << 17) + b"tQ", ["0"])
    file += struct.pack("<q", 1 << 17) + bytes(MEGABYTE // 2)
    again = b"h\x00h\x01\x85R"
    return LOAD + b"q\x000" + long_bytes(file) + b"q\x010" + b"](" + again * 10_000 + b"e"


def of_tensor(size, stride, offset=b"K\x00", numel=b"K\x04"):
    storage = STORAGE + numel + b"tQ"
    return REBUILD + b"(" + storage + offset + size + stride + b"\x89}tR"


def dict_of(keys, value=b"N"):
    return b"}(" + b"".join(key + value for key in keys) + b"u"


COLLIDING = 2**61 - 1  # ints that differ by it have one hash

CRAFTED = {
    "a doubled tuple as a key": lambda: b"}" + doubled() + b"Ns",
    "a doubled tuple as a persistent id": lambda: doubled() + b"Q",
    "a doubled tuple as a name": lambda: doubled() + doubled() + b"\x93",
    "a doubled tuple as a size": lambda: of_tensor(doubled(), doubled()),
    "a doubled tuple as an offset": lambda: of_tensor(b")", b")", doubled()),
    "a doubled tuple as a function": lambda: doubled() + b")R",
    "a doubled tuple as the arguments": lambda: REBUILD + doubled() + b"R",
    "a doubled tuple as a state": lambda: RECIPE + b")\x81" + doubled() + b"b",
    "a doubled tuple as a dict": lambda: doubled(),
    "a doubled tuple as a tensor": lambda: b"}" + text(b"scale_fwd") + doubled() + b"s",
    "a deep tuple": nested,
    "a deep tuple as a key": lambda: b"}" + nested() + b"Ns",
    "a deep tuple as a tensor": lambda: b"}" + text(b"scale_fwd") + nested() + b"s",
    "a deep list": lambda: b"]" * 200_000 + b"a" * 199_999,
    "a deep dict": lambda: b"}K\x00" * 80_000 + b"}" + b"s" * 80_000,
    "a deep recipe": lambda: RECIPE
    + b"q\x00)\x81"
    + b"}K\x00h\x00)\x81" * 30_000
    + b"sb" * 30_000,
    "a huge int": lambda: long(1 << 8 * MEGABYTE),
    "a huge int in text": lambda: b"I" + b"9" * MEGABYTE + b"\n",
    "a huge long in text": lambda: b"L" + b"9" * MEGABYTE + b"L\n",
    "a huge float in text": lambda: b"F" + b"9" * MEGABYTE + b"\n",
    "a huge memo number": lambda: b"Ng" + b"9" * MEGABYTE + b"\n",
    "a huge int as a size": lambda: of_tensor(long(1 << 10**6) + b"\x85", b"K\x01\x85"),
    "many large ints as a size": lambda: of_tensor(
        b"(" + long((1 << 990) + 1) * 8000 + b"t", b"(" + b"K\x01" * 8000 + b"t"
    ),
    "a huge tensor": lambda: of_tensor(long(1 << 62) + b"\x85", b"K\x00\x85"),
    "a huge storage": lambda: of_tensor(
        b"J\xff\xff\xff\x7f\x85", b"K\x01\x85", numel=long(1 << 62)
    ),
    "a huge empty tensor": lambda: b"]" + of_tensor(
        b"(K\x00" + long(1 << 62) * 8 + b"t", b"(" + long(1 << 62) * 9 + b"t"
    ) + b"a",
    "huge declared bytes": lambda: b"\x8e" + struct.pack("<Q", 1 << 62) + b"x",
    "huge declared text": lambda: b"\x8d" + struct.pack("<Q", 1 << 40) + b"x",
    "files within files": matryoshka,
    "one file again and again": repeated_file,
    "an unhashable key": lambda: dict_of([b"]"]),
    "colliding keys": lambda: dict_of(long(1 + i * COLLIDING) for i in range(50_000)),
    "colliding memo numbers": lambda: b"N"
    + b"".join(b"p%d\n" % (i * COLLIDING) for i in range(40_000)),
    "colliding numbers of the memo": lambda: b"N"
    + b"".join(b"r" + struct.pack("<I", i << 17) for i in range(30_000)),
    "a long tuple as a key again and again": lambda: b"("
    + b"K\x01" * 50_000
    + b"tq\x000}("
    + b"h\x00N" * 50_000
    + b"u",
    "a long name": lambda: b"ctransformer_engine\n" + b"x" * MEGABYTE + b"\n)\x81",
    "a long name again and again": lambda: b"\x8c\x12transformer_engine"
    + text(b"x" * (MEGABYTE // 2))
    + b"\x93q\x000("
    + b"h\x00)\x81" * 60_000
    + b"l",
    "a long forbidden name": lambda: b"cos\n" + b"\x1b[2J" * 100_000 + b"\n)R",
    "dicts": lambda: b"(" + b"}" * MEGABYTE + b"l",
    "memos": lambda: b"N" + b"\x94" * MEGABYTE,
    "recipes": lambda: RECIPE + b"q\x000(" + b"h\x00)\x81" * (MEGABYTE // 4) + b"l",
    "one tensor again and again": lambda: b"]"
    + of_tensor(b")", b")")
    + b"q\x000("
    + b"h\x00" * (MEGABYTE // 2)
    + b"e",
    "marks": lambda: b"(" * MEGABYTE + b"t" * MEGABYTE,
}  # fmt: skip


def zip_file(pickled, storage=bytes(16)):
    blob = io.BytesIO()
    with zipfile.ZipFile(blob, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02" + pickled + b".")
        archive.writestr("archive/data/0", storage)
    return blob.getvalue()


def overlapping_zip():
    """Directory entries of 3000 storages, all at the place of one of half a megabyte."""
    elements = MEGABYTE // 8
    many = range(3000)
    storages = b"".join(
        b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\n" + text(b"%d" % i)
        + b"NJ" + struct.pack("<i", elements) + b"tQ"
        for i in many
    )  # fmt: skip
    blob = io.BytesIO()
    with zipfile.ZipFile(blob, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02(" + storages + b"l.")
        archive.writestr("archive/data/0", bytes(4 * elements))
        info = archive.getinfo("archive/data/0")
        for i in many[1:]:
            other = zipfile.ZipInfo(f"archive/data/{i}")
            for name in ("header_offset", "CRC", "compress_size", "file_size"):
                setattr(other, name, getattr(info, name))
            archive.filelist.append(other)
    return blob.getvalue()


def crafted():
    """All hostile blobs: (name, blob), as pickles and, if short, in both formats of torch.save."""
    for name, make in CRAFTED.items():
        pickled = make()
        yield f"{name}, pickle", as_uint8(b"\x80\x02" + pickled + b".")
        if len(pickled) < 1 << 16:
            yield f"{name}, zip file", io.BytesIO(zip_file(pickled))
            keys = ["0"] if STORAGE in pickled else []
            tail = b"\x04" + bytes(23) if keys else b""
            yield f"{name}, old file", io.BytesIO(old_file(pickled, keys, tail))
    yield (
        "keys that are doubled tuples",
        io.BytesIO(
            old_file(b"N").removesuffix(pickle.dumps([], 2)) + b"\x80\x02]" + doubled() + b"a."
        ),
    )
    yield "an overlapping zip file", io.BytesIO(overlapping_zip())


def valid_blobs():
    """Bytes of what releases save, by the names of FORMS."""
    for form, make in FORMS.items():
        blob = make(tensors(length=2))
        if isinstance(blob, torch.Tensor):
            yield form, blob.numpy().tobytes(), True
        elif isinstance(blob, io.BytesIO):
            yield form, blob.getvalue(), False


def mutated(data, others, chance):
    """Bytes with one to four changes: flips, runs cut, repeated or taken from elsewhere."""
    data = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        at, size = chance.randrange(len(data)), chance.randint(1, 8)
        kind = chance.randrange(5)
        if kind == 0:
            data[at] ^= 1 << chance.randrange(8)
        elif kind == 1:
            data[at] = chance.randrange(256)
        elif kind == 2 and len(data) > 64:
            del data[at : at + size]
        elif kind == 3:
            data[at:at] = data[at : at + size] * chance.randint(1, 50)
        else:
            other = chance.choice(others)
            start = chance.randrange(len(other))
            data[at : at + size] = other[start : start + size]
    return bytes(data)


def read(blob):
    """What becomes of a blob; only TEStateError with a short printable message may be raised."""
    try:
        read_te_extra_state(blob)
        load_te_extra_state(Linear(4, 4), {"_extra_state": blob})
    except TEStateError as error:
        message = str(error)
        assert len(message) <= LONGEST, message
        assert message.isprintable(), message
        return "refused"
    return "read"


def limit():
    """Limits this process to little more memory than it has."""
    Linear(4, 4)  # what the first module of a process makes
    warnings.simplefilter("ignore")
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def allow_seconds(seconds):
    """Lets this process end by SIGXCPU unless it comes here again in time."""
    used = int(sum(resource.getrusage(resource.RUSAGE_SELF)[:2]))
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (used + seconds + 1, hard))


def changed(times):
    """Valid blobs, each with ``times`` random changes of its own."""
    chance = random.Random(7)
    valid = list(valid_blobs())
    others = [data for _, data, _ in valid]
    for (name, data, is_tensor), _ in itertools.product(valid, range(times)):
        wrong = mutated(data, others, chance)
        yield name, as_uint8(wrong) if is_tensor else io.BytesIO(wrong)


def read_all(blobs):
    """Reads the named blobs with limits, and prints what became of each."""
    blobs = list(blobs)
    limit()
    for name, blob in blobs:
        print(name, end=": ", flush=True)
        allow_seconds(SECONDS)
        print(read(blob), flush=True)


def ends(blobs):
    """What ``read_all`` prints of them in a process of its own, line by line."""
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
    code = f"import sys; sys.path[:0] = {folders}; import {Path(__file__).stem} as m\n"
    code += f"m.read_all(m.{blobs})"
    done = captured([sys.executable, "-c", code], check=False, timeout=600, errors="replace")
    lines = done.stdout.splitlines()
    assert done.returncode == 0, f"{lines[-1:]}\n{done.stderr[-3000:]}"
    return lines


@pytest.mark.long
def test_crafted_blobs_take_time_and_memory_of_their_size():
    """Each crafted blob of at most a few megabytes ends with a short typed error, or is read."""
    mine = ends("crafted()")
    assert len(mine) > len(CRAFTED)
    refused = sum(line.endswith(": refused") for line in mine)
    assert refused > 0.8 * len(mine), "\n".join(mine)


@pytest.mark.parametrize("times", [10, pytest.param(60, marks=pytest.mark.long)])
def test_changed_blobs_are_read_or_refused(times):
    """A valid blob with random changes is read, or refused with a short typed error."""
    assert {line.rpartition(": ")[2] for line in ends(f"changed({times})")} == {"read", "refused"}


@pytest.mark.parametrize("form", [name for name, _, _ in valid_blobs()])
def test_every_cut_of_a_valid_blob_is_refused(form):
    """A file that was cut anywhere is not taken for a whole one."""
    data, is_tensor = next((d, t) for name, d, t in valid_blobs() if name == form)
    for end in range(1, len(data), max(1, len(data) // 60)):
        cut = data[:end]
        with pytest.raises(TEStateError):
            read_te_extra_state(as_uint8(cut) if is_tensor else io.BytesIO(cut))


def test_hostile_bytes_in_safetensors():
    """The bytes come from any file of a state dict, safetensors among them."""
    safetensors = pytest.importorskip("safetensors.torch")
    blob = as_uint8(b"\x80\x02}" + doubled() + b"Ns.")
    state_dict = safetensors.load(safetensors.save({"_extra_state": blob}))
    with pytest.raises(TEStateError, match="a dict must have keys of text, got tuple"):
        load_te_extra_state(Linear(4, 4), state_dict)


def test_a_margin_is_not_printed():
    """The scales of a recipe whose margin is not a number are read; the margin is dropped."""
    margin = None
    for _ in range(60):
        margin = (margin, margin)
    blob = pickled_with_recipe(tensors(), margin=margin)
    assert load_te_extra_state(Linear(4, 4), {"_extra_state": blob}) == [""]
