"""The transposed copy of a matrix of 8-bit codes, where only the rowwise one travelled."""

from __future__ import annotations

import torch

from .argument_errors import checked
from .fp8_output import reinterpreted
from .registration import bind, note_written

_transpose = bind("byte_transpose", "byte_transpose")


@checked
def byte_transpose(codes: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """``codes`` transposed: the same bytes, [cols, rows], contiguous.

    Args:
        codes: [rows, cols] of any dtype of one byte (FP8, uint8 for HiF8); made contiguous if it
            is not.
        out: written instead of a new tensor.

    Raises:
        TypeError: a dtype of more bytes.
        ValueError: a shape or device that does not match.
    """
    if codes.element_size() != 1:
        raise TypeError(f"byte_transpose: codes must have a dtype of one byte, got {codes.dtype}")
    if codes.dim() != 2:
        raise ValueError(
            f"byte_transpose: codes must have 2 dimensions, got shape {list(codes.shape)}"
        )
    given = out is not None
    if out is None:
        out = codes.new_empty(codes.shape[::-1])
    elif out.dtype != codes.dtype:
        raise TypeError(f"byte_transpose: out must have dtype {codes.dtype}, got {out.dtype}")
    source, target = (reinterpreted("byte_transpose", t, torch.uint8) for t in (codes, out))
    _transpose(source.contiguous(), target)
    if given:
        note_written(out)
    return out


def reference(codes: torch.Tensor) -> torch.Tensor:
    """`byte_transpose` in plain PyTorch; the specification."""
    return codes.view(torch.uint8).t().contiguous().view(codes.dtype)
