"""Outputs of the ops that write FP8, and the checks of their options."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..runtime.former_names import former_fields
from ..runtime.tracing import jit_tracing, transforms_active

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
# What AMD's gfx94x multiply; of the ops that write FP8, those that do nothing else know them.
FNUZ_DTYPES = (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)

# Partial amaxes that a kernel leaves at most (csrc/common/numerics/quantize.h).
MAX_AMAXES = 1024


@former_fields(transposed="columnwise")
class FP8Output(NamedTuple):
    """FP8 data of a matrix, with None for a copy that was not asked for."""

    rowwise: torch.Tensor | None  # [rows, cols]
    columnwise: torch.Tensor | None  # [cols, rows]
    scale_inv: torch.Tensor  # one float32 element


def check_fp8_dtype(op: str, fp8_dtype: torch.dtype, fnuz: bool = False) -> None:
    """Raises TypeError unless ``fp8_dtype`` is float8_e4m3fn or float8_e5m2, or fnuz if allowed."""
    if fp8_dtype in FP8_DTYPES or (fnuz and fp8_dtype in FNUZ_DTYPES):
        return
    forms = " or their fnuz forms" if fnuz else ""
    raise TypeError(f"{op}: fp8_dtype must be float8_e4m3fn or float8_e5m2{forms}, got {fp8_dtype}")


def check_out_dtype(
    op: str,
    fp8_dtype: torch.dtype,
    rowwise: torch.Tensor | None,
    columnwise: torch.Tensor | None,
) -> None:
    """Raises TypeError unless the outputs that a caller gives have ``fp8_dtype``."""
    for name, out in (("rowwise", rowwise), ("columnwise", columnwise)):
        if out is not None and out.dtype is not fp8_dtype:
            expected, actual = (str(d).removeprefix("torch.") for d in (fp8_dtype, out.dtype))
            raise TypeError(f"{op}: {name} must have dtype {expected}, got {actual}")


def reinterpreted(op: str, t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns the bytes of ``t`` as another dtype of one byte.

    Raises:
        NotImplementedError: TorchScript, which torch.jit.trace records, has no such view, nor have
            the batches of torch.func.vmap in torch 2.11.
    """
    if t.dtype is dtype:
        return t
    if not torch.compiler.is_compiling() and jit_tracing():
        raise NotImplementedError(f"{op}: torch.jit.trace does not support {t.dtype} here")
    try:
        return t.view(dtype)
    except RuntimeError as error:
        if not transforms_active():
            raise
        raise NotImplementedError(
            f"{op}: torch.func.vmap does not support {t.dtype} here with torch {torch.__version__}"
        ) from error


def allocate(
    op: str,
    like: torch.Tensor,
    rows: int,
    cols: int,
    fp8_dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
) -> FP8Output:
    """Returns uninitialised outputs on ``like``'s device.

    Raises:
        TypeError: ``fp8_dtype`` is neither float8_e4m3fn nor float8_e5m2.
    """
    check_fp8_dtype(op, fp8_dtype)
    return FP8Output(
        like.new_empty((rows, cols), dtype=fp8_dtype) if rowwise else None,
        like.new_empty((cols, rows), dtype=fp8_dtype) if columnwise else None,
        like.new_empty(1, dtype=torch.float32),
    )


def contiguous_matrix(op: str, x: torch.Tensor) -> torch.Tensor:
    """Returns ``x``, contiguous.

    Raises:
        ValueError: ``x`` has not two dimensions.
    """
    if x.dim() != 2:
        raise ValueError(f"{op}: x must have 2 dimensions, got shape {list(x.shape)}")
    return x.contiguous()


def float_scalars(like: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Returns uninitialised float32 tensors of one element on ``like``'s device."""
    return [like.new_empty(1, dtype=torch.float32) for _ in range(count)]


def outputs(
    op: str,
    x: torch.Tensor,
    dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    out_rowwise: torch.Tensor | None,
    out_columnwise: torch.Tensor | None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Returns the given outputs, or new ones for the copies that were asked for.

    Raises:
        ValueError: neither copy was asked for or given.
    """
    if rowwise and out_rowwise is None:
        out_rowwise = torch.empty_like(x, dtype=dtype)
    if columnwise and out_columnwise is None:
        out_columnwise = x.new_empty(x.shape[::-1], dtype=dtype)
    if out_rowwise is None and out_columnwise is None:
        raise ValueError(f"{op}: rowwise or columnwise must be True, got False for both")
    return out_rowwise, out_columnwise
