"""Linear in FP8 against float64, with each of its arguments."""

import copy
import dataclasses
import math

import pytest
import torch
from checks import assert_same_bits
from module_cases import (
    RECIPES,
    SCHEMES,
    check_against_torch,
    gradients_for,
    randomized,
    results,
    same_bits,
)

from apex_te import GroupedLinear, LayerNormLinear, LayerNormMLP, Linear, fp8_autocast
from apex_te.ops.gemm_common import fp8_gemm_count
from apex_te.recipe import DelayedScaling, Format

HYBRID = DelayedScaling(amax_history_len=4)


def sqnr(reference, actual):
    reference, actual = reference.detach().double(), actual.detach().double()
    return 20 * math.log10(reference.norm() / (reference - actual).norm())


def twin(module):
    """torch.nn.Linear with the same parameters, in fp32."""
    plain = torch.nn.Linear(module.in_features, module.out_features, module.bias is not None)
    plain.load_state_dict({k: v.float().cpu() for k, v in module.named_parameters()})
    return plain


def run(module, x, grad, recipe=HYBRID, enabled=True, **kwargs):
    x = x.detach().clone().requires_grad_()
    module.zero_grad()
    with fp8_autocast(enabled, recipe):
        out = module(x, **kwargs)
    out.backward(grad)
    return out.detach(), x.grad


def check_floors(module, x, grad, recipe=HYBRID):
    for _ in range(2):  # the second region has its scales
        out, dx = run(module, x, grad, recipe)
    plain = twin(module)
    x32 = x.float().cpu().requires_grad_()
    expected = plain(x32)
    expected.backward(grad.float().cpu())
    assert out.dtype == x.dtype
    assert dx.dtype == x.dtype
    assert sqnr(expected, out.cpu()) >= 25
    assert sqnr(x32.grad, dx.cpu()) >= 17
    assert sqnr(plain.weight.grad, module.weight.grad.cpu()) >= 17
    if module.bias is not None:
        assert sqnr(plain.bias.grad, module.bias.grad.cpu()) >= 30
        assert module.bias.grad.dtype == module.bias.dtype
    assert module.weight.grad.dtype == module.weight.dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("fp8_format", [Format.HYBRID, Format.E4M3])
@pytest.mark.parametrize("bias", [True, False])
def test_sqnr_floors(dtype, fp8_format, bias, device):
    recipe = DelayedScaling(fp8_format=fp8_format, amax_history_len=4)
    module = Linear(64, 48, bias, params_dtype=dtype, device=device)
    x = torch.randn(32, 64).to(device).to(dtype)
    check_floors(module, x, torch.randn(32, 48).to(device).to(dtype), recipe)


@pytest.mark.parametrize("shape", [(64,), (1, 64), (3, 5, 64), (2, 1, 4, 64)])
def test_leading_dimensions(shape, device):
    module = Linear(64, 16, device=device)
    x = torch.randn(shape).to(device)
    check_floors(module, x, torch.randn(*shape[:-1], 16).to(device))
    with fp8_autocast(True, HYBRID):
        assert module(x).shape == (*shape[:-1], 16)


@pytest.mark.parametrize(("k", "n"), [(1, 1), (7, 3), (17, 129), (127, 15)])
def test_odd_sizes(k, n, device):
    module = Linear(k, n, device=device)
    check_floors(module, torch.randn(9, k).to(device), torch.randn(9, n).to(device))


def test_non_contiguous_input_and_gradient(device):
    module = Linear(32, 16, device=device)
    wide, dy = torch.randn(32, 24).to(device), torch.randn(16, 24).to(device)
    strided = run(module, wide.t(), dy.t()), module.weight.grad.clone()
    module.fp8_state.reset()
    packed = run(module, wide.t().contiguous(), dy.t().contiguous()), module.weight.grad
    assert torch.equal(strided[0][0], packed[0][0])
    assert torch.equal(strided[0][1], packed[0][1])
    assert torch.equal(strided[1], packed[1])


@pytest.mark.parametrize("shape", [(0, 16), (3, 0, 16)])
@pytest.mark.parametrize("enabled", [True, False])
def test_zero_tokens(shape, enabled, device):
    module = Linear(16, 32, device=device)
    x, dy = torch.empty(shape, device=device), torch.empty(*shape[:-1], 32, device=device)
    out, dx = run(module, x, dy, enabled=enabled)
    assert out.shape == dy.shape
    assert dx.shape == x.shape
    assert module.weight.grad.eq(0).all()
    assert module.bias.grad.eq(0).all()


def test_three_fp8_gemms_per_step(device):
    module = Linear(16, 32, device=device)
    before = fp8_gemm_count()
    run(module, torch.randn(4, 16).to(device), torch.randn(4, 32).to(device))
    assert fp8_gemm_count() - before == 3
    run(module, torch.randn(4, 16).to(device), torch.randn(4, 32).to(device), enabled=False)
    assert fp8_gemm_count() - before == 3


def test_without_fp8_it_is_torch_linear():
    module, x, dy = Linear(16, 32), torch.randn(4, 16), torch.randn(4, 32)
    out, dx = run(module, x, dy, enabled=False)
    plain = twin(module)
    x = x.clone().requires_grad_()
    expected = plain(x)
    expected.backward(dy)
    assert torch.equal(out, expected)
    assert torch.equal(dx, x.grad)
    assert torch.equal(module.weight.grad, plain.weight.grad)
    assert isinstance(module, torch.nn.Linear)
    assert not module.fp8_state.allocated


def saved_tensors(module, x):
    saved = []
    pack = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)
    with pack, fp8_autocast(True, HYBRID):
        module(x)
    return saved


def test_saves_of_the_input_only_its_fp8_transpose():
    module, x = Linear(16, 32), torch.randn(4, 16, requires_grad=True)
    saved = [(tuple(t.shape), t.dtype) for t in saved_tensors(module, x)]
    assert saved == [
        ((16, 16), torch.float8_e4m3fn), ((1,), torch.float32), ((32, 16), torch.float32),
    ]  # fmt: skip
    module.weight.requires_grad_(False)
    assert [t is module.weight for t in saved_tensors(module, x)] == [True]
    module.weight.requires_grad_(True)
    saved = saved_tensors(module, x.detach())
    assert [tuple(t.shape) for t in saved] == [(16, 16), (1,)]


def test_frozen_weight_and_bias_only():
    module = Linear(16, 32)
    module.weight.requires_grad_(False)
    x, dy = torch.randn(8, 16), torch.randn(8, 32)
    _, dx = run(module, x, dy)
    assert module.weight.grad is None
    assert torch.allclose(module.bias.grad, dy.sum(0), atol=1e-5)
    assert dx is not None
    with fp8_autocast(True, HYBRID):
        out = module(x)  # only the bias learns
    module.zero_grad()
    out.backward(dy)
    assert torch.allclose(module.bias.grad, dy.sum(0), atol=1e-5)


def test_high_precision_wgrad():
    recipe = DelayedScaling(override_linear_precision=(False, False, True))
    module = Linear(64, 32)
    x, dy = torch.randn(16, 64), torch.randn(16, 32)
    before = fp8_gemm_count()
    run(module, x, dy, recipe)
    assert fp8_gemm_count() - before == 2
    assert torch.allclose(module.weight.grad, dy.t() @ x, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fp8", [True, False])
def test_torch_autocast(dtype, fp8):
    if dtype is torch.float16 and not fp8:
        pytest.skip("needs an FP16 matmul")
    module = Linear(32, 16)
    x = torch.randn(8, 32, requires_grad=True)
    for _ in range(2):
        with torch.autocast("cpu", dtype), fp8_autocast(fp8, HYBRID):
            out = module(x)
            out.float().sum().backward()  # inside autocast: our maths keep their dtypes
    assert out.dtype == dtype
    assert x.grad.dtype == torch.float32
    assert module.weight.grad.dtype == torch.float32
    expected = torch.nn.functional.linear(x, module.weight, module.bias)
    assert sqnr(expected.detach(), out.detach()) >= 25
    with torch.autocast("cpu", dtype), fp8_autocast(fp8, HYBRID):
        assert module(x.to(dtype)).dtype == dtype


def test_output_can_be_changed_in_place():
    module = Linear(16, 16)
    for shape in ((4, 16), (2, 2, 16), (16,)):
        with fp8_autocast(True, HYBRID):
            out = module(torch.randn(shape))
        torch.relu_(out).sum().backward()
    assert module.weight.grad is not None


def test_repeatable():
    module, x, dy = Linear(64, 32), torch.randn(16, 64), torch.randn(16, 32)
    run(module, x, dy)
    first = *run(module, x, dy), module.weight.grad.clone(), module.bias.grad.clone()
    second = *run(module, x, dy), module.weight.grad, module.bias.grad
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_return_bias():
    module, x = Linear(16, 8, return_bias=True), torch.randn(4, 16)
    torch.nn.init.ones_(module.bias)
    for fp8 in (True, False):
        with fp8_autocast(fp8, HYBRID):
            out, bias = module(x)
        assert torch.equal(bias, module.bias)
        assert sqnr((x @ module.weight.t()).detach(), out.detach()) > 20
    out, bias = Linear(16, 8, False, return_bias=True)(x)
    assert bias.numel() == 0
    with torch.autocast("cpu", torch.bfloat16):
        assert module(x)[1].dtype == torch.bfloat16


def test_weight_passed_in():
    owner = Linear(16, 8)
    borrower = Linear(16, 8, skip_weight_param_allocation=True)
    assert list(borrower.parameters()) == []
    x, dy = torch.randn(4, 16), torch.randn(4, 8)
    out, dx = run(owner, x, dy)
    grads = owner.weight.grad, owner.bias.grad
    owner.zero_grad()
    other, other_dx = run(borrower, x, dy, weight=owner.weight, bias=owner.bias)
    assert torch.equal(out, other)
    assert torch.equal(dx, other_dx)
    assert torch.equal(grads[0], owner.weight.grad)
    assert torch.equal(grads[1], owner.bias.grad)
    with pytest.raises(ValueError, match="weight must be passed to forward"):
        borrower(x)
    with pytest.raises(ValueError, match="bias must be passed to forward"):
        borrower(x, owner.weight)
    with pytest.raises(ValueError, match=r"weight must have shape \[8, 16\], got \[16, 8\]"):
        borrower(x, owner.weight.t(), owner.bias)
    with pytest.raises(TypeError, match="weight must be a tensor, got int"):
        borrower(x, 3)


def test_parametrized_weight():
    module = torch.nn.utils.parametrizations.weight_norm(Linear(16, 8))
    run(module, torch.randn(4, 16), torch.randn(4, 8))
    assert all(p.grad is not None for p in module.parameters())


def test_default_and_custom_initialisation():
    module = Linear(256, 256)
    assert abs(module.weight.std().item() - 0.023) < 0.001
    assert module.bias.eq(0).all()
    assert Linear(4, 4, init_method=torch.nn.init.ones_).weight.eq(1).all()
    assert Linear(4, 4, dtype=torch.bfloat16).weight.dtype == torch.bfloat16
    assert "in_features=4, out_features=6, bias=False" in repr(Linear(4, 6, False))


def test_double_precision_is_refused_in_fp8_only():
    module = Linear(16, 8).double()
    x = torch.ones(4, 16, dtype=torch.float64)
    assert module(x).dtype == torch.float64
    with fp8_autocast(True, HYBRID), pytest.raises(TypeError, match="x must"):
        module(x)


def test_double_backward_raises():
    module, x = Linear(16, 8), torch.randn(4, 16, requires_grad=True)
    with fp8_autocast(True, HYBRID):
        out = module(x)
    (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


PLAIN_AND_FP8 = [None, *SCHEMES]
X = torch.randn(12, 32, generator=torch.Generator().manual_seed(3))
DY = torch.randn(12, 48, generator=torch.Generator().manual_seed(4))


def results_of(module, recipe, **options):
    module.fp8_state.reset()
    chosen = RECIPES.get(recipe, recipe)
    return results(module, X, None, [DY], chosen, **options)


def linear(**options):
    return randomized(Linear(32, 48, **options))


def halves(whole, split, **options):
    """A module whose parts hold the parameters of ``whole``."""
    module = Linear(32, 48, whole.use_bias, parameters_split=split, **options)
    rows = list(split.values()) if isinstance(split, dict) else [48 // len(split)] * len(split)
    with torch.no_grad():
        for kind in ("weight", "bias") if whole.use_bias else ("weight",):
            for part, value in zip(split, getattr(whole, kind).split(rows), strict=True):
                getattr(module, f"{part}_{kind}").copy_(value)
    return module


@pytest.mark.parametrize("recipe", PLAIN_AND_FP8)
@pytest.mark.parametrize("split", [("a", "b", "c"), ["a"], {"a": 1, "b": 47}], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_split_equals_whole(recipe, split, bias):
    whole = linear(bias=bias)
    module = halves(whole, split)
    found, expected = results_of(module, recipe), results_of(whole, recipe)
    for kind in ("weight", "bias") if bias else ("weight",):
        found[kind] = torch.cat([found.pop(f"{part}_{kind}") for part in split])
    assert same_bits(found, expected)


def test_split_parameters():
    module = Linear(32, 48, parameters_split=("query", "key"), init_method=torch.nn.init.ones_)
    names = ["query_weight", "query_bias", "key_weight", "key_bias"]
    assert list(module.state_dict()) == names
    assert module.query_weight.shape == (24, 32)
    assert module.key_bias.shape == (24,)
    assert module.query_weight.eq(1).all()
    assert module.key_weight.eq(1).all()
    assert module.key_bias.eq(0).all()
    other = Linear(32, 48, parameters_split=("query", "key"))
    other.load_state_dict(module.state_dict(), strict=True)
    assert other.key_weight.eq(1).all()
    check_against_torch(randomized(module), X)


@pytest.mark.parametrize("recipe", SCHEMES)
def test_split_weight_is_cached(recipe):
    module = halves(linear(), ("a", "b"))
    expected = results_of(module, recipe)
    for first in (True, False):
        assert same_bits(expected, results_of(module, recipe, is_first_microbatch=first))
    with torch.no_grad():
        module.a_weight.mul_(-2)
    found = results_of(module, recipe, is_first_microbatch=False)
    assert not same_bits(expected, found)
    assert same_bits(results_of(module, recipe), found)


@pytest.mark.parametrize("recipe", SCHEMES)
def test_a_weight_that_is_passed_is_not_taken_for_the_cached_one(recipe):
    module = linear()
    results_of(module, recipe, is_first_microbatch=True)
    other = linear()
    given = {"weight": other.weight.detach(), "bias": other.bias.detach()}
    module.fp8_state.reset()
    with torch.no_grad(), fp8_autocast(True, RECIPES[recipe]):
        found = module(X, **given, is_first_microbatch=False)
        expected = module(X, **given)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("recipe", PLAIN_AND_FP8)
@pytest.mark.parametrize("hp_wgrad", [False, True])
@pytest.mark.parametrize("fuse", [False, True])
def test_delayed_wgrad(recipe, hp_wgrad, fuse):
    chosen = RECIPES.get(recipe)
    if hp_wgrad and recipe is not None:
        chosen = dataclasses.replace(chosen, override_linear_precision=(False, False, True))
    usual = linear(fuse_wgrad_accumulation=fuse)
    later = Linear(32, 48, delay_wgrad_compute=True, fuse_wgrad_accumulation=fuse)
    later.load_state_dict(usual.state_dict())
    for module in (usual, later):
        module.weight.main_grad = torch.zeros(48, 32)
    expected, found = results_of(usual, chosen), results_of(later, chosen)
    assert found.pop("weight") is None
    expected.pop("weight")
    assert same_bits(found, expected)
    assert later.weight.main_grad.eq(0).all()
    for _ in range(2):  # the second has nothing to do
        later.backward_dw()
        if fuse:
            assert torch.equal(later.weight.main_grad, usual.weight.main_grad)
            assert later.weight.grad is None
        else:
            assert torch.equal(later.weight.grad, usual.weight.grad)
    assert usual.weight.main_grad.ne(0).any() == fuse


def test_delayed_wgrad_of_several_backwards_adds_up():
    usual, later = linear(), Linear(32, 48, delay_wgrad_compute=True)
    later.load_state_dict(usual.state_dict())
    for module in (usual, later):
        for factor in (1.0, -3.0):
            with fp8_autocast(True, RECIPES["tensorwise"]):
                module(X).backward(factor * DY)
    assert later.weight.grad is None
    later.backward_dw()
    assert torch.equal(usual.weight.grad, later.weight.grad)


def test_delayed_wgrad_between_the_backwards_of_microbatches_in_flight():
    usual, later = linear(), Linear(32, 48, delay_wgrad_compute=True)
    later.load_state_dict(usual.state_dict())
    for module in (usual, later):
        outs = [module(factor * X) for factor in (1.0, -3.0)]
        for out in outs:
            out.backward(DY)
            module.backward_dw()
    assert torch.equal(usual.weight.grad, later.weight.grad)


def test_delayed_wgrad_of_a_frozen_weight_is_nothing():
    module = linear(delay_wgrad_compute=True)
    module.weight.requires_grad_(False)
    results_of(module, "delayed")
    module.backward_dw()
    assert module.weight.grad is None


@pytest.mark.parametrize("recipe", PLAIN_AND_FP8)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saving_the_original_input_changes_no_bit(recipe, dtype):
    module = linear(params_dtype=dtype)
    other = copy.deepcopy(module)
    other.save_original_input = True  # as frameworks set it
    x, dy = X.to(dtype), DY.to(dtype)
    found = [results(m, x, None, [dy], RECIPES.get(recipe)) for m in (module, other)]
    assert same_bits(*found)


@pytest.mark.parametrize("recipe", SCHEMES)
def test_the_original_input_is_what_is_saved(recipe):
    x = X.clone().requires_grad_()
    saved = {}
    for original in (False, True):
        module, seen = linear(save_original_input=original), []
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda t, s=seen: s.append(t) or t,
                                                         lambda t: t)  # fmt: skip
        with hooks, fp8_autocast(True, RECIPES[recipe]):
            module(x)
        saved[original] = [(tuple(t.shape), t.element_size()) for t in seen]
        assert any(t.data_ptr() == x.data_ptr() for t in seen) == original
    assert ((32, 16), 1) in saved[False]  # 12 rows, padded for the weight gradient
    assert ((12, 32), 4) in saved[True]
    assert not any(size == 1 and len(shape) == 2 for shape, size in saved[True])


def test_the_original_input_is_cast_with_the_scale_of_its_forward():
    """Other forwards may move the scale before the backward."""
    found = []
    for original in (False, True):
        module = linear(save_original_input=original, init_method=torch.nn.init.ones_)
        with torch.no_grad():
            module.weight.fill_(0.25)
        recipe = DelayedScaling(amax_history_len=2)
        x = X.clone().requires_grad_()
        with fp8_autocast(True, recipe):
            out = module(x)
        for _ in range(2):
            with fp8_autocast(True, recipe):
                module(1000 * X)
        assert module.fp8_state.scale_fwd[0] != 1
        out.backward(DY)
        found.append(module.weight.grad)
    assert torch.equal(*found)


def test_a_weight_cannot_be_passed_beside_parts():
    module = Linear(32, 48, parameters_split=("a", "b"))
    with pytest.raises(ValueError, match=r"^Linear: weight must be None with parameters_split"):
        module(X, torch.zeros(48, 32))
    bias = torch.ones(48)
    with torch.no_grad():
        assert torch.equal(module(X, bias=bias), module(X) + 1)


def test_name():
    assert Linear(4, 4).name is None
    assert Linear(4, 4, name="mlp.fc1").name == "mlp.fc1"


NONE_WITH_SPLIT = (
    "skip_weight_param_allocation", "delay_wgrad_compute", "fuse_wgrad_accumulation"
)  # fmt: skip


@pytest.mark.parametrize("kind", [Linear, LayerNormLinear])
@pytest.mark.parametrize(
    ("split", "error", "message"),
    [
        (3, TypeError, "must be names .* got int"),
        ("qkv", TypeError, "must be names .* got str"),
        ((), TypeError, "must be names .* got tuple"),
        ({}, ValueError, "must have out_features=48 rows, got 0"),
        (("a", "a"), ValueError, "must have unique names"),
        (list("abcde"), ValueError, "must divide out_features=48, got 5"),
        ({"a": 49}, ValueError, "must have out_features=48 rows, got 49"),
        ({"a": 24.0, "b": 24.0}, ValueError, "must .*rows above 0"),
        ({"a": 0, "b": 48}, ValueError, "must .*rows above 0"),
        (("1", "b"), ValueError, "must have identifiers"),
        ({"a b": 48}, ValueError, "must have identifiers"),
    ],
)
def test_rejects_splits(kind, split, error, message):
    with pytest.raises(error, match=f"^{kind.__name__}: parameters_split {message}"):
        kind(32, 48, parameters_split=split)


@pytest.mark.parametrize("kind", [Linear, LayerNormLinear])
@pytest.mark.parametrize("option", NONE_WITH_SPLIT)
def test_rejects_options_beside_splits(kind, option):
    if kind is LayerNormLinear and option == "skip_weight_param_allocation":
        pytest.skip("it has no such option")
    with pytest.raises(ValueError, match=f"parameters_split must be None with {option}=True"):
        kind(32, 48, parameters_split=("a", "b"), **{option: True})


@pytest.mark.parametrize("recipe", PLAIN_AND_FP8)
def test_gradients_against_torch(device, recipe):
    module = randomized(Linear(32, 48, device=device, save_original_input=True))
    x = X.to(device)
    if recipe is None:
        check_against_torch(module, x)
        return
    from module_cases import check_floors

    check_floors(module, x, RECIPES[recipe])
    assert gradients_for(module, x)[0].shape == (12, 48)


MODULES = {
    "Linear": lambda **o: Linear(64, 64, **o),
    "LayerNormLinear": lambda **o: LayerNormLinear(64, 64, **o),
    "LayerNormMLP": lambda **o: LayerNormMLP(64, 64, **o),
    "GroupedLinear": lambda **o: GroupedLinear(2, 64, 64, **o),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, None], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", MODULES)
def test_bias_of_float32(device, name, recipe, dtype):
    module = MODULES[name](device=device)
    biases = [p for n, p in module.named_parameters() if "bias" in n and "norm" not in n]
    with torch.no_grad():
        for bias in biases:
            bias.copy_(torch.randn_like(bias) * 30)
    x = torch.randn(32, 64, device=device)
    args = (x, [16, 16]) if name == "GroupedLinear" else (x,)

    def forward():
        with (
            torch.autocast(device.type, dtype, enabled=dtype is not None),
            fp8_autocast(fp8_recipe=RECIPES[recipe]),
        ):
            return module(*args)

    y = forward()
    y.sum().backward()
    assert y.dtype is (dtype or torch.float32)
    assert all(bias.grad.dtype is torch.float32 for bias in biases)
    with torch.no_grad():
        for bias in biases:
            bias.copy_(bias.to(dtype or torch.bfloat16))
        assert_same_bits(y, forward())
