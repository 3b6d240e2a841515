"""Group norm with an activation, computed by PyTorch."""

from __future__ import annotations

import torch
from torch.nn.functional import group_norm, silu

__all__ = ["GroupNorm", "torch_group_norm"]


def torch_group_norm(
    x: torch.Tensor,
    g: int,
    w: torch.Tensor | None,
    b: torch.Tensor | None,
    eps: float,
    act: str = "",
) -> torch.Tensor:
    """Computes group norm of x [N, C, ...] in ``g`` groups; the result has x's dtype.

    Args:
        x: any floating dtype and layout.
        g: number of groups, which divides C.
        w, b: [C], or None; x is computed in their dtype.
        eps: added to the variance.
        act: "silu" or "swish" applies SiLU to the result, "" nothing.

    Raises:
        ValueError: ``act`` is another value.
    """
    if act not in ("", "silu", "swish"):
        raise ValueError(f"GroupNorm: act must be '', 'silu' or 'swish', got {act!r}")
    y = group_norm(x if w is None else x.to(w.dtype), g, w, b, eps)
    return (silu(y) if act else y).to(x.dtype)


class GroupNorm(torch.nn.Module):
    """Group norm of [N, C, ...], with SiLU if ``act`` is "silu" or "swish".

    Args:
        num_groups: number of groups, which divides ``num_channels``.
        num_channels: C.
        eps: added to the variance.
        affine: learn ``weight`` and ``bias`` [C].
        device, dtype: device and dtype of the parameters.
        act: activation, "" for none.

    Raises:
        ValueError: an argument is invalid.

    Source: apex.contrib.group_norm.
    """

    weight: torch.nn.Parameter | None
    bias: torch.nn.Parameter | None

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        act: str = "",
    ) -> None:
        super().__init__()
        if num_channels % num_groups:
            raise ValueError(
                f"GroupNorm: num_channels must be a multiple of num_groups, {num_groups}, "
                f"got {num_channels}"
            )
        self.num_groups, self.num_channels, self.eps = num_groups, num_channels, eps
        self.affine, self.act = affine, act.lower()
        for name, fill in (("weight", torch.ones), ("bias", torch.zeros)):
            values = fill(num_channels, device=device, dtype=dtype) if affine else None
            self.register_parameter(name, None if values is None else torch.nn.Parameter(values))

    def reset_parameters(self) -> None:
        """Sets the weight to 1 and the bias to 0."""
        if self.weight is not None and self.bias is not None:
            torch.nn.init.ones_(self.weight)
            torch.nn.init.zeros_(self.bias)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Returns the norm of ``input`` [N, C, ...], in its dtype and layout.

        ``input`` may have any floating-point dtype; it is computed in the parameters' dtype.
        """
        weight, bias = self.weight, self.bias
        y = torch_group_norm(input, self.num_groups, weight, bias, self.eps, self.act)
        is_nhwc = input.dim() == 4 and input.is_contiguous(memory_format=torch.channels_last)
        return y.contiguous(memory_format=torch.channels_last) if is_nhwc else y

    def extra_repr(self) -> str:
        text = f"{self.num_groups}, {self.num_channels}, eps={self.eps}, affine={self.affine}"
        return text + (f", act={self.act}" if self.act else "")
