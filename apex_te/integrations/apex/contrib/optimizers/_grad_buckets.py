"""Buckets whose gradients are reduced to shards during backward, and whose parameters are gathered.

Ranks start their collectives in the order of the buckets.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import distributed
from torch.nn.modules import module as torch_module

from .....comm.collectives import (
    Pending,
    all_gather_rows,
    all_reduce,
    reduce_scatter_rows,
    world_size,
)
from .....ops import multi_tensor
from ._bucket import Bucket
from ._saved_shards import ShardSaver


class _Hook:
    """Hook that hands a parameter with a new gradient to an optimizer, as long as that exists."""

    def __init__(self, optimizer: BucketOptimizer) -> None:
        self._optimizer = weakref.ref(optimizer)

    def __call__(self, param: torch.Tensor) -> None:
        optimizer = self._optimizer()
        if optimizer is not None:
            optimizer._on_grad(param)


class BucketOptimizer(ShardSaver):
    """Base of optimizers that have a shard of gradients and state on each rank (ZeRO 2).

    Subclasses define ``_new_state``, the shards of a bucket's state, and ``_update``, which steps
    buckets of a group.
    """

    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        *,
        process_group: Any,
        distributed_process_group: Any,
        redundant_process_group: Any,
        grad_sync_dtype: torch.dtype,
        param_sync_dtype: torch.dtype | None,
        average_grad_sync: bool,
        overlap_grad_sync: bool,
        overlap_param_sync: bool,
        bucket_cap_mb: float,
        pipeline_size: int,
        contiguous_param_buffer: bool = False,
        contiguous_grad_buffer: bool = False,
    ) -> None:
        name = type(self).__name__
        if (distributed_process_group is None) is not (redundant_process_group is None):
            raise ValueError(
                f"{name}: distributed_process_group and redundant_process_group must be given "
                "together, got one"
            )
        self.process_group = process_group
        self.distributed_process_group = (
            process_group if distributed_process_group is None else distributed_process_group
        )
        self.redundant_process_group = redundant_process_group
        self.process_group_size = world_size(process_group)
        self.distributed_size = world_size(self.distributed_process_group)
        self.distributed_rank = (
            distributed.get_rank(self.distributed_process_group) if self.distributed_size > 1 else 0
        )
        self.grad_sync_dtype = grad_sync_dtype
        self.param_sync_dtype = param_sync_dtype
        self.average_grad_sync = average_grad_sync
        self.overlap_grad_sync = overlap_grad_sync
        self.overlap_param_sync = overlap_param_sync
        self.pipeline_size = max(1, pipeline_size)
        self.contiguous_param_buffer = contiguous_param_buffer
        self.contiguous_grad_buffer = contiguous_grad_buffer
        self._cap = int(bucket_cap_mb * 2**20)
        self._buckets: list[Bucket] = []
        self._bucket_of: dict[torch.Tensor, Bucket] = {}
        self._next = 0  # the bucket that a reduction comes to next
        self._reducing: list[Bucket] = []
        self._is_syncing = True
        self._copies_greedily = False
        self._grad_norm: torch.Tensor | None = None
        self._grad_scale: torch.Tensor | None = None
        self._forward_hook: Any = None
        self._hooks: list[Any] = []
        super().__init__(params, defaults, set_grad_none=True)
        self._broadcast_params(self.parameters())

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group as ``torch.optim`` does; every rank must have the same values."""
        super().add_param_group(param_group)
        for p in self.param_groups[-1]["params"]:
            if p.requires_grad:
                self._hooks.append(p.register_post_accumulate_grad_hook(_Hook(self)))

    # What each optimizer defines.

    def _new_state(self, bucket: Bucket) -> dict[str, torch.Tensor]:
        """Returns the shards of a bucket's state before the first step."""
        raise NotImplementedError

    def _update(
        self, buckets: list[Bucket], scale: torch.Tensor, found_inf: torch.Tensor | None
    ) -> Iterator[tuple[Bucket, torch.Tensor]]:
        """Steps buckets of a group; yields each one with its shard of new parameters.

        Gradients are multiplied by ``scale``, float32 [1]; ``found_inf`` skips the step if not 0.
        """
        raise NotImplementedError

    # Buckets.

    def parameters(self) -> Iterator[torch.Tensor]:
        """Yields the parameters of all groups that require a gradient."""
        for group in self.param_groups:
            yield from (p for p in group["params"] if p.requires_grad)

    def _broadcast_params(self, params: Iterable[torch.Tensor]) -> None:
        """Gives all ranks the parameters of the first one."""
        if self.process_group_size == 1:
            return
        first = (
            0 if self.process_group is None else distributed.get_global_rank(self.process_group, 0)
        )
        with torch.no_grad():
            for p in params:
                whole = p.detach().contiguous()
                distributed.broadcast(whole, src=first, group=self.process_group)
                p.copy_(whole)

    @torch.no_grad()
    def init_params(self, params: Iterable[torch.Tensor] | torch.Tensor | None = None) -> None:
        """Makes the buckets and the state of parameters that have none yet; None uses all.

        Every rank must call it with the same parameters.
        """
        self._make_buckets(params, self._cap)

    @torch.no_grad()
    def init_params_bucket(self, params: Iterable[torch.Tensor] | torch.Tensor) -> None:
        """Makes one bucket, or one for each group and dtype, of parameters that have none yet."""
        self._make_buckets(params, None)

    def _make_buckets(
        self, params: Iterable[torch.Tensor] | torch.Tensor | None, cap: int | None
    ) -> None:
        if isinstance(params, torch.Tensor):
            params = [params]
        wanted = None if params is None else set(params)
        chosen: dict[Any, list[list[torch.Tensor]]] = {}
        sizes: dict[Any, int] = {}
        for index, group in reversed(list(enumerate(self.param_groups))):
            for p in reversed(group["params"]):
                taken = p in self._bucket_of or (wanted is not None and p not in wanted)
                if taken or not p.requires_grad or not p.numel():
                    continue
                key = (index, p.dtype, p.device)
                size = p.numel() * torch.empty((), dtype=self.grad_sync_dtype).element_size()
                if key not in chosen or (cap is not None and sizes[key] + size > cap):
                    chosen.setdefault(key, []).append([])
                    sizes[key] = 0
                chosen[key][-1].append(p)
                sizes[key] += size
        order = {p: i for i, p in enumerate(self.parameters())}
        made = [(key[0], members) for key, many in chosen.items() for members in many]
        made.sort(key=lambda item: -order[item[1][0]])
        for index, members in made:
            bucket = Bucket(
                self.param_groups[index], members, self.distributed_rank, self.distributed_size
            )
            bucket.state = self._new_state(bucket)
            self._bucket_of.update(dict.fromkeys(members, bucket))
            self._buckets.append(bucket)
            if self.contiguous_param_buffer:
                flat = torch.zeros(bucket.size, dtype=bucket.dtype, device=bucket.device)
                for p, piece in zip(members, bucket.pieces(flat), strict=True):
                    p.data = piece.copy_(p)

    def grad_buffer_view(self, param: torch.Tensor) -> torch.Tensor:
        """Returns the view of the gradient buffer, in ``grad_sync_dtype``, for a parameter.

        What is added to it counts as gradient, and is reduced like ``param.grad``.

        Raises:
            RuntimeError: ``contiguous_grad_buffer`` is False.
        """
        if not self.contiguous_grad_buffer:
            raise RuntimeError(
                f"{type(self).__name__}: contiguous_grad_buffer must be True for "
                "grad_buffer_view, got False"
            )
        self.init_params()
        bucket = self._bucket_of[param]
        return self._buffer(bucket)[bucket.places[param]].view(param.shape)

    # Gradients.

    def _buffer(self, bucket: Bucket) -> torch.Tensor:
        if bucket.grads is None:
            bucket.grads = torch.zeros(
                bucket.size, dtype=self.grad_sync_dtype, device=bucket.device
            )
        return bucket.grads

    @torch.no_grad()
    def _take_grad(self, param: torch.Tensor) -> None:
        """Moves a parameter's gradient to its bucket."""
        bucket = self._bucket_of[param]
        assert param.grad is not None
        piece = self._buffer(bucket)[bucket.places[param]].view(param.shape)
        if param in bucket.filled or self.contiguous_grad_buffer:
            piece.add_(param.grad)
        else:
            piece.copy_(param.grad)
        bucket.filled.add(param)
        param.grad = None

    def _on_grad(self, param: torch.Tensor) -> None:
        """Takes a gradient that backward has made, and starts the reductions that it completes."""
        overlaps = self._is_syncing and self.overlap_grad_sync
        if not (overlaps or self._copies_greedily):
            return
        self._live([param])
        if not param.numel():
            param.grad = None
            return
        self.init_params()
        self._take_grad(param)
        if not overlaps:
            return
        self._bucket_of[param].ready.add(param)
        while len(self._buckets[self._next].ready) == len(self._buckets[self._next].params):
            self._reduce(self._buckets[self._next])
            self._next = (self._next + 1) % len(self._buckets)

    @torch.no_grad()
    def _reduce(self, bucket: Bucket) -> None:
        """Starts the reduction of a bucket's gradients; those that are missing are zeros."""
        self._finish(bucket)
        self._grad_norm = None
        flat = self._buffer(bucket)
        if self.average_grad_sync and self.process_group_size > 1:
            flat.mul_(1.0 / self.process_group_size)
        if not self.contiguous_grad_buffer:
            bucket.grads = None
        bucket.filled.clear()
        bucket.ready.clear()
        if self.distributed_size == 1:
            bucket.reducing = Pending(flat.clone() if self.contiguous_grad_buffer else flat)
        else:
            bucket.reducing = reduce_scatter_rows(flat, self.distributed_process_group)
        self._reducing.append(bucket)
        while len(self._reducing) > self.pipeline_size:
            self._finish(self._reducing[0])

    def _finish(self, bucket: Bucket) -> None:
        """Adds what a bucket's reduction has given to its shard of gradients."""
        if bucket.reducing is None:
            return
        shard = bucket.reducing.wait()
        bucket.reducing = None
        self._reducing.remove(bucket)
        if bucket.grads is not None:  # kept, and read by now
            bucket.grads.zero_()
        if self.redundant_process_group is not None:
            all_reduce(shard, self.redundant_process_group).wait()
        bucket.grad_shard = shard if bucket.grad_shard is None else bucket.grad_shard.add_(shard)

    @contextlib.contextmanager
    def no_sync(self, greedy_grad_copy: bool = False) -> Iterator[None]:
        """Makes backward leave gradients on this rank, to be reduced with later ones.

        Args:
            greedy_grad_copy: move gradients to the buckets, in ``grad_sync_dtype``.
        """
        before = self._is_syncing, self._copies_greedily
        self._is_syncing, self._copies_greedily = False, greedy_grad_copy
        try:
            yield
        finally:
            self._is_syncing, self._copies_greedily = before

    @torch.no_grad()
    def grad_sync(self) -> None:
        """Reduces all gradients that have not been reduced yet, and waits for reductions.

        Every rank must call it, as ``step`` does. A parameter without a gradient has zeros.
        """
        self.init_params()
        for p in self._live(self.parameters()):
            if p.numel():
                self._take_grad(p)
        rest = self._buckets[self._next :] if self._next else []
        self._next = 0
        for bucket in rest:
            self._reduce(bucket)
        for bucket in self._buckets:
            is_new = bucket.grad_shard is None and bucket.reducing is None
            if is_new or bucket.filled:
                self._reduce(bucket)
        for bucket in self._buckets:
            self._finish(bucket)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drops the gradients of parameters and buckets."""
        for bucket in list(self._reducing):
            self._finish(bucket)
        for bucket in self._buckets:
            bucket.drop_grads(self.contiguous_grad_buffer)
        self._next = 0
        self._grad_norm = self._grad_scale = None
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None

    # Norms and scales.

    def _device(self) -> torch.device:
        return self._buckets[0].device

    def _scale(self) -> torch.Tensor:
        """Returns the factor of all gradients, float32 [1]."""
        if self._grad_scale is None:
            self._grad_scale = torch.ones(1, dtype=torch.float32, device=self._device())
        return self._grad_scale

    def _grad_pieces(self, parameters: Iterable[torch.Tensor] | None) -> list[torch.Tensor]:
        """Returns this rank's shards of gradients, of some parameters or all."""
        self.grad_sync()
        if parameters is None:
            return [b.grad_shard for b in self._buckets if b.grad_shard is not None]
        wanted = set(parameters)
        return [
            bucket.grad_shard[of_shard]
            for bucket in self._buckets
            if bucket.grad_shard is not None
            for p, _, of_shard in bucket.fragments
            if p in wanted
        ]

    @torch.no_grad()
    def grad_norm(
        self,
        parameters: Iterable[torch.Tensor] | None = None,
        norm_type: float = 2.0,
        force: bool = False,
    ) -> torch.Tensor:
        """Returns the norm of the reduced gradients, with scales applied; every rank must call it.

        Args:
            parameters: whose gradients count; None for all.
            norm_type: 2.
            force: compute the norm of all parameters again even if it is known.

        Returns:
            The norm, a float32 scalar.

        Raises:
            NotImplementedError: another ``norm_type``.
        """
        if norm_type != 2:
            raise NotImplementedError(
                f"{type(self).__name__}: norm_type must be 2, got {norm_type!r}"
            )
        if parameters is None and self._grad_norm is not None and not force:
            return self._grad_norm * self._scale()[0]
        pieces = self._grad_pieces(parameters)
        square = torch.zeros((), dtype=torch.float64, device=self._device())
        if pieces:
            total: Any = multi_tensor.l2norm(pieces)
            square += total.double().square()
        norm = self._summed(square).sqrt().float()
        if parameters is None:
            self._grad_norm = norm
        return norm * self._scale()[0]

    def _summed(self, values: torch.Tensor) -> torch.Tensor:
        """Returns numbers of shards summed over the ranks that have the other shards."""
        if self.distributed_size > 1:
            all_reduce(values, self.distributed_process_group).wait()
        return values

    @torch.no_grad()
    def clip_grad_norm(
        self,
        max_norm: float,
        parameters: Iterable[torch.Tensor] | None = None,
        norm_type: float = 2.0,
    ) -> torch.Tensor:
        """Scales the gradients so that their norm is at most ``max_norm``; returns the norm before.

        Raises:
            NotImplementedError: another ``norm_type`` than 2, or ``parameters`` are not all.
        """
        if parameters is not None and set(parameters) != set(self.parameters()):
            raise NotImplementedError(
                f"{type(self).__name__}: parameters must be None or all of the optimizer's for "
                "clip_grad_norm, got some"
            )
        norm = self.grad_norm(None, norm_type)
        self._scale().mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    @torch.no_grad()
    def unscale_grads(self, inv_scale: torch.Tensor, *args: Any) -> dict[torch.device, Any]:
        """Multiplies the gradients by ``inv_scale``; tells whether one is not finite on any rank.

        Returns:
            ``{device: found_inf}``, a float32 scalar, as a GradScaler keeps it.
        """
        shards = self._grad_pieces(None)
        self._scale().mul_(inv_scale.to(self._device()))
        found = torch.zeros((), dtype=torch.float32, device=self._device())
        if shards:
            found += ~multi_tensor.amax(shards).isfinite().all()
        return {self._device(): self._on_any_rank(found)}

    def _on_any_rank(self, found: torch.Tensor) -> torch.Tensor:
        """Returns the maximum of a flag over ranks, in place."""
        if self.process_group_size > 1:
            maximum = distributed.ReduceOp.MAX
            distributed.all_reduce(found, op=maximum, group=self.process_group)
        return found

    # The step.

    def step(self, closure: Callable[[], Any] | None = None, *, grad_scaler: Any = None) -> Any:
        """Reduces gradients, updates this rank's shards and gathers the parameters.

        Args:
            closure: re-evaluates the model and returns the loss.
            grad_scaler: a ``torch.amp.GradScaler``: gradients are divided by its scale, unless they
                were by ``unscale_grads``, and the step is skipped if one is not finite.

        Returns:
            The result of ``closure``, None without a closure.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self.grad_sync()
            found_inf = None if grad_scaler is None else self._ask(grad_scaler)
            if found_inf is not None and not self._is_capturable() and found_inf.item():
                return loss
            self._step_buckets(found_inf)
        return loss

    def _is_capturable(self) -> bool:
        return False

    def _ask(self, scaler: Any) -> torch.Tensor:
        """Unscales gradients for a GradScaler unless it did; returns whether to skip the step.

        ``GradScaler.unscale_`` sees only gradients that are not in buckets, those of this rank.
        """
        state = scaler._per_optimizer_states[id(self)]
        flags = state["found_inf_per_device"]
        if not flags:
            inv_scale = scaler._get_scale_async().double().reciprocal().float()
            flags = self.unscale_grads(inv_scale)
        else:
            flags = {device: self._on_any_rank(flag) for device, flag in flags.items()}
        state["found_inf_per_device"] = flags
        return torch.stack([flag.to(self._device()).reshape(()) for flag in flags.values()]).sum()

    def _count(self, group: dict[str, Any], found_inf: torch.Tensor | None) -> None:
        """Adds 1 to a group's step count."""
        group["step"] = group.get("step", 0) + 1

    def _step_buckets(self, found_inf: torch.Tensor | None) -> None:
        self.param_sync()
        for group in self.param_groups:
            own = [bucket for bucket in self._buckets if bucket.group is group]
            if not own:
                continue
            self._count(group, found_inf)
            for bucket, shard in self._update(own, self._scale(), found_inf):
                self._gather(bucket, shard)
        if not self.overlap_param_sync:
            self.param_sync()
        else:
            self._forward_hook = torch_module.register_module_forward_pre_hook(
                lambda *_: self.param_sync()
            )

    def _gather(self, bucket: Bucket, shard: torch.Tensor) -> None:
        """Starts gathering new parameters."""
        if self.distributed_size == 1:
            bucket.gathering = Pending(shard)
        else:
            bucket.gathering = all_gather_rows(shard, self.distributed_process_group)

    def sync_dtype(self, bucket: Bucket) -> torch.dtype:
        """Returns the dtype in which a bucket's parameters are gathered."""
        return self.param_sync_dtype or bucket.dtype

    @torch.no_grad()
    def param_sync(self) -> None:
        """Waits for the parameters that the last step has begun to gather.

        With ``overlap_param_sync`` the first module that runs does so. Call it before parameters
        are used otherwise.
        """
        hook, self._forward_hook = self._forward_hook, None
        if hook is not None:
            hook.remove()
        for bucket in self._buckets:
            if bucket.gathering is not None:
                flat, bucket.gathering = bucket.gathering.wait(), None
                torch._foreach_copy_(bucket.params, bucket.pieces(flat))
