"""LayerNormMLP with SwiGLU in the epilogues of its products: the bits of products and op apart.

The kernels are for sm_90; elsewhere the ops that the module then calls run product and SwiGLU one
after the other, so that the module's part is tested on every device.
"""

import copy

import pytest
import torch
from checks import assert_same_bits
from graph_models import WIDTH, data, fp8_state, graphed
from schemes import FIRST_STEP
from torch.utils.checkpoint import checkpoint

from apex_te import LayerNormMLP, flush_fp8_state, fp8_autocast, fp8_model_init, fp8_statistics
from apex_te.fp8.scheme import gemm_backend
from apex_te.fp8.scheme.delayed import DelayedScalingQuantizer
from apex_te.module._core import programs
from apex_te.ops import binding
from apex_te.ops import dense_gemm_swiglu as op
from apex_te.recipe import CurrentScaling, DelayedScaling, Format

HIDDEN, FFN, STEPS = 64, 48, 4
DELAYED = DelayedScaling(amax_history_len=4)
SWIGLU = {"activation": "swiglu", "normalization": "RMSNorm", "bias": False}


class Calls:
    """Numbers of runs of both ops, but for those of programs on a GPU."""

    def __init__(self, monkeypatch):
        self.forward = self.backward = 0
        for kind, name in (("forward", "dense_gemm_swiglu"), ("backward", "dense_gemm_swiglu_bwd")):
            functions = binding._functions[name]
            monkeypatch.setattr(functions, name, self._counted(kind, getattr(functions, name)))

    def _counted(self, kind, function):
        def run(*args):
            setattr(self, kind, getattr(self, kind) + 1)
            function(*args)

        return run


@pytest.fixture
def fused(monkeypatch):
    """Has modules call the ops at any size on any device, and counts the calls."""
    monkeypatch.setattr(gemm_backend, "has_dense_fp8", lambda device: True)
    for name in ("_MIN_ROWS", "_MIN_DEPTH", "_MIN_WORK"):
        monkeypatch.setattr(op, name, 0)
    return Calls(monkeypatch)


def build(device, **options):
    torch.manual_seed(3)
    options = {"params_dtype": torch.bfloat16, **SWIGLU, **options}
    return LayerNormMLP(HIDDEN, FFN, device=device, **options)


def train(module, recipe, tokens=37, *, call=None, microbatches=1, cached=False, region=None):
    """Trains a copy with outputs of growing size; returns all that it computes, and its state."""
    module = copy.deepcopy(module)
    generator, seen = torch.Generator().manual_seed(2), []
    device = module.layer_norm_weight.device
    for step in range(STEPS):
        losses = []
        for number in range(microbatches):
            x = torch.randn(tokens, HIDDEN, generator=generator).to(device, torch.bfloat16)
            x.requires_grad_(module.layer_norm_weight.requires_grad)
            with fp8_autocast(fp8_recipe=recipe, **(region or {})):
                y = module(x, number == 0) if cached else (call or module)(*_args(call, module, x))
            losses.append(((y.float() * (step + 1)).square().mean(), x))
            seen.append(y.detach())
        for loss, x in losses:
            loss.backward()
            seen.append(x.grad)
        for p in module.parameters():
            if p.grad is not None:
                seen.append(p.grad)
                with torch.no_grad():
                    p.sub_(0.5 * p.grad)
                p.grad = None
        seen += [x.clone() for x in fp8_state(module)]
    with torch.no_grad(), fp8_autocast(fp8_recipe=recipe):
        seen.append(module(x.detach()))
    return seen


def _args(call, module, x):
    return (x,) if call is None else (module, x)


def assert_equal(expected, actual):
    assert len(expected) == len(actual)
    for a, b in zip(expected, actual, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert_same_bits(a, b)


def compare(module, recipe, monkeypatch, fused, tokens=37, **options):
    """Checks the bits with epilogues against those of products and ops apart."""
    before = (fused.forward, fused.backward)
    actual = train(module, recipe, tokens, **options)
    counts = fused.forward - before[0], fused.backward - before[1]
    with monkeypatch.context() as patch:
        # The own product, whose sums a GPU adds up in another order than cuBLASLt.
        patch.setattr(DelayedScalingQuantizer, "scale_in_advance", lambda self: None)
        assert_equal(train(module, recipe, tokens, **options), actual)
        if module.layer_norm_weight.device.type == "cpu":
            patch.setattr(op, "is_active", False)
            assert_equal(train(module, recipe, tokens, **options), actual)
    return counts


RECIPES = {
    "delayed": DELAYED,
    "first step": FIRST_STEP,
    "E4M3": DelayedScaling(amax_history_len=4, fp8_format=Format.E4M3),
}


@pytest.mark.parametrize("tokens", [32, 37])
@pytest.mark.parametrize("recipe", RECIPES)
def test_bits_equal_products_and_op(device, fused, monkeypatch, recipe, tokens):
    counts = compare(build(device), RECIPES[recipe], monkeypatch, fused, tokens)
    # A first scale needs the tensor. Programs repeat later calls where they may.
    assert counts[0] > 1
    assert counts[1] >= 1


def test_bits_equal_without_programs(device, fused, monkeypatch):
    before = programs.set_enabled(False)
    try:
        counts = compare(build(device), DELAYED, monkeypatch, fused)
    finally:
        programs.set_enabled(before)
    assert counts == (STEPS + 1, STEPS)


FROZEN = {
    "all but FC2": (["layer_norm_weight", "fc1_weight"], 1, 0),
    "FC2": (["fc2_weight"], STEPS + 1, STEPS),
    "FC1": (["fc1_weight"], STEPS + 1, STEPS),
    "norm": (["layer_norm_weight"], STEPS + 1, STEPS),
}


@pytest.mark.parametrize("which", FROZEN)
def test_frozen_weights(device, fused, monkeypatch, which):
    names, *expected = FROZEN[which]
    module = build(device)
    for name in names:
        getattr(module, name).requires_grad_(False)
    monkeypatch.setattr(programs, "_enabled", False)
    assert list(compare(module, DELAYED, monkeypatch, fused)) == expected


USES = {
    "microbatches": {"microbatches": 2},
    "cached weights": {"microbatches": 2, "cached": True},
    "columnwise weights": {"region": {"keep_columnwise_weights": True}},
}


@pytest.mark.parametrize("use", USES)
def test_uses(device, fused, monkeypatch, use):
    assert min(compare(build(device), DELAYED, monkeypatch, fused, **USES[use])) > 0


@pytest.mark.parametrize("recipe", ["delayed", "first step"])
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
def test_recompute_is_equal(device, fused, recipe, own, reentrant):
    def repeated(module, x):
        return checkpoint(module, x, use_reentrant=reentrant)

    module, recipe = build(device), RECIPES[recipe]
    expected = train(module, recipe)
    if own:
        module.checkpoint = True
        assert_equal(expected, train(module, recipe, microbatches=1))
    else:
        assert_equal(expected, train(module, recipe, call=repeated))
    assert fused.backward > 0


def test_weights_held_in_fp8(device, fused, monkeypatch):
    with fp8_model_init():
        module = build(device)
    for p in module.parameters():
        p.requires_grad_(p.dim() == 1)  # no optimizer here
    assert min(compare(module, DELAYED, monkeypatch, fused)) > 0


@pytest.mark.parametrize("delayed", [True, False])
def test_main_grad(device, fused, monkeypatch, delayed):
    found = []
    for active in (True, False):
        monkeypatch.setattr(op, "is_active", active and device.type == "cpu")
        module = build(device, fuse_wgrad_accumulation=True, delay_wgrad_compute=delayed)
        for p in module.parameters():
            p.main_grad = torch.zeros_like(p, dtype=torch.float32)
        for _ in range(2):
            x = torch.linspace(-1, 1, 32 * HIDDEN, device=device).view(32, HIDDEN).bfloat16()
            with fp8_autocast(fp8_recipe=DELAYED):
                y = module(x.requires_grad_())
            y.backward(torch.ones_like(y))
            if delayed:
                module.backward_dw()
        found.append([x.grad, *(p.main_grad for p in module.parameters())])
    assert_equal(*found)
    assert (fused.backward > 0) == (device.type == "cpu")


def test_statistics_see_the_same_tensors(device, fused):
    module, x = build(device), torch.randn(37, HIDDEN, device=device).bfloat16()
    x.requires_grad_()
    seen = []
    for observe in (False, True):
        copied = torch.nn.Sequential(copy.deepcopy(module))
        stats = fp8_statistics(copied)
        if observe:
            stats.__enter__()
        for _ in range(3):
            with fp8_autocast(fp8_recipe=DELAYED):
                y = copied(x)
            y.float().square().sum().backward()
        if observe:
            stats.__exit__(None, None, None)
            noted = stats.to_dict()
            assert len(noted["0.fc2.input"]["amax"]) == len(noted["0.fc1.grad_output"]["amax"]) == 3
        seen.append([y.detach(), *(p.grad for p in copied.parameters()), *fp8_state(copied)])
    assert_equal(*seen)


def test_saves_no_activation(device, fused, monkeypatch):
    """Backward makes the activation's columnwise copy: forward saves one byte an element less."""
    module, sizes = build(device), []
    x = torch.randn(64, HIDDEN, device=device).bfloat16().requires_grad_()
    for active in (True, False):
        monkeypatch.setattr(op, "is_active", active)
        saved = {}

        def keep(t, saved=saved):
            saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with (
            fp8_autocast(fp8_recipe=DELAYED),
            torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t),
        ):
            module(x)
        sizes.append(sum(saved.values()))
    assert sizes[1] - sizes[0] > 0.9 * 64 * FFN


OTHERS = {
    "bias": ({"bias": True}, DELAYED),
    "geglu": ({"activation": "geglu"}, DELAYED),
    "gelu": ({"activation": "gelu"}, DELAYED),
    "float32": ({"params_dtype": torch.float32}, DELAYED),
    "tensorwise": ({}, CurrentScaling()),
    "split fprop": ({}, DelayedScaling(use_split_accumulator=(True, True, True))),
    "fast dgrad": ({}, DelayedScaling(use_split_accumulator=(False, False, True))),
    "bf16 wgrad": ({}, DelayedScaling(override_linear_precision=(False, False, True))),
}


@pytest.mark.parametrize("other", OTHERS)
def test_other_calls_keep_their_products(fused, other):
    options, recipe = OTHERS[other]
    module = build("cpu", **options)
    x = torch.randn(32, HIDDEN, dtype=module.fc1_weight.dtype, requires_grad=True)
    with fp8_autocast(fp8_recipe=recipe):
        module(x).sum().backward()
    assert (fused.forward, fused.backward) == (0, 0)


def test_sizes_and_switch(monkeypatch):
    assert op.gains(8192, 14336, 4096)
    assert op.gains(2048, 14336, 4096)
    assert op.gains(8192, 8192, 2048)
    assert not op.gains(1024, 14336, 4096)
    assert not op.gains(8192, 14336, 1024)
    assert not op.gains(2048, 8192, 2048)
    assert not op.gains(8192, 14328, 4096)
    assert not op.gains(8192, 14336, 4104)
    monkeypatch.setattr(op, "is_active", False)
    assert not op.gains(8192, 14336, 4096)


def test_not_without_kernels(monkeypatch):
    backend = gemm_backend.FP8Gemm((False, True, True), torch.device("cpu"))
    assert not backend.fuses_swiglu


@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.long)])
def test_compiled_is_equal(fused, monkeypatch, dynamic):
    monkeypatch.setattr(programs, "_enabled", False)
    module = build("cpu")
    expected = train(module, DELAYED)
    before = fused.forward

    def compiled(module, x):
        function = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=dynamic)
        return function(x)

    assert_equal(expected, train(module, DELAYED, call=compiled))
    assert fused.forward > before


@pytest.mark.cuda
@pytest.mark.cuda
class TestOnGPU:
    """Tests of the kernels in the module, which only an sm_90 GPU has."""

    @pytest.fixture(autouse=True)
    def _has_kernels(self):
        if torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("no kernels for this GPU")

    def step(self, module, x, dy):
        with fp8_autocast(fp8_recipe=DELAYED):
            y = module(x)
        y.backward(dy)
        found = [t.clone() for t in (y.detach(), x.grad, *(p.grad for p in module.parameters()))]
        x.grad = None
        module.zero_grad()
        return found

    def test_large_layer(self, monkeypatch):
        """At sizes that take the kernels by themselves, against the products of cuBLASLt."""
        torch.manual_seed(0)
        module = LayerNormMLP(4096, 12288, device="cuda", params_dtype=torch.bfloat16, **SWIGLU)
        x = torch.randn(2055, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        dy = torch.randn_like(x)
        results = []
        for active in (True, False):
            monkeypatch.setattr(op, "is_active", active)
            calls = Calls(monkeypatch)
            copied = copy.deepcopy(module)
            for _ in range(3):
                found = self.step(copied, x, dy)
            assert (calls.forward > 0) == active
            results.append([*found, *fp8_state(copied)])
        for own, other in zip(*results, strict=True):
            error = (own.double() - other.double()).norm()
            assert error <= 0.02 * other.double().norm()

    @pytest.mark.parametrize("kind", ["graph", "compiled"])
    def test_graph_and_compiled_are_equal(self, fused, kind):
        torch.manual_seed(2)
        module = LayerNormMLP(WIDTH, FFN, device="cuda", params_dtype=torch.bfloat16, **SWIGLU)
        other = copy.deepcopy(module)
        compiled = torch.compile(other, fullgraph=True)
        run = graphed(other, DELAYED) if kind == "graph" else compiled
        results = []
        for called, owner in ((module, module), (run, other)):
            flush_fp8_state()
            found = []
            for x, dy in data(6):
                found += self.step(called, x.clone().requires_grad_(), dy)
            flush_fp8_state()
            results.append(found + fp8_state(owner))
        assert_equal(*results)
        assert fused.backward > 0
