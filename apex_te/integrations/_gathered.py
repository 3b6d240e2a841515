"""Values of parameters that FSDP2, tensor or transformers' expert parallelism has spread."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn import functional

from ..comm.collectives import all_gather_rows
from ..distributed.fsdp.sharded_weight import ShardedWeight
from ..fp8.parameter.decode import quantizers_of
from ..fp8.parameter.operands import dequantized
from ..fp8.parameter.parameter import FP8Parameter
from ..fp8.scheme.stack import stacked, stored_layout
from ..recipe import BlockScaling, Recipe, RowwiseScaling

if TYPE_CHECKING:
    from ..distributed.state_dict.split_model import Split
    from ..distributed.state_dict.split_tensor import Parts

BLOCK = 128


class Gathered(NamedTuple):
    """Value of a parameter, plain or in FP8, or this rank's experts; ``first`` is their first."""

    value: torch.Tensor
    first: int = 0


def gathered(
    tensor: Any, recipe: Recipe | None, has_own_experts: bool, split: Split | None = None
) -> Gathered:
    """Returns the value of a parameter; collective if it is spread over ranks.

    Parts are gathered in FP8 if they are held so. With ``recipe`` each rank first quantizes its
    part, if that gives the data and scales of the whole weight. With ``has_own_experts`` the ranks
    of the mesh's dimension "ep", or of a mesh of one dimension, keep their experts. ``split`` tells
    how a ``tp_group`` splits the parameter.
    """
    found = _unsharded(tensor, recipe, has_own_experts)
    return found if split is None else Gathered(_joined(found.value, split, recipe))


def _unsharded(tensor: Any, recipe: Recipe | None, has_own_experts: bool) -> Gathered:
    """Returns a plain parameter's value, or a DTensor's."""
    local = getattr(tensor, "_local_tensor", None)
    if local is None:
        return Gathered(tensor.detach())
    mesh, placements = tensor.device_mesh, tensor.placements
    local = local.plain() if type(local) is ShardedWeight else local.detach()
    if local.device.type != mesh.device_type:
        local = local.to(mesh.device_type)  # shards that are offloaded to the CPU
    names = mesh.mesh_dim_names or ()
    own, rows, first = None, tensor.shape[0] if tensor.dim() else 1, 0
    if has_own_experts:
        own = names.index("ep") if "ep" in names else 0
        rows //= mesh.size(own)
        first = rows * mesh.get_local_rank(own)
    split = [d for d, place in enumerate(placements) if not place.is_replicate() and d != own]
    # FSDP2 splits what other ranks have a part of, and so do later dimensions of a mesh.
    split.sort(key=lambda d: (not hasattr(placements[d], "split_factor"), -d))
    outer = math.prod(mesh.size(d) for d in split[1:])
    if all(getattr(placements[d], "dim", None) == 0 for d in split) and rows % outer == 0:
        for d, later in itertools.zip_longest(split, split[1:]):
            local = _rows(local, rows // outer, mesh.get_group(d), recipe)
            outer //= 1 if later is None else mesh.size(later)
        return Gathered(local, first)
    if own is not None or type(local) is FP8Parameter:
        raise NotImplementedError(
            "entries: model must have experts and FP8 weights that are split by rows, got "
            f"{placements} on {mesh}"
        )
    return Gathered(tensor.detach().full_tensor())


def _joined(part: torch.Tensor, split: Split, recipe: Recipe | None) -> torch.Tensor:
    """Returns the parameter whose part on this rank of a ``tp_group`` is ``part``."""
    parts = [split.parts(part.shape[split.dim], rank) for rank in range(split.ranks)]
    own = part.recipe if type(part) is FP8Parameter else recipe
    of_scales = _places_of_scales(parts, split.dim, own) if part.dim() == 2 else []
    if of_scales:
        if type(part) is not FP8Parameter:
            assert recipe is not None
            part = _quantized(part, recipe)
        codes, scale_inv = part.codes()
        whole = _placed(codes.view(torch.uint8), parts, split.group).view(codes.dtype)
        scale_inv = _placed(scale_inv, of_scales, split.group)
        return FP8Parameter.from_codes(whole, scale_inv, part.recipe, part.dtype)
    return _placed(dequantized(part), parts, split.group)  # other scales are those of the parts


def _places_of_scales(parts: list[Parts], dim: int, recipe: Recipe | None) -> list[Parts]:
    """Returns where the parts' scales are among a weight's; empty if it has others than these."""
    if isinstance(recipe, RowwiseScaling):
        return parts if dim == 0 else []
    if not isinstance(recipe, BlockScaling):
        return []
    found = [each.in_blocks(BLOCK) for each in parts]
    return [each for each in found if each is not None] if all(found) else []


def _placed(part: torch.Tensor, places: list[Parts], group: Any) -> torch.Tensor:
    """Returns the tensor whose part on each rank belongs to one of ``places``."""
    every = all_gather_rows(part, group).wait().unflatten(0, (len(places), -1))
    whole = part.new_empty(places[0].whole_shape(part.shape))
    for own, place in zip(every, places, strict=True):
        for first, length, at in place.pieces:
            piece = own.narrow(place.dim, first, length)
            whole.narrow(place.dim, at, length).copy_(piece)
    return whole


def _rows(local: torch.Tensor, rows: int, group: Any, recipe: Recipe | None) -> torch.Tensor:
    """Returns the weight of ``rows`` rows whose part on this rank is ``local``."""
    ranks = torch.distributed.get_world_size(group)
    if recipe is not None and type(local) is not FP8Parameter and local.dim() in (2, 3):
        layout = stored_layout(recipe, local.dim())
        if layout.block_rows and _has_whole_blocks(rows, ranks, layout.block_rows):
            local = _quantized(local, recipe)
    if type(local) is FP8Parameter:
        layout = stored_layout(local.recipe, local.dim())
        block = layout.block_rows
        if block < 2 or _has_whole_blocks(rows, ranks, block):
            held, scale_inv = local._held, local._rowwise_scale_inv
            codes = _all_gather(local._rowwise, rows, group)
            if block:
                scale_inv = _all_gather(scale_inv, rows // block, group)
            whole = layout.gathered(codes, scale_inv, held.dtype)
            return FP8Parameter(whole, local.recipe, local.dtype)
    return _all_gather(dequantized(local), rows, group)


def _has_whole_blocks(rows: int, ranks: int, block: int) -> bool:
    return rows % (ranks * block) == 0


def _quantized(x: torch.Tensor, recipe: Recipe) -> FP8Parameter:
    """Returns rows of a matrix, or matrices of a stack, quantized as for a GEMM."""
    quantizer = quantizers_of(recipe, x.device).weight
    matrices = x.contiguous().unbind(0) if x.dim() == 3 else (x.contiguous(),)
    made = [quantizer.quantize(each, True, False)[0] for each in matrices]
    held = stacked(made) if x.dim() == 3 else made[0]
    assert held.rowwise is not None
    held.rowwise = held.rowwise.view(held.dtype)
    return FP8Parameter(held, recipe, x.dtype)


def _all_gather(part: torch.Tensor, rows: int, group: Any) -> torch.Tensor:
    """Returns the first ``rows`` rows of all ranks' parts, which are padded to equally many."""
    most = -(-rows // torch.distributed.get_world_size(group))
    if len(part) != most:
        plain = part.view(torch.uint8) if part.element_size() == 1 else part
        pad = functional.pad(plain, (0, 0) * (part.dim() - 1) + (0, most - len(part)))
        part = pad.view(part.dtype)
    return all_gather_rows(part, group).wait()[:rows]
