"""Rows of tokens copied to their experts' rows and summed back, by a map made on the device."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .argument_errors import checked
from .fp8_output import reinterpreted
from .registration import bind

_map = bind("moe_permute", "moe_permute_map")
_fwd = bind("moe_permute", "moe_permute_fwd")
_rows = bind("moe_permute", "moe_permute_rows")
_unpermute_fwd = bind("moe_permute", "moe_unpermute_fwd")
_unpermute_bwd = bind("moe_permute", "moe_unpermute_bwd")
_chunk_map = bind("moe_permute", "moe_sort_chunks_map")
_sort_chunks = bind("moe_permute", "moe_sort_chunks")

# As csrc/moe_permute/moe_permute.h has them.
MAX_EXPERTS = 1024
_TILE_TOKENS, _MAX_TILES, _ONE_TILE_TOKENS = 32, 128, 128
_ANY_ROWS = 2**31 - 1


class RowMap(NamedTuple):
    """Rows that the copies of each token go to: int32 tensors on the device of the routing map."""

    # [tokens + 2, 1 + 2 * width], one column more with padding: csrc/moe_permute/moe_permute.h
    row_id_map: torch.Tensor
    tokens_per_expert: torch.Tensor  # [experts], rows that were kept
    padded_tokens_per_expert: torch.Tensor  # [experts]; the former where nothing is padded
    pad_offsets: torch.Tensor | None  # [experts], padding rows before each; None without padding


class _Routing(NamedTuple):
    """A routing map as the kernels take it, and what they write about it."""

    routes: torch.Tensor
    workspace: torch.Tensor
    row_id_map: torch.Tensor
    tokens_per_expert: torch.Tensor | None
    num_experts: int
    align_size: int
    is_index: bool

    def result(self) -> RowMap:
        if self.tokens_per_expert is not None:
            counts = self.tokens_per_expert
            return RowMap(self.row_id_map, counts, counts, None)
        experts = self.num_experts
        counts, starts = self.row_id_map[-2], self.row_id_map[-1]
        padded = self.row_id_map.shape[1] % 2 == 0
        return RowMap(
            self.row_id_map,
            counts[1 : 1 + experts],
            counts[1 + experts : 1 + 2 * experts],
            starts[1 + experts : 1 + 2 * experts] if padded else None,
        )


@checked
def make_map(
    routing_map: torch.Tensor,
    *,
    map_type: str = "mask",
    num_experts: int | None = None,
    align_size: int | None = None,
    num_rows: int | None = None,
) -> RowMap:
    """Numbers the copies of tokens by expert, within an expert in the order of tokens.

    Args:
        routing_map: "mask": [tokens, experts] bool, uint8, int8, int32 or int64, not zero where a
            token goes to an expert. "index": [tokens, k] int32 or int64 experts, negative where
            there is none.
        map_type: "mask" or "index".
        num_experts: of indices, at most 1024; None stands for 1024. An index that is no expert
            raises on the CPU; the GPU, which is not waited for, makes the token's sum NaN.
        align_size: each expert's rows begin at a multiple of it; "mask" alone.
        num_rows: of the permuted matrix; copies that come later are dropped. None: of any size.

    Raises:
        TypeError: a dtype that is not listed.
        ValueError: a shape or option that does not match.
        NotImplementedError: more than 1024 experts, or 2^31 elements.
    """
    routing = _prepare(routing_map, map_type, num_experts, align_size)
    rows = _ANY_ROWS if num_rows is None else num_rows
    _map(
        routing.routes, routing.workspace, routing.row_id_map, routing.tokens_per_expert,
        routing.num_experts, routing.align_size, rows, routing.is_index,
    )  # fmt: skip
    return routing.result()


@checked
def permute(
    inp: torch.Tensor,
    row_id_map: torch.Tensor,
    num_rows: int,
    probs: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Copies each token's row, and its probs, to the rows of the map.

    Args:
        inp: [tokens, hidden] float32, float16, bfloat16 or any dtype of one byte.
        row_id_map: ``RowMap.row_id_map``.
        num_rows: of the result; rows that no copy takes are zero.
        probs: [tokens, width] float32 or the dtype of ``inp``, width being the experts of a mask or
            the k of indices.

    Returns:
        [num_rows, hidden], and [num_rows] of the probs or None.
    """
    matrix, out, probs, permuted = _outputs(inp, num_rows, probs)
    _rows(matrix, probs, row_id_map, out, permuted)
    return reinterpreted("moe_permute", out, inp.dtype), permuted


@checked
def permute_by(
    inp: torch.Tensor,
    routing_map: torch.Tensor,
    num_rows: int,
    probs: torch.Tensor | None = None,
    *,
    map_type: str = "mask",
    num_experts: int | None = None,
    align_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, RowMap]:
    """Computes ``make_map`` and ``permute`` in one call, whose kernels overlap."""
    routing = _prepare(routing_map, map_type, num_experts, align_size)
    matrix, out, probs, permuted = _outputs(inp, num_rows, probs)
    _fwd(
        matrix, probs, routing.row_id_map, out, permuted, routing.routes, routing.workspace,
        routing.tokens_per_expert, routing.num_experts, routing.align_size, routing.is_index,
    )  # fmt: skip
    return reinterpreted("moe_permute", out, inp.dtype), permuted, routing.result()


@checked
def permute_bwd(
    grad_permuted: torch.Tensor,
    row_id_map: torch.Tensor,
    grad_permuted_probs: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Computes the gradients of ``permute``: the sum over each token's copies, and the probs'."""
    width = (row_id_map.shape[1] - 1) // 2
    tokens = row_id_map.shape[0] - 2
    grad_permuted = grad_permuted.contiguous()
    grad_inp = grad_permuted.new_empty((tokens, grad_permuted.shape[1]))
    grad_probs = None
    if grad_permuted_probs is not None:
        grad_permuted_probs = grad_permuted_probs.contiguous()
        grad_probs = grad_permuted_probs.new_empty((tokens, width))
    _unpermute_fwd(grad_permuted, None, row_id_map, grad_inp, grad_permuted_probs, grad_probs)
    return grad_inp, grad_probs


@checked
def unpermute(
    inp: torch.Tensor, row_id_map: torch.Tensor, probs: torch.Tensor | None = None
) -> torch.Tensor:
    """Sums each token's copies, times their probs, in float32 in the order of the map.

    Args:
        inp: [rows, hidden] float32, float16 or bfloat16.
        row_id_map: ``RowMap.row_id_map``.
        probs: [tokens, width] float32 or the dtype of ``inp``.

    Returns:
        [tokens, hidden] in the dtype of ``inp``; zeros for a token without copies.
    """
    _check_matrix("unpermute", inp)
    out = inp.new_empty((row_id_map.shape[0] - 2, inp.shape[1]))
    probs = None if probs is None else probs.contiguous()
    _unpermute_fwd(inp.contiguous(), probs, row_id_map, out, None, None)
    return out


@checked
def unpermute_bwd(
    grad_output: torch.Tensor,
    inp: torch.Tensor,
    row_id_map: torch.Tensor,
    probs: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the gradients of ``unpermute`` with respect to ``inp`` and probs in one pass.

    Without probs the gradient of ``inp`` is ``permute`` of that of the output.
    """
    grad_inp, grad_probs = torch.empty_like(inp), torch.empty_like(probs)
    _unpermute_bwd(grad_output.contiguous(), inp, probs, row_id_map, grad_inp, grad_probs)
    return grad_inp, grad_probs


@checked
def make_chunk_map(
    split_sizes: torch.Tensor, sorted_index: torch.Tensor, num_rows: int
) -> torch.Tensor:
    """Returns the map by which ``sort_chunks`` reorders rows, an opaque int32 [2, num_rows].

    Args:
        split_sizes: [chunks] int32 or int64 rows of each chunk, at most ``num_rows`` in all.
        sorted_index: [chunks] int32 or int64: the chunk that comes i-th, each once. What does not
            fit raises on the CPU; on the GPU, which is not waited for, rows without a chunk are 0.
        num_rows: of the matrix; at most 2048 chunks.
    """
    chunk_map = split_sizes.new_empty((2, num_rows), dtype=torch.int32)
    _chunk_map(split_sizes.contiguous(), sorted_index.contiguous(), chunk_map)
    return chunk_map


@checked
def sort_chunks(
    inp: torch.Tensor,
    chunk_map: torch.Tensor,
    probs: torch.Tensor | None = None,
    *,
    is_backward: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Reorders rows, and [rows] probs, by the map or back; rows past the chunks are zeros.

    ``inp`` is [rows, hidden] of float32, float16, bfloat16 or any dtype of one byte; ``probs``
    float32, float16 or bfloat16.
    """
    _check_matrix("sort_chunks", inp)
    matrix = inp.contiguous()
    matrix = _bytes(matrix) if matrix.element_size() == 1 else matrix
    out = torch.empty_like(matrix)
    permuted = None
    if probs is not None:
        probs = probs.contiguous()
        permuted = torch.empty_like(probs)
    _sort_chunks(matrix, probs, chunk_map, out, permuted, is_backward)
    return reinterpreted("moe_permute", out, inp.dtype), permuted


def _prepare(
    routing_map: torch.Tensor,
    map_type: str,
    num_experts: int | None,
    align_size: int | None,
) -> _Routing:
    if map_type not in ("mask", "index"):
        raise ValueError(f"moe_permute: map_type must be 'mask' or 'index', got {map_type!r}")
    if routing_map.dim() != 2:
        raise ValueError(
            f"moe_permute: routing_map must have 2 dimensions, got shape {list(routing_map.shape)}"
        )
    tokens, width = routing_map.shape
    is_index = map_type == "index"
    if not is_index:
        experts = width
    elif align_size is not None:
        raise ValueError(f"moe_permute: align_size must be None for indices, got {align_size}")
    else:
        experts = MAX_EXPERTS if num_experts is None else num_experts
    tile = _ONE_TILE_TOKENS
    if tokens > _ONE_TILE_TOKENS:
        tile = _TILE_TOKENS * -(-tokens // (_TILE_TOKENS * _MAX_TILES))
    new = routing_map.new_empty
    padding = 0 if align_size is None else 1
    return _Routing(
        _routes(routing_map, is_index).contiguous(),
        new((-(-tokens // tile), experts), dtype=torch.int32),
        new((tokens + 2, 1 + 2 * width + padding), dtype=torch.int32),
        new(experts, dtype=torch.int32) if is_index else None,
        experts,
        1 if align_size is None else align_size,
        is_index,
    )


def _routes(routing_map: torch.Tensor, is_index: bool) -> torch.Tensor:
    """Returns the routing map in a dtype that the kernels read."""
    dtype = routing_map.dtype
    if is_index:
        if dtype is torch.int64:  # one too large must not become another expert
            return routing_map.clamp(-1, _ANY_ROWS).to(torch.int32)
        return routing_map
    if dtype is torch.int8:
        return routing_map.contiguous().view(torch.uint8)
    return routing_map != 0 if dtype is torch.int64 else routing_map


def _bytes(matrix: torch.Tensor) -> torch.Tensor:
    if matrix.is_quantized:  # torch crashes at such a view of one
        raise TypeError(f"moe_permute: inp must be a dense tensor, got dtype {matrix.dtype}")
    return reinterpreted("moe_permute", matrix, torch.uint8)


def _check_matrix(op: str, inp: torch.Tensor) -> None:
    if inp.dim() != 2:
        raise ValueError(f"moe_{op}: inp must have 2 dimensions, got shape {list(inp.shape)}")


def _outputs(
    inp: torch.Tensor, num_rows: int, probs: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Returns the input and its probs as the kernels take them, each followed by its output."""
    _check_matrix("permute", inp)
    if num_rows < 0:
        raise ValueError(f"moe_permute: num_out_tokens must be at least 0, got {num_rows}")
    matrix = inp.contiguous()
    matrix = _bytes(matrix) if matrix.element_size() == 1 else matrix
    out = matrix.new_empty((num_rows, inp.shape[1]))
    if probs is None:
        return matrix, out, None, None
    return matrix, out, probs.contiguous(), probs.new_empty(num_rows)
