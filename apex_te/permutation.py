"""Permutation of the tokens of a mixture of experts into rows sorted by expert, and back.

Names and arguments follow TransformerEngine's; the kernels are those of
``apex_te.ops.moe_permute``. The host does not wait for the GPU if the number of permuted rows is
given.
"""

from __future__ import annotations

from typing import Any

import torch

from .ops import moe_permute as _op
from .ops._permutation_function import Permute, SortChunks, Unpermute, run
from .ops.binding import checked, needs_autograd

__all__ = [
    "moe_permute", "moe_permute_and_count", "moe_permute_and_pad_with_probs",
    "moe_permute_with_probs", "moe_sort_chunks_by_index", "moe_sort_chunks_by_index_with_probs",
    "moe_unpermute",
]  # fmt: skip


@checked
def moe_permute(
    inp: torch.Tensor,
    routing_map: torch.Tensor,
    num_out_tokens: int | None = None,
    max_token_num: int = -1,
    map_type: str = "mask",
    *,
    num_experts: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies each token to one row for each of its experts; differentiable in ``inp``.

    Rows are sorted by expert, and rows of one expert by token.

    Args:
        inp: [tokens, hidden] float32, float16 or bfloat16; or any dtype of one byte (FP8), which
            has no gradient.
        routing_map: for "mask" [tokens, experts] bool, uint8, int8, int32 or int64, nonzero if the
            token goes to the expert. For "index" [tokens, k] int32 or int64, the k experts of each
            token; a negative index makes no copy.
        num_out_tokens: number of rows of the result. Unused rows are zero; copies beyond the last
            row are dropped. None or -1: ``tokens * k`` for "index"; for "mask" the number of
            copies, which makes the host wait for the GPU once.
        max_token_num: ignored; accepted for compatibility.
        map_type: "mask" or "index", the form of ``routing_map``.
        num_experts: number of experts for "index", at most 1024; None stands for 1024, and a
            smaller number is faster. Must be None for "mask".

    Returns:
        out: [num_out_tokens, hidden] in the dtype of ``inp``.
        row_id_map: opaque int32 tensor to pass to ``moe_unpermute``.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape or option does not match, or, on the CPU, an index is out of range. On
            the GPU it raises no error, because the host does not wait; instead the token's row
            after ``moe_unpermute`` and its gradient are NaN.
        NotImplementedError: there are more than 1024 experts, or ``routing_map`` has 2^31 elements
            or more.
    """
    if num_experts is not None and map_type != "index":
        raise ValueError(
            f"moe_permute: num_experts must be None for a mask, which has them, got {num_experts}"
        )
    if map_type == "index" and num_out_tokens in (None, -1):
        num_out_tokens = routing_map.numel()
    out, _, row_id_map = _permuted(inp, None, routing_map, num_out_tokens, map_type, num_experts)
    return out, row_id_map


@checked
def moe_permute_with_probs(
    inp: torch.Tensor,
    probs: torch.Tensor,
    routing_map: torch.Tensor,
    num_out_tokens: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Permutes tokens and their routing probabilities by a mask; differentiable in both.

    Args:
        inp: [tokens, hidden] float32, float16 or bfloat16; or any dtype of one byte (FP8), which
            has no gradient.
        probs: [tokens, experts] float32 or the dtype of ``inp``.
        routing_map: [tokens, experts] bool, uint8, int8, int32 or int64, nonzero if the token goes
            to the expert.
        num_out_tokens: number of rows of the result. Unused rows are zero; copies beyond the last
            row are dropped. None or -1: the number of copies, which makes the host wait for the GPU
            once.

    Returns:
        out: [num_out_tokens, hidden] in the dtype of ``inp``.
        permuted_probs: [num_out_tokens] in the dtype of ``probs``, the prob of each row's token and
            expert.
        row_id_map: opaque int32 tensor to pass to ``moe_unpermute``.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape does not match.
        NotImplementedError: there are more than 1024 experts, or ``routing_map`` has 2^31 elements
            or more.
    """
    return _permuted(inp, probs, routing_map, num_out_tokens)


@checked
def moe_permute_and_count(
    inp: torch.Tensor, indices: torch.Tensor, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Permutes tokens by their experts' indices, and counts each expert's rows on the device.

    The counts can be passed to ``GroupedLinear`` as ``m_splits``. The host does not wait for the
    GPU.

    Args:
        inp: [tokens, hidden] float32, float16 or bfloat16; or any dtype of one byte (FP8), which
            has no gradient.
        indices: [tokens, k] int32 or int64, the k experts of each token; a negative index makes no
            copy.
        num_experts: number of experts, at most 1024.

    Returns:
        out: [tokens * k, hidden] in the dtype of ``inp``.
        tokens_per_expert: [num_experts] int32.
        row_id_map: opaque int32 tensor for ``moe_unpermute`` with ``map_type="index"``.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape does not match, or, on the CPU, an index is out of range.
        NotImplementedError: there are more than 1024 experts.
    """
    made = _op.make_map(indices, map_type="index", num_experts=num_experts)
    out, _, row_id_map = _permuted(
        inp, None, indices, indices.numel(), "index", num_experts, None, made.row_id_map
    )
    return out, made.tokens_per_expert, row_id_map


def permute_with_map(
    inp: torch.Tensor, probs: torch.Tensor | None, row_id_map: torch.Tensor, indices: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Permutes tokens and any probs [tokens, k] by a map made of ``indices``; differentiable."""
    out, permuted, _ = _permuted(
        inp, probs, indices, indices.numel(), "index", None, None, row_id_map
    )
    return out, permuted


@checked
def moe_permute_and_pad_with_probs(
    inp: torch.Tensor,
    probs: torch.Tensor,
    routing_map: torch.Tensor,
    tokens_per_expert: torch.Tensor,
    align_size: int,
    num_out_tokens: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Permutes tokens and probs so that each expert's rows begin at a multiple of ``align_size``.

    FP8 GEMMs need multiples of 16. Padding rows and their probs are zero.

    Args:
        inp: [tokens, hidden] float32, float16 or bfloat16; or any dtype of one byte (FP8), which
            has no gradient.
        probs: [tokens, experts] float32 or the dtype of ``inp``.
        routing_map: [tokens, experts] bool, uint8, int8, int32 or int64, nonzero if the token goes
            to the expert.
        tokens_per_expert: [experts] int32 or int64, the number of tokens of each expert, on any
            device. It is read only to find the number of rows if ``num_out_tokens`` is None; the
            kernel counts the tokens itself.
        align_size: alignment of each expert's first row, at least 1.
        num_out_tokens: number of rows of the result, a multiple of ``align_size`` that holds all
            rows with padding. ``tokens * k + experts * (align_size - 1)`` rounded up always
            suffices if a token has at most k experts. None or -1: exactly the rows with padding.
            This makes the host wait for the GPU once and check ``tokens_per_expert``. Exception: if
            ``tokens_per_expert`` is on the CPU and ``inp`` on a GPU, the host neither waits nor
            checks.

    Returns:
        permuted: [num_out_tokens, hidden] in the dtype of ``inp``.
        permuted_probs: [num_out_tokens] in the dtype of ``probs``.
        row_id_map: opaque int32 tensor to pass to ``moe_unpermute``; it includes the padding.
        pad_offsets: [experts] int32, padding rows before each expert's first row.
        padded_tokens_per_expert: [experts], rows of each expert with padding, on the device of
            ``inp`` in the dtype of ``tokens_per_expert``. Pass it to ``GroupedLinear`` as
            ``m_splits``.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape or option does not match, or ``tokens_per_expert`` was checked and
            differs from the counts of ``routing_map``.
        NotImplementedError: there are more than 1024 experts, or ``routing_map`` has 2^31 elements
            or more.
    """
    experts = routing_map.shape[-1] if routing_map.dim() else 0
    _check_counts(tokens_per_expert, experts)
    if isinstance(align_size, bool) or not isinstance(align_size, int) or align_size < 1:
        raise ValueError(
            "moe_permute_and_pad_with_probs: align_size must be an int of at least 1, "
            f"got {align_size!r}"
        )
    row_id_map = None
    if num_out_tokens in (None, -1):
        if tokens_per_expert.device.type == "cpu" and inp.is_cuda:
            counts = tokens_per_expert.tolist()
            num_out_tokens = sum([-(-count // align_size) * align_size for count in counts])
        else:
            _check_has_values(tokens_per_expert, inp)
            counted = tokens_per_expert.to(routing_map.device)
            row_id_map, num_out_tokens = _counted(routing_map, counted, align_size)
    out, permuted_probs, row_id_map = _permuted(
        inp, probs, routing_map, num_out_tokens, "mask", None, align_size, row_id_map
    )
    pad_offsets = row_id_map[-1, 1 + experts : 1 + 2 * experts]
    padded = row_id_map[-2, 1 + experts : 1 + 2 * experts]
    if tokens_per_expert.dtype is not torch.int32:
        padded = padded.to(tokens_per_expert.dtype)
    return out, permuted_probs, row_id_map, pad_offsets, padded


@checked
def moe_unpermute(
    inp: torch.Tensor,
    row_id_map: torch.Tensor,
    merging_probs: torch.Tensor | None = None,
    restore_shape: torch.Size | tuple[int, ...] | None = None,
    map_type: str = "mask",
    pad_offsets: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sums the rows of each token, times their probs if given; differentiable in both.

    Rows are added in float32 in a fixed order (by expert; for "index" by position among the k), so
    results are bitwise reproducible.

    Args:
        inp: [rows, hidden] float32, float16 or bfloat16, the experts' outputs for the permuted
            rows.
        row_id_map: as returned by the function that permuted the tokens.
        merging_probs: [tokens, experts] for "mask", [tokens, k] for "index", float32 or the dtype
            of ``inp``; None adds the rows unweighted.
        restore_shape: (tokens, hidden) of the result. Not needed, because ``row_id_map`` contains
            it; only checked.
        map_type: "mask" or "index", as given to the function that permuted.
        pad_offsets: as returned by ``moe_permute_and_pad_with_probs``. Not needed, because
            ``row_id_map`` contains the padding; only checked.

    Returns:
        [tokens, hidden] in the dtype of ``inp``; zeros for a token without rows.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape or option does not match; ``pad_offsets`` is given with a ``row_id_map``
            without padding; or, on the CPU, ``row_id_map`` refers to rows that ``inp`` does not
            have. On the GPU such rows give NaN.
    """
    if map_type not in ("mask", "index"):
        raise ValueError(f"moe_unpermute: map_type must be 'mask' or 'index', got {map_type!r}")
    if restore_shape is not None:
        shape = (row_id_map.shape[0] - 2, *inp.shape[1:])
        if tuple(restore_shape) != shape:
            raise ValueError(
                f"moe_unpermute: restore_shape must be {list(shape)}, got {list(restore_shape)}"
            )
    if pad_offsets is not None:
        experts = (row_id_map.shape[1] - 1) // 2
        if row_id_map.shape[1] % 2 or pad_offsets.shape != (experts,):
            raise ValueError(
                "moe_unpermute: pad_offsets must be those of moe_permute_and_pad_with_probs with "
                f"its row_id_map, got shapes {list(pad_offsets.shape)} and {list(row_id_map.shape)}"
            )
    if not _needs_gradient(inp, merging_probs):
        return _op.unpermute(inp, row_id_map, merging_probs)
    return Unpermute.apply(inp, row_id_map, merging_probs)


@checked
def moe_sort_chunks_by_index(
    inp: torch.Tensor, split_sizes: torch.Tensor, sorted_index: torch.Tensor
) -> torch.Tensor:
    """Reorders chunks of consecutive rows so that chunk ``sorted_index[i]`` comes i-th.

    It is differentiable in ``inp``, and the host does not wait for the GPU. After an all-to-all it
    can reorder rows from [source rank, local expert] to [local expert, source rank].

    Args:
        inp: [rows, hidden] float32, float16 or bfloat16; or any dtype of one byte, which has no
            gradient.
        split_sizes: [chunks] int32 or int64, the number of rows of each chunk; at most 2048 chunks.
            Rows after the last chunk become zeros.
        sorted_index: [chunks] int32 or int64, a permutation of the chunks.

    Returns:
        [rows, hidden] in the dtype of ``inp``.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape does not match, or, on the CPU, a size or index is out of range. On the
            GPU it raises no error, and some rows are zero.
    """
    return _sorted(inp, None, split_sizes, sorted_index)[0]


@checked
def moe_sort_chunks_by_index_with_probs(
    inp: torch.Tensor,
    probs: torch.Tensor,
    split_sizes: torch.Tensor,
    sorted_index: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reorders chunks of rows and the rows' probs; see ``moe_sort_chunks_by_index``.

    Args:
        inp: [rows, hidden] float32, float16 or bfloat16; or any dtype of one byte, which has no
            gradient.
        split_sizes: [chunks] int32 or int64, the number of rows of each chunk; at most 2048 chunks.
        sorted_index: [chunks] int32 or int64, a permutation of the chunks.
        probs: [rows] float32, float16 or bfloat16; differentiable.

    Returns:
        out: [rows, hidden] in the dtype of ``inp``.
        permuted_probs: [rows] in the dtype of ``probs``.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape does not match, or, on the CPU, a size or index is out of range.
    """
    out, permuted_probs = _sorted(inp, probs, split_sizes, sorted_index)
    assert permuted_probs is not None
    return out, permuted_probs


def _permuted(
    inp: torch.Tensor,
    probs: torch.Tensor | None,
    routing_map: torch.Tensor,
    rows: int | None,
    map_type: str = "mask",
    num_experts: int | None = None,
    align_size: int | None = None,
    row_id_map: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Any, torch.Tensor]:
    """Permutes tokens, after counting the rows on the GPU if ``rows`` is None or -1.

    Returns:
        out: [rows, hidden].
        permuted_probs: [rows], or None without ``probs``.
        row_id_map: ``row_id_map`` if that was given, else the one made here.
    """
    if rows is None or rows == -1:
        row_id_map = _op.make_map(routing_map, map_type=map_type).row_id_map
        rows = int(row_id_map[-2, 0])
    call: Any = Permute.apply if _needs_gradient(inp, probs) else run
    out, permuted_probs, made = call(
        inp, probs, routing_map, rows, map_type, num_experts, align_size, row_id_map
    )
    return out, permuted_probs, made if row_id_map is None else row_id_map


def _sorted(
    inp: torch.Tensor,
    probs: torch.Tensor | None,
    split_sizes: torch.Tensor,
    sorted_index: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Reorders chunks of rows; returns the rows, and their probs or None."""
    if inp.dim() != 2:
        raise ValueError(
            f"moe_sort_chunks: inp must have 2 dimensions, got shape {list(inp.shape)}"
        )
    if _needs_gradient(inp, probs):
        return SortChunks.apply(inp, probs, split_sizes, sorted_index)
    chunk_map = _op.make_chunk_map(split_sizes, sorted_index, inp.shape[0])
    return _op.sort_chunks(inp, chunk_map, probs)


def _counted(
    routing_map: torch.Tensor, tokens_per_expert: torch.Tensor, align_size: int
) -> tuple[torch.Tensor, int]:
    """Makes the padded row_id_map, and checks ``tokens_per_expert`` against it; waits for the GPU.

    Returns:
        row_id_map: opaque int32 tensor.
        rows: number of permuted rows, padding included.
    """
    made = _op.make_map(routing_map, align_size=align_size)
    experts = routing_map.shape[1]
    found, given = torch.stack(
        (made.row_id_map[-2, : 1 + experts], torch.nn.functional.pad(tokens_per_expert, (1, 0)))
    ).tolist()
    if found[1:] != given[1:]:
        raise ValueError(
            "moe_permute_and_pad_with_probs: tokens_per_expert must be the counts of routing_map, "
            f"{found[1:]}, got {given[1:]}"
        )
    return made.row_id_map, found[0]


def _check_counts(tokens_per_expert: torch.Tensor, experts: int) -> None:
    if tokens_per_expert.dtype not in (torch.int32, torch.int64):
        raise TypeError(
            "moe_permute_and_pad_with_probs: tokens_per_expert must have dtype int32 or int64, "
            f"got {tokens_per_expert.dtype}"
        )
    if tokens_per_expert.shape != (experts,):
        raise ValueError(
            f"moe_permute_and_pad_with_probs: tokens_per_expert must have shape [{experts}], "
            f"got {list(tokens_per_expert.shape)}"
        )


def _check_has_values(tokens_per_expert: torch.Tensor, inp: torch.Tensor) -> None:
    if tokens_per_expert.is_meta and not inp.is_meta:
        raise ValueError(
            "moe_permute_and_pad_with_probs: tokens_per_expert must be on a device that holds "
            "values if num_out_tokens is None, got meta"
        )


def _needs_gradient(inp: torch.Tensor, probs: torch.Tensor | None) -> bool:
    return needs_autograd(inp, probs)
