"""Experts: linear layer, gated activation and linear layer of each group of rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..recipe import Recipe
from ..runtime.op_options import ClampedSwiglu
from . import fp8_state
from .grouped_layer import GroupLayer, linear
from .ops import grouped_quantize, moe_permute
from .ops._gradient import flag, gradients_like, is_wanted, kinds_of, materialised, values_of
from .ops.grouped_cast import Gated, GatedGradient, Gather
from .ops.grouped_quantize import Groups
from .ops.swiglu import swiglu
from .quantizer.groups import group_quantizer_of
from .region import active_recipe


class Experts(NamedTuple):
    """Parameters of experts.

    Attributes:
        wi: [experts, in, 2F], the gates first.
        wo: [experts, F, out].
        wi_bias: [experts, 2F] or None.
        wo_bias: [experts, out] or None.
    """

    wi: jax.Array
    wi_bias: jax.Array | None
    wo: jax.Array
    wo_bias: jax.Array | None


def run_experts(
    x: jax.Array,
    index: jax.Array,
    probs: jax.Array,
    experts: Experts,
    states: tuple[Mapping[str, Any], Mapping[str, Any]],
    activation: str | ClampedSwiglu,
) -> jax.Array:
    """Sends each token to its experts and sums their results, times probs; differentiable.

    In FP8 the probability is a factor of what the second GEMM casts, elsewhere of its result.

    Args:
        x: [tokens, in].
        index: int32 [tokens, k], different experts of each token; a negative one stands for none.
        probs: float32 [tokens, k].
        experts: the parameters, in x's dtype.
        states: FP8 state of each GEMM of the experts, empty for a recipe without state.
    """
    count = len(experts.wi)
    row_map = moe_permute.make_map(index, map_type="index", num_experts=count)
    # No more of a token's copies have an expert here.
    rows = len(x) * min(index.shape[1], count)
    groups = grouped_quantize.groups_of(row_map.tokens_per_expert, rows)
    ids, recipe = row_map.row_id_map, active_recipe()
    if recipe is None:
        h = moe_permute.permute(x, ids, rows)[0]
        h = linear(h, experts.wi, experts.wi_bias, groups)
        h = linear(swiglu(h, activation=activation), experts.wo, None, groups)
        out = moe_permute.unpermute(h, ids, probs)
    else:
        run = _fp8_experts(recipe, activation)
        parameters = x, probs, experts.wi, experts.wi_bias, experts.wo
        out = run(*parameters, *map(dict, states), ids, groups)
    if experts.wo_bias is None:
        return out
    chosen = index[..., None] == jnp.arange(count)
    weights = jnp.where(chosen, probs[..., None], 0).sum(1).astype(x.dtype)
    sums = jnp.dot(weights, experts.wo_bias, precision=jax.lax.Precision.HIGHEST)
    return out + sums.astype(x.dtype)


@functools.lru_cache(maxsize=64)
def _fp8_experts(recipe: Recipe, activation: str | ClampedSwiglu) -> Callable[..., jax.Array]:
    """Returns the differentiable experts of a recipe: x is gathered and gated where it is cast."""
    keeps_state = group_quantizer_of("moe", recipe).keeps_state

    def layers(states: Any, groups: Groups) -> tuple[GroupLayer, GroupLayer]:
        if not keeps_state:
            return GroupLayer("moe", recipe, {}, groups), GroupLayer("moe", recipe, {}, groups)
        if not all(states):
            raise ValueError("moe: states must be given with DelayedScaling, got none")
        whole = (fp8_state.as_floats(state) for state in states)
        chosen: Any = recipe
        one, two = (
            GroupLayer("moe", recipe, fp8_state.entered(each, chosen), groups) for each in whole
        )
        return one, two

    def forward(primals: Any, both: Any, ids: Any, groups: Groups, wanted: Any) -> Any:
        """Returns the output, and what backward needs."""
        x, probs, wi, wi_bias, wo = primals
        with_x, _, with_wi, _, with_wo = wanted
        one, two = both
        row_of, factor = moe_permute.tokens_of_rows(ids, groups.rows, probs)
        qx = one.cast(Gather(x, row_of), "input", rowwise=True, columnwise=with_wi)
        qwi = one.cast(wi, "weight", rowwise=with_x, columnwise=True)
        h = one.multiply("fprop", qx.rowwise, qwi.columnwise, x.dtype)
        gated = Gated(h, factor, activation, wi_bias)
        qa = two.cast(gated, "input", rowwise=True, columnwise=with_wo)
        qwo = two.cast(wo, "weight", rowwise=any(wanted[:4]), columnwise=True)
        y = two.multiply("fprop", qa.rowwise, qwo.columnwise, x.dtype)
        kept = row_of, factor, h, qx.columnwise, qa.columnwise, qwi.rowwise, qwo.rowwise
        return moe_permute.unpermute(y, ids), kept

    def backward(dy: Any, both: Any, kept: Any, wi_bias: Any, ids: Any, wanted: Any) -> Any:
        """Returns the gradients of the primals, None for those not wanted."""
        one, two = both
        row_of, factor, h, qx, qa, qwi, qwo = kept
        dx = dprobs = dwi = dwi_bias = dwo = None
        with_x, with_probs, with_wi, with_bias, with_wo = wanted
        through = any(wanted[:4])
        qdy = two.cast(Gather(dy, row_of), "grad", rowwise=through, columnwise=with_wo)
        if with_wo:
            dwo = two.contract(qa, qdy.columnwise, dy.dtype)
        if through:
            da = two.multiply("dgrad", qdy.rowwise, qwo, dy.dtype)
            dh = one.cast(
                GatedGradient(da, h, factor, activation, wi_bias), "grad",
                rowwise=with_x or not with_wi, columnwise=with_wi, factor_grad=with_probs,
                bias_grad=with_bias,
            )  # fmt: skip
            dwi_bias = dh.bias_grad
            rows = jnp.zeros((len(factor), 0), dy.dtype)
            if with_x:
                rows = one.multiply("dgrad", dh.rowwise, qwi, dy.dtype)
            if with_x or with_probs:
                dx, dprobs = moe_permute.permute_bwd(rows, ids, dh.factor_grad)
                dx = dx if with_x else None
            if with_wi:
                dwi = one.contract(qx, dh.columnwise, dy.dtype)
        return dx, dprobs, dwi, dwi_bias, dwo

    @jax.custom_vjp
    def run(*args: Any) -> Any:
        *primals, first, second, ids, groups = args
        both = layers((first, second), groups)
        return forward(primals, both, ids, groups, [False] * len(primals))[0]

    def fwd(*args: Any) -> Any:
        *given, first, second, ids, groups = args
        primals, wanted = values_of(given), [flag(p) for p in given]
        states = [fp8_state.differentiated(each, given[2:]) for each in (first, second)]
        ids = ids.value
        groups = jax.tree.map(lambda p: p.value, groups, is_leaf=lambda p: hasattr(p, "perturbed"))
        both = layers(states, groups)
        y, kept = forward(primals, both, ids, groups, [*map(is_wanted, wanted)])
        kinds = kinds_of(primals)
        after = [each.state for each in both]
        return y, (wanted, kinds, kept, primals[3], ids, groups, after, states)

    def bwd(residuals: Any, dy: Any) -> Any:
        wanted, kinds, kept, wi_bias, ids, groups, states, before = residuals
        both = [GroupLayer("moe", recipe, state, groups) for state in states]
        dy, wanted = materialised(dy), [*map(is_wanted, wanted)]
        made = gradients_like(kinds, backward(dy, both, kept, wi_bias, ids, wanted))
        after = map(fp8_state.whole_cotangent, (layer.state for layer in both), before)
        return (*made, *after, None, None)

    run.defvjp(fwd, bwd, symbolic_zeros=True)
    return run
