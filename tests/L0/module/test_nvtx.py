"""NVTX ranges: where they begin and end, their names, and that they are off unless asked for."""

import os
import subprocess
import sys

import pytest
import torch
from checks import needs_cuda
from torch.nn.modules import module as module_hooks

import apex_te.nvtx as nvtx
from apex_te import Linear, fp8_autocast
from apex_te.module.layer_norm import LayerNorm
from apex_te.module.layer_norm_mlp import LayerNormMLP
from apex_te.recipe import DelayedScaling

RECIPE = DelayedScaling(amax_history_len=4)


@pytest.fixture
def ranges(monkeypatch):
    """Ranges on; what they would tell the profiler, in order."""
    log, open_ranges = [], []

    def push(text):
        open_ranges.append(text)
        log.append(f"+ {text}")

    def start(text):
        log.append(f"+ {text}")
        return text

    monkeypatch.setattr(nvtx, "_is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", push)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: log.append(f"- {open_ranges.pop()}"))
    monkeypatch.setattr(torch.cuda.nvtx, "range_start", start)
    monkeypatch.setattr(torch.cuda.nvtx, "range_end", lambda text: log.append(f"- {text}"))
    nvtx.enable(True)
    yield log
    nvtx.enable(False)
    assert not open_ranges


def both(text):
    return [f"+ {text}", f"- {text}"]


def test_off_by_default_and_nothing_is_hooked():
    assert not nvtx.is_enabled()
    assert not module_hooks._has_any_global_hook()


@pytest.mark.parametrize("fp8", [True, False])
@pytest.mark.parametrize("needs_grad", [True, False])
def test_forward_and_backward(ranges, fp8, needs_grad):
    model = torch.nn.Sequential(Linear(16, 16, name="first"), torch.nn.ReLU(), LayerNorm(16))
    x = torch.randn(4, 16, requires_grad=needs_grad)
    with fp8_autocast(fp8, RECIPE):
        out = model(x)
    assert ranges == [*both("first forward"), *both("LayerNorm forward")]
    ranges.clear()
    out.sum().backward()
    assert ranges == [*both("LayerNorm backward"), *both("first backward")]


def test_submodules_nest_and_layers_have_their_number(ranges):
    class Layer(LayerNormMLP):
        layer_number = 3

        def __init__(self):
            super().__init__(16, 32)
            self.head = Linear(16, 16)

        def forward(self, x):
            return self.head(super().forward(inp=x)) + x

    layer = Layer()
    x = torch.randn(4, 16, requires_grad=True)
    layer(x=x).sum().backward()
    own, head = "Layer 3", "Linear"
    assert ranges == [
        f"+ {own} forward", *both(f"{head} forward"), f"- {own} forward",
        f"+ {own} backward", *both(f"{head} backward"), f"- {own} backward",
    ]  # fmt: skip


def test_results_and_in_place_use_stay(ranges):
    model, x = Linear(16, 16), torch.randn(4, 16, requires_grad=True)
    results = []
    for on in (True, False):
        nvtx.enable(on)
        x.grad = None
        with fp8_autocast(True, DelayedScaling(interval=9)):
            out = torch.relu_(model(x))
        out.sum().backward()
        results += [(out.detach(), x.grad)]
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_ranges_end_when_a_forward_raises_or_nothing_is_differentiated(ranges):
    model = Linear(16, 16)
    with pytest.raises(ValueError, match="last dimension"):
        model(torch.randn(4, 15))
    with torch.no_grad():
        model(torch.randn(4, 16))
    assert ranges == both("Linear forward") * 2


def test_recompute(ranges):
    model, x = Linear(16, 16), torch.randn(4, 16, requires_grad=True)
    torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).sum().backward()
    assert ranges == [
        *both("Linear forward"), "+ Linear backward", *both("Linear forward"), "- Linear backward",
    ]  # fmt: skip


def test_other_modules_have_none(ranges):
    torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))(torch.randn(2, 4))
    assert ranges == []


@pytest.mark.filterwarnings("ignore:Using .torch.compile")
def test_compile_is_left_alone(ranges):
    compiled = torch.compile(Linear(16, 16), fullgraph=True, backend="aot_eager")
    with fp8_autocast(True, RECIPE):
        compiled(torch.randn(4, 16)).sum().backward()
    assert ranges == []


def test_switching(monkeypatch):
    with pytest.raises(TypeError, match="enabled must be a bool, got int"):
        nvtx.enable(1)
    monkeypatch.setattr(nvtx, "_is_available", lambda: False)
    with pytest.raises(RuntimeError, match="NVTX needs a CUDA build of PyTorch"):
        nvtx.enable(True)
    nvtx.enable(False)
    monkeypatch.setattr(nvtx, "_is_available", lambda: True)
    nvtx.enable(True)
    nvtx.enable()
    assert nvtx.is_enabled()
    assert len(module_hooks._global_forward_hooks) == 1
    nvtx.enable(False)
    assert not nvtx.is_enabled()
    assert not module_hooks._has_any_global_hook()


@pytest.mark.long
@pytest.mark.cover(0)
@pytest.mark.parametrize(("value", "expected"), [("1", True), ("off", False), ("", False)])
def test_environment(value, expected):
    script = (
        "import warnings; warnings.simplefilter('error', UserWarning)\n" if not expected else ""
    )
    script += "import torch; torch._C._nvtx = None\nimport apex_te.nvtx as n; print(n.is_enabled())"
    environment = dict(os.environ, APEX_TE_NVTX=value, PYTHONPATH=os.pathsep.join(sys.path))
    run = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False
    )
    assert run.stdout.strip() == str(expected), run.stderr


def test_environment_is_checked_and_missing_nvtx_is_said(monkeypatch):
    monkeypatch.setenv("APEX_TE_NVTX", "maybe")
    with pytest.raises(ValueError, match=r"APEX_TE_NVTX must be .* got 'maybe'"):
        nvtx._from_environment()
    monkeypatch.setenv("APEX_TE_NVTX", "1")
    monkeypatch.setattr(nvtx, "_is_available", lambda: False)
    with pytest.warns(UserWarning, match="NVTX needs a CUDA build"):
        nvtx._from_environment()
    assert not nvtx.is_enabled()


@needs_cuda
@pytest.mark.cuda
def test_on_a_gpu():
    model = torch.nn.Sequential(Linear(16, 16), LayerNorm(16)).cuda()
    x = torch.randn(4, 16, device="cuda", requires_grad=True)
    nvtx.enable(True)
    try:
        with fp8_autocast(True, RECIPE):
            model(x).sum().backward()
    finally:
        nvtx.enable(False)
    assert x.grad is not None
