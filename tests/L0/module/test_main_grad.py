"""``main_grad`` of 16-bit modules: float32 sums that were never rounded to 16 bits."""

import pytest
import torch
from schemes import chosen

from apex_te import fp8_autocast
from apex_te.module import (
    GroupedLinear,
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    MultiheadAttention,
    TransformerLayer,
)
from apex_te.module._core import gemm as weight_gradients
from apex_te.recipe import CurrentScaling, DelayedScaling

SHORT = [torch.float16, torch.bfloat16]
HIGH_PRECISION_WGRAD = (False, False, True)
OPTIONS = {"fuse_wgrad_accumulation": True}
MODULES = {
    "Linear": lambda **kw: Linear(32, 48, **kw),
    "LayerNormLinear": lambda **kw: LayerNormLinear(32, 48, **kw),
    "LayerNormMLP": lambda **kw: LayerNormMLP(32, 64, **kw),
    "GroupedLinear": lambda **kw: GroupedLinear(3, 32, 48, **kw),
    "MultiheadAttention": lambda **kw: MultiheadAttention(32, 2, fuse_qkv_params=True, **kw),
    "TransformerLayer": lambda **kw: TransformerLayer(32, 64, 2, fuse_qkv_params=True, **kw),
}


def with_main_grads(module, dtype=torch.float32, value=0.0):
    weights = [p for p in module.parameters() if p.dim() == 2]
    for weight in weights:
        weight.main_grad = torch.full(weight.shape, value, dtype=dtype, device=weight.device)
    return weights


def call(module, x):
    """The module's output; a GroupedLinear has a group without rows."""
    rows = x.numel() // x.shape[-1]
    rest = ([rows - 7, 0, 7],) if isinstance(module, GroupedLinear) else ()
    return module(x, *rest)


def error_db(exact, actual):
    return 20 * torch.log10(exact.norm() / (exact - actual).norm().clamp(1e-300)).item()


@pytest.fixture
def products(monkeypatch):
    """Float64 sums of the weight gradients that are made, by the address of their main_grad."""
    sums = {}
    inner = weight_gradients.wgrad_gemm

    def spy(dy, x, out, *, accumulate=False):
        before = sums.get(out.data_ptr(), 0.0) if accumulate else 0.0
        sums[out.data_ptr()] = before + dy.double().t() @ x.double()
        return inner(dy, x, out, accumulate=accumulate)

    monkeypatch.setattr(weight_gradients, "wgrad_gemm", spy)
    return sums


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("recipe", [None, "delayed", "tensorwise"])
def test_sums_keep_float32(device, products, name, dtype, delayed, recipe):
    """Three microbatches, outside FP8 and with weight gradients in high precision."""
    options = OPTIONS | {"params_dtype": dtype, "device": device}
    if name not in ("MultiheadAttention", "TransformerLayer"):
        options["delay_wgrad_compute"] = delayed
    elif delayed:
        pytest.skip("no delay_wgrad_compute")
    module = MODULES[name](**options)
    weights = with_main_grads(module)
    recipes = {"delayed": DelayedScaling, "tensorwise": CurrentScaling}
    made = recipe and recipes[recipe](override_linear_precision=HIGH_PRECISION_WGRAD)
    for _ in range(3):
        with fp8_autocast(recipe is not None, made):
            out = call(module, torch.randn(16, 2, 32).to(device, dtype))
        out = out[0] if isinstance(out, tuple) else out
        out.backward(torch.randn(out.shape).to(device, dtype))
        if delayed:
            module.backward_dw()
    assert len(products) == len(weights)
    floor = 120 if device.type == "cpu" else 100
    for weight in weights:
        exact = products[weight.main_grad.data_ptr()]
        assert weight.grad is None
        assert not exact.any() or error_db(exact, weight.main_grad.double()) >= floor


@pytest.mark.parametrize("name", MODULES)
def test_sum_of_what_was_there_and_the_gradient(device, name):
    module, twin = (MODULES[name](device=device, **more) for more in (OPTIONS, {}))
    twin.load_state_dict(module.state_dict())
    weights, x = with_main_grads(module, value=1.0), torch.randn(16, 2, 32, device=device)
    for each in (module, twin):
        torch.manual_seed(2)  # of dropout
        call(each, x).sum().backward()
    for weight, plain in zip(weights, (p for p in twin.parameters() if p.dim() == 2), strict=True):
        torch.testing.assert_close(weight.main_grad, plain.grad + 1)


def test_attention_adds_to_main_grad_only_where_its_weights_are_fused():
    with pytest.raises(ValueError, match="fuse_qkv_params must be True with fuse_wgrad"):
        MultiheadAttention(32, 2, **OPTIONS)


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("recipe", [None, "delayed", "blockwise"])
@pytest.mark.parametrize("name", [*MODULES, "on the device"])
def test_backwards_of_inputs_alone_add_nothing(device, name, recipe, delayed):
    """Gradients of inputs alone, as pipeline schedules and penalties ask for, add nothing."""
    options = {"device": device, **({"delay_wgrad_compute": True} if delayed else OPTIONS)}
    if delayed and name in ("MultiheadAttention", "TransformerLayer", "on the device"):
        pytest.skip("no delay_wgrad_compute")
    recipe = "tensorwise" if name == "on the device" and recipe == "blockwise" else recipe
    torch.manual_seed(1)
    module = MODULES["GroupedLinear" if name == "on the device" else name](**options)
    weights = with_main_grads(module)
    x = torch.randn(16, 2, 32, device=device, requires_grad=True)
    splits = torch.tensor([25, 0, 7], device=device)
    with fp8_autocast(recipe is not None, recipe):
        out = module(x, splits) if name == "on the device" else call(module, x)
    out = out[0] if isinstance(out, tuple) else out
    nan = torch.full_like(out, float("nan"))
    torch.autograd.grad(out, x, nan, retain_graph=True)
    out.backward(nan, retain_graph=True, inputs=[x])
    if delayed:
        module.backward_dw()
    sums = [w.grad if delayed else w.main_grad for w in weights]
    assert all(s is None or not s.any() for s in sums)
    given = torch.autograd.grad(out, [x, *weights], torch.ones_like(out), True, allow_unused=True)
    assert given[0] is not None
    if delayed:
        module.backward_dw()
    sums = [w.grad if delayed else w.main_grad for w in weights]
    assert any(s.any() for s in sums)
    assert all(s.isfinite().all() for s in sums)


@pytest.mark.parametrize("override", [None, HIGH_PRECISION_WGRAD])
@pytest.mark.parametrize("make", [Linear, lambda *a, **kw: GroupedLinear(3, *a, **kw)])
def test_sums_beyond_float16(device, make, override):
    """A sum of 64 products of 100 and 20 is infinite in float16 alone."""
    module = make(32, 32, params_dtype=torch.float16, device=device, bias=False, **OPTIONS)
    weights = with_main_grads(module)
    recipe = override and DelayedScaling(override_linear_precision=override)
    for _ in range(2):
        with fp8_autocast(override is not None, recipe):
            out = call(module, torch.full((71, 32), 100.0, device=device).half())
        out.backward(torch.full((71, 32), 20.0, device=device).half())
    rows = [64, 0, 7] if len(weights) == 3 else [71]
    for weight, count in zip(weights, rows, strict=True):
        expected = torch.full((32, 32), 2 * count * 2000.0, device=device)
        assert torch.equal(weight.main_grad, expected)


@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize("params", [*SHORT, torch.float32])
def test_short_main_grad_is_rounded_once(device, dtype, params):
    """Integers have exact sums: the one difference is the rounding of main_grad itself."""
    module = Linear(32, 48, bias=False, params_dtype=params, device=device, **OPTIONS)
    with_main_grads(module, dtype, 300.0)
    x = torch.randint(-9, 10, (50, 32)).to(device, params)
    dy = torch.randint(-9, 10, (50, 48)).to(device, params)
    module(x).backward(dy)
    exact = dy.double().t() @ x.double() + 300
    assert torch.equal(module.weight.main_grad, exact.to(dtype))


RECIPES = chosen("delayed", "tensorwise", "blockwise", "mxfp8")


@pytest.mark.filterwarnings("ignore:apex_te. .* matrix products need")
@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize("recipe", RECIPES)
def test_quantized_sums_keep_float32(device, dtype, recipe):
    """The quantized product is as exact in main_grad as in a float32 gradient."""
    module = Linear(64, 64, params_dtype=dtype, device=device, **OPTIONS)
    twin = Linear(64, 64, params_dtype=torch.float32, device=device)
    with torch.no_grad():
        for own, other in zip(module.parameters(), twin.parameters(), strict=True):
            other.copy_(own)
    with_main_grads(module)
    x, dy = torch.randn(64, 64).to(device, dtype), torch.randn(64, 64).to(device, dtype)
    with fp8_autocast(True, RECIPES[recipe]):
        module(x).backward(dy)
        twin(x.float()).backward(dy.float())
    assert error_db(twin.weight.grad.double(), module.weight.main_grad.double()) >= 100


@pytest.mark.cover(0)
@pytest.mark.parametrize("dtype", SHORT)
def test_compiled(device, dtype):
    modules = [Linear(32, 48, params_dtype=dtype, device=device, **OPTIONS) for _ in range(2)]
    modules[1].load_state_dict(modules[0].state_dict())
    for module in modules:
        with_main_grads(module)
    torch._dynamo.reset()
    compiled = torch.compile(modules[1], fullgraph=True, backend="aot_eager")
    x, dy = torch.randn(16, 32).to(device, dtype), torch.randn(16, 48).to(device, dtype)
    for _ in range(2):
        modules[0](x).backward(dy)
        compiled(x).backward(dy)
    assert modules[0].weight.main_grad.any()
    assert torch.equal(modules[0].weight.main_grad, modules[1].weight.main_grad)
