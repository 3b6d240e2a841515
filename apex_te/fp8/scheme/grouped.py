"""Base class of quantizers for groups of rows whose sizes only the device knows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ...ops.grouped_quantize import GroupedOutput, Groups, quantize_groups, quantize_matrices


class GroupRows(NamedTuple):
    """Named tuple of the rows ``[rows, cols]`` of all groups, sorted by group."""

    x: torch.Tensor
    groups: Groups

    def measure(
        self, amax: torch.Tensor, dtype: torch.dtype, due: torch.Tensor | None = None
    ) -> None:
        """Updates ``amax`` to its maximum with the groups' amax values, where ``due`` is not 0."""
        quantize_groups(
            self.x, self.groups, amax, dtype, rowwise=False, columnwise=False, amax=amax, due=due
        )


class GroupMatrices(NamedTuple):
    """Named tuple of matrices, one weight for each group; those of empty groups are skipped."""

    matrices: Sequence[torch.Tensor]
    groups: Groups | None

    def measure(
        self, amax: torch.Tensor, dtype: torch.dtype, due: torch.Tensor | None = None
    ) -> None:
        """Updates ``amax``, fp32 ``[groups]``, for each matrix, like ``GroupRows.measure``."""
        quantize_matrices(
            self.matrices, amax, dtype, groups=self.groups, rowwise=False, columnwise=False,
            amax=amax, due=due,
        )  # fmt: skip


class GroupQuantizer:
    """Quantizes the rows, or the weights, of all groups at once; a scheme defines ``scaling``."""

    __slots__ = ("dtype",)

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def quantize(
        self, x: torch.Tensor, groups: Groups, rowwise: bool = True, columnwise: bool = True
    ) -> GroupedOutput:
        """Returns FP8 copies of rows, sorted by group, with one scale for each group."""
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
        """Returns FP8 copies of matrices; with ``groups``, only of those whose groups have rows."""
        scale, scale_inv, amax = self.scaling(GroupMatrices(matrices, groups))
        return quantize_matrices(
            matrices, scale, self.dtype, groups=groups, rowwise=rowwise, columnwise=columnwise,
            amax=amax, scale_inv=scale_inv,
        )  # fmt: skip

    def rewrite_matrices(
        self, matrices: Sequence[torch.Tensor], held: GroupedOutput, noop: torch.Tensor | None
    ) -> bool:
        """Quantizes into the copies of ``quantize_matrices``, as ``Quantizer.rewrite`` does."""
        return False

    def record(self, x: torch.Tensor, groups: Groups) -> None:
        """Records the amax values of the groups' rows; does nothing for a scheme without state."""

    def record_matrices(self, matrices: Sequence[torch.Tensor], groups: Groups) -> None:
        """Records amax values of the matrices of groups with rows; does nothing without a state."""

    def scaling(
        self, source: GroupRows | GroupMatrices
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Returns scales, ``scale_inv`` or None, and the tensor for amax values or None."""
        raise NotImplementedError
