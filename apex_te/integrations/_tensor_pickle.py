"""Reads tensors out of pickles without unpickling: no name is looked up, nothing is called.

The opcodes are interpreted here, over a stack of plain values. A global is a pair of strings; what
a pickle would call becomes a tensor description where it is one of torch's own tensor builders, an
inert record where it belongs to a library whose objects such files hold, and an error otherwise.
"""

from __future__ import annotations

import io
import math
import pickletools
import zipfile
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

__all__ = ["TensorPickleError", "read_pickle", "read_saved"]

# Objects of these packages may stand in a file (a recipe, say); they are read as inert records.
INERT_PACKAGES = ("transformer_engine", "megatron")
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


class TensorPickleError(ValueError):
    """A pickle that holds more than tensors, numbers, text and containers, or is damaged."""


class Global(NamedTuple):
    """A name that unpickling would import."""

    module: str
    name: str


class Inert:
    """An object that is not rebuilt."""

    __slots__ = ("kind",)

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __repr__(self) -> str:
        return f"<{self.kind}, not rebuilt>"


class Storage:
    """Bytes behind tensors, ``numel`` elements of ``dtype``; they may arrive later."""

    __slots__ = ("data", "dtype", "key", "numel", "values")

    def __init__(self, dtype: torch.dtype, key: str, numel: int) -> None:
        self.dtype = dtype
        self.key = key
        self.numel = numel
        self.data: bytes | None = None
        self.values: torch.Tensor | None = None

    def flat(self) -> torch.Tensor:
        """Returns the elements, which tensors share: a file's size bounds what it can ask for."""
        if self.data is None:
            raise TensorPickleError("a storage has no bytes")
        if self.values is None:
            self.values = torch.frombuffer(bytearray(self.data), dtype=self.dtype)
        return self.values


class Strided(NamedTuple):
    """A tensor's description."""

    storage: Storage
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


_MARK = Inert("mark")


class _Reader:
    """Interprets one pickle by the tables ``_PUSHES`` and ``_ACTS``.

    Attributes:
        storages: the storages that the pickle's tensors refer to, by key.
    """

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.storages: dict[str, Storage] = {}

    def read(self, stream: io.BytesIO) -> Any:
        """Returns the value of the pickle at the position of ``stream``, and moves behind it."""
        for opcode, argument, _ in pickletools.genops(stream):
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
        """Takes the last ``count`` values off the stack."""
        items = tuple(self.stack[-count:])
        del self.stack[-count:]
        return items

    def since_mark(self) -> list[Any]:
        """Takes the values above the last mark off the stack, and the mark."""
        stack = self.stack
        for at in range(len(stack) - 1, -1, -1):
            if stack[at] is _MARK:
                items = stack[at + 1 :]
                del stack[at:]
                return items
        raise TensorPickleError("a mark is missing")

    def memoize(self, place: int) -> None:
        """Keeps the last value under a number."""
        self.memo[place] = self.stack[-1]

    def extend(self, items: list[Any]) -> None:
        """Appends to the list that is the last value."""
        target = self.stack[-1]
        if type(target) is not list:
            raise TensorPickleError(f"items must go into a list, got {type(target).__name__}")
        target.extend(items)

    def update(self, items: Sequence[Any]) -> None:
        """Sets keys and values in the dict that is the last value; an inert object drops them."""
        target = self.stack[-1]
        if type(target) is dict:
            target.update(_pairs(items))
        elif not isinstance(target, Inert):
            raise TensorPickleError(f"items must go into a dict, got {type(target).__name__}")

    def build(self) -> None:
        """Drops the state that an inert object would be given."""
        self.stack.pop()
        if not isinstance(self.stack[-1], Inert):
            raise TensorPickleError(f"BUILD must set an inert object, got {_kind(self.stack[-1])}")

    def storage(self, description: Any) -> Storage:
        """Returns the storage of a description ("storage", type, key, location, elements, ...)."""
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


def _call(function: Any, arguments: Any) -> Any:
    """Returns what a call stands for: a tensor, a storage, a dict or an inert object."""
    if not isinstance(function, Global) or type(arguments) is not tuple:
        raise TensorPickleError(f"a call must be of a global, got {_kind(function)}")
    if function == ("torch._utils", "_rebuild_tensor_v2"):
        storage, offset, size, stride = arguments[:4]
        return _strided(storage, offset, size, stride)
    if function == ("torch.storage", "_load_from_bytes"):
        return _legacy(_bytes(arguments[0]))
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
    """Returns ``name``, which must be one that a tensor file may hold."""
    module = name.module
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
    return dict(zip(items[::2], items[1::2], strict=True))


def _kind(value: Any) -> str:
    """Returns a short description; containers that share their items could print without end."""
    plain = isinstance(value, (Global, Inert, Storage, bool, float, type(None)))
    if plain or (isinstance(value, int) and abs(value) < 1 << 64):
        return repr(value)
    return type(value).__name__


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise TensorPickleError(f"a size must be an int of at least 0, got {_kind(value)}")
    return value


def _bytes(value: Any) -> bytes:
    if not isinstance(value, (bytes, bytearray)):
        raise TensorPickleError(f"a storage must be bytes, got {type(value).__name__}")
    return bytes(value)


def _strided(storage: Any, offset: Any, size: Any, stride: Any) -> Strided:
    if not isinstance(storage, Storage):
        raise TensorPickleError(f"a tensor must have a storage, got {type(storage).__name__}")
    if type(size) is not tuple or type(stride) is not tuple or len(size) != len(stride):
        raise TensorPickleError(f"a tensor must have a shape, got {_kind(size)}, {_kind(stride)}")
    for number in (offset, *size, *stride):
        _count(number)
    elements = math.prod(size)
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if elements and (last >= storage.numel or elements > storage.numel):
        raise TensorPickleError(f"a tensor must lie in its storage, got shape {list(size)}")
    return Strided(storage, offset, size, stride)


def _legacy(data: bytes) -> Any:
    """Reads the format before torch.save's zip files: five pickles, then the storages' bytes."""
    stream = io.BytesIO(data)
    if _Reader().read(stream) != LEGACY_MAGIC:
        raise TensorPickleError("it is not a file of torch.save")
    _Reader().read(stream)  # version
    system = _Reader().read(stream)
    if type(system) is not dict or system.get("little_endian") is not True:
        raise TensorPickleError(f"it must be little-endian, got {_kind(system)}")
    reader = _Reader()
    value = reader.read(stream)
    keys = _Reader().read(stream)
    if type(keys) is not list or set(map(str, keys)) != set(reader.storages):
        raise TensorPickleError("its list of storages must be that of its tensors")
    for key in keys:
        storage = reader.storages[str(key)]
        numel = int.from_bytes(stream.read(8), "little")
        _fill(storage, stream.read(numel * storage.dtype.itemsize))
    return value


def _zipped(data: bytes) -> Any:
    """Reads the zip format of torch.save."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        files = {info.filename: info for info in archive.infolist()}
        (root,) = [name[: -len("data.pkl")] for name in files if name.endswith("/data.pkl")]

        def member(name: str) -> bytes:
            info = files[root + name]
            if info.compress_type != zipfile.ZIP_STORED:
                raise TensorPickleError(f"{name} must be stored without compression")
            return archive.read(info)

        if root + "byteorder" in files and member("byteorder") != b"little":
            raise TensorPickleError("it must be little-endian")
        reader = _Reader()
        value = reader.read(io.BytesIO(member("data.pkl")))
        for key, storage in reader.storages.items():
            _fill(storage, member(f"data/{key}"))
    return value


def _fill(storage: Storage, data: bytes) -> None:
    expected = storage.numel * storage.dtype.itemsize
    if len(data) != expected:
        raise TensorPickleError(f"a storage must have {expected} bytes, got {len(data)}")
    storage.data = data


def _resolved(value: Any) -> Any:
    """Replaces tensor descriptions by tensors: ``value`` itself, or among its items."""
    if isinstance(value, Strided):
        if 0 in value.size:
            return torch.empty(value.size, dtype=value.storage.dtype)
        return value.storage.flat().as_strided(value.size, value.stride, value.offset)
    if type(value) is dict:
        return {key: _resolved(item) if _is_tensor(item) else item for key, item in value.items()}
    if type(value) is list:
        return [_resolved(item) if _is_tensor(item) else item for item in value]
    return value


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Strided)


def _guarded(parse: Any, data: bytes) -> Any:
    """Returns ``parse(data)`` with its tensors; every error of a damaged file is of one type."""
    try:
        return _resolved(parse(data))
    except TensorPickleError:
        raise
    except Exception as error:  # every decoder has errors of its own
        raise TensorPickleError(f"it is damaged: {type(error).__name__}: {error}") from error


def read_pickle(data: bytes) -> Any:
    """Returns the value of ``pickle.dumps`` output, tensors on the CPU, foreign objects ``Inert``.

    Raises:
        TensorPickleError: it holds anything but tensors, plain values and objects of
            ``INERT_PACKAGES``.
    """
    return _guarded(lambda raw: _Reader().read(io.BytesIO(raw)), data)


def read_saved(data: bytes) -> Any:
    """Returns the value of ``torch.save`` output of either file format, as ``read_pickle`` does.

    Raises:
        TensorPickleError: as for ``read_pickle``.
    """
    return _guarded(_zipped if data[:4] == b"PK\x03\x04" else _legacy, data)


def _named(names: str, handler: Callable[[_Reader, Any], Any]) -> dict[str, Any]:
    return dict.fromkeys(names.split(), handler)


# Opcodes that push what the function gives, for the reader and pickletools' decoded argument.
_PUSHES: dict[str, Callable[[_Reader, Any], Any]] = {
    **_named(
        "INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT STRING BINSTRING "
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
    **_named("BINGET LONG_BINGET GET", lambda reader, argument: reader.memo[int(argument)]),
    "DUP": lambda reader, argument: reader.stack[-1],
    "GLOBAL": lambda reader, argument: _allowed(Global(*argument.split(" ", 1))),
    "STACK_GLOBAL": lambda reader, argument: _allowed(Global(*map(str, reader.popped(2)))),
    **_named("REDUCE NEWOBJ", lambda reader, argument: _call(*reader.popped(2))),
    "BINPERSID": lambda reader, argument: reader.storage(reader.stack.pop()),
}
# Opcodes that push nothing.
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
