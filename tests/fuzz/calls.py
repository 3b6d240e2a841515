"""Calls of bound functions as data: what a test passed, and how to make it again, changed or not.

An argument is None, a bool, int, float or string, a tensor ``{"tensor": ...}`` or a list
``{"list": [...]}``. Tensors are described by dtype, shape, strides and storage offset; values are
kept where they are few or whole numbers, which often are indices or sizes, and random elsewhere.
"""

from __future__ import annotations

import base64
import random
from typing import Any

import torch

KEPT_BYTES = 4096  # of a tensor's values
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (
    torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.uint8, torch.int8,
    torch.int16, torch.int32, torch.int64, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e8m0fnu, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.complex64,
)}  # fmt: skip
WHOLE = ("uint8", "int8", "int16", "int32", "int64", "bool", "float8_e8m0fnu")


def describe(value: Any) -> Any:
    """The description of an argument; None for one that cannot be described."""
    if isinstance(value, torch.Tensor):
        if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.is_meta:
            return None  # fake tensors and other subclasses have no values to read
        if value.layout != torch.strided:
            return None
        name = str(value.dtype).removeprefix("torch.")
        found = {
            "tensor": name,
            "shape": list(value.shape),
            "strides": list(value.stride()),
            "offset": value.storage_offset(),
        }
        few = value.numel() <= 4 or name in WHOLE
        if few and 0 < value.numel() * value.element_size() <= KEPT_BYTES:
            data = value.detach().contiguous().reshape(-1).view(torch.uint8)
            found["values"] = base64.b64encode(bytes(data.tolist())).decode()
        return found
    if isinstance(value, (list, tuple)) or type(value).__name__ == "TensorList":
        return {"list": [describe(item) for item in value]}
    return value if isinstance(value, (bool, int, float, str)) else None


def elements(described: Any) -> int:
    """How many elements the tensors of a description have."""
    if isinstance(described, dict) and "list" in described:
        return sum(elements(item) for item in described["list"])
    if isinstance(described, dict):
        count = 1
        for extent in described["shape"]:
            count *= extent
        return count
    return 0


def extent_of(described: dict[str, Any]) -> int:
    """Elements of the smallest storage that the tensor fits in, from its offset on."""
    if 0 in described["shape"]:
        return 0
    pairs = zip(described["shape"], described["strides"], strict=True)
    return 1 + sum((size - 1) * stride for size, stride in pairs)


def fill(storage: torch.Tensor, kind: str, generator: torch.Generator) -> None:
    """Values of a kind: "normal", "special", "whole", "huge" or "bits"."""
    count = storage.numel()
    if storage.is_complex():
        storage.zero_()
    elif kind == "bits" or storage.dtype == torch.bool or storage.element_size() == 1:
        high = 2 if storage.dtype == torch.bool else 256
        bits = torch.randint(0, high, (count * storage.element_size(),), generator=generator)
        storage.view(torch.uint8).copy_(bits.to(torch.uint8))
    elif storage.is_floating_point():
        storage.copy_(torch.randn(count, generator=generator))
        if kind == "special" and count:
            values = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, 6e4, 1e-40])
            at = torch.randint(0, count, (max(1, count // 4),), generator=generator)
            pick = torch.randint(0, len(values), at.shape, generator=generator)
            storage[at] = values[pick].to(storage.dtype)
    elif kind == "huge":
        limits = torch.iinfo(storage.dtype)
        choice = torch.tensor([limits.min, limits.max, -1, 0, limits.max // 2, 2**15])
        pick = torch.randint(0, len(choice), (count,), generator=generator)
        storage.copy_(choice[pick].to(storage.dtype))
    else:
        storage.copy_(torch.randint(-1, 8, (count,), generator=generator).to(storage.dtype))


def make_tensor(described: dict[str, Any], generator: torch.Generator) -> torch.Tensor:
    """A tensor at the end of a storage of just its size, so that what is behind it is no one's."""
    dtype = DTYPES[described["tensor"]]
    size, offset = extent_of(described), described["offset"]
    if described.get("misaligned"):
        width = torch.empty(0, dtype=dtype).element_size()
        raw = torch.zeros((offset + size) * width + 1, dtype=torch.uint8)
        # torch makes no view at an odd address itself; DLPack and frombuffer do
        storage = (
            torch.frombuffer(memoryview(raw.numpy()), dtype=dtype, offset=1)
            if size
            else (torch.empty(0, dtype=dtype))
        )
    else:
        storage = torch.empty(offset + size, dtype=dtype)
    fill(storage, described.get("kind", "normal"), generator)
    tensor = torch.as_strided(storage, described["shape"], described["strides"], offset)
    if "values" in described:
        data = torch.frombuffer(
            bytearray(base64.b64decode(described["values"])) or bytearray(1), dtype=torch.uint8
        )
        if data.numel() == tensor.numel() * tensor.element_size():
            values = data.view(dtype).reshape(described["shape"])
            if size and 0 not in described["strides"]:
                tensor.copy_(values)
            elif size:
                storage.copy_(values.reshape(-1)[:1].expand(storage.shape))
    return tensor


def make(described: Any, generator: torch.Generator, shared: dict[int, torch.Tensor]) -> Any:
    """The argument that a description stands for; ``shared``: tensors given by "same"."""
    if not isinstance(described, dict):
        return odd(described) if isinstance(described, str) else described
    if "list" in described:
        items = [make(item, generator, shared) for item in described["list"]]
        if described.get("as") == "tuple":
            return tuple(items)
        return items
    if "same" in described and described["same"] in shared:
        return shared[described["same"]]
    return make_tensor(described, generator)


def odd(name: str) -> Any:
    """An argument of a wrong kind."""
    if name == "meta":
        return torch.empty(3, 4, device="meta")
    if name == "sparse":
        return torch.eye(3).to_sparse()
    if name == "negative":
        return torch.ones(3, 4, dtype=torch.complex64).conj().imag
    if name == "empty tensor subclass":
        return torch.empty(0).as_subclass(type("Sub", (torch.Tensor,), {}))
    if name == "dict":
        return {}
    if name == "nested list":
        return [[torch.ones(2)]]
    return name


ODD = ("meta", "sparse", "negative", "empty tensor subclass", "dict", "nested list", "text")
INTS = (0, 1, -1, 2, 3, 7, 127, 128, 2**31 - 1, 2**31, -(2**31), 2**62, 2**63 - 1, -(2**63), 2**63)
FLOATS = (0.0, 1.0, -1.0, 0.5, 1e-30, 1e300, float("nan"), float("inf"), -float("inf"), 2**70)


def dense_strides(shape: list[int]) -> list[int]:
    """Strides of a contiguous tensor."""
    strides, stride = [], 1
    for extent in reversed(shape):
        strides.append(stride)
        stride *= max(extent, 1)
    return strides[::-1]


def random_shape(source: random.Random) -> list[int]:
    """A shape of few elements."""
    extents = (0, 1, 2, 3, 4, 8, 16, 31, 32, 33, 64, 128, 129, 256)
    shape = [source.choice(extents) for _ in range(source.choice((0, 1, 1, 2, 2, 2, 3, 4, 5, 9)))]
    while elements({"shape": shape}) > 1 << 15:
        shape[source.randrange(len(shape))] = 1
    return shape


def random_tensor(source: random.Random) -> dict[str, Any]:
    """A tensor of any shape and dtype."""
    shape = random_shape(source)
    return {
        "tensor": source.choice(list(DTYPES)),
        "shape": shape,
        "strides": dense_strides(shape),
        "offset": 0,
        "kind": source.choice(("normal", "special", "huge", "bits")),
    }


def random_argument(kind: str, source: random.Random) -> Any:
    """An argument for a parameter of a signature, such as "Tensor?" or "int"."""
    if kind.endswith("?") and source.random() < 0.5:
        return None
    if kind.startswith("Tensor["):
        return {"list": [random_tensor(source) for _ in range(source.choice((0, 1, 2, 3, 5)))]}
    if kind.startswith("Tensor"):
        return random_tensor(source)
    if kind == "float[]":
        return {"list": [source.choice(FLOATS) for _ in range(source.choice((0, 1, 2, 3)))]}
    if kind == "bool":
        return source.random() < 0.5
    return source.choice(INTS if kind == "int" else FLOATS)


def change_tensor(tensor: dict[str, Any], source: random.Random) -> dict[str, Any]:
    """The tensor with one property changed."""
    tensor = dict(tensor)
    shape, strides = list(tensor["shape"]), list(tensor["strides"])
    what = source.choice(("dtype", "extent", "rank", "transpose", "expand", "step", "offset",
                          "misalign", "kind", "kind", "values", "new", "empty"))  # fmt: skip
    if what == "dtype":
        tensor["tensor"] = source.choice(list(DTYPES))
    elif what == "extent" and shape:
        at = source.randrange(len(shape))
        new = source.choice((0, 1, shape[at] - 1, shape[at] + 1, shape[at] * 2, shape[at] // 2))
        shape[at] = max(0, new)
        strides = dense_strides(shape)
    elif what == "rank":
        if shape and source.random() < 0.5:
            shape.pop(source.randrange(len(shape)))
        else:
            shape.insert(source.randrange(len(shape) + 1), source.choice((1, 1, 2)))
        strides = dense_strides(shape)
    elif what == "transpose" and len(shape) > 1:
        i, k = source.sample(range(len(shape)), 2)
        shape[i], shape[k] = shape[k], shape[i]
        strides[i], strides[k] = strides[k], strides[i]
        if source.random() < 0.5:  # the first shape with the other's strides
            shape[i], shape[k] = shape[k], shape[i]
    elif what == "expand" and shape:
        strides[source.randrange(len(shape))] = 0
    elif what == "step" and shape:
        strides = [stride * source.choice((1, 2, 3)) for stride in strides]
    elif what == "offset":
        tensor["offset"] = source.choice((1, 2, 3, 5, 8))
    elif what == "misalign":
        tensor["misaligned"] = True
    elif what == "kind":
        tensor["kind"] = source.choice(("special", "huge", "bits"))
        tensor.pop("values", None)
    elif what == "values":
        tensor.pop("values", None)
    elif what == "new":
        return random_tensor(source)
    elif what == "empty":
        shape = [0 for _ in shape]
        strides = dense_strides(shape)
    tensor["shape"], tensor["strides"] = shape, strides
    if elements(tensor) > 1 << 17 or extent_of(tensor) > 1 << 18:
        return random_tensor(source)
    return tensor


def change_list(items: list[Any], source: random.Random) -> list[Any]:
    """The list with an item less, more, changed or of another kind."""
    items = list(items)
    what = source.choice(("drop", "double", "change", "change", "odd", "clear"))
    if what == "clear" or not items:
        return [] if items else [random_tensor(source)]
    at = source.randrange(len(items))
    if what == "drop":
        items.pop(at)
    elif what == "double":
        items.insert(at, items[at])
    elif what == "odd":
        items[at] = source.choice((None, 1, 0.5, *ODD))
    else:
        items[at] = change_argument(items[at], source)
    return items


def change_argument(described: Any, source: random.Random) -> Any:
    """The argument, changed."""
    if source.random() < 0.04:
        return source.choice((None, 1, 0.5, True, *ODD))
    if isinstance(described, dict) and "list" in described:
        changed = {"list": change_list(described["list"], source)}
        changed["as"] = source.choice(("list", "tuple"))
        return changed
    if isinstance(described, dict):
        return change_tensor(described, source)
    if isinstance(described, bool):
        return not described
    if isinstance(described, int):
        return source.choice((*INTS, described + 1, described - 1, described * 2))
    if isinstance(described, float):
        return source.choice(FLOATS)
    return random_tensor(source)


def replace_extent(arguments: list[Any], source: random.Random) -> list[Any]:
    """All arguments with one number, an extent of several tensors, replaced by another."""
    tensors = [a for a in arguments if isinstance(a, dict) and "shape" in a]
    for listed in arguments:
        if isinstance(listed, dict) and "list" in listed:
            tensors += [a for a in listed["list"] if isinstance(a, dict) and "shape" in a]
    extents = [extent for tensor in tensors for extent in tensor["shape"] if extent > 1]
    if not extents:
        return arguments
    old = source.choice(extents)
    new = source.choice((0, 1, old - 1, old + 1, old // 2, old * 2, 17, 32, 33, 64, 128))

    def replaced(described: Any) -> Any:
        if isinstance(described, dict) and "list" in described:
            return {**described, "list": [replaced(item) for item in described["list"]]}
        if isinstance(described, dict) and old in described["shape"]:
            shape = [new if extent == old else extent for extent in described["shape"]]
            return {**described, "shape": shape, "strides": dense_strides(shape), "offset": 0}
        return new if described == old and not isinstance(described, (bool, float)) else described

    changed = [replaced(argument) for argument in arguments]
    return changed if sum(map(elements, changed)) <= 1 << 18 else arguments
