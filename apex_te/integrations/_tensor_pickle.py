"""Reader of tensors in pickles that does not unpickle: it imports no name and calls nothing.

It interprets the opcodes over a stack of plain values. A name to import becomes a ``Global``, a
pair of strings. A call of one of torch's own tensor builders becomes a ``Strided``, which describes
the tensor; a call of something from ``INERT_PACKAGES`` becomes an ``Inert``; any other is an error.

Time and memory grow linearly with the size of a file, whatever is in it: containers are neither
hashed, compared nor printed, nothing recurses, and opcodes and copied bytes are counted.
"""

from __future__ import annotations

import io
import math
import pickletools
import zipfile
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..op_builder.jit.text import printable

# Packages whose objects a file may contain (a recipe, say); they are read as ``Inert``.
INERT_PACKAGES = ("transformer_engine", "megatron", "apex_te")
LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
DTYPES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
_MAX_OPCODES = 1 << 18  # of one file; the tensors of a model of 1000 layers take fewer
_MAX_LINE = 4096  # bytes of a line of the text format, whose numbers take quadratic time
_MAX_NAME = 255  # characters of a name to import
_MAX_BITS = 1024  # of an int
_MAX_DIMS = 64  # of a tensor, as in torch
_MAX_KEY = 1 << 16  # above the int keys of a dict; larger ones could share one hash
_MAX_TEXT = 200  # characters of an error


class TensorPickleError(ValueError):
    """Error for a pickle that is damaged, or contains more than tensors and plain values."""

    def __init__(self, text: str) -> None:
        shown = printable(text[:_MAX_TEXT])
        super().__init__(shown if len(text) <= _MAX_TEXT else f"{shown} ...")


class Global(NamedTuple):
    """Name that unpickling would import."""

    module: str
    name: str


class Inert:
    """Placeholder for an object of another library, with attributes; its tensors are not read."""

    __slots__ = ("kind", "state")

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.state: dict[Any, Any] = {}

    def __repr__(self) -> str:
        return f"<{self.kind}, not rebuilt>"


class Storage:
    """Storage of tensors in a file; ``data`` is None until the bytes after the pickle are read."""

    __slots__ = ("data", "dtype", "key", "numel", "values")

    def __init__(self, dtype: torch.dtype, key: str, numel: int) -> None:
        self.dtype = dtype
        self.key = key
        self.numel = numel
        self.data: bytes | None = None
        self.values: torch.Tensor | None = None

    def flat(self) -> torch.Tensor:
        """Returns the elements as a vector that all tensors share, which limits memory use."""
        if self.data is None:
            raise TensorPickleError("a storage has no bytes")
        if self.values is None:
            self.values = torch.frombuffer(bytearray(self.data), dtype=self.dtype)
        return self.values


class Strided(NamedTuple):
    """Placeholder for a tensor whose storage is not read yet; offset and strides count elements."""

    storage: Storage
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


_MARK = Inert("mark")


class _Stream(io.BytesIO):
    """Bytes of a file whose lines have a largest length."""

    def readline(self, size: int | None = -1, /) -> bytes:
        line = super().readline(_MAX_LINE + 1)
        if len(line) > _MAX_LINE:
            raise TensorPickleError(f"a line must have at most {_MAX_LINE} bytes")
        return line


class _Allowance:
    """Count of what may still be read of one file, by all readers of its parts together."""

    def __init__(self, size: int) -> None:
        self.opcodes = _MAX_OPCODES
        self.copied = size

    def opcode(self) -> None:
        """Counts one opcode; raises TensorPickleError if there were too many."""
        self.opcodes -= 1
        if self.opcodes < 0:
            raise TensorPickleError(f"it must have at most {_MAX_OPCODES} opcodes")

    def copy(self, size: int) -> None:
        """Counts bytes of a part that is read on its own; no byte of a valid file is read twice."""
        self.copied -= size
        if self.copied < 0:
            raise TensorPickleError("its parts must not overlap")


class _Reader:
    """Interpreter of one pickle; only one that ``nests`` may contain files of ``torch.save``."""

    def __init__(self, allowance: _Allowance, nests: bool = False) -> None:
        self.allowance = allowance
        self.nests = nests
        self.stack: list[Any] = []
        self.memo: list[Any] = []
        self.storages: dict[str, Storage] = {}

    def read(self, stream: _Stream) -> Any:
        """Reads one pickle from ``stream``, up to its end."""
        for opcode, argument, _ in pickletools.genops(stream):
            self.allowance.opcode()
            if opcode.name in _PUSHES:
                self.stack.append(_PUSHES[opcode.name](self, argument))
            elif opcode.name in _ACTS:
                _ACTS[opcode.name](self, argument)
            else:
                raise TensorPickleError(
                    f"opcode {opcode.name} is not one that tensors are saved with"
                )
        (value,) = self.stack
        return value

    def popped(self, count: int) -> tuple[Any, ...]:
        """Takes the last ``count`` values off the stack and returns them, the last one last."""
        items = tuple(self.stack[-count:])
        del self.stack[-count:]
        return items

    def since_mark(self) -> list[Any]:
        """Takes all down to the last mark off the stack, and returns the values above the mark."""
        stack = self.stack
        for at in range(len(stack) - 1, -1, -1):
            if stack[at] is _MARK:
                items = stack[at + 1 :]
                del stack[at:]
                return items
        raise TensorPickleError("a mark is missing")

    def memoize(self, place: int) -> None:
        """Keeps the last value of the stack in the memo, under the number ``place``."""
        if not 0 <= place <= len(self.memo):
            raise TensorPickleError(f"a memo must be number {len(self.memo)}, got {_kind(place)}")
        self.memo[place : place + 1] = self.stack[-1:]

    def recalled(self, place: int) -> Any:
        """Returns the value that ``memoize`` has kept under the number ``place``."""
        if not 0 <= place < len(self.memo):
            raise TensorPickleError(f"a memo must be kept before its use, got {_kind(place)}")
        return self.memo[place]

    def extend(self, items: list[Any]) -> None:
        """Appends ``items`` to the list that is the last value of the stack."""
        target = self.stack[-1]
        if type(target) is not list:
            raise TensorPickleError(f"items must go into a list, got {type(target).__name__}")
        target.extend(items)

    def update(self, items: Sequence[Any]) -> None:
        """Sets items of the dict that is the last value of the stack; an ``Inert`` drops them."""
        target = self.stack[-1]
        if type(target) is dict:
            target.update(_pairs(items))
        elif not isinstance(target, Inert):
            raise TensorPickleError(f"items must go into a dict, got {type(target).__name__}")

    def build(self) -> None:
        """Takes the last value off the stack, the state of the ``Inert`` below it."""
        state, target = self.stack.pop(), self.stack[-1]
        if not isinstance(target, Inert) or target is _MARK:
            raise TensorPickleError(f"BUILD must set an inert object, got {_kind(target)}")
        if type(state) is dict:
            target.state = state

    def storage(self, description: Any) -> Storage:
        """Returns the storage of a persistent id ``("storage", type, key, location, elements)``."""
        if type(description) is not tuple or len(description) < 5 or description[0] != "storage":
            raise TensorPickleError(f"a reference must be to a storage, got {_kind(description)}")
        kind, key, numel = description[1], description[2], description[4]
        if not isinstance(kind, Global) or kind.name not in DTYPES or not isinstance(key, str):
            raise TensorPickleError(f"a storage must have a type of torch, got {_kind(kind)}")
        _count(numel)
        storage = self.storages.get(key)
        if storage is None:
            storage = self.storages[key] = Storage(DTYPES[kind.name], key, numel)
        return storage


def _call(reader: _Reader, function: Any, arguments: Any) -> Any:
    """Returns a stand-in for the result of a call in a pickle, which does not take place."""
    if not isinstance(function, Global) or type(arguments) is not tuple:
        raise TensorPickleError(f"a call must be of a global, got {_kind(function)}")
    if function == ("torch._utils", "_rebuild_tensor_v2"):
        storage, offset, size, stride = arguments[:4]
        return _strided(storage, offset, size, stride)
    if function == ("torch.storage", "_load_from_bytes"):
        if not reader.nests:
            raise TensorPickleError("a file within a file must not contain a third")
        data = _bytes(arguments[0])
        reader.allowance.copy(len(data))
        return _legacy(data, reader.allowance)
    if function == ("collections", "OrderedDict"):
        return {}
    # Some Pythons save an enum's member as getattr(its class, its name).
    owner = function
    if function == ("builtins", "getattr") and isinstance(arguments[0], Global):
        owner = arguments[0]
    if owner.module.split(".")[0] in INERT_PACKAGES:
        return Inert(f"{owner.module}.{owner.name}")
    raise TensorPickleError(f"it calls {function.module}.{function.name}")


def _allowed(name: Global) -> Global:
    """Returns ``name`` if a tensor file may contain it, else raises TensorPickleError."""
    module = name.module
    if not isinstance(module, str) or not isinstance(name.name, str):
        raise TensorPickleError(f"a name must be text, got {_kind(module)}, {_kind(name.name)}")
    if len(module) + len(name.name) > _MAX_NAME:
        raise TensorPickleError(f"a name must have at most {_MAX_NAME} characters")
    known = (
        name
        in (
            ("torch._utils", "_rebuild_tensor_v2"),
            ("torch.storage", "_load_from_bytes"),
            ("collections", "OrderedDict"),
            ("builtins", "getattr"),
        )
        or (module in ("torch", "torch.cuda") and name.name in DTYPES)
        or module.split(".")[0] in INERT_PACKAGES
    )
    if not known:
        raise TensorPickleError(f"it names {module}.{name.name}")
    return name


def _pairs(items: Sequence[Any]) -> dict[Any, Any]:
    """Returns a dict of alternating keys and values, with keys of text, small ints or None.

    Nested tuples could take exponential time to hash, and numbers can be crafted to collide.
    """
    for key in items[::2]:
        small = isinstance(key, int) and 0 <= key < _MAX_KEY
        if not small and not isinstance(key, (str, bytes, Inert, type(None))):
            raise TensorPickleError(f"a dict must have keys of text, got {_kind(key)}")
    return dict(zip(items[::2], items[1::2], strict=True))


def _number(value: Any) -> Any:
    """Returns an int or a bool, or raises TensorPickleError if it has too many bits."""
    if value.bit_length() > _MAX_BITS:
        raise TensorPickleError(f"an int must have at most {_MAX_BITS} bits")
    return value


def _kind(value: Any) -> str:
    """Returns a short text for messages, of containers the type: ``repr`` can be of any length."""
    plain = isinstance(value, (Global, Inert, Storage, bool, float, type(None)))
    if plain or (isinstance(value, int) and abs(value) < 1 << 64):
        return repr(value)
    return type(value).__name__


def _count(value: Any) -> int:
    """Returns ``value`` if it is an int of at least 0, else raises TensorPickleError."""
    if type(value) is not int or value < 0:
        raise TensorPickleError(f"a size must be an int of at least 0, got {_kind(value)}")
    if value >> 63:
        raise TensorPickleError("a size must be below 2**63")
    return value


def _bytes(value: Any) -> bytes:
    """Returns ``value`` if it is bytes, else raises TensorPickleError."""
    if not isinstance(value, (bytes, bytearray)):
        raise TensorPickleError(f"a storage must be bytes, got {type(value).__name__}")
    return bytes(value)


def _strided(storage: Any, offset: Any, size: Any, stride: Any) -> Strided:
    """Returns a ``Strided`` after checking that all elements of the tensor are in the storage."""
    if not isinstance(storage, Storage):
        raise TensorPickleError(f"a tensor must have a storage, got {type(storage).__name__}")
    if type(size) is not tuple or type(stride) is not tuple or len(size) != len(stride):
        raise TensorPickleError(f"a tensor must have a shape, got {_kind(size)}, {_kind(stride)}")
    if len(size) > _MAX_DIMS:
        raise TensorPickleError(f"a tensor must have at most {_MAX_DIMS} dims, got {len(size)}")
    for number in (offset, *size, *stride):
        _count(number)
    elements = math.prod(size)
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if elements and (last >= storage.numel or elements > storage.numel):
        raise TensorPickleError(f"a tensor must lie in its storage, got shape {list(size)}")
    return Strided(storage, offset, size, stride)


def _legacy(data: bytes, allowance: _Allowance) -> Any:
    """Returns the value in a ``torch.save`` file of the format before zip files."""
    stream = _Stream(data)
    if _Reader(allowance).read(stream) != LEGACY_MAGIC:
        raise TensorPickleError("it is not a file of torch.save")
    _Reader(allowance).read(stream)  # version
    system = _Reader(allowance).read(stream)
    if type(system) is not dict or system.get("little_endian") is not True:
        raise TensorPickleError(f"it must be little-endian, got {_kind(system)}")
    reader = _Reader(allowance)
    value = reader.read(stream)
    keys = _Reader(allowance).read(stream)
    texts = type(keys) is list and all(isinstance(key, str) for key in keys)
    if not texts or sorted(keys) != sorted(reader.storages):
        raise TensorPickleError("its list of storages must be that of its tensors")
    for key in keys:
        storage = reader.storages[key]
        numel = int.from_bytes(stream.read(8), "little")
        _fill(storage, stream.read(numel * storage.dtype.itemsize))
    return value


def _zipped(data: bytes, allowance: _Allowance) -> Any:
    """Returns the value in a ``torch.save`` zip file, with ``Strided`` for tensors."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        files = {info.filename: info for info in archive.infolist()}
        (root,) = [name[: -len("data.pkl")] for name in files if name.endswith("/data.pkl")]

        def member(name: str) -> bytes:
            info = files[root + name]
            if info.compress_type != zipfile.ZIP_STORED:
                raise TensorPickleError(f"{name} must be stored without compression")
            allowance.copy(info.file_size)
            return archive.read(info)

        if root + "byteorder" in files and member("byteorder") != b"little":
            raise TensorPickleError("it must be little-endian")
        reader = _Reader(allowance)
        value = reader.read(_Stream(member("data.pkl")))
        for key, storage in reader.storages.items():
            _fill(storage, member(f"data/{key}"))
    return value


def _fill(storage: Storage, data: bytes) -> None:
    """Gives ``storage`` its bytes, or raises TensorPickleError if their number is wrong."""
    expected = storage.numel * storage.dtype.itemsize
    if len(data) != expected:
        raise TensorPickleError(f"a storage must have {expected} bytes, got {len(data)}")
    storage.data = data


def _resolved(value: Any) -> Any:
    """Replaces each ``Strided`` by its tensor: ``value`` itself, or the items of a dict or list."""
    made: dict[int, torch.Tensor] = {}

    def tensor(item: Any) -> Any:
        if not isinstance(item, Strided):
            return item
        if id(item) not in made:
            made[id(item)] = _tensor(item)
        return made[id(item)]

    if type(value) is dict:
        return {key: tensor(item) for key, item in value.items()}
    if type(value) is list:
        return [tensor(item) for item in value]
    return tensor(value)


def _tensor(item: Strided) -> torch.Tensor:
    """Returns the tensor that a ``Strided`` describes."""
    if 0 in item.size:
        return torch.empty(item.size, dtype=item.storage.dtype)
    return item.storage.flat().as_strided(item.size, item.stride, item.offset)


def _guarded(parse: Any, data: bytes) -> Any:
    """Returns the value of a file, turning every error of a damaged one into TensorPickleError."""
    try:
        return _resolved(parse(data, _Allowance(len(data))))
    except TensorPickleError:
        raise
    except Exception as error:  # every decoder has errors of its own
        raise TensorPickleError(f"it is damaged: {type(error).__name__}: {error}") from error


def read_pickle(data: bytes) -> Any:
    """Returns the tensors and plain values in a pickle, and executes nothing that it names."""
    return _guarded(lambda raw, allowance: _Reader(allowance, nests=True).read(_Stream(raw)), data)


def read_saved(data: bytes) -> Any:
    """Returns what a file of ``torch.save`` has, in either format, as ``read_pickle`` does."""
    return _guarded(_zipped if data[:4] == b"PK\x03\x04" else _legacy, data)


def _named(names: str, handler: Callable[[_Reader, Any], Any]) -> dict[str, Any]:
    """Returns a table with one handler for several opcodes, whose names spaces separate."""
    return dict.fromkeys(names.split(), handler)


# Opcodes that push a value: the function's result for the reader and the argument that pickletools
# has decoded.
_PUSHES: dict[str, Callable[[_Reader, Any], Any]] = {
    **_named("INT BININT BININT1 BININT2 LONG LONG1 LONG4", lambda reader, value: _number(value)),
    **_named(
        "FLOAT BINFLOAT STRING BINSTRING "
        "SHORT_BINSTRING BINBYTES SHORT_BINBYTES BINBYTES8 BYTEARRAY8 UNICODE BINUNICODE "
        "SHORT_BINUNICODE BINUNICODE8",
        lambda reader, argument: argument,
    ),
    "NONE": lambda reader, argument: None,
    "NEWTRUE": lambda reader, argument: True,
    "NEWFALSE": lambda reader, argument: False,
    "MARK": lambda reader, argument: _MARK,
    "EMPTY_TUPLE": lambda reader, argument: (),
    **_named("EMPTY_LIST EMPTY_SET", lambda reader, argument: []),
    "EMPTY_DICT": lambda reader, argument: {},
    **_named("LIST FROZENSET", lambda reader, argument: reader.since_mark()),
    "TUPLE": lambda reader, argument: tuple(reader.since_mark()),
    "TUPLE1": lambda reader, argument: reader.popped(1),
    "TUPLE2": lambda reader, argument: reader.popped(2),
    "TUPLE3": lambda reader, argument: reader.popped(3),
    "DICT": lambda reader, argument: _pairs(reader.since_mark()),
    **_named("BINGET LONG_BINGET GET", lambda reader, argument: reader.recalled(int(argument))),
    "DUP": lambda reader, argument: reader.stack[-1],
    "GLOBAL": lambda reader, argument: _allowed(Global(*argument.split(" ", 1))),
    "STACK_GLOBAL": lambda reader, argument: _allowed(Global(*reader.popped(2))),
    **_named("REDUCE NEWOBJ", lambda reader, argument: _call(reader, *reader.popped(2))),
    "BINPERSID": lambda reader, argument: reader.storage(reader.stack.pop()),
}
# Opcodes that push nothing; their functions have the same arguments.
_ACTS: dict[str, Callable[[_Reader, Any], Any]] = {
    **_named("PROTO FRAME STOP", lambda reader, argument: None),
    **_named("BINPUT LONG_BINPUT PUT", lambda reader, argument: reader.memoize(int(argument))),
    "MEMOIZE": lambda reader, argument: reader.memoize(len(reader.memo)),
    "POP": lambda reader, argument: reader.stack.pop(),
    "POP_MARK": lambda reader, argument: reader.since_mark(),
    "APPEND": lambda reader, argument: reader.extend([reader.stack.pop()]),
    **_named("APPENDS ADDITEMS", lambda reader, argument: reader.extend(reader.since_mark())),
    "SETITEM": lambda reader, argument: reader.update(reader.popped(2)),
    "SETITEMS": lambda reader, argument: reader.update(reader.since_mark()),
    "BUILD": lambda reader, argument: reader.build(),
}
