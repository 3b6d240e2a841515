"""Matrix products of PyTorch that are written into a given tensor."""

from __future__ import annotations

import torch

__all__ = ["product_into"]


def product_into(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Computes ``a [M, K] @ b [K, N] + bias [N]`` in ``out`` [M, N], or in a new tensor.

    Under a dispatch mode the product is a new tensor, which is then copied to ``out``. Selective
    activation checkpointing is such a mode: in the recompute it returns the product that it saved
    instead of running the op, so that an ``out`` argument would never be written.

    Returns:
        ``out``, or the new tensor if ``out`` is None.
    """
    modes = not torch.compiler.is_compiling() and torch._C._len_torch_dispatch_stack()
    into = None if modes else out
    args = (a, b) if bias is None else (bias, a, b)
    product = (torch.mm if bias is None else torch.addmm)(*args, out=into)
    return product if out is None or into is out else out.copy_(product)
