"""Division of gradients by the loss scale, on their device."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..comm.shards import max_over_shards
from ..ops import multi_tensor
from ..optimizers._bucket import dense_order
from ..optimizers._sharded import local, placed, with_part
from ..runtime import moved

Pair = tuple[torch.Tensor, torch.Tensor]  # (parameter, master weight)


class Flags:
    """Unscales gradients; keeps a flag on each device, which is 1 if a gradient was not finite."""

    def __init__(self, inv_scale: torch.Tensor | None) -> None:
        self._inv_scale = inv_scale
        self._flags: dict[torch.device, torch.Tensor] = {}

    def scale(self, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        """Writes each dense input, divided by the loss scale, to its output."""
        by_device: dict[torch.device, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for x, out in zip(inputs, outputs, strict=True):
            if x.layout is not torch.strided:
                raise NotImplementedError(
                    f"amp.scale_loss: gradients must be dense, got one of layout {x.layout}"
                )
            x, out = local(x), local(out)
            order = dense_order(out)
            if order is not None:
                x, out = x.permute(order), out.permute(order)
            lists = by_device.setdefault(x.device, ([], []))
            lists[0].append(x)
            lists[1].append(out)
        for device, (xs, outs) in by_device.items():
            if self._inv_scale is None:
                multi_tensor.scale(xs, outs, 1.0)
                continue
            if device not in self._flags:
                self._flags[device] = torch.zeros((), dtype=torch.float32, device=device)
            factor = moved(self._inv_scale, device)
            multi_tensor.scale(xs, outs, factor, found_inf=self._flags[device])

    def combined(self, device: torch.device, params: Iterable[torch.Tensor]) -> torch.Tensor:
        """Returns the maximum of all devices' flags, also over ranks with shards of ``params``."""
        total = torch.zeros((), dtype=torch.float32, device=device)
        for flag in self._flags.values():
            total = torch.maximum(total, moved(flag, device))
        return max_over_shards(total, params)


def move_grads(pairs: list[Pair], flags: Flags) -> None:
    """Moves gradients, unscaled, to their master weights, and adds them to those already there."""
    pairs = [(param, master) for param, master in pairs if param.grad is not None]
    grads = [_placed_grad(param) for param, _ in pairs]
    fresh = [torch.empty_like(master) for _, master in pairs]
    flags.scale(grads, fresh)
    for (param, master), grad in zip(pairs, fresh, strict=True):
        param.grad = None
        master.grad = grad if master.grad is None else master.grad.add_(grad)


def unscale_grads(params: list[torch.Tensor], kept: dict[int, torch.Tensor], flags: Flags) -> None:
    """Unscales gradients in place, and adds ``kept``, unscaled gradients of earlier backwards."""
    grads = []
    for param in params:
        if param.grad is not None:
            grad = _placed_grad(param)
            if grad.layout is torch.strided and not _is_dense(local(grad)):
                grad = with_part(grad, local(grad).contiguous())
            param.grad = grad
            grads.append(grad)
    flags.scale(grads, grads)
    for param in params:
        before = kept.get(id(param))
        if before is not None:
            param.grad = before if param.grad is None else before.add_(param.grad)


def _placed_grad(param: torch.Tensor) -> torch.Tensor:
    """Returns the gradient of ``param`` with the placements of ``param``."""
    assert param.grad is not None
    return placed("amp.scale_loss", "gradients", param.grad, param)


def _is_dense(grad: torch.Tensor) -> bool:
    """Returns True if ``grad`` has no gaps in memory, in some order of its dimensions."""
    return grad.is_contiguous() or dense_order(grad) is not None
