"""LAMB for sharded DTensors, whose norms are those of the whole tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..ops import multi_tensor, multi_tensor_optim
from ._bucket import Bucket
from ._sharded import ShardSums

_ALIGNMENT = 4  # float32 elements: 16-byte starts


class ShardedLamb:
    """LAMB step of buckets on one device that have DTensors among their parameters.

    LAMB scales an update by the norm of the tensor over that of the update, but the op sees shards.
    So it runs on zeros with a learning rate of 1, for moments and unscaled updates, and the norms
    are summed over ranks outside it. Nothing waits for the device. A step needs memory for two
    float32 copies of this rank's shards.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self.buckets = list(buckets)
        device = self.buckets[0].device
        self._sums = ShardSums([p for b in self.buckets for p in b.owners], device)
        sizes = [t.numel() for b in self.buckets for t in b.params]
        self._padded = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
        self._counts = torch.tensor(self._padded).to(device, non_blocking=True)

    def __bool__(self) -> bool:
        """Returns True if any parameter is sharded; else ``lamb`` can update the buckets itself."""
        return bool(self._sums)

    def norm(self, grads: list[torch.Tensor]) -> torch.Tensor:
        """Returns the norm of all gradients together, a float32 scalar on the device."""
        return self._norms(grads).square_().sum().sqrt_().float()

    def _norms(self, *lists: Any) -> torch.Tensor:
        """Returns whole tensors' norms, float64 [len(lists), parameters]; [parameters] for one."""
        found = [multi_tensor.l2norm(tensors, per_tensor=True)[1] for tensors in lists]
        squares = (torch.stack(found) if len(found) > 1 else found[0]).double().square_()
        return self._sums.add(squares).sqrt_()

    def step(self, grads: list[list[torch.Tensor]], options: list[dict[str, Any]]) -> None:
        """Updates the parameters, masters and moments of every bucket."""
        like = self.buckets[0].moments[0][0]
        flat = torch.zeros(sum(self._padded), dtype=torch.float32, device=like.device)
        pieces = iter(flat.split(self._padded))
        bases, updates = [], []
        for bucket, own, chosen in zip(self.buckets, grads, options, strict=True):
            base = bucket.params if bucket.masters is None else bucket.masters
            update = [next(pieces)[: t.numel()].view(t.shape) for t in base]
            _direct(bucket, base, update, own, chosen)
            bases.append(base)
            updates.append(update)
        wide: list[Any] = [[t for many in lists for t in many] for lists in (bases, updates)]
        params, steps = self._norms(*wide)
        ratios = torch.where((params != 0) & (steps != 0), params / steps, 1.0).float()
        rates = []
        for chosen, own in zip(options, ratios.split([len(b) for b in bases]), strict=True):
            has_ratio = chosen["weight_decay"] or chosen["nvlamb"]
            rate = (own if has_ratio else torch.ones_like(own)) * chosen["lr"]
            skip = chosen["found_inf"]
            rates.append(rate if skip is None else torch.where(skip.reshape(()) == 0, rate, 0.0))
        flat.mul_(torch.cat(rates).repeat_interleave(self._counts, output_size=flat.numel()))
        for bucket, base, update in zip(self.buckets, bases, updates, strict=True):
            multi_tensor.axpby(base, update, base, 1.0, -1.0)
            if bucket.masters is not None:
                multi_tensor.scale(base, bucket.params, 1.0)
            bucket.finish()


def _direct(
    bucket: Bucket, base: Any, update: list[torch.Tensor], grads: Any, options: dict[str, Any]
) -> None:
    """Updates the moments of ``bucket``, and writes the update for a learning rate of 1.

    Weight decay reads ``base``, master weights or parameters; ``update`` must be float32 zeros.
    """
    decay = options["weight_decay"]
    chosen = {**options, "lr": 1.0, "weight_decay": 0.0, "nvlamb": False}
    if decay and not options["adamw"]:
        # The op would add the decay of a parameter of zeros.
        wide = [torch.empty_like(u) for u in update]
        multi_tensor.scale(grads, wide, _factor(options, bucket.device))
        multi_tensor.axpby(wide, base, wide, 1.0, decay)
        if options["unscale_grads"]:
            multi_tensor.scale(grads, grads, _unscaling(options))
        grads = wide
        chosen |= {"max_grad_norm": 0.0, "grad_norm": None, "inv_scale": None}

    def op(params: Any, grads: Any, *moments: Any, masters: Any, **named: Any) -> None:
        multi_tensor_optim.lamb(update, grads, *moments, **named)

    bucket.update(op, grads, chosen)
    # A parameter of zeros became minus its update.
    multi_tensor.axpby(base, update, update, decay if options["adamw"] else 0.0, -1.0)


def _unscaling(options: dict[str, Any]) -> torch.Tensor:
    """Returns ``inv_scale``, or 1 if the device's flag skips the step, a float32 tensor [1]."""
    skip, inv_scale = options["found_inf"], options["inv_scale"]
    return inv_scale if skip is None else torch.where(skip.reshape(()) == 0, inv_scale, 1.0)


def _factor(options: dict[str, Any], device: torch.device) -> torch.Tensor:
    """Returns the factor, a float32 scalar, that unscales all gradients and clips their norm."""
    factor = options["inv_scale"]
    if factor is None:
        factor = torch.ones((), dtype=torch.float32, device=device)
    norm = options["grad_norm"]
    if norm is None:
        return factor
    limit = options["max_grad_norm"]
    norm = norm * factor.abs()
    return torch.where(norm > limit, factor * (limit / norm), factor)
