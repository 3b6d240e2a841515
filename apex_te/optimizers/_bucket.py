"""Buckets of parameters that one call of an optimizer op updates.

The parameters of a bucket belong to one parameter group, are on one device and share a step count.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from itertools import pairwise, repeat
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import increment_version
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .. import runtime
from ..runtime.fp8_copies import Casts, keepers_of
from ._narrow_state import StateList, state_list
from ._sharded import local, placed, with_part

MASTER = "master_param"
STEP = "step"
_STEP_OF, _GRAD = operator.itemgetter(STEP), operator.attrgetter("grad")
# With narrow state, the largest number of elements that have float32 copies at a time.
WIDE_ELEMENTS = 1 << 25

# State of one parameter in an optimizer: the step count, master weight and moments by name.
State = dict[str, Any]


def needs_copy(param: torch.Tensor) -> bool:
    """Returns True for a subclass without plain storage, such as FP8, to which no op can write."""
    return is_traceable_wrapper_subclass(local(param))


def has_master(param: torch.Tensor) -> bool:
    """Returns True if ``param`` is anything but plain float32, so that it needs a master weight."""
    return param.dtype is not torch.float32 or needs_copy(param)


def new_state(param: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns zeros for state of ``param``: of its shape, device, memory format and placements."""
    part = local(param)
    if needs_copy(part):
        zeros = torch.zeros(part.shape, dtype=dtype, device=part.device)
    else:
        zeros = torch.zeros_like(part, dtype=dtype, requires_grad=False)
    return with_part(param, zeros)


def new_master(param: torch.Tensor) -> torch.Tensor:
    """Returns a float32 copy of ``param``; the value an FP8 weight was quantized from, if kept.

    That value is freed. A flattened view of an FP8 weight is refused: Megatron's distributed
    optimizer steps it on one rank and gathers FP8 data alone, so that the other ranks would read
    the data with the scale from before.
    """
    part = local(param)
    source: torch.Tensor | None = None
    if hasattr(type(part), "get_high_precision_init_val"):  # an FP8 weight, kept values or not
        if part.dim() == 1:
            raise NotImplementedError(
                "optimizer: params must be FP8 weights and not flattened views of them, as those "
                "of a precision-aware distributed optimizer with FP8 weights are, got a view of "
                f"{part.numel()} elements"
            )
        kept = getattr(part, "get_high_precision_init_val", None)
        source = None if kept is None else kept()
    with torch.no_grad():
        master = new_state(param, torch.float32)
        local(master).copy_(part.detach() if source is None else source)
    if source is not None:
        part.clear_high_precision_init_val()  # type: ignore[attr-defined]
    return master


def dense_order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Returns the permutation that makes ``tensor`` contiguous; None if it is, or if none does."""
    if tensor.is_contiguous():
        return None
    order = tuple(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
    return order if tensor.permute(order).is_contiguous() else None


def follow_format(stored: torch.Tensor, param: torch.Tensor) -> None:
    """Gives state of ``param`` the memory format of ``param``, in new memory if it had another."""
    part, kept = local(param), local(stored)
    if dense_order(kept) != (None if needs_copy(part) else dense_order(part)):
        with torch.no_grad():
            kept.data = local(new_state(param, kept.dtype)).copy_(kept)


class Source(NamedTuple):
    """A parameter with what it takes to find its gradient at each step.

    ``master.grad`` replaces ``param.grad`` if it is set. ``order`` is the permutation that makes
    parameter and gradient contiguous; None if the op takes both as they are.
    """

    param: torch.Tensor
    master: torch.Tensor | None
    order: tuple[int, ...] | None
    is_sharded: bool
    is_decoupled: bool

    def grad(self, owner: str) -> torch.Tensor:
        """Returns this rank's part of the gradient, its dimensions permuted by ``order``."""
        grad = self.param.grad
        if self.is_decoupled:
            grad = self.param.decoupled_grad  # type: ignore[attr-defined]
        elif self.master is not None and self.master.grad is not None:
            grad = self.master.grad
        assert grad is not None
        if self.is_sharded:
            grad = local(placed(owner, "gradients", grad, self.param))
        return grad if self.order is None else grad.permute(self.order)


class Bucket:
    """Arguments of an optimizer op for some parameters, prepared once and used at each step.

    The lists ``params``, ``masters`` and each of ``moments`` are in one order. Their tensors share
    memory with parameters and state; for a DTensor they are this rank's part.

    Attributes:
        params: what the op updates: the parameters, or the master weights of FP8 parameters.
        step: an int or a float32 scalar on the device; None if steps are not counted.
        owners: the parameters as ``param_groups`` has them.
        wrapped: ``(param, master)`` for each FP8 parameter, which ``finish`` copies the master to.
    """

    __slots__ = ("_advanced", "_graded", "_has_remainders", "_kept_masters", "_kept_moments",
                 "_listed", "_parted", "_parts", "_plain", "_sources", "_states", "_wide_masters",
                 "device", "masters", "moments", "owners", "params", "sharded", "step",
                 "wrapped")  # fmt: skip

    def __init__(
        self,
        params: list[torch.Tensor],
        states: list[State],
        names: tuple[str, ...],
        scales: list[dict[str, torch.Tensor]] | None = None,
        is_decoupled: bool = False,
    ):
        parts = [local(p) for p in params]
        orders = [None if needs_copy(p) else dense_order(p) for p in parts]
        masters: list[Any] = [s.get(MASTER) for s in states]
        splits = [part is not param for part, param in zip(parts, params, strict=True)]
        self.device = parts[0].device
        self._states = states
        listed = names if masters[0] is None else (*names, MASTER)
        self._listed = [(operator.itemgetter(name), [s[name] for s in states]) for name in listed]
        self._sources = [
            Source(*s, is_decoupled) for s in zip(params, masters, orders, splits, strict=True)
        ]
        self._plain = not any(orders) and not any(splits) and not is_decoupled
        # Master weights, whose gradients replace those of the parameters.
        self._graded = [] if masters[0] is None else masters
        self.owners = params
        self._parts = parts
        self.sharded = [param for param, split in zip(params, splits, strict=True) if split]
        self.step: int | torch.Tensor | None = states[0].get(STEP)
        # The count before an ``advance`` that no update has followed, and its ``found_inf``.
        self._advanced: tuple[int | torch.Tensor, torch.Tensor | None] | None = None
        masters = [None if master is None else local(master) for master in masters]
        self.wrapped = list(zip(parts, masters, strict=True)) if needs_copy(parts[0]) else []

        def prepared(tensors: list[Any]) -> Any:
            pairs = zip(tensors, orders, strict=True)
            return runtime.tensor_list([t.detach().permute(o) if o else t for t, o in pairs])

        def kept(name: str, tensors: list[Any]) -> StateList:
            own = None if scales is None or name not in scales[0] else [s[name] for s in scales]
            return state_list(prepared(tensors), own)

        self.params = prepared(masters if self.wrapped else parts)
        self._kept_masters: StateList | None = None
        self._wide_masters: Any = None
        self._has_remainders = masters[0] is not None and masters[0].dtype is torch.int16
        if masters[0] is not None and not self._has_remainders:
            self._kept_masters = kept(MASTER, masters)
        whole = self._kept_masters
        is_given = whole is not None and whole.is_wide and not self.wrapped
        self.masters = whole.tensors if whole is not None and is_given else None
        if self._has_remainders:
            self.masters = prepared(masters)
        self._kept_moments = [kept(name, [local(s[name]) for s in states]) for name in names]
        self.moments = [moment.tensors for moment in self._kept_moments]
        self._parted: dict[tuple[int, ...], list[Any]] = {}  # of ``_lists_of``

    def has_state(self) -> bool:
        """Returns True unless someone has put another tensor or step count into the state."""
        states, same = self._states, operator.is_
        try:
            return all(
                all(map(same, map(entry, states), tensors)) for entry, tensors in self._listed
            ) and (self.step is None or all(map(same, map(_STEP_OF, states), repeat(self.step))))
        except KeyError:  # an entry was deleted
            return False

    def watched(self) -> Iterator[tuple[Callable[[], int], int]]:
        """Yields ``(function, value)``: once ``function()`` differs, the bucket must be recreated.

        They watch addresses behind permuted views, and the local tensors of DTensors.
        """
        for i, (part, source) in enumerate(zip(self._parts, self._sources, strict=True)):
            if source.order is not None:
                for tensor in (part, *(local(tensors[i]) for _, tensors in self._listed)):
                    yield tensor.data_ptr, tensor.data_ptr()
        if self.sharded:
            yield self._has_parts, True

    def _has_parts(self) -> bool:
        return all(map(operator.is_, map(local, self.owners), self._parts))

    def grads(self, owner: str) -> list[torch.Tensor]:
        """Returns this rank's gradients, in the order of ``params``."""
        if self._plain and all(map(operator.is_, map(_GRAD, self._graded), repeat(None))):
            return list(map(_GRAD, self.owners))
        return [source.grad(owner) for source in self._sources]

    def set_step(self, step: int | torch.Tensor) -> None:
        """Sets the step count; a tensor is shared, not copied, by the states of all parameters."""
        self.step = step
        for state in self._states:
            state[STEP] = step

    def advance(self, found_inf: torch.Tensor | None) -> None:
        """Adds 1 to the step count unless ``found_inf``, one element on the device, is not 0.

        With a ``found_inf`` an int count becomes a tensor, so that nothing waits for the device.
        """
        before = self.step
        if before is None:
            return
        if found_inf is not None and not isinstance(before, torch.Tensor):
            self.set_step(torch.full((), before, dtype=torch.float32, device=self.device))
        if not isinstance(self.step, torch.Tensor):
            self.set_step(self.step + 1)  # type: ignore[operator]
        elif found_inf is None:
            self.step.add_(1)
        else:
            self.step.add_(found_inf.reshape(()) == 0)
        self._advanced = before, found_inf

    def retreat(self) -> None:
        """Takes back the last ``advance``, unless an op has updated the parameters since."""
        if self._advanced is None:
            return
        (before, found_inf), self._advanced = self._advanced, None
        if not isinstance(before, torch.Tensor):
            self.set_step(before)
        else:
            before.sub_(1 if found_inf is None else (found_inf.reshape(()) == 0).float())

    def run(
        self,
        op: Callable[..., None],
        grads: list[torch.Tensor],
        options: State,
        with_casts: Callable[..., None] | None = None,
    ) -> None:
        """Updates the parameters: ``update``, then ``finish``, which document the arguments.

        ``with_casts`` is ``op`` for parameters whose FP8 copies are kept, which it also writes.
        """
        kept = [] if with_casts is None else self._kept_copies(grads)
        if not kept:
            self.update(op, grads, options)
        else:
            assert with_casts is not None
            self._update_with_casts(op, with_casts, kept, grads, options)
        self.finish()

    def _kept_copies(self, grads: list[torch.Tensor]) -> list[tuple[int, Any, Casts]]:
        """Returns ``(index, keeper, casts)`` of the parameters whose FP8 copies can be written."""
        found = [] if torch.compiler.is_compiling() else keepers_of(self.owners)
        states = [s for s in (*self._kept_moments, self._kept_masters) if s is not None]
        if not found or self.wrapped or self._has_remainders:
            return []
        if not all(state.is_wide for state in states):
            return []
        kept = []
        lists = [t for t in (self.params, grads, *self.moments, self.masters) if t is not None]
        for i, keeper in found:
            tensors = [tensors[i] for tensors in lists]
            if all(t.is_contiguous() and t.data_ptr() % 16 == 0 for t in tensors):
                casts = keeper.begin()
                if casts is not None:
                    kept.append((i, keeper, casts))
        return kept

    def _update_with_casts(
        self,
        op: Callable[..., None],
        with_casts: Callable[..., None],
        kept: list[tuple[int, Any, Casts]],
        grads: list[torch.Tensor],
        options: State,
    ) -> None:
        """Does what ``update`` does, and casts the parameters in ``kept``."""
        groups: dict[Any, list[int]] = {}
        places = {i: casts for i, _, casts in kept}
        for i in range(len(self.owners)):
            key = places[i].block_rule or "one scale" if i in places else None
            groups.setdefault(key, []).append(i)
        for key, indices in groups.items():
            params, *moments = self._lists_of(tuple(indices))
            masters = moments.pop() if self.masters is not None else None
            some = [grads[i] for i in indices]
            if key is None:
                op(params, some, *moments, masters=masters, **options)
            else:
                casts = [places[i] for i in indices]
                with_casts(params, some, *moments, casts, masters=masters, **options)
        self._advanced = None
        is_certain = options["found_inf"] is None
        for _, keeper, _ in kept:
            keeper.end(is_certain)

    def _lists_of(self, indices: tuple[int, ...]) -> list[Any]:
        """Returns prepared lists of some parameters, their moments and their master weights."""
        if indices not in self._parted:
            if len(self._parted) >= 8:  # who reads which copies changes all the time
                self._parted.clear()
            lists = [self.params, *self.moments, *([] if self.masters is None else [self.masters])]
            self._parted[indices] = [
                runtime.tensor_list([tensors[i] for i in indices]) for tensors in lists
            ]
        return self._parted[indices]

    def update(self, op: Callable[..., None], grads: list[torch.Tensor], options: State) -> None:
        """Runs a function of ``ops.multi_tensor_optim``, leaving FP8 parameters for ``finish``.

        State that is not float32 reaches it as float32 copies and is stored afterwards.
        """
        moments = [moment.wide() for moment in self._kept_moments]
        params, masters = self.params, self.masters
        kept = self._kept_masters
        if kept is not None and not kept.is_wide:
            self._wide_masters = kept.wide()
            if self.wrapped:
                params = self._wide_masters
            else:
                masters = self._wide_masters
        op(params, grads, *moments, masters=masters, **options)
        self._advanced = None
        for moment, wide in zip(self._kept_moments, moments, strict=True):
            moment.store(wide)

    def finish(self) -> None:
        """Writes FP8 parameters, stores narrow master weights, and marks DTensors as changed."""
        wide, self._wide_masters = self._wide_masters, None
        together: dict[Any, list[tuple[Any, torch.Tensor]]] = {}
        for i, (param, master) in enumerate(self.wrapped):
            source = master if wide is None else wide[i]
            copy_all = getattr(type(param), "copy_all", None)
            if copy_all is None:
                param.copy_(source)
            else:  # FP8 weights, the amaxes of whose shards then take one collective
                together.setdefault(copy_all, []).append((param, source))
        for copy_all, items in together.items():
            params, sources = zip(*items, strict=True)
            copy_all(params, sources)
            increment_version(params)
        if wide is not None:
            assert self._kept_masters is not None
            self._kept_masters.store(wide)
        if self.sharded:  # a DTensor counts its versions beside its part's
            increment_version(self.sharded)


def refuse_shared(owner: str, buckets: list[Bucket]) -> None:
    """Raises ValueError if two parameters of a step share memory.

    A kernel's blocks would update it in no order, and one of two master weights would be lost.
    """
    spans = []
    for bucket in buckets:
        for param in bucket.params:
            begin = param.data_ptr()
            if begin and param.is_contiguous():  # the ops refuse others
                end = begin + param.numel() * param.element_size()
                spans.append((str(bucket.device), begin, end, param))
    spans.sort(key=operator.itemgetter(0, 1))
    for (device, _, end, param), (other_device, begin, other_end, other) in pairwise(spans):
        if device == other_device and begin < end:
            raise ValueError(
                f"{owner}: params must share no memory with each other, got parameters of shapes "
                f"{list(param.shape)} and {list(other.shape)} with {min(end, other_end) - begin} "
                "bytes in common"
            )


def partition(
    params: list[torch.Tensor], states: list[State], names: tuple[str, ...]
) -> Iterator[list[int]]:
    """Yields indices into ``params`` of each bucket: of one device, step count and master dtype.

    FP8 parameters have buckets of their own. With state that is not float32 a bucket of several
    parameters has at most ``WIDE_ELEMENTS`` elements.
    """
    together: dict[Any, list[int]] = {}
    sizes: dict[Any, int] = {}
    for i, (param, state) in enumerate(zip(params, states, strict=True)):
        step = state.get(STEP)
        count = id(step) if isinstance(step, torch.Tensor) else step
        master = state.get(MASTER)
        kind = None if master is None else master.dtype
        key = (param.device, needs_copy(param), kind, type(step), count)
        narrow = any(state[name].dtype is not torch.float32 for name in names)
        narrow = narrow or kind not in (None, torch.float32, torch.int16)
        size = sizes.get(key, 0) + param.numel()
        if narrow and key in together and size > WIDE_ELEMENTS:
            yield together.pop(key)
            size = param.numel()
        together.setdefault(key, []).append(i)
        sizes[key] = size
    yield from together.values()
