"""Gradients of queries, keys and values, which one op joins and casts to FP8."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .fused_casts import FusedCast
from .joined_columns import JoinedColumns
from .ops._contract import local_call
from .ops._rows import rowwise_by_name
from .ops.fp8_output import FP8Output, wanted

_FUNCTION = "qkv_cast_grad"
_NAMES = ("queries", "keys", "values")


class HeadGradients(FusedCast):
    """Fused cast that joins gradients [..., width] of two or three kernels in their columns'
    layout.
    """

    copies = True

    def __init__(
        self, columns: JoinedColumns, gradients: Sequence[jax.Array], with_dbias: bool
    ) -> None:
        self.flatten_axis = -1 if columns.parts == 1 else -2
        self.with_dbias = with_dbias
        *queries, width, last = columns.widths
        # The op knows of queries, which may have several heads for each of the keys.
        self.can_fuse = (
            width == last and len(queries) < 2 and width > 0 and not any(q % width for q in queries)
        )
        self._columns = columns
        self._gradients = tuple(gradients)

    def plain(self) -> tuple[jax.Array, None]:
        """Returns the joined gradient; see ``FusedCast.plain``."""
        return self._columns.join(self._gradients, self._gradients[0].ndim - 1), None

    def fp8(
        self, scale: jax.Array, dtype: Any, rowwise: bool, columnwise: bool, amax: Any
    ) -> tuple[FP8Output, jax.Array | None]:
        """Returns the joined gradient in FP8 and its column sums; see ``FusedCast.fp8``."""
        lead, with_dbias = self._gradients[0].ndim - 1, self.with_dbias and (rowwise or columnwise)
        heads, terms, columns, split = self._operands(lead)
        given = {**heads, "scale": scale, **({} if amax is None else {"amax": amax})}
        dims = {
            "rowwise": f"r {columns}", "columnwise": f"{columns} r", "scale_inv": "_", "amax": "^",
            "dbias": f"+ {columns}",
        }  # fmt: skip
        names = [*wanted(_FUNCTION, rowwise, columnwise, amax), "scale_inv"]
        names += [*(() if amax is None else ("amax",)), *(("dbias",) if with_dbias else ())]

        def body(tensors: dict[str, jax.Array]) -> dict[str, jax.Array]:
            rows, *groups, size = tensors["keys"].shape
            # One group of heads in each part, its queries before its key and its value.
            for name in heads:
                tensors[name] = tensors[name].reshape(rows, 1, -1, size)
            made = local_call(
                "qkv_cast", _FUNCTION, tensors, names, {"F": jnp.dtype(dtype).name},
                interleaved=True,
            )  # fmt: skip
            first = groups or ([len(heads)] if self._columns.parts is None else [])
            shapes = {
                "rowwise": (rows, *first, -1), "columnwise": (*first, -1, rows),
                "dbias": (*first, -1),
            }  # fmt: skip
            return {n: made[n].reshape(shapes[n]) if n in shapes else made[n] for n in names}

        written = {name: dims[name] for name in names}
        options: dict[str, Any] = {"split": split, "ranks": {"r": lead}}
        made = rowwise_by_name(_FUNCTION, given, terms, written, body, **options)
        return FP8Output(*(made.get(n) for n in FP8Output._fields)), made.get("dbias")

    def _operands(self, lead: int) -> tuple[dict[str, jax.Array], dict[str, str], str, str]:
        """Returns gradients, their dimensions, those of the joined columns, and the names to split.

        The gradients are in a form that devices can share as they share the kernels.
        """
        heads = dict(zip(_NAMES[-len(self._gradients) :], self._gradients, strict=True))
        parts = self._columns.parts
        if parts is None:
            return heads, dict.fromkeys(heads, "r h"), "k h", "r h"
        if parts == 1:
            return heads, {"queries": "r q", "keys": "r g", "values": "r g"}, "c", "r"
        heads = {n: x.reshape(*x.shape[:lead], parts, -1) for n, x in heads.items()}
        return heads, {"queries": "r p q", "keys": "r p g", "values": "r p g"}, "p c", "r p"
