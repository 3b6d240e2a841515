"""apex_te's FP8 state as bytes of an ``_extra_state``: a pickle with TransformerEngine's names.

The pickle is a dict of the four tensors that TransformerEngine saves, a recipe of its class, and in
``extra_fp8_variables`` the header of apex_te's own state dicts. So TransformerEngine and frameworks
that split, merge or rename its state read it, and apex_te gets all of its state back.

The opcodes are written here one by one. ``pickle.dumps`` would need TransformerEngine's classes to
be importable, and a storage's bytes would differ from call to call, with its address.
"""

from __future__ import annotations

import pickle
import struct
import zlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from ..fp8.delayed.state import (
    BACKWARD_SLOTS,
    FORWARD_SLOTS,
    FP8State,
    decode_header,
    encode_header,
)
from ..recipe import (
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    Format,
    MXFP8Scaling,
    Recipe,
)

OWN = "apex_te"  # key of the header in extra_fp8_variables
_DIRECTIONS = (("fwd", FORWARD_SLOTS), ("bwd", BACKWARD_SLOTS))
_RECIPES = "transformer_engine.common.recipe"
_CLASSES: tuple[tuple[type[Recipe], str], ...] = (
    (DelayedScaling, "DelayedScaling"),
    (CurrentScaling, "Float8CurrentScaling"),
    (BlockScaling, "Float8BlockScaling"),
    (MXFP8Scaling, "MXFP8BlockScaling"),
)


def encoded(state: FP8State, recipe: Recipe | None, by_kind: bool) -> torch.Tensor:
    """Returns the bytes of an ``_extra_state``, a uint8 vector on the CPU, empty without state.

    Its length depends only on recipe, number of GEMMs and history length. Frameworks expect the
    slots of a ``GroupedLinear`` to be sorted ``by_kind`` (inputs, weights, outputs), not by GEMM.
    """
    has_state = state.allocated and state.device.type != "meta"
    if not has_state and recipe is None:
        return no_bytes()
    extra = [(_text("num_gemms"), _int(state.gemms))]
    entries = [(_text("recipe"), _recipe(recipe))]
    if has_state:
        parts = _parts(state, by_kind)
        flat = _flat(parts.values())
        entries += _tensors(parts, flat)
        header, checksum = _bytes(bytes(state.header.tolist())), _int(_checksum(flat))
        own = _dict([(_text("header"), header), (_text("checksum"), checksum)])
        extra.append((_text(OWN), own))
    entries.append((_text("extra_fp8_variables"), _dict(extra)))
    data = b"\x80\x03" + _dict(entries) + b"."
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def no_bytes() -> torch.Tensor:
    """Returns an empty uint8 vector that has an empty storage at its own address.

    Some tools that write safetensors mistake tensors at address 0 for one shared tensor and drop
    them; others reject tensors that are smaller than their storages.
    """
    try:
        import numpy

        return torch.from_numpy(numpy.empty(0, numpy.uint8))
    except (ImportError, RuntimeError):  # RuntimeError: a torch that was built for another numpy
        return torch.empty(0, dtype=torch.uint8)


class OwnHeader(NamedTuple):
    """Header that apex_te has saved in an ``_extra_state``, with a checksum of the four tensors."""

    blob: torch.Tensor
    checksum: int

    def fitted(self, tensors: Iterable[torch.Tensor], due: list[bool]) -> torch.Tensor:
        """Returns a header that fits the four tensors saved with it.

        A framework may have split a state by GEMM, and merged the parts again, perhaps with parts
        of other ranks. The header is then that of the state from which the first part came, so only
        the entries that hold for any part of it are used. ``due`` is True for each slot that has
        seen no amax and has no scale.
        """
        entries = decode_header(self.blob)
        if _checksum(_flat(tensors)) == self.checksum:
            return self.blob
        # Ranks that had equal scales may have been given other GEMMs.
        return encode_header(entries | {"first_due": due, "equal": None})


def own_header(saved: Any) -> OwnHeader | None:
    """Returns apex_te's header in a decoded ``_extra_state``; None if apex_te did not save it."""
    extra = saved.get("extra_fp8_variables") if isinstance(saved, dict) else None
    own = extra.get(OWN) if isinstance(extra, dict) else None
    if not isinstance(own, dict):
        return None
    header, checksum = own.get("header"), own.get("checksum")
    if not isinstance(header, bytes) or not header or not isinstance(checksum, int):
        return None
    return OwnHeader(torch.frombuffer(bytearray(header), dtype=torch.uint8), checksum)


def _parts(state: FP8State, by_kind: bool) -> dict[str, torch.Tensor]:
    """Returns the tensors to be saved, by their names, in the order of slots of ``by_kind``."""
    parts = {}
    for way, slots in _DIRECTIONS:
        for name in (f"scale_{way}", f"amax_history_{way}"):
            value: torch.Tensor = getattr(state, name).detach()
            if by_kind:
                value = value.unflatten(-1, (state.gemms, slots)).transpose(-1, -2).flatten(-2)
            parts[name] = value
    return parts


def _flat(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Returns the elements of all tensors as one vector on the CPU, in one copy from the device."""
    return torch.cat([value.flatten() for value in tensors]).cpu()


def _checksum(flat: torch.Tensor) -> int:
    return zlib.crc32(flat.numpy().tobytes()) & 0x7FFFFFFF


def _tensors(parts: dict[str, torch.Tensor], flat: torch.Tensor) -> list[tuple[bytes, bytes]]:
    """Returns the pickled items of tensors that are views of one storage, ``flat``."""
    storage = _call("torch.storage", "_load_from_bytes", _bytes(_storage_file(flat))) + b"q\x00"
    items, offset = [], 0
    for name, value in parts.items():
        size = value.shape
        strides = (size[1], 1) if len(size) == 2 else (1,)
        tensor = _call(
            "torch._utils", "_rebuild_tensor_v2", storage, _int(offset),
            _tuple(map(_int, size)), _tuple(map(_int, strides)), b"\x89",
            _call("collections", "OrderedDict"),
        )  # fmt: skip
        items.append((_text(name), tensor))
        storage = b"h\x00"
        offset += value.numel()
    return items


def _storage_file(flat: torch.Tensor) -> bytes:
    """Returns the file that ``torch.save`` makes of the storage of an fp32 vector on the CPU."""
    magic, version = pickle.dumps(0x1950A86A20F9469CFC6C, 2), pickle.dumps(1001, 2)
    sizes = {"short": 2, "int": 4, "long": 4}
    system = {"protocol_version": 1001, "little_endian": True, "type_sizes": sizes}
    reference = [
        _text("storage"), _global("torch", "FloatStorage"), _text("0"), _text("cpu"),
        _int(flat.numel()), b"N",
    ]  # fmt: skip
    value = b"\x80\x02" + _tuple(reference) + b"Q."
    keys = pickle.dumps(["0"], 2)
    raw = flat.numpy().tobytes()
    return b"".join(
        (magic, version, pickle.dumps(system, 2), value, keys, struct.pack("<q", flat.numel()), raw)
    )


def _recipe(recipe: Recipe | None) -> bytes:
    """Returns a pickled object of TransformerEngine's class for a recipe, None if it has none."""
    kind = next((name for base, name in _CLASSES if isinstance(recipe, base)), None)
    own: Any = recipe
    if kind is None or own.fp8_format is Format.HIF8:
        return b"N"
    form = _call("builtins", "getattr", _global(_RECIPES, "Format"), _text(own.fp8_format.name))
    fields = [(_text("fp8_format"), form)]
    if isinstance(recipe, DelayedScaling):
        algorithm = recipe.amax_compute_algo
        named = algorithm if isinstance(algorithm, str) else "max"
        fields += [
            (_text("margin"), _int(recipe.margin)),
            (_text("amax_history_len"), _int(recipe.amax_history_len)),
            (_text("amax_compute_algo"), _text(named)),
            (_text("reduce_amax"), b"\x88" if recipe.reduce_amax else b"\x89"),
        ]
    return _global(_RECIPES, kind) + b")\x81" + _dict(fields) + b"b"


# Opcodes of pickle's protocol 3.


def _text(value: str) -> bytes:
    raw = value.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def _int(value: int) -> bytes:
    return b"J" + struct.pack("<i", value)


def _bytes(value: bytes) -> bytes:
    return b"B" + struct.pack("<I", len(value)) + value


def _tuple(items: Iterable[bytes]) -> bytes:
    return b"(" + b"".join(items) + b"t"


def _dict(items: Iterable[tuple[bytes, bytes]]) -> bytes:
    return b"}(" + b"".join(key + value for key, value in items) + b"u"


def _global(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def _call(module: str, name: str, *arguments: bytes) -> bytes:
    return _global(module, name) + _tuple(arguments) + b"R"
