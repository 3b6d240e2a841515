"""Result type, allocation and checks that the ops that write FP8 share."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.compiler import is_dynamo_compiling

from ..runtime.named_arguments import former_fields
from ..runtime.scratch_sizes import MAX_AMAXES as MAX_AMAXES
from ..runtime.tracing import jit_tracing, transforms_active

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
# Formats that AMD's gfx94x multiply; ops that only cast know them, fused casts do not.
FNUZ_DTYPES = (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


# GEMMs read FP8 data in units of 16 bytes along K (csrc/common/numerics/columnwise.h).
COLUMNWISE_MULTIPLE = 16


@former_fields(transposed="columnwise")
class FP8Output(NamedTuple):
    """FP8 data of a matrix [rows, cols]; None for a copy that was not requested.

    Attributes:
        rowwise: FP8 [rows, cols].
        columnwise: FP8 [cols, rows], the transpose; [cols, rows rounded up to 16] if the op was
            called with ``pad_columnwise``.
        scale_inv: one float32 element, 1 / scale.
    """

    rowwise: torch.Tensor | None
    columnwise: torch.Tensor | None
    scale_inv: torch.Tensor


def check_fp8_dtype(op: str, fp8_dtype: torch.dtype, fnuz: bool = False) -> None:
    """Raises TypeError unless ``fp8_dtype`` is e4m3fn or e5m2, or with ``fnuz`` a fnuz form."""
    if fp8_dtype in FP8_DTYPES or (fnuz and fp8_dtype in FNUZ_DTYPES):
        return
    forms = " or their fnuz forms" if fnuz else ""
    raise TypeError(f"{op}: fp8_dtype must be float8_e4m3fn or float8_e5m2{forms}, got {fp8_dtype}")


def check_out_dtype(
    op: str, fp8_dtype: torch.dtype, rowwise: torch.Tensor | None, columnwise: torch.Tensor | None
) -> None:
    """Raises TypeError unless each output has ``fp8_dtype`` or is None.

    ``op`` is the op's name, for the error.
    """
    for name, out in (("rowwise", rowwise), ("columnwise", columnwise)):
        if out is not None and out.dtype is not fp8_dtype:
            expected, actual = (str(d).removeprefix("torch.") for d in (fp8_dtype, out.dtype))
            raise TypeError(f"{op}: {name} must have dtype {expected}, got {actual}")


def check_any_output(op: str, rowwise: bool, columnwise: bool, amax: torch.Tensor | None) -> None:
    """Raises ValueError if an op's caller asks for neither a copy nor the amax (``amax`` is None).

    ``op`` is the op's name, for the error.
    """
    if not (rowwise or columnwise or amax is not None):
        raise ValueError(f"{op}: rowwise, columnwise or amax must be asked for, got none")


def reinterpreted(op: str, t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns a view of ``t`` in another dtype of one byte.

    Raises NotImplementedError where the view is not supported: in ``torch.jit.trace``, or under
    ``torch.func.vmap`` in a torch that cannot batch it, such as 2.11.
    """
    if t.dtype is dtype:
        return t
    if not is_dynamo_compiling() and jit_tracing():
        raise NotImplementedError(f"{op}: torch.jit.trace does not support {t.dtype} here")
    try:
        return t.view(dtype)
    except RuntimeError as error:
        if not transforms_active():
            raise
        raise NotImplementedError(
            f"{op}: torch.func.vmap does not support {t.dtype} here with torch {torch.__version__}"
        ) from error


def columnwise_length(rows: int, pad_columnwise: bool) -> int:
    """Returns the number of columns of the columnwise copy of a matrix with ``rows`` rows.

    That is ``rows``, rounded up to a multiple of 16 with ``pad_columnwise``. Ops fill the added
    columns with zeros, so that wgrad is a GEMM of two padded copies for any number of rows.
    """
    return rows + -rows % COLUMNWISE_MULTIPLE if pad_columnwise else rows


def allocate(
    op: str,
    like: torch.Tensor,
    rows: int,
    cols: int,
    fp8_dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    pad_columnwise: bool = False,
) -> FP8Output:
    """Returns uninitialised FP8 copies of a matrix [rows, cols] on ``like``'s device, and
    scale_inv.
    """
    check_fp8_dtype(op, fp8_dtype)
    return FP8Output(
        like.new_empty((rows, cols), dtype=fp8_dtype) if rowwise else None,
        like.new_empty((cols, columnwise_length(rows, pad_columnwise)), dtype=fp8_dtype)
        if columnwise
        else None,
        like.new_empty(1, dtype=torch.float32),
    )


def contiguous_matrix(op: str, x: torch.Tensor) -> torch.Tensor:
    """Returns the matrix ``x``, contiguous; ValueError unless it has two dimensions."""
    if x.dim() != 2:
        raise ValueError(f"{op}: x must have 2 dimensions, got shape {list(x.shape)}")
    return x.contiguous()


def float_scalars(like: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Returns ``count`` uninitialised float32 tensors of one element on ``like``'s device."""
    return [like.new_empty(1, dtype=torch.float32) for _ in range(count)]


def outputs(
    op: str,
    x: torch.Tensor,
    dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    out_rowwise: torch.Tensor | None,
    out_columnwise: torch.Tensor | None,
    pad_columnwise: bool = False,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Returns the tensors for an op's copies of x: given ones, or new ones if asked for.

    None stands for a copy that is neither asked for nor given; ValueError if there is no copy.
    """
    if rowwise and out_rowwise is None:
        out_rowwise = torch.empty_like(x, dtype=dtype)
    if columnwise and out_columnwise is None:
        length = columnwise_length(x.shape[0], pad_columnwise)
        out_columnwise = x.new_empty((x.shape[1], length), dtype=dtype)
    if out_rowwise is None and out_columnwise is None:
        raise ValueError(f"{op}: rowwise or columnwise must be True, got False for both")
    return out_rowwise, out_columnwise
