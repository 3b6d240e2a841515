"""Permutes tokens for a mixture of experts: copies rows in expert order, and sums them back.

A token goes to several experts, each of which gets a copy of its row. The permuted matrix has the
copies sorted by expert. A row map, made on the device, gives the row of each copy. ``width``, the
largest number of copies of a token, is the number of experts for a routing map of type "mask", and
k for type "index". ``probs``, the weights of the copies, are [tokens, width]; permuted probs are
[rows], one for each row of the permuted matrix.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..runtime.scratch_sizes import map_tiles
from .binding import bind, checked
from .fp8_output import reinterpreted

_map = bind("moe_permute", "moe_permute_map")
_fwd = bind("moe_permute", "moe_permute_fwd")
_rows = bind("moe_permute", "moe_permute_rows")
_tokens_of_rows = bind("moe_permute", "moe_tokens_of_rows")
_unpermute_fwd = bind("moe_permute", "moe_unpermute_fwd")
_unpermute_bwd = bind("moe_permute", "moe_unpermute_bwd")
_chunk_map = bind("moe_permute", "moe_sort_chunks_map")
_sort_chunks = bind("moe_permute", "moe_sort_chunks")
_gather_rows = bind("moe_permute", "moe_gather_rows")

# As csrc/moe_permute/moe_permute.h has them.
MAX_EXPERTS = 1024
_ANY_ROWS = 2**31 - 1


class RowMap(NamedTuple):
    """Map from tokens to rows of the permuted matrix: int32 tensors on the routing map's device.

    Attributes:
        row_id_map: [tokens + 2, 1 + 2 * width], with one more column if experts are padded; opaque,
            for ``permute``, ``unpermute`` and their backwards. csrc/moe_permute/moe_permute.h
            describes its layout.
        tokens_per_expert: [experts], number of each expert's rows, without dropped copies.
        padded_tokens_per_expert: [experts], number of each expert's rows including padding; if
            experts are not padded, it is equal to ``tokens_per_expert``.
        pad_offsets: [experts], number of padding rows before each expert's first row; None without
            padding.
    """

    row_id_map: torch.Tensor
    tokens_per_expert: torch.Tensor
    padded_tokens_per_expert: torch.Tensor
    pad_offsets: torch.Tensor | None


class _Routing(NamedTuple):
    """Arguments of the kernels that make a map from a routing map.

    ``workspace`` is int32 [tiles of tokens, experts]. ``row_id_map`` and ``tokens_per_expert`` are
    uninitialised; the latter is [experts] for indices, None for a mask, whose row_id_map has the
    counts. Each expert's rows begin at a multiple of ``align_size``.
    """

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
    """Makes the row map of a permutation that sorts copies by expert, then by token.

    Args:
        routing_map: for "mask" [tokens, experts] bool, uint8, int8, int32 or int64, nonzero if the
            token goes to the expert. For "index" [tokens, k] int32 or int64 indices of experts; a
            negative index makes no copy.
        map_type: "mask" or "index".
        num_experts: number of experts for "index", at most 1024; None stands for 1024. An index out
            of range raises on the CPU. On a GPU it makes the token's row NaN in ``unpermute``,
            because the host does not wait.
        align_size: each expert's rows begin at a multiple of this; only for "mask". None does not
            pad.
        num_rows: number of rows of the permuted matrix; copies beyond the last row are dropped.
            None drops none.

    Returns:
        The ``RowMap``.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape or option does not match.
        NotImplementedError: there are more than 1024 experts, or ``routing_map`` has 2^31 elements
            or more.
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
    inp: torch.Tensor, row_id_map: torch.Tensor, num_rows: int, probs: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Copies each token's row, and its probs, to the rows given by the map.

    Args:
        inp: [tokens, hidden] float32, float16, bfloat16 or any dtype of one byte.
        row_id_map: from ``make_map``, ``RowMap.row_id_map``.
        num_rows: number of rows of the result; rows without a copy are zeros.
        probs: [tokens, width] float32 or the dtype of ``inp``; width is the number of experts for a
            mask and k for indices.

    Returns:
        (permuted rows [num_rows, hidden], permuted probs [num_rows] or None without probs).

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape does not match, or ``num_rows`` is negative.
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
    """Computes ``make_map`` and then ``permute`` in one call; their kernels overlap.

    Copies beyond row ``num_rows - 1`` are dropped.

    Args:
        inp: [tokens, hidden] float32, float16, bfloat16 or any dtype of one byte.
        routing_map, map_type, num_experts, align_size: as in ``make_map``.
        num_rows: number of rows of the result; rows without a copy are zeros.
        probs: [tokens, width] float32 or the dtype of ``inp``; width is the number of experts for a
            mask and k for indices.

    Returns:
        (permuted rows [num_rows, hidden], permuted probs [num_rows] or None without probs, the
        ``RowMap``).

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape or option does not match.
        NotImplementedError: there are more than 1024 experts, or ``routing_map`` has 2^31 elements
            or more.
    """
    routing = _prepare(routing_map, map_type, num_experts, align_size)
    matrix, out, probs, permuted = _outputs(inp, num_rows, probs)
    _fwd(
        matrix, probs, routing.row_id_map, out, permuted, routing.routes, routing.workspace,
        routing.tokens_per_expert, routing.num_experts, routing.align_size, routing.is_index,
    )  # fmt: skip
    return reinterpreted("moe_permute", out, inp.dtype), permuted, routing.result()


@checked
def tokens_of_rows(
    row_id_map: torch.Tensor, num_rows: int, probs: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns the token, and the prob, of each row of the permuted matrix.

    Args:
        row_id_map: ``RowMap.row_id_map``.
        num_rows: number of rows of the permuted matrix.
        probs: [tokens, width] float32, float16 or bfloat16; width is the number of experts for a
            mask and k for indices.

    Returns:
        (tokens, permuted probs): int32 [num_rows], for ``ops.grouped_cast.Gather``; and [num_rows]
        in the dtype of ``probs``, or None without probs. A row without a copy has token -1 and prob
        0.

    Raises:
        TypeError: ``row_id_map`` is not int32, or ``probs`` has another dtype than listed.
        ValueError: ``row_id_map`` is not a map that ``make_map`` made, a shape does not match, or
            ``num_rows`` is negative.
    """
    if num_rows < 0:
        raise ValueError(f"moe_permute: num_rows must be at least 0, got {num_rows}")
    out = row_id_map.new_empty(num_rows, dtype=torch.int32)
    permuted = None
    if probs is not None:
        probs = probs.contiguous()
        permuted = probs.new_empty(num_rows)
    _tokens_of_rows(probs, row_id_map, out, permuted)
    return out, permuted


@checked
def permute_bwd(
    grad_permuted: torch.Tensor,
    row_id_map: torch.Tensor,
    grad_permuted_probs: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Computes the gradients of ``permute``.

    Args:
        grad_permuted: gradient of the permuted rows, [num_rows, hidden] float32, float16 or
            bfloat16.
        row_id_map: ``RowMap.row_id_map``.
        grad_permuted_probs: gradient of the permuted probs, [num_rows] in their dtype; None without
            probs.

    Returns:
        (gradient of ``inp`` [tokens, hidden], gradient of probs [tokens, width] or None without
        ``grad_permuted_probs``). The gradient of ``inp`` is the sum over each token's copies.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape does not match.
    """
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
    """Sums each token's copies, times their probs, in float32 in a fixed order.

    Args:
        inp: [rows, hidden] float32, float16 or bfloat16: the experts' results for the permuted
            rows.
        row_id_map: ``RowMap.row_id_map`` of the permutation.
        probs: [tokens, width] float32 or the dtype of ``inp``, factors of the copies; None stands
            for ones. Width is the number of experts for a mask and k for indices.

    Returns:
        [tokens, hidden] in the dtype of ``inp``; zeros for a token without copies.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape does not match.
    """
    _check_matrix("unpermute", inp)
    out = inp.new_empty((row_id_map.shape[0] - 2, inp.shape[1]))
    probs = None if probs is None else probs.contiguous()
    _unpermute_fwd(inp.contiguous(), probs, row_id_map, out, None, None)
    return out


@checked
def unpermute_bwd(
    grad_output: torch.Tensor, inp: torch.Tensor, row_id_map: torch.Tensor, probs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the gradients of ``unpermute`` with probs, in one pass.

    Without probs, the gradient of ``inp`` is the first result of ``permute(grad_output, ...)``.

    Args:
        grad_output: [tokens, hidden] in the dtype of ``inp``.
        inp: [rows, hidden], as passed to ``unpermute``.
        row_id_map: as passed to ``unpermute``.
        probs: [tokens, width], as passed to ``unpermute``; must be given.

    Returns:
        (gradient of ``inp`` [rows, hidden], gradient of ``probs`` [tokens, width]).

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape does not match.
    """
    grad_inp, grad_probs = torch.empty_like(inp), torch.empty_like(probs)
    _unpermute_bwd(grad_output.contiguous(), inp, probs, row_id_map, grad_inp, grad_probs)
    return grad_inp, grad_probs


@checked
def make_chunk_map(
    split_sizes: torch.Tensor, sorted_index: torch.Tensor, num_rows: int
) -> torch.Tensor:
    """Makes the map by which ``sort_chunks`` reorders chunks of rows.

    Invalid sizes or indices raise ValueError on the CPU. On a GPU they do not, because the host
    does not wait: ``sort_chunks`` then writes zeros to rows that get no source row.

    Args:
        split_sizes: int32 or int64 [chunks], the number of rows of each chunk, at most ``num_rows``
            in total; at most 2048 chunks.
        sorted_index: int32 or int64 [chunks], a permutation; chunk ``sorted_index[i]`` comes i-th
            in the result.
        num_rows: number of rows of the matrix.

    Returns:
        int32 [2, num_rows], opaque, for ``sort_chunks``.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape does not match, or, on the CPU, a size or index is invalid.
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
    """Reorders rows and their probs by a chunk map.

    Args:
        inp: [rows, hidden] float32, float16, bfloat16 or any dtype of one byte.
        chunk_map: from ``make_chunk_map``.
        probs: [rows] float32, float16 or bfloat16.
        is_backward: apply the inverse of the map, as backward does to gradients.

    Returns:
        (reordered rows [rows, hidden], reordered probs [rows] or None); rows after the last chunk
        are zeros.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape does not match.
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


@checked
def gather_rows(inp: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Copies rows of a matrix by index, ``out[i] = inp[rows[i]]``.

    Args:
        inp: [n, hidden] float32, float16, bfloat16 or any dtype of one byte.
        rows: int32 [m]; row numbers; one outside of ``inp``, such as -1, gives a row of zeros.

    Returns:
        [m, hidden] in the dtype of ``inp``.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape does not match.
    """
    _check_matrix("gather_rows", inp)
    matrix = inp.contiguous()
    matrix = _bytes(matrix) if matrix.element_size() == 1 else matrix
    out = matrix.new_empty((rows.shape[0], matrix.shape[1]))
    _gather_rows(matrix, rows, out)
    return reinterpreted("moe_permute", out, inp.dtype)


def _prepare(
    routing_map: torch.Tensor, map_type: str, num_experts: int | None, align_size: int | None
) -> _Routing:
    """Checks the arguments of ``make_map``, and allocates what the kernels write."""
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
    new = routing_map.new_empty
    padding = 0 if align_size is None else 1
    return _Routing(
        _routes(routing_map, is_index).contiguous(),
        new((map_tiles(tokens), experts), dtype=torch.int32),
        new((tokens + 2, 1 + 2 * width + padding), dtype=torch.int32),
        new(experts, dtype=torch.int32) if is_index else None,
        experts,
        1 if align_size is None else align_size,
        is_index,
    )


def _routes(routing_map: torch.Tensor, is_index: bool) -> torch.Tensor:
    """Returns the routing map [tokens, width] in a dtype that the kernels read."""
    dtype = routing_map.dtype
    if is_index:
        if dtype is torch.int64:  # one too large must not become another expert
            return routing_map.clamp(-1, _ANY_ROWS).to(torch.int32)
        return routing_map
    if dtype is torch.int8:
        return routing_map.contiguous().view(torch.uint8)
    return routing_map != 0 if dtype is torch.int64 else routing_map


def _bytes(matrix: torch.Tensor) -> torch.Tensor:
    """Returns a uint8 view of a tensor of one byte per element."""
    if matrix.is_quantized:  # torch crashes at such a view of one
        raise TypeError(f"moe_permute: inp must be a dense tensor, got dtype {matrix.dtype}")
    return reinterpreted("moe_permute", matrix, torch.uint8)


def _check_matrix(op: str, inp: torch.Tensor) -> None:
    """Raises ValueError unless ``inp`` has two dimensions; ``op`` is e.g. "permute"."""
    if inp.dim() != 2:
        raise ValueError(f"moe_{op}: inp must have 2 dimensions, got shape {list(inp.shape)}")


def _outputs(
    inp: torch.Tensor, num_rows: int, probs: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Checks and returns (input, new output, probs, new output for them) of ``permute``."""
    _check_matrix("permute", inp)
    if num_rows < 0:
        raise ValueError(f"moe_permute: num_out_tokens must be at least 0, got {num_rows}")
    matrix = inp.contiguous()
    matrix = _bytes(matrix) if matrix.element_size() == 1 else matrix
    out = matrix.new_empty((num_rows, inp.shape[1]))
    if probs is None:
        return matrix, out, None, None
    return matrix, out, probs.contiguous(), probs.new_empty(num_rows)
