"""LayerNorm and RMSNorm against torch.nn's: values, gradients, arguments, state."""

import copy

import pytest
import torch
from checks import DTYPES, assert_as_good_as_torch

from apex_te.module.layer_norm import LayerNorm
from apex_te.module.rms_norm import RMSNorm

PAIRS = [(LayerNorm, torch.nn.LayerNorm), (RMSNorm, torch.nn.RMSNorm)]
both = pytest.mark.parametrize(("ours", "torchs"), PAIRS, ids=["LayerNorm", "RMSNorm"])


def twin(torchs, module, dtype):
    """torch's module with the same gamma and bias."""
    plain = torchs(module.normalized_shape, eps=module.eps)
    plain.load_state_dict({k: v.detach().cpu() for k, v in module.named_parameters()})
    with torch.no_grad():
        plain.weight.add_(1.0 if module.zero_centered_gamma else 0.0)
    return plain.to(dtype)


def run(module, x, dy):
    x = x.detach().clone().requires_grad_()
    module.zero_grad()
    out = module(x)
    out.backward(dy)
    return out, x.grad, *(p.grad for p in module.parameters())


def randomize(module):
    for p in module.parameters():
        torch.nn.init.uniform_(p, -0.5, 0.5)
    return module


@both
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 64), (2, 3, 17), (1, 129)])
@pytest.mark.parametrize("zero_centered", [False, True])
def test_as_good_as_torch(ours, torchs, dtype, shape, zero_centered, device):
    module = randomize(
        ours(
            shape[-1], eps=0.1, params_dtype=dtype, zero_centered_gamma=zero_centered, device=device
        )
    )
    x, dy = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    actual = run(module, x.to(device), dy.to(device))
    exact = run(twin(torchs, module, torch.float64), x.double(), dy.double())
    same = run(twin(torchs, module, dtype), x, dy)
    for triple in zip(actual, exact, same, strict=True):
        assert_as_good_as_torch(*triple)


@both
def test_several_dimensions(ours, torchs):
    module = randomize(ours((3, 5)))
    x, dy = torch.randn(4, 3, 5), torch.randn(4, 3, 5)
    plain = twin(torchs, module, torch.float32)
    for a, b in zip(run(module, x, dy), run(plain, x, dy), strict=True):
        torch.testing.assert_close(a, b, rtol=1.3e-6, atol=1e-5)


@both
def test_arguments(ours, torchs):
    module = ours(hidden_size=8, eps=1e-3, sequence_parallel=True, dtype=torch.bfloat16)
    assert isinstance(module, torchs)
    assert module.normalized_shape == (8,)
    assert module.eps == 1e-3
    assert all(p.sequence_parallel for p in module.parameters())
    assert all(p.dtype == torch.bfloat16 for p in module.parameters())
    assert not any(p.sequence_parallel for p in ours(8).parameters())
    assert ours(8).weight.eq(1).all()
    assert ours(8, zero_centered_gamma=True).weight.eq(0).all()
    assert "zero_centered_gamma=True" in repr(ours(8, zero_centered_gamma=True))


@both
def test_state(ours, torchs):
    module, x = randomize(ours(8)), torch.randn(3, 8)
    plain = torchs(8, eps=1e-5)
    plain.load_state_dict(module.state_dict())
    torch.testing.assert_close(module(x), plain(x))
    fresh = ours(8)
    fresh.load_state_dict(plain.state_dict())
    assert torch.equal(fresh(x), module(x))
    assert torch.equal(copy.deepcopy(module)(x), module(x))


@both
def test_torch_autocast(ours, torchs):
    module, x = randomize(ours(16)), torch.randn(4, 16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = module(x)
        assert module(x.bfloat16()).dtype == torch.bfloat16
        assert copy.deepcopy(module).half()(x).dtype == torch.bfloat16
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert x.grad.dtype == module.weight.grad.dtype == torch.float32
    torch.testing.assert_close(out.float(), module(x), rtol=1.6e-2, atol=1.6e-2)


@both
def test_without_gradients(ours, torchs):
    module, x = ours(16), torch.randn(4, 16)
    expected = module(x)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            assert torch.equal(module(x), expected)
    module.weight = None  # a frozen gamma of ones
    assert torch.equal(module(x), expected)


@pytest.mark.long
@both
def test_compiles(ours, torchs):
    module, x = randomize(ours(16)), torch.randn(4, 16)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    for a, b in zip(run(compiled, x, x), run(module, x, x), strict=True):
        assert torch.equal(a, b)


@both
def test_rejects(ours, torchs):
    name = ours.__name__
    with pytest.raises(ValueError, match=rf"{name}: normalized_shape .* once, got None and None"):
        ours()
    with pytest.raises(ValueError, match="once, got 8 and 8"):
        ours(8, hidden_size=8)
    with pytest.raises(TypeError, match="must be an int or several ints, got 'ab'"):
        ours("ab")
    with pytest.raises(ValueError, match="dtype must equal params_dtype"):
        ours(8, dtype=torch.half, params_dtype=torch.float)
    with pytest.raises(ValueError, match=rf"{name}: inp must have shape \[..., 8\], got \[3, 7\]"):
        ours(8)(torch.ones(3, 7))
    with pytest.raises(ValueError, match=r"inp must have shape \[..., 2, 8\], got \[8\]"):
        ours((2, 8))(torch.ones(8))
    with pytest.raises(TypeError, match=r"inp must have the dtype of the parameters .*float32"):
        ours.__mro__[1](8)(torch.ones(3, 8, dtype=torch.half))  # not one of torch's modules
    with pytest.raises(TypeError):
        ours(8, 1e-5, True)


@pytest.mark.parametrize("given", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@both
def test_inputs_of_another_dtype_than_the_parameters(ours, torchs, dtype, given):
    """Where torch's module takes an input beside parameters of another dtype, ours does."""
    plain, module = torchs(16).to(given), ours(16).to(given)
    with torch.no_grad():
        for p, q in zip(plain.parameters(), module.parameters(), strict=True):
            q.copy_(p.normal_())
    module.eps = plain.eps = 1e-5
    x = torch.randn(5, 16, dtype=dtype)
    try:
        expected = plain(x)
    except RuntimeError:
        with pytest.raises(TypeError, match="inp must have the dtype of the parameters"):
            module(x)
        return
    actual = module(x)
    assert actual.dtype is expected.dtype
    torch.testing.assert_close(actual, expected)
    grads = [
        torch.autograd.grad(m(x).float().square().sum(), list(m.parameters()))
        for m in (plain, module)
    ]
    for a, b in zip(*grads, strict=True):
        assert a.dtype is b.dtype
        assert (b - a).float().norm() < 0.03 * a.float().norm()


@both
def test_outputs_can_be_written_to(ours, torchs):
    """An in-place change of the output, as in XLM, has the gradients that it has with torch's."""
    grads, values = [], torch.randn(2, 3, 16)
    for kind in (torchs, ours):
        module, x = kind(16, eps=1e-5), values.clone().requires_grad_()
        y = module(x)
        y *= torch.arange(3.0)[:, None]
        (y * values.flip(0)).sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(grads[1], grads[0])
