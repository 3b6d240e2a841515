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
# Opcodes whose argument, as pickletools decodes it, is the value they push.
PUSH_ARGUMENT = frozenset(
    {
        "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT",
        "STRING", "BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8",
        "BYTEARRAY8", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8",
    }
)  # fmt: skip
CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


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
    """The bytes behind tensors, ``numel`` elements of ``dtype``; they may arrive later."""

    __slots__ = ("data", "dtype", "key", "numel", "values")

    def __init__(self, dtype: torch.dtype, key: str, numel: int) -> None:
        self.dtype = dtype
        self.key = key
        self.numel = numel
        self.data: bytes | None = None
        self.values: torch.Tensor | None = None

    def flat(self) -> torch.Tensor:
        """The elements, which tensors then share: a file's size bounds what it can ask for."""
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
    """Interprets one pickle; ``storages`` collects those that its tensors refer to."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.storages: dict[str, Storage] = {}

    def read(self, stream: io.BytesIO) -> Any:
        """The value of the pickle at the position of ``stream``, which is then behind it."""
        for opcode, argument, _ in pickletools.genops(stream):
            self._step(opcode.name, argument)
        (value,) = self.stack
        return value

    def _step(self, op: str, argument: Any) -> None:
        stack = self.stack
        if op in PUSH_ARGUMENT:
            stack.append(argument)
        elif op in CONSTANTS:
            stack.append(CONSTANTS[op])
        elif op in ("PROTO", "FRAME", "STOP"):
            pass
        elif op == "MARK":
            stack.append(_MARK)
        elif op in ("BINPUT", "LONG_BINPUT", "PUT"):
            self.memo[int(argument)] = stack[-1]
        elif op == "MEMOIZE":
            self.memo[len(self.memo)] = stack[-1]
        elif op in ("BINGET", "LONG_BINGET", "GET"):
            stack.append(self.memo[int(argument)])
        elif op == "POP":
            stack.pop()
        elif op == "POP_MARK":
            self._since_mark()
        elif op == "DUP":
            stack.append(stack[-1])
        elif op in ("EMPTY_LIST", "EMPTY_SET"):
            stack.append([])
        elif op == "EMPTY_DICT":
            stack.append({})
        elif op in ("LIST", "FROZENSET"):
            stack.append(self._since_mark())
        elif op == "TUPLE":
            stack.append(tuple(self._since_mark()))
        elif op in TUPLES:
            count = TUPLES[op]
            items = tuple(stack[-count:])
            del stack[-count:]
            stack.append(items)
        elif op == "DICT":
            stack.append(_pairs(self._since_mark()))
        elif op == "APPEND":
            self._extend([stack.pop()])
        elif op in ("APPENDS", "ADDITEMS"):
            self._extend(self._since_mark())
        elif op == "SETITEM":
            value, key = stack.pop(), stack.pop()
            self._update([key, value])
        elif op == "SETITEMS":
            self._update(self._since_mark())
        elif op == "GLOBAL":
            module, name = argument.split(" ", 1)
            stack.append(_allowed(Global(module, name)))
        elif op == "STACK_GLOBAL":
            name, module = stack.pop(), stack.pop()
            stack.append(_allowed(Global(str(module), str(name))))
        elif op in ("REDUCE", "NEWOBJ"):
            arguments, function = stack.pop(), stack.pop()
            stack.append(self._call(function, arguments))
        elif op == "BUILD":
            stack.pop()
            if not isinstance(stack[-1], Inert):
                raise TensorPickleError(f"BUILD must set an inert object, got {_kind(stack[-1])}")
        elif op == "BINPERSID":
            stack.append(self._storage(stack.pop()))
        else:
            raise TensorPickleError(f"opcode {op} is not one that tensors are saved with")

    def _since_mark(self) -> list[Any]:
        """Takes what lies above the last mark, and the mark."""
        stack = self.stack
        for at in range(len(stack) - 1, -1, -1):
            if stack[at] is _MARK:
                items = stack[at + 1 :]
                del stack[at:]
                return items
        raise TensorPickleError("a mark is missing")

    def _extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not list:
            raise TensorPickleError(f"items must go into a list, got {type(target).__name__}")
        target.extend(items)

    def _update(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is dict:
            target.update(_pairs(items))
        elif not isinstance(target, Inert):
            raise TensorPickleError(f"items must go into a dict, got {type(target).__name__}")

    def _call(self, function: Any, arguments: Any) -> Any:
        """What a call stands for: a tensor, a storage, a dict or an inert object."""
        if not isinstance(function, Global) or type(arguments) is not tuple:
            raise TensorPickleError(f"a call must be of a global, got {_kind(function)}")
        if function == ("torch._utils", "_rebuild_tensor_v2"):
            storage, offset, size, stride = arguments[:4]
            return _strided(storage, offset, size, stride)
        if function == ("torch.storage", "_load_from_bytes"):
            return _legacy(_bytes(arguments[0]))
        if function == ("collections", "OrderedDict"):
            return {}
        if function.module.split(".")[0] in INERT_PACKAGES:
            return Inert(f"{function.module}.{function.name}")
        # Some Pythons save an enum's member as getattr(its class, its name).
        if function == ("builtins", "getattr") and isinstance(arguments[0], Global):
            owner = arguments[0]
            if owner.module.split(".")[0] in INERT_PACKAGES:
                return Inert(f"{owner.module}.{owner.name}")
        raise TensorPickleError(f"it calls {function.module}.{function.name}")

    def _storage(self, description: Any) -> Storage:
        """A storage as torch.save refers to it: ("storage", type, key, location, elements, ...)."""
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


def _allowed(name: Global) -> Global:
    """``name`` if a tensor file may hold it."""
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


def _pairs(items: list[Any]) -> dict[Any, Any]:
    return dict(zip(items[::2], items[1::2], strict=True))


def _kind(value: Any) -> str:
    """A short description; containers that share their items could print without end."""
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
    """What torch.save wrote before its zip files: five pickles, then the bytes of the storages."""
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
    """What torch.save writes."""
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
    """``value`` with tensors for their descriptions, in it or among its items."""
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
    """``parse(data)``; whatever goes wrong in a damaged file is one kind of error."""
    try:
        return _resolved(parse(data))
    except TensorPickleError:
        raise
    except Exception as error:  # every decoder has errors of its own
        raise TensorPickleError(f"it is damaged: {type(error).__name__}: {error}") from error


def read_pickle(data: bytes) -> Any:
    """The value of ``pickle.dumps`` output; tensors on the CPU, foreign objects as ``Inert``.

    Errors: TensorPickleError if it holds anything but tensors, plain values and the objects of
    ``INERT_PACKAGES``.
    """
    return _guarded(lambda raw: _Reader().read(io.BytesIO(raw)), data)


def read_saved(data: bytes) -> Any:
    """The value of ``torch.save`` output, of either file format. Errors: as ``read_pickle``."""
    return _guarded(_zipped if data[:4] == b"PK\x03\x04" else _legacy, data)
