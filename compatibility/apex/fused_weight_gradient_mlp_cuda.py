"""apex's fused_weight_gradient_mlp_cuda: weight gradients added to a buffer."""

from __future__ import annotations

import torch

from apex_te._version import __version__ as __version__

__all__ = ["wgrad_gemm_accum_fp16", "wgrad_gemm_accum_fp32"]


@torch.no_grad()
def wgrad_gemm_accum_fp32(
    input: torch.Tensor, d_output: torch.Tensor, d_weight: torch.Tensor
) -> None:
    """Adds d_output^T @ input to d_weight [out, in] float32, in place.

    input [..., in] and d_output [..., out] are of one dtype: float32, float16 or bfloat16.
    """
    x, dy = _operands("wgrad_gemm_accum_fp32", input, d_output, d_weight)
    if d_weight.dtype is not torch.float32:
        raise TypeError(f"wgrad_gemm_accum_fp32: d_weight must be float32, got {d_weight.dtype}")
    if x.dtype is torch.float32:
        d_weight.addmm_(dy.t(), x)
    elif x.is_cuda:
        torch.addmm(d_weight, dy.t(), x, out_dtype=torch.float32, out=d_weight)
    else:
        d_weight.addmm_(dy.t().float(), x.float())


@torch.no_grad()
def wgrad_gemm_accum_fp16(
    input: torch.Tensor, d_output: torch.Tensor, d_weight: torch.Tensor
) -> None:
    """Adds d_output^T @ input to d_weight in place; all three float16 or all three bfloat16."""
    x, dy = _operands("wgrad_gemm_accum_fp16", input, d_output, d_weight)
    if d_weight.dtype not in (torch.float16, torch.bfloat16) or d_weight.dtype is not x.dtype:
        raise TypeError(
            "wgrad_gemm_accum_fp16: d_weight must be float16 or bfloat16 as input is, "
            f"{input.dtype}, got {d_weight.dtype}"
        )
    d_weight.addmm_(dy.t(), x)


def _operands(
    op: str, input: torch.Tensor, d_output: torch.Tensor, d_weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Checks shapes and dtypes, and returns input and d_output as matrices.

    Returns:
        The input as [rows, in] and d_output as [rows, out].
    """
    if input.dtype is not d_output.dtype:
        raise TypeError(f"{op}: d_output must be {input.dtype} as input is, got {d_output.dtype}")
    if input.shape[:-1] != d_output.shape[:-1]:
        raise ValueError(
            f"{op}: d_output must have shape {[*input.shape[:-1], 'out']}, "
            f"got {list(d_output.shape)}"
        )
    expected = (d_output.shape[-1], input.shape[-1])
    if d_weight.shape != expected:
        raise ValueError(
            f"{op}: d_weight must have shape {list(expected)}, got {list(d_weight.shape)}"
        )
    return input.flatten(0, -2), d_output.flatten(0, -2)
