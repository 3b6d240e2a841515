"""Alias classes beside the classes of apex_te that compute the same, and batches for both."""

import torch

import apex_te
from apex_te.integrations.transformer_engine.pytorch import module as te

SPLITS = [5, 0, 11, 4]
TOKENS = 20
FEATURES, HIDDEN = 24, 40  # no multiples of 16
_SIZES = {
    "Linear": (FEATURES, HIDDEN),
    "LayerNormLinear": (FEATURES, HIDDEN),
    "LayerNormMLP": (FEATURES, HIDDEN),
    "GroupedLinear": (len(SPLITS), FEATURES, HIDDEN),
    "LayerNorm": (FEATURES,),
    "RMSNorm": (FEATURES,),
}
KINDS = tuple(_SIZES)
FP8_KINDS = KINDS[:4]


def alias_layer(kind, **options):
    """Returns a layer of the alias."""
    torch.manual_seed(7)
    return getattr(te, kind)(*_SIZES[kind], **options)


def own_layer(kind, **options):
    """Returns a layer of apex_te with the values that ``alias_layer`` gives."""
    torch.manual_seed(7)
    return getattr(apex_te, kind)(*_SIZES[kind], **options)


def pair(kind, device, **options):
    """Returns an alias layer and apex_te's with equal values, in the dtype quick on ``device``."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    options = {"params_dtype": dtype, "device": device, **options}
    return alias_layer(kind, **options), own_layer(kind, **options)


def batches(device, count, features=FEATURES):
    """Returns inputs whose amaxes grow and shrink, so that scales move."""
    torch.manual_seed(11)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    x = torch.randn(count, TOKENS, features)
    x *= torch.rand(count, 1, 1).mul(6).sub(3).exp2()
    return [b.to(device, dtype) for b in x]


def call(layer, x, **options):
    """Calls ``layer``, with ``SPLITS`` if it is a GroupedLinear."""
    if isinstance(layer, apex_te.GroupedLinear):
        return layer(x, SPLITS, **options)
    return layer(x, **options)


def first(result):
    """Returns the first tensor of what a layer returns."""
    return result[0] if isinstance(result, tuple) else result


def steps(layers, x, recipe, **options):
    """Runs forward and backward of layers in one region, in which they stage amaxes together.

    Returns, for each layer, its outputs and gradients.
    """
    inputs, results = [x.clone().requires_grad_() for _ in layers], []
    with apex_te.fp8_autocast(recipe is not None, fp8_recipe=recipe):
        for layer, own in zip(layers, inputs, strict=True):
            for p in layer.parameters():
                p.grad = None
            results.append(call(layer, own, **options))
    found = []
    for layer, own, result in zip(layers, inputs, results, strict=True):
        first(result).square().mean().backward()
        outputs = list(result) if isinstance(result, tuple) else [result]
        if outputs[1:] and isinstance(outputs[1], list):
            outputs[1:] = outputs[1]
        found.append([*outputs, own.grad, *[p.grad for p in layer.parameters()]])
    return found


def step(layer, x, recipe, **options):
    """Runs forward and backward of one layer; returns its outputs and gradients."""
    return steps([layer], x, recipe, **options)[0]


def same(left, right):
    """Compares lists of tensors or None, bit for bit."""
    assert len(left) == len(right)
    for i, (a, b) in enumerate(zip(left, right, strict=True)):
        assert (a is None) == (b is None), i
        assert a is None or (a.dtype == b.dtype and torch.equal(a, b)), i


def states(layer):
    """Returns the tensors and the header of a layer's FP8 state, if it has one."""
    from apex_te.fp8.delayed.serialize import NAMES

    fp8 = layer.fp8_state
    return [getattr(fp8, name).clone() for name in NAMES] if fp8.allocated else []
