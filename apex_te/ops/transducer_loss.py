"""Loss of a transducer (RNN-T) over all alignments of frames and labels, and its gradient."""

from __future__ import annotations

from typing import Any

import torch

from .binding import OpFunction, bind, checked, note_written, once_differentiable

_fwd = bind("transducer_loss", "transducer_loss_fwd")
_bwd = bind("transducer_loss", "transducer_loss_bwd")


@checked
def transducer_loss(
    x: torch.Tensor,
    label: torch.Tensor,
    f_len: torch.Tensor,
    y_len: torch.Tensor,
    blank: int = 0,
    batch_offset: torch.Tensor | None = None,
    max_f_len: int | None = None,
    *,
    log_probs: bool = False,
) -> torch.Tensor:
    """Computes the transducer (RNN-T) loss: each sample's negative log-likelihood of its labels.

    It is differentiable and includes the log-softmax: no log-probabilities are stored, and backward
    reads the logits once and writes their gradient, rounded once. Sums are in float32, in a fixed
    order.

    Args:
        x: logits over V symbols, [B, T, U, V] float32, float16 or bfloat16, where U - 1 is the
            number of columns of ``label``; with ``batch_offset`` packed as [rows, V]. Made
            contiguous if it is not.
        label: int32 [B, U - 1], in [0, V) up to each sample's length. Another value raises
            ValueError on the CPU and makes the sample's loss NaN on the GPU.
        f_len: int32 [B], number of frames of each sample, from 1 to T.
        y_len: int32 [B], number of labels of each sample, from 0 to U - 1.
        blank: index of the blank symbol in V, which advances to the next frame.
        batch_offset: int64 [B], the end of each sample in a packed ``x``, ``cumsum(f_len * (y_len +
            1))``; row ``t * (y_len + 1) + u`` of a sample is frame t after u labels. None if ``x``
            is not packed.
        max_f_len: T; required with a packed ``x``, else ignored.
        log_probs: ``x`` already contains log-probabilities; the gradient is then with respect to
            them.

    Returns:
        [B] in the dtype of ``x``.

    Raises:
        TypeError: a tensor has another dtype than those above.
        ValueError: a shape does not match, ``blank`` is out of range, or, on the CPU, a length, an
            offset or a label is.
    """
    args = x, label, f_len, y_len, blank, batch_offset, max_f_len, log_probs
    return _TransducerLoss.apply(*args)


@checked
def transducer_loss_fwd(
    x: torch.Tensor,
    label: torch.Tensor,
    f_len: torch.Tensor,
    y_len: torch.Tensor,
    blank: int = 0,
    batch_offset: torch.Tensor | None = None,
    max_f_len: int | None = None,
    *,
    log_sums: torch.Tensor | None = None,
    rest: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes ``transducer_loss`` and what backward needs, without autograd.

    Args:
        x: [B, T, U, V] or packed [rows, V] float32, float16 or bfloat16: logits if ``log_sums`` is
            given, else log-probabilities.
        label: int32 [B, U - 1].
        f_len, y_len: int32 [B], number of frames and labels of each sample.
        blank, batch_offset, max_f_len: as in ``transducer_loss``.
        log_sums: float32 [rows], written: the logsumexp of each row of ``x`` within the lengths.
            rows is B * T * U if ``x`` is not packed.
        rest: float32 [2, B, T, U], written: the rounding errors of alpha and beta in float32; None
            does not compute them.

    Returns:
        (alpha, beta, loss). alpha and beta, float32 [B, T, U], are the log-probabilities of all
        alignments before and after each frame and label, undefined beyond the lengths. loss is [B]
        in the dtype of ``x``.

    Raises:
        TypeError: a tensor has another dtype than those above.
        ValueError: a shape does not match, or a value is out of range.
    """
    rows = _rows("transducer_loss_fwd", x, batch_offset)
    frames = _frames("transducer_loss_fwd", x, batch_offset, max_f_len)
    batch, places = _batch("transducer_loss_fwd", label)
    alpha, beta = rows.new_empty((2, batch, frames, places), dtype=torch.float32)
    loss = rows.new_empty(batch)
    workspace = alpha.new_empty(batch, frames + places, places, 2)
    inputs = _inputs(rows, log_sums, label, f_len, y_len, batch_offset)
    _fwd(*inputs, alpha, beta, rest, loss, workspace, blank)
    note_written(log_sums, rest)
    return alpha, beta, loss


@checked
def transducer_loss_bwd(
    x: torch.Tensor,
    grad: torch.Tensor,
    alpha: torch.Tensor,
    beta: torch.Tensor,
    label: torch.Tensor,
    f_len: torch.Tensor,
    y_len: torch.Tensor,
    blank: int = 0,
    batch_offset: torch.Tensor | None = None,
    *,
    log_sums: torch.Tensor | None = None,
    rest: torch.Tensor | None = None,
    fuse_softmax: bool = True,
) -> torch.Tensor:
    """Computes the gradient of ``transducer_loss`` with respect to ``x``.

    Args:
        x, label, f_len, y_len, blank, batch_offset, log_sums: as passed to ``transducer_loss_fwd``.
        grad: gradient of the losses, [B] in the dtype of ``x``.
        alpha, beta, rest: from ``transducer_loss_fwd``, float32. Without ``rest``, the relative
            error of the gradient is the absolute error of the loss in float32.
        fuse_softmax: True returns the gradient of the logits, False that of log-probabilities.

    Returns:
        A contiguous tensor in the shape and dtype of ``x``, 0 beyond the lengths.

    Raises:
        TypeError: a tensor has another dtype than those above.
        ValueError: a shape does not match, or a value is out of range.
    """
    rows = _rows("transducer_loss_bwd", x, batch_offset)
    dx = torch.empty_like(rows)
    workspace = rows.new_empty(len(rows), 5, dtype=torch.float32)
    inputs = _inputs(rows, log_sums, label, f_len, y_len, batch_offset)
    results = _inputs(alpha, beta, rest, grad)
    _bwd(*inputs, *results, dx, workspace, blank, fuse_softmax)
    return dx.view(x.shape)


def _rows(owner: str, x: torch.Tensor, batch_offset: torch.Tensor | None) -> torch.Tensor:
    """Returns ``x`` as a contiguous matrix of cells."""
    dims = 4 if batch_offset is None else 2
    if x.dim() != dims:
        raise ValueError(f"{owner}: x must have {dims} dimensions, got shape {list(x.shape)}")
    return x.reshape(x[..., 0].numel(), x.shape[-1]).contiguous()


def _frames(
    owner: str, x: torch.Tensor, batch_offset: torch.Tensor | None, max_f_len: int | None
) -> int:
    """Returns T."""
    if batch_offset is None:
        return x.shape[1]
    if max_f_len is None or max_f_len < 0:
        raise ValueError(f"{owner}: max_f_len must be given for a packed x, got {max_f_len}")
    return max_f_len


def _batch(owner: str, label: torch.Tensor) -> tuple[int, int]:
    """Returns B and U."""
    if label.dim() != 2:
        raise ValueError(f"{owner}: label must have 2 dimensions, got shape {list(label.shape)}")
    return label.shape[0], label.shape[1] + 1


def _inputs(*tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    return [None if t is None else t.contiguous() for t in tensors]


class _TransducerLoss(OpFunction):
    LABEL = "transducer_loss"

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        label: torch.Tensor,
        f_len: torch.Tensor,
        y_len: torch.Tensor,
        blank: int,
        batch_offset: torch.Tensor | None,
        max_f_len: int | None,
        log_probs: bool,
    ) -> torch.Tensor:
        frames = _frames("transducer_loss", x, batch_offset, max_f_len)
        batch, places = _batch("transducer_loss", label)
        rest = x.new_empty((2, batch, frames, places), dtype=torch.float32)
        log_sums = None if log_probs else x.new_empty(x.shape[:-1].numel(), dtype=torch.float32)
        alpha, beta, loss = transducer_loss_fwd(
            x, label, f_len, y_len, blank, batch_offset, max_f_len, log_sums=log_sums, rest=rest
        )
        ctx.save_for_backward(x, alpha, beta, label, f_len, y_len, batch_offset, log_sums, rest)
        ctx.options = blank, log_probs
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, alpha, beta, label, f_len, y_len, batch_offset, log_sums, rest = ctx.saved_tensors
        blank, log_probs = ctx.options
        dx = transducer_loss_bwd(
            x, grad, alpha, beta, label, f_len, y_len, blank, batch_offset, log_sums=log_sums,
            rest=rest, fuse_softmax=not log_probs,
        )  # fmt: skip
        return dx, None, None, None, None, None, None, None


def reference(
    x: torch.Tensor,
    label: torch.Tensor,
    f_len: torch.Tensor,
    y_len: torch.Tensor,
    blank: int = 0,
    batch_offset: torch.Tensor | None = None,
    max_f_len: int | None = None,
    *,
    log_probs: bool = False,
) -> torch.Tensor:
    """Computes ``transducer_loss`` in plain PyTorch in the dtype of ``x``, cell by cell.

    The arguments are those of ``transducer_loss``: ``x`` is [B, T, U, V], or with ``batch_offset``
    packed [rows, V], and ``label`` [B, U - 1]. The result is [B] and differentiable; ``max_f_len``
    is not read.
    """
    if not log_probs:
        x = x.log_softmax(-1)
    losses = []
    for b in range(len(label)):
        frames, places = int(f_len[b]), int(y_len[b]) + 1
        if batch_offset is None:
            cells = x[b, :frames, :places]
        else:
            end = int(batch_offset[b])
            cells = x[end - frames * places : end].view(frames, places, -1)
        alpha: dict[tuple[int, int], torch.Tensor] = {}
        for t in range(frames):
            for u in range(places):
                ways = []
                if t > 0:
                    ways.append(alpha[t - 1, u] + cells[t - 1, u, blank])
                if u > 0:
                    ways.append(alpha[t, u - 1] + cells[t, u - 1, int(label[b, u - 1])])
                start = x.new_zeros(())
                alpha[t, u] = torch.stack(ways).logsumexp(0) if ways else start
        losses.append(-alpha[frames - 1, places - 1] - cells[-1, -1, blank])
    return torch.stack(losses) if losses else x.new_empty(0)
