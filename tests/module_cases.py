"""What the tests of the FP8 modules share: recipes, the modules in plain PyTorch, comparisons."""

import math

import torch
from checks import assert_as_good_as_torch
from schemes import SCHEMES as SCHEMES
from schemes import formats
from torch.nn import functional

from apex_te import fp8_autocast

RECIPES = formats()
# numerics.md section 8: (rtol, atol).
TOLERANCES = {
    torch.float32: (1.3e-6, 1e-5),
    torch.float16: (1e-3, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-5),
}
GATES = {
    "geglu": lambda gate: functional.gelu(gate, approximate="tanh"),
    "glu": torch.sigmoid,
    "qgeglu": lambda gate: gate * torch.sigmoid(1.702 * gate),
    "reglu": torch.relu,
    "sreglu": lambda gate: torch.relu(gate).square(),
    "swiglu": functional.silu,
}
FUNCTIONS = {
    "gelu": lambda x: functional.gelu(x, approximate="tanh"),
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": torch.relu,
    "silu": functional.silu,
    "srelu": lambda x: torch.relu(x).square(),
}
ACTIVATIONS = [*GATES, *FUNCTIONS]


def sqnr(reference, actual):
    """Signal to quantization noise in dB; infinite where nothing differs."""
    reference, actual = (t.detach().double().cpu() for t in (reference, actual))
    noise = (reference - actual).norm().item()
    return 20 * math.log10(reference.norm().item() / noise) if noise else math.inf


def randomized(module):
    """The module with every parameter random, so that none may be left out unnoticed."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            value = torch.randn(parameter.shape) * (0.2 if "norm" in name else 0.1)
            if name == "layer_norm_weight" and not module.zero_centered_gamma:
                value += 1
            parameter.copy_(value)
    return module


def plain_norm(module, parameters, x):
    gamma = parameters["layer_norm_weight"]
    gamma = gamma + 1 if module.zero_centered_gamma else gamma
    if module.normalization == "RMSNorm":
        return functional.rms_norm(x, x.shape[-1:], gamma, module.eps)
    return functional.layer_norm(x, x.shape[-1:], gamma, parameters["layer_norm_bias"], module.eps)


def plain_activation(name, x):
    if name in GATES:
        gate, up = x.chunk(2, -1)
        return GATES[name](gate) * up
    return FUNCTIONS[name](x)


def joined(module, parameters, kind):
    """The weight or bias of a module that may hold it in parts; None if it has none."""
    if getattr(module, "split", None) is None:
        return parameters.get(kind)
    parts = [parameters.get(f"{part}_{kind}") for part in module.split]
    return None if parts[0] is None else torch.cat(parts)


def plain(module, parameters, x, residual=None, linear=functional.linear):
    """What the module returns, as a list, in plain PyTorch from ``parameters``."""
    total = x if residual is None else x + residual
    has_norm = "layer_norm_weight" in parameters
    norm = plain_norm(module, parameters, total) if has_norm else total
    if "fc1_weight" in parameters:
        hidden = linear(norm, parameters["fc1_weight"], parameters.get("fc1_bias"))
        hidden = plain_activation(module.activation, hidden)
        weight, bias = parameters["fc2_weight"], parameters.get("fc2_bias")
    else:
        hidden = norm
        weight, bias = joined(module, parameters, "weight"), joined(module, parameters, "bias")
    found = [linear(hidden, weight, None if module.return_bias else bias)]
    if module.return_bias and bias is not None:
        found.append(bias)
    if has_norm and module.return_layernorm_output:
        found.append(norm)
    return found if residual is None else [*found, total]


def outputs(module, x, residual=None, **options):
    """What the module returns, as a list in the order of ``plain``."""
    if residual is None:
        found = module(x, **options)
        total = []
    else:
        found, last = module.forward_with_residual(x, residual, **options)
        total = [last]
    found = list(found) if isinstance(found, tuple) else [found]
    return [t for t in found if t.numel() or t.dim() != 1] + total


def leaf(x):
    return None if x is None else x.detach().clone().requires_grad_()


def results(module, x, residual=None, grads=None, recipe=None, **options):
    """Outputs and gradients by name of one forward and backward; ``grads`` go with the outputs."""
    x, residual = leaf(x), leaf(residual)
    module.zero_grad()
    with fp8_autocast(recipe is not None, recipe):
        found = outputs(module, x, residual, **options)
    torch.autograd.backward(found, grads)
    named = {f"output {i}": t.detach() for i, t in enumerate(found)} | {"input": x.grad}
    if residual is not None:
        named["residual"] = residual.grad
    return named | {name: p.grad for name, p in module.named_parameters()}


def plain_results(module, x, residual=None, grads=None, dtype=None, linear=functional.linear):
    """``results`` of plain PyTorch computing in ``dtype`` from the module's parameters."""
    dtype = x.dtype if dtype is None else dtype
    parameters = {n: leaf(p.to(dtype)) for n, p in module.named_parameters()}
    x, residual = leaf(x.to(dtype)), None if residual is None else leaf(residual.to(dtype))
    found = plain(module, parameters, x, residual, linear)
    torch.autograd.backward(found, [g.to(dtype) for g in grads])
    named = {f"output {i}": t.detach() for i, t in enumerate(found)} | {"input": x.grad}
    if residual is not None:
        named["residual"] = residual.grad
    return named | {name: p.grad for name, p in parameters.items()}


def gradients_for(module, x, residual=None):
    """Random gradients of everything that the module returns."""
    with torch.no_grad():
        return [torch.randn(t.shape).to(t.device, t.dtype) for t in outputs(module, x, residual)]


def assert_matches(actual, exact, same_dtype):
    """Within the tolerances of the dtype, or no worse than PyTorch in it."""
    assert actual is not None, "there is no gradient"
    assert actual.dtype == same_dtype.dtype
    assert actual.shape == exact.shape
    rtol, atol = TOLERANCES[actual.dtype]
    rounded = exact.to(actual.dtype)
    if not torch.allclose(actual, rounded, rtol=rtol, atol=atol):
        assert_as_good_as_torch(actual, exact, same_dtype)


def check_against_torch(module, x, residual=None, **options):
    """Outputs and every gradient, without FP8."""
    grads = gradients_for(module, x, residual)
    actual = results(module, x, residual, grads, **options)
    exact = plain_results(module, x, residual, grads, torch.float64)
    same = plain_results(module, x, residual, grads)
    assert actual.keys() == exact.keys()
    for name, value in actual.items():
        assert_matches(value, exact[name], same[name])


def check_floors(module, x, recipe, residual=None, forward=25.0, backward=17.0, **options):
    """SQNR of outputs and every gradient in FP8, against float64."""
    grads = gradients_for(module, x, residual)
    actual = results(module, x, residual, grads, recipe, **options)
    exact = plain_results(module, x, residual, grads, torch.float64)
    assert actual.keys() == exact.keys()
    for name, value in actual.items():
        floor = forward if name.startswith("output") else backward
        assert value is not None, name
        assert value.shape == exact[name].shape, name
        assert sqnr(exact[name], value) >= floor, f"{name}: {sqnr(exact[name], value):.1f} dB"
    return actual


def same_bits(a, b):
    """Whether two dicts of tensors are equal bitwise, NaN included."""
    assert a.keys() == b.keys()
    return [
        name
        for name in a
        if (a[name] is None) != (b[name] is None)
        or (a[name] is not None and not torch.equal(bytes_of(a[name]), bytes_of(b[name])))
    ] == []


def bytes_of(x):
    return x.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
