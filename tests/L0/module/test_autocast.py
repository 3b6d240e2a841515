"""The modules under torch.autocast: its dtype comes out, as if everything were cast before."""

import copy

import pytest
import torch
from checks import needs_cuda
from module_cases import RECIPES, bytes_of, sqnr
from torch.utils.checkpoint import checkpoint

import apex_te
from apex_te import fp8_autocast

HIDDEN, FFN, HEADS = 32, 64, 2
SHAPE = (16, 2, HIDDEN)
NO_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
BERT = {"apply_residual_connection_post_layernorm": True, "output_layernorm": True}
LLAMA = {"normalization": "RMSNorm", "activation": "swiglu", "bias": False, "num_gqa_groups": 1}


def layer(**options):
    return lambda **where: apex_te.TransformerLayer(
        HIDDEN, FFN, HEADS, **NO_DROPOUT, **options, **where
    )


MODULES = {
    "Linear": lambda **where: apex_te.Linear(HIDDEN, FFN, **where),
    "LayerNormLinear": lambda **where: apex_te.LayerNormLinear(HIDDEN, FFN, **where),
    "LayerNormMLP": lambda **where: apex_te.LayerNormMLP(HIDDEN, FFN, **where),
    "GroupedLinear": lambda **where: apex_te.GroupedLinear(2, HIDDEN, FFN, **where),
    "LayerNorm": lambda **where: apex_te.LayerNorm(HIDDEN, **where),
    "RMSNorm": lambda **where: apex_te.RMSNorm(HIDDEN, **where),
    "MultiheadAttention": lambda **where: apex_te.MultiheadAttention(
        HIDDEN, HEADS, attention_dropout=0.0, **where
    ),
    "GPT": layer(),
    "BERT": layer(**BERT),
    "Llama": layer(**LLAMA),
    "parallel": layer(parallel_attention_mlp=True),
    "decoder": layer(layer_type="decoder"),
}
modules = pytest.mark.parametrize("name", MODULES)
recipes = pytest.mark.parametrize("recipe", [None, "delayed", "tensorwise", "blockwise", "mxfp8"])


def same_bits(a, b):
    return a.dtype == b.dtype and torch.equal(bytes_of(a), bytes_of(b))


def make(name, device, dtype=torch.float32):
    """A module whose parameters are numbers of bf16."""
    torch.manual_seed(3)
    module = MODULES[name](device=device, params_dtype=torch.float32)
    with torch.no_grad():
        for key, parameter in module.named_parameters():
            value = torch.randn(parameter.shape) * 0.1 + ("norm_weight" in key or "norm" in name)
            parameter.copy_(value.bfloat16())
    return module.to(dtype)


def call(name, module, x, **more):
    if name == "GroupedLinear":
        return module(x, [20, 12], **more)
    if name == "decoder":
        return module(x, encoder_output=x.detach().flip(0), **more)
    return module(x, **more)


def train(name, module, x, recipe, autocast=True, run=call, **more):
    """The output and the gradients of the input and of the parameters."""
    x = x.clone().requires_grad_()
    fp8 = fp8_autocast(recipe is not None, None if recipe is None else RECIPES[recipe])
    with torch.autocast(x.device.type, torch.bfloat16, enabled=autocast), fp8:
        y = run(name, module, x, **more)
    (y.float() * torch.linspace(-1, 1, y.numel(), device=y.device).view(y.shape)).sum().backward()
    return y, x.grad, {key: p.grad for key, p in module.named_parameters()}


def batch(device):
    return torch.randn(SHAPE, device=device).bfloat16().float()


@pytest.fixture
def repeatable(monkeypatch):
    """The kernels of a GPU that give the same bits each time, PyTorch's attention included."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@modules
@recipes
def test_equals_casting_before(name, recipe, repeatable, device):
    """fp32 parameters and inputs under autocast, and the same numbers in bf16 without it.

    What reads an fp32 input in FP8 reads it unrounded, and so is the gradient that it gives. On a
    GPU other kernels add an fp32 bias to FP8 products and round their results to fp32.
    """
    x = batch(device)
    y, dx, grads = train(name, make(name, device), x, recipe)
    exact = train(name, make(name, device, torch.bfloat16), x.bfloat16(), recipe, autocast=False)
    assert y.dtype == torch.bfloat16
    assert dx.dtype == torch.float32
    assert all(grad.dtype == torch.float32 for grad in grads.values())
    if device.type == "cuda" and recipe is not None:
        for a, b in ((y, exact[0]), (dx, exact[1]), *((grads[k], exact[2][k]) for k in grads)):
            assert sqnr(b, a) > 35.0
        return
    assert same_bits(y, exact[0])
    if recipe is None or name not in ("Linear", "GroupedLinear", "MultiheadAttention"):
        assert same_bits(dx, exact[1].float())
    else:
        assert same_bits(dx.bfloat16(), exact[1])
    for key, grad in grads.items():
        assert same_bits(grad.bfloat16(), exact[2][key]), key


@modules
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gives_its_dtype_for_any_input(name, dtype, device):
    module, x = make(name, device), batch(device).to(dtype)
    for recipe in (None, "tensorwise"):
        y, dx, grads = train(name, module, x, recipe)
        assert y.dtype == torch.bfloat16
        assert dx.dtype == dtype
        assert all(grad.dtype == torch.float32 for grad in grads.values())


@modules
@recipes
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputed_equals_kept(name, recipe, use_reentrant, repeatable, device):
    def recomputed(name, module, x):
        return checkpoint(lambda x: call(name, module, x), x, use_reentrant=use_reentrant)

    x = batch(device)
    y, dx, grads = train(name, make(name, device), x, recipe)
    again = train(name, make(name, device), x, recipe, run=recomputed)
    assert same_bits(y, again[0])
    assert same_bits(dx, again[1])
    for key, grad in grads.items():
        assert same_bits(grad, again[2][key]), key


@pytest.mark.parametrize("name", [n for n in MODULES if n not in ("LayerNorm", "RMSNorm")])
@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise"])
def test_cached_weights(name, recipe, repeatable, device):
    """Microbatches that reuse FP8 weights, and those that quantize them on each call."""
    module, x = make(name, device), batch(device)
    other = copy.deepcopy(module)
    for first in (True, False, False):
        y, dx, _ = train(name, module, x, recipe, is_first_microbatch=first)
        exact = train(name, other, x, recipe)
        assert same_bits(y, exact[0])
        assert y.dtype == torch.bfloat16
        torch.testing.assert_close(dx, exact[1])


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_residuals_take_its_dtype(dropout, device):
    """Nothing as large as the input is kept in fp32, with and without dropout between."""
    module = apex_te.TransformerLayer(
        HIDDEN, FFN, HEADS, hidden_dropout=dropout, attention_dropout=0.0, device=device
    )
    x = torch.randn(SHAPE, device=device, requires_grad=True)
    saved = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)
    with torch.autocast(device.type, torch.bfloat16), hooks:
        y = module(x)
    assert y.dtype == torch.bfloat16
    parameters = {p.data_ptr() for p in module.parameters()}
    own = [t for t in saved if t.data_ptr() not in parameters and t.dim() >= 2]
    assert not [t.shape for t in own if t.dtype == torch.float32 and t.numel() >= x.numel()]


def test_nested_and_disabled_regions(device):
    module, x = make("GPT", device), batch(device)
    exact = module(x)
    with torch.autocast(device.type, torch.bfloat16):
        with torch.autocast(device.type, enabled=False):
            assert same_bits(module(x), exact)
        with torch.autocast(device.type, torch.float16):
            assert module(x).dtype == torch.float16
        assert module(x).dtype == torch.bfloat16
    other = "cuda" if device.type == "cpu" else "cpu"
    if other == "cpu" or torch.cuda.is_available():
        with torch.autocast(other, torch.bfloat16):
            assert module(x).dtype == torch.float32


@modules
def test_refuses_ints(name, device):
    module = make(name, device)
    x = torch.ones(SHAPE, dtype=torch.int64, device=device)
    refused = pytest.raises(TypeError, match=r"must be a floating-point tensor, got torch.int64")
    with torch.autocast(device.type, torch.bfloat16), refused:
        call(name, module, x)


@pytest.mark.cover(0)
@modules
def test_compiles(name):
    module, x = make(name, "cpu"), batch("cpu")
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    exact = train(name, module, x, None)
    module.zero_grad()
    y, dx, grads = train(name, compiled, x, None)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, exact[0], rtol=1.6e-2, atol=1e-2)
    torch.testing.assert_close(dx, exact[1], rtol=1.6e-2, atol=1e-2)
    assert all(grad.dtype == torch.float32 for grad in grads.values())


@needs_cuda
@pytest.mark.cuda
@pytest.mark.parametrize("name", ["Linear", "LayerNormMLP", "MultiheadAttention", "GPT", "Llama"])
@pytest.mark.parametrize("recipe", [None, "tensorwise"])
def test_graphed_equals_eager(name, recipe, repeatable):
    module, x = make(name, "cuda"), batch("cuda")
    exact = train(name, module, x, recipe)
    module.zero_grad()
    fp8 = {} if recipe is None else {"fp8_enabled": True, "fp8_recipe": RECIPES[recipe]}
    with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
        apex_te.make_graphed_callables(module, (x.clone().requires_grad_(),), **fp8)
    x = x.clone().requires_grad_()
    region = fp8_autocast(recipe is not None, None if recipe is None else RECIPES[recipe])
    with torch.autocast("cuda", torch.bfloat16, cache_enabled=False), region:
        y = module(x)
    (y.float() * torch.linspace(-1, 1, y.numel(), device="cuda").view(y.shape)).sum().backward()
    assert y.dtype == torch.bfloat16
    assert same_bits(y, exact[0])
    assert same_bits(x.grad, exact[1])
