"""Norm, dense layer, gated activation, dense layer in FP8: norm and activation write FP8."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..recipe import DelayedScaling
from . import fp8_state
from ._partition import Kind, gradient_like, same_on_all
from .first_step import FIRST_DUE
from .ops._gradient import flag, is_wanted, materialised
from .ops._norm import norm_bwd, norm_fwd
from .ops.fp8_output import FP8Output
from .ops.swiglu import swiglu_bwd_fp8, swiglu_fwd_fp8
from .quantizer import Quantized, quantizer_of
from .quantizer.base import fp8_dtypes, one_scale
from .region import active_recipe

__all__ = ["Norm", "can_fuse", "gated_mlp"]

# Slots of the FP8 state of each product.
_INPUT, _WEIGHT, _GRAD = 0, 1, 0


class Norm(NamedTuple):
    """Norm in front of the layers.

    Attributes:
        op: "rms_norm" or "layer_norm".
        epsilon: added to the variance.
        zero_centered_gamma: the factor is 1 + scale.
    """

    op: str
    epsilon: float
    zero_centered_gamma: bool


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
    norm: Norm | None = None,
) -> jax.Array:
    """Computes (act(gate) * up) @ wo + wo_bias, with gate and up of norm(x) @ wi + wi_bias.

    Differentiable. Results of the norm and the activation, and in backward the gradient of the
    activation's input, are cast to FP8 from their float32 values. The gradient with respect to
    ``state`` is the state after the step. A region with ``DelayedScaling`` must be enabled for
    which ``can_fuse`` is True.

    Args:
        x: [..., in] of two dimensions or more, float32, float16 or bfloat16.
        parameters: scale and bias [in] of the norm, each or both None, in x's dtype or float32;
            then in x's dtype wi [in, 2, F], gate first, and its bias [2, F] or None; wo [F, out]
            and its bias [out] or None.
        state: FP8 state of both layers, as ``state.initial`` makes it for two products.
        activation: of the gate; one of ``ops.swiglu.ACTIVATIONS``.
        norm: the norm, or None.
    """
    recipe = active_recipe()
    assert isinstance(recipe, DelayedScaling)
    whole = dict(state)
    # One argument for each product, whose gradients JAX adds as those of two uses.
    return _layer(recipe, activation, norm)(x, *parameters, whole, whole)


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
    scale: Any
    ln_bias: Any
    wi: Any
    wi_bias: Any
    wo: Any
    wo_bias: Any

    @property
    def in_front(self) -> bool:
        """Returns True if a gradient in front of the first product is wanted."""
        return any(map(is_wanted, (self.x, self.scale, self.ln_bias)))

    @property
    def through(self) -> bool:
        """Returns True if a gradient in front of the activation is wanted."""
        return self.in_front or is_wanted(self.wi) or is_wanted(self.wi_bias)


class _Steps:
    """Forward and backward of a recipe, an activation and a norm.

    Args:
        recipe: the recipe.
        activation, norm: as in ``gated_mlp``.
    """

    def __init__(self, recipe: DelayedScaling, activation: str, norm: Norm | None) -> None:
        self.recipe = recipe
        self.norm = norm
        self._quantizer = quantizer_of(recipe)
        self._dtypes = fp8_dtypes(recipe)
        self._gate: dict[str, Any] = {"activation": activation, "axis": -2}

    def entered(self, state: Mapping[str, Any], gemm: int) -> dict[str, Any]:
        """Returns the part of a product of a state, its scales moved."""
        part = fp8_state.of_gemm(fp8_state.as_floats(state), gemm)
        return fp8_state.entered(part, self.recipe)

    def _input(
        self, x: Any, scale: Any, ln_bias: Any, part: Any, wanted: _Wanted
    ) -> tuple[Quantized, Any]:
        """Returns the cast of x, normalised if there is a norm, and the norm's statistics."""
        slot, columnwise = _scale(part, "fwd", _INPUT), is_wanted(wanted.wi)
        if self.norm is None:
            cast = self._quantizer.cast
            return cast(
                x, "input", slot, flatten_axis=-1, rowwise=True, columnwise=columnwise
            ), None
        fp8 = (slot, self._dtypes["input"], True, columnwise, jnp.zeros(1, jnp.float32))
        op, eps, centered = self.norm
        made = norm_fwd(op, x, scale, ln_bias, eps, centered, None, fp8, any_rank=True)
        output = FP8Output(*(made.get(name) for name in FP8Output._fields))
        statistics = {name: made[name] for name in ("mean", "rstd") if name in made}
        return one_scale(output, output.amax), statistics

    def forward(self, primals: Any, first: Any, second: Any, wanted: _Wanted) -> Any:
        """Returns the output, the activation's input, the norm's statistics, and the four casts.

        Args:
            primals: x and the parameters.
            first, second: states of both products.
            wanted: which gradients the casts are kept for.
        """
        x, scale, ln_bias, wi, wi_bias, wo, wo_bias = primals
        cast, multiply = self._quantizer.cast, self._quantizer.multiply
        to: dict[str, Any] = {"out_dtype": x.dtype, "inner": 1}
        qx, statistics = self._input(x, scale, ln_bias, first, wanted)
        qwi = cast(
            wi, "weight", _scale(first, "fwd", _WEIGHT), flatten_axis=-2,
            rowwise=wanted.in_front, columnwise=True,
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
        return y, h, statistics, (qx, qwi, qa, qwo)

    def backward(
        self, dy: Any, normed: Any, h: Any, copies: Any, first: Any, second: Any, wanted: _Wanted
    ) -> tuple[list[Any], Any, Any]:
        """Returns the gradients of the primals, None for those not wanted, and both states.

        Args:
            dy: gradient of the output.
            normed: x, scale and bias of the norm, and its statistics.
            h: input of the activation.
            copies: columnwise copies of x and the activation, rowwise copies of both weights.
            first, second, wanted: as in ``forward``.
        """
        x_columns, a_columns, wi_rows, wo_rows = copies
        dx = dwi = dwi_bias = dwo = None
        of_norm: list[Any] = [None, None]
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
                rowwise=wanted.in_front or not with_dwi, columnwise=with_dwi,
                amax=jnp.zeros(1, jnp.float32), with_dbias=is_wanted(wanted.wi_bias), **self._gate,
            )  # fmt: skip
            qdh = one_scale(made, made.amax)
            first = _staged(first, "bwd", qdh.amax)
            if wanted.in_front:
                dx = multiply("dgrad", _rows(qdh), wi_rows, inner=2, **to)
                if self.norm is not None:
                    dx, *of_norm = self._norm_backward(dx, normed, wanted)
            if with_dwi:
                dwi = multiply("wgrad", x_columns, _columns(qdh), inner=rows, **to)
        return [dx, *of_norm, dwi, dwi_bias, dwo, qdy.dbias], first, second

    def _norm_backward(self, dy: Any, normed: Any, wanted: _Wanted) -> tuple[Any, Any, Any]:
        """Returns the gradients of x, scale and bias of the norm."""
        assert self.norm is not None
        x, scale, ln_bias, statistics = normed
        made = norm_bwd(
            self.norm.op, dy, x, scale, ln_bias, statistics, self.norm.zero_centered_gamma, None,
            is_wanted(wanted.scale), is_wanted(wanted.ln_bias), any_rank=True,
        )  # fmt: skip
        return made.dx if is_wanted(wanted.x) else None, made.dweight, made.dbias


@functools.lru_cache(maxsize=64)
def _layer(recipe: DelayedScaling, activation: str, norm: Norm | None) -> Callable[..., jax.Array]:
    """Returns the differentiable layer of a recipe, an activation and a norm."""
    steps = _Steps(recipe, activation, norm)

    @jax.custom_vjp
    def layer(*args: Any) -> Any:
        *primals, first_state, second_state = args
        first, second = steps.entered(first_state, 0), steps.entered(second_state, 1)
        nothing = _Wanted(*(None for _ in primals))
        return steps.forward(primals, first, second, nothing)[0]

    def fwd(*args: Any) -> Any:
        *given, first_state, second_state = args
        primals = [None if p is None else p.value for p in given]
        wanted = _Wanted(*map(flag, given))
        before = [
            {name: leaf.value for name, leaf in state.items()}
            for state in (first_state, second_state)
        ]
        first, second = (steps.entered(state, gemm) for gemm, state in enumerate(before))
        y, h, statistics, (qx, qwi, qa, qwo) = steps.forward(primals, first, second, wanted)
        moved = _staged(first, "fwd", qx.amax, qwi.amax), _staged(second, "fwd", qa.amax, qwo.amax)
        kinds = [None if p is None else Kind(jax.typeof(p)) for p in primals]
        copies = _columns(qx), _columns(qa), _rows(qwi), _rows(qwo)
        normed = None if norm is None or not wanted.in_front else (*primals[:3], statistics)
        return y, (wanted, kinds, normed, h if wanted.through else None, copies, moved, before)

    def bwd(kept: Any, dy: Any) -> Any:
        wanted, kinds, normed, h, copies, (first, second), before = kept
        made, *after = steps.backward(materialised(dy), normed, h, copies, first, second, wanted)
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
