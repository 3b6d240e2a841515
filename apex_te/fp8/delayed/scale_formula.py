"""New scales from amax histories: the formula of delayed scaling, built in or a user's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ...ops.amax_scale_update import PreparedUpdate, amax_scale_update
from ...recipe import DelayedScaling

__all__ = ["UserUpdate", "nonfinite_count", "prepared_update", "update_scales"]

_FLT_MAX = torch.finfo(torch.float32).max
_nonfinite: dict[torch.device, torch.Tensor] = {}


def nonfinite_count(device: torch.device | str = "cpu") -> torch.Tensor:
    """Returns how many Inf and NaN amax values scale updates have found so far, int32 ``[1]``.

    The tensor is the counter itself, so later updates add to it.

    Args:
        device: device whose amax values are counted, and on which the tensor lives.
    """
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    count = _nonfinite.get(device)
    if count is None:
        with torch.inference_mode(False):
            count = _nonfinite[device] = torch.zeros(1, dtype=torch.int32, device=device)
    return count


def nonfinite_counts() -> list[torch.Tensor]:
    """Returns the results of ``nonfinite_count`` for all devices that have one."""
    return list(_nonfinite.values())


def update_scales(
    histories: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    scale_invs: Sequence[torch.Tensor],
    fp8_max: list[float],
    recipe: DelayedScaling,
    nonfinite: torch.Tensor | None,
) -> None:
    """Appends recorded amax values to histories and sets the new scales, in place.

    Row 0 of a history, fp32 ``[length, slots]``, has the amax values recorded since the last
    update, and becomes 0. ``nonfinite``, int32 ``[1]``, is increased by the number of Inf and NaN
    amax values.
    """
    if not recipe.uses_callables:
        options = _options(recipe, nonfinite)
        amax_scale_update(histories, scales, scale_invs, fp8_max, **options)
        return
    with torch.no_grad():
        for slots in zip(histories, scales, scale_invs, fp8_max, strict=True):
            UserUpdate.computed(*slots, recipe).commit(nonfinite)


def prepared_update(
    histories: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    scale_invs: Sequence[torch.Tensor],
    fp8_max: list[float],
    recipe: DelayedScaling,
    nonfinite: torch.Tensor | None,
) -> PreparedUpdate:
    """Returns an object whose ``run`` is ``update_scales``, for recipes without user functions."""
    options = _options(recipe, nonfinite)
    return PreparedUpdate(histories, scales, scale_invs, fp8_max, **options)


def _options(recipe: DelayedScaling, nonfinite: torch.Tensor | None) -> dict[str, Any]:
    """Returns the keyword arguments of ``amax_scale_update`` for a recipe without functions."""
    return {
        "margin": recipe.margin,
        "algo": recipe.amax_compute_algo,
        "pow2": recipe.scaling_factor_compute_algo == "pow2",
        "nonfinite_count": nonfinite,
    }


class UserUpdate(NamedTuple):
    """Named tuple of a history's update by user functions, computed but not yet written.

    ``last`` has the recorded amax values; the scales of slots in ``keep`` do not change.
    """

    history: torch.Tensor
    scale: torch.Tensor
    scale_inv: torch.Tensor
    last: torch.Tensor
    new: torch.Tensor
    keep: torch.Tensor

    @classmethod
    def computed(
        cls,
        history: torch.Tensor,
        scale: torch.Tensor,
        scale_inv: torch.Tensor,
        fp8_max: float,
        recipe: DelayedScaling,
    ) -> UserUpdate:
        """Computes the update of one history; a slot with amax 0, Inf or NaN keeps its scale."""
        last = history[0].clone()
        algo = recipe.amax_compute_algo
        if callable(algo):
            amax = _checked("amax_compute_algo", algo(history.clone()), last)
        else:
            amax = last if algo == "most_recent" else history.amax(0)
        new = _new_scale(amax, scale, fp8_max, recipe)
        new = torch.where(torch.isinf(new), torch.full_like(new, _FLT_MAX), new)
        valid = torch.isfinite(last) & (last != 0)
        keep = ~valid | ~torch.isfinite(amax) | (amax <= 0) | ~(new > 0)
        keep |= ~torch.isfinite(torch.reciprocal(new))
        return cls(history, scale, scale_inv, last, new, keep)

    def commit(self, nonfinite: torch.Tensor | None) -> None:
        """Writes the update; adds the number of Inf and NaN amax values to ``nonfinite``."""
        history, scale, scale_inv, last, new, keep = self
        finite = torch.isfinite(last)
        if nonfinite is not None:
            nonfinite.add_((~finite).sum().to(torch.int32))
        scale.copy_(torch.where(keep, scale, new))
        scale_inv.copy_(torch.where(keep, scale_inv, torch.reciprocal(new)))
        if history.shape[0] > 1:
            rolled = torch.cat([history[:1], history[2:], last[None]])
            history.copy_(torch.where(finite & (last != 0), rolled, history))
        history[0].zero_()


def _new_scale(
    amax: torch.Tensor, scale: torch.Tensor, fp8_max: float, recipe: DelayedScaling
) -> torch.Tensor:
    """Returns a recipe's scales ``[slots]`` for ``amax`` ``[slots]``; scales may be Inf or NaN."""
    algo = recipe.scaling_factor_compute_algo
    if callable(algo):
        new = algo(amax.clone(), scale.clone(), fp8_max, recipe)
        return _checked("scaling_factor_compute_algo", new, amax)
    # Not number / tensor, which torch computes as a reciprocal and a product, rounding twice.
    if algo == "pow2":
        ratio = (torch.full_like(amax, fp8_max) / amax).clamp(max=_FLT_MAX)
        power = (ratio.view(torch.int32) & 0x7F800000).view(torch.float32)
        return (power * 2.0**-recipe.margin).clamp(max=2.0**127)
    return torch.full_like(amax, fp8_max * 2.0**-recipe.margin) / amax


def _checked(name: str, value: Any, like: torch.Tensor) -> torch.Tensor:
    """Returns a user function's result in the dtype and on the device of ``like``."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"DelayedScaling: {name} must return a tensor, got {type(value).__name__}")
    if value.shape != like.shape:
        raise ValueError(
            f"DelayedScaling: {name} must return shape {list(like.shape)}, got {list(value.shape)}"
        )
    return value.to(like)
