"""Clipping of gradients by their norm, by PyTorch's fused functions."""

from .clip_grad import clip_grad_norm_

__all__ = ["clip_grad_norm_"]
