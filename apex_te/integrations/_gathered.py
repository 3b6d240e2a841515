"""Values of parameters that FSDP2 or transformers' expert parallelism has spread over ranks."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.nn import functional

from ..comm.collectives import all_gather_rows
from ..distributed.fsdp.sharded_weight import ShardedWeight
from ..fp8.parameter.decode import quantizers_of
from ..fp8.parameter.operands import dequantized
from ..fp8.parameter.parameter import FP8Parameter
from ..fp8.scheme.stack import stacked, stored_layout
from ..recipe import Recipe


class Gathered(NamedTuple):
    """Value of a parameter, plain or in FP8, or this rank's experts; ``first`` is their first."""

    value: torch.Tensor
    first: int = 0


def gathered(tensor: Any, recipe: Recipe | None, has_own_experts: bool) -> Gathered:
    """Returns the value of a parameter; collective if it is spread over ranks.

    Rows are gathered in FP8 if they are held so. With ``recipe`` each rank first quantizes its
    rows, if that gives the data and scales of the whole weight. With ``has_own_experts`` the ranks
    of the mesh's dimension "ep", or of a mesh of one dimension, keep their experts.
    """
    local = getattr(tensor, "_local_tensor", None)
    if local is None:
        return Gathered(tensor.detach())
    mesh, placements = tensor.device_mesh, tensor.placements
    local = local.plain() if type(local) is ShardedWeight else local.detach()
    if local.device.type != mesh.device_type:
        local = local.to(mesh.device_type)  # shards that are offloaded to the CPU
    names = mesh.mesh_dim_names or ()
    own, rows, first = None, tensor.shape[0], 0
    if has_own_experts:
        own = names.index("ep") if "ep" in names else 0
        rows //= mesh.size(own)
        first = rows * mesh.get_local_rank(own)
    split = [d for d, place in enumerate(placements) if not place.is_replicate() and d != own]
    if not split:
        return Gathered(local, first)
    if len(split) == 1 and getattr(placements[split[0]], "dim", None) == 0:
        return Gathered(_rows(local, rows, mesh.get_group(split[0]), recipe), first)
    if own is not None or type(local) is FP8Parameter:
        raise NotImplementedError(
            "fp8_tensors: model must have experts and FP8 weights that are split by rows over one "
            f"dimension of the mesh, got {placements} on {mesh}"
        )
    return Gathered(tensor.detach().full_tensor())


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
        if not block or _has_whole_blocks(rows, ranks, block):
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
