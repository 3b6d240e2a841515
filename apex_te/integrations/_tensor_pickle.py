"""Reader of tensors in pickles that does not unpickle: it imports no name and calls nothing.

It interprets the opcodes over a stack of plain values. A name to import becomes a ``Global``, a
pair of strings. A call of one of torch's own tensor builders becomes a ``Strided``, which describes
the tensor; a call of something from ``INERT_PACKAGES`` becomes an ``Inert``; any other is an error.
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


class TensorPickleError(ValueError):
    """Error for a pickle that is damaged, or that is not only tensors and plain values."""


class Global(NamedTuple):
    """Name that unpickling would import.

    Attributes:
        module: dotted name of the Python module.
        name: name in the module.
    """

    module: str
    name: str


class Inert:
    """Placeholder for an object of another library.

    Args:
        kind: dotted name of the object's class or function.

    Attributes:
        state: the object's attributes by name, tensors among them not read; empty if the file sets
            none.
    """

    __slots__ = ("kind", "state")

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.state: dict[Any, Any] = {}

    def __repr__(self) -> str:
        return f"<{self.kind}, not rebuilt>"


class Storage:
    """Storage of tensors in a file, whose bytes follow after the pickle that refers to it.

    Args:
        dtype: dtype of the elements.
        key: name of the storage in the file.
        numel: number of elements.

    Attributes:
        data: the bytes, None until they are read.
        values: the elements as a vector on the CPU, None until ``flat`` is called.
    """

    __slots__ = ("data", "dtype", "key", "numel", "values")

    def __init__(self, dtype: torch.dtype, key: str, numel: int) -> None:
        self.dtype = dtype
        self.key = key
        self.numel = numel
        self.data: bytes | None = None
        self.values: torch.Tensor | None = None

    def flat(self) -> torch.Tensor:
        """Returns the elements as a vector, which is made once and shared by all tensors.

        So the memory that a file can ask for is bounded by its size.

        Raises:
            TensorPickleError: the bytes were not in the file.
        """
        if self.data is None:
            raise TensorPickleError("a storage has no bytes")
        if self.values is None:
            self.values = torch.frombuffer(bytearray(self.data), dtype=self.dtype)
        return self.values


class Strided(NamedTuple):
    """Stand-in for a tensor whose storage is not read yet, with all that makes the tensor.

    Attributes:
        storage: the storage that has the tensor's elements.
        offset: position of the tensor's first element in the storage.
        size: the tensor's shape.
        stride: the tensor's strides, in elements.
    """

    storage: Storage
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


_MARK = Inert("mark")


class _Reader:
    """Interpreter of one pickle, by the tables ``_PUSHES`` and ``_ACTS``.

    Attributes:
        stack: values that opcodes have pushed and none has taken.
        memo: values to which later opcodes refer by number.
        storages: storages that the pickle's tensors refer to, by key.
    """

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.storages: dict[str, Storage] = {}

    def read(self, stream: io.BytesIO) -> Any:
        """Reads one pickle from ``stream``, up to its end.

        Returns:
            Its value, with a ``Strided`` for each tensor.
        """
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
        self.memo[place] = self.stack[-1]

    def extend(self, items: list[Any]) -> None:
        """Appends ``items`` to the list that is the last value of the stack."""
        target = self.stack[-1]
        if type(target) is not list:
            raise TensorPickleError(f"items must go into a list, got {type(target).__name__}")
        target.extend(items)

    def update(self, items: Sequence[Any]) -> None:
        """Sets items of the dict that is the last value of the stack; an ``Inert`` drops them.

        Args:
            items: keys and values in turn.
        """
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
        """Returns the storage that a persistent id of ``torch.save`` refers to.

        Args:
            description: ``("storage", type, key, location, elements, ...)`` if the file is valid.
        """
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
    """Returns a stand-in for the result of a call in a pickle, which does not take place.

    Args:
        function: the ``Global`` to be called if the file is valid.
        arguments: a tuple of its arguments if the file is valid.

    Returns:
        A ``Strided``, the content of a nested file, an empty dict or an ``Inert``.

    Raises:
        TensorPickleError: the function is none that tensor files call.
    """
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
    """Returns ``name`` if a tensor file may contain it, else raises TensorPickleError."""
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
    """Returns a dict of keys and values that come in turn."""
    return dict(zip(items[::2], items[1::2], strict=True))


def _kind(value: Any) -> str:
    """Returns a short text for messages; containers give their type alone.

    The ``repr`` of containers that share items can be of any length.
    """
    plain = isinstance(value, (Global, Inert, Storage, bool, float, type(None)))
    if plain or (isinstance(value, int) and abs(value) < 1 << 64):
        return repr(value)
    return type(value).__name__


def _count(value: Any) -> int:
    """Returns ``value`` if it is an int of at least 0, else raises TensorPickleError."""
    if type(value) is not int or value < 0:
        raise TensorPickleError(f"a size must be an int of at least 0, got {_kind(value)}")
    return value


def _bytes(value: Any) -> bytes:
    """Returns ``value`` if it is bytes, else raises TensorPickleError."""
    if not isinstance(value, (bytes, bytearray)):
        raise TensorPickleError(f"a storage must be bytes, got {type(value).__name__}")
    return bytes(value)


def _strided(storage: Any, offset: Any, size: Any, stride: Any) -> Strided:
    """Returns a ``Strided`` after checking that all elements of the tensor are in the storage.

    Raises:
        TensorPickleError: an argument has a wrong type, or an element is not in the storage.
    """
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
    """Returns the value in a ``torch.save`` file of the format before zip files.

    Such a file is five pickles (magic number, version, system, value, storage keys) and then the
    bytes of the storages.
    """
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
    """Returns the value in a ``torch.save`` zip file, with ``Strided`` for tensors."""
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
    """Gives ``storage`` its bytes, or raises TensorPickleError if their number is wrong."""
    expected = storage.numel * storage.dtype.itemsize
    if len(data) != expected:
        raise TensorPickleError(f"a storage must have {expected} bytes, got {len(data)}")
    storage.data = data


def _resolved(value: Any) -> Any:
    """Replaces each ``Strided`` by its tensor: ``value`` itself, or the items of a dict or list.

    A ``Strided`` in a deeper container stays.
    """
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
    """Returns the value of a file, turning every error of a damaged one into TensorPickleError.

    Args:
        parse: function of ``data`` that returns the value with ``Strided`` for tensors.
        data: the file's bytes.
    """
    try:
        return _resolved(parse(data))
    except TensorPickleError:
        raise
    except Exception as error:  # every decoder has errors of its own
        raise TensorPickleError(f"it is damaged: {type(error).__name__}: {error}") from error


def read_pickle(data: bytes) -> Any:
    """Returns the value in the output of ``pickle.dumps``.

    Args:
        data: the output.

    Returns:
        The value: tensors on the CPU, plain values, containers of them, and an ``Inert`` for each
        object of ``INERT_PACKAGES``. Only a tensor that is the value, or directly in the dict or
        list that is, comes as a tensor.

    Raises:
        TensorPickleError: the pickle is damaged, or contains anything else.
    """
    return _guarded(lambda raw: _Reader().read(io.BytesIO(raw)), data)


def read_saved(data: bytes) -> Any:
    """Returns the value in a file of ``torch.save``, as ``read_pickle`` does.

    Args:
        data: the file's bytes, in the zip format or the earlier one.

    Raises:
        TensorPickleError: as for ``read_pickle``.
    """
    return _guarded(_zipped if data[:4] == b"PK\x03\x04" else _legacy, data)


def _named(names: str, handler: Callable[[_Reader, Any], Any]) -> dict[str, Any]:
    """Returns a table with one handler for several opcodes, whose names spaces separate."""
    return dict.fromkeys(names.split(), handler)


# Opcodes that push a value: the function's result for the reader and the argument that pickletools
# has decoded.
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
