"""GEMM backends: which op multiplies operands that one scheme has quantized."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ...ops import emulated_gemm, fp8_gemm, grouped_gemm
from ...ops.dense_gemm import has_dense_fp8
from ...runtime.device import has_fp8_products
from ..tensor import QuantizedTensor

if TYPE_CHECKING:
    from ...ops.grouped_quantize import Groups

FPROP, DGRAD, WGRAD = range(3)
_warned: set[str] = set()


class GemmBackend:
    """Multiplies operands quantized by one scheme; a subclass defines ``multiply``.

    Args:
        split: three bools, for fprop, dgrad and wgrad: True keeps partial sums in fp32. Ignored by
            schemes without this choice.
        device: the operands' device.

    Attributes:
        row_multiple: fprop and dgrad round the number of rows that they compute up to a multiple of
            this. A new output gets room for the added rows; an output passed as ``out`` costs a
            copy.
        adds: True if ``multiply`` takes the option ``c``, a tensor that it adds before rounding.
        fuses_swiglu: True if the kernels of ``ops.dense_gemm_swiglu`` and ``ops.dense_gemm_gelu``
            can compute fprop and dgrad of these operands, with equal results.
    """

    __slots__ = ("adds", "fuses_swiglu", "split")

    row_multiple: ClassVar[int] = 1

    def __init__(self, split: tuple[bool, bool, bool], device: torch.device) -> None:
        self.split = split
        self.adds = self.fuses_swiglu = False

    def multiply(
        self,
        product: int,
        a: Any,
        b: Any,
        a_scale_inv: Any,
        b_scale_inv: Any,
        **options: Any,
    ) -> torch.Tensor:
        """Returns the GEMM ``a @ b.T``, ``[M, N]``.

        Args:
            product: ``FPROP``, ``DGRAD`` or ``WGRAD``, which chooses the accumulator from
                ``split``.
            a: FP8 data ``[M, K]``.
            b: FP8 data ``[N, K]``.
            a_scale_inv, b_scale_inv: ``1 / scale`` of the operands, in the scheme's shape.
            options: ``out``, ``out_dtype``, ``bias`` and ``accumulate``, as for ``fp8_gemm``, and
                ``c`` if ``adds`` is True.

        Raises:
            NotImplementedError: a subclass does not define it.
        """
        raise NotImplementedError

    def with_independent_rows(self) -> GemmBackend | None:
        """Returns a backend whose fprop gives a row equal bits whatever the other rows are.

        None, the default, is for schemes whose scales depend on other rows or earlier batches.
        """
        return None

    def fprop(
        self,
        x: QuantizedTensor,
        weight: QuantizedTensor,
        out_dtype: torch.dtype,
        bias: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        c: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns ``x [rows, in] @ weight [out, in].T + bias + c``, from their rowwise copies.

        Args:
            out_dtype: dtype of the result.
            bias: ``[out]`` or None.
            out: tensor ``[rows, out]`` to write to, or None for a new one.
            c: tensor ``[rows, out]`` of ``out_dtype`` to add, or None; requires ``adds``.
        """
        options = {} if c is None else {"c": c}  # which not every scheme takes
        return self.multiply(
            FPROP, x.rowwise, weight.rowwise, x.rowwise_scale_inv, weight.rowwise_scale_inv,
            out=out, out_dtype=out_dtype, bias=bias, **options,
        )  # fmt: skip

    def dgrad(
        self,
        dy: QuantizedTensor,
        weight: QuantizedTensor,
        out_dtype: torch.dtype,
        out: torch.Tensor | None = None,
        c: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns ``dy [rows, out] @ weight [out, in] + c``, from the weight's columnwise copy.

        Args:
            out_dtype: dtype of the result.
            out: tensor ``[rows, in]`` to write to, or None for a new one.
            c: tensor ``[rows, in]`` of ``out_dtype`` to add, or None; requires ``adds``.
        """
        options = {} if c is None else {"c": c}
        return self.multiply(
            DGRAD, dy.rowwise, weight.columnwise, dy.rowwise_scale_inv, weight.columnwise_scale_inv,
            out=out, out_dtype=out_dtype, **options,
        )  # fmt: skip

    def wgrad(
        self,
        dy: QuantizedTensor,
        x: QuantizedTensor,
        out_dtype: torch.dtype,
        out: torch.Tensor | None = None,
        accumulate: bool = False,
    ) -> torch.Tensor:
        """Returns ``dy [rows, out].T @ x [rows, in]``, from their columnwise copies.

        Args:
            out_dtype: dtype of the result.
            out: tensor ``[out, in]`` to write to, or None for a new one.
            accumulate: add to ``out`` instead of overwriting it.
        """
        return self.multiply(
            WGRAD, dy.columnwise, x.columnwise, dy.columnwise_scale_inv, x.columnwise_scale_inv,
            out=out, out_dtype=out_dtype, accumulate=accumulate,
        )  # fmt: skip

    def bound(
        self,
        product: int,
        weight: QuantizedTensor,
        out_dtype: torch.dtype,
        bias: torch.Tensor | None = None,
    ) -> Callable[[Any, Any, torch.Tensor], torch.Tensor]:
        """Returns a function that computes fprop or dgrad with one weight for some rows at a time.

        The function ``f(rows, scale_inv, out)`` takes rowwise FP8 data, their ``scale_inv``, and
        the tensor to write to, which it returns. Call it only before the caller returns.

        Args:
            product: ``FPROP`` or ``DGRAD``.
            weight: ``[out, in]``; FPROP reads its rowwise copy, DGRAD the columnwise one.
            out_dtype: dtype of the results.
            bias: ``[out]`` or None; only for FPROP.
        """
        if product == FPROP:
            return lambda rows, scale_inv, out: self.multiply(
                FPROP, rows, weight.rowwise, scale_inv, weight.rowwise_scale_inv, out=out,
                out_dtype=out_dtype, bias=bias,
            )  # fmt: skip
        return lambda rows, scale_inv, out: self.multiply(
            DGRAD, rows, weight.columnwise, scale_inv, weight.columnwise_scale_inv, out=out,
            out_dtype=out_dtype,
        )  # fmt: skip

    def multiply_groups(
        self,
        product: int,
        a: Any,
        b: Any,
        a_scale_inv: Any,
        b_scale_inv: Any,
        groups: Groups,
    ) -> torch.Tensor:
        """Returns ``b[g] @ a[r]`` for each row ``r`` and its group ``g``: bf16 ``[rows, N]``.

        Args:
            product: ``FPROP`` or ``DGRAD``, which chooses the accumulator from ``split``.
            a: FP8 data ``[rows, K]``.
            b: FP8 data ``[groups, N, K]``.
            a_scale_inv: fp32 ``[rows]``.
            b_scale_inv: fp32 ``[groups]``.
            groups: which rows belong to which group, on the device.

        Raises:
            NotImplementedError: the scheme does not support grouped GEMMs.
        """
        raise NotImplementedError

    def contract_groups(
        self,
        a: Any,
        b: Any,
        a_scale_inv: Any,
        b_scale_inv: Any,
        groups: Groups,
        wide: bool = False,
        out: torch.Tensor | None = None,
        accumulate: bool = False,
        *,
        input_first: bool = False,
    ) -> torch.Tensor:
        """Returns the wgrad GEMM of each group, ``[groups, M, N]``.

        Args:
            a: FP8 data ``[M, K]``, with the columns sorted by group.
            b: FP8 data ``[N, K]``, with the columns in the order of ``a``.
            a_scale_inv, b_scale_inv: fp32 ``[groups]``.
            groups: which columns belong to which group, on the device.
            wide: return fp32; False returns bf16.
            out: contiguous ``[groups, M, N]`` to write, or to add to with ``accumulate``.
            input_first: ``a`` is the layer's input and ``b`` the output's gradient, not vice versa.
        """
        raise NotImplementedError


class IndependentRows(GemmBackend):
    """Mixin before a backend: its fprop gives a row equal bits whatever the other rows are."""

    __slots__ = ()

    row_multiple = 1
    rows_product: ClassVar[Callable[..., torch.Tensor]]

    def __init__(self, split: tuple[bool, bool, bool], device: torch.device, *options: Any) -> None:
        super().__init__(split, device, *options)
        self.adds = False

    def multiply(self, product, a, b, a_scale_inv, b_scale_inv, **options):
        multiply = functools.partial(super().multiply, product)
        if product != FPROP:
            return multiply(a, b, a_scale_inv, b_scale_inv, **options)
        out = options.pop("out", None)
        made = type(self).rows_product(multiply, a, b, a_scale_inv, b_scale_inv, **options)
        return made if out is None else out.copy_(made)


def warn_emulated(what: str, needed: str) -> None:
    """Warns, once for each ``what``, that GEMMs are emulated."""
    if what not in _warned:
        _warned.add(what)
        warnings.warn(
            f"apex_te: {what} need {needed}; operands are decoded and multiplied in high "
            "precision: the numbers are those of the recipe, the speed is not",
            stacklevel=2,
        )


# torch.compile calls it while it traces: a graph cannot warn, nor remember that it did.
warn_emulated._dynamo_marked_constant = True  # type: ignore[attr-defined]


class FP8Gemm(GemmBackend):
    """Multiplies operands with one scale each by cuBLASLt's FP8 GEMMs, or emulates these.

    It warns once if the device has no FP8 matrix units, and emulates. Arguments and attributes are
    those of ``GemmBackend``.

    Attributes:
        native: True if the device has FP8 matrix units.
    """

    __slots__ = ("native",)

    def __init__(self, split: tuple[bool, bool, bool], device: torch.device) -> None:
        super().__init__(split, device)
        self.native = has_fp8_products(device)
        # A subclass's own GEMM may not know the option.
        self.adds = self.native and type(self).multiply is FP8Gemm.multiply
        sums = split[FPROP], split[DGRAD]  # the kernels have no others
        self.fuses_swiglu = self.adds and has_dense_fp8(device) and sums == (False, True)
        if not self.native:
            warn_emulated("FP8 matrix products", "sm_89 or later, or gfx94x or later")

    def multiply(self, product, a, b, a_scale_inv, b_scale_inv, **options):
        if not self.native:
            return emulated_gemm.emulated_fp8_gemm(a, b, a_scale_inv, b_scale_inv, **options)
        return fp8_gemm.fp8_gemm(
            a, b, a_scale_inv, b_scale_inv, use_split_accumulator=self.split[product], **options
        )

    def bound(self, product, weight, out_dtype, bias=None):
        if self.adds:  # the GEMM is that of ``multiply`` here
            found = fp8_gemm.bound_product(
                weight.rowwise if product == FPROP else weight.columnwise,
                weight.rowwise_scale_inv if product == FPROP else weight.columnwise_scale_inv,
                out_dtype,
                bias,
                self.split[product],
            )
            if found is not None:
                return found
        return super().bound(product, weight, out_dtype, bias)

    def multiply_groups(self, product, a, b, a_scale_inv, b_scale_inv, groups):
        _check_grouped(a, b)
        fast = not self.split[product]
        return grouped_gemm.scaled_multiply_groups(a, a_scale_inv, b, b_scale_inv, groups, fast)

    def contract_groups(self, a, b, a_scale_inv, b_scale_inv, groups, *rest, input_first=False):
        _check_grouped(a, b)
        operands = a, a_scale_inv, b, b_scale_inv, groups.column_ends, not self.split[WGRAD]
        return grouped_gemm.scaled_contract_groups(*operands, *rest)


def _check_grouped(a: torch.Tensor, b: torch.Tensor) -> None:
    """Warns if grouped GEMMs of ``a`` and ``b`` are emulated."""
    if not grouped_gemm.multiplies_codes(a, b):
        what = "FP8 matrix products of groups whose sizes are on the device"
        warn_emulated(what, "sm_90 and sizes that are multiples of 16")
