"""Base class of quantizers for groups of rows whose sizes only the device knows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ...ops.grouped_quantize import GroupedOutput, Groups, quantize_groups, quantize_matrices


class GroupRows(NamedTuple):
    """Named tuple of the rows of all groups, to be quantized with one scale for each group.

    Attributes:
        x: ``[rows, cols]``; the groups lie one behind the other.
        groups: which rows belong to which group, on the device.
    """

    x: torch.Tensor
    groups: Groups

    def measure(
        self, amax: torch.Tensor, dtype: torch.dtype, due: torch.Tensor | None = None
    ) -> None:
        """Replaces each element of ``amax`` by its maximum with the amax of that group's rows.

        Args:
            amax: fp32 ``[groups]``.
            dtype: FP8 dtype, which does not matter for the result.
            due: int32 ``[groups]``, non-zero for the groups to measure; None: all.
        """
        quantize_groups(
            self.x, self.groups, amax, dtype, rowwise=False, columnwise=False, amax=amax, due=due
        )


class GroupMatrices(NamedTuple):
    """Named tuple of matrices to quantize, one weight for each group of rows.

    Attributes:
        matrices: one ``[rows, cols]`` for each group.
        groups: the groups of rows; matrices of groups without rows are skipped. None: cast all.
    """

    matrices: Sequence[torch.Tensor]
    groups: Groups | None

    def measure(
        self, amax: torch.Tensor, dtype: torch.dtype, due: torch.Tensor | None = None
    ) -> None:
        """Replaces each element of ``amax`` by its maximum with the amax of that group's matrix.

        Args:
            amax: fp32 ``[groups]``.
            dtype: FP8 dtype, which does not matter for the result.
            due: int32 ``[groups]``, non-zero for the matrices to measure; None: all.
        """
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
        """Returns FP8 copies of rows, with one scale for each group.

        Args:
            x: ``[rows, cols]``; the groups lie one behind the other.
            groups: which rows belong to which group, on the device.
            rowwise, columnwise: the copies to make.
        """
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
        """Returns FP8 copies of one matrix for each group.

        Args:
            matrices: one ``[rows, cols]`` for each group.
            groups: the groups of rows; matrices of groups without rows are skipped. None: cast all.
            rowwise, columnwise: the copies to make.
        """
        scale, scale_inv, amax = self.scaling(GroupMatrices(matrices, groups))
        return quantize_matrices(
            matrices, scale, self.dtype, groups=groups, rowwise=rowwise, columnwise=columnwise,
            amax=amax, scale_inv=scale_inv,
        )  # fmt: skip

    def rewrite_matrices(
        self, matrices: Sequence[torch.Tensor], held: GroupedOutput, noop: torch.Tensor | None
    ) -> bool:
        """Quantizes matrices into the copies that an earlier ``quantize_matrices`` made.

        Args:
            matrices: one ``[rows, cols]`` for each group.
            held: rowwise and columnwise copies, which are overwritten with their scales.
            noop: int32 ``[1]`` on the device; if it is not zero, nothing changes. None: always
                write.

        Returns:
            True if the copies were written, or are when a capture replays; False, with nothing
            written, for a scheme without state, as in ``Quantizer.rewrite``.
        """
        return False

    def record(self, x: torch.Tensor, groups: Groups) -> None:
        """Stages the amax values of the groups' rows; does nothing for a scheme without state."""

    def record_matrices(self, matrices: Sequence[torch.Tensor], groups: Groups) -> None:
        """Stages amax values of the matrices of groups with rows; does nothing without a state."""

    def scaling(
        self, source: GroupRows | GroupMatrices
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Finds the scales with which to quantize ``source``.

        Returns:
            scales: fp32 ``[groups]``.
            scale_invs: fp32 ``[groups]``, or None if each is ``1 / scale``.
            amaxes: fp32 ``[groups]``, into which to stage the groups' amax values, or None.
        """
        raise NotImplementedError
