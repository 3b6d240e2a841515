"""Matrix products of PyTorch that are written into a given tensor."""

from __future__ import annotations

import torch

__all__ = ["product_into"]


def product_into(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Computes ``a [M, K] @ b [K, N] + bias [N]`` in ``out`` [M, N], or in a new tensor.

    Where a mode sees PyTorch's ops the product is a tensor of its own, which is then copied: a
    selective checkpoint that saves products gives back what it has saved, and cannot do so with
    what an op was given to write to.
    """
    modes = not torch.compiler.is_compiling() and torch._C._len_torch_dispatch_stack()
    into = None if modes else out
    args = (a, b) if bias is None else (bias, a, b)
    product = (torch.mm if bias is None else torch.addmm)(*args, out=into)
    return product if out is None or into is out else out.copy_(product)
