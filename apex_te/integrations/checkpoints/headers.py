"""Headers of a checkpoint's safetensors files: names, dtypes and shapes, without the tensors."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable

import torch

from .description import Header

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_LONGEST = 100 << 20  # bytes of a header, as safetensors allows


def read_headers(files: Iterable[str]) -> dict[str, Header]:
    """Returns dtype and shape of each tensor in safetensors files."""
    found: dict[str, Header] = {}
    for file in files:
        for name, entry in _entries(file).items():
            if name == "__metadata__":
                continue
            dtype = _DTYPES.get(entry["dtype"])
            if (
                dtype is not None
            ):  # other dtypes, such as 4-bit ones, are neither scales nor weights here
                found[name] = Header(dtype, tuple(entry["shape"]))
    return found


def _entries(file: str) -> dict:
    with open(file, "rb") as stream:
        start = stream.read(8)
        size = struct.unpack("<Q", start)[0] if len(start) == 8 else _LONGEST + 1
        text = stream.read(size) if size <= _LONGEST else b""
    try:
        entries: dict = json.loads(text)
    except ValueError as error:
        raise ValueError(
            f"from_fp8_checkpoint: files must be of safetensors, got {file}"
        ) from error
    return entries
