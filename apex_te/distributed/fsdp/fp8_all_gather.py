"""FSDP2 whose all-gathers of weights carry FP8 codes: a byte an element, a weight's scale once.

The shards stay in high precision. Before a gather each rank casts its own rows with the scale that
the whole weight has; after it the codes are the weight, whose columnwise copy is made locally.
Where that scale is the state's (delayed scaling), the shard's amax is staged by the forward that
reads the weight and reduced with all others by the scale update. Where it comes from the weight
itself, the amaxes of all weights are found in one pass and reduced in one collective, at the first
gather after weights have changed.
"""

from __future__ import annotations

import weakref
from typing import Any, cast

import torch
from torch.nn import functional

from ...comm.collectives import max_over_ranks
from ...fp8.autocast import local
from ...fp8.delayed.registry import intern
from ...fp8.parameter.decode import quantizers_of
from ...fp8.parameter.dispatch import KERNEL_DTYPES
from ...fp8.parameter.fsdp_gather import Gathered, check_resharding, replace
from ...fp8.parameter.parameter import FP8Parameter
from ...fp8.scheme.base import layout_of, stored_recipe
from ...fp8.tensor import QuantizedTensor
from ...ops import multi_tensor
from ...recipe import Recipe, chosen_recipe
from .gather_group import GatherGroup, parts_gathered_with
from .sharded_weight import ShardedWeight, local_of

__all__ = ["enable_fp8_all_gather"]


def enable_fp8_all_gather(model: torch.nn.Module, recipe: Recipe | str | None = None) -> None:
    """Have ``fully_shard`` gather the weights of FP8 GEMMs as FP8 codes, a byte an element.

    To be called once, on the whole model, before ``fully_shard`` and before an optimizer is made.
    Sharded parameters, their gradients and state dicts stay in high precision. ``fp8_autocast``
    must quantize weights as ``recipe`` does; its GEMMs then get the same codes and scales as from
    weights gathered in high precision, if it is entered before the sharded modules run. Weights
    gathered before, or kept by FSDP2 over several regions, have the scales of then. Outside
    ``fp8_autocast`` modules compute with the values of the codes. Weights held in FP8
    (``fp8_model_init``) travel as codes anyway; copies of a model have to be enabled anew.

    Args:
        recipe: how weights are quantized, a recipe or its name; default ``DelayedScaling()``.
            Delayed scaling needs ``reduce_amax=True`` and an ``fp8_group`` with all ranks of a
            weight's shards; block scaling needs shards of whole 128-row blocks, as many on each
            rank.

    Errors: TypeError for an argument or a weight's dtype; ValueError for a model that is sharded
    or enabled already, or that has no such weight; NotImplementedError for MXFP8, whose columnwise
    copy has to be made of the values. In forward, ValueError for an ``fp8_autocast`` with another
    recipe or a group that is too small, NotImplementedError for shards that cut a block and for
    ``fully_shard(reshard_after_forward=<int>)``, which would shard codes.
    """
    recipe = chosen_recipe("enable_fp8_all_gather", "recipe", recipe)
    if not isinstance(model, torch.nn.Module):
        raise TypeError(
            f"enable_fp8_all_gather: model must be a torch.nn.Module, got {type(model).__name__}"
        )
    weights = Weights(recipe)
    if not weights.layout.exact:
        raise NotImplementedError(
            "enable_fp8_all_gather: recipe must be one whose columnwise weights can be made of "
            f"their codes, got {weights.name}"
        )
    found: dict[torch.Tensor, Part] = {}  # a parameter of several modules is one
    for module in model.modules():
        if hasattr(module, "_gemm_weights"):
            weights.add(module, found)
    if not found:
        raise ValueError(
            "enable_fp8_all_gather: model must have FP8 modules with weights in high precision, "
            "got none"
        )
    new = {old: _parameter(old, part) for old, part in found.items()}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter in new:
                module._parameters[name] = new[parameter]


def _parameter(old: torch.Tensor, part: Part) -> torch.nn.Parameter:
    """The parameter ``old``, to be gathered as ``part`` says, with what trainers set on it."""
    new = torch.nn.Parameter(ShardedWeight.of(old.detach(), part), old.requires_grad)
    for name, value in vars(old).items():
        setattr(new, name, value)
    return new


def _check(name: str, weight: torch.Tensor) -> None:
    if local_of(weight) is not None:
        raise ValueError(
            "enable_fp8_all_gather: model must not be sharded yet (call it before fully_shard), "
            f"got a DTensor as {name}"
        )
    if type(weight) is ShardedWeight:
        raise ValueError(f"enable_fp8_all_gather: must be called once, got {name} a second time")
    if weight.dtype not in KERNEL_DTYPES:
        raise TypeError(
            "enable_fp8_all_gather: weights must be float32, float16 or bfloat16, got "
            f"{weight.dtype} for {name}"
        )


class Part:
    """A parameter that is gathered as codes.

    Attributes:
        changes: how often torch wrote to it, counted the same on all ranks.
    """

    def __init__(self, unit: Unit, name: str) -> None:
        self.unit = unit
        self.name = name
        self.changes = 0
        self.seen: tuple[int, int] | None = None  # the state whose amax was taken
        self.ready: Any = None  # what the next gather sends of it, made with others
        self.size: Any = None  # of the whole, as the last gather said
        self.ranks = 1
        self.mesh: Any = None
        self.group: Any = None  # of that mesh; None for one rank
        self._together: GatherGroup | None = None

    def parameter(self) -> Any:
        """What the module has in its place now; None for a module that is gone."""
        module = self.unit.module()
        return None if module is None else module._parameters.get(self.name)

    def shard(self) -> torch.Tensor | None:
        """This rank's rows; None while all rows are in its place."""
        shard = local_of(self.parameter())
        return shard if type(shard) is ShardedWeight else None

    def now(self) -> tuple[int, int] | None:
        """What differs after a change."""
        shard = self.shard()
        return self.seen if shard is None else (self.changes, shard._version)

    def renew(self, module: torch.nn.Module) -> None:
        """Find the parameter again after it may have been replaced."""
        self.changes += 1
        parameter: Any = module._parameters.get(self.name)
        shard = local_of(parameter)
        if type(shard) is torch.Tensor:
            parameter._local_tensor = ShardedWeight.of(shard.detach(), self)
        elif shard is None and type(parameter) is torch.nn.Parameter:
            module._parameters[self.name] = _parameter(parameter, self)

    def _meet(self, mesh: Any, size: Any) -> None:
        """Take note of the ranks that have shards."""
        check_resharding("enable_fp8_all_gather", self.unit.module())
        self.mesh, self.size, self.ranks = mesh, size, mesh.size()
        self.group = mesh.get_group() if self.ranks > 1 else None
        if self._together is None:
            together = GatherGroup(parts_gathered_with(self))
            for part in together.parts:
                part._together = together

    # What a ShardedWeight asks.

    def payload(
        self, shard: ShardedWeight, mesh: Any, size: Any, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        """Codes of the shard as bytes; of blocks their scales, too; and a context."""
        ready = self.ready
        if ready is not None:  # made as the first of those that are gathered with it was asked
            self.ready = None
            return ready
        dtype = mp_policy.param_dtype
        if dtype is not None and dtype not in KERNEL_DTYPES:
            raise TypeError(
                "enable_fp8_all_gather: param_dtype must be float32, float16 or bfloat16, got "
                f"{dtype}"
            )
        if mesh is not self.mesh and mesh != self.mesh:
            self._meet(mesh, size)
        assert self._together is not None
        if self._together.parts[0] is self and self._together.quantize(shard, dtype):
            ready, self.ready = self.ready, None
            return ready
        return self._payload_alone(shard.plain(), size, dtype)

    def _payload_alone(
        self, x: torch.Tensor, size: Any, dtype: torch.dtype | None
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        unit, weights = self.unit, self.unit.weights
        weights.check_shard(self.name, x, self.ranks, size)
        if dtype is not None and dtype is not x.dtype:
            x = x.to(dtype)
        codes, scale_inv, note = unit.quantized(self, x, self.group, size)
        codes = codes.view(torch.uint8)
        rows = -(-size[0] // self.ranks)
        if codes.shape[1] == size[1] and codes.shape[0] != rows:
            codes = functional.pad(codes, (0, 0, 0, rows - codes.shape[0]))
        inputs = (codes, scale_inv) if weights.layout.block_rows else (codes,)
        return inputs, (note, scale_inv, size, False)

    def whole(
        self, outputs: tuple[torch.Tensor, ...], context: Any, dtype: torch.dtype, out: Any
    ) -> Any:
        """The weight [rows, cols] over all ranks' codes; FSDP2's padding is cut off."""
        note, scale_inv, size, kept = context
        if len(outputs) > 1:  # with one rank FSDP2 hands over the first only
            scale_inv = outputs[1]
        codes = outputs[0]
        if codes.shape != size:
            codes = codes.view(-1)[: size[0] * size[1]].view(size)
        codes_dtype = note.settings[1]
        codes = codes.view(codes_dtype)
        if not kept and codes.is_cuda:
            # Made on FSDP2's stream of copies, read by the stream of products.
            stream = torch.cuda.current_stream()
            for tensor in (scale_inv, note.amax):
                if tensor is not None:
                    tensor.record_stream(stream)
        held = QuantizedTensor(codes, scale_inv, None, None, codes_dtype)
        if out is not None:
            replace(out, held, note)
            return None
        whole = FP8Parameter(held, self.unit.weights.stored, dtype)
        whole._gathered = note
        return whole, ()


class Unit:
    """The weight of one GEMM: the parameters that share its scale."""

    def __init__(self, weights: Weights, module: torch.nn.Module, gemm: int) -> None:
        self.weights = weights
        self.module = weakref.ref(module)
        self.gemm = gemm
        self.parts: list[Part] = []
        self.amax: torch.Tensor | None = None  # of all shards, where a scale is made of it
        self.taken = 0  # the pass whose amax the state has made its first scale of
        self.scales = -1  # version of the state's scales that the stream of copies waited for

    def changed(self) -> bool:
        """Whether the amax is not that of the weight now."""
        return any(part.seen is None or part.now() != part.seen for part in self.parts)

    def quantizer(self, device: torch.device) -> tuple[Any, bool]:
        """Quantizer of the weight now, and whether what it makes of an amax is to be kept."""
        weights, region = self.weights, local.region
        keep = region is None or region.records or not region.in_fp8
        if not weights.recipe.keeps_state:
            return quantizers_of(weights.recipe, device).weight, keep
        module: Any = self.module()
        state = module.fp8_state
        key, recipe = weights.key, weights.recipe
        if region is not None and region.in_fp8 and region.recipe.keeps_state:
            key, recipe = region.recipe_key, region.recipe
        elif state.recipe is not None:
            key, recipe = intern(state.recipe)
        sets = module._fp8.quantizers(key, recipe, device, keep and region is not None)
        if device.type == "cuda":
            weights.wait_for_scales(self)
        self.scales = state.scale_fwd._version
        return sets.recording[self.gemm].weight, keep

    def quantized(
        self, part: Part, x: torch.Tensor, group: Any, size: Any
    ) -> tuple[torch.Tensor, torch.Tensor, Gathered]:
        """Codes and inverse scales of the shard ``x``, and what goes with them."""
        weights, state = self.weights, None
        if weights.recipe.keeps_state:
            module: Any = self.module()
            state = module.fp8_state
        quantizer, keep = self.quantizer(x.device)
        amax = None
        if quantizer.needs_whole_amax():
            amax = weights.amax_of(self, part, group, x.device, size)
            if state is not None and keep:
                # The parts of a weight make one scale of it.
                amax = None if self.taken == weights.passes else amax
                self.taken = weights.passes
            if amax is not None:
                amax = amax.to(x.dtype).float()  # of the values that are cast
        codes, scale_inv, own = quantizer.quantize_rows(x, amax, keep)
        if state is not None:
            self.scales = state.scale_fwd._version
        return codes, scale_inv, self.note(quantizer, own, group)

    def note(self, quantizer: Any, amax: torch.Tensor | None, group: Any) -> Gathered:
        """What goes with codes of ``quantizer``."""
        stamp = (id(self), self.weights.passes, self.scales)
        return Gathered(quantizer.settings(), self.weights.name, amax, group, stamp)


class Weights:
    """All weights that one call of ``enable_fp8_all_gather`` was for."""

    def __init__(self, recipe: Recipe) -> None:
        self.key, self.recipe = intern(recipe)
        self.stored = stored_recipe(recipe)
        self.layout = layout_of(self.stored)
        self.name = f"{type(recipe).__name__}({cast(Any, recipe).fp8_format.name})"
        self.units: list[Unit] = []
        self.passes = 0  # over the amaxes of the weights

    def add(self, module: Any, found: dict[torch.Tensor, Part]) -> None:
        """The weights of a module, but for those ``found`` already."""
        for gemm, names in enumerate(module._gemm_weights()):
            unit = Unit(self, module, gemm)
            block = self.layout.block_rows
            for name in names:
                weight = module._parameters[name]
                if weight in found or type(weight) is FP8Parameter:
                    continue
                _check(name, weight)
                if block and name != names[-1] and weight.shape[0] % block:
                    raise NotImplementedError(
                        f"enable_fp8_all_gather: parts of a weight must be of whole {block}-row "
                        f"blocks, got {list(weight.shape)} for {name}"
                    )
                part = found[weight] = Part(unit, name)
                unit.parts.append(part)
                module._modes.gathered[name] = part
            if unit.parts:
                self.units.append(unit)

    def check_shard(self, name: str, x: torch.Tensor, ranks: int, size: Any) -> None:
        """Errors: NotImplementedError on all ranks for shards that cut a block."""
        block = self.layout.block_rows
        if not block or ranks == 1:
            return
        if x.shape[1] != size[1] or size[0] % (block * ranks):
            raise NotImplementedError(
                f"enable_fp8_all_gather: shards must be rows in whole {block}-row blocks, as many "
                f"on each of {ranks} ranks, got {list(size)} for {name}"
            )

    def wait_for_scales(self, unit: Unit) -> None:
        """Have FSDP2's stream of copies see a scale update that the stream of products ran.

        FSDP2 lets it wait as a forward begins; a region may be entered later.
        """
        module: Any = unit.module()
        if unit.scales == module.fp8_state.scale_fwd._version:
            return
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
        for other in self.units:
            owner: Any = other.module()
            if owner is not None and owner.fp8_state.allocated:
                other.scales = owner.fp8_state.scale_fwd._version

    def amax_of(
        self, unit: Unit, part: Part, group: Any, device: torch.device, size: Any
    ) -> torch.Tensor:
        """The amax of a whole weight; all weights' anew if it has changed.

        The ranks decide alike: they count the writes of the same code. Writes to the storage alone
        show in versions, but not where a rank has no rows; there any weight's version counts.
        """
        ranks = 1 if group is None else group.size()
        rows = -(-size[0] // ranks)
        some_are_empty = rows * (ranks - 1) >= size[0]
        units = self.units if some_are_empty and ranks > 1 else (unit,)
        if unit.amax is None or any(other.amax is None or other.changed() for other in units):
            self._measure(part, group, device)
        assert unit.amax is not None
        return unit.amax

    def _measure(self, part: Part, group: Any, device: torch.device) -> None:
        """One pass over this rank's shards, one collective over the ranks that share ``part``."""
        mesh = part.parameter().device_mesh
        shards: list[torch.Tensor] = []
        measured: list[tuple[Unit, int, int]] = []
        for unit in self.units:
            start = len(shards)
            for other in unit.parts:
                shard = other.shard()
                if shard is not None and other.parameter().device_mesh == mesh:
                    shards.append(cast(ShardedWeight, shard).plain())
                    other.seen = other.now()
            if len(shards) > start:
                measured.append((unit, start, len(shards)))
        amaxes = multi_tensor.amax(shards).to(device)
        if group is not None:
            max_over_ranks(amaxes, group)
        self.passes += 1
        for unit, start, end in measured:
            own = amaxes[start:end]
            unit.amax = own if end - start == 1 else own.amax(0, keepdim=True)
