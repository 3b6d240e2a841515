"""apex's bnp: batch normalisation of channels-last images over groups of neighbouring ranks.

x is contiguous [n, h, w, c] or channels_last [n, c, h, w]; float32 and bfloat16 are accepted, too.
Ranks exchange statistics through torch.distributed: buffers and pointers to them are opaque, and
occupancies, grids and ``ret_cta`` are not read. The first call with a ``bn_group`` above 1 makes
the groups, which all ranks must do.
"""

from __future__ import annotations

from typing import Any

import torch

from apex_te._version import __version__ as __version__
from apex_te.ops.batch_norm import batch_norm_fwd

from ._batch_norm import GroupStatistics, group_forward, group_gradients, neighbours

__all__ = [
    "bn_addrelu_bwd_nhwc",
    "bn_addrelu_bwd_nhwc_occupancy",
    "bn_addrelu_fwd_eval_nhwc",
    "bn_addrelu_fwd_nhwc",
    "bn_addrelu_fwd_nhwc_occupancy",
    "bn_bwd_nhwc",
    "bn_bwd_nhwc_occupancy",
    "bn_fwd_eval_nhwc",
    "bn_fwd_nhwc",
    "bn_fwd_nhwc_occupancy",
    "close_remote_data",
    "get_buffer_size",
    "get_data_ptr",
    "get_remote_data_ptr",
]

Tensor = torch.Tensor


@torch.no_grad()
def bn_fwd_nhwc(
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    running_mean: Tensor,
    running_inv_var: Tensor,
    minibatch_mean: Tensor,
    minibatch_inv_var: Tensor,
    ret_cta: Tensor,
    momentum: float,
    epsilon: float,
    fuse_relu: bool,
    my_data: Any,
    pair_data: Any,
    pair_data2: Any,
    pair_data3: Any,
    bn_group: int,
    magic_tensor: Tensor,
    occupancy: int,
    grid_dim_x: int,
    coop: bool,
) -> Tensor:
    """Normalises by the batch of the group and updates the running statistics.

    Args:
        x: the data.
        scale, bias: float32 [c].
        running_mean, running_inv_var: float32 [c], overwritten with
            ``(1 - momentum) * old + momentum * new``; the second is the unbiased variance.
        minibatch_mean, minibatch_inv_var: float32 [c], overwritten with the mean and
            1 / sqrt(variance + epsilon) of the batch.
        ret_cta, my_data, pair_data, pair_data2, pair_data3, occupancy, grid_dim_x, coop: not read.
        momentum, epsilon: of the running statistics, and added to the variance.
        fuse_relu: True for the ReLU of the result.
        bn_group: ranks of a group.
        magic_tensor: int32 [1], counted up modulo 256.
    """
    return _forward(
        "bn_fwd_nhwc", x, None, scale, bias, running_mean, running_inv_var, minibatch_mean,
        minibatch_inv_var, momentum, epsilon, fuse_relu, bn_group, magic_tensor,
    )  # fmt: skip


@torch.no_grad()
def bn_fwd_eval_nhwc(
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    running_mean: Tensor,
    running_inv_var: Tensor,
    ret_cta: Tensor,
    bn_group: int,
    momentum: float,
    epsilon: float,
    fuse_relu: bool,
) -> Tensor:
    """Normalises by the running statistics; arguments as in ``bn_fwd_nhwc``."""
    return _evaluate(
        "bn_fwd_eval_nhwc", x, None, scale, bias, running_mean, running_inv_var, epsilon, fuse_relu
    )


@torch.no_grad()
def bn_bwd_nhwc(
    x: Tensor,
    dy: Tensor,
    scale: Tensor,
    bias: Tensor,
    running_mean: Tensor,
    running_inv_var: Tensor,
    minibatch_mean: Tensor,
    minibatch_inv_var: Tensor,
    ret_cta: Tensor,
    momentum: float,
    epsilon: float,
    fuse_relu: bool,
    my_data: Any,
    pair_data: Any,
    pair_data2: Any,
    pair_data3: Any,
    bn_group: int,
    magic_tensor: Tensor,
    occupancy: int,
    grid_dim_x: int,
    coop: bool,
) -> list[Tensor]:
    """Returns [dx, dscale, dbias] of ``bn_fwd_nhwc``, whose mean and inverse deviation it takes.

    The gradients of the parameters are those of this rank's data.
    """
    dx, _, dscale, dbias = _backward(
        "bn_bwd_nhwc", x, dy, scale, bias, minibatch_mean, minibatch_inv_var, fuse_relu, bn_group,
        magic_tensor,
    )  # fmt: skip
    return [dx, dscale, dbias]


@torch.no_grad()
def bn_addrelu_fwd_nhwc(
    x: Tensor,
    z: Tensor,
    scale: Tensor,
    bias: Tensor,
    running_mean: Tensor,
    running_inv_var: Tensor,
    minibatch_mean: Tensor,
    minibatch_inv_var: Tensor,
    bitmask: Tensor,
    ret_cta: Tensor,
    momentum: float,
    epsilon: float,
    my_data: Any,
    pair_data: Any,
    pair_data2: Any,
    pair_data3: Any,
    bn_group: int,
    magic_tensor: Tensor,
    occupancy: int,
    grid_dim_x: int,
    coop: bool,
) -> Tensor:
    """Computes ``relu(bn(x) + z)``; arguments as in ``bn_fwd_nhwc``.

    ``bitmask`` is overwritten with where the ReLU's argument is positive, a bit for each element.
    """
    y = _forward(
        "bn_addrelu_fwd_nhwc", x, z, scale, bias, running_mean, running_inv_var, minibatch_mean,
        minibatch_inv_var, momentum, epsilon, True, bn_group, magic_tensor,
    )  # fmt: skip
    bits, count = _bits(bitmask), y.numel()
    if len(bits) * 8 < count:
        raise ValueError(
            f"bnp.bn_addrelu_fwd_nhwc: bitmask must have {count} bits or more, got {len(bits) * 8}"
        )
    positive = (_nhwc(y, x, scale) > 0).reshape(-1)
    padded = torch.nn.functional.pad(positive, (0, -count % 8)).view(-1, 8).to(torch.uint8)
    bits[: len(padded)] = (padded << _shifts(x)).sum(1, dtype=torch.uint8)
    return y


@torch.no_grad()
def bn_addrelu_fwd_eval_nhwc(
    x: Tensor,
    z: Tensor,
    scale: Tensor,
    bias: Tensor,
    running_mean: Tensor,
    running_inv_var: Tensor,
    ret_cta: Tensor,
    bn_group: int,
    momentum: float,
    epsilon: float,
) -> Tensor:
    """Computes ``relu(bn(x) + z)`` with the running statistics."""
    return _evaluate(
        "bn_addrelu_fwd_eval_nhwc", x, z, scale, bias, running_mean, running_inv_var, epsilon, True
    )


@torch.no_grad()
def bn_addrelu_bwd_nhwc(
    x: Tensor,
    dy: Tensor,
    scale: Tensor,
    bias: Tensor,
    running_mean: Tensor,
    running_inv_var: Tensor,
    minibatch_mean: Tensor,
    minibatch_inv_var: Tensor,
    bitmask: Tensor,
    ret_cta: Tensor,
    momentum: float,
    epsilon: float,
    my_data: Any,
    pair_data: Any,
    pair_data2: Any,
    pair_data3: Any,
    bn_group: int,
    magic_tensor: Tensor,
    occupancy: int,
    grid_dim_x: int,
    coop: bool,
) -> list[Tensor]:
    """Returns [dx, dz, dscale, dbias] of ``bn_addrelu_fwd_nhwc``, whose bitmask it takes."""
    count = dy.numel()
    packed = _bits(bitmask)[: -(-count // 8), None]
    positive = (packed >> _shifts(x) & 1).reshape(-1)[:count].bool()
    moved = _nhwc(dy, x, scale)
    dz = _like(torch.where(positive.view(moved.shape), moved, 0), x, scale)
    dx, _, dscale, dbias = _backward(
        "bn_addrelu_bwd_nhwc", x, dz, scale, bias, minibatch_mean, minibatch_inv_var, False,
        bn_group, magic_tensor,
    )  # fmt: skip
    return [dx, dz, dscale, dbias]


def get_buffer_size(bn_sync_steps: int) -> int:
    """Returns the bytes of a buffer for the exchange, which is not read: at least 1."""
    return max(int(bn_sync_steps), 1)


def get_data_ptr(data: Tensor) -> Any:
    """Returns an opaque handle of a buffer."""
    return data


def get_remote_data_ptr(handle: Tensor, offset: Tensor) -> Any:
    """Returns an opaque handle of another rank's buffer."""
    return handle


def close_remote_data(handle: Tensor) -> None:
    """Does nothing, as no memory of another rank was opened."""


def _occupancy(name: str) -> Any:
    def occupancy() -> int:
        """Returns the blocks of a multiprocessor that callers plan with: 2."""
        return 2

    occupancy.__name__ = occupancy.__qualname__ = name
    return occupancy


bn_fwd_nhwc_occupancy = _occupancy("bn_fwd_nhwc_occupancy")
bn_bwd_nhwc_occupancy = _occupancy("bn_bwd_nhwc_occupancy")
bn_addrelu_fwd_nhwc_occupancy = _occupancy("bn_addrelu_fwd_nhwc_occupancy")
bn_addrelu_bwd_nhwc_occupancy = _occupancy("bn_addrelu_bwd_nhwc_occupancy")


def _is_nhwc(x: Tensor, scale: Tensor) -> bool:
    """Returns True for [n, h, w, c], False for [n, c, h, w]."""
    return x.is_contiguous() and x.dim() > 0 and x.shape[-1] == len(scale)


def _nhwc(t: Tensor, x: Tensor, scale: Tensor) -> Tensor:
    """Returns a tensor in the dimensions of ``x`` as [n, h, w, c]."""
    return t if _is_nhwc(x, scale) else t.movedim(1, -1)


def _like(t: Tensor, x: Tensor, scale: Tensor) -> Tensor:
    """Returns [n, h, w, c] in the dimensions of ``x``."""
    return t if _is_nhwc(x, scale) else t.movedim(-1, 1)


def _bits(bitmask: Tensor) -> Tensor:
    return bitmask.view(-1).view(torch.uint8)


def _shifts(x: Tensor) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=x.device)


def _check(op: str, x: Tensor, scale: Tensor) -> None:
    """Checks that x is an image in one of the two layouts; raises ``ValueError``."""
    if x.dim() != 4 or not _nhwc(x, x, scale).is_contiguous() or len(scale) not in x.shape[1::2]:
        raise ValueError(
            f"bnp.{op}: x must be contiguous [n, h, w, {len(scale)}] or channels_last "
            f"[n, {len(scale)}, h, w], got {list(x.shape)} with strides {list(x.stride())}"
        )


def _forward(
    op, x, z, scale, bias, running_mean, running_var, mean, inv_std, momentum, eps, relu, bn_group,
    magic,
) -> Tensor:  # fmt: skip
    _check(op, x, scale)
    group = neighbours(f"bnp.{op}: bn_group", int(bn_group))
    data = _nhwc(x, x, scale)
    y, stats = group_forward(
        data, scale, bias, group, float(eps), running_mean, running_var, float(momentum),
        z=None if z is None else _nhwc(z, x, scale), relu=bool(relu), channels_last=True,
    )  # fmt: skip
    mean.copy_(stats.mean)
    inv_std.copy_(stats.inv_std)
    magic.add_(1).remainder_(256)
    return _like(y, x, scale)


def _evaluate(op, x, z, scale, bias, running_mean, running_var, eps, relu) -> Tensor:
    _check(op, x, scale)
    inv_std = (running_var + float(eps)).rsqrt()
    z = None if z is None else _nhwc(z, x, scale)
    y = batch_norm_fwd(
        _nhwc(x, x, scale), running_mean, inv_std, scale, bias, z=z, relu=bool(relu),
        channels_last=True,
    )  # fmt: skip
    return _like(y, x, scale)


def _backward(op, x, dy, scale, bias, mean, inv_std, relu, bn_group, magic) -> Any:
    _check(op, x, scale)
    group = neighbours(f"bnp.{op}: bn_group", int(bn_group))
    data = _nhwc(x, x, scale)
    count = data.numel() // max(len(scale), 1)
    # The ranks of a group have batches of one size, as in apex.
    counts = None
    if group is not None:
        counts = torch.full((int(bn_group),), count, dtype=torch.int32, device=x.device)
    grads = group_gradients(
        _nhwc(dy, x, scale), data, GroupStatistics(mean, inv_std, counts), scale, bias, group,
        relu=bool(relu), channels_last=True,
    )  # fmt: skip
    magic.add_(1).remainder_(256)
    return grads._replace(dx=_like(grads.dx, x, scale))
