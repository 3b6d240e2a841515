"""Softmax of scaled and masked attention scores, by the op ``scaled_softmax``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .....ops.scaled_softmax import scaled_softmax
from ..enums import AttnMaskType


class _Applied:
    """A function with apex's calling convention of autograd functions, ``apply``."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        self.apply = function


def scaled_upper_triang_masked_softmax(
    inputs: torch.Tensor, _: torch.Tensor | None, scale: float | None
) -> torch.Tensor:
    """Returns softmax(scale * inputs) with what is above the diagonal hidden.

    Args:
        inputs: [b, np, s, s], or [b * np, s, s].
        _: ignored.
        scale: factor, None for 1.
    """
    return scaled_softmax(inputs, 1.0 if scale is None else float(scale), causal="upper_left")


def scaled_masked_softmax(
    inputs: torch.Tensor, mask: torch.Tensor | None, scale: float | None
) -> torch.Tensor:
    """Returns softmax(scale * inputs) without what the mask hides.

    Args:
        inputs: [b, np, sq, sk].
        mask: [b or 1, 1, sq, sk], True or 1 for what is hidden; None hides nothing.
        scale: factor, None for 1.
    """
    mask = None if mask is None else mask.bool()
    return scaled_softmax(inputs, 1.0 if scale is None else float(scale), mask)


def scaled_softmax_function(inputs: torch.Tensor, scale: float | None) -> torch.Tensor:
    """Returns softmax(scale * inputs) of scores [b, np, sq, sk]."""
    return scaled_masked_softmax(inputs, None, scale)


def _causal_3d(inputs: torch.Tensor, scale: float | None) -> torch.Tensor:
    """Returns softmax(scale * inputs) of scores [b * np, s, s], hidden above the diagonal."""
    return scaled_upper_triang_masked_softmax(inputs, None, scale)


def _masked(inputs: torch.Tensor, mask: torch.Tensor | None, scale: float | None) -> torch.Tensor:
    """Returns softmax(scale * inputs) without what the mask hides."""
    return scaled_masked_softmax(inputs, mask, scale)


ScaledUpperTriangMaskedSoftmax = _Applied(_causal_3d)
ScaledMaskedSoftmax = _Applied(_masked)
GenericScaledMaskedSoftmax = _Applied(_masked)
ScaledSoftmax = _Applied(scaled_softmax_function)
generic_scaled_masked_softmax = scaled_masked_softmax


class FusedScaleMaskSoftmax(torch.nn.Module):
    """Scale, mask and softmax of attention scores.

    Args:
        input_in_fp16: scores are float16.
        input_in_bf16: scores are bfloat16.
        attn_mask_type: padding or causal.
        scaled_masked_softmax_fusion: uses the op; otherwise torch and ``mask_func``.
        mask_func: applies a mask to scores, for the path through torch.
        softmax_in_fp32: the path through torch computes in float32.
        scale: factor; None for 1.

    Raises:
        RuntimeError: float16 and bfloat16 at once, or a scale without ``softmax_in_fp32``.
        ValueError: another kind of mask.
    """

    def __init__(
        self,
        input_in_fp16: bool,
        input_in_bf16: bool,
        attn_mask_type: AttnMaskType,
        scaled_masked_softmax_fusion: bool,
        mask_func: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None,
        softmax_in_fp32: bool,
        scale: float | None,
    ) -> None:
        super().__init__()
        if input_in_fp16 and input_in_bf16:
            raise RuntimeError("both fp16 and bf16 flags cannot be active at the same time.")
        if scale is not None and not softmax_in_fp32:
            raise RuntimeError("softmax should be in fp32 when scaled")
        if attn_mask_type not in (AttnMaskType.padding, AttnMaskType.causal):
            raise ValueError(
                "FusedScaleMaskSoftmax: attn_mask_type must be AttnMaskType.padding or .causal, got"
                f" {attn_mask_type}"
            )
        self.input_in_fp16 = input_in_fp16
        self.input_in_bf16 = input_in_bf16
        self.input_in_float16 = input_in_fp16 or input_in_bf16
        self.attn_mask_type = attn_mask_type
        self.scaled_masked_softmax_fusion = scaled_masked_softmax_fusion
        self.mask_func = mask_func
        self.softmax_in_fp32 = softmax_in_fp32
        self.scale = scale

    def forward(self, input: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Returns the probabilities of scores [b, np, sq, sk], in their dtype.

        Raises:
            ValueError: not four dimensions, or a causal mask of scores that are not square.
        """
        if input.dim() != 4:
            raise ValueError(
                f"FusedScaleMaskSoftmax: input must be [b, np, sq, sk], got {list(input.shape)}"
            )
        if self.is_kernel_available(mask, *input.shape):
            return self.forward_fused_softmax(input, mask)
        return self.forward_torch_softmax(input, mask)

    def is_kernel_available(
        self, mask: torch.Tensor | None, b: int, np: int, sq: int, sk: int
    ) -> bool:
        """Returns True if ``forward`` would take the op, which supports all sizes.

        Args:
            mask: mask or None; a mask that differs between heads needs a causal mask type.
            b, np, sq, sk: batch, heads, queries and keys; not read.
        """
        is_causal = self.attn_mask_type is AttnMaskType.causal
        return (
            self.scaled_masked_softmax_fusion
            and self.input_in_float16
            and (is_causal or mask is None or mask.shape[1] == 1)
        )

    def forward_fused_softmax(self, input: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Returns the probabilities by the op.

        Args:
            input: scores [b, heads, queries, keys].
            mask: [b or 1, 1, queries, keys], True or 1 = masked out, or None; ignored if causal.

        Raises:
            ValueError: the mask is causal, and there are not equally many queries and keys.
        """
        if self.attn_mask_type is not AttnMaskType.causal:
            return scaled_masked_softmax(input, mask, self.scale)
        if input.shape[2] != input.shape[3]:
            raise ValueError(
                "FusedScaleMaskSoftmax: causal mask is only for self attention, got"
                f" {list(input.shape)}"
            )
        return scaled_upper_triang_masked_softmax(input, mask, self.scale)

    def forward_torch_softmax(self, input: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Returns the probabilities by torch and ``mask_func``, in the dtype of ``input``.

        Args:
            input: scores [b, heads, queries, keys].
            mask: second argument of ``mask_func``; None masks nothing, or with a causal mask type
                the keys after each query.
        """
        scores: Any = input.float() if self.softmax_in_fp32 else input
        if self.scale is not None:
            scores = scores * self.scale
        if self.attn_mask_type is AttnMaskType.causal and mask is None:
            shape = scores.shape[-2:]
            mask = torch.ones(shape, dtype=torch.bool, device=input.device).triu(1)[None, None]
        if mask is not None and self.mask_func is not None:
            scores = self.mask_func(scores, mask)
        return torch.softmax(scores, -1).to(input.dtype)

    @staticmethod
    def get_batch_per_block(sq: int, sk: int, b: int, np: int) -> int:
        """Returns 1; the arguments are ignored, since the op takes any batch."""
        return 1


class GenericFusedScaleMaskSoftmax(FusedScaleMaskSoftmax):
    """Scale, mask and softmax of scores of any size, with a padding mask; arguments as there."""

    def __init__(
        self,
        input_in_fp16: bool,
        input_in_bf16: bool,
        scaled_masked_softmax_fusion: bool,
        mask_func: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None,
        softmax_in_fp32: bool,
        scale: float | None,
    ) -> None:
        super().__init__(
            input_in_fp16,
            input_in_bf16,
            AttnMaskType.padding,
            scaled_masked_softmax_fusion,
            mask_func,
            softmax_in_fp32,
            scale,
        )
