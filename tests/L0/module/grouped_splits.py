"""GroupedLinear with m_splits as a tensor: recipes and comparisons with a list."""

import copy

import torch

from apex_te.module.grouped import on_device as on_device
from apex_te.module.grouped.linear import GroupedLinear
from apex_te.recipe import BlockScaling, CurrentScaling, DelayedScaling, Format

E4M3 = {"fp8_format": Format.E4M3}
RECIPES = {
    "delayed": DelayedScaling(amax_history_len=4, **E4M3),
    "first": DelayedScaling(amax_history_len=4, first_step="current", **E4M3),
    "tensorwise": CurrentScaling(**E4M3),
    "hybrid": DelayedScaling(amax_history_len=4),
    "hybrid tensorwise": CurrentScaling(pow2=True),
    "blockwise": BlockScaling(),
    "blockwise 1x128": BlockScaling(wgrad_input="1x128"),
    "hybrid blockwise": BlockScaling(fp8_format=Format.HYBRID, pow2=False),
    "plain wgrad": CurrentScaling(override_linear_precision=(False, False, True), **E4M3),
}
# (rows, splits): uneven with padding, empty groups, all in one, none of it in a whole tile.
LAYOUTS = [(96, [16, 0, 48, 16]), (40, [5, 0, 16, 3]), (64, [0, 64, 0, 0]), (32, [7, 7, 9, 9])]


def read_on_device(monkeypatch):
    """Have the CPU, too, take the path that leaves splits where they are."""
    monkeypatch.setattr(on_device, "stays_on_device", lambda device: True)


def tensor_of(splits, device, dtype=torch.int32):
    return torch.tensor(splits, dtype=dtype, device=device)


def padded(value, rows, fill):
    return torch.cat([value, value.new_full((rows - len(value), value.shape[1]), fill)])


def pair(device, dtype=torch.bfloat16, sizes=(48, 32), **options):
    module = GroupedLinear(4, *sizes, device=device, params_dtype=dtype, **options)
    for name, value in module.named_parameters():
        if "bias" in name:
            torch.nn.init.normal_(value)
    return module, copy.deepcopy(module)


def assert_close(actual, expected, roundings=3):
    """Within some roundings to bfloat16 of the largest values: sums are in another order."""
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    if actual.numel():
        bound = roundings * 2.0**-8 * expected.float().abs().max() + 1e-6
        assert (actual.float() - expected.float()).abs().max() <= bound


def assert_same_state(module, other):
    """Equal scales and amaxes, those of gradients within what their gradients differ by."""
    for name in ("scale_fwd", "amax_history_fwd", "scale_bwd", "amax_history_bwd"):
        assert torch.equal(getattr(module.fp8_state, name), getattr(other.fp8_state, name)), name


def gradients(module):
    return {name: value.grad for name, value in module.named_parameters()}


def step(module, other, x, dy, splits, rows, region, *arguments):
    """Forward and backward of both; ``other`` has a list and no padding."""
    total = sum(splits)
    inputs = [padded(x, rows, float("nan")).requires_grad_(), x.clone().requires_grad_()]
    with region():
        out = module(inputs[0], tensor_of(splits, x.device), *arguments)
        expected = other(inputs[1], splits, *arguments)
    out.backward(padded(dy, rows, float("nan")))
    expected.backward(dy)
    assert out.dtype == expected.dtype
    assert not out[total:].any()
    assert not inputs[0].grad[total:].any()
    assert_close(out[:total], expected)
    assert_close(inputs[0].grad[:total], inputs[1].grad)
