"""Dense layers of groups of rows, such as experts' tokens, whose sizes are on the device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..recipe import Recipe
from . import fp8_state
from ._partition import Kind, gradient_like
from .first_step import FIRST_DUE, SLOTS
from .ops import grouped_quantize as op
from .ops._gradient import flag, is_wanted, materialised
from .ops.grouped_gemm import (
    contract_groups,
    multiply_groups,
    scaled_contract_groups,
    scaled_multiply_groups,
)
from .quantize import QuantizerSet, entered, refuse
from .region import active_recipe

__all__ = ["grouped_dense"]

_NAME = "grouped_dense"
_QUANTIZERS = ("delayed", "current")


def grouped_dense(
    x: jax.Array, kernel: jax.Array, group_sizes: jax.Array,
    contracting_dims: tuple[Sequence[int], Sequence[int]] = ((1,), (1,)),
    bias: jax.Array | None = None, precision: Any = jax.lax.Precision.DEFAULT,
    preferred_element_type: Any = None, group_offset: None = None,
    quantizer_set: QuantizerSet | None = None,
    kernel_fsdp_info: tuple[str | None, int] = (None, -1),
) -> jax.Array:  # fmt: skip
    """Computes x[r] @ kernel[g] + bias[g] for each row r of each group g, differentiably.

    The groups lie one after the other in ``x``. Their sizes are read on the device: other sizes
    trace nothing anew. Rows after the last group give zeros. In FP8 each group's rows, kernel and
    gradient have scales of their own, and results have bfloat16's precision.

    Args:
        x: [rows, in] float32, float16 or bfloat16.
        kernel: [groups, in, out], cast to x's dtype.
        group_sizes: [groups] int32 or int64. If one is negative or their sum exceeds the rows, the
            result is NaN.
        contracting_dims: must be ((1,), (1,)).
        bias: [groups, out] or None.
        precision: not used; sums are float32.
        preferred_element_type: dtype of the result; None: x's.
        group_offset: must be None.
        quantizer_set: recipe and FP8 state, of ``create_set`` with ``n_groups``;
            ``noop_quantizer_set`` multiplies in x's dtype. None uses the region's recipe, which
            must keep no state.
        kernel_fsdp_info: must be (None, -1).

    Returns:
        [rows, out].

    Raises:
        TypeError: a dtype is not one of those listed.
        ValueError: a shape does not match, or ``quantizer_set`` is None in a region with delayed
            scaling.
        NotImplementedError: the recipe has scales of blocks or ``first_step="current"``, or an
            argument that must have one value has another.
    """
    refuse(_NAME, group_offset=group_offset)
    dims = tuple(map(tuple, contracting_dims))
    if dims != ((1,), (1,)) or tuple(kernel_fsdp_info) != (None, -1):
        raise NotImplementedError(
            f"{_NAME}: contracting_dims and kernel_fsdp_info must be ((1,), (1,)) and (None, -1),"
            f" got {dims} and {kernel_fsdp_info}"
        )
    shapes = [list(jnp.shape(each)) for each in (x, kernel, group_sizes)]
    if len(shapes[0]) != 2 or shapes[1][:2] != [*shapes[2], shapes[0][1]] or len(shapes[1]) != 3:
        raise ValueError(
            f"{_NAME}: x, kernel and group_sizes must be [rows, in], [groups, in, out] and"
            f" [groups], got {shapes[0]}, {shapes[1]} and {shapes[2]}"
        )
    count, _, out = shapes[1]
    if bias is not None and jnp.shape(bias) != (count, out):
        raise ValueError(f"{_NAME}: bias must be {[count, out]}, got {list(jnp.shape(bias))}")
    with entered(_NAME, quantizer_set, groups=count) as state:
        recipe: Any = active_recipe()
        if recipe is not None and (recipe.quantizer not in _QUANTIZERS or FIRST_DUE in state):
            raise NotImplementedError(
                f"{_NAME}: the recipe must have one scale for each group and no first_step, got"
                f" {recipe!r}"
            )
        groups = op.groups_of(group_sizes, shapes[0][0])
        given = (p if p is None else p.astype(x.dtype) for p in (kernel, bias))
        y = _layer(recipe)(x, *given, groups, state)
    return y if preferred_element_type is None else y.astype(preferred_element_type)


class _Casts:
    """Casts of groups to FP8 with one scale each, and GEMMs of them."""

    def __init__(self, recipe: Any) -> None:
        self._recipe = recipe
        self._is_delayed = recipe.quantizer == "delayed"
        self._split = dict(
            zip(("fprop", "dgrad", "wgrad"), recipe.use_split_accumulator, strict=True)
        )
        self._dtypes = dict(zip(SLOTS, recipe.fp8_format.value.dtype_names, strict=True))

    def entered(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the state with updated scales."""
        if not self._is_delayed:
            return {}
        return fp8_state.entered(fp8_state.as_floats(state), self._recipe)

    def cast(
        self, cast: Callable[..., Any], count: int, state: Any, way: str, slot: int, **wanted: bool
    ) -> tuple[op.GroupedOutput, Any]:
        """Returns what ``cast`` makes of the operand in ``slot``, and the state with its amax."""
        dtype, zeros = self._dtypes[way], jnp.zeros(count, jnp.float32)
        if self._is_delayed:
            made = cast(state[f"scale_{way}"][slot :: SLOTS[way]], dtype, amax=zeros, **wanted)
            name = f"amax_history_{way}"
            staged = state[name].at[0, slot :: SLOTS[way]].set(made.amax)
            return made, {**state, name: staged}
        measured = cast(zeros, dtype, rowwise=False, columnwise=False, amax=zeros)
        scale, scale_inv = op.scales_of(
            measured.amax, dtype, eps=self._recipe.eps, pow2=self._recipe.pow2
        )
        return cast(scale, dtype, scale_inv=scale_inv, **wanted), state

    def multiply(
        self, product: str, q: op.GroupedOutput, matrices: Any, groups: op.Groups, dtype: Any
    ) -> jax.Array:
        """Multiplies each row by its group's matrix, given with its scales."""
        codes, scales = matrices
        fast = not self._split[product]
        out = scaled_multiply_groups(q.rowwise, q.row_scale_inv, codes, scales, groups, fast)
        return out.astype(dtype)

    def contract(self, x: Any, qdy: op.GroupedOutput, groups: op.Groups, dtype: Any) -> jax.Array:
        """Multiplies each group's columns of x, given with their scales, by those of dy."""
        codes, scales = x
        made = scaled_contract_groups(
            codes, scales, qdy.columnwise, qdy.scale_inv, groups.column_ends,
            not self._split["wgrad"], dtype == jnp.float32,
        )  # fmt: skip
        return made.astype(dtype)


@functools.lru_cache(maxsize=64)
def _layer(recipe: Recipe | None) -> Callable[..., jax.Array]:
    """Returns the differentiable layer of a recipe; None multiplies in x's dtype."""
    casts = None if recipe is None else _Casts(recipe)
    precise_wgrad = casts is None or recipe.override_linear_precision[2]  # type: ignore[union-attr]

    def forward(x: Any, kernel: Any, bias: Any, groups: op.Groups, state: Any, keep: Any) -> Any:
        """Returns y, what backward needs of x and of the kernel, and the state."""
        with_dx, with_dkernel = keep
        if casts is None:
            y = multiply_groups(x, kernel.swapaxes(1, 2), groups)
            kept_x, kept_kernel = x, kernel
        else:
            copies = with_dkernel and not precise_wgrad
            cast_x = functools.partial(op.quantize_groups, x, groups)
            cast_kernel = functools.partial(op.quantize_matrices, kernel)
            count = groups.num_groups
            qx, state = casts.cast(cast_x, count, state, "fwd", 0, rowwise=True, columnwise=copies)
            qk, state = casts.cast(
                cast_kernel, count, state, "fwd", 1, rowwise=with_dx, columnwise=True
            )
            y = casts.multiply("fprop", qx, (qk.columnwise, qk.scale_inv), groups, x.dtype)
            kept_x = (qx.columnwise, qx.scale_inv) if copies else x
            kept_kernel = qk.rowwise, qk.scale_inv
        kept = kept_x if with_dkernel else None, kept_kernel if with_dx else None
        return op.finish_rows(y, groups, bias), kept, state

    @jax.custom_vjp
    def layer(x: Any, kernel: Any, bias: Any, groups: op.Groups, state: Any) -> Any:
        entered = state if casts is None else casts.entered(state)
        return forward(x, kernel, bias, groups, entered, (False, False))[0]

    def fwd(x: Any, kernel: Any, bias: Any, groups: Any, state: Any) -> Any:
        wanted = flag(x), flag(kernel), flag(bias)
        own = x.value, kernel.value, None if bias is None else bias.value
        groups = op.Groups(groups.table.value, groups.rows, groups.num_groups)
        before = fp8_state.differentiated(state, (kernel, bias))
        entered = before if casts is None else casts.entered(before)
        keep = is_wanted(wanted[0]), is_wanted(wanted[1])
        y, kept, moved = forward(own[0], own[1], own[2], groups, entered, keep)
        kinds = [None if p is None else Kind(jax.typeof(p)) for p in own]
        return y, (wanted, kinds, kept, groups, moved, before)

    def bwd(residuals: Any, dy: Any) -> Any:
        wanted, (x, kernel, bias), (kept_x, kept_kernel), groups, state, before = residuals
        with_dx, with_dkernel, with_dbias = map(is_wanted, wanted)
        dy = materialised(dy)
        dx = dkernel = dbias = None
        if casts is None:
            dx = multiply_groups(dy, kept_kernel, groups) if with_dx else None
        else:
            cast_dy = functools.partial(op.quantize_groups, dy, groups)
            columns = with_dkernel and not precise_wgrad
            qdy, state = casts.cast(
                cast_dy, groups.num_groups, state, "bwd", 0, rowwise=with_dx or not columns,
                columnwise=columns,
            )  # fmt: skip
            if with_dx:
                dx = casts.multiply("dgrad", qdy, kept_kernel, groups, x.aval.dtype)
            if columns:
                dkernel = casts.contract(kept_x, qdy, groups, kernel.aval.dtype)
        if with_dkernel and precise_wgrad:
            dkernel = contract_groups(kept_x.T, dy, groups)
        if with_dbias:
            dbias = op.column_sums(dy, groups).astype(bias.aval.dtype)
        # Of groups without rows, sums are undefined.
        finish = (op.finish_rows, op.zero_unused, op.zero_unused)
        gradients = (
            made if made is None else gradient_like(kind, defined(made, groups))
            for kind, made, defined in zip(
                (x, kernel, bias), (dx, dkernel, dbias), finish, strict=True
            )
        )
        after = {
            name: jax.lax.convert_element_type(state[name], leaf.dtype)
            for name, leaf in before.items()
        }
        return (*gradients, None, after)

    layer.defvjp(fwd, bwd, symbolic_zeros=True)
    return layer
