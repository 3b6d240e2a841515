"""apex's fused_rotary_positional_embedding: rotation of pairs (i, i + d/2).

``freqs``, ``cos`` and ``sin`` are [s, 1, 1, d'], d' <= d, with a column for each element. The
second half of the columns must repeat the first, which alone is read. Cosines and sines are
converted to float32.
"""

from __future__ import annotations

from typing import Any

import torch

from apex_te._version import __version__ as __version__
from apex_te.ops.rope import rope

__all__ = [
    "backward",
    "backward_2d",
    "backward_cached",
    "backward_thd",
    "forward",
    "forward_2d",
    "forward_cached",
    "forward_thd",
]


def forward(
    input: torch.Tensor, freqs: torch.Tensor, transpose_output: bool = False
) -> torch.Tensor:
    """Rotates input [s, b, h, d] by the angles freqs [s, 1, 1, d'], float32.

    With ``transpose_output`` the result has the memory layout of [b, s, h, d].
    """
    _check(input, 4, freqs=freqs)
    return _rotate(input, transpose_output, freqs=freqs)


def backward(
    output_grads: torch.Tensor, freqs: torch.Tensor, transpose_output: bool = False
) -> torch.Tensor:
    """Computes the gradient of ``forward``'s input: ``output_grads`` rotated by -freqs."""
    _check(output_grads, 4, freqs=freqs)
    return _rotate(output_grads, transpose_output, freqs=-freqs)


def forward_cached(
    input: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, transpose_output: bool = False
) -> torch.Tensor:
    """Computes ``forward`` from the angles' cosines and sines, [s, 1, 1, d'] each."""
    _check(input, 4, cos=cos, sin=sin)
    return _rotate(input, transpose_output, cos=cos.float(), sin=sin.float())


def backward_cached(
    output_grads: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    transpose_output: bool = False,
) -> torch.Tensor:
    """Computes the gradient of ``forward_cached``'s input."""
    _check(output_grads, 4, cos=cos, sin=sin)
    return _rotate(output_grads, transpose_output, cos=cos.float(), sin=-sin.float())


def forward_thd(input: torch.Tensor, cu_seqlens: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
    """Rotates input [tokens, h, d] of packed sequences by freqs [max_seq, 1, 1, d'].

    Sequence i is tokens cu_seqlens[i] to cu_seqlens[i + 1]; cu_seqlens is int32 [batch + 1].
    """
    _check(input, 3, same_length=False, freqs=freqs)
    with torch.no_grad():
        return rope(input, freqs, layout="thd", cu_seqlens=cu_seqlens)


def backward_thd(
    output_grads: torch.Tensor, cu_seqlens: torch.Tensor, freqs: torch.Tensor
) -> torch.Tensor:
    """Computes the gradient of ``forward_thd``'s input."""
    _check(output_grads, 3, same_length=False, freqs=freqs)
    with torch.no_grad():
        return rope(output_grads, -freqs, layout="thd", cu_seqlens=cu_seqlens)


def forward_2d(
    input: torch.Tensor,
    cos_h: torch.Tensor,
    sin_h: torch.Tensor,
    cos_w: torch.Tensor,
    sin_w: torch.Tensor,
) -> torch.Tensor:
    """Rotates input [b, H, W, h, d] of images: half of d by the row, the other half by the column.

    The tables of rows are [1, at least H, 1, d / 2], those of columns [1, at least W, 1, d / 2].
    """
    return _rotate_2d(input, cos_h, sin_h.float(), cos_w, sin_w.float())


def backward_2d(
    output_grads: torch.Tensor,
    cos_h: torch.Tensor,
    sin_h: torch.Tensor,
    cos_w: torch.Tensor,
    sin_w: torch.Tensor,
) -> torch.Tensor:
    """Computes the gradient of ``forward_2d``'s input."""
    return _rotate_2d(output_grads, cos_h, -sin_h.float(), cos_w, -sin_w.float())


def _check(
    input: torch.Tensor, dims: int, *, same_length: bool = True, **tables: torch.Tensor
) -> None:
    if input.dim() != dims:
        raise ValueError(
            f"fused_rotary_positional_embedding: input must have {dims} dimensions, "
            f"got shape {list(input.shape)}"
        )
    for name, table in tables.items():
        fits = table.dim() == 4 and table.shape[1] == table.shape[2] == 1
        if not fits or table.shape[3] > input.shape[-1]:
            raise ValueError(
                f"fused_rotary_positional_embedding: {name} must have shape [length, 1, 1, at most "
                f"{input.shape[-1]}], got {list(table.shape)}"
            )
        if same_length and table.shape[0] != input.shape[0]:
            raise ValueError(
                f"fused_rotary_positional_embedding: {name} must have length {input.shape[0]}, "
                f"input's, got {table.shape[0]}"
            )


@torch.no_grad()
def _rotate(input: torch.Tensor, transpose_output: bool, **tables: Any) -> torch.Tensor:
    if transpose_output:
        return rope(input.transpose(0, 1), layout="bshd", **tables).transpose(0, 1)
    return rope(input, layout="sbhd", **tables)


@torch.no_grad()
def _rotate_2d(
    input: torch.Tensor,
    cos_h: torch.Tensor,
    sin_h: torch.Tensor,
    cos_w: torch.Tensor,
    sin_w: torch.Tensor,
) -> torch.Tensor:
    """Rotates the first half of d by rows, with W * h as the heads, and the second by columns."""
    if input.dim() != 5 or input.shape[-1] % 4:
        raise ValueError(
            "fused_rotary_positional_embedding: input must have shape [b, H, W, heads, d] with d "
            f"divisible by 4, got {list(input.shape)}"
        )
    batch, height, width, heads, dim = input.shape
    input = input.contiguous()
    halves = []
    for part, (rows, length, columns, cos, sin) in enumerate(
        ((batch, height, width * heads, cos_h, sin_h), (batch * height, width, heads, cos_w, sin_w))
    ):
        for name, table in (("cos", cos), ("sin", sin)):
            expected = (1, table.shape[1] if table.dim() == 4 else 0, 1, dim // 2)
            if tuple(table.shape) != expected or table.shape[1] < length:
                raise ValueError(
                    f"fused_rotary_positional_embedding: {name}_{'hw'[part]} must have shape "
                    f"[1, at least {length}, 1, {dim // 2}], got {list(table.shape)}"
                )
        view = input.view(rows, length, columns, dim).narrow(-1, part * (dim // 2), dim // 2)
        halves.append(
            rope(
                view, layout="bshd",
                cos=cos[0, :, 0].float().contiguous(), sin=sin[0, :, 0].contiguous(),
            ).view(batch, height, width, heads, dim // 2)
        )  # fmt: skip
    return torch.cat(halves, -1)
