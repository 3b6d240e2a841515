"""Ways of rows to the ranks of their experts and back, differentiable, in their dtype or in FP8.

A way is a list of steps, each with ``there``, which only copies rows, and ``back``, its transpose,
which sums the copies of a row. FP8 data and its scales can therefore travel ``there``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from ..ops import moe_permute
from ..ops.binding import once_differentiable
from ..ops.block_quantize import ROW_MULTIPLE, block_dequantize, block_quantize
from ..recipe import BlockScaling, Recipe, chosen_recipe
from ..runtime.named_arguments import did_you_mean
from .collectives import all_gather_rows, all_to_all_rows, reduce_scatter_rows


class Permute(NamedTuple):
    """Step that copies rows into the order of experts, by a map of ``ops.moe_permute``."""

    row_id_map: torch.Tensor
    rows: int

    def there(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the ordered rows; those without a source are zeros."""
        return moe_permute.permute(x, self.row_id_map, self.rows)[0]

    def back(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the sum of each row's copies, in float32 in a fixed order, rounded once."""
        return moe_permute.unpermute(x, self.row_id_map)


class AllToAll(NamedTuple):
    """Step that sends ``sent[r]`` rows to each rank r, and receives ``received[r]``."""

    sent: list[int]
    received: list[int]
    group: Any

    def there(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the received rows, ordered by sending rank."""
        return all_to_all_rows(x, self.sent, self.received, self.group).wait()

    def back(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the rows that this rank had sent."""
        return all_to_all_rows(x, self.received, self.sent, self.group).wait()


class AllGather(NamedTuple):
    """Step that sends all rows to every rank."""

    group: Any

    def there(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the rows of all ranks, by rank."""
        return all_gather_rows(x, self.group).wait()

    def back(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the sum over ranks of this rank's rows."""
        return reduce_scatter_rows(x, self.group).wait()


Way = Sequence[Permute | AllToAll | AllGather]


def wire_recipe(owner: str, wire: Recipe | str | None) -> BlockScaling | None:
    """Returns the recipe by which ``wire`` has rows cast, None for None; errors name ``owner``."""
    if wire is None:
        return None
    expected = f'{owner}: wire must be "blockwise", a BlockScaling recipe or None, got '
    if not isinstance(wire, (str, Recipe)):
        raise TypeError(f"{expected}{type(wire).__name__}")
    if isinstance(wire, str) and wire != "blockwise":
        raise ValueError(f"{expected}{wire!r}{did_you_mean(wire, ['blockwise'])}")
    recipe = chosen_recipe(owner, "wire", wire)
    if not isinstance(recipe, BlockScaling):
        raise ValueError(f"{expected}{type(wire).__name__}")
    # Other scales, computed again from decoded values, could differ in their last bit.
    if not recipe.pow2:
        raise ValueError(f"{owner}: wire must be a recipe with pow2=True, got pow2=False")
    return recipe


class Send(torch.autograd.Function):
    """Differentiable way ``there``; with ``wire``, rows travel in its forward format.

    The gradient goes ``back`` in its own dtype, because it is summed.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, way: Way, wire: BlockScaling | None) -> torch.Tensor:
        ctx.way = way
        return _sent(x, way, wire, None if wire is None else wire.fp8_format.value.fwd_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        return _returned(grad, ctx.way), None, None


class Return(torch.autograd.Function):
    """Differentiable way ``back``; with ``wire``, gradients travel in its backward format."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, way: Way, wire: BlockScaling | None) -> torch.Tensor:
        ctx.way, ctx.wire = way, wire
        return _returned(x, way)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        wire = ctx.wire
        dtype = None if wire is None else wire.fp8_format.value.bwd_dtype
        return _sent(grad, ctx.way, wire, dtype), None, None


def _sent(
    x: torch.Tensor, way: Way, wire: BlockScaling | None, fp8_dtype: torch.dtype | None
) -> torch.Tensor:
    """Takes rows ``there``; with ``wire`` as FP8 data, which is decoded at the end."""
    if wire is None or fp8_dtype is None:
        return _there(x, way)
    made = block_quantize(x, fp8_dtype, columnwise=False, eps=wire.eps)
    assert made.rowwise is not None
    assert made.rowwise_scale_inv is not None
    data = _there(made.rowwise, way)
    scale_inv = _there(made.rowwise_scale_inv[:, : x.shape[0]].t(), way).t()
    scale_inv = functional.pad(scale_inv, (0, -scale_inv.shape[1] % ROW_MULTIPLE), value=1.0)
    return block_dequantize(data, scale_inv.contiguous(), dtype=x.dtype)


def _there(x: torch.Tensor, way: Way) -> torch.Tensor:
    for step in way:
        x = step.there(x)
    return x


def _returned(x: torch.Tensor, way: Way) -> torch.Tensor:
    for step in reversed(way):
        x = step.back(x)
    return x
