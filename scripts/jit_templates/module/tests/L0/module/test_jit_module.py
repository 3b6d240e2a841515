"""JitModule against its parts, in bf16 or fp32 and in FP8."""

import copy
import pickle

import pytest
import torch
from module_cases import RECIPES, SCHEMES, sqnr

from apex_te import fp8_autocast
from apex_te.module import jit_module
from apex_te.module._core.fused_casts import activate

JitModule = jit_module.JitModule
ACTIVATIONS = ["gelu", "swiglu"]


def make(device, activation="gelu", **options):
    torch.manual_seed(3)
    module = JitModule(32, 48, activation=activation, device=device, **options)
    x = torch.randn(16, 64 if activation == "swiglu" else 32, device=device, requires_grad=True)
    return module, x


def results(module, x, recipe=None, **options):
    """The output and all gradients by name; with a delayed recipe in its second step."""
    for _ in range(2):
        module.zero_grad()
        x.grad = None
        with fp8_autocast(recipe is not None, recipe):
            out = module(x, **options)
        torch.manual_seed(4)
        out.backward(torch.randn_like(out))
    grads = {name: p.grad for name, p in module.named_parameters()}
    return {"out": out.detach(), "x": x.grad, **grads}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_high_precision(device, activation):
    module, x = make(device, activation)
    found = results(module, x)
    y = torch.nn.functional.linear(activate(activation, x), module.weight, module.bias)
    torch.testing.assert_close(found["out"], y.detach())
    torch.manual_seed(4)
    (dx,) = torch.autograd.grad(y, x, torch.randn_like(y))
    torch.testing.assert_close(found["x"], dx)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("recipe", SCHEMES)
def test_fp8(device, activation, recipe):
    module, x = make(device, activation)
    exact, found = results(module, x), results(module, x, RECIPES[recipe])
    assert not torch.equal(found["out"], exact["out"])
    for name, value in exact.items():
        # Of values with 3 bits after the point in the forward, 2 in gradients.
        assert sqnr(value, found[name]) > (25 if name == "out" else 17), name


def test_without_gradients(device):
    module, x = make(device)
    found = results(module, x, RECIPES["delayed"])["out"]
    module.eval()
    with torch.no_grad(), fp8_autocast(True, RECIPES["delayed"]):
        assert sqnr(found, module(x)) > 25


def test_kept_weights(device):
    module, x = make(device)
    with fp8_autocast(True, RECIPES["tensorwise"]):
        first = module(x, is_first_microbatch=True)
        assert torch.equal(module(x, is_first_microbatch=False), first)
        with torch.no_grad():
            module.weight.mul_(2.0)
        assert not torch.equal(module(x, is_first_microbatch=False), first)


def test_torch_autocast(device):
    module, x = make(device)
    with torch.autocast(x.device.type, torch.bfloat16), fp8_autocast(True, RECIPES["tensorwise"]):
        assert module(x).dtype is torch.bfloat16


def test_compiled(device):
    module, x = make(device)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    with fp8_autocast(True, RECIPES["tensorwise"]):
        assert torch.equal(compiled(x), module(x))


def test_copies_and_files(device):
    module, x = make(device)
    results(module, x, RECIPES["delayed"])
    state = module.state_dict()
    fresh, _ = make(device)
    fresh.load_state_dict(state)
    for other in (fresh, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert other.state_dict().keys() == state.keys()
        found, again = (results(m, x, RECIPES["delayed"]) for m in (copy.deepcopy(module), other))
        assert all(torch.equal(found[name], again[name]) for name in found)


def test_rejects(device):
    with pytest.raises(ValueError, match="activation must be one of"):
        JitModule(32, 48, activation="sine")
    module, x = make(device)
    with pytest.raises(ValueError, match="inp must have a last dimension of 32"):
        module(x[:, :16])
    with pytest.raises(TypeError, match="inp must have the dtype of the parameters"):
        module(x.to(torch.bfloat16))
