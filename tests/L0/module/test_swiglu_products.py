"""LayerNormMLP with SwiGLU fused into its products, or into a cast to 1x128 blocks: bits as apart.

The products' kernels are for sm_90; elsewhere the ops that the module then calls run product and
SwiGLU one after the other, so that the module's part is tested on every device.
"""

import copy

import pytest
import torch
from checks import assert_same_bits, needs_cuda
from graph_models import WIDTH, data, fp8_state, graphed
from schemes import FIRST_STEP
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from apex_te import LayerNormMLP, flush_fp8_state, fp8_autocast, fp8_model_init, fp8_statistics
from apex_te.fp8.scheme import gemm_backend
from apex_te.fp8.scheme.base import Quantizer
from apex_te.fp8.scheme.block import BlockQuantizer
from apex_te.fp8.scheme.current import CurrentScalingQuantizer
from apex_te.fp8.scheme.delayed import DelayedScalingQuantizer
from apex_te.module._core import programs
from apex_te.ops import binding, swiglu_block
from apex_te.ops import dense_gemm_swiglu as op
from apex_te.recipe import BlockScaling, CurrentScaling, DelayedScaling, Format

HIDDEN, FFN, BLOCK_FFN, STEPS = 64, 48, 128, 4
DELAYED, BLOCKS = DelayedScaling(amax_history_len=4), BlockScaling()
SWIGLU = {"activation": "swiglu", "normalization": "RMSNorm", "bias": False}
GELU = {"activation": "gelu", "normalization": "LayerNorm", "bias": True}
RECIPES = {
    "delayed": DELAYED,
    "first step": FIRST_STEP,
    "E4M3": DelayedScaling(amax_history_len=4, fp8_format=Format.E4M3),
    "tensorwise": CurrentScaling(),
    "tensorwise of powers of two": CurrentScaling(pow2=True, fp8_format=Format.E4M3),
    "blocks": BLOCKS,
    "blocks in E4M3": BlockScaling(fp8_format=Format.E4M3),
    "blocks of any scale": BlockScaling(pow2=False),
    "blockwise 1x128": BlockScaling(wgrad_input="1x128"),
}
every = pytest.mark.parametrize("recipe", RECIPES)
one_of_each = pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blocks"])


class Calls:
    """Numbers of runs of the ops that fuse, but for those of programs on a GPU."""

    def __init__(self, monkeypatch):
        self.forward = self.backward = 0
        self._monkeypatch = monkeypatch
        for kind, end in (("forward", ""), ("backward", "_bwd")):
            for name in ("dense_gemm_gelu", "dense_gemm_swiglu", "dense_gemm_swiglu_held"):
                self._count(kind, binding._functions[name + end], name + end)
        for kind, name in (("forward", "swiglu_fwd_block"), ("backward", "swiglu_bwd_block")):
            self._count(kind, swiglu_block, name)

    def _count(self, kind, owner, name):
        function = getattr(owner, name)

        def run(*args, **options):
            setattr(self, kind, getattr(self, kind) + 1)
            return function(*args, **options)

        self._monkeypatch.setattr(owner, name, run)

    def numbers(self):
        return self.forward, self.backward


@pytest.fixture
def fused(monkeypatch):
    """Has modules call the ops at any size on any device, and counts the calls."""
    monkeypatch.setattr(gemm_backend, "has_dense_fp8", lambda device: True)
    for name in ("_MIN_ROWS", "_MIN_DEPTH", "_MIN_WORK"):
        monkeypatch.setattr(op, name, 0)
    return Calls(monkeypatch)


def build(device, recipe=DELAYED, **options):
    torch.manual_seed(3)
    options = {"params_dtype": torch.bfloat16, **SWIGLU, **options}
    ffn = options.pop("ffn", BLOCK_FFN if isinstance(recipe, BlockScaling) else FFN)
    return LayerNormMLP(HIDDEN, ffn, device=device, **options)


def train(module, recipe, tokens=37, *, call=None, microbatches=1, cached=False, region=None):
    """Trains a copy with outputs of growing size; returns all that it computes, and its state."""
    module = copy.deepcopy(module)
    generator, seen = torch.Generator().manual_seed(2), []
    for step in range(STEPS):
        losses = []
        for number in range(microbatches):
            x = torch.randn(tokens, HIDDEN, generator=generator)
            x = x.to(module.layer_norm_weight)
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


def apart(recipe, device):
    """What has a module run its products, activations and casts one after the other."""
    if isinstance(recipe, BlockScaling):
        return [(BlockQuantizer, "produce", Quantizer.produce)]
    # The own product, whose sums a GPU adds up in another order than cuBLASLt.
    own = [
        (DelayedScalingQuantizer, "scale_in_advance", lambda self: None),
        (CurrentScalingQuantizer, "keeps_scale", True),
        (CurrentScalingQuantizer, "measures", False),
    ]
    return [*own, (op, "is_active", False)] if device.type == "cpu" else own


def compare(module, recipe, monkeypatch, fused, tokens=37, **options):
    """Checks the bits of fused ops against those of ops apart; returns the numbers of calls."""
    before = fused.numbers()
    actual = train(module, recipe, tokens, **options)
    counts = tuple(now - was for now, was in zip(fused.numbers(), before, strict=True))
    with monkeypatch.context() as patch:
        for change in apart(recipe, module.layer_norm_weight.device):
            patch.setattr(*change)
            assert_equal(train(module, recipe, tokens, **options), actual)
    return counts


@every
@pytest.mark.parametrize("tokens", [32, 37])
def test_bits_equal_ops_apart(request, device, fused, monkeypatch, recipe, tokens):
    recipe = RECIPES[recipe]
    if isinstance(recipe, BlockScaling):
        request.getfixturevalue("poison")
    counts = compare(build(device, recipe), recipe, monkeypatch, fused, tokens)
    # A first scale needs the tensor. Programs repeat later calls where they may.
    assert counts[0] > (not isinstance(recipe, BlockScaling))
    assert counts[1] >= 1


@one_of_each
def test_bits_equal_without_programs(device, fused, monkeypatch, recipe):
    monkeypatch.setattr(programs, "_enabled", False)
    recipe = RECIPES[recipe]
    counts = compare(build(device, recipe), recipe, monkeypatch, fused)
    assert counts == (STEPS + 1, STEPS)


FROZEN = {
    "all but FC2": (["layer_norm_weight", "fc1_weight"], (1, 0)),
    "FC2": (["fc2_weight"], (STEPS + 1, STEPS)),
    "FC1": (["fc1_weight"], (STEPS + 1, STEPS)),
    "norm": (["layer_norm_weight"], (STEPS + 1, STEPS)),
}


@one_of_each
@pytest.mark.parametrize("which", FROZEN)
def test_frozen_weights(device, fused, monkeypatch, which, recipe):
    (names, expected), name = FROZEN[which], recipe
    recipe = RECIPES[recipe]
    module = build(device, recipe)
    for weight in names:
        getattr(module, weight).requires_grad_(False)
    monkeypatch.setattr(programs, "_enabled", False)
    counts = compare(module, recipe, monkeypatch, fused)
    if name == "tensorwise":  # forward finds the amax, whichever copies it makes
        expected = (STEPS + 1, expected[1])
    assert counts == expected or name == "blocks"


USES = {
    "microbatches": {"microbatches": 2},
    "cached weights": {"microbatches": 2, "cached": True},
    "columnwise weights": {"region": {"keep_columnwise_weights": True}},
    "saves less": {"region": {"save": "small"}},
    "saves less of microbatches": {"microbatches": 2, "region": {"save": "small"}},
}


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "first step"])
@pytest.mark.parametrize("use", USES)
def test_uses(device, fused, monkeypatch, use, recipe):
    module, recipe = build(device), RECIPES[recipe]
    assert min(compare(module, recipe, monkeypatch, fused, **USES[use])) > 0


@pytest.mark.parametrize("recipe", ["delayed", "first step", "tensorwise", "blocks"])
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
def test_recompute_is_equal(device, fused, recipe, own, reentrant):
    def repeated(module, x):
        return checkpoint(module, x, use_reentrant=reentrant)

    recipe = RECIPES[recipe]
    module = build(device, recipe)
    expected = train(module, recipe)
    module.checkpoint = own
    assert_equal(expected, train(module, recipe, call=None if own else repeated))
    assert fused.backward > 0


@one_of_each
def test_weights_held_in_fp8(device, fused, monkeypatch, recipe):
    recipe = RECIPES[recipe]
    with fp8_model_init(recipe=recipe):
        module = build(device, recipe)
    for p in module.parameters():
        p.requires_grad_(p.dim() == 1)  # no optimizer here
    assert min(compare(module, recipe, monkeypatch, fused)) > 0


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


@one_of_each
def test_statistics_see_the_same_tensors(device, fused, recipe):
    recipe = RECIPES[recipe]
    module, x = build(device, recipe), torch.randn(37, HIDDEN, device=device).bfloat16()
    x.requires_grad_()
    seen = []
    for observe in (False, True):
        copied = torch.nn.Sequential(copy.deepcopy(module))
        stats = fp8_statistics(copied)
        if observe:
            stats.__enter__()
        for _ in range(3):
            with fp8_autocast(fp8_recipe=recipe):
                y = copied(x)
            y.float().square().sum().backward()
        if observe:
            stats.__exit__(None, None, None)
            noted = stats.to_dict()
            assert len(noted["0.fc2.input"]["amax"]) == len(noted["0.fc1.grad_output"]["amax"]) == 3
        seen.append([y.detach(), *(p.grad for p in copied.parameters()), *fp8_state(copied)])
    assert_equal(*seen)


def test_statistics_are_those_of_two_ops(device, monkeypatch):
    noted = []
    for fused in (True, False):
        module = torch.nn.Sequential(build(device, BLOCKS))
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
    "quick GELU": ({"activation": "qgelu"}, DELAYED),
    "float32": ({"params_dtype": torch.float32}, DELAYED),
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
    assert op.gains(32768, 6144, 1536)
    assert not op.gains(32768, 14336, 1024)
    assert not op.gains(2048, 8192, 2048)
    assert not op.gains(8192, 14328, 4096)
    assert not op.gains(8192, 14336, 4104)
    assert op.gains(8192, 12288, 3072, is_gated=False)
    assert not op.gains(8192, 8192, 2048, is_gated=False)
    monkeypatch.setattr(op, "is_active", False)
    assert not op.gains(8192, 14336, 4096)


def test_not_without_kernels():
    backend = gemm_backend.FP8Gemm((False, True, True), torch.device("cpu"))
    assert not backend.fuses_swiglu


@pytest.mark.long
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


@pytest.mark.parametrize("activation", ["swiglu", "geglu", "reglu", "glu"])
def test_activations_into_blocks(device, fused, monkeypatch, activation):
    module = build(device, BLOCKS, activation=activation)
    assert min(compare(module, BLOCKS, monkeypatch, fused)) > 0


@pytest.mark.parametrize(
    "options", [{"bias": True}, {"ffn": 80}, {"params_dtype": torch.float32}], ids=str
)
def test_what_runs_two_ops_in_part(device, fused, monkeypatch, options):
    """Column sums for a bias, an odd width, float32."""
    counts = compare(build(device, BLOCKS, **options), BLOCKS, monkeypatch, fused)
    assert counts[0] > 0
    assert (counts[1] > 0) == ("bias" not in options)


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
    """Forward makes no [tokens, width], backward only its gradient and no [tokens, 2 width]."""
    module = build(device, BLOCKS)
    x = torch.randn(48, HIDDEN, device=device).bfloat16().requires_grad_()
    with Allocated() as forward, fp8_autocast(fp8_recipe=BLOCKS):
        y = module(x)
    with Allocated() as backward:
        y.backward(torch.ones_like(y))
    assert (48, 2 * BLOCK_FFN) in forward.shapes  # the activation's input, which is saved
    assert (48, BLOCK_FFN) not in forward.shapes
    assert (48, BLOCK_FFN) in backward.shapes
    assert (48, 2 * BLOCK_FFN) not in backward.shapes


@needs_cuda
def test_peak_memory_of_blocks(monkeypatch):
    tokens, ffn = 1024, 2048
    peaks = []
    for fused in (True, False):
        if not fused:
            monkeypatch.setattr(BlockQuantizer, "produce", Quantizer.produce)
        module = build("cuda", BLOCKS, ffn=ffn)  # another module's programs run the other ops
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


@needs_cuda
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

    @pytest.mark.parametrize("model", [SWIGLU, GELU], ids=["swiglu", "gelu"])
    def test_large_layer(self, monkeypatch, model):
        """At sizes that take the kernels by themselves, against the products of cuBLASLt."""
        torch.manual_seed(0)
        module = LayerNormMLP(4096, 12288, device="cuda", params_dtype=torch.bfloat16, **model)
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

    @pytest.mark.parametrize("model", [SWIGLU, GELU], ids=["swiglu", "gelu"])
    @pytest.mark.parametrize("kind", ["graph", "compiled"])
    def test_graph_and_compiled_are_equal(self, fused, kind, model):
        torch.manual_seed(2)
        module = LayerNormMLP(WIDTH, FFN, device="cuda", params_dtype=torch.bfloat16, **model)
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
