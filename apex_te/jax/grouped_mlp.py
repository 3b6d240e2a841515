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
from ._partition import Kind, gradient_like, same_on_all
from .checkpoint_policies import FP8_PRODUCT_NAME, named
from .first_step import FIRST_DUE, SLOTS
from .ops import grouped_gemm, grouped_quantize, moe_permute
from .ops._gradient import flag, is_wanted, materialised
from .ops.grouped_cast import Gated, GatedGradient, Gather
from .ops.grouped_quantize import Groups
from .ops.swiglu import swiglu
from .quantizer.groups import Delayed, GroupCast, group_quantizer_of
from .region import active_recipe

# A tensor's slot among those of its GEMM in the FP8 state.
_SLOTS = {"input": ("fwd", 0), "weight": ("fwd", 1), "grad": ("bwd", 0)}
_State = dict[str, Any]


class Experts(NamedTuple):
    """Parameters of experts: wi [experts, in, 2F] with the gates first, wo [experts, F, out].

    Biases are wi_bias [experts, 2F] and wo_bias [experts, out], or None.
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
        h = _linear(h, experts.wi, experts.wi_bias, groups)
        h = _linear(swiglu(h, activation=activation), experts.wo, None, groups)
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


@jax.custom_vjp
def _linear(x: Any, kernel: Any, bias: Any, groups: Groups) -> Any:
    """Computes ``x @ kernel[g] + bias[g]`` for the rows of each group in x's dtype."""
    y = grouped_gemm.multiply_groups(x, kernel.swapaxes(1, 2), groups)
    return grouped_quantize.finish_rows(y, groups, bias)


def _linear_fwd(x: Any, kernel: Any, bias: Any, groups: Groups) -> tuple[Any, Any]:
    return _linear(x, kernel, bias, groups), (x, kernel, bias, groups)


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


_linear.defvjp(_linear_fwd, _linear_bwd)


class _Layer:
    """Casts and GEMMs of one of the experts' linear layers; ``state`` is empty without one."""

    def __init__(self, recipe: Recipe, state: Mapping[str, Any], groups: Groups) -> None:
        self._recipe: Any = recipe
        self._quantizer = group_quantizer_of(recipe)
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

    def contract(self, x: Any, dy: Any, dtype: Any) -> jax.Array:
        """Returns the weights' gradients; zeros for groups without rows."""
        made = self._quantizer.contract(x, dy, self._groups, dtype)
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


class _Wanted(NamedTuple):
    """Gradients that are wanted, as residuals of ``flag``."""

    x: Any
    probs: Any
    wi: Any
    wi_bias: Any
    wo: Any

    @property
    def through(self) -> bool:
        """Returns True if a gradient before the activation is wanted."""
        return any(map(is_wanted, self[:4]))


@functools.lru_cache(maxsize=64)
def _fp8_experts(recipe: Recipe, activation: str | ClampedSwiglu) -> Callable[..., jax.Array]:
    """Returns the differentiable experts of a recipe: x is gathered and gated where it is cast."""
    keeps_state = group_quantizer_of(recipe).keeps_state

    def layers(states: Any, groups: Groups) -> tuple[_Layer, _Layer]:
        if not keeps_state:
            return _Layer(recipe, {}, groups), _Layer(recipe, {}, groups)
        if not all(states):
            raise ValueError("moe: states must be given with DelayedScaling, got none")
        whole = (fp8_state.as_floats(state) for state in states)
        chosen: Any = recipe
        one, two = (_Layer(recipe, fp8_state.entered(each, chosen), groups) for each in whole)
        return one, two

    def forward(primals: Any, both: Any, ids: Any, groups: Groups, wanted: _Wanted) -> Any:
        """Returns the output, and what backward needs."""
        x, probs, wi, wi_bias, wo = primals
        one, two = both
        row_of, factor = moe_permute.tokens_of_rows(ids, groups.rows, probs)
        qx = one.cast(Gather(x, row_of), "input", rowwise=True, columnwise=is_wanted(wanted.wi))
        qwi = one.cast(wi, "weight", rowwise=is_wanted(wanted.x), columnwise=True)
        h = one.multiply("fprop", qx.rowwise, qwi.columnwise, x.dtype)
        gated = Gated(h, factor, activation, wi_bias)
        qa = two.cast(gated, "input", rowwise=True, columnwise=is_wanted(wanted.wo))
        qwo = two.cast(wo, "weight", rowwise=wanted.through, columnwise=True)
        y = two.multiply("fprop", qa.rowwise, qwo.columnwise, x.dtype)
        kept = row_of, factor, h, qx.columnwise, qa.columnwise, qwi.rowwise, qwo.rowwise
        return moe_permute.unpermute(y, ids), kept

    def backward(dy: Any, both: Any, kept: Any, wi_bias: Any, ids: Any, wanted: _Wanted) -> Any:
        """Returns the gradients of the primals, None for those not wanted."""
        one, two = both
        row_of, factor, h, qx, qa, qwi, qwo = kept
        dx = dprobs = dwi = dwi_bias = dwo = None
        with_x, with_probs, with_wi, with_bias, with_wo = map(is_wanted, wanted)
        qdy = two.cast(Gather(dy, row_of), "grad", rowwise=wanted.through, columnwise=with_wo)
        if with_wo:
            dwo = two.contract(qa, qdy.columnwise, dy.dtype)
        if wanted.through:
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
        return forward(primals, both, ids, groups, _Wanted(*(None for _ in primals)))[0]

    def fwd(*args: Any) -> Any:
        *given, first, second, ids, groups = args
        primals = [None if p is None else p.value for p in given]
        wanted = _Wanted(*map(flag, given))
        states = [fp8_state.differentiated(each, given[2:]) for each in (first, second)]
        ids = ids.value
        groups = jax.tree.map(lambda p: p.value, groups, is_leaf=lambda p: hasattr(p, "perturbed"))
        both = layers(states, groups)
        y, kept = forward(primals, both, ids, groups, wanted)
        kinds = [None if p is None else Kind(jax.typeof(p)) for p in primals]
        after = [each.state for each in both]
        return y, (wanted, kinds, kept, primals[3], ids, groups, after, states)

    def bwd(residuals: Any, dy: Any) -> Any:
        wanted, kinds, kept, wi_bias, ids, groups, states, before = residuals
        both = [_Layer(recipe, state, groups) for state in states]
        made = backward(materialised(dy), both, kept, wi_bias, ids, wanted)
        gradients = [
            gradient_like(kind, None if each is None else each.astype(kind.aval.dtype))
            for kind, each in zip(kinds, made, strict=True)
        ]
        after = [
            fp8_state.whole_cotangent(layer.state, like)
            for layer, like in zip(both, before, strict=True)
        ]
        return (*gradients, *after, None, None)

    run.defvjp(fwd, bwd, symbolic_zeros=True)
    return run
