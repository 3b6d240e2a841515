"""Norm and MLP as a function, in FP8 inside of a region."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name

from .activation import Function, Params, activated, gate_of, ordered
from .dense import dense_with_state
from .gated_mlp import gated_mlp
from .layernorm import in_dtype, norm_of, normalised
from .layernorm_dense import NormOf
from .places import Axes, is_placed, placed
from .product import can_fuse_activation, can_fuse_norm
from .quantize import QuantizerSet, entered, refuse

__all__ = ["layernorm_mlp"]


def layernorm_mlp(
    x: jax.Array, gamma: jax.Array, beta: jax.Array | None, kernels: Sequence[jax.Array],
    biases: Sequence[jax.Array | None], norm_type: str, zero_centered_gamma: bool = False,
    epsilon: float = 1e-6, transpose_batch_sequence: bool = False,
    norm_input_axes: Axes | None = None, dot_1_input_axes: Axes | None = None,
    dot_2_input_axes: Axes | None = None, kernel_1_axes: Axes | None = None,
    kernel_2_axes: Axes | None = None, ffn1_ckpt_name: str = "ffn1", ffn2_ckpt_name: str = "ffn2",
    activation_type: Sequence[str | Function] = ("gelu",), activation_params: Params = None,
    collective_op_sets: None = None, quantizer_sets: Sequence[QuantizerSet | None] = (None, None),
) -> jax.Array:  # fmt: skip
    """Computes activation(norm(x) @ kernel_1 + bias_1) @ kernel_2 + bias_2, differentiably.

    In FP8 the norm and a gated activation write their results in FP8 where they can.

    Args:
        x: [..., in] float32, float16 or bfloat16.
        gamma, beta, norm_type, zero_centered_gamma, epsilon: as in ``layernorm``.
        kernels: [in, parts, F] and [F, out], cast to x's dtype.
        biases: [parts, F] and [out], or None for each.
        transpose_batch_sequence: no effect; the result is the same for both layouts.
        norm_input_axes, dot_1_input_axes, dot_2_input_axes, kernel_1_axes, kernel_2_axes: logical
            axes to which ``x``, the inputs of both GEMMs and the kernels are constrained under
            Flax's rules; None does not constrain them.
        ffn1_ckpt_name, ffn2_ckpt_name: names of the GEMMs' results for policies of
            ``jax.checkpoint``; a first result that only a fused gated MLP has gets none.
        activation_type, activation_params: as ``activation_type`` and ``act_params`` in
            ``activation``; "parts" is the number of functions.
        collective_op_sets: must be None.
        quantizer_sets: recipe and FP8 state of each GEMM, as in ``dense``, with one recipe.

    Returns:
        [..., out] in x's dtype.

    Raises:
        TypeError, ValueError: as ``layernorm``, ``activation`` and ``dense`` do.
        NotImplementedError: ``collective_op_sets`` is not None.
    """
    name = "layernorm_mlp"
    refuse(name, collective_op_sets=collective_op_sets)
    acts = ordered(name, activation_type)
    pairs = {"kernels": kernels, "biases": biases, "quantizer_sets": quantizer_sets}
    for argument, given in pairs.items():
        if len(given) != 2:
            raise ValueError(f"{name}: {argument} must be two, got {len(given)}")
    wi, wo = kernels
    if wi.ndim != 3 or wi.shape[1] != len(acts) or wo.ndim != 2:
        raise ValueError(
            f"{name}: kernels must be [in, {len(acts)}, F] and [F, out], got {list(wi.shape)} and"
            f" {list(wo.shape)}"
        )
    norm = norm_of(name, norm_type, epsilon, zero_centered_gamma, beta)
    names = ffn1_ckpt_name, ffn2_ckpt_name
    between = Between(acts, activation_params, dot_1_input_axes, dot_2_input_axes, names)
    with entered(name, *quantizer_sets) as state:
        x = placed(x, norm_input_axes)
        given_norm = norm, *in_dtype(x, gamma, beta)
        wi, wo = placed(wi, kernel_1_axes), placed(wo, kernel_2_axes)
        parameters = wi, biases[0], wo, biases[1]
        return norm_mlp(name, x, given_norm, parameters, state, between)[0]


class Between(NamedTuple):
    """Options of an MLP beside its norm and its GEMMs.

    Attributes:
        acts: names of the activations, as ``ordered`` returns them.
        params: parameters of a clamped activation.
        dot_1_axes, dot_2_axes: logical axes of the GEMMs' inputs.
        names: names of the GEMMs' results for policies of checkpoints.
        drop: dropout after the activation, or None.
        adapters: functions of a GEMM's input whose results are added to its own; none or two.
    """

    acts: tuple[Any, ...]
    params: Params
    dot_1_axes: Axes | None
    dot_2_axes: Axes | None
    names: tuple[str, str]
    drop: Callable[[jax.Array], jax.Array] | None = None
    adapters: tuple[Callable[[jax.Array], jax.Array], ...] = ()


def norm_mlp(
    owner: str,
    x: jax.Array,
    norm: NormOf | None,
    parameters: Sequence[jax.Array | None],
    state: Mapping[str, jax.Array],
    between: Between,
    returns_norm: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns the output, and the norm's output, which is None where it is only made in FP8.

    ``parameters`` are both kernels, each followed by its bias or None.
    """
    given: list[Any] = [None if p is None else p.astype(x.dtype) for p in parameters]
    gate: Any = gate_of(owner, between.acts, between.params)
    is_fused = x.ndim > 1 and gate is not None and can_fuse_activation(state)
    if between.drop or between.adapters or is_placed(between.dot_2_axes):
        is_fused = False
    writes_fp8 = is_fused and can_fuse_norm(state) and not is_placed(between.dot_1_axes)
    if norm is not None and writes_fp8 and not returns_norm:
        y = gated_mlp(x, (*norm[1:], *given), state, gate, norm[0])
        return checkpoint_name(y, between.names[1]), None
    normed = x if norm is None else normalised(x, *norm)
    h = placed(normed, between.dot_1_axes)
    if is_fused:
        y = gated_mlp(h, (None, None, *given), state, gate)
        return checkpoint_name(y, between.names[1]), normed
    adapters = between.adapters or (None, None)
    wi, wi_bias, wo, wo_bias = given
    h = _adapted(dense_with_state(h, wi, wi_bias, state, 0), h, adapters[0])
    h = checkpoint_name(h, between.names[0])
    h = activated(owner, h, between.acts, between.params)
    h = placed(h if between.drop is None else between.drop(h), between.dot_2_axes)
    y = _adapted(dense_with_state(h, wo, wo_bias, state, 1), h, adapters[1])
    return checkpoint_name(y, between.names[1]), normed


def _adapted(y: jax.Array, x: jax.Array, adapter: Any) -> jax.Array:
    """Adds what an adapter computes of a GEMM's input to the GEMM's result."""
    return y if adapter is None else y + adapter(x)
