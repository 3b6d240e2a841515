"""Writing of values to FP8Parameters.

Values are cast, and data of other FP8Parameters copied. Casting the values of a weight with free
scales does not restore its data: there the elements that share a scale keep data and scale unless a
write changes one of them. An optimizer's step with a learning rate of 0 so leaves all bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from ...comm.collectives import max_over_ranks
from ...ops import multi_tensor
from ..scheme.base import Layout, layout_of
from ..tensor import QuantizedTensor
from .decode import quantizers_of, values
from .dispatch import KERNEL_DTYPES
from .fsdp_gather import shard_groups

HeldWeight = Any  # an FP8Parameter, whose file imports this one


def copy_all(weights: Sequence[HeldWeight], sources: Sequence[torch.Tensor]) -> None:
    """Copies each source to the weight at the same index, as ``copy_`` does, in few launches.

    Args:
        weights: the weights, stored in FP8 only.
        sources: tensors in the weights' shapes; floating-point values are quantized, FP8 data of
            the weight's own form is copied.

    Raises:
        NotImplementedError: a weight is a part of an ``FP8Parameter``, such as a slice.
        ValueError: there are not as many sources as weights.
    """
    shared: dict[Any, list[tuple[HeldWeight, torch.Tensor]]] = {}
    for weight, source in zip(weights, sources, strict=True):
        if not weight._writable and weight.numel():
            raise NotImplementedError(
                "FP8Parameter: only a whole weight can be written to, got a part of one"
            )
        if weight.device.type == "meta":
            continue
        weight._is_padded_shard = False
        if _is_of_form(weight, source):
            store(weight, source._held)  # type: ignore[attr-defined]
            continue
        groups = () if weight._layout.block_rows else shard_groups(weight)
        if groups:
            item = weight, _kernel_values(weight, source)
            shared.setdefault((weight.device, groups), []).append(item)
        elif weight.numel():
            _write(weight, source)
    for (_, groups), items in shared.items():
        _write_shards(items, groups)


def _write(weight: HeldWeight, source: Any) -> None:
    """Writes ``source`` to the data in place; quantizes it, or copies FP8 data that fit."""
    if isinstance(source, type(weight)):
        same_kind = source._recipe == weight._recipe and source._is_whole
        if same_kind and source.shape == weight._rowwise.shape:
            store(weight, source._held)
            return
    quantizer = quantizers_of(weight._recipe, weight.device).weight
    value = _kernel_values(weight, source)
    new = weight._layout.quantize(quantizer, value)
    store(weight, new, changed(weight, value) if weight._held.free else None)


def _write_shards(items: list[tuple[HeldWeight, torch.Tensor]], groups: tuple[Any, ...]) -> None:
    """Writes shards of weights with one scale each, whose amax values the ranks share."""
    amaxes = multi_tensor.amax([value for _, value in items])
    free = [changed(*item).float().view(1) for item in items if item[0]._held.free]
    amaxes = torch.cat([amaxes, *free])
    for group in groups:
        max_over_ranks(amaxes, group)
    amaxes, flags = amaxes.split((len(items), len(free)))
    following = iter(flags.split(1))
    for (weight, value), amax in zip(items, amaxes.split(1), strict=True):
        quantizer = quantizers_of(weight._recipe, weight.device).weight
        new = weight._layout.quantize_part(quantizer, value, amax)
        store(weight, new, next(following).view(1, 1) if weight._held.free else None)


def store(weight: HeldWeight, new: QuantizedTensor, changes: torch.Tensor | None = None) -> None:
    """Copies new rowwise FP8 data and scales into a weight, only where ``changes``, if given, is
    not 0.
    """
    held: QuantizedTensor = weight._held
    if new is held:
        return
    assert new.rowwise is not None
    assert new.rowwise_scale_inv is not None
    data, scale_inv = new.rowwise, new.rowwise_scale_inv
    if changes is None:
        weight._rowwise.copy_(data)
    else:
        assert held.rowwise_scale_inv is not None
        scale_inv = torch.where(of_scales(changes, scale_inv), scale_inv, held.rowwise_scale_inv)
        _store_changed(weight._rowwise, data, changes, layout_of(weight._recipe))
    weight._rowwise_scale_inv.copy_(scale_inv)
    held.columnwise = held.columnwise_scale_inv = None
    held.free = held.free or new.free


def _store_changed(
    kept: torch.Tensor, data: torch.Tensor, changes: torch.Tensor, layout: Layout
) -> None:
    """Copies FP8 data of blocks whose ``changes`` are not 0 to ``kept``, in one pass if whole."""
    kept, data = kept.view(torch.uint8), data.view(torch.uint8)
    if layout.block_rows and _has_whole_blocks(data.shape, layout):
        kept, data = by_block(kept, layout), by_block(data, layout)
        where = (changes != 0)[..., None, :, None]
    else:
        where = of_elements(changes, layout, data.shape)
    torch.where(where, data, kept, out=kept)


def _has_whole_blocks(shape: Sequence[int], layout: Layout) -> bool:
    """Returns True if ``by_block`` returns a view of a matrix or stack in ``shape``."""
    high, wide = layout.block_rows or shape[-2], layout.block_cols or shape[-1]
    return not (shape[-2] % max(high, 1) or shape[-1] % max(wide, 1))


def changed(weight: HeldWeight, value: torch.Tensor) -> torch.Tensor:
    """Returns flags ``[.., block rows, block columns]``: True if ``value`` changes an element."""
    layout = layout_of(weight._recipe)
    differs = values(weight._recipe, weight._held, value.dtype) != value
    if not layout.block_rows:  # perhaps of a rank without rows
        return differs.flatten(-2).any(-1)[..., None, None]
    return by_block(differs, layout).amax((-3, -1))


def by_block(x: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Returns a matrix or stack as ``[.., block row, row, block column, column]``, zeros added."""
    *count, rows, cols = x.shape
    high, wide = layout.block_rows or rows, layout.block_cols or cols
    down, across = -(-rows // high), -(-cols // wide)
    if not _has_whole_blocks(x.shape, layout):  # pad copies in any case
        x = functional.pad(x, (0, across * wide - cols, 0, down * high - rows))
    return x.view(*count, down, high, across, wide)


def of_scales(changes: torch.Tensor, scale_inv: torch.Tensor) -> torch.Tensor:
    """Returns flags ``[.., block rows, block columns]`` in the shape of held scales, as bools."""
    if changes.dim() > scale_inv.dim():  # one scale
        changes = changes.squeeze(-1)
    return functional.pad(changes != 0, (0, scale_inv.shape[-1] - changes.shape[-1]))


def of_elements(changes: torch.Tensor, layout: Layout, shape: Sequence[int]) -> torch.Tensor:
    """Returns flags ``[.., block rows, block columns]`` for each element, as bools."""
    flags = changes != 0
    if layout.block_rows:
        flags = flags.repeat_interleave(layout.block_rows, -2)[..., : shape[-2], :]
        width = layout.block_cols or shape[-1]
        flags = flags.repeat_interleave(width, -1)[..., : shape[-1]]
    return flags


def _is_of_form(weight: HeldWeight, source: Any) -> bool:
    """Returns True if ``source`` has free scales, which the weight can hold as they are."""
    if not isinstance(source, type(weight)) or not source._held.free:
        return False
    same = source._layout is weight._layout and source._held.dtype is weight._held.dtype
    return same and source._is_whole and source.shape == weight._rowwise.shape


def _kernel_values(weight: HeldWeight, source: Any) -> torch.Tensor:
    """Returns ``source`` as values that casts read, broadcast to the data's shape."""
    if isinstance(source, type(weight)):
        source = source._values(torch.float32)
    dtype = torch.float32 if source.dtype not in KERNEL_DTYPES else source.dtype
    value = source.to(weight.device, dtype).expand(weight.shape)
    return value.reshape(weight._rowwise.shape).contiguous()
