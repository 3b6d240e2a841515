"""Pytest plugin that repeats through JAX what the ops' tests call on CPU tensors.

``pytest -p replay`` records calls of C functions: their arguments before and what they wrote. After
the tests each recorded call is made once more, compiled by XLA; all that it writes must have the
same bits. The file that ``APEX_TE_REPLAY`` names gets the outcome as JSON.
"""

from __future__ import annotations

import collections
import json
import os
from typing import Any

import numpy as np
import torch

import apex_te.runtime.dispatcher as dispatcher

MOST_CALLS = int(os.environ.get("APEX_TE_REPLAY_CALLS", "6"))  # of one function, all different
CASES = int(os.environ.get("APEX_TE_REPLAY_CASES", "100000"))
_calls: dict[tuple[str, str], dict[Any, Any]] = collections.defaultdict(dict)


class Recorded:
    """One call: arguments before it, and tensors after it, by parameter."""

    def __init__(self, before):
        self.before = before
        self.after: dict[str, Any] = {}


def to_numpy(tensor):
    """Returns a copy of a tensor, with its bits and its dtype."""
    import ml_dtypes

    shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
    plain = tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
    kind = getattr(ml_dtypes, dtype, None) or np.dtype(dtype)
    return plain.view(torch.uint8).numpy().view(kind).reshape(shape).copy()


def _copy(value):
    if isinstance(value, torch.Tensor):
        return to_numpy(value)
    if isinstance(value, (list, tuple)) or type(value).__name__ == "TensorList":
        return [_copy(item) for item in value]
    return value


def _kind(value):
    """Returns what tells one call from another: shapes, dtypes and scalars."""
    if isinstance(value, np.ndarray):
        return (value.shape, str(value.dtype))
    return tuple(map(_kind, value)) if isinstance(value, list) else value


def _tensors(values):
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)) or type(value).__name__ == "TensorList":
            yield from _tensors(value)


class Recorder:
    """Callable in place of the dispatcher's, which it calls; new kinds of calls are kept."""

    def __init__(self, op, name, function):
        from apex_te.contract import parse

        self.parameters = parse(function.signature).params.values()
        self.place, self.function = (op, name), function

    def __getattr__(self, name):
        return getattr(self.function, name)

    def __call__(self, *args, **kwargs):
        given = dict(zip((p.name for p in self.parameters), args, strict=False)) | kwargs
        tensors = list(_tensors(given.values()))
        recorded = None
        if tensors and all(type(t) is torch.Tensor and t.is_cpu for t in tensors):
            recorded = Recorded({name: _copy(value) for name, value in given.items()})
        self.function(*args, **kwargs)
        if recorded is None:
            return
        key = tuple((n, _kind(value)) for n, value in recorded.before.items())
        known = _calls[self.place]
        if key not in known and len(known) < MOST_CALLS:
            written = [p.name for p in self.parameters if p.is_written]
            recorded.after = {n: _copy(given[n]) for n in written if given.get(n) is not None}
            known[key] = recorded


def pytest_configure():
    function = dispatcher.function
    made: dict[tuple[str, str], Any] = {}

    def recorded(op, name):
        bound = function(op, name)
        if "->" in bound.signature:
            return bound
        return made.setdefault((op, name), Recorder(op, name, bound))

    dispatcher.function = recorded


def pytest_collection_modifyitems(items):
    """Keeps a sample: of each test, and each cast that it takes, ``CASES`` cases on a CPU."""
    cases = collections.Counter[str]()
    kept = []
    for item in (item for item in items if "cuda" not in item.name):
        test = item.nodeid.partition("[")[0]
        if hasattr(item, "callspec") and "cast" in item.callspec.params:
            test += str(item.callspec.params["cast"])
        cases[test] += 1
        if cases[test] <= CASES:
            kept.append(item)
    items[:] = kept


def _same(expected, found):
    if isinstance(expected, list):
        return all(map(_same, expected, found))
    return expected.tobytes() == np.asarray(found).tobytes()


def replay(op, name, recorded):
    """Makes a recorded call in a program of JAX; returns the parameters whose bits differ."""
    import jax

    from apex_te.jax._call import call
    from apex_te.jax._library import contract_of

    def is_tensor(value):
        return isinstance(value, (np.ndarray, np.generic, list))

    kinds = contract_of(op, name).params
    given = recorded.before
    arrays = {n: v for n, v in given.items() if kinds[n].is_tensor and is_tensor(v)}
    static = {n: v for n, v in given.items() if n not in arrays}
    written = jax.jit(lambda arrays: call(op, name, **arrays, **static))(arrays)
    return [n for n, value in recorded.after.items() if not _same(value, written[n])]


def pytest_sessionfinish(session):
    import jax

    jax.config.update("jax_enable_x64", True)
    outcome: dict[str, Any] = {"calls": {}, "different": [], "errors": []}
    for (op, name), known in sorted(_calls.items()):
        outcome["calls"][name] = len(known)
        for key, recorded in known.items():
            if not recorded.after:
                continue
            try:
                different = replay(op, name, recorded)
            except Exception as error:
                outcome["errors"].append([name, repr(key), f"{type(error).__name__}: {error}"])
                continue
            if different:
                outcome["different"].append([name, repr(key), different])
    with open(os.environ["APEX_TE_REPLAY"], "w") as file:
        json.dump(outcome, file, indent=1)
