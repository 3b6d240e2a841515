"""``DistributedFusedAdam``: Adam with gradients and state sharded over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from .....compatibility.apex import distributed_adam_cuda
from .....ops import multi_tensor
from .....optimizers._narrow_state import master_of_halves
from ...optimizers._lists import CHUNK
from ._bucket import Bucket
from ._grad_buckets import BucketOptimizer


class DistributedFusedAdam(BucketOptimizer):
    """Adam with sharded gradients and state (ZeRO 2), reducing gradients during backward.

    Backward moves gradients from ``param.grad`` into buckets, and each rank updates its shard. A
    parameter without a gradient is updated as with zeros. The constructor broadcasts the parameters
    of the first rank.

    Args:
        params: parameters or parameter groups, float32, float16 or bfloat16, whole on each rank.
        lr: learning rate.
        bias_correction: divide the moments by their bias corrections.
        betas: decay of the two moments, each in [0, 1).
        eps: added to the denominator.
        adam_w_mode: decoupled weight decay (AdamW); False adds it to the gradient (Adam).
        weight_decay: coefficient of the weight decay.
        amsgrad: not available; True raises NotImplementedError.
        dtype: dtype of the moments and the stored parameters.
        grad_sync_dtype: dtype of the gradient buckets and their reduction; None uses ``dtype``.
        param_sync_dtype: dtype in which new parameters are gathered; None uses the parameters' own.
        device: has no effect: the state is on the parameters' device.
        process_group: ranks over which gradients are averaged; None is the world.
        distributed_process_group: ranks over which state is sharded.
        redundant_process_group: ranks with the same shards. Give both of these groups or neither.
        average_grad_sync: average gradients over ranks; False sums them.
        overlap_grad_sync: start reductions during backward.
        overlap_param_sync: return from ``step`` while parameters are gathered; the first module
            that runs waits for them.
        bucket_cap_mb: upper bound of a bucket of several parameters, in MB of gradients.
        pipeline_size: maximum number of concurrent reductions.
        contiguous_param_buffer: make the parameters of a bucket views of one buffer.
        contiguous_grad_buffer: allow ``grad_buffer_view``.
        store_params: keep a shard of parameters in ``dtype``; False updates the parameters
            directly.
        store_param_remainders: for bfloat16 parameters and a float32 ``dtype``, store only the low
            16 bits of the float32 weights.
        with_scaled_states: not available; True raises NotImplementedError.
        nccl_ub: has no effect.
        capturable: keep ``lr`` and the step count on the device, and skip steps there.

    Raises:
        NotImplementedError: an option is not available.
        ValueError: an option is negative, or only one of two process groups is given.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        dtype: torch.dtype = torch.float32,
        grad_sync_dtype: torch.dtype | None = None,
        param_sync_dtype: torch.dtype | None = None,
        device: Any = "cuda",
        process_group: Any = None,
        distributed_process_group: Any = None,
        redundant_process_group: Any = None,
        average_grad_sync: bool = True,
        overlap_grad_sync: bool = True,
        overlap_param_sync: bool = False,
        bucket_cap_mb: float = 100.0,
        pipeline_size: int = 2,
        contiguous_param_buffer: bool = False,
        contiguous_grad_buffer: bool = False,
        store_params: bool = True,
        store_param_remainders: bool = False,
        with_scaled_states: bool = False,
        nccl_ub: bool = False,
        capturable: bool = False,
    ) -> None:
        if amsgrad:
            raise NotImplementedError("DistributedFusedAdam: amsgrad must be False, got True")
        if with_scaled_states:
            raise NotImplementedError(
                "DistributedFusedAdam: with_scaled_states must be False, got True; use "
                "apex_te.optimizers.FusedAdam(exp_avg_dtype=torch.float16) with "
                "torch.distributed.fsdp.fully_shard"
            )
        self._at_least_zero(lr=float(lr), eps=eps, weight_decay=weight_decay)
        self.adam_w_mode = 1 if adam_w_mode else 0
        self.dtype = dtype
        self.store_params = store_params
        self.store_param_remainders = store_param_remainders
        self.capturable = capturable
        super().__init__(
            params,
            {
                "lr": lr,
                "bias_correction": bias_correction,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
            },
            process_group=process_group,
            distributed_process_group=distributed_process_group,
            redundant_process_group=redundant_process_group,
            grad_sync_dtype=grad_sync_dtype or dtype,
            param_sync_dtype=param_sync_dtype,
            average_grad_sync=average_grad_sync,
            overlap_grad_sync=overlap_grad_sync,
            overlap_param_sync=overlap_param_sync,
            bucket_cap_mb=bucket_cap_mb,
            pipeline_size=pipeline_size,
            contiguous_param_buffer=contiguous_param_buffer,
            contiguous_grad_buffer=contiguous_grad_buffer,
        )
        if capturable:
            self._place()

    def _place(self) -> None:
        """Puts learning rates and step counts on the device."""
        for group in self.param_groups:
            device = group["params"][0].device
            lr = torch.as_tensor(group["lr"], dtype=torch.float32)
            step = torch.as_tensor(group.get("step", 0), dtype=torch.int32)
            group["lr"] = lr.to(device, copy=True).reshape(())
            group["step"] = step.to(device, copy=True).reshape(1)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if self.capturable:
            self._place()

    def _is_capturable(self) -> bool:
        return self.capturable

    def _count(self, group: dict[str, Any], found_inf: torch.Tensor | None) -> None:
        if not self.capturable:
            super()._count(group, found_inf)
        else:
            group["step"] += 1 if found_inf is None else (found_inf == 0).int()

    def _keeps_remainder(self, bucket: Bucket) -> bool:
        return (
            self.store_param_remainders
            and self.dtype is torch.float32
            and bucket.dtype is torch.bfloat16
        )

    def _new_state(self, bucket: Bucket) -> dict[str, torch.Tensor]:
        def zeros(dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(bucket.shard_size, dtype=dtype, device=bucket.device)

        state = {"exp_avg": zeros(self.dtype), "exp_avg_sq": zeros(self.dtype)}
        if self._keeps_remainder(bucket):
            state["remainder"] = zeros(torch.int16)
        elif self.store_params:
            state["param"] = bucket.shard_of_params(self.dtype)
        return state

    def sync_dtype(self, bucket: Bucket) -> torch.dtype:
        return bucket.dtype if self._keeps_remainder(bucket) else super().sync_dtype(bucket)

    def _update(
        self, buckets: list[Bucket], scale: torch.Tensor, found_inf: torch.Tensor | None
    ) -> Iterator[tuple[Bucket, torch.Tensor]]:
        for halves in (False, True):
            own = [b for b in buckets if self._keeps_remainder(b) is halves]
            if own:
                yield from zip(own, self._update_alike(own, halves, scale, found_inf), strict=True)

    def _update_alike(self, buckets, halves, scale, found_inf):
        """Steps buckets that all keep remainders, or none; returns their shards of parameters."""
        group = buckets[0].group
        kept = [b.state.get("param") for b in buckets]
        params = [
            b.shard_of_params(b.dtype) if shard is None else shard
            for b, shard in zip(buckets, kept, strict=True)
        ]
        outputs = [
            torch.empty_like(p, dtype=self.sync_dtype(b))
            for p, b in zip(params, buckets, strict=True)
        ]
        moments = [[b.state[name] for b in buckets] for name in ("exp_avg", "exp_avg_sq")]
        grads = [b.grad_shard for b in buckets]
        flag = self._flag(buckets[0].device)
        if found_inf is not None:
            flag = (found_inf.reshape(1) != 0).int()
        step = distributed_adam_cuda.multi_tensor_fused_adam
        lists = [params, *moments, grads, outputs]
        if halves:
            step = distributed_adam_cuda.multi_tensor_fused_adam_with_param_remainders
            lists = [params, [b.state["remainder"] for b in buckets], *moments, grads, params]
            outputs = params
        elif self.capturable:
            step = distributed_adam_cuda.multi_tensor_fused_adam_capturable
            if found_inf is not None:  # a step that is skipped writes no outputs
                multi_tensor.scale(params, outputs, 1.0)
        step(
            CHUNK, flag, lists, scale, group["lr"], *group["betas"], group["eps"], group["step"],
            self.adam_w_mode, group["bias_correction"], group["weight_decay"],
        )  # fmt: skip
        return outputs

    def _saved_state(self, bucket: Bucket) -> dict[str, torch.Tensor]:
        saved = {name: bucket.state[name] for name in ("exp_avg", "exp_avg_sq")}
        if "remainder" in bucket.state:
            high = bucket.shard_of_params(torch.bfloat16)
            saved["param"] = master_of_halves(high, bucket.state["remainder"])
        elif "param" in bucket.state:
            saved["param"] = bucket.state["param"]
        return saved

    def _load_shards(self, bucket: Bucket, shards: dict[str, torch.Tensor]) -> None:
        weight = shards.pop("param", None)
        super()._load_shards(bucket, shards)
        if weight is None:
            return
        if "remainder" not in bucket.state:
            bucket.state["param"].copy_(weight)
            return
        bits = weight.view(torch.int32)
        bucket.state["remainder"].copy_((bits << 16) >> 16)
        high = ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
        self._gather(bucket, high)
