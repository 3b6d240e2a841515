"""Casts groups of rows to FP8 that are gathered or computed in the same kernel.

Sources are a permutation, a gated activation, or the gradient of one. Results are bitwise identical
to the separate op followed by ``quantize_groups`` or ``block_quantize_groups``, without writing the
intermediate result to memory. On the CPU, and for shapes and dtypes that the kernels do not
support, the separate ops run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from .. import runtime
from ..runtime import scratch_sizes
from ..runtime.op_options import SWISH, ClampedSwiglu, gate_arguments, scales_number
from . import grouped_quantize
from ._gated_matrices import in_halves, interleaved
from .binding import bind, check_dense, checked, note_written
from .fp8_output import check_fp8_dtype, contiguous_matrix
from .grouped_quantize import ALIGN, GroupedOutput, Groups

__all__ = ["Gated", "GatedGradient", "Gather", "block_quantize_source", "quantize_source"]

_BLOCK = 128
_VECTOR, _ALIGNMENT = 8, 16  # elements of a vector, and bytes of one of 16-bit elements
_lib = runtime.ops("grouped_cast")
_swiglu = runtime.ops("swiglu")


class Gather(NamedTuple):
    """Source of rows x[row_of[r]] * factor[r], such as tokens sorted by expert.

    Attributes:
        x: [tokens, cols] float32, float16 or bfloat16.
        row_of: int32 [rows], from ``moe_permute.tokens_of_rows``. -1 is a row of zeros. Any other
            value outside x raises ValueError on the CPU; on a GPU it makes the row NaN, because the
            host does not wait. Values after the last group are ignored.
        factor: float32 [rows], or None for ones.
    """

    x: torch.Tensor
    row_of: torch.Tensor
    factor: torch.Tensor | None = None


class Gated(NamedTuple):
    """Source of rows act(gate) * up * factor[r], as ``swiglu`` computes them.

    Attributes:
        x: [rows, 2F] float32, float16 or bfloat16, gates first.
        factor: float32 [rows], such as the experts' probabilities, or None for ones.
        activation: a name that ``swiglu`` accepts, such as "silu", or a ``ClampedSwiglu``.
        bias: [groups, 2F] in the dtype of x, added to the rows of each group and rounded to that
            dtype. None adds nothing.
        interleaved: gates and ups are the even and odd columns of x and bias, not their halves. On
            a GPU, one kernel supports this for ``ClampedSwiglu`` with a bias; otherwise separate
            ops run.
    """

    x: torch.Tensor
    factor: torch.Tensor | None = None
    activation: str | ClampedSwiglu = "silu"
    bias: torch.Tensor | None = None
    interleaved: bool = False


class GatedGradient(NamedTuple):
    """Source of rows of the gradient of ``Gated`` with respect to x, in the layout of x.

    Attributes:
        grad: [rows, F] in the dtype of x, gradient of the gated rows.
        x: [rows, 2F] float32, float16 or bfloat16, as in ``Gated``.
        factor: float32 [rows] or None, as in ``Gated``; its product with ``grad`` is not rounded.
        activation, bias, interleaved: as in ``Gated``.
    """

    grad: torch.Tensor
    x: torch.Tensor
    factor: torch.Tensor | None = None
    activation: str | ClampedSwiglu = "silu"
    bias: torch.Tensor | None = None
    interleaved: bool = False


Source = Gather | Gated | GatedGradient


class _Arguments(NamedTuple):
    """A source as the kernels take it, after which the cast's arguments follow.

    ``partials`` is float32 [F / 128 rounded up, rows] or None; rows that are not read stay 0.
    ``lines`` is float32 [``Groups.columns`` / 16, 2F] or None, sums of the rows of 16 columns.
    """

    x: torch.Tensor
    grad: torch.Tensor | None
    row_of: torch.Tensor | None
    factor: torch.Tensor | None
    bias: torch.Tensor | None
    partials: torch.Tensor | None
    lines: torch.Tensor | None
    activation: int
    limit: float
    alpha: float
    offset: float
    interleaved: bool


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
    bias_grad: torch.Tensor | None = None,
) -> GroupedOutput:
    """Quantizes rows that are gathered or computed, with one scale for each group.

    The rows are rounded to the dtype of the source's x before their amax is taken and before they
    are scaled. With ``rowwise`` and ``columnwise`` False, only ``amax`` is computed.

    Args:
        source: a ``Gather``, ``Gated`` or ``GatedGradient``, which describes rows [rows, cols].
        groups: row ranges of the groups.
        scale: float32 [groups], of any stride.
        fp8_dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        rowwise: make the rowwise copy, [rows, cols]; rows after the last group have undefined
            values.
        columnwise: make the columnwise copy, [cols, groups.columns], in which each group begins at
            a multiple of 16 columns; columns beyond a group's rows are zeros.
        amax: float32 [groups], of any stride, becomes max(amax, max |value| of the group); NaN
            counts as largest. None computes no amax.
        scale_inv: float32 [groups] to use instead of 1 / scale.
        due: int32 [groups]; groups with 0 are neither read nor written. None quantizes all groups.
        factor_grad: float32 [rows] to receive the gradient of the factor; only for a
            ``GatedGradient``, without ``due``. It is the sum of grad * act(gate) * up over F, in
            float32 in a fixed order, and 0 after the last group. None does not compute it.
        bias_grad: [groups, 2F] in the dtype of x to receive the gradient of the bias; only for a
            ``GatedGradient`` with a bias, without ``due``. It sums each group's rounded rows in
            float32 in a fixed order. None does not compute it.

    Returns:
        The requested copies, with scale_inv [groups] and row_scale_inv [rows].

    Raises:
        TypeError: ``source`` is of another type, or an argument has a dtype that is not listed.
        ValueError: a shape or device does not match, or the source's ``activation`` is not
            supported.
    """
    name = "grouped_cast.quantize_source"
    for key, grad in (("factor_grad", factor_grad), ("bias_grad", bias_grad)):
        if due is not None and grad is not None:
            raise ValueError(f"{name}: {key} must be None with due")
    args, shape = _arguments(name, source, groups, factor_grad, bias_grad)
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
    _add_up(args, groups, factor_grad, bias_grad)
    return out


@checked
def block_quantize_source(
    source: Source,
    groups: Groups,
    fp8_dtype: torch.dtype,
    *,
    columnwise_block_rows: int = 1,
    rowwise: bool = True,
    columnwise: bool = True,
    scales: str | None = None,
    pow2: bool | None = None,
    eps: float = 0.0,
    factor_grad: torch.Tensor | None = None,
    bias_grad: torch.Tensor | None = None,
) -> GroupedOutput:
    """Quantizes rows that are gathered or computed, with one scale for each block of 1x128.

    The rows are rounded to the dtype of the source's x before the amax of a block is taken.

    Args:
        source: a ``Gather``, ``Gated`` or ``GatedGradient``, which describes rows [rows, cols]. F
            of a ``GatedGradient`` must be a multiple of 128, so that gradients of gates and ups do
            not share blocks.
        groups: row ranges of the groups.
        fp8_dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        columnwise_block_rows: 1 or 128, rows of a block of the columnwise copy.
        rowwise: make the rowwise copy, [rows, cols]; rows after the last group have undefined
            values.
        columnwise: make the columnwise copy, [cols, groups.columns], in which each group begins at
            a multiple of 16 columns.
        scales: "pow2" rounds scales down to powers of two, "fp32" does not, "server" divides by
            amax / fp8_max, as vLLM's casts do. None is "pow2".
        pow2: former form of ``scales``: True is "pow2", False "fp32".
        eps: smallest amax of a block.
        factor_grad, bias_grad: as in ``quantize_source``.

    Returns:
        The requested copies with their scale_inv.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape or device does not match, ``activation`` is not supported, or neither
            copy is asked for.
    """
    name = "grouped_cast.block_quantize_source"
    number = scales_number(name, scales, pow2)
    grouped_quantize.check_block_rows(name, columnwise_block_rows)
    args, shape = _arguments(name, source, groups, factor_grad, bias_grad)
    if args.grad is not None and args.grad.shape[1] % _BLOCK:
        raise ValueError(
            f"{name}: grad must have a multiple of 128 columns, got {args.grad.shape[1]}"
        )
    out = grouped_quantize.allocate_blocks(
        name, args.x, shape, groups, fp8_dtype, rowwise, columnwise
    )
    _block_cast(
        *args, groups.table, out.rowwise, out.row_scale_inv, out.columnwise, out.scale_inv,
        columnwise_block_rows, eps, number,
    )  # fmt: skip
    _add_up(args, groups, factor_grad, bias_grad)
    return out


def _arguments(
    op: str,
    source: Source,
    groups: Groups,
    factor_grad: torch.Tensor | None,
    bias_grad: torch.Tensor | None,
) -> tuple[_Arguments, tuple[int, int]]:
    """Checks a source; returns the kernels' arguments, contiguous, and the rows' shape."""
    if not isinstance(source, (Gather, Gated, GatedGradient)):
        raise TypeError(
            f"{op}: source must be a Gather, Gated or GatedGradient, got {type(source).__name__}"
        )
    grad = row_of = bias = partials = lines = None
    alternates = False
    gate = gate_arguments(op, "silu")
    x = contiguous_matrix(op, source.x)
    rows, cols = x.shape
    if isinstance(source, Gather):
        row_of = source.row_of.contiguous()
        _check(op, "row_of", row_of, torch.int32, (row_of.numel(),))
        rows = row_of.shape[0]
    else:
        gate, alternates = gate_arguments(op, source.activation), source.interleaved
        if cols % 2:
            raise ValueError(f"{op}: x must have an even number of columns, got {cols}")
        if source.bias is not None:
            bias = source.bias.contiguous()
            _check(op, "bias", bias, x.dtype, (groups.num_groups, cols))
        if isinstance(source, GatedGradient):
            grad = source.grad.contiguous()
            _check(op, "grad", grad, x.dtype, (rows, cols // 2))
        else:
            cols //= 2
    factor = source.factor
    if factor is not None:
        factor = factor.contiguous()
        _check(op, "factor", factor, torch.float32, (rows,))
    if factor_grad is not None:
        if grad is None:
            raise ValueError(f"{op}: factor_grad must be None without a GatedGradient")
        check_dense(op, x=x, factor_grad=factor_grad)
        _check(op, "factor_grad", factor_grad, torch.float32, (rows,))
        partials = x.new_zeros(
            (scratch_sizes.lines(grad.shape[1], _BLOCK), rows), dtype=torch.float32
        )
    if bias_grad is not None:
        if grad is None or bias is None:
            raise ValueError(f"{op}: bias_grad must be None without a GatedGradient with a bias")
        check_dense(op, x=x, bias_grad=bias_grad)
        _check(op, "bias_grad", bias_grad, x.dtype, (groups.num_groups, cols))
        lines = x.new_empty((groups.columns // ALIGN, cols), dtype=torch.float32)
    args = _Arguments(x, grad, row_of, factor, bias, partials, lines, *gate, alternates)
    return args, (rows, cols)


def _check(op: str, name: str, t: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Raises TypeError or ValueError unless a tensor has this dtype and shape."""
    if t.dtype is not dtype:
        expected, actual = (str(d).removeprefix("torch.") for d in (dtype, t.dtype))
        raise TypeError(f"{op}: {name} must have dtype {expected}, got {actual}")
    if t.shape != shape:
        raise ValueError(f"{op}: {name} must have shape {list(shape)}, got {list(t.shape)}")


def _add_up(
    args: _Arguments,
    groups: Groups,
    factor_grad: torch.Tensor | None,
    bias_grad: torch.Tensor | None,
) -> None:
    """Adds the kernels' partial sums up to the gradients of factor and bias."""
    if args.partials is not None and factor_grad is not None:
        factor_grad.copy_(args.partials.sum(0))
    if args.lines is not None and bias_grad is not None:
        ends = groups.column_ends // ALIGN
        counts = torch.diff(ends, prepend=ends.new_zeros(1))
        each = grouped_quantize.groups_of(counts, len(args.lines))
        sums = grouped_quantize.column_sums(args.lines, each)
        grouped_quantize.zero_unused(sums, groups)  # of which no line was written
        bias_grad.copy_(sums)


def _run(name: str, cast_into: Callable[..., None]) -> Callable[..., None]:
    """Returns the body of a C function: the kernel, or the ops and then ``cast_into``."""

    def run(*args):
        source, (table, *cast) = _Arguments(*args[:_SOURCE]), args[_SOURCE:]
        if _has_kernel(source):
            getattr(_lib, name)(*args)
        else:
            cast_into(_composed(source, table), table, *cast)

    return run


_SOURCE = len(_Arguments._fields)
_cast = bind("grouped_cast", "grouped_cast", _run("grouped_cast", grouped_quantize.quantize_into))
_block_cast = bind(
    "grouped_cast",
    "grouped_block_cast",
    _run("grouped_block_cast", grouped_quantize.block_quantize_into),
)


def _has_kernel(source: _Arguments) -> bool:
    """True if csrc/grouped_cast takes a source: on a GPU, with vectors, gated rows in 16 bits."""
    x, row_of = source.x, source.row_of
    halves = 1 if row_of is not None else 2
    return (
        x.is_cuda
        and x.shape[1] % (halves * _VECTOR) == 0
        and (row_of is not None or x.element_size() == 2)
        and (not source.interleaved or (source.activation == SWISH and source.bias is not None))
        and all(t is None or t.data_ptr() % _ALIGNMENT == 0 for t in (x, source.grad, source.bias))
    )


def _composed(source: _Arguments, table: torch.Tensor) -> torch.Tensor:
    """Returns a source's rows by the ops that stand for the kernels, and writes the sums."""
    x, grad, factor = source.x, source.grad, source.factor
    gate = source.activation, source.limit, source.alpha, source.offset
    if source.row_of is not None:
        return _gathered(x, source.row_of, factor, table)
    groups = Groups(table, len(x), table.numel() // 3)
    if source.bias is not None:
        x = x.clone()
        grouped_quantize.finish_rows(x, groups, source.bias)
    if source.interleaved:
        x = in_halves(x)
    wide = x if factor is None else x.float()
    if grad is None:
        return _scaled(_gated(wide, gate), factor).to(x.dtype)
    if source.partials is not None:
        products = grad.float() * _gated(x.float(), gate)
        products = torch.nn.functional.pad(products, (0, -products.shape[1] % _BLOCK))
        used = torch.arange(len(x), device=x.device) < _total(table)
        sums = products.view(len(x), len(source.partials), _BLOCK).sum(2).t()
        source.partials.copy_(sums.where(used, 0))
    wide_out = torch.empty_like(wide)
    grad = _scaled(grad, factor)
    _swiglu.swiglu_bwd(grad, wide, None, None, None, wide_out, None, None, None, *gate)
    out = wide_out.to(x.dtype)
    if source.interleaved:
        out = interleaved(out)
    if source.lines is not None:
        # All of a group in its first line.
        ends = groups.column_ends // ALIGN
        first = torch.cat((ends.new_zeros(1), ends[:-1])).long().clamp(0, len(source.lines) - 1)
        source.lines.zero_()[first] = grouped_quantize.column_sums(out.float(), groups)
    return out


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


def _gated(x: torch.Tensor, gate: tuple) -> torch.Tensor:
    out = x.new_empty((len(x), x.shape[1] // 2))
    _swiglu.swiglu_fwd(x, None, None, None, out, *gate)
    return out
