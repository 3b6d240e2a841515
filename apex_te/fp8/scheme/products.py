"""The three products of a linear layer, over what a scheme's quantizers make."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from ...ops import emulated_gemm, fp8_gemm, grouped_gemm
from ...ops.fp8_gemm import block_scaled_gemm
from ...ops.grouped_quantize import Groups
from ...runtime.gpu_arch import has_fp8_products, nvidia_capability
from ..tensor import QuantizedTensor

__all__ = ["BlockGemm", "FP8Gemm", "GemmBackend", "HiF8Gemm", "MXGemm"]

FPROP, DGRAD, WGRAD = range(3)
_said: set[str] = set()


class GemmBackend:
    """Products of quantized operands; a subclass defines ``multiply``.

    Args:
        split: split accumulation of (fprop, dgrad, wgrad); what a scheme cannot choose it ignores.
    """

    __slots__ = ("split",)

    def __init__(self, split: tuple[bool, bool, bool]) -> None:
        self.split = split

    def multiply(
        self,
        product: int,
        a: Any,
        b: Any,
        a_scale_inv: Any,
        b_scale_inv: Any,
        **options: Any,
    ) -> torch.Tensor:
        """``a [M, K] @ b [N, K].T``; ``product`` is FPROP, DGRAD or WGRAD."""
        raise NotImplementedError

    def fprop(
        self,
        x: QuantizedTensor,
        weight: QuantizedTensor,
        out_dtype: torch.dtype,
        bias: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``x [rows, in] @ weight [out, in].T + bias``."""
        return self.multiply(
            FPROP, x.rowwise, weight.rowwise, x.rowwise_scale_inv, weight.rowwise_scale_inv,
            out=out, out_dtype=out_dtype, bias=bias,
        )  # fmt: skip

    def dgrad(
        self,
        dy: QuantizedTensor,
        weight: QuantizedTensor,
        out_dtype: torch.dtype,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``dy [rows, out] @ weight [out, in]``."""
        return self.multiply(
            DGRAD, dy.rowwise, weight.columnwise, dy.rowwise_scale_inv, weight.columnwise_scale_inv,
            out=out, out_dtype=out_dtype,
        )  # fmt: skip

    def wgrad(
        self,
        dy: QuantizedTensor,
        x: QuantizedTensor,
        out_dtype: torch.dtype,
        out: torch.Tensor | None = None,
        accumulate: bool = False,
    ) -> torch.Tensor:
        """``dy [rows, out].T @ x [rows, in]``, added to ``out`` with ``accumulate``."""
        return self.multiply(
            WGRAD, dy.columnwise, x.columnwise, dy.columnwise_scale_inv, x.columnwise_scale_inv,
            out=out, out_dtype=out_dtype, accumulate=accumulate,
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
        """``b[g] @ a[r]`` of each row r of ``a`` and its group g, bfloat16, as
        `scaled_multiply_groups`; ``product`` is FPROP or DGRAD.
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
    ) -> torch.Tensor:
        """WGRAD of each group, [groups, M, N], as `scaled_contract_groups`."""
        raise NotImplementedError


class FP8Gemm(GemmBackend):
    """One scale for each operand: cuBLASLt's FP8 products, or decoded ones."""

    __slots__ = ("native",)

    def __init__(self, split: tuple[bool, bool, bool], device: torch.device) -> None:
        super().__init__(split)
        self.native = has_fp8_products(device)
        if not self.native:
            _say_decoded("FP8 matrix products", "sm_89 or later, or gfx94x or later")

    def multiply(self, product, a, b, a_scale_inv, b_scale_inv, **options):
        if not self.native:
            return emulated_gemm.decoded_fp8_gemm(a, b, a_scale_inv, b_scale_inv, **options)
        return fp8_gemm.fp8_gemm(
            a, b, a_scale_inv, b_scale_inv, use_split_accumulator=self.split[product], **options
        )

    def multiply_groups(self, product, a, b, a_scale_inv, b_scale_inv, groups):
        _check_grouped(a, b)
        fast = not self.split[product]
        return grouped_gemm.scaled_multiply_groups(a, a_scale_inv, b, b_scale_inv, groups, fast)

    def contract_groups(self, a, b, a_scale_inv, b_scale_inv, groups, wide=False):
        _check_grouped(a, b)
        ends, fast = groups.column_ends, not self.split[WGRAD]
        return grouped_gemm.scaled_contract_groups(a, a_scale_inv, b, b_scale_inv, ends, fast, wide)


class BlockGemm(GemmBackend):
    """1x128 and 128x128 blocks: cuBLASLt's block-scaled products, or decoded ones."""

    __slots__ = ("native",)

    def __init__(self, split: tuple[bool, bool, bool], device: torch.device) -> None:
        super().__init__(split)
        self.native = device.type != "cuda" or nvidia_capability(device) == (9, 0)
        if not self.native:
            _say_decoded("block-scaled matrix products", "sm_90")

    def multiply(self, product, a, b, a_scale_inv, b_scale_inv, **options):
        block_rows = 1 if product == WGRAD else 128
        multiply = block_scaled_gemm if self.native else emulated_gemm.decoded_block_gemm
        return multiply(a, b, a_scale_inv, b_scale_inv, b_block_rows=block_rows, **options)


class MXGemm(GemmBackend):
    """MXFP8 blocks of 32, decoded."""

    __slots__ = ()

    def __init__(self, split: tuple[bool, bool, bool], device: torch.device) -> None:
        super().__init__(split)
        if device.type == "cuda":
            _say_decoded("MXFP8 matrix products", "sm_100, which is not supported yet")

    def multiply(self, product, a, b, a_scale_inv, b_scale_inv, **options):
        return emulated_gemm.mx_gemm(a, b, a_scale_inv, b_scale_inv, **options)


class HiF8Gemm(GemmBackend):
    """HiF8 with one scale for each operand, decoded: no GPU here has matrix units for it."""

    __slots__ = ()

    def __init__(self, split: tuple[bool, bool, bool], device: torch.device) -> None:
        super().__init__(split)
        if device.type == "cuda":
            _say_decoded("HiF8 matrix products", "a GPU with HiF8 units")

    def multiply(self, product, a, b, a_scale_inv, b_scale_inv, **options):
        return emulated_gemm.hif8_gemm(a, b, a_scale_inv, b_scale_inv, **options)


def _check_grouped(a: torch.Tensor, b: torch.Tensor) -> None:
    if not grouped_gemm.multiplies_codes(a, b):
        what = "FP8 matrix products of groups whose sizes are on the device"
        _say_decoded(what, "sm_90 and sizes that are multiples of 16")


def _say_decoded(what: str, needed: str) -> None:
    if what not in _said:
        _said.add(what)
        warnings.warn(
            f"apex_te: {what} need {needed}; operands are decoded and multiplied in high "
            "precision: the numbers are those of the recipe, the speed is not",
            stacklevel=2,
        )
