"""Autograd functions of ``apex_te.permutation``: token permutation and its inverse."""

from __future__ import annotations

from typing import Any

import torch

from . import moe_permute as _op
from .binding import OpFunction, once_differentiable

_SUMMED = (torch.float32, torch.float16, torch.bfloat16)


def run(
    inp: torch.Tensor,
    probs: torch.Tensor | None,
    routing_map: torch.Tensor,
    rows: int,
    map_type: str,
    num_experts: int | None,
    align_size: int | None,
    row_id_map: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Permutes tokens without autograd, by ``row_id_map`` if given, or else by ``routing_map``.

    Returns the rows, their probs or None, and the new row_id_map or None if one was given.
    """
    if row_id_map is not None:
        return *_op.permute(inp, row_id_map, rows, probs), None
    out, permuted_probs, made = _op.permute_by(
        inp, routing_map, rows, probs,
        map_type=map_type, num_experts=num_experts, align_size=align_size,
    )  # fmt: skip
    return out, permuted_probs, made.row_id_map


class Permute(OpFunction):
    """Autograd function of ``run``, with its arguments and outputs."""

    LABEL = "moe_permute"

    @staticmethod
    def forward(
        ctx: Any,
        inp: torch.Tensor,
        probs: torch.Tensor | None,
        routing_map: torch.Tensor,
        rows: int,
        map_type: str,
        num_experts: int | None,
        align_size: int | None,
        row_id_map: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        _check_differentiable("moe_permute", ctx, inp)
        out, permuted_probs, made = run(
            inp, probs, routing_map, rows, map_type, num_experts, align_size, row_id_map
        )
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(made if row_id_map is None else row_id_map)
        ctx.dtype = inp.dtype
        ctx.hidden = inp.shape[1]
        if made is not None:
            ctx.mark_non_differentiable(made)
        return out, permuted_probs, made

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,
        grad_permuted: torch.Tensor | None,
        grad_permuted_probs: torch.Tensor | None,
        _: None,
    ) -> tuple[torch.Tensor | None, ...]:
        (row_id_map,) = ctx.saved_tensors
        if not ctx.needs_input_grad[1]:
            grad_permuted_probs = None
        grad_inp = grad_probs = None
        if grad_permuted is not None and ctx.needs_input_grad[0]:
            grad_inp, grad_probs = _op.permute_bwd(grad_permuted, row_id_map, grad_permuted_probs)
        elif grad_permuted_probs is not None:  # alone, beside rows of no columns
            empty = grad_permuted_probs.new_empty((grad_permuted_probs.shape[0], 0))
            grad_probs = _op.permute_bwd(empty, row_id_map, grad_permuted_probs)[1]
        return grad_inp, grad_probs, None, None, None, None, None, None


class Unpermute(OpFunction):
    """Autograd function of ``moe_permute.unpermute``, with its arguments and output."""

    LABEL = "moe_unpermute"

    @staticmethod
    def forward(
        ctx: Any, inp: torch.Tensor, row_id_map: torch.Tensor, probs: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.rows = inp.shape[0]
        if probs is None:
            ctx.save_for_backward(row_id_map)
        else:
            inp, probs = inp.contiguous(), probs.contiguous()
            ctx.save_for_backward(row_id_map, inp, probs)
        return _op.unpermute(inp, row_id_map, probs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        row_id_map, *rest = ctx.saved_tensors
        if not rest:
            return _op.permute(grad_output, row_id_map, ctx.rows)[0], None, None
        inp, probs = rest
        grad_inp, grad_probs = _op.unpermute_bwd(grad_output, inp, row_id_map, probs)
        return grad_inp, None, grad_probs


class SortChunks(OpFunction):
    """Autograd function that reorders chunks of rows [rows, hidden] and their probs [rows]."""

    LABEL = "moe_sort_chunks"

    @staticmethod
    def forward(
        ctx: Any,
        inp: torch.Tensor,
        probs: torch.Tensor | None,
        split_sizes: torch.Tensor,
        sorted_index: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        _check_differentiable("moe_sort_chunks", ctx, inp)
        chunk_map = _op.make_chunk_map(split_sizes, sorted_index, inp.shape[0])
        ctx.save_for_backward(chunk_map)
        ctx.set_materialize_grads(False)
        return _op.sort_chunks(inp, chunk_map, probs)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_out: torch.Tensor | None, grad_permuted_probs: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        (chunk_map,) = ctx.saved_tensors
        if grad_out is None:
            if grad_permuted_probs is None:
                return None, None, None, None
            empty = grad_permuted_probs.new_empty((grad_permuted_probs.shape[0], 0))
            grads = _op.sort_chunks(empty, chunk_map, grad_permuted_probs, is_backward=True)
            return None, grads[1], None, None
        grads = _op.sort_chunks(grad_out, chunk_map, grad_permuted_probs, is_backward=True)
        return *grads, None, None


def _check_differentiable(op: str, ctx: Any, inp: torch.Tensor) -> None:
    """Raises TypeError if ``inp``, the forward's first input, needs a gradient but is FP8 data."""
    if ctx.needs_input_grad[0] and inp.dtype not in _SUMMED:
        raise TypeError(
            f"{op}: inp must have dtype float32, float16 or bfloat16 to have a gradient, "
            f"got {inp.dtype}"
        )
