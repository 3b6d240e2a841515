"""Bias, dropout and residual addition in one pass.

Randomness: a call draws one int64, the seed, on the device with ``torch.randint``, and the kernel
makes the mask from it with Philox4x32-10. This way of using torch's generator works everywhere:

- ``torch.manual_seed`` determines the mask.
- Activation checkpointing restores the default generator's state, hence the mask in the recompute.
- A captured CUDA graph draws a new seed in each replay. For a generator other than the default one
  ``graph.register_generator_state(generator)`` must be called before the capture.
- Compiled code traces it.

Reading the offset of the generator's state on the host and advancing it would save one small
launch, but is refused during capture and not traceable; ``philox_cuda_state`` needs torch's C++
headers.

For backward a GPU keeps the seed (8 bytes) and computes the mask again, which costs no time while
the kernel waits for memory. A CPU, for which the mask is most of the work, keeps the mask's bits.
"""

from __future__ import annotations

import math

import torch

from .binding import OpFunction, bind, checked, once_differentiable

# Rows that one line of the bias-gradient workspace sums (bias_dropout_add.h).
_TILE_ROWS = 64

_fwd = bind("bias_dropout_add", "bias_dropout_add_fwd")
_bwd = bind("bias_dropout_add", "bias_dropout_add_bwd")


@checked
def bias_dropout_add(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    p: float,
    training: bool = True,
    *,
    seed: torch.Tensor | None = None,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Computes residual + dropout(x + bias, p) in float32, rounded once.

    An element is dropped with probability q: p rounded to a multiple of 1/65536, at least 1/65536
    and at most 65535/65536. Dropping multiplies by 0, so NaN and infinity give NaN. Other elements
    are multiplied by 1 / (1 - q), which keeps the expectation exact. No random number is drawn if p
    = 0, if p = 1 (everything is dropped) or if ``training`` is False. Backward applies the
    forward's mask to the gradients of x and bias; the bias's gradient is summed over rows
    deterministically. The residual's gradient is that of the output.

    Args:
        x: [..., cols] float32, float16 or bfloat16; made contiguous if it is not.
        bias: [cols] of x's dtype or float32, or None.
        residual: x's shape, of x's dtype or float32; made contiguous if it is not.
        p: dropout probability, from 0 to 1.
        training: False has the effect of p = 0.
        seed: determines the mask: one int64 on x's device, or its halves as int32 [2], the low one
            first; None draws one.
        generator: generator on x's device that draws the seed; None uses the device's default
            generator. ``torch.utils.checkpoint`` restores only the default generator, and none
            during capture of a CUDA graph. With another generator or in a capture, draw the seed
            outside of the checkpointed function and pass it.

    Returns:
        A contiguous tensor of x's shape and residual's dtype.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape does not match, ``p`` is out of range, or both ``seed`` and
            ``generator`` are given.
    """
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"bias_dropout_add: p must be from 0 to 1, got {p}")
    if x.dim() == 0:
        raise ValueError("bias_dropout_add: x must have at least 1 dimension, got shape []")
    if residual.shape != x.shape:
        raise ValueError(
            f"bias_dropout_add: residual must have shape {list(x.shape)}, "
            f"got {list(residual.shape)}"
        )
    if seed is not None and generator is not None:
        raise ValueError("bias_dropout_add: generator must be None if seed is given")
    p = float(p) if training else 0.0
    if not 0.0 < p < 1.0:
        seed = None
    elif seed is None:
        seed = torch.randint(
            0, 2**63 - 1, (1,), dtype=torch.int64, device=x.device, generator=generator
        )
    return _BiasDropoutAdd.apply(x, bias, residual, seed, p)


@checked
def bias_dropout_add_bwd(
    dout: torch.Tensor,
    seed: torch.Tensor | None,
    p: float,
    *,
    x_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None = None,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Computes the gradients of x and bias in ``bias_dropout_add``; the residual's is ``dout``.

    Args:
        dout: [..., cols], gradient of the output, in the output's dtype; made contiguous if it is
            not.
        seed: the forward's seed, one int64 or two int32; None if p is 0 or 1.
        p: the forward's p.
        x_dtype: dtype of dx; None skips dx.
        bias_dtype: dtype of dbias; None skips dbias.
        mask: CPU only: the forward's mask, uint8 [rows, ceil(cols / 8)], one bit per element; None
            computes it from ``seed``.

    Returns:
        (dx in dout's shape, dbias [cols] summed in a fixed order), each None if skipped.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape does not match, or ``p`` is out of range.
    """
    dense = _rows(dout)
    rows, cols = dense.shape
    dx = dbias = workspace = None
    if x_dtype is not None:
        dx = torch.empty_like(dense, dtype=x_dtype)
    if bias_dtype is not None:
        dbias = dense.new_empty(cols, dtype=bias_dtype)
        workspace = dense.new_empty((-(-rows // _TILE_ROWS), cols), dtype=torch.float32)
    if dx is not None or dbias is not None:
        _bwd(dense, seed, mask, dx, dbias, workspace, p)
    return (dx.view(dout.shape) if dx is not None else None), dbias


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Returns x [..., cols] as a contiguous matrix [rows, cols]."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1]).contiguous()


def _mask_like(x: torch.Tensor) -> torch.Tensor:
    """Returns an uninitialised mask for x [..., cols], uint8 [rows, ceil(cols / 8)]."""
    rows = math.prod(x.shape[:-1])
    return torch.empty((rows, -(-x.shape[-1] // 8)), dtype=torch.uint8, device=x.device)


class _BiasDropoutAdd(OpFunction):
    LABEL = "bias_dropout_add"

    @staticmethod
    def forward(ctx, x, bias, residual, seed, p):
        mask = None
        if seed is not None and x.device.type == "cpu" and any(ctx.needs_input_grad[:2]):
            mask = _mask_like(x)
        ctx.save_for_backward(seed, mask)
        ctx.p, ctx.x_dtype = p, x.dtype
        ctx.bias_dtype = bias.dtype if bias is not None else None
        out = residual.new_empty(residual.shape)
        bias = bias.contiguous() if bias is not None else None
        _fwd(_rows(x), bias, _rows(residual), seed, _rows(out), mask, p)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        seed, mask = ctx.saved_tensors
        needs_x, needs_bias = ctx.needs_input_grad[:2]
        passes_dout = ctx.p == 0.0 and dout.dtype == ctx.x_dtype
        dx, dbias = bias_dropout_add_bwd(
            dout, seed, ctx.p, x_dtype=ctx.x_dtype if needs_x and not passes_dout else None,
            bias_dtype=ctx.bias_dtype if needs_bias else None, mask=mask,
        )  # fmt: skip
        return dout if needs_x and passes_dout else dx, dbias, dout, None, None


def reference(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    p: float,
    seed: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes ``bias_dropout_add`` in plain PyTorch in residual's dtype, as its specification.

    ``x`` and ``residual`` are [..., cols], ``bias`` is [cols] or None, and the result has
    residual's shape and dtype. ``seed``, one int64, must be given if 0 < p < 1.
    """
    y = x.to(residual.dtype)
    if bias is not None:
        y = y + bias.to(residual.dtype)
    if p == 1.0:
        y = y * 0.0
    elif p > 0.0:
        assert seed is not None
        kept = keep_mask(seed, math.prod(x.shape[:-1]), x.shape[-1], p).view(x.shape)
        y = y * kept * (1.0 / (1.0 - drop_threshold(p) / 65536))
    return residual + y


def drop_threshold(p: float) -> int:
    """Returns the bound, 1 to 65535, below which a random 16-bit value drops its element."""
    return min(max(math.floor(p * 65536 + 0.5), 1), 65535)


def keep_mask(seed: torch.Tensor, rows: int, cols: int, p: float) -> torch.Tensor:
    """Returns the mask that ``seed`` determines, bool [rows, cols], True for elements to keep.

    Args:
        seed: one int64 element; the mask is on its device.
        rows, cols: shape of the mask.
        p: dropout probability, above 0 and below 1.
    """
    row = torch.arange(rows, device=seed.device)[:, None]
    vec = torch.arange(-(-cols // 8), device=seed.device)
    row, vec = torch.broadcast_tensors(row, vec)
    counter = (vec & _LOW, row & _LOW, row >> 32, vec >> 32)
    key = (seed & _LOW, seed >> 32 & _LOW)
    words = torch.stack(philox4x32(counter, key), -1)
    halves = torch.stack((words & 0xFFFF, words >> 16), -1).reshape(rows, -1)
    return halves[:, :cols] >= drop_threshold(p)


_LOW = 0xFFFFFFFF

Words4 = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox4x32(counter: Words4, key: tuple[torch.Tensor, torch.Tensor]) -> Words4:
    """Computes Philox4x32-10 (Salmon et al., SC 2011) on 32-bit words held in int64 tensors.

    The counter's four words broadcast; the key's two are low, then high.
    """
    x, y, z, w = counter
    low, high = key
    for _ in range(10):
        # A product wraps as an int64, which leaves its 64 bits right.
        a, b = x * 0xD2511F53, z * 0xCD9E8D57
        x, y, z, w = (b >> 32 & _LOW) ^ y ^ low, b & _LOW, (a >> 32 & _LOW) ^ w ^ high, a & _LOW
        low, high = low + 0x9E3779B9 & _LOW, high + 0xBB67AE85 & _LOW
    return x, y, z, w
