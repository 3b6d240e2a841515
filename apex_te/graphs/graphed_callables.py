"""``make_graphed_callables``: forward and backward of modules as CUDA graphs, with FP8 state."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..fp8.autocast import fp8_autocast, graph_task_id, local
from ..fp8.delayed.ranks import intern
from ..ops.binding import once_differentiable
from ..recipe import Recipe, chosen_recipe
from ..runtime.named_arguments import check_flags, check_ints, named_arguments
from .capture import Capture, fp8_modules, no_collection, preserved, substituted

__all__ = [
    "GraphedForward", "capture_in_order", "check_module", "check_modules", "check_options",
    "check_surroundings", "device_of", "make_graphed_callables",
]  # fmt: skip

_NAME = "make_graphed_callables"


@named_arguments(enabled="fp8_enabled", calibrating="fp8_calibrating")
def make_graphed_callables(
    modules: torch.nn.Module | Sequence[torch.nn.Module],
    sample_args: Any,
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    fp8_enabled: bool = False,
    fp8_calibrating: bool = False,
    fp8_recipe: Recipe | str | None = None,
    fp8_group: Any = None,
    fp8_weight_caching: bool = False,
    sample_kwargs: Any = None,
    pool: Any = None,
) -> Any:
    """Captures forward and backward of modules, and replaces their ``forward`` by CUDA graphs.

    The graphs read the FP8 state and record amax values in it. Scales are updated outside of the
    graphs, on entering ``fp8_autocast``. So training gives the same results as without graphs,
    bitwise. Changes that the capture makes to FP8 state, ``main_grad``, buffers and random
    generators are undone.

    Args:
        modules: a module, or a tuple or list of modules, whose parameters and inputs are on a CUDA
            device. A module need not have parameters.
        sample_args: a tuple or list of positional arguments of ``forward``; for several modules a
            sequence of these. Of tensors, shape, dtype and ``requires_grad`` are used; any other
            value is a constant of the graph.
        num_warmup_iters: number of forwards and backwards before the capture, at least 1.
        allow_unused_input: True to allow inputs and parameters that no output depends on.
        fp8_enabled: ``enabled`` of the ``fp8_autocast`` region for the capture. A later call
            outside any region enters that region itself.
        fp8_calibrating: ``calibrating`` of that region.
        fp8_recipe: ``fp8_recipe`` of that region.
        fp8_group: ``fp8_group`` of that region.
        fp8_weight_caching: True to make calls accept ``is_first_microbatch``. A call with True or
            None casts the FP8 weights. One with False reuses the FP8 weights and scales of the last
            call with True, until the parameters change. Recipes other than delayed scaling cast
            them in each call, to the same FP8 data; so does every recipe if a weight is neither a
            parameter nor an argument of the module. The cached FP8 weights have memory outside of
            the graphs' pool.
        sample_kwargs: a dict of keyword arguments of ``forward``; for several modules a sequence of
            dicts. If it contains an ``InferenceParams``, call its ``pre_step`` before this
            function. Each replay then computes, without gradients, the step of the last
            ``pre_step``; it can have at most as many sequences and tokens as the captured one.
        pool: memory pool of other graphs to share, from ``torch.cuda.graph_pool_handle()``.

    Returns:
        The module, or a tuple of the modules. A call runs the graph if it is like the capture: the
        same training or evaluation mode and ``torch.autocast``, and for FP8 a region with an equal
        recipe, entered with grad enabled. Other calls, and calls before ``first_step="current"``
        has its scales, run the module's former ``forward``. Each call overwrites the outputs of the
        last one. Call several modules in the order of their capture, and their backwards in the
        opposite order. With ``delay_wgrad_compute``, weight gradients are not part of a graph:
        ``backward_dw()`` computes them, before the next call. Copies of a module run without the
        graph.

    Raises:
        RuntimeError: there is no CUDA device; the call is made inside ``fp8_autocast``, or inside
            ``torch.autocast`` with ``cache_enabled=True``, its default; with
            ``allow_unused_input=False`` an input or parameter gets no gradient; in a later call,
            parameters or FP8 state have moved, or a backward runs twice or after a later forward.
        TypeError: an argument has a wrong type, here or in a call.
        ValueError: an argument has a wrong value, here or in a call.
    """
    given = _samples(modules, sample_args, sample_kwargs)
    check_options(num_warmup_iters, allow_unused_input, fp8_weight_caching)
    recipe = chosen_recipe(_NAME, "fp8_recipe", fp8_recipe)
    region = fp8_autocast(
        enabled=fp8_enabled, fp8_recipe=recipe, fp8_group=fp8_group, calibrating=fp8_calibrating
    )
    for module, _, _ in given:
        check_module(module)
    check_surroundings()
    devices = [device_of(module, args, kwargs) for module, args, kwargs in given]
    graphs = [
        GraphedForward(module, args, kwargs, region, fp8_weight_caching, allow_unused_input)
        for module, args, kwargs in given
    ]
    # In the order in which they will run, because they share memory.
    order = [(graph, False) for graph in graphs] + [(graph, True) for graph in reversed(graphs)]
    capture_in_order(graphs, order, devices, num_warmup_iters, pool)
    for graph in graphs:
        graph.install()
    return modules if isinstance(modules, torch.nn.Module) else tuple(g.module for g in graphs)


def capture_in_order(
    graphs: Sequence[GraphedForward],
    order: Sequence[tuple[GraphedForward, bool]],
    devices: Sequence[torch.device],
    warmup_iters: int,
    pool: Any,
) -> None:
    """Warms up all graphs, then captures them in ``order``, with one memory pool.

    Args:
        graphs: the graphs, one for each forward.
        order: pairs of a graph and a bool, True to capture its backward, False its forward.
        devices: the CUDA device of each graph.
        warmup_iters: number of runs of each graph before the capture.
        pool: memory pool from ``torch.cuda.graph_pool_handle()``; None for a new one.
    """
    pool = torch.cuda.graph_pool_handle() if pool is None else pool
    modules = list({id(graph.module): graph.module for graph in graphs}.values())
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.cuda.device(devices[0]))
        stack.enter_context(preserved(modules, devices))
        stack.enter_context(torch.enable_grad())
        stand_ins = stack.enter_context(substituted(modules))
        for graph in graphs:
            graph.capture.stand_ins = stand_ins
            stack.enter_context(graph.capture.prepared())
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            for graph in graphs:
                graph.capture.warm_up(warmup_iters)
        torch.cuda.synchronize()
        for graph in graphs:
            graph.note_first_steps()
            graph.capture.settle()
        stack.enter_context(no_collection())
        for graph, is_backward in order:
            if is_backward:
                graph.capture.capture_backward(pool)
            else:
                graph.capture.capture_forward(pool)


def check_options(warmup_iters: Any, allow_unused_input: Any, weight_caching: Any) -> None:
    """Checks the options of ``make_graphed_callables``.

    Args:
        warmup_iters: ``num_warmup_iters``, an int.
        allow_unused_input: a bool.
        weight_caching: ``fp8_weight_caching``, a bool.

    Raises:
        TypeError: an option has another type.
        ValueError: ``warmup_iters`` is below 1.
    """
    check_ints(_NAME, num_warmup_iters=warmup_iters)
    check_flags(_NAME, allow_unused_input=allow_unused_input, fp8_weight_caching=weight_caching)


def _samples(modules: Any, args: Any, kwargs: Any) -> list[tuple[Any, tuple, dict[str, Any]]]:
    """Checks the modules and their sample arguments."""
    single = isinstance(modules, torch.nn.Module)
    if not single and not isinstance(modules, (tuple, list)):
        kind = type(modules).__name__
        raise TypeError(f"{_NAME}: modules must be a module or a tuple of modules, got {kind}")
    every = [modules] if single else list(modules)
    check_modules(every)
    if not every:
        raise ValueError(f"{_NAME}: modules must be at least one, got none")
    if kwargs is None:
        kwargs = {} if single else [{} for _ in every]
    found = []
    for name, values, wanted in (
        ("sample_args", args, (tuple, list)),
        ("sample_kwargs", kwargs, (dict,)),
    ):
        if not single and not isinstance(values, (tuple, list)):
            raise TypeError(
                f"{_NAME}: {name} must be a sequence with one {wanted[0].__name__} for each "
                f"module, got {type(values).__name__}"
            )
        each = [values] if single else list(values)
        if len(each) != len(every):
            raise ValueError(
                f"{_NAME}: {name} must be given for each of {len(every)} modules, got {len(each)}"
            )
        for value in each:
            if not isinstance(value, wanted):
                raise TypeError(
                    f"{_NAME}: {name} must be a {wanted[0].__name__} for each module, "
                    f"got {type(value).__name__}"
                )
        found.append([tuple(value) if isinstance(value, list) else value for value in each])
    if any("is_first_microbatch" in value for value in found[1]):
        raise ValueError(
            f"{_NAME}: sample_kwargs must not hold is_first_microbatch, which is an argument of "
            "calls with fp8_weight_caching=True"
        )
    return list(zip(every, *found, strict=True))


def check_modules(modules: Sequence[Any]) -> None:
    """Raises TypeError or ValueError unless ``modules`` holds different modules."""
    for module in modules:
        if not isinstance(module, torch.nn.Module):
            kind = type(module).__name__
            raise TypeError(f"{_NAME}: modules must be torch.nn.Modules, got {kind}")
    if len({id(module) for module in modules}) != len(modules):
        raise ValueError(f"{_NAME}: modules must be different ones, got one twice")


def check_module(module: torch.nn.Module) -> None:
    """Raises ValueError if a module inside ``module`` has a graph already."""
    for child in module.modules():
        if child is not module and isinstance(child.__dict__.get("forward"), GraphedForward):
            raise ValueError(f"{_NAME}: modules must not hold a module that has a graph, got one")


def check_surroundings() -> None:
    """Raises RuntimeError without a CUDA device, or if a region or autocast cache is active."""
    if not torch.cuda.is_available():
        raise RuntimeError(f"{_NAME}: CUDA graphs need a CUDA device, got none")
    if local.region is not None:
        raise RuntimeError(f"{_NAME}: it must be called outside fp8_autocast, got a call inside")
    if torch.is_autocast_enabled("cuda") and torch.is_autocast_cache_enabled():
        raise RuntimeError(
            f"{_NAME}: torch.autocast must have cache_enabled=False (a graph would lack the casts "
            "of weights), got True"
        )


def device_of(module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> torch.device:
    """Returns the CUDA device that a module runs on.

    Args:
        module: the module; its parameters count first.
        args, kwargs: sample arguments of its forward, in any nesting.

    Raises:
        ValueError: a parameter or a tensor among the arguments is not on a CUDA device, or there is
            neither.
    """
    parameters = list(module.parameters())
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    for name, values in (("parameters", parameters), ("samples", tensors)):
        for value in values:
            if value.device.type != "cuda":
                raise ValueError(f"{_NAME}: {name} must be on a CUDA device, got {value.device}")
    found = [*parameters, *tensors]
    if not found:
        raise ValueError(
            f"{_NAME}: a module without parameters must have a tensor in sample_args, got none for "
            f"{type(module).__name__}"
        )
    return found[0].device


class GraphedForward:
    """Callable that replaces a module's ``forward`` and replays its graph or runs it eagerly.

    Attributes:
        first: the graph of the same module's first microbatch; None for that graph itself.
        replayed: True if the last call replayed the graph; a recompute then does so, too.
        first_steps: ``(state, slot)`` of each slot that had its first scale before the capture. If
            a slot needs a first scale again, a call runs eagerly.
        states: the FP8 states and their amax histories, to notice if a state has moved.

    Args:
        module: the module whose ``forward`` is replaced.
        args, kwargs: sample arguments of ``forward``.
        region: ``fp8_autocast`` region of the capture.
        weight_caching, allow_unused: ``fp8_weight_caching`` and ``allow_unused_input`` of
            ``make_graphed_callables``.
        first: see ``Attributes``.
        is_called: captures calls of the module, with its hooks, instead of its ``forward``.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        args: tuple,
        kwargs: dict[str, Any],
        region: fp8_autocast,
        weight_caching: bool,
        allow_unused: bool,
        first: GraphedForward | None = None,
        is_called: bool = False,
    ) -> None:
        self.schedule: Any = None
        self.is_reset = False
        self.module: Any = module
        self.owner = type(module).__name__
        earlier = module.__dict__.get("forward")
        # Made again after a move, a graph replaces the earlier one.
        self.eager: Any = earlier.eager if isinstance(earlier, GraphedForward) else module.forward
        self.takes_first = "is_first_microbatch" in inspect.signature(self.eager).parameters
        self.keywords = tuple(kwargs)
        self.training = module.training
        self.autocast = _autocast_dtype()
        self.region = region
        self.recipe_key = intern(region.recipe)[0]
        self.uses_fp8 = region.enabled or region.calibrating
        self.parameters = tuple(module.parameters())
        self.addresses = [p.data_ptr() for p in self.parameters]
        self.replayed = False
        self.first_steps: list[tuple[Any, int]] = []
        self.states: list[tuple[Any, torch.Tensor]] = []
        modules = fp8_modules(module)
        captured = self.module.__call__ if is_called else self.eager
        self.capture: Capture = Capture(
            self.owner, captured, args, kwargs, self.parameters, modules, region,
            weight_caching, allow_unused, None if first is None else first.capture,
        )  # fmt: skip

    def note_first_steps(self) -> None:
        """Sets ``first_steps`` after warm-up, for a recipe with ``first_step="current"``."""
        if getattr(self.region.recipe, "first_step", None) == "current":
            states = [module.fp8_state for module in self.capture.modules]
            self.first_steps = [
                (state, i)
                for state in states
                for i, due in enumerate(state.first_steps.due)
                if not due
            ]

    def install(self) -> None:
        """Replaces the module's ``forward`` by this object, and calls ``hold_states``."""
        self.hold_states()
        self.module.forward = self

    def hold_states(self) -> None:
        """Keeps the FP8 states that the graphs read, to notice if one has moved.

        Call it after the capture, as ``install`` does.
        """
        states = [m.fp8_state for m in self.capture.modules if m.fp8_state.allocated]
        # Held, so that nobody else is given the memory that the graphs write to.
        self.states = [(state, state.amax_history_fwd) for state in states]

    def reset(self) -> None:
        """Frees the graphs; later calls run the eager forward."""
        self.is_reset, self.replayed, self.states = True, False, []
        self.capture.reset()

    def __call__(self, *args: Any, is_first_microbatch: bool | None = None, **kwargs: Any) -> Any:
        if self.uses_fp8 and local.region is None and graph_task_id() == -1:
            with self.region:
                return self._call(args, kwargs, is_first_microbatch)
        return self._call(args, kwargs, is_first_microbatch)

    def _call(self, args: tuple, kwargs: dict[str, Any], first: bool | None) -> Any:
        """Replays the graph for a call like the captured one, else runs the eager forward."""
        if self.schedule is not None and not self.capture.keeps_weights:
            first = None  # Megatron passes it always
        elif first is not None and not self.capture.keeps_weights:
            raise ValueError(
                f"{self.owner}: is_first_microbatch must be None with fp8_weight_caching=False in "
                f"{_NAME}, got {first}"
            )
        recomputed = graph_task_id() != -1
        # A recompute repeats what the forward did.
        if not (self.replayed if recomputed else self._applies(first)):
            self.replayed = False
            if self.takes_first:
                kwargs["is_first_microbatch"] = first
            return self.eager(*args, **kwargs)
        given = self._checked_inputs(args, self._captured_keywords(kwargs))
        self._check_addresses()
        capture = self.capture
        for cache, room in capture.caches:
            cache.check_room(self.owner, room)
        self.replayed = True
        if capture.cache is not None:
            capture.cache.choose(first, recomputed, given)
        results = iter(_Graphed.apply(self, recomputed, first is True, *given, *capture.parameters))
        outputs = [next(results) if isinstance(o, torch.Tensor) else o for o in capture.outputs]
        return pytree.tree_unflatten(outputs, capture.output_spec)

    def _captured_keywords(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Returns keyword arguments as captured, without the None that Megatron also passes."""
        if self.schedule is None:
            return kwargs
        found = {name: kwargs[name] for name in self.keywords if name in kwargs}
        others = {k: v for k, v in kwargs.items() if k not in found and v is not None}
        return found | others

    def _applies(self, first: bool | None) -> bool:
        """Returns True if the graph can stand for this call: same mode, autocast and FP8 region."""
        if self.is_reset:
            return False
        if self.module.training != self.training or self.autocast != _autocast_dtype():
            return False
        region = local.region
        if not self.uses_fp8:
            return region is None or not (region.enabled or region.calibrating)
        assert region is not None
        if region.enabled != self.region.enabled or region.recipe_key != self.recipe_key:
            return False
        if region.save != self.region.save:
            return False
        if not (region.records and (region.enabled or region.calibrating)):
            return False
        cache = self.capture.cache
        if first is False and cache is not None and not cache.is_filled:
            return False  # what is cached are the module's own FP8 weights
        return not any(state.first_steps.due[i] for state, i in self.first_steps)

    def _checked_inputs(self, args: tuple, kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """Returns the tensors of a call, in the order of ``Capture.inputs``."""
        capture, owner = self.capture, self.owner
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if spec != capture.spec:
            raise ValueError(f"{owner}: arguments must be {capture.names} as captured, got others")
        given = []
        for name, static, value in zip(capture.names, capture.leaves, leaves, strict=True):
            if not isinstance(static, torch.Tensor):
                if isinstance(value, torch.Tensor) or value != static:
                    raise ValueError(
                        f"{owner}: {name} must be {static!r} as captured, got {value!r}"
                    )
                continue
            if not isinstance(value, torch.Tensor):
                kind = type(value).__name__
                raise TypeError(f"{owner}: {name} must be a tensor as captured, got {kind}")
            if value.dtype is not static.dtype:
                raise TypeError(
                    f"{owner}: {name} must be {static.dtype} as captured, got {value.dtype}"
                )
            if value.shape != static.shape:
                raise ValueError(
                    f"{owner}: {name} must have shape {list(static.shape)} as captured, "
                    f"got {list(value.shape)}"
                )
            needs_grad = value.requires_grad and torch.is_grad_enabled() and not capture.caches
            if needs_grad and not static.requires_grad:
                raise ValueError(f"{owner}: {name} must not require grad as captured, got True")
            given.append(value)
        return given

    def _check_addresses(self) -> None:
        """Checks that FP8 state and parameters are where the capture found them."""
        what = None
        if any(state.amax_history_fwd is not history for state, history in self.states):
            what = "FP8 state"
        elif [p.data_ptr() for p in self.parameters] != self.addresses:
            what = "parameters"
        if what is not None:
            raise RuntimeError(
                f"{self.owner}: {what} must stay where {_NAME} found them, got moved ones"
            )

    def __reduce__(self) -> tuple:
        """Makes copies and pickles hold the eager forward, as their tensors are not the graph's."""
        return _plain_forward, (self.module,)


def _plain_forward(module: torch.nn.Module) -> Any:
    """Returns the forward of the module's class, bound to the module."""
    return type(module).forward.__get__(module)


def _autocast_dtype() -> torch.dtype | None:
    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None


class _Graphed(torch.autograd.Function):
    """Autograd function that replays both graphs, which hold the tensors for backward."""

    @staticmethod
    def forward(
        ctx: Any, graph: GraphedForward, again: bool, overwrite: bool, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        capture = graph.capture
        ctx.capture, ctx.schedule, ctx.overwrite = capture, graph.schedule, overwrite
        if graph.schedule is not None and not again:
            graph.schedule.check(capture, False)
        ctx.run = capture.replay_forward(tensors[: len(capture.inputs)], again)
        outputs = tuple(result.detach() for result in capture.results)
        ctx.mark_non_differentiable(*[outputs[i] for i in capture.fixed])
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple:
        if ctx.schedule is not None:
            ctx.schedule.check(ctx.capture, True)
        return (None, None, None, *ctx.capture.replay_backward(ctx.run, ctx.overwrite, grads))
