"""Weight gradients at token counts that are no multiple of 16.

They are those of the same tokens followed by rows of zeros, bitwise, and no product copies its
operands to pad them.
"""

import pytest
import torch
from checks import assert_same_bits
from graph_stand_in import graphs_on_cpu  # noqa: F401
from module_cases import randomized
from torch.utils.checkpoint import checkpoint

from apex_te import flush_fp8_state, fp8_autocast
from apex_te.graphs.graphed_callables import make_graphed_callables
from apex_te.module.grouped.linear import GroupedLinear
from apex_te.module.layer_norm_linear import LayerNormLinear
from apex_te.module.layer_norm_mlp import LayerNormMLP
from apex_te.module.linear import Linear
from apex_te.ops import fp8_gemm
from apex_te.recipe import CurrentScaling, DelayedScaling
from apex_te.statistics import fp8_statistics

H = 48
TOKENS = [1, 15, 16, 17, 33, 254, 255]
RECIPES = {"delayed": DelayedScaling(amax_history_len=3), "tensorwise": CurrentScaling()}
MODULES = {
    "Linear": lambda **k: Linear(H, 64, **k),
    "original": lambda **k: Linear(H, 64, save_original_input=True, **k),
    "LayerNormLinear": lambda **k: LayerNormLinear(H, 64, **k),
    "RMSNorm": lambda **k: LayerNormLinear(H, 64, normalization="RMSNorm", **k),
    "gelu": lambda **k: LayerNormMLP(H, 64, **k),
    "srelu": lambda **k: LayerNormMLP(H, 64, activation="srelu", **k),
    "swiglu": lambda **k: LayerNormMLP(H, 64, activation="swiglu", **k),
}
each_recipe = pytest.mark.parametrize("recipe", RECIPES)
each_module = pytest.mark.parametrize("name", MODULES)


@pytest.fixture(autouse=True)
def products(device, monkeypatch):
    """K of each product that runs; fails where one is not as products of FP8 data need it."""
    contracted = []

    def counted(run):
        def counting(first, *args):
            a = first[0] if isinstance(first, tuple) else first
            contracted.append(a.shape[1])
            return run(first, *args)

        return counting

    def refused(*args):
        raise AssertionError("a product copied its operands to pad them")

    for name in ("_run_cpu", "_run_cuda"):
        monkeypatch.setattr(fp8_gemm, name, counted(getattr(fp8_gemm, name)))
    monkeypatch.setattr(fp8_gemm, "_run_padded", refused)
    yield contracted
    assert contracted
    assert all(k % 16 == 0 for k in contracted)


def make(name, device):
    torch.manual_seed(1)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    module = randomized(MODULES[name](device=device, params_dtype=dtype))
    for parameter in module.parameters():  # a zero row must not have the norm's largest value
        parameter.data.mul_(0.5)
    return module


def batch(module, tokens, padded, seed=2, out_features=None):
    """Tokens and output gradients, or these followed by rows of zeros up to ``padded``."""
    like = next(module.parameters())
    generator = torch.Generator().manual_seed(seed)
    if out_features is None:
        out_features = H if isinstance(module, LayerNormMLP) else 64
    x, dy = (torch.randn(tokens, n, generator=generator) for n in (H, out_features))
    return tuple(torch.nn.functional.pad(t, (0, 0, 0, padded - tokens)).to(like) for t in (x, dy))


def step(module, recipe, x, dy, call=None):
    """The parameters' gradients, and the input's for the tokens that exist."""
    x = x.clone().requires_grad_()
    module.zero_grad()
    with fp8_autocast(True, RECIPES[recipe]):
        out = (module if call is None else call)(x)
    out.backward(dy)
    return [p.grad.clone() for p in module.parameters()], x.grad


def train(name, recipe, tokens, device, padded=None, ways=lambda module: module):
    """Gradients of two steps, the second with delayed scaling's own scales."""
    module, found = make(name, device), []
    call = ways(module)
    for seed in (2, 3):
        x, dy = batch(module, tokens, padded or tokens, seed)
        grads, dx = step(module, recipe, x, dy, call)
        found += [*grads, dx[:tokens]]
    flush_fp8_state()
    return found


@each_recipe
@each_module
@pytest.mark.parametrize("tokens", TOKENS)
def test_equals_rows_of_zeros(device, name, recipe, tokens):
    padded = -(-tokens // 16) * 16
    expected = train(name, recipe, tokens, device, padded)
    found = train(name, recipe, tokens, device)
    if name in ("gelu", "srelu", "swiglu"):
        # The first product's rounding may depend on how many rows there are, and moves FP8 data.
        for a, b in zip(found, expected, strict=True):
            assert (a - b).norm() <= 0.02 * b.norm()
    else:
        assert_same_bits(found, expected)


@pytest.mark.cover(2)
@each_recipe
@each_module
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed(device, name, recipe, reentrant):
    def ways(module):
        return lambda x: checkpoint(module, x, use_reentrant=reentrant)

    expected = train(name, recipe, 33, device)
    assert_same_bits(train(name, recipe, 33, device, ways=ways), expected)


@pytest.mark.cover(0)
@each_recipe
@pytest.mark.parametrize("name", ["Linear", "RMSNorm", "swiglu"])
def test_compiled(device, name, recipe):
    def ways(module):
        return torch.compile(module, fullgraph=True, backend="aot_eager")

    expected = train(name, recipe, 33, device)
    assert_same_bits(train(name, recipe, 33, device, ways=ways), expected)


@each_recipe
@pytest.mark.parametrize("name", ["Linear", "LayerNormLinear", "swiglu"])
def test_captured_with_its_weights(request, device, name, recipe):
    if device.type == "cpu":
        request.getfixturevalue("graphs_on_cpu")
    found = []
    for captured in (False, True):
        module = make(name, device)
        x, dy = batch(module, 33, 33)
        call = module
        if captured:
            sample = x.clone().requires_grad_()
            call = make_graphed_callables(
                module, (sample,), fp8_enabled=True, fp8_recipe=RECIPES[recipe],
                fp8_weight_caching=True,
            )  # fmt: skip
        grads = []
        for first in (True, False):
            x, dy = batch(module, 33, 33, 2 + first)
            leaf = x.clone().requires_grad_()
            with fp8_autocast(True, RECIPES[recipe]):
                out = call(leaf, is_first_microbatch=first)
            out.backward(dy)
            grads += [p.grad.clone() for p in module.parameters()] + [leaf.grad]
            module.zero_grad()
        flush_fp8_state()
        found.append(grads)
    assert_same_bits(found[1], found[0])


@each_recipe
def test_groups_of_odd_sizes(device, recipe, products):
    splits = [7, 0, 33, 15]
    torch.manual_seed(4)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    module = GroupedLinear(4, H, 64, bias=False, device=device, params_dtype=dtype)
    x, dy = batch(module, sum(splits), sum(splits), out_features=64)
    step(module, recipe, x, dy, lambda x: module(x, splits))
    for i, (own, dy_of, rows) in enumerate(
        zip(x.split(splits), dy.split(splits), splits, strict=True)
    ):
        if not rows:
            continue
        torch.manual_seed(4)
        alone = Linear(H, 64, bias=False, device=device, params_dtype=dtype)
        with torch.no_grad():
            alone.weight.copy_(getattr(module, f"weight{i}"))
        (expected,), _ = step(alone, recipe, own, dy_of)
        assert_same_bits(getattr(module, f"weight{i}").grad, expected)


@each_recipe
def test_statistics_leave_the_padding_out(device, recipe):
    """Without a gradient of the input, the output's has a padded columnwise copy alone."""
    found = []
    for needed in (False, True):
        module = make("Linear", device)
        x, dy = batch(module, 33, 33)
        with fp8_statistics(module) as statistics, fp8_autocast(True, RECIPES[recipe]):
            module(x.requires_grad_(needed)).backward(dy)
        found.append(statistics.to_dict())
    assert found[0] == found[1]
    assert len(found[0]) == 3
