"""FP8 Parameters over the codes and scales of a checkpoint, and their values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ...fp8.parameter.parameter import FP8Parameter
from ...recipe import BlockScaling, CurrentScaling, DelayedScaling, Recipe, RowwiseScaling
from .description import BLOCK, BLOCKS, CHANNEL, MXFP4, MXFP8, Form
from .mapping import Held
from .mxfp4 import in_blocks


def widened(scale: torch.Tensor) -> torch.Tensor:
    """Returns scales as float32; bytes are exponents of two, biased by 127."""
    if scale.dtype is torch.uint8:
        scale = scale.view(torch.float8_e8m0fnu)
    return scale.float()


def are_powers_of_two(scale: torch.Tensor) -> bool:
    """Returns True if all float32 scales are powers of two."""
    return bool((scale.view(torch.int32) & 0x7FFFFF == 0).all())


def matrix_of(scale: torch.Tensor, held: Held) -> torch.Tensor:
    """Returns float32 scales ``[.., rows, cols]`` of a weight's blocks; one for a whole weight."""
    scale = widened(scale)
    *count, rows, cols = held.shape
    if held.stored.form is Form.TENSOR:
        return scale.reshape(*count, -1, 1)
    if held.stored.form is Form.CHANNEL:
        return scale.reshape(*count, rows, 1)
    width = -(-cols // held.stored.block[1])
    return scale.reshape(*count, -1, width)


def form_of(recipe: Recipe) -> Form | None:
    """Returns the form in which a recipe's weights are held; None if no file has it."""
    if isinstance(recipe, BlockScaling):
        return Form.BLOCK
    if isinstance(recipe, RowwiseScaling):
        return Form.CHANNEL
    return Form.TENSOR if isinstance(recipe, (CurrentScaling, DelayedScaling)) else None


def keeps_bytes(recipe: Recipe, scale: torch.Tensor, held: Held) -> bool:
    """Returns True if an FP8 Parameter of ``recipe`` can hold the codes and scales as they are."""
    form = held.stored.form
    if form is not form_of(recipe):
        return False
    if form is Form.TENSOR:  # parts of a matrix must have the same scale
        return bool((scale == scale[..., :1, :]).all())
    known = held.stored.block in (BLOCKS.block, CHANNEL.block)
    any_scale = getattr(recipe, "scales", None) != "pow2"
    return known and (any_scale or are_powers_of_two(scale))


def parameter_of(
    codes: torch.Tensor, scale: torch.Tensor, held: Held, recipe: Recipe
) -> FP8Parameter:
    """Returns an FP8 Parameter over ``codes``; they are cast again if it cannot hold the bytes."""
    if not keeps_bytes(recipe, scale, held):
        return _cast_again(codes, scale, held, recipe)
    if held.stored.form is Form.TENSOR:
        scale = scale[..., 0, :]
    elif held.stored.form is Form.BLOCK:
        codes = padded(codes, held.parts)
    return FP8Parameter.from_codes(codes, scale, recipe, held.dtype)


def regrouped(
    codes: torch.Tensor, scale: torch.Tensor, held: Held, recipe: Recipe
) -> tuple[FP8Parameter | None, int]:
    """Returns a weight with powers of two for groups of 32 as an FP8 Parameter of blocks."""
    pairs = [(codes, scale)] if codes.dim() == 2 else zip(codes, scale, strict=True)
    made = [in_blocks(*each) for each in pairs]
    changed = sum(each[2] for each in made)
    if changed:
        return None, changed
    whole = torch.stack([each[0].view(torch.uint8) for each in made]).view(codes.shape)
    scales = torch.stack([each[1] for each in made])
    scales = scales if codes.dim() == 3 else scales[0]
    return FP8Parameter.from_codes(whole.view(codes.dtype), scales, recipe, held.dtype), 0


def may_regroup(recipe: Recipe, held: Held) -> bool:
    """Returns True for groups of 32 that a recipe's blocks may hold, if its parts end no block."""
    stored, ends = held.stored, held.shape[-2] // held.parts % BLOCK
    is_mx = (stored.form, stored.block) in (MXFP4, MXFP8)
    return is_mx and form_of(recipe) is Form.BLOCK and not (ends and held.parts > 1)


def padded(codes: torch.Tensor, parts: int) -> torch.Tensor:
    """Returns codes ``[experts, rows, cols]`` with zero rows after each of ``parts`` equal parts.

    Each part, such as a gate and an up projection, then has a multiple of 128 rows, so that no
    scaling block has rows of two parts. The added features stay zero in training. Codes that need
    no rows, or have one part, are returned unchanged.
    """
    missing = -(codes.shape[-2] // parts) % BLOCK
    if parts == 1 or not missing:
        return codes
    split = codes.view(torch.uint8).unflatten(-2, (parts, -1))
    return functional.pad(split, (0, 0, 0, missing)).flatten(-3, -2).view(codes.dtype)


def unpadded(codes: torch.Tensor, shape: tuple[int, ...], parts: int) -> torch.Tensor:
    """Returns codes of ``shape`` from which ``padded`` and ``pad_down_proj`` made these."""
    if codes.shape == shape:
        return codes
    split = codes.view(torch.uint8).unflatten(-2, (parts, -1))
    split = split[..., : shape[-2] // parts, : shape[-1]]
    return split.flatten(-3, -2).contiguous().view(codes.dtype)


def pad_down_proj(experts: Any, features: int) -> None:
    """Gives the second layer of experts as many input features as ``padded`` gives the first."""
    missing = -features % BLOCK
    weight = experts._parameters["down_proj"]
    if not missing or weight.shape[-1] != features:
        return
    if experts.has_bias:
        raise NotImplementedError(
            "from_fp8_checkpoint: experts must not have biases unless their features are a "
            f"multiple of {BLOCK}, got {features} features with biases"
        )
    more = nn.Parameter(widened_to(features + missing, weight.data), weight.requires_grad)
    experts.register_parameter("down_proj", more)


def widened_to(features: int, codes: torch.Tensor) -> torch.Tensor:
    """Returns codes, or values, with zeros after the last of their columns."""
    bits = codes.view(torch.uint8) if codes.dtype.itemsize == 1 else codes
    return functional.pad(bits, (0, features - codes.shape[-1])).view(codes.dtype)


def _cast_again(
    codes: torch.Tensor, scale: torch.Tensor, held: Held, recipe: Recipe
) -> FP8Parameter:
    """Returns the values cast by ``recipe``; if files can hold them, a matrix at a time."""
    made = []
    one_by_one = codes.dim() == 2 or form_of(recipe) is not None
    values = _matrices(codes, scale, held, form_of(recipe) is Form.BLOCK)
    for value in values if one_by_one else [torch.stack(list(values))]:
        weight = FP8Parameter.empty(tuple(value.shape), recipe, held.dtype, codes.device)
        weight.copy_(value)
        made.append(weight)
    if codes.dim() == 2 or not one_by_one:
        return made[0]
    data, scales = zip(*[weight.codes() for weight in made], strict=True)
    stack = torch.stack([each.view(torch.uint8) for each in data]).view(data[0].dtype)
    return FP8Parameter.from_codes(stack, torch.stack(scales), recipe, held.dtype)


def _matrices(
    codes: torch.Tensor, scale: torch.Tensor, held: Held, pad: bool
) -> Iterator[torch.Tensor]:
    """Yields the values of each matrix of a weight, float32, padded as ``padded`` does if asked."""
    stack = codes.dim() == 3
    whole, scales = (codes, scale) if stack else (codes[None], scale[None])
    for each, own in zip(whole, scales, strict=True):
        # The second layer's padding is not scaled.
        width = min(each.shape[1], held.shape[-1])
        parts = [
            decoded(part[:, :width], s, held.stored.block)
            for part, s in zip(each.chunk(held.parts), own.chunk(held.parts), strict=True)
        ]
        rows = -len(parts[0]) % BLOCK if stack and pad and len(parts) > 1 else 0
        cols = each.shape[1] - width
        yield torch.cat([functional.pad(part, (0, cols, 0, rows)) for part in parts])


def decoded(codes: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Returns codes times the scales of their blocks, float32 ``[rows, cols]``.

    Args:
        codes: FP8 ``[rows, cols]``.
        scale: float32 ``[ceil(rows / block[0]), ceil(cols / block[1])]``; or one that broadcasts,
            where ``block`` is 0 or 1.
        block: rows and columns that share a scale.
    """
    for dim, size in enumerate(block):
        if size > 1:
            scale = scale.repeat_interleave(size, dim).narrow(dim, 0, codes.shape[dim])
    return codes.float() * scale
