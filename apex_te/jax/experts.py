"""Mixtures of experts: router, experts and losses, also with experts spread over devices."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ..runtime.op_options import ClampedSwiglu, gate_arguments
from ._partition import axis_of, constrained, free_axes
from .first_step import FIRST_DUE
from .grouped_mlp import Experts, run_experts
from .ops import _checks
from .ops.moe_router import RouterOptions, route
from .region import active_mesh_resource

__all__ = ["MoEOutput", "moe", "update_expert_bias"]

_NAME = "moe"
_HIGHEST = jax.lax.Precision.HIGHEST


class MoEOutput(NamedTuple):
    """Results of ``moe``.

    Attributes:
        output: [..., hidden] in x's dtype.
        aux_loss: float32 scalar, the load-balance loss times its factor; None for factor 0.
        z_loss: float32 scalar, the router z-loss times its factor; None for factor 0.
        tokens_per_expert: int32 [num_experts], number of tokens that chose each expert.
    """

    output: jax.Array
    aux_loss: jax.Array | None
    z_loss: jax.Array | None
    tokens_per_expert: jax.Array


def moe(
    x: jax.Array,
    gate_kernel: jax.Array,
    wi: jax.Array,
    wo: jax.Array,
    wi_bias: jax.Array | None = None,
    wo_bias: jax.Array | None = None,
    expert_bias: jax.Array | None = None,
    *,
    num_experts_per_tok: int = 2,
    activation_type: str | ClampedSwiglu = "silu",
    score_function: str = "softmax",
    use_pre_softmax: bool = False,
    num_groups: int | None = None,
    group_topk: int | None = None,
    scaling_factor: float | None = None,
    aux_loss_coeff: float = 0.0,
    sequence_aux_loss: bool = False,
    z_loss_coeff: float = 0.0,
    ep_axis: str | None = None,
    states: tuple[Mapping[str, jax.Array], Mapping[str, jax.Array]] = ({}, {}),
) -> MoEOutput:
    """Computes ``sum(prob * expert(x))`` over the best experts of each token.

    An expert is ``(act(gate) * up) @ wo + wo_bias`` of ``gate, up = split(x @ wi + wi_bias)``; its
    GEMMs are in FP8 inside of an enabled ``fp8_autocast`` region. Numbers of tokens are on the
    device: a compiled program serves any. Differentiable; the gradients with respect to ``states``
    are the states after the step. The caller adds the losses to its own.

    Args:
        x: [..., hidden] float32, float16 or bfloat16.
        gate_kernel: [hidden, num_experts] of any of these dtypes; the router computes in float32.
        wi: [experts, hidden, 2 * intermediate] in x's dtype, with the gates first.
        wo: [experts, intermediate, hidden] in x's dtype.
        wi_bias, wo_bias: [experts, 2 * intermediate] and [experts, hidden] in x's dtype, or None.
        expert_bias: float32 [num_experts], added to the scores for the choice alone; None for
            "softmax". ``update_expert_bias`` computes it.
        num_experts_per_tok: number of experts of each token.
        activation_type: activation of the gates, as in ``te.ops.swiglu``.
        score_function, use_pre_softmax, num_groups, group_topk, scaling_factor: as in
            ``apex_te.router.topk_router``.
        aux_loss_coeff: factor of the load-balance loss, 0 for none.
        sequence_aux_loss: compute it for each sequence of x [..., sequence, hidden], and take the
            mean.
        z_loss_coeff: factor of the router z-loss, 0 for none.
        ep_axis: name of the mesh axis over which experts are spread: device r has the r-th part
            of them. In a ``jax.shard_map`` over it, arrays are a device's tokens and experts, but
            for gate_kernel and expert_bias. Elsewhere, under ``jax.set_mesh``, they are whole, and
            tokens are split over this axis, too. No token is dropped.
        states: FP8 state of wi's and of wo's GEMMs, as ``te.state.initial`` makes it for as many
            GEMMs as experts; needed with delayed scaling.

    Returns:
        ``MoEOutput`` of output, aux_loss, z_loss and tokens_per_expert.

    Raises:
        TypeError: an argument has a wrong dtype.
        ValueError: a shape or option does not match, no mesh has the axis, or its devices do not
            divide experts or tokens.
        NotImplementedError: there are more than 1023 experts on a device, or the recipe has HiF8,
            a GEMM in bf16 or fp32, or, with ``ep_axis``, ``first_step="current"``.

    Source: TransformerEngine's ``moe`` in JAX; DeepSeek-V3 (arXiv 2412.19437).
    """
    size, is_manual = (1, True) if ep_axis is None else axis_of(_NAME, "ep_axis", ep_axis)
    experts = Experts(wi, wi_bias, wo, wo_bias)
    _check(x, gate_kernel, experts, size if is_manual else 1)
    gate_arguments(_NAME, activation_type)
    if expert_bias is not None and score_function == "softmax":
        raise ValueError(f"{_NAME}: expert_bias must be None with score_function 'softmax'")
    options = RouterOptions(
        num_experts_per_tok, score_function, use_pre_softmax, num_groups, group_topk,
        scaling_factor,
    )  # fmt: skip
    tokens = x.reshape(-1, x.shape[-1])
    floats = tokens.astype(jnp.float32), gate_kernel.astype(jnp.float32)
    logits = jnp.dot(*floats, precision=_HIGHEST)
    wanted = ("scores",) * bool(aux_loss_coeff) + ("lse",) * bool(z_loss_coeff)
    made = route(logits, options, ("probs", "counts", *wanted), expert_bias)
    aux = z = None
    if aux_loss_coeff:
        sequences = math.prod(x.shape[:-2]) if sequence_aux_loss else None
        aux = _balance_loss(logits, made, options, expert_bias, sequences, aux_loss_coeff)
    if z_loss_coeff:
        z = jnp.square(made.lse).mean() * z_loss_coeff if len(logits) else logits.sum()
    run = functools.partial(run_experts, activation=activation_type)
    given = tokens, made.index, made.probs, experts, states
    if size == 1 or not len(tokens):
        out = run(*given) if len(tokens) else tokens
    else:
        assert ep_axis is not None
        out = _spread(run, given, ep_axis, size, is_manual)
    return MoEOutput(out.reshape(x.shape), aux, z, made.counts[0])


def _check(x: jax.Array, gate_kernel: jax.Array, experts: Experts, parts: int) -> None:
    """Checks dtypes and shapes of tokens and parameters; ``parts`` of them hold all experts."""
    _checks.has_dtype(_NAME, "x", x, _checks.FLOATS)
    hidden = x.shape[-1] if x.ndim else 0
    if gate_kernel.ndim != 2 or gate_kernel.shape[0] != hidden or x.ndim < 1:
        raise ValueError(
            f"{_NAME}: x and gate_kernel must be [..., hidden] and [hidden, num_experts], got"
            f" {list(x.shape)} and {list(gate_kernel.shape)}"
        )
    count, inner = gate_kernel.shape[1] // parts, experts.wo.shape[1] if experts.wo.ndim == 3 else 0
    shapes = (count, hidden, 2 * inner), (count, 2 * inner), (count, inner, hidden), (count, hidden)
    for (name, value), shape in zip(experts._asdict().items(), shapes, strict=True):
        if value is None:
            continue
        _checks.has_shape(_NAME, name, value, shape)
        if value.dtype != x.dtype:
            raise TypeError(f"{_NAME}: {name} must have x's dtype {x.dtype}, got {value.dtype}")


def _balance_loss(
    logits: jax.Array,
    made: Any,
    options: RouterOptions,
    expert_bias: jax.Array | None,
    sequences: int | None,
    coeff: float,
) -> jax.Array:
    """Returns the load-balance loss of the Switch Transformer (arXiv 2101.03961), as PyTorch's.

    Its counts are those of the choice by scores alone.
    """
    (tokens, count), parts = logits.shape, sequences or 1
    if not tokens:
        return logits.sum()
    counts = made.counts
    if sequences is not None or options.group_topk or expert_bias is not None:
        plain = RouterOptions(options.top_k, options.score_function)
        counts = route(jax.lax.stop_gradient(logits), plain, ("counts",), sequences=parts).counts
    sums = made.scores.reshape(parts, -1, count).sum(1)
    total = tokens // parts
    factor = count * coeff / (options.top_k * parts)
    return (sums * counts.astype(jnp.float32)).sum() * factor / total / total


def _spread(run: Any, given: Any, axis: str, size: int, is_manual: bool) -> jax.Array:
    """Runs the experts of all devices of an axis, each for the tokens of all."""
    tokens, _, _, experts, states = given
    if any(FIRST_DUE in state for state in states):
        raise NotImplementedError(
            f"{_NAME}: first_step must be None with ep_axis in JAX, got 'current'"
        )

    def local(x: jax.Array, index: jax.Array, probs: jax.Array, *rest: Any) -> jax.Array:
        return _dispatched(run, axis, x, index, probs, *rest)

    if is_manual:
        return local(*given)
    resource = active_mesh_resource()
    names = (resource.fsdp_resource, resource.dp_resource)
    batch = tuple(name for name in free_axes(names, len(tokens)) if name != axis)
    parts = size * math.prod(jax.sharding.get_abstract_mesh().shape[name] for name in batch)
    for what, extent, by in (("x", len(tokens), parts), ("wi", len(experts.wi), size)):
        if extent % by:
            raise ValueError(
                f"{_NAME}: {what} must have a multiple of {by}"
                f" {'tokens' if what == 'x' else 'experts'} with ep_axis {axis!r}, got {extent}"
            )
    rows, own = PartitionSpec((*batch, axis)), PartitionSpec(axis)
    of_states = jax.tree.map(lambda s: PartitionSpec(None, axis) if s.ndim > 1 else own, states)
    specs = rows, rows, rows, jax.tree.map(lambda _: own, experts), of_states
    mapped = jax.shard_map(local, in_specs=specs, out_specs=rows, axis_names={axis, *batch})
    placed = jax.tree.map(lambda x, to: constrained(x, to, lambda x: x), given, specs)
    return mapped(*placed)


def _dispatched(
    run: Any, axis: str, x: jax.Array, index: jax.Array, probs: jax.Array, experts: Experts,
    states: Any,
) -> jax.Array:  # fmt: skip
    """Sends a device's tokens to the experts of all devices of an axis, and sums the results.

    Every device gathers all tokens, which is the static capacity of the worst case, selects those
    of its experts, and returns sums over its experts, which are added in float32.
    """
    gathered = (jax.lax.all_gather(each, axis, tiled=True) for each in (x, index, probs))
    all_x, all_index, all_probs = gathered
    count = len(experts.wi)
    all_index = all_index - jax.lax.axis_index(axis) * count
    own = jnp.where((all_index >= 0) & (all_index < count), all_index, -1)
    out = run(all_x, own, all_probs, experts, states).astype(jnp.float32)
    return jax.lax.psum_scatter(out, axis, tiled=True).astype(x.dtype)


def update_expert_bias(
    expert_bias: jax.Array, tokens_per_expert: jax.Array, rate: float = 1e-3
) -> jax.Array:
    """Returns ``expert_bias`` updated to balance experts without a loss (arXiv 2408.15664).

    The bias of an expert with fewer tokens than the mean grows by ``rate``, that of one with more
    shrinks by it, and others stay.

    Args:
        expert_bias: float32 [..., experts].
        tokens_per_expert: int32 in the same shape, tokens of each expert since the last update.
        rate: the step.

    Raises:
        ValueError: the shapes differ.
    """
    if expert_bias.shape != tokens_per_expert.shape:
        raise ValueError(
            "update_expert_bias: tokens_per_expert must have the shape of expert_bias,"
            f" {list(expert_bias.shape)}, got {list(tokens_per_expert.shape)}"
        )
    # In integers, as a mean in float32 would be rounded.
    total = tokens_per_expert.sum(-1, keepdims=True)
    missing = jnp.sign(total - tokens_per_expert * tokens_per_expert.shape[-1])
    return expert_bias + rate * missing.astype(expert_bias.dtype)
