"""Experts with one activation between two GroupedLinear: fused in FP8, else one op at a time."""

from __future__ import annotations

from typing import Any

import torch

from ...fp8.autocast import graph_task_id, local
from ...fp8.scheme.base import GroupQuantizer
from ...fp8.scheme.gemm_backend import DGRAD, FPROP
from ...ops import grouped_quantize, moe_permute
from ...ops._gated_matrices import in_halves
from ...ops.binding import OpFunction, once_differentiable
from ...ops.grouped_cast import Gated, GatedGradient, Gather, Source
from ...ops.grouped_quantize import GroupedOutput, Groups
from ...ops.swiglu import ClampedSwiglu
from ...permutation import moe_unpermute, permute_with_map
from .._core.fp8_module import FP8Module
from .._core.fused_casts import activate, gate_of, is_gated
from .._core.parallel import is_observed
from .._core.programs import is_autocast, take_saved, without_autocast
from . import on_device
from .on_device import GroupsCall
from .weights import cached_weights


def run_experts(
    fc1: Any,
    fc2: Any,
    x: torch.Tensor,
    indices: torch.Tensor,
    probs: torch.Tensor,
    activation: Any,
    is_first_microbatch: bool | None = None,
    interleaved: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sends each token to its experts and sums their results; differentiable in tokens and probs.

    In FP8 an expert computes ``fc2(act(fc1(token)) * prob)``: the probability is part of what the
    second GEMM casts, so that backward needs no output of an expert, and the second bias times the
    probability is added to the sums. Elsewhere the probability is a factor of the sum, which takes
    no pass of its own.

    Args:
        fc1, fc2: ``GroupedLinear`` with ``single_parameter``.
        x: [tokens, hidden].
        indices: [tokens, k] int32 or int64, each token's experts; a negative one stands for none.
        probs: [tokens, k], their weights.
        activation: as ``fused_casts.activate`` takes it, or a function of [rows, 2 ffn].
        interleaved: FC1 has gates and ups alternately.

    Returns:
        The sums [tokens, hidden] in the dtype of x, and the rows of each expert, int32 [experts].
    """
    experts = fc1.num_gemms
    made = moe_permute.make_map(indices, map_type="index", num_experts=experts)
    counts = made.tokens_per_expert
    probs = probs.float()
    fused = _fused_calls(fc1, fc2, x, activation, is_first_microbatch, interleaved)
    if fused is not None:
        groups = grouped_quantize.groups_of(counts, indices.numel())
        out = ExpertsFunction.apply(x, probs, made.row_id_map, groups.table, *fused)
        return _with_biases(out, indices, probs, fc2._stacked_bias()), counts
    # Only in its call does a layer with hooks, such as those of FSDP2, have its bias.
    inside = _in_region(fc1) and not (fc2.use_bias and is_observed(fc2))
    rows, row_probs = permute_with_map(x, probs if inside else None, made.row_id_map, indices)
    hidden = fc1(rows, counts, is_first_microbatch)
    hidden = activated(activation, in_halves(hidden) if interleaved else hidden, row_probs)
    if not inside or not fc2.use_bias:
        out = fc2(hidden, counts, is_first_microbatch)
        out = moe_unpermute(out, made.row_id_map, None if inside else probs, map_type="index")
    else:
        out = fc2._multiply(hidden, counts, is_first_microbatch, with_bias=False)
        out = moe_unpermute(out, made.row_id_map, map_type="index")
        out = _with_biases(out, indices, probs, fc2._stacked_bias())
    return out.to(x.dtype), counts


def run_ordered(
    fc1: Any,
    fc2: Any,
    rows: torch.Tensor,
    m_splits: Any,
    activation: Any,
    is_first_microbatch: bool | None = None,
    probs: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes ``fc2(act(fc1(rows)) * probs)`` of rows in the order of experts.

    It is differentiable in rows and probs.

    Args:
        fc1, fc2, activation: as in ``run_experts``.
        rows: [rows, hidden], such as a ``TokenDispatcher`` gives, which weights the results.
        m_splits: as ``GroupedLinear.forward`` takes it.
        probs: float32 [rows], or None for ones.

    Returns:
        [rows, hidden], zeros in rows after the last expert's. It is bitwise the same fused or not,
        except that with probs the fused function rounds only the product with them.
    """
    out = run_fused(fc1, fc2, rows, m_splits, activation, is_first_microbatch, probs)
    if out is not None:
        return out
    hidden = activated(activation, fc1(rows, m_splits, is_first_microbatch), probs)
    return fc2(hidden, m_splits, is_first_microbatch)


def run_fused(
    fc1: Any,
    fc2: Any,
    rows: torch.Tensor,
    m_splits: Any,
    activation: Any,
    is_first_microbatch: bool | None = None,
    probs: torch.Tensor | None = None,
    ran_hooks: bool = False,
) -> torch.Tensor | None:
    """Computes ``run_ordered`` as one function; None if that does not serve the call.

    ``ran_hooks``: the caller has run the layers' hooks before a forward.
    """
    # The function leaves the second bias to its caller.
    if fc2.use_bias:
        return None
    fused = _fused_calls(fc1, fc2, rows, activation, is_first_microbatch, ran_hooks=ran_hooks)
    if fused is None:
        return None
    splits = on_device.table_splits(fc1, m_splits, rows.shape[0], rows.device)
    groups = grouped_quantize.groups_of(splits, rows.shape[0])
    out: torch.Tensor = ExpertsFunction.apply(rows, probs, None, groups.table, *fused)
    return out


def activated(
    activation: Any, hidden: torch.Tensor, probs: torch.Tensor | None = None
) -> torch.Tensor:
    """Computes ``act(hidden)``, times the factors [rows] of its rows if there are any."""
    out: torch.Tensor = activation(hidden) if callable(activation) else activate(activation, hidden)
    return out if probs is None else (out.float() * probs[:, None]).to(out.dtype)


def _with_biases(
    out: torch.Tensor, indices: torch.Tensor, probs: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Returns sums of experts' rows plus ``prob * bias`` of each: a GEMM over all experts.

    It reads and writes the tokens once, not their rows, and its gradients are GEMMs, too.
    """
    if bias is None:
        return out
    experts = bias.shape[0]
    other = (indices < 0) | (indices >= experts)
    columns = indices.masked_fill(other, experts).long()
    weights = probs.new_zeros(len(probs), experts + 1).scatter_add(1, columns, probs)
    return torch.addmm(out, weights[:, :experts].to(out.dtype), bias.to(out.dtype))


def _wgrads(
    call: GroupsCall,
    weights: tuple[torch.Tensor, ...],
    needs: tuple[bool, ...],
    dy: GroupedOutput,
    x: Any,
    x_scale_inv: Any,
    groups: Groups,
) -> list[torch.Tensor | None]:
    """Returns what autograd gets for each stack, from both operands' columnwise copies."""
    contract = call.quantizers.backend.contract_groups
    found: list[torch.Tensor | None] = []
    for i, (weight, need) in enumerate(zip(weights, needs, strict=True)):
        if not need:
            found.append(None)
            continue
        codes: Any = dy.columnwise
        scale_inv = dy.scale_inv
        if len(weights) > 1:  # its rows are so many of dy's columns
            own = slice(i * weight.shape[1], (i + 1) * weight.shape[1])
            codes = codes[own]
            if scale_inv.dim() > 1:  # that of blocks, a line for each 128 rows of dy
                scale_inv = scale_inv[:, own].contiguous()
        swaps = grouped_quantize.lies_transposed(weight)

        def product(
            *out: Any, codes: Any = codes, scale_inv: Any = scale_inv, swaps: bool = swaps
        ) -> torch.Tensor:
            if swaps and out == (False,):  # the gradient lies as its weight does
                operands = x, codes, x_scale_inv, scale_inv, groups
                return contract(*operands, *out, input_first=True).transpose(1, 2)
            return contract(codes, x, scale_inv, x_scale_inv, groups, *out)

        found.append(on_device.stack_gradient(weight, call.options, weight.dtype, product))
    return found


def _fused_calls(
    fc1: Any,
    fc2: Any,
    x: torch.Tensor,
    activation: Any,
    is_first_microbatch: bool | None,
    interleaved: bool = False,
    ran_hooks: bool = False,
) -> tuple | None:
    """Returns the fused function's arguments from ``activation`` on if it serves a call, else None.

    It needs FP8 products of groups whose operands one kernel can make.
    """
    if not is_gated(activation):
        return None
    if torch.compiler.is_compiling() or is_autocast(x.device.type) or not _in_region(fc1):
        return None
    if x.dim() != 2 or not x.shape[0] or x.shape[1] != fc1.in_features:
        return None
    for layer in (fc1, fc2):
        if layer.save_original_input or layer.tp_size > 1:
            return None
        # Hooks, such as those of FSDP2, must see the call of their layer.
        if not layer.single_parameter or is_observed(layer, ran_hooks):
            return None
        parameters = *layer._stacked_weights(), layer._stacked_bias()
        if any(t is not None and t.dtype != x.dtype for t in parameters):
            return None
    first, second = (_groups_call(layer, fc2, is_first_microbatch) for layer in (fc1, fc2))
    if first is None or second is None:
        return None
    return (
        gate_of(activation), interleaved, first, second, fc1._stacked_bias(),
        *fc1._stacked_weights(), *fc2._stacked_weights(),
    )  # fmt: skip


def _in_region(layer: FP8Module) -> bool:
    """Returns True if GEMMs run in FP8 or record amax values; a recompute does as its forward."""
    region = local.region
    if region is not None and not (region.enabled or region.calibrating):
        region = None
    if torch.compiler.is_compiling() or graph_task_id() == -1:
        return region is not None
    return layer._modes.recompute is not None or (region is not None and region.in_backward)


def _groups_call(layer: Any, fc2: Any, is_first_microbatch: bool | None) -> GroupsCall | None:
    """Returns the call of one of the two layers, None if the fused function does not serve it."""
    weights = layer._stacked_weights()
    weight = weights[0]
    call = layer.prepare(weight.dtype, weight.device, (), is_first_microbatch)
    if not call.is_fp8 or not on_device.serves(layer, call):
        return None
    quantizers = layer._quantizers_of_groups(call)
    if quantizers.high_precision_wgrad or not quantizers.grad_output.produces(fc2.in_features):
        return None
    cached = cached_weights(layer._modes, weights, quantizers, call.fill)
    shared = on_device.shared_casts(layer)
    options, kept = call.options[0], call.keep_columnwise
    return GroupsCall(quantizers, cached, options, call.dtype, shared, kept)


class ExpertsFunction(OpFunction):
    """Autograd function of ``run_experts`` in FP8: rows are gathered and gated where they are cast.

    Neither permuted nor activated rows are written in 16 bits. The last of ``weights`` is FC2's;
    those before it are FC1's, one or several whose rows follow one another. For ``run_ordered``,
    ``row_id_map`` is None, and ``probs`` is None or [rows].
    """

    LABEL = "experts"

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        probs: torch.Tensor | None,
        row_id_map: torch.Tensor | None,
        table: torch.Tensor,
        activation: str | ClampedSwiglu,
        interleaved: bool,
        first: GroupsCall,
        second: GroupsCall,
        b1: torch.Tensor | None,
        *weights: torch.Tensor,
    ) -> torch.Tensor:
        x = x.contiguous()
        rows = x.shape[0] if row_id_map is None or probs is None else probs.numel()
        groups = Groups(table, rows, (table.numel() - 1) // 3)
        need_x, need_probs, need_b1, need_w1, need_w2 = _needs(ctx)
        # First, as the GPU is long at it while the host issues what follows.
        weight, saved1 = first.cast_weights(weights[:-1], groups, need_x)
        row_of, factor = None, probs
        if row_id_map is not None:
            row_of, factor = moe_permute.tokens_of_rows(row_id_map, rows, probs)
        qx = _cast(first.quantizers.input, x, row_of, groups, True, need_w1)
        hidden = first.multiply(FPROP, qx, weight.rowwise, weight.rowwise_scale_inv, groups)
        saved_x = qx.columnwise, qx.scale_inv
        del qx, weight  # before the next copies, beside which there would be no room for them
        source: Source = Gated(hidden, factor, activation, b1, interleaved)
        qa = second.quantizers.input.produce(source, groups, True, need_w2)
        needs = need_x or need_probs or need_w1 or need_b1
        weight, saved2 = second.cast_weights(weights[-1:], groups, needs)
        y = second.multiply(FPROP, qa, weight.rowwise, weight.rowwise_scale_inv, groups)
        saved_a = qa.columnwise, qa.scale_inv
        del qa, weight, source
        ctx.save_for_backward(
            row_id_map, table, row_of, factor, hidden if needs else None, b1, *saved_x, *saved_a,
            *saved1, *saved2,
        )  # fmt: skip
        ctx.rows = rows
        ctx.counts = len(saved1), len(saved2)
        ctx.calls = first, second
        ctx.weights = weights
        ctx.activation, ctx.interleaved = activation, interleaved
        ctx.device_type = x.device.type
        if row_id_map is not None:
            return moe_permute.unpermute(y, row_id_map)
        grouped_quantize.finish_rows(y, groups)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple:
        return without_autocast(_backward, ctx, grad_output)


def _cast(
    quantizer: GroupQuantizer,
    x: torch.Tensor,
    row_of: torch.Tensor | None,
    groups: Groups,
    rowwise: bool,
    columnwise: bool,
) -> GroupedOutput:
    """Returns FP8 copies of the rows ``row_of`` of x, or of all in their order for None."""
    if row_of is None:
        return quantizer.quantize(x, groups, rowwise, columnwise)
    return quantizer.produce(Gather(x, row_of), groups, rowwise, columnwise)


def _backward(ctx: Any, grad_output: torch.Tensor) -> tuple:
    row_id_map, table, row_of, factor, hidden, b1, x, x_scale, a, a_scale, *rest = take_saved(ctx)
    saved1, saved2 = rest[: ctx.counts[0]], rest[ctx.counts[0] :]
    del rest  # copies of weights go as soon as they were multiplied
    need_x, need_probs, need_b1, need_w1, need_w2 = _needs(ctx)
    (first, second), weights = ctx.calls, ctx.weights
    of_weights = ctx.needs_input_grad[-len(weights) :]
    rows = ctx.rows
    groups = Groups(table, rows, (table.numel() - 1) // 3)
    needs = need_x or need_probs or need_w1 or need_b1
    # Weights' gradients come last where they take memory, else first, as their operands go then.
    writes = first.options.accumulate is not None
    quantizer, grad_output = second.quantizers.grad_output, grad_output.contiguous()
    dy = _cast(quantizer, grad_output, row_of, groups, needs, need_w2)
    grads_w1: list[torch.Tensor | None] = [None] * (len(weights) - 1)
    grad_x = grad_probs = grad_b1 = None
    grads_w2: list[torch.Tensor | None] = []
    if writes:
        grads_w2 = _wgrads(second, weights[-1:], of_weights[-1:], dy, a, a_scale, groups)
        del a
        dy = dy._replace(columnwise=None)
    if needs:
        grad_a = second.multiply(DGRAD, dy, *second.recast_weights(saved2, groups), groups)
    del saved2
    if not writes:
        grads_w2 = _wgrads(second, weights[-1:], of_weights[-1:], dy, a, a_scale, groups)
        del a
    del dy
    if needs:
        row_grads = factor.new_empty(rows) if need_probs else None
        grad_b1 = torch.empty_like(b1) if need_b1 else None
        source: Source = GatedGradient(grad_a, hidden, factor, ctx.activation, b1, ctx.interleaved)
        produce = first.quantizers.grad_output.produce
        dh = produce(source, groups, True, need_w1, row_grads, grad_b1)
        del source, grad_a, hidden
        if writes:
            grads_w1 = _wgrads(first, weights[:-1], of_weights[:-1], dh, x, x_scale, groups)
            del x
            dh = dh._replace(columnwise=None)
        if need_x:
            grad_x = first.multiply(DGRAD, dh, *first.recast_weights(saved1, groups), groups)
            del saved1
            if row_id_map is None:
                grouped_quantize.finish_rows(grad_x, groups)
                grad_probs = row_grads
            else:
                grad_x, grad_probs = moe_permute.permute_bwd(grad_x, row_id_map, row_grads)
        elif need_probs and row_id_map is None:
            grad_probs = row_grads
        elif need_probs:
            nothing = factor.new_empty((rows, 1))
            grad_probs = moe_permute.permute_bwd(nothing, row_id_map, row_grads)[1]
        if not writes:
            dh = dh._replace(rowwise=None)
            grads_w1 = _wgrads(first, weights[:-1], of_weights[:-1], dh, x, x_scale, groups)
    return grad_x, grad_probs, *(None,) * 6, grad_b1, *grads_w1, *grads_w2


def _needs(ctx: Any) -> tuple[bool, bool, bool, bool, bool]:
    """Returns True for each of rows, probs, bias, FC1's weights and FC2's that needs a gradient."""
    need_x, need_probs, *rest = ctx.needs_input_grad
    return need_x, need_probs, rest[6], any(rest[7:-1]), rest[-1]
