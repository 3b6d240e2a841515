"""Weights that FSDP2 gathers as FP8 data: what a shard sends, and the weight made of all shards."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed
from torch.nn import functional

from ...comm.shards import mesh_groups
from ..autocast import local
from ..scheme.stack import stored_layout
from ..tensor import QuantizedTensor

if TYPE_CHECKING:
    from ...recipe import Recipe

_checked: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


GatheredPart = Any  # an FP8Parameter, whose file imports this one


class Gathered:
    """Record of how a gathered weight was quantized; all aliases of the weight share it.

    Attributes:
        settings: ``Quantizer.settings``; None if the shards themselves are held in FP8.
        amax: fp32 ``[1]``, amax of this rank's shard, which a forward records for the next update;
            or None.
        group: process group of the ranks that have the shards; None for a single rank.
        stamp: value for ``joined``, equal for weights that were quantized with the same scale.
        source: object with ``is_outdated(scales)`` and the collective ``gather_again()``, which
            gathers the weight again once its scales are older than those of a region; None for
            schemes without state.
        reader: the quantizer that ``read_by`` last found to have equal settings, or None.
    """

    __slots__ = ("amax", "group", "name", "reader", "region", "scales", "settings", "source",
                 "stamp")  # fmt: skip

    def __init__(
        self,
        settings: tuple | None = None,
        name: str = "",
        amax: torch.Tensor | None = None,
        group: Any = None,
        stamp: Any = None,
        source: Any = None,
        scales: int = 0,
    ) -> None:
        self.settings = settings
        self.name = name
        self.amax = amax
        self.group = group
        self.stamp = stamp
        self.source = source
        self.scales = scales
        self.region = local.region
        self.reader: Any = None  # the quantizer that was found to make the same data

    def take(self, other: Gathered) -> None:
        """Takes over the attributes of ``other``, which belongs to a newer gather."""
        for name in self.__slots__:
            if name != "reader":
                setattr(self, name, getattr(other, name))

    def refresh(self) -> None:
        """Gathers the weight again, on all ranks, if FSDP2 gathered it before a scale update."""
        region = local.region
        if self.source is None or region is None or region is self.region or not region.in_fp8:
            return
        if self.source.is_outdated(self.scales):
            self.source.gather_again()
        self.region = region

    def read_by(self, quantizers: Any, forward: bool) -> None:
        """Checks that a GEMM can read the gathered data; a forward records the shard's amax."""
        if self.settings is None:
            return
        if forward:
            self.refresh()
        quantizer = quantizers.weight
        if quantizer is not self.reader:
            if quantizer.settings() != self.settings:
                raise ValueError(
                    "fp8_autocast: fp8_recipe must quantize weights as the recipe of "
                    f"enable_fp8_all_gather does, {self.name}, with which they were gathered; got "
                    f"{quantizer.settings()}, expected {self.settings}"
                )
            self.reader = quantizer
        if forward and self.amax is not None:
            quantizer.stage(self.amax, self.group)


def fsdp_groups() -> Iterator[Any]:
    """Yields all models' groups of parameters that FSDP2 gathers at once, by private attributes."""
    from torch.distributed import _composable_state

    for reference in list(_composable_state._module_state_mapping.values()):
        state: Any = reference()
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # torch 2.11 has one
            groups = [getattr(state, "_fsdp_param_group", None)]
        yield from (group for group in groups if group is not None)


def shard_groups(weight: GatheredPart) -> tuple[Any, ...]:
    """Returns the process groups, usually one, whose ranks hold the other shards of a weight."""
    if weight._shard_groups or weight._gathered is not None:
        return weight._shard_groups
    if not distributed.is_available() or not distributed.is_initialized():
        return ()
    for group in fsdp_groups():
        for part in group.fsdp_params:
            shard: Any = part.sharded_param
            if getattr(shard._local_tensor, "_held", None) is weight._held:
                weight._shard_groups = tuple(mesh_groups(shard))
                return weight._shard_groups
    return ()


def check_resharding(owner: str, module: torch.nn.Module | None) -> None:
    """Checks, once for each module, that FSDP2 does not reshard its weights to fewer ranks."""
    if module is None or module in _checked:
        return
    for group in fsdp_groups():
        if getattr(group, "_use_post_forward_mesh", False) and any(
            part._module_info.module is module for part in group.fsdp_params
        ):
            raise NotImplementedError(
                f"{owner}: reshard_after_forward of fully_shard must be a bool if weights are "
                "gathered as FP8 data, got an int"
            )
    _checked.add(module)


def shard_fp8_data(
    shard: GatheredPart, mesh: Any, outer_size: Any, module: Any, mp_policy: Any
) -> tuple:
    """Returns the tensors of an FP8 shard that FSDP2 is to gather, and a context.

    The data are uint8, padded to the same number of rows on each rank. For a weight with several
    scales, ``scale_inv`` follows; FSDP2 does not accept it with uneven shards.
    ``mp_policy.param_dtype`` becomes the nominal dtype. Errors are raised on all ranks.
    """
    check_resharding("FP8Parameter", module)
    layout, held = shard._layout, shard._held
    ranks = 1 if mesh is None else mesh.size()
    rows, *rest = shard.shape if mesh is None else outer_size
    block = layout.block_rows
    if list(shard.shape[1:]) != rest or (block and rows % ranks):
        equal = f", as many on each of {ranks} ranks with {layout.name}" if block else ""
        raise NotImplementedError(
            f"FP8Parameter: FSDP2 shards must be rows (dimension 0){equal}, got a weight of "
            f"{list(outer_size)}"
        )
    if block and shard.shape[0] % block:
        raise NotImplementedError(
            f"FP8Parameter: FSDP2 shards must be of whole blocks, got {list(shard.shape)} "
            f"with {layout.name}"
        )
    fp8_data, most = shard._rowwise.view(torch.uint8), -(-rows // ranks)
    if shard.shape[0] != most:
        fp8_data = functional.pad(fp8_data, (0, 0, 0, most - shard.shape[0]))
    dtype = getattr(mp_policy, "param_dtype", None)
    context = (shard._recipe, shard.dtype if dtype is None else dtype, held.dtype, rows)
    return (fp8_data, shard._rowwise_scale_inv) if block else (fp8_data,), context


def gathered_fp8_data(
    shard: GatheredPart, outputs: tuple[torch.Tensor, ...], context: Any
) -> tuple[QuantizedTensor, Recipe, torch.dtype]:
    """Returns the rowwise copy, recipe and nominal dtype of the weight made of all shards."""
    recipe, dtype, fp8_dtype, rows = context
    layout = stored_layout(recipe, outputs[0].dim())
    # All shards have one scale, or, with one rank, FSDP2 hands over the first tensor only.
    scale_inv = outputs[1] if len(outputs) > 1 else shard._rowwise_scale_inv
    held = layout.gathered(outputs[0][:rows].view(fp8_dtype), scale_inv, fp8_dtype)
    return held, recipe, dtype


def replace(weight: Any, held: QuantizedTensor, gathered: Gathered) -> None:
    """Replaces the data of a weight of an earlier gather, and of its aliases, by a new gather's."""
    whole: GatheredPart = getattr(weight, "_local_tensor", weight)
    target = whole._held
    target.rowwise, target.rowwise_scale_inv = held.rowwise, held.rowwise_scale_inv
    target.columnwise = target.columnwise_scale_inv = None
    assert whole._gathered is not None
    whole._gathered.take(gathered)


def joined(parts: Sequence[GatheredPart]) -> tuple[QuantizedTensor, Gathered] | None:
    """Joins the rows of gathered weights, in the order of ``parts``; None if FP8 cannot be kept."""
    first = parts[0]
    if any(p._gathered is None or not p._is_whole for p in parts):
        return None
    if any(p._recipe != first._recipe or p.dtype is not first.dtype for p in parts):
        return None
    notes: list[Gathered] = [p._gathered for p in parts]
    if any(note.settings is None for note in notes):
        return None
    for note in notes:
        note.refresh()
    held = first._layout.joined([p._held for p in parts])
    if held is None or any(note.stamp != notes[0].stamp for note in notes):
        raise NotImplementedError(
            "enable_fp8_all_gather: the parts of a weight must be of whole blocks and in one "
            f"group of fully_shard, got parts of {[list(p.shape) for p in parts]}"
        )
    note = Gathered(notes[0].settings, notes[0].name, None, notes[0].group, notes[0].stamp)
    amaxes = [n.amax for n in notes if n.amax is not None]
    if amaxes:
        note.amax = torch.cat(amaxes).amax(0, keepdim=True)
    return held, note
