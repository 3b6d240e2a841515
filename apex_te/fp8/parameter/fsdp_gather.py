"""Weights that FSDP2 gathers as FP8 data: what a shard sends, and the weight made of all shards."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ..scheme.base import layout_of
from ..tensor import QuantizedTensor

if TYPE_CHECKING:
    from ...recipe import Recipe
    from ..scheme import GemmQuantizers
    from ..scheme.base import Layout

__all__ = [
    "Gathered", "GatheredPart", "check_resharding", "fsdp_groups", "gathered_fp8_data", "joined",
    "replace", "shard_fp8_data",
]  # fmt: skip

_checked: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


class Gathered:
    """Origin of a weight that was made of gathered FP8 data; aliases of the weight share it.

    Attributes:
        settings: of the quantizer that made the data (``Quantizer.settings``); None where the
            shards themselves hold the weight in FP8, and nothing else is to be quantized.
        name: of that quantizer's recipe.
        amax: fp32 ``[1]``, of this rank's shard, for schemes that stage it; else None.
        group: the ranks that have the shards, or None where there is one.
        stamp: equal for parts of one weight that have one scale.
    """

    __slots__ = ("amax", "group", "name", "reader", "settings", "stamp")

    def __init__(
        self,
        settings: tuple | None = None,
        name: str = "",
        amax: torch.Tensor | None = None,
        group: Any = None,
        stamp: Any = None,
    ) -> None:
        self.settings = settings
        self.name = name
        self.amax = amax
        self.group = group
        self.stamp = stamp
        self.reader: Any = None  # the quantizer that was found to make the same data

    def take(self, other: Gathered) -> None:
        """Takes the values of ``other``, of a later gather."""
        self.settings, self.name, self.amax = other.settings, other.name, other.amax
        self.group, self.stamp = other.group, other.stamp

    def read_by(self, quantizers: GemmQuantizers, forward: bool) -> None:
        """Checks that a GEMM of ``quantizers`` can read the data; a forward stages their amax.

        Raises:
            ValueError: the quantizer would make other data of the weight.
        """
        if self.settings is None:
            return
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


class GatheredPart(Protocol):
    """A weight held in FP8 of which FSDP2 gathers the shards, or that it has gathered."""

    _held: QuantizedTensor
    _recipe: Recipe
    _is_matrix: bool
    _gathered: Gathered | None
    dtype: torch.dtype
    shape: torch.Size

    @property
    def _layout(self) -> Layout: ...


def fsdp_groups() -> Iterator[Any]:
    """Yields the parameter groups that FSDP2 gathers at once, of all models.

    torch has no public way to ask.
    """
    from torch.distributed import _composable_state

    for reference in list(_composable_state._module_state_mapping.values()):
        state: Any = reference()
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # torch 2.11 has one
            groups = [getattr(state, "_fsdp_param_group", None)]
        yield from (group for group in groups if group is not None)


def check_resharding(owner: str, module: torch.nn.Module | None) -> None:
    """Checks, once, that FSDP2 frees or keeps the gathered weights of ``module`` after a forward.

    Raises:
        NotImplementedError: FSDP2 is to spread them over fewer ranks, where it would take the FP8
            data for values. On all ranks and before anything is gathered.
    """
    if module is None or module in _checked:
        return
    for group in fsdp_groups():
        if getattr(group, "_use_post_forward_mesh", False) and any(
            part._module_info.module is module for part in group.fsdp_params
        ):
            raise NotImplementedError(
                f"{owner}: reshard_after_forward of fully_shard must be a bool where weights are "
                "gathered as codes, got an int"
            )
    _checked.add(module)


def shard_fp8_data(
    shard: GatheredPart, mesh: Any, outer_size: Any, module: Any, mp_policy: Any
) -> tuple:
    """Gives FSDP2 what it gathers of a shard that is held in FP8.

    Returns:
        ``((fp8_data, scale_inv), context)``: the data as bytes, their ``scale_inv``, and what
        ``gathered_fp8_data`` needs besides.

    Raises:
        NotImplementedError: on all ranks, for shards that are not rows, as many on each rank and
            in whole blocks, and for a ``reshard_after_forward`` that is an int.
    """
    check_resharding("FP8Parameter", module)
    layout, held = shard._layout, shard._held
    assert held.rowwise is not None
    assert held.rowwise_scale_inv is not None
    if mesh is not None and tuple(outer_size) != (shard.shape[0] * mesh.size(), shard.shape[1]):
        raise NotImplementedError(
            "FP8Parameter: FSDP2 shards must be rows (dimension 0), as many on each of the "
            f"{mesh.size()} ranks, got a weight of {list(outer_size)}"
        )
    if layout.block_rows and shard.shape[0] % layout.block_rows:
        raise NotImplementedError(
            f"FP8Parameter: FSDP2 shards must be of whole blocks, got {list(shard.shape)} "
            f"with {layout.name}"
        )
    dtype = getattr(mp_policy, "param_dtype", None)
    context = (shard._recipe, shard.dtype if dtype is None else dtype, held.dtype)
    return (held.rowwise.view(torch.uint8), held.rowwise_scale_inv), context


def gathered_fp8_data(
    shard: GatheredPart, outputs: tuple[torch.Tensor, ...], context: Any
) -> tuple[QuantizedTensor, Recipe, torch.dtype]:
    """Puts shards that are held in FP8 together.

    Returns:
        ``(held, recipe, dtype)``: the whole weight's rowwise copy, its recipe and nominal dtype.
    """
    recipe, dtype, fp8_dtype = context
    # With one rank FSDP2 hands over the first tensor only.
    scale_inv = outputs[1] if len(outputs) > 1 else shard._held.rowwise_scale_inv
    assert scale_inv is not None
    held = layout_of(recipe).gathered(outputs[0].view(fp8_dtype), scale_inv, fp8_dtype)
    return held, recipe, dtype


def replace(weight: Any, held: QuantizedTensor, gathered: Gathered) -> None:
    """Gives the whole ``weight`` of an earlier gather, and its aliases, the data of a new one."""
    whole: GatheredPart = getattr(weight, "_local_tensor", weight)
    target = whole._held
    target.rowwise, target.rowwise_scale_inv = held.rowwise, held.rowwise_scale_inv
    target.columnwise = target.columnwise_scale_inv = None
    assert whole._gathered is not None
    whole._gathered.take(gathered)


def joined(parts: Sequence[GatheredPart]) -> tuple[QuantizedTensor, Gathered] | None:
    """Joins the rows of gathered ``parts`` to one weight.

    Returns:
        ``(held, origin)``: the rowwise copy and its origin; None for parts of several recipes.

    Raises:
        NotImplementedError: the scales of the parts differ.
    """
    first = parts[0]
    if any(p._gathered is None or not p._is_matrix for p in parts):
        return None
    if any(p._recipe != first._recipe or p.dtype is not first.dtype for p in parts):
        return None
    notes: list[Gathered] = [p._gathered for p in parts]  # type: ignore[misc]
    if any(note.settings is None for note in notes):
        return None
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
