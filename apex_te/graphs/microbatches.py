"""CUDA graphs of modules for each microbatch in flight in a pipeline-parallel schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..fp8.autocast import fp8_autocast
from ..recipe import Recipe, chosen_recipe
from . import graphed_callables
from .capture import Capture
from .graphed_callables import GraphedForward, capture_in_order

_NAME = "make_graphed_callables"


def graph_microbatches(
    modules: Any,
    sample_args: Sequence[tuple],
    order: Sequence[int],
    layers_per_chunk: Sequence[int] | None = None,
    *,
    sample_kwargs: Sequence[dict[str, Any]] | None = None,
    fp8_enabled: bool | Sequence[bool] = False,
    fp8_calibrating: bool = False,
    fp8_recipe: Recipe | str | None = None,
    fp8_group: Any = None,
    fp8_weight_caching: bool = False,
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    pool: Any = None,
) -> tuple[GraphedForward, ...]:
    """Captures a forward and a backward of each module for each microbatch of a schedule.

    The memory of a graph is for one microbatch in flight. So a module gets as many graphs as the
    schedule has microbatches; they share its FP8 weights. Hooks of the modules are part of the
    graphs.

    ``modules`` are different layers, chunk by chunk; the arguments ``sample_args`` and
    ``sample_kwargs`` of each graph are ordered by chunk, then by microbatch, then by layer.
    ``order`` is the schedule, a chunk number from 1 on for each forward and its negative for each
    backward, equally many for all chunks. ``layers_per_chunk`` None divides the layers equally. The
    other arguments are those of ``make_graphed_callables``.

    Returns a callable for each graph, ordered as ``sample_args``. Call these instead of the
    modules, which keep their ``forward``, in the order of the schedule.
    """
    graphed_callables.check_options(num_warmup_iters, allow_unused_input, fp8_weight_caching)
    if not isinstance(modules, (tuple, list)):
        kind = type(modules).__name__
        raise TypeError(f"{_NAME}: modules must be a tuple of modules with _order, got {kind}")
    graphed_callables.check_modules(modules)
    chunks = _chunks(len(modules), order, layers_per_chunk)
    microbatches = len(order) // (2 * len(chunks))
    places = [
        module for chunk in chunks for _ in range(microbatches) for module in chunk
    ]  # of each graph, the index of its module
    args = _each("sample_args", sample_args, tuple, len(places))
    kwargs: list[Any] = [{}] * len(places)
    if sample_kwargs is not None:
        kwargs = _each("sample_kwargs", sample_kwargs, dict, len(places))
    enabled = _switches(fp8_enabled, len(modules))
    recipe = chosen_recipe(_NAME, "fp8_recipe", fp8_recipe)
    regions = [
        fp8_autocast(
            enabled=each, fp8_recipe=recipe, fp8_group=fp8_group, calibrating=fp8_calibrating
        )
        for each in enabled
    ]
    graphed_callables.check_surroundings()
    for module in modules:
        graphed_callables.check_module(module)
    devices = [
        graphed_callables.device_of(modules[place], *given)
        for place, *given in zip(places, args, kwargs, strict=True)
    ]
    first: dict[int, GraphedForward] = {}
    graphs: list[GraphedForward] = []
    for place, own_args, own_kwargs in zip(places, args, kwargs, strict=True):
        made = GraphedForward(
            modules[place], own_args, own_kwargs, regions[place],
            fp8_weight_caching and enabled[place], allow_unused_input, first.get(place), True,
        )  # fmt: skip
        first.setdefault(place, made)
        graphs.append(made)
    events = [(graphs[i], is_backward) for i, is_backward in _events(chunks, order)]
    capture_in_order(graphs, events, devices, num_warmup_iters, pool)
    schedule = Schedule(events)
    for graph in graphs:
        graph.schedule = schedule
        graph.hold_states()
    return tuple(graphs)


class Schedule:
    """Check that graphs are replayed in the order of their capture, because they share memory.

    Forwards and backwards may be left out, such as those of a module that runs eagerly. A forward
    that is not later in the order than the last event begins the schedule anew.
    """

    def __init__(self, events: Sequence[tuple[GraphedForward, bool]]) -> None:
        self._places = {
            (id(graph.capture), is_backward): i for i, (graph, is_backward) in enumerate(events)
        }
        self._last = -1
        self._round = 0
        self._rounds: dict[int, int] = {}  # of the last forward of each capture

    def check(self, capture: Capture, is_backward: bool) -> None:
        """Records that a replay is about to start; raises RuntimeError if it is out of order."""
        place = self._places[id(capture), is_backward]
        if not is_backward:
            self._round += place <= self._last
            self._rounds[id(capture)] = self._round
        elif place <= self._last or self._rounds.get(id(capture)) != self._round:
            raise RuntimeError(
                f"{capture.owner}: graphs must run in the order of _order, got a backward that "
                "comes before others that have run, or after a schedule was begun anew"
            )
        self._last = place


def _switches(enabled: bool | Sequence[bool], count: int) -> list[bool]:
    """Returns ``fp8_enabled`` of each module; raises ValueError if there is another number."""
    found = [enabled] * count if isinstance(enabled, bool) else list(enabled)
    if len(found) != count:
        raise ValueError(
            f"{_NAME}: enabled must be given for each of {count} modules, got {len(found)}"
        )
    return found


def _chunks(
    modules: int, order: Sequence[int], layers_per_chunk: Sequence[int] | None
) -> list[range]:
    """Checks the schedule, and returns the indices of the modules of each chunk."""
    for entry in order:
        if isinstance(entry, bool) or not isinstance(entry, int):
            raise TypeError(f"{_NAME}: _order must hold ints, got {entry!r}")
    count = max(order, default=0)
    forwards = [list(order).count(c) for c in range(1, count + 1)]
    in_flight = [0] * (count + 1)
    ends = bool(forwards) and len(set(forwards)) == 1 and 0 not in order
    for entry in order if ends else ():
        ends = ends and abs(entry) <= count
        if ends:
            in_flight[abs(entry)] += 1 if entry > 0 else -1
            ends = in_flight[abs(entry)] >= 0
    if not ends or any(in_flight):
        raise ValueError(
            f"{_NAME}: _order must have, for each chunk 1 to {max(count, 1)}, equally many "
            f"forwards, each with a later backward, got {list(order)}"
        )
    if layers_per_chunk is None:
        layers_per_chunk = [modules // count] * count
    if len(layers_per_chunk) != count or sum(layers_per_chunk) != modules:
        raise ValueError(
            f"{_NAME}: _num_layers_per_chunk must give the layers of {count} chunks, {modules} "
            f"together, got {list(layers_per_chunk)}"
        )
    starts = [sum(layers_per_chunk[:c]) for c in range(count)]
    return [range(s, s + n) for s, n in zip(starts, layers_per_chunk, strict=True)]


def _each(name: str, values: Any, wanted: type, count: int) -> list[Any]:
    """Returns the samples of all graphs as a list, after checking their number and type."""
    found = list(values)
    if len(found) != count:
        raise ValueError(
            f"{_NAME}: {name} must be given for each layer and microbatch of _order, {count}, "
            f"got {len(found)}"
        )
    for value in found:
        if not isinstance(value, (wanted, list) if wanted is tuple else wanted):
            raise TypeError(
                f"{_NAME}: {name} must be a {wanted.__name__} for each layer and microbatch, "
                f"got {type(value).__name__}"
            )
    return [tuple(value) if isinstance(value, list) else value for value in found]


def _events(chunks: Sequence[range], order: Sequence[int]) -> list[tuple[int, bool]]:
    """Returns each step of a schedule as the index of its graph and True for the backward."""
    microbatches = len(order) // (2 * len(chunks))
    done = dict.fromkeys(order, 0)
    found = []
    for entry in order:
        chunk, is_backward = chunks[abs(entry) - 1], entry < 0
        start = chunk.start * microbatches + done[entry] * len(chunk)
        graphs = range(start, start + len(chunk))
        found += [(i, is_backward) for i in (reversed(graphs) if is_backward else graphs)]
        done[entry] += 1
    return found
