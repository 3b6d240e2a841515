"""Fp8Padding and Fp8Unpadding: rows of each group filled with zeros up to what FP8 GEMMs like."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...fp8.autocast import get_fp8_recipe
from ...fp8.scheme.base import scheme_of
from .._core import arguments as _arguments

__all__ = ["Fp8Padding", "Fp8Unpadding"]


class _RowGroups(torch.nn.Module):
    """Base of both: the number of groups, and the multiple to which their rows are filled up."""

    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        name = type(self).__name__
        _arguments.check_num_gemms(name, num_gemms)
        if align_size is not None:
            if isinstance(align_size, bool) or not isinstance(align_size, int):
                raise TypeError(
                    f"{name}: align_size must be an int or None, got {type(align_size).__name__}"
                )
            if align_size < 1:
                raise ValueError(f"{name}: align_size must be at least 1, got {align_size}")
        self.num_gemms = num_gemms
        self.align_size = align_size

    def extra_repr(self) -> str:
        return f"num_gemms={self.num_gemms}, align_size={self.align_size}"

    def _padded(self, m_splits: Sequence[int]) -> tuple[list[int], list[int]]:
        """Returns the rows of each group, without and with padding."""
        splits = list(_arguments.checked_splits(type(self).__name__, self.num_gemms, m_splits))
        align = self.align_size
        if align is None:
            align = scheme_of(get_fp8_recipe()).row_alignment
        return splits, [-(-rows // align) * align for rows in splits]

    def _check(self, inp: torch.Tensor, rows: list[int]) -> None:
        if inp.dim() != 2 or inp.shape[0] != sum(rows):
            raise ValueError(
                f"{type(self).__name__}: inp must have shape [{sum(rows)}, features] "
                f"(m_splits {rows}), got {list(inp.shape)}"
            )


class Fp8Padding(_RowGroups):
    """Puts rows of zeros after each group, so that its number of rows is a multiple.

    ``GroupedLinear`` needs no such multiple; groups that have it are multiplied without copies.

    Args:
        num_gemms: number of groups.
        align_size: the multiple; None takes that of the recipe in use: 16, or 32 with MXFP8.
    """

    def forward(self, inp: torch.Tensor, m_splits: Sequence[int]) -> tuple[torch.Tensor, list[int]]:
        """Pads the groups of ``inp`` [sum(m_splits), features], any dtype.

        Returns:
            ``(rows, m_splits)``: the padded rows, and how many each group has.

        An input that needs no padding is returned as it is.

        Raises:
            TypeError: ``m_splits`` that are no ints.
            ValueError: a shape.
        """
        splits, padded = self._padded(m_splits)
        self._check(inp, splits)
        if splits == padded:
            return inp, padded
        missing = [wide - rows for rows, wide in zip(splits, padded, strict=True)]
        zeros = inp.new_zeros((max(missing), inp.shape[1]))
        parts: list[torch.Tensor] = []
        for part, count in zip(inp.split(splits), missing, strict=True):
            parts += [part, zeros[:count]]
        return torch.cat(parts), padded


class Fp8Unpadding(_RowGroups):
    """Takes out the rows that ``Fp8Padding`` put in.

    Args:
        num_gemms: number of groups.
        align_size: the multiple; None takes that of the recipe in use: 16, or 32 with MXFP8.
    """

    def forward(self, inp: torch.Tensor, m_splits: Sequence[int]) -> torch.Tensor:
        """Returns ``inp`` without its padding, [sum(m_splits), features].

        ``m_splits`` are the rows of each group without padding.

        Raises:
            TypeError: ``m_splits`` that are no ints.
            ValueError: a shape.
        """
        splits, padded = self._padded(m_splits)
        self._check(inp, padded)
        if splits == padded:
            return inp
        parts = inp.split(padded)
        return torch.cat([part[:rows] for part, rows in zip(parts, splits, strict=True)])
