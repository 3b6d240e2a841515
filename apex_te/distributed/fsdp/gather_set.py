"""Weights that FSDP2 gathers as FP8 data: their shards, quantizers and scales.

A ``GatherSet`` holds the weights of one call of ``enable_fp8_all_gather``, a ``GatherUnit`` is the
weight of one GEMM, and a ``GatheredParam`` is one parameter of it.
"""

from __future__ import annotations

import weakref
from typing import Any, cast

import torch

from ...comm.collectives import max_over_ranks
from ...fp8.autocast import local
from ...fp8.delayed.registry import intern
from ...fp8.parameter.decode import quantizers_of
from ...fp8.parameter.fsdp_gather import Gathered
from ...fp8.scheme.base import layout_of, stored_recipe
from ...ops import multi_tensor
from ...recipe import Recipe
from .sharded_weight import ShardedWeight, local_of

__all__ = ["GatherSet", "GatherUnit", "GatheredParam"]


class GatheredParam:
    """A parameter that is gathered as FP8 data.

    Attributes:
        unit: the weight that it is all or a part of.
        name: its name in the unit's module.
        changes: number of times that torch wrote to it, the same on all ranks.
        seen: its ``version()`` when the unit's amax was measured.
        ready: what the next gather sends of it, if that was made with other parameters.
        size: its shape over all ranks, as the last gather said.
        mesh: ranks that have its shards, as the last gather said; ``ranks`` is their number.
        group: process group of ``mesh``; None for one rank.
    """

    def __init__(self, unit: GatherUnit, name: str) -> None:
        self.unit = unit
        self.name = name
        self.changes = 0
        self.seen: tuple[int, int] | None = None
        self.ready: Any = None
        self.size: Any = None
        self.ranks = 1
        self.mesh: Any = None
        self.group: Any = None

    def parameter(self) -> Any:
        """Returns the parameter that the module has now; None for a module that is gone."""
        module = self.unit.module()
        return None if module is None else module._parameters.get(self.name)

    def shard(self) -> ShardedWeight | None:
        """Returns this rank's rows; None while the module has all rows."""
        shard = local_of(self.parameter())
        return cast(ShardedWeight, shard) if type(shard) is ShardedWeight else None

    def version(self) -> tuple[int, int] | None:
        """Returns a stamp of this rank's rows that changes when their values do."""
        shard = self.shard()
        return self.seen if shard is None else (self.changes, shard._version)


class GatherUnit:
    """The weight of one GEMM: the parameters that share its scale.

    Attributes:
        amax: of all shards, for schemes that make the scale of it.
        taken: the pass over amaxes of which the state has made its first scale.
        scales: version of the state's scales that FSDP2's stream of copies waited for.
    """

    def __init__(self, gather_set: GatherSet, module: torch.nn.Module, gemm: int) -> None:
        self.gather_set = gather_set
        self.module = weakref.ref(module)
        self.gemm = gemm
        self.params: list[GatheredParam] = []
        self.amax: torch.Tensor | None = None
        self.taken = 0
        self.scales = -1

    def is_measured(self) -> bool:
        """Returns True if ``amax`` is that of the weight's values now."""
        return self.amax is not None and all(
            param.seen is not None and param.version() == param.seen for param in self.params
        )

    def quantizer(self, device: torch.device) -> tuple[Any, bool]:
        """Finds the quantizer of the weight now.

        Returns:
            The quantizer, and True if the scale that it makes of an amax is to be kept.
        """
        gather_set, region = self.gather_set, local.region
        keep = region is None or region.records or not region.in_fp8
        if not gather_set.recipe.keeps_state:
            return quantizers_of(gather_set.recipe, device).weight, keep
        state = self._state()
        key, recipe = gather_set.key, gather_set.recipe
        if region is not None and region.in_fp8 and region.recipe.keeps_state:
            key, recipe = region.recipe_key, region.recipe
        elif state.recipe is not None:
            key, recipe = intern(state.recipe)
        module: Any = self.module()
        sets = module._fp8.quantizers(key, recipe, device, keep and region is not None)
        if device.type == "cuda":
            gather_set.wait_for_scales(self)
        self.scales = state.scale_fwd._version
        return sets.recording[self.gemm].weight, keep

    def quantized(
        self, param: GatheredParam, x: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, Gathered]:
        """Casts the shard ``x`` of ``param``.

        Returns:
            FP8 data, ``scale_inv``, and the note that the gathered weight carries.
        """
        keeps_state = self.gather_set.recipe.keeps_state
        quantizer, keep = self.quantizer(x.device)
        amax = None
        if quantizer.needs_whole_amax():
            amax = self.gather_set.amax_of(param, x.device)
            if keeps_state and keep:
                # The parameters of a weight make one scale of it.
                amax = None if self.taken == self.gather_set.passes else amax
                self.taken = self.gather_set.passes
            if amax is not None:
                amax = amax.to(x.dtype).float()  # of the values that are cast
        fp8_data, scale_inv, own = quantizer.quantize_rows(x, amax, keep)
        if keeps_state:
            self.scales = self._state().scale_fwd._version
        return fp8_data, scale_inv, self.note(quantizer, own, param.group)

    def note(self, quantizer: Any, amax: torch.Tensor | None, group: Any) -> Gathered:
        """Returns the note that goes with FP8 data of ``quantizer``."""
        stamp = (id(self), self.gather_set.passes, self.scales)
        return Gathered(quantizer.settings(), self.gather_set.name, amax, group, stamp)

    def _state(self) -> Any:
        module: Any = self.module()
        return module.fp8_state


class GatherSet:
    """All weights of one call of ``enable_fp8_all_gather``.

    Attributes:
        units: the weights, in the order of the model.
        passes: number of passes over the amaxes of the weights.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.key, self.recipe = intern(recipe)
        self.stored = stored_recipe(recipe)
        self.layout = layout_of(self.stored)
        self.name = f"{type(recipe).__name__}({cast(Any, recipe).fp8_format.name})"
        self.units: list[GatherUnit] = []
        self.passes = 0

    def wait_for_scales(self, unit: GatherUnit) -> None:
        """Has FSDP2's stream of copies see a scale update that the stream of GEMMs ran.

        FSDP2 lets it wait as a forward begins; a region may be entered later.
        """
        if unit.scales == unit._state().scale_fwd._version:
            return
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
        for other in self.units:
            owner: Any = other.module()
            if owner is not None and owner.fp8_state.allocated:
                other.scales = owner.fp8_state.scale_fwd._version

    def amax_of(self, param: GatheredParam, device: torch.device) -> torch.Tensor:
        """Returns the amax of the whole weight of ``param``; measures all weights if it changed.

        The ranks decide alike: they count the writes of the same code. Writes to the storage alone
        show in versions, but not where a rank has no rows; there any weight's version counts.
        """
        unit, ranks = param.unit, 1 if param.group is None else param.group.size()
        rows = -(-param.size[0] // ranks)
        some_are_empty = rows * (ranks - 1) >= param.size[0]
        units = self.units if some_are_empty and ranks > 1 else (unit,)
        if not all(other.is_measured() for other in units):
            self._measure(param, device)
        assert unit.amax is not None
        return unit.amax

    def _measure(self, param: GatheredParam, device: torch.device) -> None:
        """Takes one pass over this rank's shards and one collective over the ranks of ``param``."""
        mesh = param.parameter().device_mesh
        shards: list[torch.Tensor] = []
        measured: list[tuple[GatherUnit, int, int]] = []
        for unit in self.units:
            start = len(shards)
            for other in unit.params:
                shard = other.shard()
                if shard is not None and other.parameter().device_mesh == mesh:
                    shards.append(shard.plain())
                    other.seen = other.version()
            if len(shards) > start:
                measured.append((unit, start, len(shards)))
        amaxes = multi_tensor.amax(shards).to(device)
        if param.group is not None:
            max_over_ranks(amaxes, param.group)
        self.passes += 1
        for unit, start, end in measured:
            own = amaxes[start:end]
            unit.amax = own if end - start == 1 else own.amax(0, keepdim=True)
