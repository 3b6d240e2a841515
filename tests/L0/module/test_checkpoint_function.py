"""apex_te.distributed.checkpoint: bitwise what the same function gives without it."""

import pytest
import torch
from schemes import SCHEMES
from torch.nn import functional
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from apex_te import fp8_autocast, is_fp8_enabled
from apex_te.distributed import CudaRNGStatesTracker, checkpoint
from apex_te.fp8.delayed.ranks import amax_groups
from apex_te.fp8.delayed.state import TENSORS
from apex_te.module.linear import Linear
from apex_te.ops.gemm_common import fp8_gemm_count
from apex_te.recipe import DelayedScaling

reentrant = pytest.mark.parametrize("use_reentrant", [True, False])
NO_GPU = not torch.cuda.is_available()


def gradients(out, *inputs):
    out.sum().backward()
    return [out.detach(), *(t.grad for t in inputs)]


@reentrant
def test_random_states(use_reentrant, device):
    if device.type == "cpu" and not NO_GPU:
        pytest.skip("the tracker follows the GPU's generator where there is one")
    tracker = CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 5)
    start = tracker.get_states()

    def function(x):
        x = functional.dropout(x, 0.5)
        with tracker.fork():
            return functional.dropout(x * x, 0.5)

    def run(checkpointed):
        tracker.set_states(start)
        torch.manual_seed(1)
        x = torch.arange(64.0, device=device).requires_grad_()
        if checkpointed:
            out = checkpoint(
                function, x, get_rng_state_tracker=lambda: tracker, use_reentrant=use_reentrant
            )
        else:
            out = function(x)
        with tracker.fork():
            between = torch.rand(2, device=device)
        found = gradients(out, x)
        with tracker.fork():
            return [*found, between, torch.rand(2, device=device), torch.rand(2, device=device)]

    for a, b in zip(run(True), run(False), strict=True):
        assert torch.equal(a, b)


@reentrant
def test_any_callable_and_keywords(use_reentrant):
    calls = []

    def function(x, scale, *, y, flag=False):
        calls.append(flag)
        return x * scale * y

    x, y = (torch.rand(3, requires_grad=True) for _ in range(2))
    out = checkpoint(function, x, 2.0, y=y, flag=True, use_reentrant=use_reentrant)
    out.sum().backward()
    assert calls == [True, True]
    assert torch.equal(x.grad, 2 * y)
    assert torch.equal(y.grad, 2 * x)


def test_earlier_order_warns():
    x = torch.rand(3, requires_grad=True)
    with pytest.warns(DeprecationWarning, match="by keyword"):
        out = checkpoint(torch.square, False, None, None, x)
    out.sum().backward()
    assert torch.equal(x.grad, 2 * x)
    warns = pytest.warns(DeprecationWarning, match="by keyword")
    with warns, pytest.raises(ValueError, match="tp_group must be given with distribute_saved"):
        checkpoint(torch.square, True, None, None, x)


def test_options_go_to_torch():
    seen = []

    class Context:
        def __init__(self, name):
            self.name = name

        def __enter__(self):
            seen.append(self.name)

        def __exit__(self, *exc):
            return None

    x = torch.rand(3, requires_grad=True)
    out = checkpoint(
        torch.square,
        x,
        use_reentrant=False,
        context_fn=lambda: (Context("forward"), Context("again")),
    )
    out.sum().backward()
    assert seen == ["forward", "again"]


@reentrant
def test_autocast_and_region_are_repeated(use_reentrant):
    seen = []

    def function(x):
        seen.append((is_fp8_enabled(), torch.is_autocast_enabled("cpu")))
        return x * x

    x = torch.rand(3, requires_grad=True)
    with fp8_autocast(), torch.autocast("cpu", torch.bfloat16):
        out = checkpoint(function, x, use_reentrant=use_reentrant)
    out.sum().backward()
    assert seen == [(True, True)] * 2
    assert not is_fp8_enabled()


def train(recompute, device):
    """Two microbatches in flight, each in a region of its own: scales move before backward."""
    amax_groups.pending = 0
    torch.manual_seed(1)
    layers = torch.nn.ModuleList(Linear(16, 16, device=device) for _ in range(2))
    recipe = DelayedScaling(amax_history_len=2, amax_compute_algo="most_recent")
    found = []

    def block(x):
        return layers[1](torch.relu(layers[0](x)))

    for step in range(3):
        outs, inputs = [], []
        for microbatch in range(2):
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(9 * step + microbatch))
            x = (x * 10.0**microbatch).to(device).requires_grad_()
            with fp8_autocast(True, recipe):
                outs.append(recompute(block, x))
            inputs.append(x)
        for out, x in zip(outs, inputs, strict=True):
            out.square().sum().backward()
            found.append(x.grad)
        found += [p.grad.clone() for p in layers.parameters()]
        found += [getattr(layer.fp8_state, name).clone() for layer in layers for name in TENSORS]
    return found


@reentrant
def test_scales_of_the_first_run_are_used_again(use_reentrant, device):
    plain = train(lambda block, x: block(x), device)
    ours = train(lambda block, x: checkpoint(block, x, use_reentrant=use_reentrant), device)
    for a, b in zip(plain, ours, strict=True):
        assert torch.equal(a, b)


def test_rejects():
    x = torch.ones(3)
    with pytest.raises(ValueError, match="tp_group must be given with distribute_saved_activ"):
        checkpoint(torch.square, x, distribute_saved_activations=True)
    with pytest.raises(TypeError, match="distribute_saved_activations must be a bool, got int"):
        checkpoint(torch.square, x, distribute_saved_activations=1)
    with pytest.raises(TypeError, match="tp_group must be a torch"):
        checkpoint(torch.square, x, tp_group=object())


def test_compiles():
    def function(x):
        return checkpoint(lambda t: t.sin().cos(), x)

    x = torch.rand(3, requires_grad=True)
    out = torch.compile(function, backend="aot_eager", fullgraph=True)(x)
    (grad,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(grad, -x.sin().sin() * x.cos())


def test_earlier_name_of_the_tracker():
    tracker = CudaRNGStatesTracker()
    x = torch.ones(3, requires_grad=True)
    out = checkpoint(lambda v: v * 2, x, get_cuda_rng_tracker=lambda: tracker)
    assert out.tolist() == [2.0] * 3
    with pytest.raises(TypeError, match="get_cuda_rng_tracker must not be given beside get_rng"):
        checkpoint(
            torch.sin, x, get_cuda_rng_tracker=lambda: tracker, get_rng_state_tracker=lambda: None
        )


@pytest.mark.parametrize("kind", ["torch", "torch, reentrant", "apex_te", "apex_te, reentrant"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_regions_inside_of_the_function(kind, scheme, device):
    """The function enters FP8 itself, and a reentrant checkpoint runs it under no_grad first."""
    if kind == "torch, reentrant" and SCHEMES[scheme].keeps_state:
        pytest.skip("torch does not say that the forward under no_grad is a training's")
    options = {"use_reentrant": "reentrant" in kind}
    seen = []
    for run in (None, checkpoint if "apex_te" in kind else torch_checkpoint):
        amax_groups.pending = 0
        torch.manual_seed(1)
        module = Linear(32, 48, device=device)

        def function(x, module=module):
            with fp8_autocast(fp8_recipe=SCHEMES[scheme]):
                return module(x).square()

        for step in range(4):
            torch.manual_seed(step)
            x = (torch.randn(16, 32) * (step + 1)).to(device).requires_grad_()
            before = fp8_gemm_count()
            out = function(x) if run is None else run(function, x, **options)
            out.sum().backward()
            seen.append([out.detach(), x.grad, module.weight.grad, module.bias.grad])
            module.zero_grad()
            count = fp8_gemm_count() - before
            if device.type == "cpu" and scheme in ("delayed", "tensorwise"):
                assert count == (3 if run is None else 4)
        state = module.fp8_state
        seen[-1] += [getattr(state, name).clone() for name in TENSORS] if state.allocated else []
    for plain, again in zip(seen[:4], seen[4:], strict=True):
        assert len(plain) == len(again)
        for a, b in zip(plain, again, strict=True):
            assert torch.equal(a, b)


@reentrant
@pytest.mark.parametrize("frozen", [True, False])
def test_returned_parameters_stay_leaves(use_reentrant, frozen, device):
    """A module's returned bias gets its gradient, and is as before in the next step."""
    found = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        module = Linear(16, 16, return_bias=True, device=device)
        module.bias.requires_grad_(not frozen)
        for _ in range(2):
            x = torch.ones(4, 16, device=device).requires_grad_()
            if checkpointed:
                out, bias = checkpoint(module, x, use_reentrant=use_reentrant)
            else:
                out, bias = module(x)
            assert module.bias.is_leaf
            assert module.bias.requires_grad is not frozen
            (out * bias.exp()).sum().backward()
        found.append([x.grad, module.weight.grad, module.bias.grad])
    for a, b in zip(*found, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)
