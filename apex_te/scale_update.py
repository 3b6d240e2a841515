"""The scale update of delayed scaling: reduce the staged amaxes over ranks, then new scales."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from . import runtime
from ._rank_reduction import RankReduction, Slots
from .distributed.collectives import world_size
from .gpu_arch import formats_of
from .ops.amax_scale_update import amax_scale_update

if TYPE_CHECKING:
    from ._scale_scope import Scope, Sharing
    from .recipe import DelayedScaling
    from .state import FP8State

__all__ = ["UpdatePlan", "nonfinite_count", "update_scales"]

Tensors = Sequence[torch.Tensor]

_FLT_MAX = torch.finfo(torch.float32).max
_nonfinite: dict[torch.device, torch.Tensor] = {}


def nonfinite_count(device: torch.device | str = "cpu") -> torch.Tensor:
    """Number of amaxes that were Inf or NaN at an update: int32 ``[1]``, living on ``device``."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    count = _nonfinite.get(device)
    if count is None:
        with torch.inference_mode(False):
            count = _nonfinite[device] = torch.zeros(1, dtype=torch.int32, device=device)
    return count


def update_scales(
    histories: Tensors,
    scales: Tensors,
    scale_invs: Tensors,
    fp8_max: list[float],
    recipe: DelayedScaling,
    nonfinite: torch.Tensor | None,
) -> None:
    """Roll the histories ``[length, slots]`` and set ``scales`` and ``scale_invs`` ``[slots]``."""
    algo = recipe.amax_compute_algo
    if isinstance(algo, str) and not recipe.uses_callables:
        amax_scale_update(
            histories,
            scales,
            scale_invs,
            fp8_max,
            margin=recipe.margin,
            algo=algo,
            pow2=recipe.scaling_factor_compute_algo == "pow2",
            nonfinite_count=nonfinite,
        )
        return
    with torch.no_grad():
        for history, scale, scale_inv, limit in zip(
            histories, scales, scale_invs, fp8_max, strict=True
        ):
            _update_with_callables(history, scale, scale_inv, limit, recipe, nonfinite)


def _update_with_callables(
    history: torch.Tensor,
    scale: torch.Tensor,
    scale_inv: torch.Tensor,
    fp8_max: float,
    recipe: DelayedScaling,
    nonfinite: torch.Tensor | None,
) -> None:
    """One history, with the user's functions and the guards of the kernel."""
    last = history[0].clone()
    finite = torch.isfinite(last)
    valid = finite & (last != 0)
    if nonfinite is not None:
        nonfinite.add_((~finite).sum().to(torch.int32))
    algo = recipe.amax_compute_algo
    if callable(algo):
        amax = _result("amax_compute_algo", algo(history.clone()), last)
    else:
        amax = last if algo == "most_recent" else history.amax(0)
    new = _new_scale(amax, scale, fp8_max, recipe)
    new = torch.where(torch.isinf(new), torch.full_like(new, _FLT_MAX), new)
    keep = ~valid | ~torch.isfinite(amax) | (amax <= 0) | ~(new > 0)
    scale.copy_(torch.where(keep, scale, new))
    scale_inv.copy_(torch.where(keep, scale_inv, torch.reciprocal(new)))
    if history.shape[0] > 1:
        rolled = torch.cat([history[:1], history[2:], last[None]])
        history.copy_(torch.where(valid, rolled, history))
    history[0].zero_()


def _new_scale(
    amax: torch.Tensor, scale: torch.Tensor, fp8_max: float, recipe: DelayedScaling
) -> torch.Tensor:
    algo = recipe.scaling_factor_compute_algo
    if callable(algo):
        new = algo(amax, scale.clone(), fp8_max, recipe)
        return _result("scaling_factor_compute_algo", new, amax)
    # Not number / tensor, which torch computes as a reciprocal and a product, rounding twice.
    if algo == "pow2":
        ratio = (torch.full_like(amax, fp8_max) / amax).clamp(max=_FLT_MAX)
        power = (ratio.view(torch.int32) & 0x7F800000).view(torch.float32)
        return (power * 2.0**-recipe.margin).clamp(max=2.0**127)
    return torch.full_like(amax, fp8_max * 2.0**-recipe.margin) / amax


def _result(name: str, value: Any, like: torch.Tensor) -> torch.Tensor:
    """Check what a user's function returned."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"DelayedScaling: {name} must return a tensor, got {type(value).__name__}")
    if value.shape != like.shape:
        raise ValueError(
            f"DelayedScaling: {name} must return shape {list(like.shape)}, got {list(value.shape)}"
        )
    return value.to(like)


class _Group:
    """Slots on one device that one call updates."""

    def __init__(self, recipe: DelayedScaling) -> None:
        self.recipe = recipe
        self.histories: list[torch.Tensor] = []
        self.scales: list[torch.Tensor] = []
        self.scale_invs: list[torch.Tensor] = []
        self.fp8_max: list[float] = []
        self._prepared: tuple[Tensors, Tensors, Tensors] | None = None

    def lists(self) -> tuple[Tensors, Tensors, Tensors]:
        """Histories, scales and their inverses, prepared once for the kernel's later calls."""
        if self.recipe.uses_callables or torch.compiler.is_compiling():
            return self.histories, self.scales, self.scale_invs
        if self._prepared is None:
            prepare = runtime.tensor_list
            self._prepared = (
                prepare(self.histories), prepare(self.scales), prepare(self.scale_invs)
            )  # fmt: skip
        return self._prepared


class UpdatePlan:
    """The tensors of a scope's states, grouped once and reused until a state changes."""

    def __init__(
        self,
        scope: Scope,
        states: Sequence[FP8State],
        sizes: Sequence[int],
        labels: Sequence[str],
    ) -> None:
        """``sizes``, ``labels``: slots and owner of every state of the process by its number."""
        self.scope = scope
        self.groups: dict[tuple, _Group] = {}
        self.sizes = tuple(sizes)
        self.labels = tuple(labels)
        self.reduced: list[Slots] = []
        self.reduction: RankReduction | None = None
        self.finished: list[list[bool]] = []
        self._sharing: list[tuple[Sharing, bool]] = []
        self._noted = False  # what the update means for them
        starts = [0, *itertools.accumulate(sizes)]
        for state in states:
            recipe = state.recipe
            if recipe is None or state.device.type == "meta":
                continue
            self._sharing.append((state.sharing, scope.reduces and recipe.reduce_amax))
            if recipe.reduce_amax:
                at, forward = starts[state.number], state.amax_history_fwd
                self.reduced.append(Slots(at, forward, state.scale_fwd, state.scale_inv_fwd))
                at += forward.shape[1]
                self.reduced.append(
                    Slots(at, state.amax_history_bwd, state.scale_bwd, state.scale_inv_bwd)
                )
            if recipe.first_step == "scale_one":
                self.finished.append(state.first_due)
            self._add(state, recipe)

    def _add(self, state: FP8State, recipe: DelayedScaling) -> None:
        key: tuple = (state.device, recipe.margin, recipe.amax_compute_algo)
        key += (recipe.scaling_factor_compute_algo,)
        if recipe.uses_callables:
            key += (recipe,)
        group = self.groups.get(key)
        if group is None:
            group = self.groups[key] = _Group(recipe)
        limits = formats_of(recipe.fp8_format, state.device)
        group.histories += [state.amax_history_fwd, state.amax_history_bwd]
        group.scales += [state.scale_fwd, state.scale_bwd]
        group.scale_invs += [state.scale_inv_fwd, state.scale_inv_bwd]
        group.fp8_max += [limits.max_fwd, limits.max_bwd]

    def run(self) -> None:
        """Reduce over the scope's ranks, if it does that, then update every slot."""
        scope, equalised = self.scope, False
        if scope.reduces and world_size(scope.group) > 1:
            if self.reduction is None:
                unsure = any(reduced and not s.sure_in(scope) for s, reduced in self._sharing)
                device = _device_of(scope.group)
                self.reduction = RankReduction(
                    self.sizes, self.labels, self.reduced, device, unsure
                )
            equalised = self.reduction.run(scope.group)
        for (device, *_), group in self.groups.items():
            update_scales(*group.lists(), group.fp8_max, group.recipe, nonfinite_count(device))
        for due in self.finished:
            due[:] = [False] * len(due)
        if equalised or not self._noted:
            for sharing, reduced in self._sharing:
                sharing.updated(scope, reduced, equalised)
            self._noted = True


def _device_of(group: Any) -> torch.device:
    """Where a rank without FP8 modules takes part in the collectives of ``group``."""
    if torch.distributed.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
