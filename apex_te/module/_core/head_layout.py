"""Layout of attention heads in a fused projection's output: splitting, sorting and joining."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ...ops._head_order import in_words, sorted_heads


class HeadLayout(NamedTuple):
    """Layout of attention heads in the last dimension of a fused projection's output.

    That dimension has ``features = (repeats + 2) * groups * size`` elements.

    Attributes:
        qkv_format: layout of the other dimensions, ``"sbhd"``, ``"bshd"`` or ``"thd"``.
        repeats: query heads of each group; 0 for a projection to keys and values only.
        groups: the number of groups, each with one key head and one value head.
        size: elements of a head.
        interleaved: True if heads lie group by group, in each group the queries, the key and the
            value; False for all queries, then all keys, then all values.
    """

    qkv_format: str
    repeats: int
    groups: int
    size: int
    interleaved: bool

    @property
    def needs_sorting(self) -> bool:
        """Returns True if groups of several queries are interleaved with keys and values.

        The queries [..., heads, size] are then no view of the output. They are one after the rows
        of the projection's weight, and so the heads of the output, are sorted as in ``sorted``.
        """
        return self.interleaved and self.repeats > 1

    def sorted(self) -> HeadLayout:
        """Returns a layout of the same heads with all queries, then all keys, then all values."""
        return self._replace(interleaved=False)

    def parts(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns views of the queries, keys and values in a projection's output.

        Args:
            x: [..., features].

        Returns:
            ``(queries, keys, values)``, without queries if ``repeats`` is 0, each [..., heads,
            size]; queries of several heads in interleaved groups are [..., groups, repeats, size].
        """
        lead, groups, repeats = x.shape[:-1], self.groups, self.repeats
        if not self.interleaved:
            counts = [repeats * groups, groups, groups] if repeats else [groups, groups]
            return x.view(*lead, (repeats + 2) * groups, self.size).split(counts, -2)
        heads = x.view(*lead, groups, repeats + 2, self.size)
        if repeats < 2:
            return heads.unbind(-2)
        keys, values = heads.select(-2, repeats), heads.select(-2, repeats + 1)
        return heads.narrow(-2, 0, repeats), keys, values

    def heads(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Splits a projection's output into queries, keys and values.

        Args:
            x: [..., features].

        Returns:
            ``(queries, keys, values)``, without queries if ``repeats`` is 0, each [..., heads,
            size]. All are views of ``x``, except that queries are a copy if ``needs_sorting``.
        """
        return tuple(flat_heads(part, x.dim()) for part in self.parts(x))

    def by_group(self, heads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns views of queries, keys and values in the shapes that ``parts`` returns.

        Args:
            heads: queries, keys and values, each [..., heads, size]; no queries if ``repeats`` is
                0.
        """
        parts = list(heads)
        if self.needs_sorting:
            parts[0] = parts[0].unflatten(-2, (self.groups, self.repeats))
        return parts

    def joined(self, heads: Sequence[torch.Tensor], shape: Sequence[int]) -> torch.Tensor:
        """Copies queries, keys and values into one tensor; the inverse of the method ``heads``.

        Args:
            heads: queries, keys and values, each [..., heads, size]; no queries if ``repeats`` is
                0.
            shape: the shape [..., features] of the result.

        Returns:
            A new tensor of ``shape`` in this layout.
        """
        dtype, parts = heads[0].dtype, in_words(self.by_group(heads))
        if self.interleaved and self.repeats < 2:
            x = torch.stack(parts, -2)
        else:
            # In one dimension of heads per group where they are interleaved.
            x = torch.cat([p if p.dim() == parts[0].dim() else p.unsqueeze(-2) for p in parts], -2)
        return x.view(dtype).reshape(shape)


def flat_heads(part: torch.Tensor, dims: int) -> torch.Tensor:
    """Returns queries, keys or values as [..., heads, size].

    Args:
        part: one tensor that ``HeadLayout.parts`` returned, [..., heads, size] or [..., groups,
            repeats, size].
        dims: the number of dimensions of the projection's output [..., features].
    """
    return part if part.dim() == dims + 1 else part.flatten(-3, -2)


def sorted_bias(bias: torch.Tensor | None, layout: Any) -> torch.Tensor | None:
    """Reorders a projection's bias from interleaved groups to all queries, all keys, all values.

    Args:
        bias: ``[features]``, or None.

    Returns:
        A new tensor ``[features]``; None without a bias.
    """
    if bias is None:
        return None
    return sorted_heads(bias, repeats=layout.repeats, groups=layout.groups)


def split_output(
    out: torch.Tensor, layout: HeadLayout, is_sorted: bool
) -> tuple[torch.Tensor, ...]:
    """Splits a projection's output into queries, keys and values.

    Args:
        out: [..., features].
        is_sorted: True if ``out`` has all queries, then all keys, then all values, whatever
            ``layout`` says.

    Returns:
        ``(queries, keys, values)``, without queries if ``layout.repeats`` is 0, each [..., heads,
        size].
    """
    return (layout.sorted() if is_sorted else layout).heads(out)
