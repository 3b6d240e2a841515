"""CUDA graphs of modules under Transformer Engine's names."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ....graphs.capture import SavedState, fp8_modules
from ....graphs.graphed_callables import GraphedForward
from ....graphs.graphed_callables import make_graphed_callables as _make_graphed_callables
from ....graphs.microbatches import graph_microbatches
from .._names import neutral
from .quantization import DelayedScaling, Recipe

__all__ = [
    "graph_pool_handle", "is_graph_capturing", "make_graphed_callables", "restore_fp8_tensors",
    "save_fp8_tensors", "set_capture_end", "set_capture_start",
]  # fmt: skip

_NAME = "make_graphed_callables"


class _Capturing:
    """Flag that ``set_capture_start`` and ``set_capture_end`` set."""

    def __init__(self) -> None:
        self.now = False


_capturing = _Capturing()


def set_capture_start() -> None:
    """Records that a capture of several modules begins."""
    _capturing.now = True


def set_capture_end() -> None:
    """Records that a capture of several modules ends."""
    _capturing.now = False


def is_graph_capturing() -> bool:
    """Returns True between ``set_capture_start`` and ``set_capture_end``."""
    return _capturing.now


def graph_pool_handle() -> Any:
    """Returns the id of a new memory pool for graphs."""
    return torch.cuda.graph_pool_handle()


def save_fp8_tensors(
    modules: Iterable[torch.nn.Module], recipe: Recipe | None
) -> list[SavedState] | None:
    """Returns copies of the FP8 state of modules, for ``restore_fp8_tensors``.

    None if ``recipe`` is not delayed scaling, since other recipes keep no state.
    """
    if not isinstance(recipe, DelayedScaling):
        return None
    return [SavedState(child.fp8_state) for m in modules for child in fp8_modules(m)]


def restore_fp8_tensors(
    modules: Iterable[torch.nn.Module], fp8_tensors: list[SavedState] | None
) -> None:
    """Writes back the FP8 state of modules, in place.

    Args:
        modules: the modules of ``save_fp8_tensors``, in the same order.
        fp8_tensors: its result; None does nothing.

    Raises:
        ValueError: the modules are others.
    """
    if fp8_tensors is None:
        return
    states = [child.fp8_state for m in modules for child in fp8_modules(m)]
    if [id(state) for state in states] != [id(saved.state) for saved in fp8_tensors]:
        raise ValueError(
            "restore_fp8_tensors: modules must be those of save_fp8_tensors, "
            f"with {len(fp8_tensors)} FP8 states, got {len(states)} others"
        )
    with torch.no_grad():
        for saved in fp8_tensors:
            saved.restore()


def make_graphed_callables(
    modules: torch.nn.Module | Sequence[torch.nn.Module],
    sample_args: Any,
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    sample_kwargs: Any = None,
    fp8_enabled: bool | Sequence[bool] | None = None,
    fp8_calibrating: bool | None = None,
    fp8_recipe: Recipe | None = None,
    fp8_group: Any = None,
    fp8_weight_caching: bool | None = None,
    enabled: bool | Sequence[bool] | None = None,
    calibrating: bool | None = None,
    recipe: Recipe | None = None,
    amax_reduction_group: Any = None,
    cache_quantized_params: bool | None = None,
    _order: list[int] | None = None,
    _num_layers_per_chunk: list[int] | None = None,
    pool: Any = None,
    retain_graph_in_backward: bool = False,
    _reuse_graph_input_output_buffers: bool = False,
    pre_warmup_hook: Callable[[], Any] | None = None,
    post_warmup_hook: Callable[[], Any] | None = None,
) -> Any:
    """Captures forward and backward of modules as CUDA graphs, which take their ``forward``.

    ``apex_te.make_graphed_callables`` says what is captured, and when the graphs run.

    Args:
        modules, sample_args, num_warmup_iters, allow_unused_input, sample_kwargs, pool: as in
            ``apex_te.make_graphed_callables``.
        enabled: capture in an enabled region; for several modules possibly a sequence of bools,
            which must be equal without ``_order``.
        calibrating: capture in a calibrating region.
        recipe: the region's recipe; None for ``get_default_recipe()``.
        amax_reduction_group: the region's process group.
        cache_quantized_params: calls take ``is_first_microbatch``, and replays reuse FP8 weights.
        fp8_enabled: earlier name of ``enabled``.
        fp8_calibrating: earlier name of ``calibrating``.
        fp8_recipe: earlier name of ``recipe``.
        fp8_group: earlier name of ``amax_reduction_group``.
        fp8_weight_caching: earlier name of ``cache_quantized_params``.
        _order: a pipeline schedule over the modules, chunk by chunk: ``c`` is the forward of the
            next microbatch through chunk ``c``, ``-c`` its backward. Each module then gets a graph
            for each microbatch, as ``apex_te.graphs.microbatches.graph_microbatches`` says, and
            ``sample_args`` has an entry for each graph.
        _num_layers_per_chunk: the number of modules of each chunk; None divides them equally.
        _reuse_graph_input_output_buffers: has no effect with ``_order``, as graphs have inputs and
            outputs of their own; else it must be False.
        retain_graph_in_backward: must be False.
        pre_warmup_hook: must be None.
        post_warmup_hook: must be None.

    Returns:
        The module, or a tuple of the modules; with ``_order`` a tuple of the graphs, which are
        called in place of the modules. ``reset()`` of each frees its graph, after which calls run
        eagerly.

    Raises:
        NotImplementedError: an argument is not supported.
        TypeError: an argument has a wrong type, or both its names are given.
        ValueError: an argument has a wrong value.
        RuntimeError: there is no CUDA device.
    """
    if _order is None:
        neutral(
            _NAME,
            _num_layers_per_chunk=(_num_layers_per_chunk, None),
            _reuse_graph_input_output_buffers=(_reuse_graph_input_output_buffers, False),
        )
    neutral(
        _NAME,
        retain_graph_in_backward=(retain_graph_in_backward, False),
        pre_warmup_hook=(pre_warmup_hook, None),
        post_warmup_hook=(post_warmup_hook, None),
    )
    recipe = _either("recipe", recipe, "fp8_recipe", fp8_recipe, None)
    names = ("amax_reduction_group", "fp8_group")
    caching = ("cache_quantized_params", "fp8_weight_caching")
    options: dict[str, Any] = {
        "num_warmup_iters": num_warmup_iters,
        "allow_unused_input": allow_unused_input,
        "sample_kwargs": sample_kwargs,
        "fp8_enabled": _either("enabled", enabled, "fp8_enabled", fp8_enabled, False),
        "fp8_calibrating": _either(
            "calibrating", calibrating, "fp8_calibrating", fp8_calibrating, False
        ),
        "fp8_recipe": DelayedScaling() if recipe is None else recipe,
        "fp8_group": _either(names[0], amax_reduction_group, names[1], fp8_group, None),
        "fp8_weight_caching": _either(
            caching[0], cache_quantized_params, caching[1], fp8_weight_caching, False
        ),
        "pool": pool,
    }
    if _order is not None:
        return graph_microbatches(modules, sample_args, _order, _num_layers_per_chunk, **options)
    chosen = options["fp8_enabled"]
    if isinstance(chosen, (list, tuple)):
        if len(set(chosen)) > 1:
            raise NotImplementedError(
                f"{_NAME}: enabled must be equal for all modules without _order, got both"
            )
        options["fp8_enabled"] = bool(chosen and chosen[0])
    made = _make_graphed_callables(modules, sample_args, **options)
    for module in made if isinstance(made, tuple) else (made,):
        if not hasattr(type(module), "reset"):
            module.reset = functools.partial(_reset, module)
    return made


def _reset(module: torch.nn.Module) -> None:
    """Frees the graph of a module; does nothing for a copy, which has none."""
    forward = module.__dict__.get("forward")
    if isinstance(forward, GraphedForward):
        forward.reset()


def _either(name: str, value: Any, earlier_name: str, earlier: Any, default: Any) -> Any:
    """Returns the argument that was given under its name or its earlier one."""
    if value is None:
        return default if earlier is None else earlier
    if earlier is not None and earlier is not value and earlier != value:
        raise TypeError(
            f"{_NAME}: {earlier_name} must be None beside {name}, whose earlier name it is, "
            f"got {earlier!r}"
        )
    return value
