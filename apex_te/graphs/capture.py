"""CUDA graphs of one module's forward and backward, and the state that a capture preserves."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator, Sequence
from itertools import compress
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..fp8.autocast import fp8_autocast
from ..fp8.delayed.ranks import amax_groups
from ..fp8.delayed.state import TENSORS, FP8State, resized_history
from ..fp8.parameter.parameter import FP8Parameter
from ..module._core.fp8_module import FP8Module
from ..module._core.weight_cache import CapturedWeights, KeptWeight
from ..module.attention.inference_params import InferenceParams
from ..runtime.stamp import stamp


def fp8_modules(module: torch.nn.Module) -> list[FP8Module]:
    """Returns ``module`` and its descendants that are FP8 modules."""
    return [child for child in module.modules() if isinstance(child, FP8Module)]


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Collects garbage before the block, not in it: collecting a graph would break a capture."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


# Pools that PyTorch goes on recording pinned memory to, for good, since a capture failed.
_failed_pools: set[Any] = set()


@contextlib.contextmanager
def recorded(graph: Any, pool: Any) -> Iterator[None]:
    """Captures what the ``with`` block runs; after an error, PyTorch's state is restored.

    PyTorch itself leaves a capture that CUDA has ended half open: the capture's stream is current,
    its pool takes allocations, and random generators cannot draw outside of a capture.
    """
    if pool in _failed_pools:
        raise ValueError(
            "make_graphed_callables: pool must be a new torch.cuda.graph_pool_handle() after a "
            f"failed capture, got {pool}"
        )
    stream = torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph, pool=pool):
            yield
    except BaseException:
        torch.cuda.set_stream(stream)
        _close_failed(pool)
        raise


def _close_failed(pool: Any) -> None:
    """Ends what a failed capture into ``pool`` has begun, as far as it has not ended."""
    _failed_pools.add(pool)
    device = torch.cuda.current_device()
    with contextlib.suppress(RuntimeError):  # the pool takes no allocations any more
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)
    with contextlib.suppress(RuntimeError):
        value = torch.zeros(1, device=device)
        # Generators leave their capturing state at the end of a capture that succeeds.
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            value.add_(1)


class Capture:
    """CUDA graphs of one module's forward and backward, with the tensors that they read and write.

    Those tensors keep their addresses, so only one replay at a time is possible. ``first`` is the
    capture of the same module's first microbatch, which shares its FP8 weights with this one.

    Attributes:
        caches: KV caches among the arguments, with what the graph has room for; without gradients.
        outputs: flat outputs of ``forward``; ``results`` are the tensors among them.
        fixed: positions in ``results`` of tensors that need no gradient.
        grad_outputs: tensors from which backward reads the gradients of ``results``; None for a
            result without a gradient.
        stand_ins: maps the id of a parameter to the parameter that replaces it in the capture.
        delayed: the weight gradients that ``backward_dw`` computes after a replay.
        run: number of forwards replayed so far, without recomputes.
    """

    def __init__(
        self,
        owner: str,
        forward: Callable[..., Any],
        args: tuple,
        kwargs: dict[str, Any],
        parameters: Sequence[torch.nn.Parameter],
        modules: Sequence[FP8Module],
        region: fp8_autocast,
        keeps_weights: bool,
        allow_unused: bool,
        first: Capture | None = None,
    ) -> None:
        self.first = first
        self.is_shared = False
        if first is not None:
            first.is_shared = True
        self.owner = owner
        self.forward = forward
        self.region = region
        self.every_parameter = tuple(parameters)
        self.held = [p._held for p in parameters if isinstance(p, FP8Parameter)]
        self.modules = modules
        self.keeps_weights = keeps_weights
        self.allow_unused = allow_unused
        paths, self.spec = pytree.tree_flatten_with_path((args, kwargs))
        self.names = [_path_name(path) for path, _ in paths]
        found = {id(x): x for _, x in paths if isinstance(x, InferenceParams)}
        self.caches: list[tuple[InferenceParams, dict[str, int]]] = [
            (cache, {}) for cache in found.values()
        ]
        self.leaves = [_static(leaf, not self.caches) for _, leaf in paths]
        self.parameters = [p for p in parameters if p.requires_grad and not self.caches]
        self.inputs = [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]
        main_grads = [getattr(p, "main_grad", None) for p in self.parameters]
        self.main_grads = [grad for grad in main_grads if grad is not None]
        self.weights: list[CapturedWeights] = []
        self.cache: WeightCache | None = None
        self.forward_graph = torch.cuda.CUDAGraph()
        self.backward_graph: torch.cuda.CUDAGraph | None = None
        self.stand_ins: dict[int, torch.nn.Parameter] = {}
        self.delayed: list[tuple[list[Callable[[], None]], Callable[[int], None]]] = []
        self.run = 0
        self.has_run_backward = True

    @contextlib.contextmanager
    def prepared(self) -> Iterator[None]:
        """Makes the modules cast FP8 weights, inside the block, to memory that replays read."""
        for held in self.held:
            # A copy kept from before would be read by replays after it has been replaced.
            held.columnwise = held.columnwise_scale_inv = None
        waiting = [(module, module._modes.wgrad_store.copy()) for module in self.modules]
        if self.keeps_weights and self.first is not None:
            self.weights = self.first.weights
        elif self.keeps_weights:
            # Weights made of inputs, which each microbatch has for itself, are not shared.
            inputs = () if self.is_shared else self.inputs
            known = {id(x) for x in (*inputs, *self.stand_ins.values())}
            self.weights = [
                CapturedWeights(type(m).__name__, known, self.is_shared) for m in self.modules
            ]
        for module, captured in zip(self.modules, self.weights, strict=False):
            module._modes.captured = captured
        try:
            with contextlib.ExitStack() as stack:
                for cache, _ in self.caches:
                    stack.enter_context(cache.preserved())
                yield
        finally:
            for module, delayed in waiting:
                module._modes.captured = None
                module._modes.wgrad_store[:] = delayed

    def _run(self, graph: Any) -> tuple[list[Any], Any]:
        """Runs one forward inside ``graph``, in its FP8 region with no update pending."""
        for captured in self.weights:
            captured.begin()
        args, kwargs = pytree.tree_unflatten(self.leaves, self.spec)
        amax_groups.pending = 0
        with self.region, graph:
            return pytree.tree_flatten(self.call(args, kwargs))

    def call(self, args: Any, kwargs: Any) -> Any:
        """Calls ``forward``; the numbers of tokens in KV caches are then read on the device."""
        if not self.caches:
            return self.forward(*args, **kwargs)
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            for cache, room in self.caches:
                stack.enter_context(cache.captured(room))
            return self.forward(*args, **kwargs)

    def _gradients(self, outputs: list[Any], grads: list[Any]) -> list[Any]:
        """Returns the gradients of ``_sources()``, in the order of these; None if unused."""
        sources = self._sources()
        pairs = [(o, g) for o, g in zip(outputs, grads, strict=True) if g is not None]
        outs, given = [o for o, _ in pairs], [g for _, g in pairs]
        return list(torch.autograd.grad(outs, sources, given, allow_unused=True))

    def _sources(self) -> list[torch.Tensor]:
        """Returns the inputs, then the parameters' stand-ins, that require grad."""
        parameters = [self.stand_ins[id(p)] for p in self.parameters]
        return [x for x in self.inputs if x.requires_grad] + parameters

    def warm_up(self, count: int) -> None:
        """Runs forward and backward ``count`` times eagerly, which sets up what a capture needs."""
        for _ in range(count):
            outputs, _ = self._run(contextlib.nullcontext())
            grads = [torch.ones_like(o) if _needs_grad(o) else None for o in outputs]
            if self._sources() and any(g is not None for g in grads):
                self._gradients(outputs, grads)

    def settle(self) -> None:
        """Ends the warm-up, and makes ``cache`` for the FP8 weights that were allocated in it."""
        if not self.keeps_weights:
            return
        if self.first is not None:
            self.cache = self.first.cache
            return
        for captured in self.weights:
            captured.is_settled = True
        kept = [weight for captured in self.weights for weight in captured.kept.values()]
        # By the tensor that the runs here read: the one that takes its place in a call.
        given: dict[int, Any] = {id(self.stand_ins[id(p)]): p for p in self.every_parameter}
        given |= {id(x): i for i, x in enumerate(self.inputs)}
        self.cache = WeightCache(kept, [[given[id(s)] for s in w.sources] for w in kept])

    def capture_forward(self, pool: Any) -> None:
        """Captures the forward; replays write its outputs to the same memory."""
        self.outputs, self.output_spec = self._run(recorded(self.forward_graph, pool))

    def capture_backward(self, pool: Any) -> None:
        """Captures the backward; replays write its gradients to the same memory."""
        needs = [_needs_grad(o) for o in self.outputs]
        self.grad_outputs = [
            torch.zeros_like(o) if need else None
            for o, need in zip(self.outputs, needs, strict=True)
        ]
        sources = self._sources()
        for module in self.modules:
            module._modes.wgrad_store.clear()
        grads: list[Any] = [None] * len(sources)
        if sources and any(needs):
            self.backward_graph = torch.cuda.CUDAGraph()
            with recorded(self.backward_graph, pool):
                grads = self._gradients(self.outputs, self.grad_outputs)
        self._check_used(sources, grads, self._take_delayed())
        found = iter(grads)
        self.input_grads = [next(found) if x.requires_grad else None for x in self.inputs]
        self.parameter_grads = list(found)
        self._keep_tensors(needs)

    def _check_used(self, sources: list[torch.Tensor], grads: list[Any], delayed: set[int]) -> None:
        """Checks that each source has a gradient, unless ``allow_unused``."""
        for source, grad in zip(sources, grads, strict=True):
            has_own = getattr(source, "main_grad", None) is not None or id(source) in delayed
            if grad is None and not has_own and not self.allow_unused:
                raise RuntimeError(
                    f"{self.owner}: every input and parameter that requires grad must take part in "
                    "the outputs with allow_unused_input=False, got one without a gradient"
                )

    def _keep_tensors(self, needs: list[bool]) -> None:
        """Sets ``results``, ``fixed`` and ``grad_outputs`` from the captured outputs."""
        self.outputs = [o.detach() if isinstance(o, torch.Tensor) else o for o in self.outputs]
        tensors = [isinstance(o, torch.Tensor) for o in self.outputs]
        self.results = list(compress(self.outputs, tensors))
        self.fixed = [i for i, need in enumerate(compress(needs, tensors)) if not need]
        self.grad_outputs = list(compress(self.grad_outputs, tensors))

    def _take_delayed(self) -> set[int]:
        """Stores in ``delayed`` the weight gradients that the captured backward has left out."""
        late: set[int] = set()
        for module in self.modules:
            own = [p for p in module.parameters(recurse=False) if p.requires_grad]
            pairs = [(p, self.stand_ins[id(p)]) for p in self.parameters]
            pairs = [(p, s) for p, s in pairs if any(s is q for q in own)]
            for compute in module._modes.wgrad_store:
                late_run = functools.partial(self._run_delayed, pairs, compute)
                self.delayed.append((module._modes.wgrad_store, late_run))
                late.update(id(s) for _, s in pairs)
        return late

    def _run_delayed(self, pairs: Sequence[Any], compute: Callable[[], None], run: int) -> None:
        """Computes a weight gradient that ``backward_dw`` asks for, from the graph's memory."""
        if run != self.run:
            raise RuntimeError(
                f"{self.owner}: backward_dw must come before the next graphed forward, "
                "which overwrites what it reads"
            )
        for parameter, stand_in in pairs:
            stand_in.grad = parameter.grad
        compute()
        for parameter, stand_in in pairs:
            parameter.grad, stand_in.grad = stand_in.grad, None

    def reset(self) -> None:
        """Frees the graphs and the memory that they read and write; no replay can follow."""
        for graph in (self.forward_graph, self.backward_graph):
            if graph is not None:
                graph.reset()
        self.leaves, self.inputs, self.outputs, self.results = [], [], [], []
        self.grad_outputs, self.input_grads, self.parameter_grads = [], [], []
        self.weights, self.cache, self.delayed = [], None, []

    def replay_forward(self, inputs: Sequence[torch.Tensor], again: bool) -> int:
        """Copies ``inputs`` to the graph's inputs and replays the forward; returns ``run``."""
        for static, value in zip(self.inputs, inputs, strict=True):
            static.copy_(value)
        self.forward_graph.replay()
        self.run += not again
        self.has_run_backward = False
        return self.run

    def replay_backward(self, run: int, overwrite: bool, grads: Sequence[Any]) -> list[Any]:
        """Replays the backward; returns gradients of inputs, then of parameters that require grad.

        Later replays overwrite these gradients. ``overwrite`` sets ``main_grad`` to zero first.
        """
        if run != self.run or self.has_run_backward:
            by = "a later forward" if run != self.run else "its own backward"
            raise RuntimeError(
                f"{self.owner}: a graphed backward must follow its forward, once; what that "
                f"forward saved was overwritten by {by}"
            )
        self.has_run_backward = True
        if self.backward_graph is None:
            return [None] * (len(self.inputs) + len(self.parameters))
        if overwrite and self.main_grads:
            torch._foreach_zero_(self.main_grads)
        for static, value in zip(self.grad_outputs, grads, strict=True):
            if static is not None:
                static.copy_(value)
        self.backward_graph.replay()
        for store, compute in self.delayed:
            store.append(functools.partial(compute, run))
        for parameter in self.parameters:
            if hasattr(parameter, "grad_added_to_main_grad"):
                parameter.grad_added_to_main_grad = True
        # A reference to each stays here, so that autograd copies what becomes a .grad: the graphs
        # write other things to this memory too.
        return [*self.input_grads, *self.parameter_grads]


class WeightCache:
    """Decides which FP8 weights a replay casts, by the rules of a module's cache of FP8 weights."""

    def __init__(
        self, kept: Sequence[KeptWeight], sources: Sequence[Sequence[torch.Tensor | int]]
    ) -> None:
        self.sources = sources
        self.is_filled = False  # by any replay
        self._stamps: list[list[Any] | None] = [None] * len(kept)
        self._keeps = [False] * len(kept)
        self._noop: torch.Tensor | None = None
        if kept:
            device = kept[0].sources[0].device
            self._noop = torch.zeros(len(kept), dtype=torch.int32, device=device)
            for weight, noop in zip(kept, self._noop.split(1), strict=True):
                weight.noop = noop

    def choose(self, first: bool | None, recomputed: bool, inputs: Sequence[torch.Tensor]) -> None:
        """Sets the ``noop`` flags that the graph reads, before the replay of a call.

        ``first`` True and None cast all weights, False those that changed. After None, the next
        False casts all.
        """
        self.is_filled = True
        if recomputed or self._noop is None:
            keeps = [True] * len(self._keeps)
        else:
            keeps = []
            for i, sources in enumerate(self.sources):
                now = [stamp(inputs[s] if isinstance(s, int) else s) for s in sources]
                keeps.append(first is False and now == self._stamps[i])
                self._stamps[i] = None if first is None else now
        if keeps == self._keeps or self._noop is None:
            return
        if all(keeps) or not any(keeps):
            self._noop.fill_(int(keeps[0]))
        else:
            for flag, keep in zip(self._noop.split(1), keeps, strict=True):
                flag.fill_(int(keep))
        self._keeps = keeps


def _needs_grad(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _static(leaf: Any, keeps_grad: bool) -> Any:
    """Returns a copy of a tensor, for replays to read in its place; other values as they are."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return leaf.detach().clone().requires_grad_(leaf.requires_grad and keeps_grad)


def _path_name(path: Any) -> str:
    """Returns the name, such as ``args[0]``, of an argument by its pytree path."""
    return ("args", "kwargs")[path[0].idx] + pytree.keystr(path[1:])


@contextlib.contextmanager
def preserved(
    modules: Sequence[torch.nn.Module], devices: Sequence[torch.device]
) -> Iterator[None]:
    """Restores FP8 state, pending updates, buffers, ``main_grad`` and generators on exit."""
    states = [SavedState(child.fp8_state) for module in modules for child in fp8_modules(module)]
    parameters = [p for module in modules for p in module.parameters()]
    held = [b for module in modules for b in module.buffers()]
    held += [g for g in (getattr(p, "main_grad", None) for p in parameters) if g is not None]
    copies = [tensor.clone() for tensor in held]
    indices = {device.index for device in devices if device.type == "cuda"}
    clocks = amax_groups.clocks
    try:
        with torch.random.fork_rng(sorted(indices)):
            yield
    finally:
        amax_groups.clocks = clocks
        with torch.no_grad():
            for state in states:
                state.restore()
            for tensor, copied in zip(held, copies, strict=True):
                tensor.copy_(copied)


@contextlib.contextmanager
def substituted(modules: Sequence[torch.nn.Module]) -> Iterator[dict[int, torch.nn.Parameter]]:
    """Replaces the modules' parameters, inside the block, by stand-ins that share their memory.

    Yields a dict that maps ids of parameters to stand-ins. A parameter's node in a live autograd
    graph belongs to the stream of that graph, and a capture must not wait for that stream.
    """
    children = [child for module in modules for child in module.modules()]
    owned = [
        (child._parameters, name, parameter)
        for child in children
        for name, parameter in child._parameters.items()
        if parameter is not None
    ]
    stand_ins: dict[int, torch.nn.Parameter] = {}
    for _, _, parameter in owned:
        if id(parameter) not in stand_ins:
            other = torch.nn.Parameter(parameter.detach(), parameter.requires_grad)
            other.__dict__.update(parameter.__dict__)
            stand_ins[id(parameter)] = other
    try:
        for parameters, name, parameter in owned:
            parameters[name] = stand_ins[id(parameter)]
        yield stand_ins
    finally:
        for parameters, name, parameter in owned:
            parameters[name] = parameter


class SavedState:
    """Copy of the values of an FP8 state."""

    def __init__(self, state: FP8State) -> None:
        self.state = state
        self.first_due = state.first_steps.still_due()
        self.tensors: dict[str, torch.Tensor] = {}
        if state.allocated:
            self.tensors = {name: getattr(state, name).clone() for name in TENSORS}

    def restore(self) -> None:
        """Writes the values back into the state; resets a state that had no tensors."""
        if not self.tensors:
            self.state.reset()  # it was allocated meanwhile
            return
        for name, value in self.tensors.items():
            target = getattr(self.state, name)
            if target.shape != value.shape:  # the recipe's history has another length
                value = resized_history(value, target.shape[0])
            target.copy_(value)
        self.state.first_steps.set(self.first_due)
