"""Quantizers of groups of rows whose sizes only the device knows, one scale for each group.

A scheme gives them for its quantizers of the same role, one for each GEMM of a module.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ...ops.grouped_quantize import (
    GroupedOutput,
    Groups,
    first_scales,
    groups_of,
    quantize_groups,
    quantize_matrices,
    scales_of,
)

if TYPE_CHECKING:
    from . import GemmQuantizers
    from .current import CurrentScalingQuantizer
    from .delayed import DelayedScalingQuantizer
    from .products import GemmBackend

__all__ = [
    "CurrentGroups",
    "DelayedGroups",
    "GroupQuantizer",
    "GroupQuantizers",
    "group_quantizers",
]


class GroupQuantizer:
    """Quantizes the rows, or the matrices, of all groups at once; a scheme defines ``scaling``.

    Args:
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
    """

    __slots__ = ("dtype",)

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def quantize(
        self, x: torch.Tensor, groups: Groups, rowwise: bool = True, columnwise: bool = True
    ) -> GroupedOutput:
        """FP8 copies of the groups' rows of ``x`` [rows, cols], as `quantize_groups` makes them."""
        scale, scale_inv, amax = self.scaling(_Rows(x, groups))
        return quantize_groups(
            x, groups, scale, self.dtype, rowwise=rowwise, columnwise=columnwise, amax=amax,
            scale_inv=scale_inv,
        )  # fmt: skip

    def quantize_matrices(
        self,
        matrices: Sequence[torch.Tensor],
        groups: Groups | None,
        rowwise: bool = True,
        columnwise: bool = True,
    ) -> GroupedOutput:
        """FP8 copies of one matrix for each group; ``groups``: only of those that have rows."""
        scale, scale_inv, amax = self.scaling(_Matrices(matrices, groups))
        return quantize_matrices(
            matrices, scale, self.dtype, groups=groups, rowwise=rowwise, columnwise=columnwise,
            amax=amax, scale_inv=scale_inv,
        )  # fmt: skip

    def rewrite_matrices(
        self, matrices: Sequence[torch.Tensor], held: GroupedOutput, noop: torch.Tensor | None
    ) -> bool:
        """Write both copies of all matrices into ``held``, as ``Quantizer.rewrite`` does of one."""
        return False

    def record(self, x: torch.Tensor, groups: Groups) -> None:
        """Stage what later scales need of the groups' rows; nothing by default."""

    def record_matrices(self, matrices: Sequence[torch.Tensor], groups: Groups) -> None:
        """The same of the matrices of groups with rows."""

    def scaling(
        self, source: _Source
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Scales, their inverses if they are no plain ones, and where to stage amaxes."""
        raise NotImplementedError


class _Rows(NamedTuple):
    """Rows to quantize."""

    x: torch.Tensor
    groups: Groups

    def measure(
        self, amax: torch.Tensor, dtype: torch.dtype, due: torch.Tensor | None = None
    ) -> None:
        """Fold each group's largest magnitude into ``amax`` [groups]."""
        quantize_groups(
            self.x, self.groups, amax, dtype, rowwise=False, columnwise=False, amax=amax, due=due
        )


class _Matrices(NamedTuple):
    """Matrices to quantize."""

    matrices: Sequence[torch.Tensor]
    groups: Groups | None

    def measure(
        self, amax: torch.Tensor, dtype: torch.dtype, due: torch.Tensor | None = None
    ) -> None:
        quantize_matrices(
            self.matrices, amax, dtype, groups=self.groups, rowwise=False, columnwise=False,
            amax=amax, due=due,
        )  # fmt: skip


_Source = _Rows | _Matrices


class CurrentGroups(GroupQuantizer):
    """Current scaling: each group's scale comes from its own largest magnitude."""

    __slots__ = ("eps", "groups", "pow2")

    def __init__(self, quantizers: Sequence[CurrentScalingQuantizer]) -> None:
        first = quantizers[0]
        super().__init__(first.dtype)
        self.groups = len(quantizers)
        self.eps = first.eps
        self.pow2 = first.pow2

    def scaling(
        self, source: _Source
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        like = source[0] if isinstance(source[0], torch.Tensor) else source[0][0]
        amax = torch.zeros(self.groups, dtype=torch.float32, device=like.device)
        source.measure(amax, self.dtype)
        return (*scales_of(amax, self.dtype, eps=self.eps, pow2=self.pow2), None)


class DelayedGroups(GroupQuantizer):
    """Delayed scaling: the scales and the staging slots are columns of the module's state.

    The first scales (``first_step="current"``) are the work of the device, which alone knows
    whether a group has rows; a group that has none keeps its first step. It is told here which
    are due, once; the state keeps its flags.
    """

    __slots__ = ("amax", "firsts", "scale", "slots")

    def __init__(self, quantizers: Sequence[DelayedScalingQuantizer]) -> None:
        super().__init__(quantizers[0].dtype)
        self.scale = _column([q.scale for q in quantizers])
        staged = [q.amax for q in quantizers if q.amax is not None]
        self.amax = _column(staged) if staged else None
        self.firsts = [q.first for q in quantizers if q.first is not None]
        self.slots = tuple(first.index for first in self.firsts)

    def scaling(
        self, source: _Source
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        self._set_first(source)
        return self.scale, None, self.amax

    def rewrite_matrices(
        self, matrices: Sequence[torch.Tensor], held: GroupedOutput, noop: torch.Tensor | None
    ) -> bool:
        scale, _, amax = self.scaling(_Matrices(matrices, None))
        due = None
        if noop is not None:  # read when the graph runs
            due = (noop == 0).to(torch.int32).expand(len(matrices)).contiguous()
        quantize_matrices(matrices, scale, self.dtype, amax=amax, due=due, out=held)
        return True

    def record(self, x: torch.Tensor, groups: Groups) -> None:
        self._record(_Rows(x, groups))

    def record_matrices(self, matrices: Sequence[torch.Tensor], groups: Groups) -> None:
        self._record(_Matrices(matrices, groups))

    def _record(self, source: _Source) -> None:
        self._set_first(source)
        if self.amax is not None:
            source.measure(self.amax, self.dtype)

    def _set_first(self, source: _Source) -> None:
        firsts = self.firsts
        if not any(first.due[first.index] for first in firsts):
            return
        first = firsts[0]
        recipe: Any = first.recipe
        if recipe.uses_callables:
            raise NotImplementedError(
                "GroupedLinear: first_step='current' with a function that computes scales needs "
                "m_splits as a list of ints, got a tensor"
            )
        due = first.on_device.get(self.slots)
        if due is None:
            due = self._hand_over()
        groups = source.groups
        if groups is None:  # all matrices are wanted
            groups = groups_of(torch.ones_like(due), len(firsts))
        amax = torch.zeros_like(due, dtype=torch.float32)
        source.measure(amax, self.dtype, due)
        first_scales(
            amax, groups, due, self.scale, self._scale_inv(), first.fp8_max,
            margin=recipe.margin, pow2=recipe.scaling_factor_compute_algo == "pow2",
        )  # fmt: skip

    def _hand_over(self) -> torch.Tensor:
        """Tell the device which slots are due."""
        firsts = self.firsts
        if self.scale.is_cuda and torch.cuda.is_current_stream_capturing():
            raise NotImplementedError(
                "GroupedLinear: first_step='current' with m_splits as a tensor needs one step "
                "before the capture of a CUDA graph, got none"
            )
        wanted = [int(first.due[first.index]) for first in firsts]
        with torch.inference_mode(False):
            due = torch.zeros(len(firsts), dtype=torch.int32, device=self.scale.device)
        for i, flag in enumerate(wanted):
            if flag:
                due[i : i + 1].fill_(1)
        firsts[0].on_device[self.slots] = due
        return due

    def _scale_inv(self) -> torch.Tensor:
        return _column([first.scale_inv for first in self.firsts])


def _column(slots: Sequence[torch.Tensor]) -> torch.Tensor:
    """Slots [1] of one state, at equal distances, as one tensor [slots] over their memory."""
    first = slots[0]
    if len(slots) == 1:
        return first
    return first.as_strided((len(slots),), (slots[1].storage_offset() - first.storage_offset(),))


class GroupQuantizers(NamedTuple):
    """What ``GemmQuantizers`` is for one GEMM, for all GEMMs of a module."""

    input: GroupQuantizer
    weight: GroupQuantizer
    weight_recast: GroupQuantizer
    grad_output: GroupQuantizer
    products: GemmBackend
    high_precision_wgrad: bool


def group_quantizers(sets: Sequence[GemmQuantizers]) -> GroupQuantizers | None:
    """Quantizers of all groups of a module; None where the scheme has none."""

    def of(role: str) -> GroupQuantizer | None:
        quantizers = [getattr(quantizers, role) for quantizers in sets]
        return quantizers[0].grouped(quantizers)

    inp, weight = of("input"), of("weight")
    again, grad = of("weight_recast"), of("grad_output")
    if inp is None or weight is None or again is None or grad is None:
        return None
    first = sets[0]
    return GroupQuantizers(inp, weight, again, grad, first.products, first.high_precision_wgrad)
