"""Two dense layers around a gated activation in FP8, whose activation writes FP8 itself."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..recipe import DelayedScaling
from . import state as fp8_state
from ._partition import Kind, gradient_like, same_on_all
from .first_step import FIRST_DUE
from .ops._gradient import flag, is_wanted, materialised
from .ops.swiglu import swiglu_bwd_fp8, swiglu_fwd_fp8
from .quantizer import Quantized, quantizer_of
from .quantizer.base import fp8_dtypes, one_scale
from .region import active_recipe

__all__ = ["can_fuse", "gated_mlp"]

# Slots of the FP8 state of each product.
_INPUT, _WEIGHT, _GRAD = 0, 1, 0


def can_fuse(state: Mapping[str, jax.Array]) -> bool:
    """Returns True if ``gated_mlp`` computes what the two layers of the region's recipe do.

    Its scales are known before its casts, and all its products are in FP8.

    Args:
        state: FP8 state of both layers.
    """
    recipe = active_recipe()
    return (
        isinstance(recipe, DelayedScaling)
        and FIRST_DUE not in state
        and not any(recipe.override_linear_precision)
    )


def gated_mlp(
    x: jax.Array,
    parameters: Iterable[jax.Array | None],
    state: Mapping[str, jax.Array],
    activation: str,
) -> jax.Array:
    """Computes (act(gate) * up) @ wo + wo_bias, with gate and up of x @ wi + wi_bias.

    Differentiable. The result of the activation, and in backward the gradient of its input, are
    cast to FP8 from their float32 values. The gradient with respect to ``state`` is the state after
    the step. A region with ``DelayedScaling`` must be enabled for which ``can_fuse`` is True.

    Args:
        x: [..., in] of two dimensions or more, float32, float16 or bfloat16.
        parameters: wi [in, 2, F], gate first, and its bias [2, F] or None; wo [F, out] and its bias
            [out] or None; all in x's dtype.
        state: FP8 state of both layers, as ``state.initial`` makes it for two products.
        activation: of the gate; one of ``ops.swiglu.ACTIVATIONS``.
    """
    recipe = active_recipe()
    assert isinstance(recipe, DelayedScaling)
    whole = dict(state)
    # One argument for each product, whose gradients JAX adds as those of two uses.
    return _layer(recipe, activation)(x, *parameters, whole, whole)


def _scale(part: Mapping[str, Any], way: str, slot: int) -> jax.Array:
    """Returns the scale of a slot of a product's state."""
    return part[f"scale_{way}"][slot : slot + 1]


def _staged(part: Mapping[str, Any], way: str, *amaxes: Any) -> dict[str, Any]:
    """Returns a product's state with the amaxes of its first slots staged."""
    name = f"amax_history_{way}"
    history = part[name]
    for slot, amax in enumerate(amaxes):
        history = history.at[0, slot].set(same_on_all(history, amax)[0])
    return {**part, name: history}


def _rows(q: Quantized) -> tuple[Any, Any]:
    """Returns FP8 data and scales of the rowwise copy."""
    return q.rowwise, q.rowwise_scale_inv


def _columns(q: Quantized) -> tuple[Any, Any]:
    """Returns FP8 data and scales of the columnwise copy."""
    return q.columnwise, q.columnwise_scale_inv


class _Wanted(NamedTuple):
    """Gradients that are wanted, as residuals of ``flag``."""

    x: Any
    wi: Any
    wi_bias: Any
    wo: Any
    wo_bias: Any

    @property
    def through(self) -> bool:
        """True if a gradient in front of the activation is wanted."""
        return any(map(is_wanted, (self.x, self.wi, self.wi_bias)))


class _Steps:
    """Forward and backward of a recipe and an activation.

    Args:
        recipe: the recipe.
        activation: as in ``gated_mlp``.
    """

    def __init__(self, recipe: DelayedScaling, activation: str) -> None:
        self.recipe = recipe
        self._quantizer = quantizer_of(recipe)
        self._dtypes = fp8_dtypes(recipe)
        self._gate: dict[str, Any] = {"activation": activation, "axis": -2}

    def entered(self, state: Mapping[str, Any], gemm: int) -> dict[str, Any]:
        """Returns the part of a product of a state, its scales moved."""
        part = fp8_state.of_gemm(fp8_state.as_floats(state), gemm)
        return fp8_state.entered(part, self.recipe)

    def forward(self, primals: Any, first: Any, second: Any, wanted: _Wanted) -> Any:
        """Returns the output, the activation's input, and the four casts.

        Args:
            primals: x, wi, wi_bias, wo and wo_bias.
            first, second: states of both products.
            wanted: which gradients the casts are kept for.
        """
        x, wi, wi_bias, wo, wo_bias = primals
        cast, multiply = self._quantizer.cast, self._quantizer.multiply
        to: dict[str, Any] = {"out_dtype": x.dtype, "inner": 1}
        qx = cast(
            x, "input", _scale(first, "fwd", _INPUT), flatten_axis=-1, rowwise=True,
            columnwise=is_wanted(wanted.wi),
        )  # fmt: skip
        qwi = cast(
            wi, "weight", _scale(first, "fwd", _WEIGHT), flatten_axis=-2,
            rowwise=is_wanted(wanted.x), columnwise=True,
        )  # fmt: skip
        h = multiply("fprop", _rows(qx), _columns(qwi), bias=wi_bias, **to)
        made = swiglu_fwd_fp8(
            h, None, _scale(second, "fwd", _INPUT), self._dtypes["input"],
            columnwise=is_wanted(wanted.wo), amax=jnp.zeros(1, jnp.float32), **self._gate,
        )  # fmt: skip
        qa = one_scale(made, made.amax)
        qwo = cast(
            wo, "weight", _scale(second, "fwd", _WEIGHT), flatten_axis=-1, rowwise=wanted.through,
            columnwise=True,
        )  # fmt: skip
        y = multiply("fprop", _rows(qa), _columns(qwo), bias=wo_bias, **to)
        return y, h, (qx, qwi, qa, qwo)

    def backward(
        self, dy: Any, h: Any, copies: Any, first: Any, second: Any, wanted: _Wanted
    ) -> tuple[list[Any], Any, Any]:
        """Returns the gradients of the primals, None for those not wanted, and both states.

        Args:
            dy: gradient of the output.
            h: input of the activation.
            copies: columnwise copies of x and the activation, rowwise copies of both weights.
            first, second, wanted: as in ``forward``.
        """
        x_columns, a_columns, wi_rows, wo_rows = copies
        dx = dwi = dwi_bias = dwo = None
        multiply, rows = self._quantizer.multiply, dy.ndim - 1
        to: dict[str, Any] = {"out_dtype": dy.dtype, "bias": None}
        with_dwo, with_dwi = is_wanted(wanted.wo), is_wanted(wanted.wi)
        qdy = self._quantizer.cast(
            dy, "grad", _scale(second, "bwd", _GRAD), flatten_axis=-1,
            rowwise=wanted.through or not with_dwo, columnwise=with_dwo,
            with_dbias=is_wanted(wanted.wo_bias),
        )  # fmt: skip
        second = _staged(second, "bwd", qdy.amax)
        if with_dwo:
            dwo = multiply("wgrad", a_columns, _columns(qdy), inner=rows, **to)
        if wanted.through:
            da = multiply("dgrad", _rows(qdy), wo_rows, inner=1, **to)
            made, dwi_bias = swiglu_bwd_fp8(
                da, h, None, _scale(first, "bwd", _GRAD), self._dtypes["grad"],
                rowwise=is_wanted(wanted.x) or not with_dwi, columnwise=with_dwi,
                amax=jnp.zeros(1, jnp.float32), with_dbias=is_wanted(wanted.wi_bias), **self._gate,
            )  # fmt: skip
            qdh = one_scale(made, made.amax)
            first = _staged(first, "bwd", qdh.amax)
            if is_wanted(wanted.x):
                dx = multiply("dgrad", _rows(qdh), wi_rows, inner=2, **to)
            if with_dwi:
                dwi = multiply("wgrad", x_columns, _columns(qdh), inner=rows, **to)
        return [dx, dwi, dwi_bias, dwo, qdy.dbias], first, second


@functools.lru_cache(maxsize=64)
def _layer(recipe: DelayedScaling, activation: str) -> Callable[..., jax.Array]:
    """Returns the differentiable layer of a recipe and an activation."""
    steps = _Steps(recipe, activation)

    @jax.custom_vjp
    def layer(x: Any, wi: Any, wi_bias: Any, wo: Any, wo_bias: Any, *states: Any) -> Any:
        first, second = (steps.entered(state, gemm) for gemm, state in enumerate(states))
        nothing = _Wanted(None, None, None, None, None)
        return steps.forward((x, wi, wi_bias, wo, wo_bias), first, second, nothing)[0]

    def fwd(*args: Any) -> Any:
        *given, first_state, second_state = args
        primals = [None if p is None else p.value for p in given]
        wanted = _Wanted(*map(flag, given))
        before = [
            {name: leaf.value for name, leaf in state.items()}
            for state in (first_state, second_state)
        ]
        first, second = (steps.entered(state, gemm) for gemm, state in enumerate(before))
        y, h, (qx, qwi, qa, qwo) = steps.forward(primals, first, second, wanted)
        moved = _staged(first, "fwd", qx.amax, qwi.amax), _staged(second, "fwd", qa.amax, qwo.amax)
        kinds = [None if p is None else Kind(jax.typeof(p)) for p in primals]
        copies = _columns(qx), _columns(qa), _rows(qwi), _rows(qwo)
        return y, (wanted, kinds, h if wanted.through else None, copies, moved, before)

    def bwd(kept: Any, dy: Any) -> Any:
        wanted, kinds, h, copies, (first, second), before = kept
        made, *after = steps.backward(materialised(dy), h, copies, first, second, wanted)
        gradients = [
            gradient_like(kind, None if each is None else each.astype(kind.aval.dtype))
            for kind, each in zip(kinds, made, strict=True)
        ]
        states = (
            fp8_state.cotangent(part, gemm, like)
            for gemm, (part, like) in enumerate(zip(after, before, strict=True))
        )
        return (*gradients, *states)

    layer.defvjp(fwd, bwd, symbolic_zeros=True)
    return layer
