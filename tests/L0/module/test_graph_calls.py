"""What make_graphed_callables refuses, what a graph leaves to eager, and what it leaves alone."""

import copy
import io

import pytest
import torch
from checks import assert_same_bits
from graph_models import (
    DELAYED,
    RECIPES,
    WIDTH,
    count_replays,
    data,
    fp8_state,
    graphed,
    layer,
    on_gpu,
)
from graph_stand_in import graphs_on_cpu  # noqa: F401

from apex_te import Linear, fp8_autocast
from apex_te.fp8.delayed.ranks import amax_groups
from apex_te.graphs.capture import recorded
from apex_te.graphs.graphed_callables import make_graphed_callables
from apex_te.recipe import DelayedScaling


def test_needs_a_cuda_device():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(
        RuntimeError, match="make_graphed_callables: CUDA graphs need a CUDA device"
    ):
        make_graphed_callables(Linear(16, 16), (torch.randn(4, 16),))


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"modules": 1}, TypeError, "modules must be a module or a tuple of modules, got int"),
        ({"modules": ()}, ValueError, "modules must be at least one, got none"),
        ({"modules": (1,)}, TypeError, r"modules must be torch\.nn\.Modules, got int"),
        ({"sample_args": 1}, TypeError, "sample_args must be a tuple for each module, got int"),
        ({"sample_kwargs": []}, TypeError, "sample_kwargs must be a dict for each .* got list"),
        ({"num_warmup_iters": 0}, ValueError, "num_warmup_iters must be at least 1, got 0"),
        ({"num_warmup_iters": 1.0}, TypeError, "num_warmup_iters must be an int, got float"),
        ({"allow_unused_input": 1}, TypeError, "allow_unused_input must be a bool, got int"),
        ({"fp8_weight_caching": 1}, TypeError, "fp8_weight_caching must be a bool, got int"),
        ({"fp8_enabled": 1}, TypeError, "enabled must be a bool, got int"),
        ({"fp8_recipe": 1}, TypeError, "fp8_recipe must be a recipe"),
        ({"sample_kwargs": {"is_first_microbatch": True}}, ValueError,
         "must not hold is_first_microbatch"),
    ],
)  # fmt: skip
def test_arguments(kwargs, error, message):
    given = {"modules": Linear(16, 16), "sample_args": (torch.randn(4, 16),), **kwargs}
    with pytest.raises(error, match=message):
        make_graphed_callables(**given)


def test_modules_are_checked():
    module, x = Linear(16, 16), (torch.randn(4, 16),)
    with pytest.raises(ValueError, match="modules must be different ones"):
        make_graphed_callables((module, module), (x, x))
    with pytest.raises(ValueError, match="sample_args must be given for each of 2 modules, got 1"):
        make_graphed_callables((module, Linear(16, 16)), (x,))


@on_gpu
def test_capture_changes_nothing():
    class WithBuffer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = layer(Linear)
            self.register_buffer("calls", torch.zeros(1, device="cuda"))

        def forward(self, x):
            self.calls += 1
            return torch.nn.functional.dropout(self.linear(x), 0.5)

    model, batches = WithBuffer(), data(2)
    x = batches[0, 0].clone().requires_grad_()
    with fp8_autocast(True, DELAYED):
        model(x).backward(batches[0, 1])
    pending, before = amax_groups.pending, fp8_state(model)
    grads = [p.grad.clone() for p in model.parameters()]
    random = torch.cuda.get_rng_state(), torch.get_rng_state()
    make_graphed_callables(model, (x,), fp8_enabled=True, fp8_recipe=DELAYED)
    assert amax_groups.pending == pending == 1
    assert_same_bits(fp8_state(model), before)
    assert_same_bits([p.grad for p in model.parameters()], grads)
    assert model.calls == 1
    assert_same_bits((torch.cuda.get_rng_state(), torch.get_rng_state()), random)
    with fp8_autocast(True, DELAYED):
        first = model(x).detach().clone()
        second = model(x).detach()
    assert not torch.equal(first == 0, second == 0)  # another mask in each replay
    assert model.calls == 3


@on_gpu
def test_a_module_without_parameters_draws_as_before():
    model, x = torch.nn.Dropout(0.5), data(1)[0, 0].requires_grad_()
    random = torch.cuda.get_rng_state()
    make_graphed_callables(model, (x,))
    assert_same_bits(torch.cuda.get_rng_state(), random)
    first, second = model(x).detach().clone(), model(x)
    assert not torch.equal(first == 0, second == 0)
    (grad,) = torch.autograd.grad(second.sum(), x)
    assert torch.equal(grad == 0, second == 0)


@on_gpu
def test_a_history_of_another_length_is_kept():
    model, batches = layer(Linear), data(2)
    with fp8_autocast(True, DelayedScaling(amax_history_len=8)):
        model(batches[0, 0]).backward(batches[0, 1])
    staged = model.fp8_state.amax_history_fwd[0].clone()
    with pytest.warns(UserWarning, match="trimmed from length 8 to 4"):
        graphed(model, DELAYED)
    assert torch.equal(model.fp8_state.amax_history_fwd[0], staged)
    assert torch.equal(model.fp8_state.scale_fwd, torch.ones(3, device="cuda"))


@on_gpu
def test_what_was_not_captured_runs_as_before():
    model = layer(Linear)
    graphed(model, DELAYED)
    x = data(1)[0, 0]
    plain = copy.deepcopy(model)
    assert "forward" not in plain.__dict__ or plain.forward.__self__ is plain

    def replays(call):
        before = count_replays(model)
        call()
        return count_replays(model) - before

    def region(**kwargs):
        with fp8_autocast(**{"fp8_recipe": DELAYED, **kwargs}):
            return model(x)

    assert replays(region) == 1
    assert replays(lambda: model(x)) == 1  # which enters its own region
    assert amax_groups.pending == 1
    before = fp8_state(model)
    with torch.no_grad():
        assert replays(region) == 0
        assert replays(lambda: model(x)) == 0
    assert_same_bits(fp8_state(model), before)
    assert replays(lambda: region(enabled=False)) == 0
    assert torch.equal(
        region(enabled=False), torch.nn.functional.linear(x, model.weight, model.bias)
    )
    assert replays(lambda: region(fp8_recipe=RECIPES["tensorwise"])) == 0
    assert replays(lambda: region(save="small")) == 0
    with torch.autocast("cuda", torch.bfloat16):
        assert replays(region) == 0
    model.eval()
    assert replays(region) == 0
    model.train()
    assert replays(region) == 1
    assert type(pickled(model).forward).__name__ == "method"


def pickled(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@on_gpu
def test_calls_are_checked():
    model = layer(Linear)
    graphed(model, DELAYED)
    x, dy = data(1)[0]
    with pytest.raises(
        ValueError, match=r"Linear: args\[0\] must have shape \[64, 128\] .* \[1, 12"
    ):
        model(x[:1])
    with pytest.raises(
        TypeError, match=r"args\[0\] must be torch.bfloat16 as captured, got torch.f"
    ):
        model(x.float())
    with pytest.raises(TypeError, match=r"args\[0\] must be a tensor as captured, got int"):
        model(1)
    with pytest.raises(ValueError, match="is_first_microbatch must be None with fp8_weight"):
        model(x, is_first_microbatch=True)
    first, second = model(x), model(x)
    with pytest.raises(RuntimeError, match="overwritten by a later forward"):
        first.backward(dy)
    second.backward(dy, retain_graph=True)
    with pytest.raises(RuntimeError, match="overwritten by its own backward"):
        second.backward(dy)
    model.fp8_state.resize(9)
    with fp8_autocast(True, DELAYED), pytest.raises(RuntimeError, match="FP8 state must stay"):
        model(x)
    graphed(model, DELAYED)  # again, while the autograd graphs from before are alive
    model(x).backward(dy)
    model.weight.data = model.weight.data.clone()
    with pytest.raises(RuntimeError, match="parameters must stay where"):
        model(x)


@on_gpu
def test_captures_are_checked():
    x, _ = data(1)[0]
    with fp8_autocast(True, DELAYED), pytest.raises(RuntimeError, match="outside fp8_autocast"):
        graphed(layer(Linear))
    with torch.autocast("cuda"), pytest.raises(RuntimeError, match="cache_enabled=False"):
        graphed(layer(Linear))
    with pytest.raises(ValueError, match="parameters must be on a CUDA device, got cpu"):
        make_graphed_callables(Linear(WIDTH, 16), (x,))
    with pytest.raises(ValueError, match="samples must be on a CUDA device, got cpu"):
        make_graphed_callables(layer(Linear), (x.cpu(),))
    with pytest.raises(ValueError, match=r"without parameters must have a tensor .* for GELU"):
        make_graphed_callables(torch.nn.GELU(), (1.0,))
    inner = torch.nn.Sequential(layer(Linear))
    graphed(inner[0])
    with pytest.raises(ValueError, match="modules must not hold a module that has a graph"):
        graphed(inner)

    class Unused(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = layer(Linear), layer(Linear)

        def forward(self, x):
            return self.used(x)

    with pytest.raises(RuntimeError, match="every input and parameter that requires grad"):
        graphed(Unused())
    model = graphed(Unused(), allow_unused_input=True)
    model(x).sum().backward()
    assert model.unused.weight.grad is None
    assert model.used.weight.grad is not None


class Waiting(torch.nn.Module):
    """Layer whose forward or backward reads the device, which ends a capture."""

    def __init__(self, where):
        super().__init__()
        self.layer, self.where = layer(Linear), where

    def forward(self, x):
        y = torch.nn.functional.dropout(self.layer(x), 0.25)
        if self.where == "forward":
            y.sum().item()
        elif self.where == "backward":
            y.register_hook(lambda grad: grad * float(grad.sum()))
        return y


@on_gpu
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_failed_capture_leaves_nothing_behind(where, shared):
    """Stream, random numbers, memory and earlier graphs go on as before a capture that failed."""
    x = data(1)[0, 0]
    good = graphed(Waiting("nowhere"))
    pool = torch.cuda.graph_pool_handle() if shared else None
    bad, stream = Waiting(where), torch.cuda.current_stream()
    torch.manual_seed(5)
    expected = torch.rand(4, device="cuda"), good(x).clone()
    for _ in range(2):
        with pytest.raises(RuntimeError):
            graphed(bad, pool=pool)
        if shared:
            with pytest.raises(ValueError, match=r"pool must be a new torch\.cuda\.graph_pool"):
                graphed(bad, pool=pool)
            pool = torch.cuda.graph_pool_handle()
        torch.manual_seed(5)
        assert torch.cuda.current_stream() == stream
        assert type(bad.forward).__name__ == "method"
        assert torch.equal(torch.rand(4, device="cuda"), expected[0])
        assert torch.equal(good(x), expected[1])
    bad.where = "nowhere"
    graphed(bad, pool=pool)
    bad(x).sum().backward()
    assert bad.layer.weight.grad.isfinite().all()
    layer(Linear).reset_parameters()


def test_a_failed_capture_is_closed(graphs_on_cpu, monkeypatch):  # noqa: F811
    """The pool is closed and a capture that succeeds follows, which frees random generators."""
    log = []

    class Capturing:
        def __init__(self, graph, pool=None):
            self.pool = pool

        def __enter__(self):
            log.append(("begin", self.pool))

        def __exit__(self, kind, *args):
            if self.pool == "pool":
                raise RuntimeError("operation failed due to a previous error during capture")
            log.append(("end", self.pool))

    monkeypatch.setattr(torch.cuda, "graph", Capturing)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: log.append("stream"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        monkeypatch.setattr(
            torch._C, name, lambda *args, name=name: log.append((name, *args)), raising=False
        )
    with pytest.raises(RuntimeError, match="previous error"), recorded(None, "pool"):
        pass
    assert log == [
        ("begin", "pool"), "stream", ("_cuda_endAllocateToPool", "cpu", "pool"),
        ("_cuda_releasePool", "cpu", "pool"), ("begin", None), ("end", None),
    ]  # fmt: skip
