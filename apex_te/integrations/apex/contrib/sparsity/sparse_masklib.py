"""Masks that keep 2 of 4 weights by their magnitudes."""

from __future__ import annotations

import functools
import itertools

import torch
from torch.nn.functional import pad

__all__ = ["create_mask", "fill", "m4n2_1d", "m4n2_2d_best", "m4n2_2d_greedy"]

_GROUP, _KEPT = 4, 2


def fill(x: torch.Tensor) -> float:
    """Returns the share of elements that are not 0."""
    return x.count_nonzero().item() / x.numel()


def m4n2_1d(mat: torch.Tensor, density: float = 0.5) -> torch.Tensor:
    """Returns the mask of the 2 largest magnitudes of each 4 neighbours in a row; the first wins.

    Args:
        mat: [rows, cols]. A last group of fewer columns counts as filled up with zeros.
        density: no effect.

    Returns:
        Float32 ones and zeros, [rows, cols].
    """
    rows, cols = mat.shape
    groups = pad(mat.abs().float(), (0, -cols % _GROUP)).view(rows, -1, _GROUP)
    order = groups.argsort(dim=-1, descending=True, stable=True)
    mask = torch.zeros_like(groups).scatter_(-1, order[..., :_KEPT], 1.0)
    return mask.view(rows, -1)[:, :cols]


def m4n2_2d_best(mat: torch.Tensor, density: float = 0.5) -> torch.Tensor:
    """Returns the mask of 2 in each row and column of each block of 4x4 with the largest sum.

    Args:
        mat: [rows, cols], with rows and cols in multiples of 4. Sums are of magnitudes.
        density: no effect.

    Returns:
        Float32 ones and zeros, [rows, cols].

    Raises:
        ValueError: rows or cols is not a multiple of 4.
    """
    blocks, cols = _blocks("m4n2_2d_best", mat)
    patterns = _patterns().to(mat.device)
    best = (blocks @ patterns.t()).argmax(-1)
    return _joined(patterns[best], cols)


def m4n2_2d_greedy(mat: torch.Tensor, density: float = 0.5) -> torch.Tensor:
    """Returns a mask of at most 2 in each row and column of each block of 4x4, largest first.

    Args:
        mat: [rows, cols], with rows and cols in multiples of 4; magnitudes are compared.
        density: no effect.

    Returns:
        Float32 ones and zeros, [rows, cols].

    Raises:
        ValueError: rows or cols is not a multiple of 4.
    """
    blocks, cols = _blocks("m4n2_2d_greedy", mat)
    order = blocks.argsort(dim=-1, descending=True, stable=True)
    mask = torch.zeros_like(blocks)
    every = torch.arange(len(blocks), device=mat.device)
    for place in order.unbind(-1):
        view = mask.view(-1, _GROUP, _GROUP)
        row, col = place // _GROUP, place % _GROUP
        is_free = (view[every, row].sum(-1) < _KEPT) & (view[every, :, col].sum(-1) < _KEPT)
        mask[every, place] = is_free.to(mask.dtype)
    return _joined(mask, cols)


_CALCULATORS = {f.__name__: f for f in (m4n2_1d, m4n2_2d_best, m4n2_2d_greedy)}


def create_mask(
    tensor: torch.Tensor, pattern: str = "m4n2_1d", density: float = 0.5
) -> torch.Tensor:
    """Returns a mask of ones and zeros in the shape and dtype of ``tensor``.

    Args:
        tensor: [C], [K, C], or a convolution's weight [K, C, R] or [K, C, R, S]; groups of 4 run
            along C.
        pattern: "m4n2_1d" keeps 2 of 4 in rows, "m4n2_2d_best" and "m4n2_2d_greedy" in rows and
            columns.
        density: 0.5, which is that of the patterns.

    Raises:
        ValueError: the pattern, the density or the number of dimensions is not supported.

    Source: apex.contrib.sparsity.
    """
    if pattern not in _CALCULATORS:
        raise ValueError(
            f"create_mask: pattern must be one of {', '.join(_CALCULATORS)}, got {pattern!r}"
        )
    if density != _KEPT / _GROUP:
        raise ValueError(f"create_mask: density must be {_KEPT / _GROUP}, got {density}")
    if not 1 <= tensor.dim() <= 4:
        raise ValueError(
            f"create_mask: tensor must have 1 to 4 dimensions, got shape {list(tensor.shape)}"
        )
    calculate = _CALCULATORS[pattern]
    if tensor.dim() == 1:
        return calculate(tensor[None], density)[0].to(tensor.dtype)
    # A convolution's kernel positions first: rows and columns of each matrix are K and C.
    kernel, front = [*range(2, tensor.dim())], [*range(tensor.dim() - 2)]
    moved = tensor.movedim(kernel, front)
    mask = calculate(moved.reshape(-1, tensor.shape[1]), density).reshape(moved.shape)
    mask = mask.movedim(front, kernel)
    return mask.to(tensor.dtype).contiguous()


def _blocks(name: str, mat: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Returns the magnitudes of blocks of 4x4, float32 [blocks, 16], and the columns of ``mat``."""
    rows, cols = mat.shape
    if rows % _GROUP or cols % _GROUP:
        raise ValueError(
            f"{name}: mat must have rows and columns in multiples of 4, got {[rows, cols]}"
        )
    blocks = mat.abs().float().view(rows // _GROUP, _GROUP, cols // _GROUP, _GROUP)
    return blocks.transpose(1, 2).reshape(-1, _GROUP * _GROUP), cols


def _joined(blocks: torch.Tensor, cols: int) -> torch.Tensor:
    """Returns blocks of 4x4 as the matrix that they are of."""
    shaped = blocks.view(-1, cols // _GROUP, _GROUP, _GROUP)
    return shaped.transpose(1, 2).reshape(-1, cols)


@functools.cache
def _patterns() -> torch.Tensor:
    """Returns all blocks of 4x4 with 2 ones in each row and column, float32 [90, 16]."""
    rows = [tuple(float(i in kept) for i in range(_GROUP)) for kept in
            itertools.combinations(range(_GROUP), _KEPT)]  # fmt: skip
    every = torch.tensor(list(itertools.product(rows, repeat=_GROUP)))
    return every[(every.sum(1) == _KEPT).all(-1)].flatten(1)
