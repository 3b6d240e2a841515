"""Transposes FP8 data: the columnwise copy of data that a rank received as rowwise copy."""

from __future__ import annotations

import torch

from .binding import bind, checked, note_written
from .fp8_output import columnwise_length, reinterpreted

_transpose = bind("byte_transpose", "byte_transpose")
_transpose_stack = bind("byte_transpose", "byte_transpose_stack")


@checked
def byte_transpose(
    fp8_data: torch.Tensor, *, pad_columnwise: bool = False, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Transposes a matrix of bytes, to make the columnwise copy from a rowwise copy.

    Args:
        fp8_data: [rows, cols], or a stack of matrices [n, rows, cols], of any dtype of one byte
            (FP8, uint8 for HiF8); made contiguous if it is not.
        pad_columnwise: pad the result to [cols, rows rounded up to 16] with zero bytes; not for a
            stack.
        out: contiguous [cols, rows], padded or not, or [n, cols, rows], to write, in the dtype of
            ``fp8_data``; a new tensor unless given.

    Returns:
        The transpose, padded or not, contiguous, in the dtype of ``fp8_data``: ``out`` or the new
        tensor.

    Raises:
        TypeError: ``fp8_data`` has a dtype of more than one byte, or ``out`` does not have
            its dtype.
        ValueError: a shape or device does not match, or ``pad_columnwise`` is set for a stack.
    """
    dtype, shape = fp8_data.dtype, fp8_data.shape
    if dtype.itemsize != 1:
        raise TypeError(f"byte_transpose: fp8_data must have a dtype of one byte, got {dtype}")
    if len(shape) not in (2, 3):
        raise ValueError(
            f"byte_transpose: fp8_data must have 2 or 3 dimensions, got shape {list(shape)}"
        )
    if pad_columnwise and len(shape) == 3:
        raise ValueError("byte_transpose: pad_columnwise must be False for a stack, got True")
    given = out is not None
    if out is None:
        length = columnwise_length(shape[-2], pad_columnwise)
        out = fp8_data.new_empty((*shape[:-2], shape[-1], length))
    elif out.dtype != dtype:
        raise TypeError(f"byte_transpose: out must have dtype {dtype}, got {out.dtype}")
    source = reinterpreted("byte_transpose", fp8_data, torch.uint8)
    target = reinterpreted("byte_transpose", out, torch.uint8)
    transpose = _transpose if len(shape) == 2 else _transpose_stack
    transpose(source.contiguous(), target)
    if given:
        note_written(out)
    return out


def reference(fp8_data: torch.Tensor) -> torch.Tensor:
    """Computes ``byte_transpose`` in plain PyTorch, as its specification."""
    return fp8_data.view(torch.uint8).transpose(-2, -1).contiguous().view(fp8_data.dtype)
