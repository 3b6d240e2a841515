"""apex's fused_rotary_positional_embedding: rotation of pairs (i, i + d'/2).

``freqs``, ``cos`` and ``sin`` are [s, 1, 1, d'], d' <= d, with a column for each element: a pair
(i, j) becomes ``x[i] cos[i] - x[j] sin[i]`` and ``x[j] cos[j] + x[i] sin[j]``.
Cosines and sines are converted to float32.
"""

from __future__ import annotations

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
    return _rotate_4d(input, *_cos_sin(freqs), transpose_output)


def backward(
    output_grads: torch.Tensor, freqs: torch.Tensor, transpose_output: bool = False
) -> torch.Tensor:
    """Computes the gradient of ``forward``'s input."""
    _check(output_grads, 4, freqs=freqs)
    return _rotate_4d(output_grads, *_cos_sin(freqs), transpose_output, backward=True)


def forward_cached(
    input: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, transpose_output: bool = False
) -> torch.Tensor:
    """Computes ``forward`` from the angles' cosines and sines, [s, 1, 1, d'] each."""
    _check(input, 4, cos=cos, sin=sin)
    return _rotate_4d(input, cos, sin, transpose_output)


def backward_cached(
    output_grads: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    transpose_output: bool = False,
) -> torch.Tensor:
    """Computes the gradient of ``forward_cached``'s input."""
    _check(output_grads, 4, cos=cos, sin=sin)
    return _rotate_4d(output_grads, cos, sin, transpose_output, backward=True)


def forward_thd(input: torch.Tensor, cu_seqlens: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
    """Rotates input [tokens, h, d] of packed sequences by freqs [max_seq, 1, 1, d'].

    Sequence i is tokens cu_seqlens[i] to cu_seqlens[i + 1]; cu_seqlens is int32 [batch + 1].
    """
    _check(input, 3, same_length=False, freqs=freqs)
    return _rotate(input, *_cos_sin(freqs), "thd", cu_seqlens)


def backward_thd(
    output_grads: torch.Tensor, cu_seqlens: torch.Tensor, freqs: torch.Tensor
) -> torch.Tensor:
    """Computes the gradient of ``forward_thd``'s input."""
    _check(output_grads, 3, same_length=False, freqs=freqs)
    return _rotate(output_grads, *_cos_sin(freqs), "thd", cu_seqlens, backward=True)


def forward_2d(
    input: torch.Tensor,
    cos_h: torch.Tensor,
    sin_h: torch.Tensor,
    cos_w: torch.Tensor,
    sin_w: torch.Tensor,
) -> torch.Tensor:
    """Rotates input [b, H, W, h, d] of images: half of d by the row, the other half by the column.

    The tables of rows are [1, at least H, 1, d / 2], those of columns [1, at least W, 1, d / 2];
    the result is [b, H * W, h, d].
    """
    return _rotate_2d(input, cos_h, sin_h, cos_w, sin_w)


def backward_2d(
    output_grads: torch.Tensor,
    cos_h: torch.Tensor,
    sin_h: torch.Tensor,
    cos_w: torch.Tensor,
    sin_w: torch.Tensor,
) -> torch.Tensor:
    """Computes the gradient [b, H * W, h, d] from ``output_grads`` [b, H, W, h, d]."""
    return _rotate_2d(output_grads, cos_h, sin_h, cos_w, sin_w, backward=True)


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
        if not fits or table.shape[3] > input.shape[-1] or table.shape[3] % 2:
            raise ValueError(
                f"fused_rotary_positional_embedding: {name} must have shape [length, 1, 1, an even "
                f"number of at most {input.shape[-1]}], got {list(table.shape)}"
            )
        if same_length and table.shape[0] != input.shape[0]:
            raise ValueError(
                f"fused_rotary_positional_embedding: {name} must have length {input.shape[0]}, "
                f"input's, got {table.shape[0]}"
            )


def _cos_sin(freqs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return freqs.float().cos(), freqs.float().sin()


@torch.no_grad()
def _rotate(
    input: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    layout: str,
    cu_seqlens: torch.Tensor | None = None,
    backward: bool = False,
) -> torch.Tensor:
    """Rotates by [s, 1, 1, d'] tables whose halves may differ: ``rope`` once for each half."""
    dim = cos.shape[-1]
    half = dim // 2
    (cos1, sin1), (cos2, sin2) = (
        (cos[..., columns].float(), sin[..., columns].float())
        for columns in (slice(half), slice(half, None))
    )
    if backward:  # the transpose: each element takes its partner's sine
        sin1, sin2 = -sin2, -sin1

    def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return rope(x, cos=cos, sin=sin, layout=layout, rotary_dim=dim, cu_seqlens=cu_seqlens)

    out = turn(input, cos1, sin1)
    out[..., half:dim] = turn(input[..., :dim], cos2, sin2)[..., half:]
    return out


def _rotate_4d(
    input: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    transpose_output: bool,
    backward: bool = False,
) -> torch.Tensor:
    if not transpose_output:
        return _rotate(input, cos, sin, "sbhd", backward=backward)
    return _rotate(input.transpose(0, 1), cos, sin, "bshd", backward=backward).transpose(0, 1)


@torch.no_grad()
def _rotate_2d(
    input: torch.Tensor,
    cos_h: torch.Tensor,
    sin_h: torch.Tensor,
    cos_w: torch.Tensor,
    sin_w: torch.Tensor,
    backward: bool = False,
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
        cos, sin = (table[:, :length].transpose(0, 1) for table in (cos, sin))
        out = _rotate(view, cos, sin, "bshd", backward=backward)
        halves.append(out.view(batch, height * width, heads, dim // 2))
    return torch.cat(halves, -1)
