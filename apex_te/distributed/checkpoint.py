"""Activation checkpointing for FP8 modules: the recompute repeats scales, recipe and randomness."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from ..comm.collectives import all_gather_rows, world_size
from ..comm.groups import check_process_group, is_process_group
from ..fp8.autocast import local
from ..fp8.delayed.ranks import registry
from ..fp8.delayed.state import ScaleSnapshot
from ..runtime.named_arguments import argument_names, check_flags, nearest


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    distribute_saved_activations: bool = False,
    get_rng_state_tracker: Callable[[], Any] | None = None,
    tp_group: Any = None,
    use_reentrant: bool = True,
    **kwargs: Any,
) -> Any:
    """Runs ``function(*args, **kwargs)``, saves only its inputs, and recomputes it in backward.

    The recompute uses the random states (CPU, CUDA, tracker), the ``torch.autocast`` and
    ``fp8_autocast`` regions and the FP8 scales of the first run, even if the scales were updated in
    between (several microbatches in flight). It records no amax values, so the FP8 state is the
    same as without a checkpoint. The earlier order ``checkpoint(function,
    distribute_saved_activations, get_cuda_rng_tracker, tp_group, *args)`` still works, with a
    warning.

    Args:
        function: any callable.
        args: positional arguments of ``function``.
        distribute_saved_activations: save the first tensor among the arguments only once per
            ``tp_group``. The tensor is flattened, each rank saves an equal share, and backward
            gathers the shares. It must be equal on all ranks, which excludes sequence parallelism.
            Requires ``tp_group`` and ``use_reentrant=True``.
        get_rng_state_tracker: function that returns a tracker with ``get_states`` and
            ``set_states``, such as a ``CudaRNGStatesTracker``; None if there is none. The earlier
            name ``get_cuda_rng_tracker`` works, too.
        tp_group: process group of the tensor-parallel ranks, for ``distribute_saved_activations``.
        use_reentrant: as in ``torch.utils.checkpoint.checkpoint``, whose arguments ``context_fn``,
            ``determinism_check``, ``debug`` and ``preserve_rng_state`` are accepted, too.
        kwargs: keyword arguments of ``function``.

    Returns:
        The result of ``function``.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: ``distribute_saved_activations`` is set, but ``tp_group`` or a tensor among the
            arguments is missing, or ``function`` is a sequence-parallel module; or ``context_fn``
            or ``debug`` is given with ``use_reentrant=True``.
        NotImplementedError: ``distribute_saved_activations`` is set with ``use_reentrant=False``,
            in a graph of ``torch.compile``, or for a tensor subclass.
    """
    if _is_earlier_order(args):
        warnings.warn(
            "checkpoint: pass distribute_saved_activations, get_rng_state_tracker and tp_group by "
            "keyword",
            DeprecationWarning,
            stacklevel=2,
        )
        distribute_saved_activations, get_rng_state_tracker, tp_group, *rest = args
        args = tuple(rest)
    if "get_cuda_rng_tracker" in kwargs:
        if get_rng_state_tracker is not None:
            raise TypeError(
                "checkpoint: get_cuda_rng_tracker must not be given beside get_rng_state_tracker, "
                "whose earlier name it is"
            )
        get_rng_state_tracker = kwargs.pop("get_cuda_rng_tracker")
    check_flags("checkpoint", use_reentrant=use_reentrant)
    options = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
    distributes = _distributes(
        function, distribute_saved_activations, tp_group, use_reentrant, (*args, *kwargs.values())
    )
    if torch.compiler.is_compiling():  # the compiler repeats a region by itself
        options["use_reentrant"] = False
        return torch_checkpoint(function, *args, **options, **kwargs)
    try:
        tracker = None if get_rng_state_tracker is None else get_rng_state_tracker()
        call = _Repeatable(function, tuple(kwargs), tracker)
        # Keyword arguments travel as positional ones, which the reentrant form can differentiate.
        with ExitStack() as stack:
            if distributes:  # the tensors are saved once the function has run
                call.parts, call.stack = SavedInParts(tp_group), stack
            return torch_checkpoint(
                call, *args, *kwargs.values(), use_reentrant=use_reentrant, **options
            )
    except (TypeError, ValueError) as error:
        _explain(error, function, get_rng_state_tracker, use_reentrant, options, kwargs)
        raise


_OPTIONS = ("context_fn", "determinism_check", "debug", "preserve_rng_state")


def _explain(
    error: Exception, function: Any, tracker: Any, use_reentrant: bool, options: Any, kwargs: Any
) -> None:
    """Raises a better error for a failed call of ``checkpoint``, if an argument is wrong."""
    if not callable(function):
        raise TypeError(
            f"checkpoint: function must be callable, got {type(function).__name__}; pass the "
            "function and its arguments, not its result"
        ) from error
    if tracker is not None and not callable(tracker):
        raise TypeError(
            "checkpoint: get_rng_state_tracker must be a function that returns a tracker, got "
            f"{type(tracker).__name__}"
        ) from error
    for name in ("context_fn", "debug"):
        if use_reentrant and options.get(name):
            raise ValueError(
                f"checkpoint: {name} must be left out with use_reentrant=True, got "
                f"{options[name]!r}"
            ) from error
    for name in kwargs:
        meant = nearest(name, (*argument_names(checkpoint), *_OPTIONS), 0.8)
        if meant is not None and f"argument {name!r}" in str(error):
            raise TypeError(
                f"checkpoint: {name!r} is an argument neither of checkpoint nor of function; did "
                f"you mean {meant!r}?"
            ) from error


def _distributes(
    function: Any, wanted: bool, group: Any, use_reentrant: bool, args: tuple[Any, ...]
) -> bool:
    """Checks ``distribute_saved_activations``, and returns True to split the first tensor."""
    check_flags("checkpoint", distribute_saved_activations=wanted)
    check_process_group("checkpoint", "tp_group", group)
    if not wanted:
        return False
    if group is None:
        raise ValueError(
            "checkpoint: tp_group must be given with distribute_saved_activations=True, got None"
        )
    if not use_reentrant or torch.compiler.is_compiling():
        got = "a graph of torch.compile" if use_reentrant else "False"
        raise NotImplementedError(
            "checkpoint: use_reentrant must be True, in eager mode, with "
            f"distribute_saved_activations=True, got {got}"
        )
    if not any(isinstance(value, torch.Tensor) for value in args):
        raise ValueError(
            "checkpoint: one of the arguments must be a tensor with "
            f"distribute_saved_activations=True, got {len(args)} without"
        )
    owner = function if isinstance(function, torch.nn.Module) else None
    owner = getattr(function, "__self__", None) if owner is None else owner
    if isinstance(owner, torch.nn.Module):
        for module in owner.modules():
            if getattr(module, "sequence_parallel", False):
                raise ValueError(
                    "checkpoint: distribute_saved_activations must be False if ranks have "
                    f"different rows (sequence_parallel of {type(module).__name__}), got True"
                )
    return world_size(group) > 1


def _is_earlier_order(args: tuple[Any, ...]) -> bool:
    """Returns True if ``args`` are of the earlier order and begin with flag, tracker and group."""
    return (
        len(args) > 3
        and isinstance(args[0], bool)
        and (args[1] is None or callable(args[1]))
        and (args[2] is None or is_process_group(args[2]))
    )


class SavedInParts:
    """Pair of hooks for ``torch.autograd.graph.saved_tensors_hooks``: ``pack`` and ``unpack``.

    The first tensor saved is flattened and padded with zeros, and each rank of ``group`` saves an
    equal share of it; other tensors are saved in full. The first tensor must be equal on all ranks.
    All ranks must unpack it at the same point, as the gather is collective.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._is_first = True

    def pack(self, tensor: torch.Tensor) -> Any:
        """Returns the object that autograd saves for ``tensor``."""
        if not self._is_first:
            return tensor
        self._is_first = False
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            raise NotImplementedError(
                "checkpoint: the first tensor must be a plain one with "
                f"distribute_saved_activations=True, got {type(tensor).__name__}"
            )
        return _Part(tensor.detach(), self._group)

    @staticmethod
    def unpack(saved: Any) -> torch.Tensor:
        """Returns the tensor that ``pack`` was given; collective for the first one."""
        return saved.gathered() if type(saved) is _Part else saved


class _Part:
    """Saved form of a tensor: this rank's 1-D part, and the tensor's shape and strides."""

    __slots__ = ("_group", "_numel", "_part", "_shape", "_stride")

    def __init__(self, tensor: torch.Tensor, group: Any) -> None:
        self._group = group
        self._shape = tensor.shape
        self._numel = numel = tensor.numel()
        # The order of memory is kept: a GEMM of another layout could round differently.
        self._stride = torch.empty_like(tensor, device="meta").stride()
        dense = tensor if tensor.stride() == self._stride else tensor.clone()
        size = -(-numel // world_size(group))
        start = torch.distributed.get_rank(group) * size
        own = dense.as_strided((numel,), (1,))[start : start + size]
        self._part = tensor.new_zeros(size)
        self._part[: own.numel()].copy_(own)

    def gathered(self) -> torch.Tensor:
        """Returns the whole tensor, gathered from all ranks, with its former shape and strides."""
        flat = self._part
        if self._numel:
            flat = all_gather_rows(flat, self._group).wait()[: self._numel]
        return flat.as_strided(self._shape, self._stride)


class _Repeatable:
    """Callable around a function: calls after the first are recomputes, under the same conditions.

    These are the conditions at its creation. The hooks ``parts`` enter ``stack`` only after the
    first call, when torch saves the inputs.
    """

    def __init__(
        self, function: Callable[..., Any], keywords: tuple[str, ...], tracker: Any
    ) -> None:
        self.function = function
        self.keywords = keywords
        self.has_grad = torch.is_grad_enabled()
        self.conditions = RunConditions(tracker)
        self.has_run = False
        self.parts: SavedInParts | None = None
        self.stack: ExitStack | None = None  # what is entered here ends with the first run

    def __call__(self, *args: Any) -> Any:
        count = len(args) - len(self.keywords)
        keywords = dict(zip(self.keywords, args[count:], strict=True))
        if self.has_run:
            with self.conditions.restored():
                return self.function(*args[:count], **keywords)
        before = local.is_checkpointed
        local.is_checkpointed = before or self.has_grad
        try:
            out = self.function(*args[:count], **keywords)
        finally:
            local.is_checkpointed = before
        if self.has_grad and not torch.is_grad_enabled():  # the reentrant form
            out = _with_aliases(out, args)
        self.has_run = True
        self.conditions.note_scales()  # after the first run, which may have allocated them
        if self.stack is not None and self.parts is not None:
            self.stack.enter_context(saved_tensors_hooks(self.parts.pack, self.parts.unpack))
            self.stack = self.parts = None
        return out


def _with_aliases(out: Any, args: tuple[Any, ...]) -> Any:
    """Returns a function's result with aliases of the parameters in it, such as a returned bias.

    Autograd takes results of a reentrant checkpoint for computed by it: a parameter would stop
    being a leaf, and a later backward from it would recompute the function without end.
    """
    if isinstance(out, tuple):
        made = tuple(_with_aliases(value, args) for value in out)
        same = all(new is old for new, old in zip(made, out, strict=True))
        return out if same else made
    if not isinstance(out, torch.Tensor) or any(out is value for value in args):
        return out
    return out.detach() if out.requires_grad or isinstance(out, torch.nn.Parameter) else out


class RunConditions:
    """Conditions of a run that a recompute has to restore."""

    def __init__(self, tracker: Any = None) -> None:
        self.tracker = tracker
        self.region = local.region
        self.states = None if tracker is None else tracker.get_states()
        self.scales: ScaleSnapshot | None = None

    def note_scales(self) -> None:
        """Takes a snapshot of the FP8 scales."""
        self.scales = _scales_now()

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restores the run's region, tracked random states and scales inside the ``with`` block."""
        region, states = local.region, None
        local.region = self.region
        if self.tracker is not None:
            states = self.tracker.get_states()
            self.tracker.set_states(self.states)
        try:
            with nullcontext() if self.scales is None else self.scales.restored():
                yield
        finally:
            if self.tracker is not None:
                self.tracker.set_states(states)
            local.region = region


_latest: weakref.ref[ScaleSnapshot] | None = None


def _scales_now() -> ScaleSnapshot | None:
    """Returns a snapshot of the forward scales of all FP8 modules; None if none has FP8 state."""
    global _latest
    tensors = [
        tensor
        for state in (module.state for module in registry.living())
        if state.allocated
        for tensor in (state.scale_fwd, state.scale_inv_fwd)
    ]
    if not tensors:
        return None
    latest = None if _latest is None else _latest()
    if latest is None or not latest.holds(tensors):
        latest = ScaleSnapshot(tensors)
        _latest = weakref.ref(latest)
    return latest
