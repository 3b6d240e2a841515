"""Casts and GEMMs of a linear layer of groups of rows, whose sizes are on the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ..recipe import Recipe
from ._partition import gradient_like, same_on_all
from .checkpoint_policies import FP8_PRODUCT_NAME, named
from .first_step import FIRST_DUE, SLOTS
from .ops import grouped_gemm, grouped_quantize
from .ops.grouped_quantize import Groups
from .quantizer.groups import Delayed, GroupCast, group_quantizer_of

# A tensor's slot among those of its GEMM in the FP8 state.
_SLOTS = {"input": ("fwd", 0), "weight": ("fwd", 1), "grad": ("bwd", 0)}


@jax.custom_vjp
def linear(x: Any, kernel: Any, bias: Any, groups: Groups) -> Any:
    """Computes ``x @ kernel[g] + bias[g]`` for the rows of each group g, differentiably.

    ``x`` is [rows, in], ``kernel`` [groups, in, out], ``bias`` [groups, out] or None. The result is
    [rows, out] in x's dtype, with zeros after the last group.
    """
    y = grouped_gemm.multiply_groups(x, kernel.swapaxes(1, 2), groups)
    return grouped_quantize.finish_rows(y, groups, bias)


def _linear_fwd(x: Any, kernel: Any, bias: Any, groups: Groups) -> tuple[Any, Any]:
    return linear(x, kernel, bias, groups), (x, kernel, bias, groups)


def _linear_bwd(kept: Any, dy: Any) -> tuple[Any, ...]:
    x, kernel, bias, groups = kept
    dx = grouped_gemm.multiply_groups(dy, kernel, groups)
    dkernel = grouped_gemm.contract_groups(x.T, dy, groups)
    return (
        grouped_quantize.finish_rows(dx, groups),
        gradient_like(kernel, grouped_quantize.zero_unused(dkernel, groups)),
        None if bias is None else gradient_like(bias, grouped_quantize.column_sums(dy, groups)),
        None,
    )


linear.defvjp(_linear_fwd, _linear_bwd)


class GroupLayer:
    """Casts and GEMMs of a linear layer of groups of rows; ``state`` is empty without one."""

    def __init__(self, op: str, recipe: Recipe, state: Mapping[str, Any], groups: Groups) -> None:
        self._recipe: Any = recipe
        self._quantizer = group_quantizer_of(op, recipe)
        self._groups = groups
        self.state = dict(state)

    def cast(self, x: Any, role: str, **options: bool) -> GroupCast:
        """Casts a source's rows or the weights, whose amax values go to the state."""
        scale = None
        if self.state:
            self._set_first(x, role)
            scale = self._slots(role, "scale")
        cast = self._quantizer.rows
        if role == "weight":
            made = self._quantizer.matrices(x, self._groups, scale, **options)
        else:
            made = cast(x, role, self._groups, scale, **options)
        if self.state:
            self._write(role, "amax_history", made.amax)
        return made if role == "grad" else made.named()

    def multiply(self, product: str, a: Any, b: Any, dtype: Any) -> jax.Array:
        """Multiplies the rows of each group by its weight."""
        out = self._quantizer.multiply(product, a, b, self._groups, dtype)
        if product != "fprop":
            return out
        found = named(FP8_PRODUCT_NAME, out)
        assert found is not None
        return found

    def contract(self, x: Any, dy: Any, dtype: Any, wide: bool = False) -> jax.Array:
        """Returns the weights' gradients, ``wide`` unrounded; zeros for groups without rows."""
        made = self._quantizer.contract(x, dy, self._groups, dtype, wide)
        return grouped_quantize.zero_unused(made, self._groups)

    def _places(self, role: str, name: str) -> tuple[str, Any]:
        way, slot = _SLOTS[role]
        if name != FIRST_DUE:
            return f"{name}_{way}", slice(slot, None, SLOTS[way])
        forward = SLOTS["fwd"] * self._groups.num_groups
        start, stop = (0, forward) if way == "fwd" else (forward, None)
        return name, slice(start + slot, stop, SLOTS[way])

    def _slots(self, role: str, name: str) -> jax.Array:
        """Returns an entry of the state for the tensors of one role, [groups]."""
        key, places = self._places(role, name)
        return self.state[key][..., places]

    def _write(self, role: str, name: str, values: Any) -> None:
        """Replaces an entry; of a history, its row of staged amax values."""
        key, places = self._places(role, name)
        leaf = self.state[key]
        at = (0, places) if leaf.ndim > 1 else places
        self.state[key] = leaf.at[at].set(same_on_all(leaf, values))

    def _set_first(self, x: Any, role: str) -> None:
        """Computes the first scales that are due from the groups' amax values."""
        if FIRST_DUE not in self.state:
            return
        quantizer, recipe = self._quantizer, self._recipe
        assert isinstance(quantizer, Delayed)
        limits = recipe.fp8_format.value
        amax = quantizer.amax(x, role, self._groups)
        due, scale, scale_inv = grouped_quantize.first_scales(
            same_on_all(self.state["scale_fwd"], amax), self._groups,
            self._slots(role, FIRST_DUE).astype(jnp.int32), self._slots(role, "scale"),
            self._slots(role, "scale_inv"), limits.max_bwd if role == "grad" else limits.max_fwd,
            margin=recipe.margin, pow2=recipe.scaling_factor_compute_algo == "pow2",
        )  # fmt: skip
        self._write(role, "scale", scale)
        self._write(role, "scale_inv", scale_inv)
        self._write(role, FIRST_DUE, due.astype(jnp.float32))
