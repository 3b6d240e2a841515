"""Fp8Padding and Fp8Unpadding: zero rows that fill each group up to a multiple for FP8 GEMMs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...fp8.autocast import get_fp8_recipe
from ...fp8.scheme.base import scheme_of
from ...runtime.named_arguments import named_arguments
from .._core import arguments as _arguments

__all__ = ["Fp8Padding", "Fp8Unpadding"]


class _RowGroups(torch.nn.Module):
    """Holds the number of groups and the multiple, as base of Fp8Padding and Fp8Unpadding.

    Args:
        num_gemms: number of groups.
        align_size: the multiple, or None for that of the recipe in use.
    """

    @named_arguments()
    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        name = type(self).__name__
        _arguments.check_count(name, "num_gemms", num_gemms)
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
        """Returns the checked rows of each group, and each rounded up to the multiple."""
        splits = list(_arguments.checked_splits(type(self).__name__, self.num_gemms, m_splits))
        align = self.align_size
        if align is None:
            align = scheme_of(get_fp8_recipe()).row_alignment
        return splits, [-(-rows // align) * align for rows in splits]

    def _check(self, inp: torch.Tensor, rows: list[int]) -> None:
        """Checks that ``inp`` is a matrix of as many rows as the groups have together."""
        if not isinstance(inp, torch.Tensor):
            name = type(self).__name__
            raise TypeError(f"{name}: inp must be a torch.Tensor, got {type(inp).__name__}")
        if inp.dim() != 2 or inp.shape[0] != sum(rows):
            raise ValueError(
                f"{type(self).__name__}: inp must have shape [{sum(rows)}, features] "
                f"(m_splits {rows}), got {list(inp.shape)}"
            )


class Fp8Padding(_RowGroups):
    """Module that pads each group of rows with zero rows to a multiple of ``align_size``.

    ``GroupedLinear`` works without it, but multiplies padded groups without copying them.

    Args:
        num_gemms: number of groups.
        align_size: the multiple; None uses that of the current recipe: 16, or 32 with MXFP8.
    """

    def forward(self, inp: torch.Tensor, m_splits: Sequence[int]) -> tuple[torch.Tensor, list[int]]:
        """Pads each group of rows with zero rows, up to a multiple of ``align_size``.

        Args:
            inp: [sum(m_splits), features] in any dtype.
            m_splits: number of rows of each group, ``num_gemms`` ints.

        Returns:
            ``(rows, m_splits)``: the padded rows [padded rows, features] in the dtype of ``inp``
            (``inp`` itself if no group needs padding), and a list of the padded groups' numbers of
            rows.

        Raises:
            TypeError: ``m_splits`` is not a list or tuple of ints.
            ValueError: the lengths or shapes do not match.
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
    """Module that removes the rows that ``Fp8Padding`` added.

    Args:
        num_gemms: number of groups.
        align_size: as passed to ``Fp8Padding``.
    """

    def forward(self, inp: torch.Tensor, m_splits: Sequence[int]) -> torch.Tensor:
        """Removes the padding rows that ``Fp8Padding`` added.

        Args:
            inp: the padded rows, [rows, features] in any dtype.
            m_splits: number of rows of each group without padding, ``num_gemms`` ints.

        Returns:
            [sum(m_splits), features] in the dtype of ``inp``.

        Raises:
            TypeError: ``m_splits`` is not a list or tuple of ints.
            ValueError: the lengths or shapes do not match.
        """
        splits, padded = self._padded(m_splits)
        self._check(inp, padded)
        if splits == padded:
            return inp
        parts = inp.split(padded)
        return torch.cat([part[:rows] for part, rows in zip(parts, splits, strict=True)])
