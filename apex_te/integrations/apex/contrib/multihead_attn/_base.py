"""Base of the attention modules: their options, the norm and the residual."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import layer_norm

from apex_te.module.layer_norm import LayerNorm
from apex_te.ops.bias_dropout_add import bias_dropout_add


def jit_dropout_add(
    x: torch.Tensor, residual: torch.Tensor, prob: float, is_training: bool
) -> torch.Tensor:
    """Returns residual + dropout(x) in one pass.

    Args:
        x: [..., cols] float32, float16 or bfloat16.
        residual: x's shape, of x's dtype or float32; the result has its dtype.
        prob: dropout probability, from 0 to 1.
        is_training: False leaves out dropout.

    Errors are those of ``apex_te.ops.bias_dropout_add.bias_dropout_add``.
    """
    return bias_dropout_add(x, None, residual, prob, is_training)


class AttentionBase(torch.nn.Module):
    """Options that both modules take, and the parameters of the norm."""

    out_proj_weight: torch.nn.Parameter
    out_proj_bias: torch.nn.Parameter | None
    lyr_nrm_gamma_weights: torch.nn.Parameter
    lyr_nrm_beta_weights: torch.nn.Parameter

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float,
        bias: bool,
        include_norm_add: bool,
        impl: str,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        if num_heads < 1 or embed_dim % num_heads:
            raise ValueError(
                f"{name}: embed_dim must be divisible by num_heads, got {embed_dim} and {num_heads}"
            )
        if impl not in ("fast", "default"):
            raise ValueError(f"{name}: impl must be 'fast' or 'default', got {impl!r}")
        self.embed_dim, self.num_heads, self.dropout = embed_dim, num_heads, dropout
        self.head_dim = embed_dim // num_heads
        self.scaling = self.head_dim**-0.5
        self.bias, self.include_norm_add, self.impl = bias, include_norm_add, impl

    def _weight(self, name: str, *shape: int) -> None:
        """Registers a parameter without values; without a shape registers None."""
        value = torch.nn.Parameter(torch.empty(*shape)) if shape else None
        self.register_parameter(name, value)

    def _add_norm(self) -> None:
        """Registers the norm's parameters: the module's own if fast, else those of ``lyr_nrm``."""
        own = (self.embed_dim,) if self.include_norm_add and self.impl == "fast" else ()
        self._weight("lyr_nrm_gamma_weights", *own)
        self._weight("lyr_nrm_beta_weights", *own)
        with_module = self.include_norm_add and not own
        self.lyr_nrm = LayerNorm(self.embed_dim) if with_module else None

    def reset_parameters(self) -> None:
        """Sets biases to 0 and the norm to the identity; subclasses also set the weights."""
        for name, parameter in self.named_parameters():
            if name.endswith(("bias", "bias_q", "bias_kv", "beta_weights")):
                torch.nn.init.zeros_(parameter)
            elif name.endswith(("gamma_weights", "lyr_nrm.weight")):
                torch.nn.init.ones_(parameter)

    def _mask(
        self, key_padding_mask: torch.Tensor | None, attn_mask: torch.Tensor | None
    ) -> torch.Tensor | None:
        if key_padding_mask is not None and attn_mask is not None:
            raise ValueError(
                f"{type(self).__name__}: attn_mask must be None if key_padding_mask is given"
            )
        return attn_mask if key_padding_mask is None else key_padding_mask

    def _is_fast(self, is_training: bool) -> bool:
        """Returns True if the fast functions compute; inference has a fused kernel of PyTorch."""
        saves = torch.is_grad_enabled() or (is_training and self.dropout > 0)
        return self.impl == "fast" and saves

    def _normed(
        self, attention: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, is_training: bool
    ) -> torch.Tensor:
        """Returns ``attention(x)``, with the norm before and the residual after if included."""
        if not self.include_norm_add:
            return attention(x)
        if self.lyr_nrm is not None:
            normed = self.lyr_nrm(x)
        else:
            affine = (self.lyr_nrm_gamma_weights, self.lyr_nrm_beta_weights)
            normed = layer_norm(x, (self.embed_dim,), *affine)
        return jit_dropout_add(attention(normed), x, self.dropout, is_training)
