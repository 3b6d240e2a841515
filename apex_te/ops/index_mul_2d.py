"""Indexed rows of one matrix times the rows of another, with deterministic gradients."""

from __future__ import annotations

from typing import Any

import torch

from .binding import OpFunction, bind, checked, note_written, once_differentiable

_CHUNK = 32  # places whose sums one line of the workspace has

_fwd = bind("index_mul_2d", "index_mul_2d_fwd")
_bwd = bind("index_mul_2d", "index_mul_2d_bwd")


@checked
def index_mul_2d(in1: torch.Tensor, in2: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Computes ``in1[index] * in2``; differentiable twice.

    The gradient of ``in1`` is summed in float32, in the order of ``index``, and rounded once.

    Args:
        in1: [m, d] float32, float16 or bfloat16; made contiguous if it is not.
        in2: [e, d] of the same dtype; made contiguous if it is not.
        index: [e] int64. A value outside [0, m) raises ValueError on the CPU. On the GPU it makes
            its row NaN, because the host does not wait for the GPU.

    Returns:
        [e, d] in the dtype of ``in1``.

    Raises:
        TypeError: a tensor has another dtype than those above.
        ValueError: a shape does not match, or, on the CPU, ``index`` is out of range.
    """
    return IndexMulFunction.apply(in1, in2, index)


@checked
def index_mul_2d_fwd(
    in1: torch.Tensor,
    in2: torch.Tensor,
    index: torch.Tensor,
    more1: torch.Tensor | None = None,
    more2: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes ``in1[index] * in2``, plus ``more1[index] * more2`` if given, without autograd.

    Args:
        in1: [m, d] float32, float16 or bfloat16.
        in2: [e, d] in the same dtype.
        index: [e] int64, each in [0, m).
        more1, more2: in the shape and dtype of ``in1`` and of ``in2``; give both or neither.
        out: contiguous [e, d] to write instead of a new tensor; may be ``in2`` or ``more2``.

    Returns:
        ``out`` or a new tensor [e, d].

    Raises:
        TypeError: a tensor has another dtype than those above.
        ValueError: a shape does not match, only one of ``more1`` and ``more2`` is given, or, on the
            CPU, ``index`` is out of range.
    """
    in2 = in2.contiguous()
    y = torch.empty_like(in2) if out is None else out
    more = (None if t is None else t.contiguous() for t in (more1, more2))
    _fwd(in1.contiguous(), in2, index.contiguous(), *more, y)
    note_written(out)
    return y


@checked
def index_mul_2d_bwd(
    dout: torch.Tensor,
    in1: torch.Tensor,
    in2: torch.Tensor,
    index: torch.Tensor,
    *,
    din1: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the gradients of ``in1``, to which it adds, and of ``in2`` in ``index_mul_2d``.

    Args:
        dout: [e, d] in the dtype of ``in1``, the gradient of the result.
        in1: [m, d] float32, float16 or bfloat16.
        in2: [e, d] in the same dtype.
        index: [e] int64, each in [0, m).
        din1: contiguous [m, d], increased by the gradient of ``in1``; None starts from zeros.
        out: contiguous [e, d] to write the gradient of ``in2`` to; None allocates it.

    Returns:
        (gradient of ``in1``, gradient of ``in2``): ``din1`` and ``out``, or new tensors.

    Raises:
        TypeError: a tensor has another dtype than those above.
        ValueError: a shape does not match, or, on the CPU, ``index`` is out of range.
    """
    if index.shape != in2.shape[:1]:
        raise ValueError(
            f"index_mul_2d_bwd: index must have shape {list(in2.shape[:1])}, "
            f"got {list(index.shape)}"
        )
    in1, in2, dout = in1.contiguous(), in2.contiguous(), dout.contiguous()
    sums = torch.zeros_like(in1) if din1 is None else din1
    din2 = torch.empty_like(in2) if out is None else out
    # Of 32 bits, which take half the time to sort; values outside in1 stay outside.
    keys, order = index.clamp(-1, len(in1)).int().sort(stable=True)
    chunks = -(-len(in2) // _CHUNK)
    workspace = in2.new_empty((chunks, 2, *in2.shape[1:]), dtype=torch.float32)
    _bwd(in1, in2, dout, keys, order, sums, din2, workspace)
    note_written(din1, out)
    return sums, din2


class IndexMulFunction(OpFunction):
    """Autograd function of ``index_mul_2d``."""

    LABEL = "index_mul_2d"

    @staticmethod
    def forward(
        ctx: Any, in1: torch.Tensor, in2: torch.Tensor, index: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(in1, in2, index)
        return index_mul_2d_fwd(in1, in2, index)

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (*IndexMulBackwardFunction.apply(dout, *ctx.saved_tensors), None)


class IndexMulBackwardFunction(OpFunction):
    """Autograd function of the gradients of ``index_mul_2d``."""

    LABEL = "index_mul_2d_bwd"

    @staticmethod
    def forward(
        ctx: Any, dout: torch.Tensor, in1: torch.Tensor, in2: torch.Tensor, index: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(dout, in1, in2, index)
        return index_mul_2d_bwd(dout, in1, in2, index)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, d_din1: torch.Tensor, d_din2: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        dout, in1, in2, index = ctx.saved_tensors
        d_dout = index_mul_2d_fwd(d_din1, in2, index, in1, d_din2)
        return d_dout, *index_mul_2d_bwd(dout, d_din1, d_din2, index), None


def reference(in1: torch.Tensor, in2: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Computes ``in1[index] * in2`` in plain PyTorch, differentiably.

    ``in1`` is [m, d], ``in2`` [e, d] and ``index`` [e] int64; the result is [e, d].
    """
    return in1[index] * in2
