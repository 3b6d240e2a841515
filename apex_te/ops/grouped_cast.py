"""Casts to FP8 of groups of rows that are gathered or computed where they are cast.

Each gives bitwise what an op and then ``quantize_groups`` or ``block_quantize_groups`` of its
result give, without writing and reading that result: a permutation, a gated activation, or the
gradient of one. On the CPU, and for shapes and dtypes that the kernels do not take, those ops run
one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from .. import runtime
from ..runtime import scratch_sizes
from ..runtime.op_options import ACTIVATIONS, gated_activation_number
from . import grouped_quantize
from .binding import bind, check_dense, checked, note_written
from .fp8_output import check_fp8_dtype, contiguous_matrix
from .grouped_quantize import GroupedOutput, Groups

__all__ = [
    "Gated",
    "GatedGradient",
    "Gather",
    "block_quantize_source",
    "quantize_source",
]

_BLOCK = 128
_VECTOR, _ALIGNMENT = 8, 16  # elements of a vector, and bytes of one of 16-bit elements
_lib = runtime.ops("grouped_cast")
_swiglu = runtime.ops("swiglu")


class Gather(NamedTuple):
    """Rows x[row_of[r]] * factor[r], such as tokens, or gradients of tokens, in experts' order.

    Attributes:
        x: [tokens, cols] float32, float16 or bfloat16.
        row_of: int32 [rows], as ``moe_permute.tokens_of_rows`` returns it. -1 stands for a row of
            zeros. Another value that is not a row of x raises ValueError on the CPU; on a GPU that
            row is NaN, because the host does not wait. Values after the last group are not used.
        factor: float32 [rows], or None for ones.
    """

    x: torch.Tensor
    row_of: torch.Tensor
    factor: torch.Tensor | None = None


class Gated(NamedTuple):
    """Rows act(gate) * up * factor[r], as ``swiglu`` computes them.

    Attributes:
        x: [rows, 2F] float32, float16 or bfloat16, gates first.
        factor: float32 [rows], such as the experts' probabilities, or None for ones.
        activation: as in ``swiglu``.
    """

    x: torch.Tensor
    factor: torch.Tensor | None = None
    activation: str = "silu"


class GatedGradient(NamedTuple):
    """Rows of the gradient of ``Gated`` with respect to x, [rows, 2F], gates first.

    Attributes:
        grad: [rows, F] in the dtype of x, gradient of the gated rows.
        x: [rows, 2F], as in ``Gated``.
        factor: as in ``Gated``; ``grad`` times it is not rounded.
        activation: as in ``swiglu``.
    """

    grad: torch.Tensor
    x: torch.Tensor
    factor: torch.Tensor | None = None
    activation: str = "silu"


Source = Gather | Gated | GatedGradient


class _Arguments(NamedTuple):
    """A source as the kernels take it, after which the cast's arguments follow.

    ``partials`` is float32 [F / 128 rounded up, rows] or None; rows that are not read stay 0.
    """

    x: torch.Tensor
    grad: torch.Tensor | None
    row_of: torch.Tensor | None
    factor: torch.Tensor | None
    partials: torch.Tensor | None
    activation: int


@checked
def quantize_source(
    source: Source,
    groups: Groups,
    scale: torch.Tensor,
    fp8_dtype: torch.dtype,
    *,
    rowwise: bool = True,
    columnwise: bool = True,
    amax: torch.Tensor | None = None,
    scale_inv: torch.Tensor | None = None,
    due: torch.Tensor | None = None,
    factor_grad: torch.Tensor | None = None,
) -> GroupedOutput:
    """Quantizes the rows of a source with one scale for each group, as ``quantize_groups`` does.

    The values are rounded to the dtype of the source's x before their amax is taken and before
    they are scaled. With neither copy only ``amax`` is computed.

    Args:
        source: the rows, [rows, cols]; made contiguous where they are not.
        groups: places of the groups in these rows.
        scale: float32 [groups], of any stride.
        fp8_dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        rowwise: make the rowwise copy, [rows, cols]; rows after the last group have undefined
            values.
        columnwise: make the columnwise copy, [cols, groups.columns], placed as in
            ``quantize_groups``.
        amax: float32 [groups], of any stride, becomes max(amax, max |value| of the group); NaN
            counts as largest. None computes no amax.
        scale_inv: float32 [groups] to use instead of 1 / scale.
        due: int32 [groups]; groups with 0 are neither read nor written. None: all are quantized.
        factor_grad: float32 [rows], written; only for a ``GatedGradient`` and without ``due``. It
            becomes the gradient of its factor, the sum of grad * act(gate) * up over F in float32
            in a fixed order, and 0 in rows after the last group. None computes none.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape or device does not match, or ``activation`` is not supported.
    """
    name = "grouped_cast.quantize_source"
    if due is not None and factor_grad is not None:
        raise ValueError(f"{name}: factor_grad must be None with due")
    args, shape = _arguments(name, source, factor_grad)
    check_fp8_dtype(name, fp8_dtype)
    given = scale_inv is not None
    out = grouped_quantize.allocate(
        name, args.x, shape, groups, fp8_dtype, rowwise, columnwise, scale_inv
    )
    _cast(
        *args, groups.table, scale, out.scale_inv, out.rowwise, out.columnwise, out.row_scale_inv,
        amax, due, given,
    )  # fmt: skip
    note_written(amax)
    _add_up(args.partials, factor_grad)
    return out


@checked
def block_quantize_source(
    source: Source,
    groups: Groups,
    fp8_dtype: torch.dtype,
    *,
    rowwise: bool = True,
    columnwise: bool = True,
    pow2: bool = True,
    eps: float = 0.0,
    factor_grad: torch.Tensor | None = None,
) -> GroupedOutput:
    """Quantizes the rows of a source in 1x128 blocks, as ``block_quantize_groups`` does.

    The values are rounded to the dtype of the source's x before the amax of a block is taken.

    Args:
        source: as in ``quantize_source``. F of a ``GatedGradient`` must be a multiple of 128, so
            that no block has gradients of gates and ups.
        groups: as in ``quantize_source``.
        fp8_dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        rowwise: make the rowwise copy, [rows, cols], and its scales as ``block_quantize_groups``.
        columnwise: make the columnwise copy, [cols, groups.columns], likewise.
        pow2: round scales down to powers of two.
        eps: smallest amax.
        factor_grad: as in ``quantize_source``.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape or device does not match, ``activation`` is not supported, or neither
            copy is asked for.
    """
    name = "grouped_cast.block_quantize_source"
    args, shape = _arguments(name, source, factor_grad)
    if args.grad is not None and args.grad.shape[1] % _BLOCK:
        raise ValueError(
            f"{name}: grad must have a multiple of 128 columns, got {args.grad.shape[1]}"
        )
    out = grouped_quantize.allocate_blocks(
        name, args.x, shape, groups, fp8_dtype, rowwise, columnwise
    )
    _block_cast(
        *args, groups.table, out.rowwise, out.row_scale_inv, out.columnwise, out.scale_inv, eps,
        pow2,
    )  # fmt: skip
    _add_up(args.partials, factor_grad)
    return out


def _arguments(
    op: str, source: Source, factor_grad: torch.Tensor | None
) -> tuple[_Arguments, tuple[int, int]]:
    """Checks a source; returns the kernels' arguments, contiguous, and the rows' shape."""
    if not isinstance(source, (Gather, Gated, GatedGradient)):
        raise TypeError(
            f"{op}: source must be a Gather, Gated or GatedGradient, got {type(source).__name__}"
        )
    grad = row_of = None
    code = ACTIVATIONS["silu"]
    x = contiguous_matrix(op, source.x)
    rows, cols = x.shape
    if isinstance(source, Gather):
        row_of = source.row_of.contiguous()
        _check(op, "row_of", row_of, torch.int32, (row_of.numel(),))
        rows = row_of.shape[0]
    else:
        code = gated_activation_number(op, source.activation)
        if cols % 2:
            raise ValueError(f"{op}: x must have an even number of columns, got {cols}")
        if isinstance(source, GatedGradient):
            grad = source.grad.contiguous()
            _check(op, "grad", grad, x.dtype, (rows, cols // 2))
        else:
            cols //= 2
    factor = source.factor
    if factor is not None:
        factor = factor.contiguous()
        _check(op, "factor", factor, torch.float32, (rows,))
    partials = None
    if factor_grad is not None:
        if grad is None:
            raise ValueError(f"{op}: factor_grad must be None without a GatedGradient")
        check_dense(op, x=x, factor_grad=factor_grad)
        _check(op, "factor_grad", factor_grad, torch.float32, (rows,))
        lines = scratch_sizes.lines(grad.shape[1], _BLOCK)
        partials = x.new_zeros((lines, rows), dtype=torch.float32)
    return _Arguments(x, grad, row_of, factor, partials, code), (rows, cols)


def _check(
    op: str,
    name: str,
    t: torch.Tensor,
    dtype: torch.dtype,
    shape: tuple[int, ...],
) -> None:
    """Raises TypeError or ValueError unless a tensor has this dtype and shape."""
    if t.dtype is not dtype:
        expected, actual = (str(d).removeprefix("torch.") for d in (dtype, t.dtype))
        raise TypeError(f"{op}: {name} must have dtype {expected}, got {actual}")
    if t.shape != shape:
        raise ValueError(f"{op}: {name} must have shape {list(shape)}, got {list(t.shape)}")


def _add_up(partials: torch.Tensor | None, factor_grad: torch.Tensor | None) -> None:
    if partials is not None and factor_grad is not None:
        factor_grad.copy_(partials.sum(0))


def _run(name: str, cast_into: Callable[..., None]) -> Callable[..., None]:
    """Returns the body of a C function: the kernel, or the ops and then ``cast_into``."""

    def run(x, grad, row_of, factor, partials, activation, table, *cast):
        if _has_kernel(x, grad, row_of):
            function = getattr(_lib, name)
            function(x, grad, row_of, factor, partials, activation, table, *cast)
        else:
            rows = _composed(x, grad, row_of, factor, partials, activation, table)
            cast_into(rows, table, *cast)

    return run


_cast = bind("grouped_cast", "grouped_cast", _run("grouped_cast", grouped_quantize.quantize_into))
_block_cast = bind(
    "grouped_cast",
    "grouped_block_cast",
    _run("grouped_block_cast", grouped_quantize.block_quantize_into),
)


def _has_kernel(x: torch.Tensor, grad: torch.Tensor | None, row_of: torch.Tensor | None) -> bool:
    """True if csrc/grouped_cast takes a source: on a GPU, with vectors, gated rows in 16 bits."""
    halves = 1 if row_of is not None else 2
    return (
        x.is_cuda
        and x.shape[1] % (halves * _VECTOR) == 0
        and (row_of is not None or x.element_size() == 2)
        and all(t is None or t.data_ptr() % _ALIGNMENT == 0 for t in (x, grad))
    )


def _composed(x, grad, row_of, factor, partials, activation, table):
    """Returns a source's rows by the ops that stand for the kernels, and writes ``partials``."""
    if row_of is not None:
        return _gathered(x, row_of, factor, table)
    wide = x if factor is None else x.float()
    if grad is None:
        return _scaled(_gated(wide, activation), factor).to(x.dtype)
    if partials is not None:
        products = grad.float() * _gated(x.float(), activation)
        products = torch.nn.functional.pad(products, (0, -products.shape[1] % _BLOCK))
        used = torch.arange(len(x), device=x.device) < _total(table)
        partials.copy_(products.view(len(x), len(partials), _BLOCK).sum(2).t().where(used, 0))
    out = torch.empty_like(wide)
    grad = _scaled(grad, factor)
    _swiglu.swiglu_bwd(grad, wide, None, None, None, out, None, None, None, activation)
    return out.to(x.dtype)


def _total(table: torch.Tensor) -> torch.Tensor:
    """Returns the number of rows of all groups, on the device."""
    return table[table.numel() // 3 - 1]


def _gathered(x, row_of, factor, table):
    if not x.is_cuda:
        used = row_of[: int(_total(table))]
        bad = used[(used < -1) | (used >= len(x))]
        if bad.numel():
            raise ValueError(
                f"grouped_cast: row_of must hold rows of x or -1, got {int(bad[0])} for {len(x)} "
                "rows"
            )
    inside = (row_of >= 0) & (row_of < len(x))
    if not len(x):
        x = x.new_zeros(1, x.shape[1])
    rows = _scaled(x[torch.where(inside, row_of, 0)], factor).to(x.dtype)
    empty = torch.where(row_of == -1, 0.0, float("nan")).to(x.dtype)
    return torch.where(inside[:, None], rows, empty[:, None])


def _scaled(x: torch.Tensor, factor: torch.Tensor | None) -> torch.Tensor:
    """Returns x, or its rows times their factors in float32."""
    return x if factor is None else x.float() * factor[:, None]


def _gated(x: torch.Tensor, activation: int) -> torch.Tensor:
    out = x.new_empty((len(x), x.shape[1] // 2))
    _swiglu.swiglu_fwd(x, None, None, None, out, activation)
    return out
