"""Batch normalisation whole, and in steps, between which ranks may combine statistics and sums."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..runtime.scratch_sizes import batch_norm_floats
from .binding import bind, checked, note_written

_stats = bind("batch_norm", "batch_norm_stats")
_combine = bind("batch_norm", "batch_norm_combine")
_fwd = bind("batch_norm", "batch_norm_fwd")
_reduce = bind("batch_norm", "batch_norm_reduce")
_bwd = bind("batch_norm", "batch_norm_bwd")
_train_fwd = bind("batch_norm", "batch_norm_train_fwd")
_train_bwd = bind("batch_norm", "batch_norm_train_bwd")


class BatchNormStatistics(NamedTuple):
    """Statistics of each channel, float32 [c].

    Attributes:
        mean: mean of all elements.
        var: unbiased variance; NaN if the channel has one element.
        inv_std: 1 / sqrt(biased variance + eps).
    """

    mean: torch.Tensor
    var: torch.Tensor
    inv_std: torch.Tensor


class BatchNormSums(NamedTuple):
    """Sums over each channel that backward needs.

    Attributes:
        sum_dy: sum of the gradients, float32 [c].
        sum_dy_xmu: sum of the gradients times ``x - mean``, float32 [c].
        dweight: gradient of the weight, or None.
        dbias: gradient of the bias, or None.
    """

    sum_dy: torch.Tensor
    sum_dy_xmu: torch.Tensor
    dweight: torch.Tensor | None
    dbias: torch.Tensor | None


class BatchNormGradients(NamedTuple):
    """Gradients of the arguments of a batch normalisation.

    Attributes:
        dx: gradient of ``x``.
        dz: gradient of ``z``, or None.
        dweight: gradient of the weight, or None.
        dbias: gradient of the bias, or None.
    """

    dx: torch.Tensor
    dz: torch.Tensor | None
    dweight: torch.Tensor | None
    dbias: torch.Tensor | None


@checked
def batch_norm_train_fwd(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    z: torch.Tensor | None = None,
    relu: bool = False,
    running_mean: torch.Tensor | None = None,
    running_var: torch.Tensor | None = None,
    momentum: float = 0.1,
    channels_last: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Normalises a batch by its own statistics, in one call.

    The results are bitwise those of ``batch_norm_stats``, ``batch_norm_combine`` of one part and
    ``batch_norm_fwd``.

    Args:
        x: float32, float16 or bfloat16, [n, c, ...], or [..., c] with ``channels_last``.
        weight, bias: [c], both in the dtype of ``x`` or both float32; None for 1 and 0.
        eps: added to the variance.
        z: residual in the shape and dtype of ``x``; None adds nothing.
        relu: True to apply a ReLU at the end.
        running_mean: float32 [c], updated in place to ``(1 - momentum) * running_mean + momentum *
            mean``. An empty ``x`` does not update it.
        running_var: float32 [c], updated in the same way with the unbiased variance.
        momentum: weight of the new statistics in the running ones.
        channels_last: True if the channels are the last dimension.

    Returns:
        (y, mean, inv_std): the result in ``x``'s shape, dtype and memory order; mean and
        1 / sqrt(biased variance + eps) of each channel, float32 [c].

    Raises:
        TypeError: a tensor has another dtype than those above.
        ValueError: a shape does not match.
    """
    layout = _Layout("batch_norm_train_fwd", x, channels_last)
    data, residual, y = layout.data, layout.like("z", z), torch.empty_like(layout.data)
    mean, inv_std = (data.new_empty(data.shape[1], dtype=torch.float32) for _ in range(2))
    _train_fwd(
        data, residual, *_dense(weight, bias), mean, inv_std, running_mean, running_var, y,
        layout.workspace(), float(eps), float(momentum), relu,
    )  # fmt: skip
    note_written(running_mean, running_var)
    return layout.restored(y), mean, inv_std


@checked
def batch_norm_train_bwd(
    dy: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    inv_std: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    z: torch.Tensor | None = None,
    relu: bool = False,
    with_dz: bool = False,
    channels_last: bool = False,
) -> BatchNormGradients:
    """Computes the gradients of ``batch_norm_train_fwd``, in one call.

    They are bitwise those of ``batch_norm_reduce`` and ``batch_norm_bwd`` of one part.

    Args:
        dy: gradient of the output, in the shape and dtype of ``x``.
        x: float32, float16 or bfloat16, [n, c, ...], or [..., c] with ``channels_last``.
        mean, inv_std: float32 [c], as ``batch_norm_train_fwd`` returned them.
        weight, bias, z, relu, channels_last: as passed to ``batch_norm_train_fwd``.
        with_dz: also return the gradient of ``z``.

    Returns:
        The gradients: of ``x`` and ``z`` in the shape and dtype of ``x``; of a weight or bias that
        is given in its dtype.

    Raises:
        TypeError: a tensor has another dtype than those above.
        ValueError: a shape does not match.
    """
    layout = _Layout("batch_norm_train_bwd", x, channels_last)
    data, grad, residual = layout.data, layout.like("dy", dy), layout.like("z", z)
    dx = torch.empty_like(data)
    dz = torch.empty_like(data) if with_dz else None
    operands = _dense(mean, inv_std, weight, bias)
    sums = [data.new_empty(data.shape[1], dtype=torch.float32) for _ in range(2)]
    grads = [None if t is None else torch.empty_like(t) for t in operands[2:]]
    _train_bwd(grad, data, residual, *operands, *sums, *grads, dx, dz, layout.workspace(), relu)
    restored = layout.restored(dx), None if dz is None else layout.restored(dz)
    return BatchNormGradients(*restored, *grads)


@checked
def batch_norm_stats(
    x: torch.Tensor, *, channels_last: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the mean and biased variance of each channel.

    Args:
        x: float32, float16 or bfloat16, [n, c, ...], or [..., c] with ``channels_last``. Copied
            unless it is contiguous or in channels-last memory.
        channels_last: True if the channels are the last dimension.

    Returns:
        (mean, variance), float32 [c]; zeros if ``x`` has no elements.

    Raises:
        TypeError: ``x`` has another dtype.
        ValueError: ``x`` has too few dimensions to have channels.
    """
    layout = _Layout("batch_norm_stats", x, channels_last)
    mean = layout.data.new_empty(layout.data.shape[1], dtype=torch.float32)
    var = torch.empty_like(mean)
    _stats(layout.data, mean, var, layout.workspace())
    return mean, var


@checked
def batch_norm_combine(
    means: torch.Tensor,
    vars: torch.Tensor,
    counts: torch.Tensor,
    eps: float = 1e-5,
    *,
    running_mean: torch.Tensor | None = None,
    running_var: torch.Tensor | None = None,
    momentum: float = 0.1,
) -> BatchNormStatistics:
    """Combines the statistics of parts of a batch, such as ranks, and updates running statistics.

    Args:
        means: float32 [parts, c].
        vars: biased variances, float32 [parts, c].
        counts: number of elements per channel in each part, int32 [parts]; a part may be empty.
        eps: added to the variance.
        running_mean: float32 [c], overwritten by ``(1 - momentum) * running_mean + momentum *
            mean``.
        running_var: float32 [c], updated in the same way with the unbiased variance.
        momentum: weight of the new statistics in the running ones.

    Returns:
        The statistics of the whole batch.

    Raises:
        TypeError: a tensor has another dtype than those above.
        ValueError: a shape does not match.
    """
    means = means.contiguous()
    out = BatchNormStatistics(*(means.new_empty(means.shape[1:]) for _ in range(3)))
    _combine(
        means, vars.contiguous(), counts.contiguous(), *out, running_mean, running_var, float(eps),
        float(momentum),
    )  # fmt: skip
    note_written(running_mean, running_var)
    return out


@checked
def batch_norm_fwd(
    x: torch.Tensor,
    mean: torch.Tensor,
    inv_std: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    z: torch.Tensor | None = None,
    relu: bool = False,
    channels_last: bool = False,
) -> torch.Tensor:
    """Computes ``(x - mean) * inv_std * weight + bias + z``, and its ReLU, rounded once.

    Args:
        x: float32, float16 or bfloat16, [n, c, ...], or [..., c] with ``channels_last``.
        mean, inv_std: float32 [c]; inv_std is 1 / sqrt(biased variance + eps).
        weight, bias: [c], both in the dtype of ``x`` or both float32; None for 1 and 0.
        z: residual in the shape and dtype of ``x``; None adds nothing.
        relu: True to apply a ReLU at the end.
        channels_last: True if the channels are the last dimension.

    Returns:
        A tensor of ``x``'s shape, dtype and memory order.

    Raises:
        TypeError: a tensor has another dtype than those above.
        ValueError: a shape does not match.
    """
    layout = _Layout("batch_norm_fwd", x, channels_last)
    y = torch.empty_like(layout.data)
    operands = _dense(mean, inv_std, weight, bias)
    _fwd(layout.data, layout.like("z", z), *operands, y, relu)
    return layout.restored(y)


@checked
def batch_norm_reduce(
    dy: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    inv_std: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    z: torch.Tensor | None = None,
    relu: bool = False,
    channels_last: bool = False,
) -> BatchNormSums:
    """Sums the output gradient, and its product with ``x - mean``, over each channel.

    With ``relu``, the gradient is zero where the input of the ReLU is not positive.

    Args:
        dy: gradient of the output, in the shape and dtype of ``x``.
        x: float32, float16 or bfloat16, [n, c, ...], or [..., c] with ``channels_last``.
        mean, inv_std: float32 [c]; inv_std is 1 / sqrt(biased variance + eps).
        weight, bias, z, relu, channels_last: as passed to ``batch_norm_fwd``.

    Returns:
        The sums, added in a fixed order; and, for a weight or bias that is given, its gradient in
        its dtype, ``sum_dy_xmu * inv_std`` or ``sum_dy``.

    Raises:
        TypeError: a tensor has another dtype than those above.
        ValueError: a shape does not match.
    """
    layout = _Layout("batch_norm_reduce", x, channels_last)
    data, grad, residual = layout.data, layout.like("dy", dy), layout.like("z", z)
    sums = [data.new_empty(data.shape[1], dtype=torch.float32) for _ in range(2)]
    grads = [None if t is None else torch.empty_like(t) for t in _dense(weight, bias)]
    operands = _dense(mean, inv_std, weight, bias)
    _reduce(grad, data, residual, *operands, *sums, *grads, layout.workspace(), relu)
    return BatchNormSums(*sums, *grads)


@checked
def batch_norm_bwd(
    dy: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    inv_std: torch.Tensor,
    weight: torch.Tensor | None,
    sum_dy: torch.Tensor,
    sum_dy_xmu: torch.Tensor,
    counts: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    z: torch.Tensor | None = None,
    relu: bool = False,
    with_dz: bool = False,
    channels_last: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Computes the gradient of ``x`` and, if requested, that of ``z``.

    ``dx = (d - sum_dy / n - (x - mean) * inv_std ** 2 * sum_dy_xmu / n) * inv_std * weight`` with
    ``n = counts.sum()``. d is the gradient of the output, set to zero where ``relu`` made the
    output zero.

    Args:
        dy: gradient of the output, in the shape and dtype of ``x``.
        x: float32, float16 or bfloat16, [n, c, ...], or [..., c] with ``channels_last``.
        mean, inv_std: float32 [c]; inv_std is 1 / sqrt(biased variance + eps).
        weight, bias, z, relu, channels_last: as passed to ``batch_norm_fwd``.
        sum_dy, sum_dy_xmu: float32 [c], sums of ``batch_norm_reduce`` over all parts of the batch.
        counts: number of elements per channel in each part, int32 [parts].
        with_dz: also return d, the gradient of ``z``.

    Returns:
        (gradient of ``x``, gradient of ``z`` or None), in the shape and dtype of ``x``.

    Raises:
        TypeError: a tensor has another dtype than those above.
        ValueError: a shape does not match.
    """
    layout = _Layout("batch_norm_bwd", x, channels_last)
    data, grad, residual = layout.data, layout.like("dy", dy), layout.like("z", z)
    dx = torch.empty_like(data)
    dz = torch.empty_like(data) if with_dz else None
    operands = _dense(mean, inv_std, weight, bias, sum_dy, sum_dy_xmu, counts)
    _bwd(grad, data, residual, *operands, dx, dz, relu)
    return layout.restored(dx), None if dz is None else layout.restored(dz)


@checked
def batch_norm_relu_bwd(
    dy: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    inv_std: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    z: torch.Tensor | None = None,
    channels_last: bool = False,
) -> torch.Tensor:
    """Computes the gradient of the ReLU's input: ``dy`` where the input is positive, else 0.

    Args:
        dy: gradient of the output, in the shape and dtype of ``x``.
        x: float32, float16 or bfloat16, [n, c, ...], or [..., c] with ``channels_last``.
        mean, inv_std: float32 [c]; inv_std is 1 / sqrt(biased variance + eps).
        weight, bias, z, channels_last: as passed to ``batch_norm_fwd``.

    Returns:
        A tensor of ``x``'s shape, dtype and memory order.

    Raises:
        TypeError: a tensor has another dtype than those above.
        ValueError: a shape does not match.
    """
    layout = _Layout("batch_norm_relu_bwd", x, channels_last)
    grad, residual = layout.like("dy", dy), layout.like("z", z)
    dz = torch.empty_like(layout.data)
    operands = _dense(mean, inv_std, weight, bias)
    _bwd(grad, layout.data, residual, *operands, None, None, None, None, dz, True)
    return layout.restored(dz)


class _Layout:
    """View of ``x`` and tensors of its shape as [n, c, s], without copying channels-last data."""

    def __init__(self, owner: str, x: torch.Tensor, channels_last: bool) -> None:
        least = 1 if channels_last else 2
        if x.dim() < least:
            raise ValueError(
                f"{owner}: x must have {least} dimensions or more, got {list(x.shape)}"
            )
        self.owner, self.shape, self.last = owner, x.shape, channels_last
        self.is_moved = not (channels_last or x.dim() == 2 or x.is_contiguous())
        self.is_moved = self.is_moved and x.movedim(1, -1).is_contiguous()
        self.data = self.view(x)

    def view(self, t: torch.Tensor) -> torch.Tensor:
        t = (t.movedim(1, -1) if self.is_moved else t).contiguous()
        if not (self.last or self.is_moved):
            return t.view(*t.shape[:2], t.shape[2:].numel())
        return t.view(t.shape[:-1].numel(), t.shape[-1], 1)

    def like(self, name: str, t: torch.Tensor | None) -> torch.Tensor | None:
        """Returns a tensor, which must have the shape of ``x``, as ``view`` does."""
        if t is None:
            return None
        if t.shape != self.shape:
            raise ValueError(
                f"{self.owner}: {name} must have shape {list(self.shape)}, got {list(t.shape)}"
            )
        return self.view(t)

    def restored(self, t: torch.Tensor) -> torch.Tensor:
        """Returns a result [n, c, s] in the shape and memory order of ``x``."""
        if not self.is_moved:
            return t.view(self.shape)
        n, c, *rest = self.shape
        return t.view(n, *rest, c).movedim(-1, 1)

    def workspace(self) -> torch.Tensor:
        return self.data.new_empty(batch_norm_floats(*self.data.shape), dtype=torch.float32)


def _dense(*tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    return [None if t is None else t.contiguous() for t in tensors]


def reference(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    z: torch.Tensor | None = None,
    relu: bool = False,
    channels_last: bool = False,
) -> torch.Tensor:
    """Computes the normalisation of a whole batch in plain PyTorch, in float32 or ``x``'s dtype.

    ``x`` is [n, c, ...], or [..., c] with ``channels_last``; ``weight`` and ``bias`` are [c];
    ``z``, in the shape of ``x``, is added before the ReLU. The result has the shape and dtype of
    ``x``.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    moved = x.to(wide) if channels_last else x.to(wide).movedim(1, -1)
    var, mean = torch.var_mean(moved.flatten(0, -2), 0, correction=0)
    y = (moved - mean) * (var + eps).rsqrt()
    y = y if weight is None else y * weight.to(wide)
    y = y if bias is None else y + bias.to(wide)
    y = y if channels_last else y.movedim(-1, 1)
    y = y if z is None else y + z.to(wide)
    return (y.relu() if relu else y).to(x.dtype)
