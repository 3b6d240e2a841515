"""Scales that pending updates will give, computed for evaluations; the states do not change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ...comm.collectives import world_size
from ...recipe import DelayedScaling
from ..formats import formats_of
from .amax_group import amax_groups
from .registry import registry
from .update import ScaleGroups, update_lock

if TYPE_CHECKING:
    from ...recipe import Recipe
    from ..module_fp8 import ModuleFP8
    from .amax_group import AmaxGroup


def preview_scales(recipe: Recipe) -> bool:
    """Computes the scales that pending updates will give into each ``pending_scale_fwd``.

    Returns False if the evaluation is to read the present scales: no update is pending, or it would
    be a collective in which other ranks may not take part.
    """
    if not amax_groups.any_pending():
        return False
    # Inference tensors could not be written by a later evaluation outside of inference mode.
    with update_lock, torch.inference_mode(False), torch.no_grad():
        plan = registry.plans.get(PendingScales)
        if plan is None:
            allocated = [m for m in registry.living() if m.state.allocated]
            plan = registry.plans[PendingScales] = PendingScales(allocated, recipe)
        return plan.run()


class PendingScales:
    """Computes forward scales as the next update will, into tensors that only evaluations read.

    So an evaluation changes nothing, even between a forward and its backward. For a state whose
    update takes a collective, it reads the present scales.
    """

    def __init__(self, modules: Sequence[ModuleFP8], recipe: Recipe) -> None:
        """Groups the tensors of ``modules``."""
        self.groups = ScaleGroups()
        # Copies to work on, and what is made of them, by device: targets and sources.
        self._copied: dict[torch.device, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        self._results: dict[torch.device, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        self._local: list[AmaxGroup | None] = []  # of states that need no other rank
        for module in modules:
            if module.state.device.type != "meta":
                self._add(module, recipe)

    def _add(self, module: ModuleFP8, recipe: Recipe) -> None:
        """Adds a module's state; its scales are only copied if an update takes a collective."""
        state = module.state
        chosen = recipe if state.recipe is None else state.recipe
        scale = torch.empty_like(state.scale_fwd)
        results = self._results.setdefault(state.device, ([], []))
        results[0].append(state.pending_scale_fwd)
        results[1].append(scale)
        targets, sources = self._copied.setdefault(state.device, ([], []))
        targets.append(scale)
        sources.append(state.scale_fwd)
        amax_group = state.sync.amax_group
        if not isinstance(chosen, DelayedScaling) or not _is_local(amax_group, chosen):
            return
        history = torch.empty_like(state.amax_history_fwd)
        inverse = torch.empty_like(state.scale_inv_fwd)
        targets += [history, inverse]
        sources += [state.amax_history_fwd, state.scale_inv_fwd]
        limits = formats_of(chosen.fp8_format, state.device)
        group = self.groups.of(state.device, chosen)
        group.add(module, (history, scale, inverse, limits.max_fwd))
        self._local.append(amax_group)

    def run(self) -> bool:
        """Computes the scales; returns False and does nothing if no such update is pending."""
        if not any(group is None or group.pending for group in self._local):
            return False
        for targets, sources in self._copied.values():
            torch._foreach_copy_(targets, sources)
        self.groups.run(nonfinite=False)  # what fails here keeps its scale, and fails again
        # Written once, with the same bits where nothing was staged since: another thread may be
        # evaluating.
        for targets, sources in self._results.values():
            torch._foreach_copy_(targets, sources)
        return True


def _is_local(amax_group: AmaxGroup | None, recipe: DelayedScaling) -> bool:
    """Returns True if an update of ``amax_group``, None before any forward, needs no other rank."""
    if amax_group is None:
        return not recipe.reduce_amax or world_size(None) == 1
    return not amax_group.reduces or world_size(amax_group.group) == 1
