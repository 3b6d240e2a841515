"""Data parallelism: gradients averaged over ranks in buckets, while backward runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import distributed
from torch.autograd import Variable

from apex_te.compatibility.apex import apex_C

flatten, unflatten = apex_C.flatten, apex_C.unflatten


def split_by_type(tensors: Iterable[torch.Tensor]) -> dict[str, list[torch.Tensor]]:
    """Returns lists of the tensors of each type, such as ``torch.FloatTensor``, in their order."""
    found: dict[str, list[torch.Tensor]] = {}
    for t in tensors:
        found.setdefault(t.type(), []).append(t)
    return found


def split_half_float_double(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Returns the lists of ``split_by_type``."""
    return list(split_by_type(tensors).values())


def apply_flat_dist_call(
    bucket: Sequence[torch.Tensor],
    call: Callable[..., Any],
    extra_args: Sequence[Any] | None = None,
) -> None:
    """Calls a collective on the concatenation of tensors of one type, and writes it back.

    Args:
        bucket: tensors of one dtype, on one device; written in place.
        call: function of the flat tensor, working in place. ``torch.distributed.all_reduce`` is
            followed by a division by the number of ranks.
        extra_args: more positional arguments of ``call``; None for none.
    """
    flat = flatten(bucket)
    call(flat, *(extra_args or ()))
    if call is distributed.all_reduce:
        flat.div_(distributed.get_world_size())
    torch._foreach_copy_(list(bucket), unflatten(flat, bucket))


def flat_dist_call(
    tensors: Iterable[torch.Tensor],
    call: Callable[..., Any],
    extra_args: Sequence[Any] | None = None,
) -> None:
    """Calls a collective once for the tensors of each type, as ``apply_flat_dist_call`` does.

    Args:
        tensors: tensors of any dtypes; written in place.
        call, extra_args: as in ``apply_flat_dist_call``.
    """
    with torch.no_grad():
        for bucket in split_half_float_double(tensors):
            apply_flat_dist_call(bucket, call, extra_args)


def extract_tensors(maybe_tensor: Any, tensor_list: list[torch.Tensor]) -> None:
    """Appends the tensors in nested lists and tuples to ``tensor_list``."""
    if isinstance(maybe_tensor, torch.Tensor):
        tensor_list.append(maybe_tensor)
    elif isinstance(maybe_tensor, Iterable) and not isinstance(maybe_tensor, str):
        for item in maybe_tensor:
            extract_tensors(item, tensor_list)


class Reducer:
    """Averages gradients over all ranks when ``reduce`` is called.

    Args:
        module_or_grads_list: a module, whose parameters become those of rank 0 (collective), or
            gradients in nested lists and tuples.
    """

    def __init__(self, module_or_grads_list: torch.nn.Module | Sequence[torch.Tensor]) -> None:
        self.module = None
        self.grads: list[torch.Tensor] = []
        if isinstance(module_or_grads_list, torch.nn.Module):
            self.module = module_or_grads_list
            flat_dist_call(_data(self.module.parameters()), distributed.broadcast, (0,))
        else:
            extract_tensors(module_or_grads_list, self.grads)

    def reduce(self) -> None:
        """Averages all existing gradients over the ranks of the default process group, in place.

        Collective: every rank must have gradients of the same parameters. Each dtype takes one
        all-reduce.
        """
        grads = self.grads
        if self.module is not None:
            grads = [p.grad for p in self.module.parameters() if p.grad is not None]
        flat_dist_call(grads, distributed.all_reduce)


class _Reduction(NamedTuple):
    """A bucket on its way: what is reduced, the flat gradients, and their parameters."""

    place: int
    sent: torch.Tensor
    flat: torch.Tensor
    params: list[torch.nn.Parameter]
    work: Any


class DistributedDataParallel(torch.nn.Module):
    """Averages a module's gradients over all ranks in buckets, each as soon as it is complete.

    Parameters become those of rank 0; buffers do not. The first backward records the order in which
    gradients arrive and reduces them at its end; from then on buckets, filled in rank 0's order,
    are reduced while backward runs. Every parameter that requires a gradient must get one in each
    backward, unless ``delay_allreduce``.

    Args:
        module: the module; its entries of the state dict have the prefix ``module.``.
        message_size: minimum number of elements of a bucket.
        delay_allreduce: True to reduce all gradients at the end of backward.
        shared_param: no longer used; must be None.
        allreduce_trigger_params: parameters whose gradients complete a bucket, instead of
            ``message_size``.
        retain_allreduce_buffers: True to keep the reduced buckets in ``allreduce_buffers``; the
            gradients become views of them.
        allreduce_always_fp32: True to reduce 16-bit gradients in float32.
        num_allreduce_streams: ignored; reductions overlap with backward anyway.
        allreduce_communicators: (process groups, streams); buckets take the groups in turn.
        gradient_average: True to divide the sums by the number of ranks.
        gradient_predivide_factor: f: gradients are divided by it before the reduction, and with
            ``gradient_average`` the sums are multiplied by f / number of ranks.
        gradient_average_split_factor: ignored.
        prof: True to name the phases for a profiler.

    Attributes:
        allreduce_buffers: reduced buckets, where these are retained.

    Raises:
        ValueError: ``shared_param`` is given, or ``allreduce_trigger_params`` together with
            ``delay_allreduce``.
        RuntimeError: in backward, a parameter got no gradient, or a retained buffer was not used
            before the next backward.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        message_size: int = 10000000,
        delay_allreduce: bool = False,
        shared_param: Any = None,
        allreduce_trigger_params: Sequence[torch.nn.Parameter] | None = None,
        retain_allreduce_buffers: bool = False,
        allreduce_always_fp32: bool = False,
        num_allreduce_streams: int = 1,
        allreduce_communicators: Any = None,
        gradient_average: bool = True,
        gradient_predivide_factor: float = 1.0,
        gradient_average_split_factor: float | None = None,
        prof: bool = False,
    ) -> None:
        super().__init__()
        owner = "DistributedDataParallel"
        if shared_param is not None:
            raise ValueError(
                f"{owner}: shared_param must be None, got {shared_param!r}; "
                "use delay_allreduce=True"
            )
        if allreduce_trigger_params and delay_allreduce:
            raise ValueError(
                f"{owner}: allreduce_trigger_params must be None with delay_allreduce, got "
                f"{len(allreduce_trigger_params)} parameters"
            )
        self.module = module
        self.message_size = int(message_size)
        self.delay_allreduce = delay_allreduce
        self.retain_allreduce_buffers = retain_allreduce_buffers
        self.allreduce_always_fp32 = allreduce_always_fp32
        self.gradient_average = gradient_average
        self.gradient_predivide_factor = float(gradient_predivide_factor)
        self.prof = prof
        self.allreduce_buffers: list[torch.Tensor | None] = []
        self._triggers = {id(p) for p in allreduce_trigger_params or ()}
        self._groups = allreduce_communicators[0] if allreduce_communicators else [None]
        self._disable_allreduce = False
        self._active: list[torch.nn.Parameter] = []  # for which the buckets were made
        self._buckets: list[list[int]] = []  # of places in the list of active parameters
        self._bucket_of: dict[int, int] = {}  # by the id of a parameter
        self._place_of: dict[int, int] = {}  # in the list of active parameters, likewise
        self._begin()
        flat_dist_call(_data(module.parameters()), distributed.broadcast, (0,))
        self._add_hooks()

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        self._active, self._buckets, self._place_of = [], [], {}
        self._triggers = set()  # other objects now
        self._begin()
        self._add_hooks()

    def enable_allreduce(self) -> None:
        """Lets backward reduce gradients again."""
        self._disable_allreduce = False

    def disable_allreduce(self) -> None:
        """Lets backward add up gradients on each rank without reducing them."""
        self._disable_allreduce = True

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Calls the module, and prepares for its backward."""
        result = self.module(*inputs, **kwargs)
        with self._named("forward pass DDP logic"):
            if not self._disable_allreduce:
                active = [p for p in self.module.parameters() if p.requires_grad]
                same = len(active) == len(self._active)
                if not (same and all(a is b for a, b in zip(active, self._active, strict=True))):
                    self._active, self._buckets = active, []
                    self._place_of = {id(p): i for i, p in enumerate(active)}
                self._begin()
                if self.retain_allreduce_buffers:
                    self.allreduce_buffers = [None] * len(self._buckets)
        return result

    def _begin(self) -> None:
        """Prepares for a backward, whatever the last one has left."""
        self._is_queued = False
        self._arrived: list[int] = []  # places, in order
        self._missing = [len(bucket) for bucket in self._buckets]
        self._next = 0
        self._flying: list[_Reduction] = []

    def _add_hooks(self) -> None:
        for p in self.module.parameters():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(self._on_gradient)

    def _on_gradient(self, param: torch.nn.Parameter) -> None:
        """Records a parameter's gradient, and reduces the buckets that are complete."""
        if self._disable_allreduce:
            return
        if not self._is_queued:
            self._is_queued = True
            Variable._execution_engine.queue_callback(self._on_end)
        if self.delay_allreduce:
            return
        known = self._bucket_of if self._buckets else self._place_of
        if id(param) not in known:
            raise RuntimeError(
                "DistributedDataParallel: a parameter got a gradient that had none in the first "
                "backward, or before the first forward; use delay_allreduce=True"
            )
        if not self._buckets:
            self._arrived.append(known[id(param)])
            return
        self._missing[self._bucket_of[id(param)]] -= 1
        with self._named("all-reduce of buckets"):
            while self._next < len(self._buckets) and self._missing[self._next] == 0:
                params = [self._active[i] for i in self._buckets[self._next]]
                self._start(self._next, params)
                self._next += 1

    def _on_end(self) -> None:
        """Reduces what is not reduced yet, and writes all results back."""
        with torch.no_grad(), self._named("end of backward"):
            if self.delay_allreduce or not self._buckets:
                self._reduce_all()
                if not self.delay_allreduce:
                    self._make_buckets()
            elif any(self._missing):
                raise RuntimeError(
                    f"DistributedDataParallel: {len(self._buckets) - self._next} of "
                    f"{len(self._buckets)} buckets are incomplete, as a parameter got no gradient "
                    "in this backward; use delay_allreduce=True"
                )
            for reduction in self._flying:
                self._finish(reduction)
        self._begin()

    def _reduce_all(self) -> None:
        params = [p for p in self.module.parameters() if p.grad is not None]
        kinds: dict[str, list[torch.nn.Parameter]] = {}
        for p in params:
            assert p.grad is not None
            kinds.setdefault(p.grad.type(), []).append(p)
        if self.retain_allreduce_buffers:
            self.allreduce_buffers = [None] * len(kinds)
        for index, of_kind in enumerate(kinds.values()):
            self._start(index, of_kind)

    def _make_buckets(self) -> None:
        """Divides the parameters, in the order of rank 0's gradients, into buckets of one type."""
        seen: dict[int, None] = dict.fromkeys(self._arrived)
        made: list[list[int]] = []
        filling: dict[str, list[int]] = {}
        for place in seen:
            param = self._active[place]
            bucket = filling.setdefault(param.type(), [])
            bucket.append(place)
            numel = sum(self._active[i].numel() for i in bucket)
            is_full = id(param) in self._triggers if self._triggers else numel >= self.message_size
            if is_full:
                made.append(filling.pop(param.type()))
        made += filling.values()
        message = [made]
        distributed.broadcast_object_list(message, src=0, device=self._active[0].device)
        self._buckets = message[0]
        self._bucket_of = {
            id(self._active[i]): index for index, bucket in enumerate(self._buckets) for i in bucket
        }

    @torch.no_grad()
    def _start(self, index: int, params: list[torch.nn.Parameter]) -> None:
        """Begins to reduce the gradients of a bucket."""
        grads = [p.grad for p in params if p.grad is not None]
        for g in grads:
            if g.layout is not torch.strided:
                raise TypeError(f"DistributedDataParallel: gradients must be dense, got {g.layout}")
        flat = flatten(grads)
        sent = flat.float() if self.allreduce_always_fp32 else flat
        if self.gradient_predivide_factor != 1.0:
            sent.mul_(1.0 / self.gradient_predivide_factor)
        group = self._groups[index % len(self._groups)]
        work = distributed.all_reduce(sent, group=group, async_op=True)
        self._flying.append(_Reduction(index, sent, flat, params, work))

    def _finish(self, reduction: _Reduction) -> None:
        """Waits for a bucket, on the stream, and makes its parameters' gradients of it."""
        place, sent, flat, params, work = reduction
        work.wait()
        if self.gradient_average:
            sent.mul_(self.gradient_predivide_factor / distributed.get_world_size())
        if sent is not flat:
            flat.copy_(sent)
        grads = [p.grad for p in params if p.grad is not None]
        parts = unflatten(flat, grads)
        if not self.retain_allreduce_buffers:
            torch._foreach_copy_(grads, parts)
            return
        if self.allreduce_buffers[place] is not None:
            raise RuntimeError(
                f"DistributedDataParallel: allreduce_buffers[{place}] must be None before "
                "backward, got a buffer; call forward between two backward passes"
            )
        self.allreduce_buffers[place] = flat
        for grad, part in zip(grads, parts, strict=True):
            grad.data = part

    @contextmanager
    def _named(self, phase: str) -> Iterator[None]:
        """Names a phase for a profiler, where that is wanted."""
        if not self.prof:
            yield
            return
        with torch.autograd.profiler.record_function(phase):
            yield


def _data(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [t.detach() for t in tensors]
