"""``DistributedFusedLAMB``: LAMB with gradients and state sharded over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from .....ops import multi_tensor, multi_tensor_optim
from ._bucket import Bucket
from ._grad_buckets import BucketOptimizer


class DistributedFusedLAMB(BucketOptimizer):
    """LAMB with sharded gradients and state (ZeRO 2), reducing gradients during backward.

    Norms are those of whole parameters. As in apex ``grad_averaging`` has no effect: gradients
    enter the moment with weight ``1 - betas[0]``.

    Args:
        params: parameters or parameter groups, float32, float16 or bfloat16, whole on each rank.
        lr: learning rate.
        bias_correction: divide the moments by their bias corrections.
        grad_averaging: has no effect.
        betas: decay of the two moments, each in [0, 1).
        eps: added to the denominator.
        weight_decay: coefficient of the weight decay.
        max_grad_norm: clip the joint norm of all gradients to this; 0 does not clip.
        adam_w_mode: decoupled weight decay; False adds it to the gradient.
        use_nvlamb: also scale the updates of tensors without weight decay.
        step_supports_amp_scaling: let a GradScaler pass itself to ``step``.
        overlap_reductions: start reductions during backward.
        dwu_group_size: no effect, like the other ``dwu_*``, ``fused_norm``, ``verbose``,
            ``clip_after_ar``, ``full_ar``, ``set_param_views_to_flat_buffer``, ``fuse_scale``,
            ``param_order`` and ``nccl_allgather_channels``, which choose among apex's
            implementations.
        e5m2_allgather: not available; True raises NotImplementedError.
        skip_allgather: not available; True raises NotImplementedError.

    Raises:
        NotImplementedError: an option is not available.
        ValueError: an option is negative.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        grad_averaging: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        adam_w_mode: bool = True,
        use_nvlamb: bool = False,
        step_supports_amp_scaling: bool = True,
        overlap_reductions: bool = True,
        dwu_group_size: int = 0,
        dwu_num_blocks: int = 4,
        dwu_num_chunks: int = 4,
        dwu_num_rs_pg: int = 1,
        dwu_num_ar_pg: int = 4,
        dwu_num_ag_pg: int = 0,
        fused_norm: bool = False,
        e5m2_allgather: bool = False,
        verbose: bool = False,
        clip_after_ar: bool = True,
        full_ar: bool = False,
        set_param_views_to_flat_buffer: bool = False,
        skip_allgather: bool = False,
        fuse_scale: bool = False,
        param_order: Any = None,
        nccl_allgather_channels: int = 0,
    ) -> None:
        for name, value in (
            ("e5m2_allgather", e5m2_allgather),
            ("skip_allgather", skip_allgather),
        ):
            if value:
                raise NotImplementedError(
                    f"DistributedFusedLAMB: {name} must be False, got True; parameters are "
                    "gathered in their own dtype"
                )
        self._at_least_zero(lr=lr, eps=eps, weight_decay=weight_decay, max_grad_norm=max_grad_norm)
        self.adam_w_mode = 1 if adam_w_mode else 0
        self.use_nvlamb = use_nvlamb
        self._step_supports_amp_scaling = step_supports_amp_scaling
        self.global_scale: float | torch.Tensor = 1.0
        self._indices: dict[int, torch.Tensor] = {}
        super().__init__(
            params,
            {
                "lr": lr,
                "bias_correction": bias_correction,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "grad_averaging": grad_averaging,
                "max_grad_norm": max_grad_norm,
            },
            process_group=None,
            distributed_process_group=None,
            redundant_process_group=None,
            grad_sync_dtype=torch.float32,
            param_sync_dtype=None,
            average_grad_sync=True,
            overlap_grad_sync=overlap_reductions,
            overlap_param_sync=False,
            bucket_cap_mb=100.0,
            pipeline_size=2,
        )

    def set_is_accumulation_step(self, is_accumulation_step: bool) -> None:
        """Makes backward add up gradients on this rank (True), or reduce them (False)."""
        self._is_syncing = not is_accumulation_step
        self._copies_greedily = is_accumulation_step

    def set_global_scale(self, global_scale: float | torch.Tensor) -> None:
        """Sets the loss scale that gradients have; the step divides by it."""
        self.global_scale = global_scale

    def complete_reductions(self) -> None:
        """Reduces all gradients that have not been reduced yet, and waits for reductions."""
        self.grad_sync()

    @property
    def L2_grad_norm(self) -> torch.Tensor:
        """Norm of the reduced gradients with their current scale; every rank must read it."""
        return self.grad_norm()

    def _new_state(self, bucket: Bucket) -> dict[str, torch.Tensor]:
        param = bucket.shard_of_params(torch.float32)
        return {
            "exp_avg": torch.zeros_like(param),
            "exp_avg_sq": torch.zeros_like(param),
            "param": param,
        }

    def _factor(self, scale: torch.Tensor) -> torch.Tensor:
        """Returns what gradients are multiplied by, clipping included, float32 [1]."""
        factor = scale / self.global_scale
        max_norm = self.param_groups[0]["max_grad_norm"]
        if max_norm > 0:
            norm = self.grad_norm() / self.global_scale
            factor = factor * (max_norm / (norm + 1e-6)).clamp(max=1.0)
        return factor

    def _step_buckets(self, found_inf: torch.Tensor | None) -> None:
        self._gradient_factor = self._factor(self._scale())
        super()._step_buckets(found_inf)

    def _update(
        self, buckets: list[Bucket], scale: torch.Tensor, found_inf: torch.Tensor | None
    ) -> Iterator[tuple[Bucket, torch.Tensor]]:
        group, device = buckets[0].group, buckets[0].device
        params = [p for bucket in buckets for p in bucket.params]
        numbers = {p: i for i, p in enumerate(params)}
        pieces = [(b, f.of_shard, numbers[f.param]) for b in buckets for f in b.fragments]
        updates = {b: torch.zeros_like(b.state["param"]) for b in buckets}
        outputs = {b: torch.zeros_like(updates[b], dtype=self.sync_dtype(b)) for b in buckets}

        def cut(shard_of: Any) -> list[torch.Tensor]:
            return [shard_of(bucket)[place] for bucket, place, _ in pieces]

        def option(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.full((len(pieces),), value, dtype=dtype, device=device)

        weights, directions = cut(lambda b: b.state["param"]), cut(updates.get)
        squares = torch.zeros((2, len(params)), dtype=torch.float64, device=device)
        index = self._index_of(group, pieces, device)
        if pieces:
            multi_tensor_optim.lamb_update(
                weights, cut(lambda b: b.grad_shard), cut(lambda b: b.state["exp_avg"]),
                cut(lambda b: b.state["exp_avg_sq"]), directions,
                beta1s=option(group["betas"][0]), beta2s=option(group["betas"][1]),
                eps=option(group["eps"]), weight_decays=option(group["weight_decay"]),
                bias_corrections=option(group["bias_correction"], torch.int32),
                step=torch.full((1,), group["step"], dtype=torch.int32, device=device),
                factor=self._gradient_factor, adamw=bool(self.adam_w_mode),
            )  # fmt: skip
            for row, tensors in zip(squares, (weights, directions), strict=True):
                norms = multi_tensor.l2norm(tensors, per_tensor=True)[1]
                row.index_add_(0, index, norms.double().square())
        param_norm, update_norm = self._summed(squares).sqrt().float()
        has_ratio = (param_norm != 0) & (update_norm != 0)
        if not self.use_nvlamb and not group["weight_decay"]:
            has_ratio = torch.zeros_like(has_ratio)
        rates = torch.where(has_ratio, param_norm / update_norm, 1.0) * group["lr"]
        if pieces:
            multi_tensor_optim.descend(cut(outputs.get), directions, rates[index], masters=weights)
        yield from outputs.items()

    def _index_of(self, group: Any, pieces: Any, device: torch.device) -> torch.Tensor:
        """Returns the number of each piece's parameter, kept from step to step."""
        key = id(group)
        if key not in self._indices or len(self._indices[key]) != len(pieces):
            numbers = torch.tensor([number for _, _, number in pieces], dtype=torch.int64)
            self._indices[key] = numbers.to(device)
        return self._indices[key]
