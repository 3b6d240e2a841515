"""A block whose MLP is a mixture of experts, for ``--experts``."""

from __future__ import annotations

from typing import Any

import torch
from config import Shape
from torch import nn

import apex_te

AUX_LOSS = 0.01  # coefficient of the load-balance loss


class ExpertBlock(nn.Module):
    """Block of RMSNorm, attention, RMSNorm and ``MoELayer``, with residuals.

    Args:
        shape, number, dtype, device, packed, main_grads: as in ``model.te_block``.
        eps: of the norms.
    """

    def __init__(
        self, shape: Shape, number: int, dtype: torch.dtype, device: torch.device, packed: bool,
        main_grads: bool, eps: float,
    ) -> None:  # fmt: skip
        super().__init__()
        shared: dict[str, Any] = {
            "fuse_wgrad_accumulation": main_grads, "params_dtype": dtype, "device": device,
        }  # fmt: skip
        self.self_attention = apex_te.MultiheadAttention(
            shape.dim,
            shape.heads,
            num_gqa_groups=shape.groups,
            attention_dropout=0.0,
            layernorm_epsilon=eps,
            layer_number=number,
            input_layernorm=True,
            normalization="RMSNorm",
            bias=False,
            fuse_qkv_params=True,
            qkv_weight_interleaved=False,
            qkv_format="thd" if packed else "bshd",
            **shared,
        )
        self.norm = apex_te.RMSNorm(shape.dim, eps, params_dtype=dtype, device=device)
        self.experts = apex_te.MoELayer(
            shape.dim, shape.ffn, shape.experts, shape.top_k, aux_loss_coeff=AUX_LOSS, **shared
        )

    def forward(
        self, hidden: torch.Tensor, is_first_microbatch: bool | None = None, **attention: Any
    ) -> torch.Tensor:
        """Applies the block; ``attention`` has further arguments of ``MultiheadAttention``."""
        hidden = hidden + self.self_attention(
            hidden, is_first_microbatch=is_first_microbatch, **attention
        )
        return hidden + self.experts(self.norm(hidden), is_first_microbatch)


def scale_losses(model: nn.Module, microbatches: int) -> None:
    """Makes the loss of an optimizer step the mean of those of its microbatches."""
    for module in model.modules():
        if isinstance(module, apex_te.MoELayer):
            module.loss_scale = 1.0 / microbatches
