"""FP8 GEMMs of operands that have a scale for each row: fprop, dgrad and wgrad."""

from __future__ import annotations

import torch

from .. import runtime
from ..runtime.device import has_fp8_products, nvidia_capability
from ..runtime.scratch_sizes import GEMM_BYTES as WORKSPACE_BYTES
from . import gemm_common, reference_codec
from .binding import bind_call, check_dense, checked, note_written
from .emulated_gemm import emulated_fp8_gemm
from .fp8_gemm import decoded, is_taken, multiply_into, run_empty
from .gemm_common import check_addend, check_operands, float32_product, prepare

_lib = runtime.ops("fp8_gemm")


@checked
def rowwise_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b_scale_inv: torch.Tensor | None,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    bias: torch.Tensor | None = None,
    accumulate: bool = False,
    use_split_accumulator: bool = False,
    c: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes out[M, N] = (a[M, K] @ b[N, K].T) * a_scale_inv * b_scale_inv.T + bias + c.

    On sm_90 cuBLASLt (12.9 or later) applies the scales; elsewhere the sums of a GEMM without
    scales are multiplied by them.

    Args:
        a: [M, K] FP8, contiguous: a copy made by ``row_quantize``.
        b: [N, K] FP8, contiguous.
        a_scale_inv: float32 [M, 1].
        b_scale_inv: float32 [N, 1]; None multiplies by ``a_scale_inv`` alone.
        out: [M, N] to write, in a dtype listed for ``out_dtype``; a new tensor unless given.
        out_dtype: dtype of a new tensor: bfloat16, float16 or float32.
        bias: [N], converted to out's dtype, or to bfloat16 for a float32 out.
        accumulate: add the result to ``out``, which must be given, instead of overwriting it.
        use_split_accumulator: keep partial sums in float32 (slower, more exact); a CPU always does.
        c: [M, N] in the output's dtype, contiguous: a tensor such as a residual, added before
            rounding; not with ``accumulate``.

    Returns:
        The output [M, N]: ``out`` or the new tensor.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: the shape or device of an argument does not match.
        NotImplementedError: both operands are E5M2.
    """
    is_given = out is not None
    given = {"a_scale_inv": a_scale_inv, "b_scale_inv": b_scale_inv, "bias": bias, "c": c}
    check_dense("rowwise_gemm", a=a, b=b, out=out, **given)
    check_operands("rowwise_gemm", a, b)
    out, bias = prepare("rowwise_gemm", a, b, out, out_dtype, bias, accumulate)
    for name, scale_inv, operand in (("a", a_scale_inv, a), ("b", b_scale_inv, b)):
        wanted = [operand.shape[0], 1]
        if scale_inv is None:
            continue
        if list(scale_inv.shape) != wanted or scale_inv.dtype is not torch.float32:
            raise ValueError(
                f"rowwise_gemm: {name}_scale_inv must be float32 {wanted}, "
                f"got {list(scale_inv.shape)} of {scale_inv.dtype}"
            )
    if c is not None:
        check_addend("rowwise_gemm", c, out, accumulate, False)
    a_scale_inv = a_scale_inv.contiguous()
    b_scale_inv = None if b_scale_inv is None else b_scale_inv.contiguous()
    bias = None if bias is None else bias.contiguous()
    _multiply(a, b, a_scale_inv, b_scale_inv, out, bias, c, accumulate, use_split_accumulator)
    if is_given:
        note_written(out)
    return out


def _run(a, b, a_scale_inv, b_scale_inv, out, bias, c, accumulate, use_split_accumulator):
    if a.shape[1] == 0 or out.numel() == 0:
        gemm_common.count_gemms()
        run_empty(out, bias, c, None, accumulate)
        return
    if b_scale_inv is None:
        b_scale_inv = a_scale_inv.new_ones(b.shape[0], 1)
    # Copies, rather than another order of rounding where memory begins elsewhere.
    a, b, a_scale_inv, b_scale_inv = map(_aligned, (a, b, a_scale_inv, b_scale_inv))
    c, target = None if c is None else _aligned(c), out
    out = _aligned(out)
    operands = (a, b, a_scale_inv, b_scale_inv)
    if _applies_scales(operands, c, out):
        scratch = runtime.workspace(out.device, WORKSPACE_BYTES)
        try:
            _lib.fp8_gemm_rows(
                *operands, out, bias, c, scratch, accumulate, use_split_accumulator, 0
            )
        except NotImplementedError:
            pass  # cuBLASLt does not multiply these dtypes so
        else:
            gemm_common.count_gemms()
            if out is not target:
                target.copy_(out)
            return
    # Not in place: a selective checkpoint may have saved the product.
    result = _sums(a, b, use_split_accumulator) * a_scale_inv * b_scale_inv.t()
    for addend in (bias, c):
        if addend is not None:
            result = result + addend
    if accumulate:
        target.add_(result)
    else:
        target.copy_(result)


def _aligned(t: torch.Tensor) -> torch.Tensor:
    """Returns ``t``, or on a GPU a copy if it does not begin at a multiple of 16 bytes."""
    return t.clone() if t.is_cuda and t.data_ptr() % 16 else t


def _applies_scales(operands, c, out) -> bool:
    """Returns True if cuBLASLt takes the aligned operands on this device."""
    a, b = operands[:2]
    return nvidia_capability(a.device) == (9, 0) and is_taken(a, b, c, out)


def _sums(a, b, use_split_accumulator) -> torch.Tensor:
    """Returns ``a @ b.T`` of the data without scales, in float32."""
    if not a.is_cuda:
        gemm_common.count_gemms()
        values = decoded("rowwise_gemm", a, b)
        return float32_product(next(values), next(values).t())
    one = torch.ones(1, device=a.device)
    if not has_fp8_products(a.device):
        return emulated_fp8_gemm(a, b, one, one, out_dtype=torch.float32)
    out = a.new_empty((a.shape[0], b.shape[0]), dtype=torch.float32)
    multiply_into(a, b, one, one, out, None, None, None, False, use_split_accumulator)
    return out


def reference(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b_scale_inv: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    c: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes ``rowwise_gemm`` in float64 from the decoded operands.

    a is [M, K] and b [N, K] FP8, with scale_inv float32 [M, 1] and [N, 1]; ``bias`` is [N] and
    ``c`` [M, N]. Returns float64 [M, N].
    """
    x, w = (
        reference_codec.decode_fp8(codes).double() * scale_inv.double()
        for codes, scale_inv in ((a, a_scale_inv), (b, b_scale_inv))
    )
    product = x @ w.t()
    product = product if bias is None else product + bias.double()
    return product if c is None else product + c.double()


_multiply = bind_call(
    "rowwise_gemm(Tensor a, Tensor b, Tensor a_scale_inv, Tensor? b_scale_inv, Tensor(a!) out, "
    "Tensor? bias, Tensor? c, bool accumulate, bool use_split_accumulator) -> ()",
    _run,
)
