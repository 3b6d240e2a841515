"""Bookkeeping for weights that FSDP2 gathers as FP8 data: shards, quantizers, amax values and
scales.

A ``GatherSet`` holds the weights of one call of ``enable_fp8_all_gather``. A ``GatherUnit`` is the
weight of one GEMM, and a ``GatheredParam`` one of the parameters that make up this weight. A
``GatherGroup`` quantizes all parameters of one all-gather in one kernel launch.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, cast

import torch

from ...comm.collectives import max_over_ranks
from ...fp8.autocast import local
from ...fp8.delayed.ranks import intern
from ...fp8.parameter.decode import quantizers_of
from ...fp8.parameter.fsdp_gather import Gathered, fsdp_groups
from ...fp8.scheme.base import layout_of, stored_recipe
from ...fp8.scheme.observed import ObservedQuantizer
from ...ops import multi_tensor
from ...recipe import Recipe
from .sharded_weight import ShardedWeight, local_of


class GatheredParam:
    """State of one parameter of a module that FSDP2 gathers as FP8 data.

    Attributes:
        changes: number of ops that wrote to the parameter, equal on all ranks.
        seen: ``version()`` when the unit's amax was last computed; None before.
        ready: ``(inputs, context)`` for the next gather if a ``GatherGroup`` has made it, or None.
        size: shape ``[rows, cols]`` of the whole parameter; None before the first gather.
        mesh: device mesh over which it is sharded; None before the first gather.
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
        """Returns the module's present parameter of this name; None if the module was deleted."""
        module = self.unit.module()
        return None if module is None else module._parameters.get(self.name)

    def shard(self) -> ShardedWeight | None:
        """Returns this rank's rows in bf16 or fp32; None while the module has all rows."""
        shard = local_of(self.parameter())
        return cast(ShardedWeight, shard) if type(shard) is ShardedWeight else None

    def version(self) -> tuple[int, int] | None:
        """Returns a stamp that changes when this rank's rows are written to."""
        shard = self.shard()
        return self.seen if shard is None else (self.changes, shard._version)


class GatherUnit:
    """Weight of one GEMM for FSDP2's gathers in FP8: its parameters, amax and scale versions.

    Attributes:
        params: parameters that share one scale; their rows, one after the other, are the weight.
        amax: fp32 ``[1]`` of the whole weight, over all ranks; None before it was first computed,
            and for recipes whose scales do not need it.
        taken: ``gather_set.passes`` when delayed scaling made a first scale from ``amax``; else 0.
        scales: version counter of ``fp8_state.scale_fwd``; writes to that tensor up to this version
            come before all further work on FSDP2's copy stream. -1 at first.
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
        """Returns True if the weight was not written to since ``amax`` was computed."""
        return self.amax is not None and all(
            param.seen is not None and param.version() == param.seen for param in self.params
        )

    def quantizer(self, device: torch.device) -> tuple[Any, bool]:
        """Returns the current region's quantizer of the weight, and ``keep`` for ``quantize_rows``.

        If ``keep``, a first scale that the cast computes is stored in the module's FP8 state. It is
        False in a region that records no amax values.
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
        return (sets.recording if keep else sets.frozen)[self.gemm].weight, keep

    def quantized(
        self, param: GatheredParam, x: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, Gathered]:
        """Casts this rank's rows ``x`` of one parameter with the scale of the whole weight."""
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
        """Returns the origin that a gathered parameter of this weight carries."""
        stamp = (id(self), self.gather_set.passes, self.scales)
        source = self if self.gather_set.recipe.keeps_state else None
        return Gathered(
            quantizer.settings(), self.gather_set.name, amax, group, stamp, source, self.scales
        )

    def is_outdated(self, scales: int) -> bool:
        """Returns True if scales were written after version ``scales``, or are about to be."""
        state = self._state()
        if state.scale_fwd._version != scales:
            return True
        return self.quantizer(state.device)[0].needs_whole_amax()  # the first scale

    def gather_again(self) -> None:
        """Makes FSDP2 gather again the parameters that it gathered together with this weight's."""
        module, names = self.module(), {param.name for param in self.params}
        for group in fsdp_groups():
            infos = [parameter._module_info for parameter in group.fsdp_params]
            if any(info.module is module and info.param_name in names for info in infos):
                group._to_sharded()
                group.unshard()
                group.wait_for_unshard()

    def _state(self) -> Any:
        module: Any = self.module()
        return module.fp8_state


class GatherSet:
    """State of all weights of one call of ``enable_fp8_all_gather``.

    Attributes:
        stored: recipe of the ``FP8Parameter``s that gathered weights become; ``layout`` is their
            layout.
        units: the weights, in the order of the model.
        passes: number of times that the amax values of all weights were computed.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.key, self.recipe = intern(recipe)
        self.stored = stored_recipe(recipe)
        self.layout = layout_of(self.stored)
        self.name = f"{type(recipe).__name__}({cast(Any, recipe).fp8_format.name})"
        self.units: list[GatherUnit] = []
        self.passes = 0

    def wait_for_scales(self, unit: GatherUnit) -> None:
        """Makes FSDP2's copy stream, the current one, wait for an update of the scales."""
        if unit.scales == unit._state().scale_fwd._version:
            return
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
        for other in self.units:
            owner: Any = other.module()
            if owner is not None and owner.fp8_state.allocated:
                other.scales = owner.fp8_state.scale_fwd._version

    def amax_of(self, param: GatheredParam, device: torch.device) -> torch.Tensor:
        """Returns the amax, fp32 ``[1]``, of the whole weight that contains ``param``.

        After a write to the weight this is collective: the amax values of all weights are computed.
        All ranks decide alike, as all run the same ops. The version counter of a rank without rows
        of a weight shows no write to storage. So if there is such a rank, a write to any weight
        counts.
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
        """Computes the amax of every weight on the mesh of ``param`` in one collective."""
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


_ALIGNED = 4  # numbers between values of scale_inv, which GEMMs read at 16 bytes


def params_gathered_with(param: GatheredParam) -> list[GatheredParam]:
    """Returns the parameters that FSDP2 gathers in one all-gather with ``param``, in its order."""
    module = param.unit.module()
    for group in fsdp_groups():
        infos = [parameter._module_info for parameter in group.fsdp_params]
        if any(info.module is module and info.param_name == param.name for info in infos):
            found = []
            for info in infos:
                modes = getattr(info.module, "_modes", None)
                other = None if modes is None else modes.gathered.get(info.param_name)
                if other is not None and other.unit.gather_set is param.unit.gather_set:
                    found.append(other)
            return found
    return [param]


class GatherGroup:
    """Parameters that FSDP2 gathers together and that are quantized in one launch.

    FSDP2 calls their hooks one by one before each gather; the first hook quantizes all of them.
    Gathers reuse scales and contexts until a weight or a scale changes, so they allocate no tensor
    that two streams use. That memory belongs to FSDP2's copy stream. This stream waits for GEMMs
    before it reads changed weights, so it never overwrites data that a GEMM still reads.
    """

    def __init__(self, params: list[GatheredParam]) -> None:
        self.params = params
        self._token: list[Any] = []  # stamp of what the scales were made of
        self._scales: Sequence[torch.Tensor] = ()
        self._contexts: list[Any] = []
        self._outlived: list[Any] = []  # the contexts before
        self._made: tuple[Any, Any] | None = None  # stream, and event at which they are there

    def quantize(self, first: torch.Tensor, dtype: torch.dtype | None) -> bool:
        """Quantizes this rank's rows of all parameters into ``ready`` of each parameter."""
        shards = self._shards(first)
        if shards is None:
            return False
        device, gather_set = first.device, self.params[0].unit.gather_set
        keeps_state = gather_set.recipe.keeps_state
        quantizers = [_quantizer(param, device) for param in self.params]
        token: list[Any] = [
            (quantizer, param.unit.scales, param.changes, shard._version)
            for quantizer, param, shard in zip(quantizers, self.params, shards, strict=True)
        ]
        amaxes = None
        if not keeps_state and quantizers[0].needs_whole_amax():  # blocks have their own
            amaxes = [gather_set.amax_of(p, device) for p in self.params]
        token += [dtype, gather_set.passes]
        is_new = token != self._token
        if is_new and not self._renew(quantizers, amaxes, dtype or first.dtype, device):
            return False
        values: Sequence[torch.Tensor] = shards
        if dtype is not None and dtype is not first.dtype:
            values = _cast(shards, dtype)
        sent = self._fp8_data(values, quantizers[0].dtype, is_new and keeps_state)
        self._token = token
        if first.is_cuda:
            self._order(is_new)
        for param, fp8_data, context in zip(self.params, sent, self._contexts, strict=True):
            context[0].region = local.region
            param.ready = ((fp8_data,), context)
        return True

    def _shards(self, first: torch.Tensor) -> list[ShardedWeight] | None:
        """Returns this rank's rows of each parameter, and resets all ``ready`` to None.

        Returns None if one launch cannot quantize them: this rank's shard of a parameter is
        empty, a parameter was never gathered, or ``first`` is not the first shard.
        """
        shards = []
        for param in self.params:
            param.ready = None
            shard = param.shard()
            if shard is None or param.size is None or not shard.numel():
                return None
            shards.append(shard)
        return shards if shards[0] is first else None  # a copy may be on another device

    def _renew(
        self,
        quantizers: list[Any],
        amaxes: list[torch.Tensor] | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> bool:
        """Computes scales and contexts anew; False if parameters must be quantized one by one."""
        params = self.params
        of_values = None if amaxes is None else torch.cat(amaxes).to(dtype).float()
        made = quantizers[0].scales_of_rows(quantizers, of_values)
        self._token = []
        if made is None:
            return False
        self._scales, inverses = made
        own: Any = [None] * len(params)
        column = torch.empty(len(params), _ALIGNED, dtype=torch.float32, device=device)[:, 0]
        if inverses is None:
            own = torch.zeros(len(params), dtype=torch.float32, device=device).split(1)
        else:
            column.copy_(inverses)
        self._outlived = self._contexts
        self._contexts = [
            (param.unit.note(quantizer, amax, param.group), scale_inv, param.size, True)
            for param, quantizer, amax, scale_inv in zip(
                params, quantizers, own, column.split(1), strict=True
            )
        ]
        return True

    def _fp8_data(
        self, values: Sequence[torch.Tensor], dtype: torch.dtype, with_amaxes: bool
    ) -> list[torch.Tensor]:
        """Casts ``[rows, cols]`` values to uint8 in one launch; FSDP2's padding is zeros."""
        written: dict[str, Any] = {}
        if with_amaxes:
            written["amaxes"] = [note.amax for note, *_ in self._contexts]
            written["scale_invs"] = [scale_inv for _, scale_inv, *_ in self._contexts]
        if not any(_padding(p, value) for p, value in zip(self.params, values, strict=True)):
            made = multi_tensor.quantize(values, self._scales, dtype, **written)
            return [fp8_data.view(torch.uint8) for fp8_data in made]
        sent = [_buffer(p, value) for p, value in zip(self.params, values, strict=True)]
        written["outputs"] = [
            buffer[: value.shape[0]].view(dtype) for buffer, value in zip(sent, values, strict=True)
        ]
        multi_tensor.quantize(values, self._scales, dtype, **written)
        return sent

    def _order(self, is_new: bool) -> None:
        """Makes the current stream wait for scales that an earlier gather made on another."""
        stream = torch.cuda.current_stream()
        if is_new or self._made is None:
            self._made = (stream, stream.record_event())
        elif self._made[0] != stream:
            stream.wait_event(self._made[1])


def _quantizer(param: GatheredParam, device: torch.device) -> Any:
    """Returns the quantizer of the weight of ``param``, unwrapped from an ``ObservedQuantizer``."""
    quantizer = param.unit.quantizer(device)[0]
    return quantizer.inner if type(quantizer) is ObservedQuantizer else quantizer


def _cast(shards: list[ShardedWeight], dtype: torch.dtype) -> list[torch.Tensor]:
    """Returns the values of each shard in ``dtype``, as views of one new buffer."""
    plain = [shard.plain() for shard in shards]
    flat = torch.empty(sum(x.numel() for x in plain), dtype=dtype, device=plain[0].device)
    pieces = flat.split([x.numel() for x in plain])
    values = [piece.view(x.shape) for piece, x in zip(pieces, plain, strict=True)]
    torch._foreach_copy_(values, plain)
    return values


def _padding(param: GatheredParam, value: torch.Tensor) -> int:
    """Returns the number of padding rows that FSDP2 expects after this rank's ``[rows, cols]``."""
    if value.shape[1] != param.size[1]:
        return 0
    return -(-param.size[0] // param.ranks) - value.shape[0]


def _buffer(param: GatheredParam, value: torch.Tensor) -> torch.Tensor:
    """Returns uint8 ``[rows + padding, cols]``: uninitialised rows, then zeros as padding."""
    rows, padding = value.shape[0], _padding(param, value)
    buffer = torch.empty(rows + padding, value.shape[1], dtype=torch.uint8, device=value.device)
    if padding:
        buffer[rows:].zero_()
    return buffer
