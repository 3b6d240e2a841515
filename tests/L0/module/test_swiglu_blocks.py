"""LayerNormMLP with a gated activation cast to 1x128 blocks in one kernel: the bits of two ops."""

import copy

import pytest
import torch
from checks import assert_same_bits, needs_cuda
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from apex_te import LayerNormMLP, fp8_autocast, fp8_model_init, fp8_statistics
from apex_te.fp8.scheme.base import Quantizer
from apex_te.fp8.scheme.block import BlockQuantizer
from apex_te.module._core import programs
from apex_te.ops import swiglu_block
from apex_te.recipe import BlockScaling, Format

HIDDEN, FFN, STEPS = 64, 128, 4
BLOCKS = BlockScaling()
RECIPES = {
    "block": BLOCKS,
    "E4M3": BlockScaling(fp8_format=Format.E4M3),
    "any scale": BlockScaling(pow2=False),
}


def build(device, ffn=FFN, **options):
    torch.manual_seed(3)
    options = {"activation": "swiglu", "bias": False, "params_dtype": torch.bfloat16, **options}
    return LayerNormMLP(HIDDEN, ffn, device=device, **options)


def train(module, recipe, tokens=37, call=None):
    """Trains a copy; returns all that it computes."""
    module = copy.deepcopy(module)
    generator, seen = torch.Generator().manual_seed(2), []
    for step in range(STEPS):
        x = torch.randn(tokens, module.layer_norm_weight.numel(), generator=generator)
        x = x.to(module.layer_norm_weight).requires_grad_()
        with fp8_autocast(fp8_recipe=recipe):
            y = module(x) if call is None else call(module, x)
        ((step + 1) * y.float()).square().mean().backward()
        seen += [y.detach(), x.grad]
        for p in module.parameters():
            if p.grad is not None:
                seen.append(p.grad)
                with torch.no_grad():
                    p.sub_(0.5 * p.grad)
                p.grad = None
    with torch.no_grad(), fp8_autocast(fp8_recipe=recipe):
        seen.append(module(x.detach()))
    return seen


def assert_equal(expected, actual):
    assert len(expected) == len(actual)
    for a, b in zip(expected, actual, strict=True):
        assert_same_bits(a, b)


@pytest.fixture
def counts(monkeypatch):
    """Numbers of calls of both ops, but for those of programs."""
    found = dict.fromkeys(("swiglu_fwd_block", "swiglu_bwd_block"), 0)

    def counted(name, function):
        def run(*args, **options):
            found[name] += 1
            return function(*args, **options)

        return run

    for name in found:
        monkeypatch.setattr(swiglu_block, name, counted(name, getattr(swiglu_block, name)))
    return found


def compare(module, recipe, monkeypatch, **options):
    """Checks the bits against those of the activation and the cast as two ops."""
    actual = train(module, recipe, **options)
    with monkeypatch.context() as patch:
        patch.setattr(BlockQuantizer, "produce", Quantizer.produce)
        assert_equal(train(module, recipe, **options), actual)


@pytest.mark.parametrize("tokens", [32, 37])
@pytest.mark.parametrize("recipe", RECIPES)
def test_bits_equal_two_ops(device, poison, counts, monkeypatch, recipe, tokens):
    compare(build(device), RECIPES[recipe], monkeypatch, tokens=tokens)
    assert min(counts.values()) > 0


@pytest.mark.parametrize("activation", ["swiglu", "geglu", "reglu", "glu"])
def test_activations(device, counts, monkeypatch, activation):
    compare(build(device, activation=activation), BLOCKS, monkeypatch)
    assert min(counts.values()) > 0


@pytest.mark.parametrize(
    "options", [{"bias": True}, {"ffn": 80}, {"params_dtype": torch.float32}], ids=str
)
def test_what_runs_two_ops_in_part(device, counts, monkeypatch, options):
    """Column sums for a bias, an odd width, float32."""
    compare(build(device, **options), BLOCKS, monkeypatch)
    assert counts["swiglu_fwd_block"] > 0
    assert (counts["swiglu_bwd_block"] > 0) == ("bias" not in options)


def test_without_programs(device, counts, monkeypatch):
    before = programs.set_enabled(False)
    try:
        compare(build(device), BLOCKS, monkeypatch)
    finally:
        programs.set_enabled(before)
    assert counts == {"swiglu_fwd_block": STEPS + 1, "swiglu_bwd_block": STEPS}


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
def test_recompute_is_equal(device, counts, own, reentrant):
    def repeated(module, x):
        return checkpoint(module, x, use_reentrant=reentrant)

    module = build(device)
    expected = train(module, BLOCKS)
    if own:
        module.checkpoint = True
    assert_equal(expected, train(module, BLOCKS, call=None if own else repeated))


@pytest.mark.parametrize("weight", ["fc1_weight", "fc2_weight"])
def test_frozen_weights(device, monkeypatch, weight):
    module = build(device)
    getattr(module, weight).requires_grad_(False)
    compare(module, BLOCKS, monkeypatch)


def test_weights_held_in_fp8(device, monkeypatch):
    with fp8_model_init(recipe=BLOCKS):
        module = build(device)
    for p in module.parameters():
        p.requires_grad_(p.dim() == 1)  # no optimizer here
    compare(module, BLOCKS, monkeypatch)


def test_statistics_see_the_same_tensors(device, monkeypatch):
    noted = []
    for fused in (True, False):
        module = torch.nn.Sequential(build(device))
        x = torch.linspace(-1, 1, 37 * HIDDEN, device=device).view(37, HIDDEN).bfloat16()
        if not fused:
            monkeypatch.setattr(BlockQuantizer, "produce", Quantizer.produce)
        with fp8_statistics(module) as stats:
            for _ in range(3):
                with fp8_autocast(fp8_recipe=BLOCKS):
                    y = module(x.requires_grad_())
                y.float().square().sum().backward()
        noted.append(stats.to_dict())
    assert noted[0] == noted[1]
    assert noted[0]["0.fc2.input"]["amax"]


class Allocated(TorchDispatchMode):
    """Shapes of the bfloat16 tensors that ops make."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dtype is torch.bfloat16:
            self.shapes.append(tuple(out.shape))
        return out


def test_no_activation_in_bf16(device):
    """Forward makes no [tokens, FFN], backward only the gradient of it and no [tokens, 2 FFN]."""
    module = build(device)
    x = torch.randn(48, HIDDEN, device=device).bfloat16().requires_grad_()
    with Allocated() as forward, fp8_autocast(fp8_recipe=BLOCKS):
        y = module(x)
    with Allocated() as backward:
        y.backward(torch.ones_like(y))
    assert (48, 2 * FFN) in forward.shapes  # the activation's input, which is saved
    assert (48, FFN) not in forward.shapes
    assert (48, FFN) in backward.shapes
    assert (48, 2 * FFN) not in backward.shapes


@needs_cuda
def test_peak_memory(monkeypatch):
    tokens, ffn = 1024, 2048
    peaks = []
    for fused in (True, False):
        if not fused:
            monkeypatch.setattr(BlockQuantizer, "produce", Quantizer.produce)
        module = build("cuda", ffn=ffn)  # another module's programs run the other ops
        found = []
        for grad in (False, True):
            for _ in range(4):  # a program's first runs keep what they make
                x = torch.zeros(tokens, HIDDEN, device="cuda").bfloat16().requires_grad_()
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                with torch.set_grad_enabled(grad), fp8_autocast(fp8_recipe=BLOCKS):
                    y = module(x)
                if grad:
                    y.backward(torch.ones_like(y))
                peak = torch.cuda.max_memory_allocated() - before
                del x, y
                module.zero_grad()
            found.append(peak)
        peaks.append(found)
    assert peaks[1][0] - peaks[0][0] >= 2 * tokens * ffn // 2
    assert peaks[0][1] < peaks[1][1]
