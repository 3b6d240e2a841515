"""Fused LAMB: Adam for large batches, with a learning rate for each tensor."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from ..ops import multi_tensor, multi_tensor_optim
from ..runtime import moved
from ..runtime.named_arguments import named_arguments
from ._base import FusedOptimizer, Work
from ._scalars import Scalars
from ._sharded_lamb import ShardedLamb

__all__ = ["FusedLAMB"]


class FusedLAMB(FusedOptimizer):
    """LAMB (arXiv 1904.00962): Adam's update, scaled for each tensor by |param| / |update|.

    Interface and defaults follow apex's FusedLAMB. State of each parameter: ``step``, ``exp_avg``,
    ``exp_avg_sq`` and, with master weights, ``master_param``.

    The norms of sharded DTensors are those of the whole tensors. For DTensors a step runs one
    collective for each dimension of the mesh, with ``max_grad_norm`` two, and needs memory for two
    float32 copies of a rank's shards.

    Args:
        params: parameters or parameter groups, in float32, float16, bfloat16 or, with master
            weights, FP8.
        lr, bias_correction, betas, eps, weight_decay, amsgrad, adam_w_mode, set_grad_none,
            capturable, master_weights, master_weight_dtype, exp_avg_dtype, exp_avg_sq_dtype: as in
            ``FusedAdam``; the defaults of ``eps`` and ``weight_decay`` are LAMB's.
        grad_averaging: add the gradient to ``exp_avg`` with weight ``1 - betas[0]``; False uses
            weight 1.
        max_grad_norm: clip the joint norm of all gradients of all groups to this value; 0 does not
            clip.
        use_nvlamb: also scale the updates of tensors without weight decay by |param| / |update|.

    Raises:
        TypeError: a dtype is not supported.
        ValueError: a value is out of range.
        NotImplementedError: an option is not available.
    """

    _required_state: ClassVar[tuple[str, ...]] = ("step", "exp_avg", "exp_avg_sq")

    @named_arguments()
    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
        *,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
    ) -> None:
        if amsgrad:
            raise NotImplementedError("FusedLAMB: amsgrad must be False, got True")
        self._at_least_zero("max_grad_norm", max_grad_norm)
        self.adam_w_mode = adam_w_mode
        self.use_nvlamb = use_nvlamb
        self.max_grad_norm = max_grad_norm
        self._sharded: dict[torch.device, ShardedLamb] = {}
        super().__init__(
            params,
            {
                "lr": lr,
                "bias_correction": bias_correction,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "grad_averaging": grad_averaging,
            },
            capturable=capturable,
            master_weights=master_weights,
            master_weight_dtype=master_weight_dtype,
            set_grad_none=set_grad_none,
            moment_dtypes={"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype},
        )

    def __getstate__(self) -> dict[str, Any]:
        names = ("adam_w_mode", "use_nvlamb", "max_grad_norm")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in names}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._sharded = {}
        super().__setstate__(state)

    def _update(self, work: list[Work], scalars: Scalars) -> None:
        by_device: dict[torch.device, list[Work]] = {}
        for item in work:
            by_device.setdefault(item.bucket.device, []).append(item)
        norms = self._norms(by_device) if self.max_grad_norm else {}
        names = ("betas", "eps", "weight_decay", "bias_correction", "grad_averaging")
        for device, items in by_device.items():
            common = {
                "adamw": self.adam_w_mode,
                "nvlamb": self.use_nvlamb,
                "max_grad_norm": self.max_grad_norm,
                "grad_norm": norms.get(device),
            }
            options = [
                {
                    **self._options(group, bucket, scalars, *names),
                    "step": self._step_of(group, bucket),
                    **common,
                }
                for group, bucket, _ in items
            ]
            sharded = self._sharded_steps(device, items)
            if sharded:
                sharded.step([item.grads for item in items], options)
                continue
            for item, chosen in zip(items, options, strict=True):
                item.bucket.run(multi_tensor_optim.lamb, item.grads, chosen)

    def _sharded_steps(self, device: torch.device, items: list[Work]) -> ShardedLamb | None:
        """Returns what updates DTensors, kept until the buckets change; None without DTensors.

        A falsy one means that they are replicated, and the op can update all buckets itself.
        """
        if not any(item.bucket.sharded for item in items):
            return None
        kept = self._sharded.get(device)
        if (
            kept is None
            or len(kept.buckets) != len(items)
            or not all(item.bucket is b for item, b in zip(items, kept.buckets, strict=True))
        ):
            kept = self._sharded[device] = ShardedLamb([item.bucket for item in items])
        return kept

    def _norms(self, by_device: dict[torch.device, list[Work]]) -> dict[torch.device, torch.Tensor]:
        """Returns the norm of all devices' gradients before unscaling, float32, on each device."""
        parts: dict[torch.device, torch.Tensor] = {}
        for device, items in by_device.items():
            grads = [grad for item in items for grad in item.grads]
            sharded = self._sharded_steps(device, items)
            norm: Any = sharded.norm(grads) if sharded else multi_tensor.l2norm(grads)
            parts[device] = norm
        if len(parts) < 2:
            return parts
        return {
            device: torch.linalg.vector_norm(
                torch.stack([moved(part, device) for part in parts.values()])
            )
            for device in parts
        }
