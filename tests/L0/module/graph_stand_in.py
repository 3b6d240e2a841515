"""A stand-in for CUDA graphs on the CPU: a replay runs the module again over poisoned memory.

It keeps what a graph keeps: static inputs, outputs and gradients, state that is written in place,
and flags that are read when it runs. What is allocated while it runs has no values from before.
"""

import contextlib

import pytest
import torch

from apex_te.graphs import capture as _graph_capture
from apex_te.graphs import graphed_callables as graph


class Graph:
    """A graph whose ``replay`` is set by what captures it."""

    def replay(self):
        raise AssertionError("nothing was captured")

    def reset(self):
        self.replay = None


def _capture_forward(capture, pool):
    capture.outputs, capture.output_spec = capture._run(contextlib.nullcontext())

    def replay():
        for captured in capture.weights:
            captured.begin()
        with _in_place(capture), torch.enable_grad():
            args, kwargs = torch.utils._pytree.tree_unflatten(capture.leaves, capture.spec)
            live, _ = torch.utils._pytree.tree_flatten(capture.call(args, kwargs))
        capture.live = live
        with torch.no_grad():
            for static, value in zip(capture.outputs, live, strict=True):
                if isinstance(static, torch.Tensor):
                    static.copy_(value)

    capture.forward_graph.replay = replay


def _capture_backward(capture, pool, original=_graph_capture.Capture.capture_backward):
    original(capture, pool)
    if capture.backward_graph is None:
        return
    needs = [isinstance(o, torch.Tensor) and o.requires_grad for o in capture.needing]
    statics = [*capture.input_grads, *capture.parameter_grads]

    def replay():
        grads = iter(capture.grad_outputs)
        given = [next(grads) if isinstance(o, torch.Tensor) else None for o in capture.live]
        given = [g if need else None for g, need in zip(given, needs, strict=True)]
        with _in_place(capture):
            found = iter(capture._gradients(capture.live, given))
        sources = [x.requires_grad for x in capture.inputs] + [True] * len(capture.parameters)
        with torch.no_grad():
            for static, wanted in zip(statics, sources, strict=True):
                grad = next(found) if wanted else None
                if static is not None:
                    static.copy_(grad)

    capture.backward_graph.replay = replay


@contextlib.contextmanager
def _in_place(capture):
    """The parameters and the weights' memory that the capture saw."""
    owned = [
        (child._parameters, name, p)
        for child in capture.forward.__self__.modules()
        for name, p in child._parameters.items()
        if p is not None
    ]
    for parameters, name, p in owned:
        parameters[name] = capture.stand_ins[id(p)]
    for module, captured in zip(capture.modules, capture.weights, strict=False):
        module._modes.captured = captured
    try:
        yield
    finally:
        for parameters, name, p in owned:
            parameters[name] = p
        for module in capture.modules:
            module._modes.captured = None


def install(monkeypatch):
    """Has graphs be captured and replayed on the CPU, until ``monkeypatch`` is undone."""

    def forward_then(capture, pool):
        _capture_forward(capture, pool)
        capture.needing = list(capture.outputs)

    quiet = contextlib.nullcontext
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda *args, **kwargs: quiet())
    monkeypatch.setattr(torch.cuda, "device", lambda *args: quiet())
    monkeypatch.setattr(torch.cuda, "stream", lambda *args: quiet())
    monkeypatch.setattr(torch.cuda, "Stream", object)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *args: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(graph, "check_surroundings", lambda: None)
    monkeypatch.setattr(graph, "device_of", lambda *args: torch.device("cpu"))
    monkeypatch.setattr(_graph_capture.Capture, "capture_forward", forward_then)
    monkeypatch.setattr(_graph_capture.Capture, "capture_backward", _capture_backward)


@pytest.fixture
def graphs_on_cpu(monkeypatch, poison):
    """Have ``make_graphed_callables`` work on the CPU."""
    install(monkeypatch)
