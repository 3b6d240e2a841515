"""Attention heads in a projection's output, and the cast of their gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ...ops._head_order import in_words, sorted_heads
from ...ops.fp8_output import FP8Output
from ...ops.qkv_cast import qkv_cast_grad
from .fused_casts import BaseFusedCast


class HeadLayout(NamedTuple):
    """Layout of attention heads in the ``(repeats + 2) * groups * size`` features of a projection.

    ``repeats`` is the number of query heads per group, 0 for keys and values only. With
    ``interleaved``, heads are ordered by group, each with queries, key and value; else all queries
    come first, then all keys, then all values.
    """

    qkv_format: str
    repeats: int
    groups: int
    size: int
    interleaved: bool

    @property
    def needs_sorting(self) -> bool:
        """Returns True if groups of several queries are interleaved with keys and values.

        Queries [..., heads, size] can then be views of the output only if the weight's rows were
        sorted before.
        """
        return self.interleaved and self.repeats > 1

    def sorted(self) -> HeadLayout:
        """Returns a layout of the same heads with all queries, then all keys, then all values."""
        return self._replace(interleaved=False)

    def parts(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns views of queries, keys and values, each [..., heads, size].

        Queries of several heads in interleaved groups are [..., groups, repeats, size].
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
        """Splits ``x`` into queries, keys and values, each [..., heads, size].

        All are views of ``x``, except that queries are a copy if ``needs_sorting``.
        """
        return tuple(flat_heads(part, x.dim()) for part in self.parts(x))

    def by_group(self, heads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns views of queries, keys and values in the shapes that ``parts`` returns."""
        parts = list(heads)
        if self.needs_sorting:
            parts[0] = parts[0].unflatten(-2, (self.groups, self.repeats))
        return parts

    def joined(self, heads: Sequence[torch.Tensor], shape: Sequence[int]) -> torch.Tensor:
        """Copies queries, keys and values into a tensor [..., features]; inverse of ``heads``."""
        dtype, parts = heads[0].dtype, in_words(self.by_group(heads))
        if self.interleaved and self.repeats < 2:
            x = torch.stack(parts, -2)
        else:
            # In one dimension of heads per group where they are interleaved.
            x = torch.cat([p if p.dim() == parts[0].dim() else p.unsqueeze(-2) for p in parts], -2)
        return x.view(dtype).reshape(shape)


def flat_heads(part: torch.Tensor, dims: int) -> torch.Tensor:
    """Returns a part as [..., heads, size]; ``dims`` are those of the projection's output."""
    return part if part.dim() == dims + 1 else part.flatten(-3, -2)


def sorted_bias(bias: torch.Tensor | None, layout: Any) -> torch.Tensor | None:
    """Returns a copy of a bias, reordered from interleaved groups to queries, keys, values."""
    if bias is None:
        return None
    return sorted_heads(bias, repeats=layout.repeats, groups=layout.groups)


def split_output(
    out: torch.Tensor, layout: HeadLayout, is_sorted: bool
) -> tuple[torch.Tensor, ...]:
    """Splits a projection's output into queries, keys and values; see ``HeadLayout.heads``."""
    return (layout.sorted() if is_sorted else layout).heads(out)


def output_gradient(shape: Any, grad: Any, *others: Any) -> Any:
    """Returns ``grad``; if it is None, zeros of ``shape`` like the first tensor of ``others``."""
    if grad is not None:
        return grad
    return next(other for other in others if other is not None).new_zeros(shape)


def filled_gradients(shapes: Sequence[Any], grads: Sequence[Any], *others: Any) -> list[Any]:
    """Returns the gradients of several outputs, with zeros for each gradient that is None."""
    return [
        output_gradient(shape, grad, *others) for grad, shape in zip(grads, shapes, strict=True)
    ]


class HeadGradients(BaseFusedCast):
    """Fused cast that joins gradients of heads into the gradient of a projection's output."""

    copies = True
    __slots__ = ("heads", "layout")

    def __init__(self, layout: HeadLayout, heads: Sequence[torch.Tensor]) -> None:
        super().__init__(heads[-1])
        self.layout = layout
        self.heads = tuple(heads)

    def plain(self) -> torch.Tensor:
        """Returns the gradient ``[tokens, features]`` in bf16 or fp32."""
        x = self.x
        features = sum(head.shape[-2] for head in self.heads) * x.shape[-1]
        return self.layout.joined(self.heads, (math.prod(x.shape[:-2]), features))

    def fp8(
        self,
        scale: torch.Tensor,
        dtype: torch.dtype,
        rowwise: bool,
        columnwise: bool,
        amax: torch.Tensor | None,
        pad_columnwise: bool = False,
    ) -> FP8Output:
        """Returns the gradient ``[tokens, features]`` in FP8; arguments as of ``FusedCast.fp8``."""
        queries = self.heads[0] if self.layout.repeats else None
        keys, values = self.heads[-2:]
        out = qkv_cast_grad(
            queries, keys, values, scale, dtype, interleaved=self.layout.interleaved,
            rowwise=rowwise, columnwise=columnwise, amax=amax, pad_columnwise=pad_columnwise,
            # A run for the amax alone leaves the sums to the one that writes FP8 data.
            with_dbias=self.with_dbias and (rowwise or columnwise),
        )  # fmt: skip
        if out.dbias is not None:
            self.dbias = out.dbias
        return out.output
