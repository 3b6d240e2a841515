"""Base of the quantizers of groups of rows whose sizes only the device knows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ...ops.grouped_quantize import GroupedOutput, Groups, quantize_groups, quantize_matrices

__all__ = ["GroupMatrices", "GroupQuantizer", "GroupRows"]


class GroupRows(NamedTuple):
    """Rows to quantize, one scale for each group."""

    x: torch.Tensor
    groups: Groups

    def measure(
        self, amax: torch.Tensor, dtype: torch.dtype, due: torch.Tensor | None = None
    ) -> None:
        """Folds each group's largest magnitude into ``amax`` ``[groups]``."""
        quantize_groups(
            self.x, self.groups, amax, dtype, rowwise=False, columnwise=False, amax=amax, due=due
        )


class GroupMatrices(NamedTuple):
    """Matrices to quantize, one for each group; with ``groups`` only those of groups with rows."""

    matrices: Sequence[torch.Tensor]
    groups: Groups | None

    def measure(
        self, amax: torch.Tensor, dtype: torch.dtype, due: torch.Tensor | None = None
    ) -> None:
        """Folds each matrix's largest magnitude into ``amax`` ``[groups]``."""
        quantize_matrices(
            self.matrices, amax, dtype, groups=self.groups, rowwise=False, columnwise=False,
            amax=amax, due=due,
        )  # fmt: skip


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
        """Returns FP8 copies of the groups' rows of ``x`` ``[rows, cols]``."""
        scale, scale_inv, amax = self.scaling(GroupRows(x, groups))
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
        """Returns FP8 copies of one matrix for each group; ``groups``: only of those with rows."""
        scale, scale_inv, amax = self.scaling(GroupMatrices(matrices, groups))
        return quantize_matrices(
            matrices, scale, self.dtype, groups=groups, rowwise=rowwise, columnwise=columnwise,
            amax=amax, scale_inv=scale_inv,
        )  # fmt: skip

    def rewrite_matrices(
        self, matrices: Sequence[torch.Tensor], held: GroupedOutput, noop: torch.Tensor | None
    ) -> bool:
        """Writes both copies of all matrices into ``held``, as ``Quantizer.rewrite`` does of one.

        Returns False, and writes nothing, for a scheme that gives the same result again.
        """
        return False

    def record(self, x: torch.Tensor, groups: Groups) -> None:
        """Stages what later scales need of the groups' rows; nothing by default."""

    def record_matrices(self, matrices: Sequence[torch.Tensor], groups: Groups) -> None:
        """Stages what later scales need of the matrices of groups with rows."""

    def scaling(
        self, source: GroupRows | GroupMatrices
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Finds the scales with which to quantize ``source``.

        Returns:
            ``(scales, scale_invs, amaxes)``, each ``[groups]``: ``scale_invs`` is None where each
            is ``1 / scale``; ``amaxes`` is where to stage the groups' amaxes, or None.
        """
        raise NotImplementedError
