"""Dense layers of groups of rows, such as experts' tokens, whose sizes are on the device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..recipe import Recipe
from . import fp8_state
from ._partition import gradient_like
from .grouped_layer import GroupLayer, linear
from .ops import grouped_quantize
from .ops._gradient import flag, is_wanted, kinds_of, materialised, values_of
from .ops.grouped_cast import Gather
from .ops.grouped_quantize import Groups
from .quantize import QuantizerSet, entered, refuse
from .quantizer.groups import group_quantizer_of
from .region import active_recipe

__all__ = ["grouped_dense"]

_NAME = "grouped_dense"


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
    gradient have scales of their own, and y and the gradient of x bfloat16's precision.

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
        NotImplementedError: the recipe has HiF8 as its format or ``override_linear_precision``, or
            an argument that must have one value has another.
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
        recipe = active_recipe()
        groups = grouped_quantize.groups_of(group_sizes, shapes[0][0])
        kernel, bias = kernel.astype(x.dtype), None if bias is None else bias.astype(x.dtype)
        if recipe is None:
            y = linear(x, kernel, bias, groups)
        else:
            y = _fp8_layer(recipe)(x, kernel, bias, groups, state)
    return y if preferred_element_type is None else y.astype(preferred_element_type)


@functools.lru_cache(maxsize=64)
def _fp8_layer(recipe: Recipe) -> Callable[..., jax.Array]:
    """Returns the differentiable layer of a recipe."""
    chosen: Any = recipe
    keeps_state = group_quantizer_of("grouped_dense", recipe).keeps_state

    def forward(primals: Any, state: Any, groups: Groups, keep: Any) -> Any:
        """Returns y, the copies of x and kernel that backward needs, and the state."""
        x, kernel, bias = primals
        with_dx, with_dkernel = keep
        entered = fp8_state.entered(fp8_state.as_floats(state), chosen) if keeps_state else {}
        layer = GroupLayer("grouped_dense", recipe, entered, groups)
        qx = layer.cast(_rows(x, groups), "input", rowwise=True, columnwise=with_dkernel)
        qkernel = layer.cast(kernel, "weight", rowwise=with_dx, columnwise=True)
        y = layer.multiply("fprop", qx.rowwise, qkernel.columnwise, x.dtype)
        y = grouped_quantize.finish_rows(y, groups, bias)
        return y, (qx.columnwise, qkernel.rowwise), layer.state

    @jax.custom_vjp
    def run(x: Any, kernel: Any, bias: Any, groups: Groups, state: Any) -> Any:
        return forward((x, kernel, bias), state, groups, (False, False))[0]

    def fwd(x: Any, kernel: Any, bias: Any, groups: Any, state: Any) -> Any:
        wanted = flag(x), flag(kernel), flag(bias)
        primals = values_of((x, kernel, bias))
        groups = jax.tree.map(lambda p: p.value, groups, is_leaf=lambda p: hasattr(p, "perturbed"))
        before = fp8_state.differentiated(state, (kernel, bias))
        keep = is_wanted(wanted[0]), is_wanted(wanted[1])
        y, kept, after = forward(primals, before, groups, keep)
        return y, (wanted, kinds_of(primals), kept, groups, after, before)

    def bwd(residuals: Any, dy: Any) -> Any:
        wanted, kinds, (qx, qkernel), groups, state, before = residuals
        with_dx, with_dkernel, with_dbias = map(is_wanted, wanted)
        layer, dy = GroupLayer("grouped_dense", recipe, state, groups), materialised(dy)
        dx = dkernel = dbias = None
        qdy = layer.cast(
            _rows(dy, groups), "grad", rowwise=with_dx or not with_dkernel, columnwise=with_dkernel
        )
        if with_dx:
            dx = layer.multiply("dgrad", qdy.rowwise, qkernel, kinds[0].aval.dtype)
            dx = grouped_quantize.finish_rows(dx, groups)
        if with_dkernel:
            dtype = kinds[1].aval.dtype
            dkernel = layer.contract(qx, qdy.columnwise, dtype, dtype == jnp.float32)
        if with_dbias:
            dbias = grouped_quantize.column_sums(dy, groups).astype(kinds[2].aval.dtype)
        made = map(gradient_like, kinds, (dx, dkernel, dbias))
        return (*made, None, fp8_state.whole_cotangent(layer.state, before))

    run.defvjp(fwd, bwd, symbolic_zeros=True)
    return run


def _rows(x: jax.Array, groups: Groups) -> Gather:
    """Returns the groups' rows, and zeros after them."""
    rows = jnp.arange(len(x), dtype=jnp.int32)
    return Gather(x, jnp.where(rows < groups.ends[-1], rows, -1))
