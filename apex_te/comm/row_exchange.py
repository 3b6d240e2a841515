"""Ways of rows to the ranks of their experts and back, differentiable, in their dtype or in FP8.

A way is a list of steps, each with ``there``, which only copies rows, and ``back``, its transpose,
which sums the copies of a row. FP8 data and its scales can therefore travel ``there``.

A travel begins in one autograd function and ends in another. What is computed between them runs
while the rows travel, and so does, in backward, the gradient of what is computed between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from ..ops import moe_permute
from ..ops.binding import once_differentiable
from ..ops.block_quantize import ROW_MULTIPLE, block_dequantize, block_quantize
from ..recipe import BlockScaling, Recipe, chosen_recipe
from ..runtime.named_arguments import did_you_mean
from .collectives import Pending, all_gather_rows, all_to_all_rows, reduce_scatter_rows


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
    place: Callable[[torch.Tensor], torch.Tensor] | None = None

    def there(self, x: torch.Tensor) -> Pending:
        """Begins to receive rows, ordered by sending rank."""
        return all_to_all_rows(x, self.sent, self.received, self.group)

    def back(self, x: torch.Tensor) -> Pending:
        """Begins to get back the rows that this rank had sent."""
        out = None if self.place is None else self.place(x)
        return all_to_all_rows(x, self.received, self.sent, self.group, out)


class AllGather(NamedTuple):
    """Step that sends all rows to every rank."""

    group: Any

    def there(self, x: torch.Tensor) -> Pending:
        """Begins to gather the rows of all ranks, by rank."""
        return all_gather_rows(x, self.group)

    def back(self, x: torch.Tensor) -> Pending:
        """Begins to sum this rank's rows over ranks."""
        return reduce_scatter_rows(x, self.group)


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
    if recipe.scales != "pow2":
        raise ValueError(
            f'{owner}: wire must be a recipe with scales="pow2", got scales={recipe.scales!r}'
        )
    return recipe


Arrival = Callable[[], torch.Tensor]  # waits for rows on their way, and returns them


class Travel:
    """Rows that go ``there``, or with ``returns`` ``back``, and their gradient the other way.

    With ``wire``, what goes ``there`` travels in FP8: rows in the recipe's format of inputs,
    gradients in that of gradients. What goes ``back`` is summed, and keeps its dtype. ``arrival``
    waits for what is on its way.
    """

    def __init__(self, way: Way, wire: BlockScaling | None, returns: bool = False) -> None:
        self._way = way
        self._wire = wire
        self._returns = returns
        self.arrival: Arrival | None = None

    def begin(self, x: torch.Tensor) -> Arrival:
        """Sends rows."""
        return self._returned(x) if self._returns else self._sent(x, "fwd_dtype")

    def begin_gradient(self, grad: torch.Tensor) -> Arrival:
        """Sends their gradient."""
        return self._sent(grad, "bwd_dtype") if self._returns else self._returned(grad)

    def take(self) -> torch.Tensor:
        """Returns what is on its way."""
        arrival, self.arrival = self.arrival, None
        assert arrival is not None
        return arrival()

    def _sent(self, x: torch.Tensor, use: str) -> Arrival:
        wire, way = self._wire, self._way
        if wire is None:
            return _started(x, [step.there for step in way])
        dtype = getattr(wire.fp8_format.value, use)
        made = block_quantize(x, dtype, columnwise=False, eps=wire.eps)
        assert made.rowwise is not None
        assert made.rowwise_scale_inv is not None
        scale_inv = made.rowwise_scale_inv[:, : x.shape[0]].t()
        data, scales = (
            _started(t, [step.there for step in way]) for t in (made.rowwise, scale_inv)
        )

        def arrived(dtype: torch.dtype = x.dtype) -> torch.Tensor:
            rows, found = data(), scales().t()
            found = functional.pad(found, (0, -found.shape[1] % ROW_MULTIPLE), value=1.0)
            return block_dequantize(rows, found.contiguous(), dtype=dtype)

        return arrived

    def _returned(self, x: torch.Tensor) -> Arrival:
        return _started(x, [step.back for step in reversed(self._way)])


def _started(x: torch.Tensor, steps: Iterable[Callable[[Any], Any]]) -> Arrival:
    """Takes rows up to the first collective, which is begun; the rest runs in the ``Arrival``."""
    rest = list(steps)
    value: Any = x
    while rest and not isinstance(value, Pending):
        value = rest.pop(0)(value)

    def arrived() -> torch.Tensor:
        found = value
        for step in (*rest, None):
            if isinstance(found, Pending):
                found = found.wait()
            if step is not None:
                found = step(found)
        return found

    return arrived


def travel(x: torch.Tensor, way: Way, wire: BlockScaling | None, returns: bool = False) -> Arrival:
    """Begins a differentiable ``Travel`` of ``x``, and returns what waits for the rows."""
    rows = Travel(way, wire, returns)
    if torch.compiler.is_compiling():  # whose graphs overlap what they can by themselves
        return lambda: WholeTravel.apply(x, rows)
    on_the_way = BegunTravel.apply(x, rows)
    return lambda: EndedTravel.apply(on_the_way, rows)


class BegunTravel(torch.autograd.Function):
    """Begins to send rows, and waits for their gradient; returns a placeholder for the rows."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rows: Travel) -> torch.Tensor:
        ctx.rows = rows
        rows.arrival = rows.begin(x)
        return x.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        return ctx.rows.take(), None


class EndedTravel(torch.autograd.Function):
    """Waits for the rows that ``BegunTravel`` sent, and begins to send their gradient."""

    @staticmethod
    def forward(ctx: Any, on_the_way: torch.Tensor, rows: Travel) -> torch.Tensor:
        ctx.rows = rows
        return rows.take()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        ctx.rows.arrival = ctx.rows.begin_gradient(grad)
        return grad.new_empty(0), None


class WholeTravel(torch.autograd.Function):
    """Sends rows and waits for them."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rows: Travel) -> torch.Tensor:
        ctx.rows = rows
        return rows.begin(x)()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        return ctx.rows.begin_gradient(grad)(), None
