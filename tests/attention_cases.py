"""Attention written out, and the comparison that the attention modules' tests share."""

import math

import torch
from checks import assert_as_good_as_torch

from apex_te.module import _packed_attention, dot_product_attention
from apex_te.module._attention_backends import Path

PATHS = ["chosen", "softmax"]


def exact_attention(q, k, v, hidden, scale=None, bias=None):
    """q [b, h, sq, d], k, v [b, g, sk, d]; hidden broadcasts; every step in q's dtype."""
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    scores = q @ k.transpose(-1, -2) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    scores = scores if bias is None else scores + bias
    dead = hidden.all(-1, keepdim=True)
    scores = scores.masked_fill(hidden, -torch.inf).masked_fill(dead, 0.0)
    return torch.softmax(scores, -1).masked_fill(hidden | dead, 0.0) @ v


def torchs_attention(q, k, v, hidden, device):
    """The same through PyTorch's attention kernels on ``device``: its error is the measure there.

    They round probabilities to the inputs' dtype, which the formula above does not.
    """
    if device.type == "cpu" or hidden.all(-1).any():
        return exact_attention(q, k, v, hidden)
    q, k, v, visible = (t.to(device) for t in (q, k, v, ~hidden))
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=visible, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out.cpu()


def assert_layer_matches(actual, exact, same_dtype):
    """`assert_matches` with root mean squares of the errors for fp16 and bf16.

    Roundings of many steps meet in a gradient, of which the largest of few elements says little.
    """
    if actual.dtype is torch.float32:
        assert_matches(actual, exact, same_dtype)
        return
    actual, exact, same_dtype = (t.detach().cpu().double() for t in (actual, exact, same_dtype))
    assert actual.shape == exact.shape
    error, torchs, size = (t.square().mean().sqrt().item() for t in (
        actual - exact, same_dtype - exact, exact
    ))  # fmt: skip
    assert error <= 2 * torchs + 1e-4 * size, f"error {error:.3e}, torch's {torchs:.3e}"


def assert_matches(actual, exact, same_dtype):
    """fp32 by numerics.md's tolerances against float64, fp16 and bf16 by torch's own error."""
    if actual.dtype is torch.float32:
        torch.testing.assert_close(actual.cpu(), exact.float().cpu(), rtol=1.3e-6, atol=1e-5)
    else:
        assert_as_good_as_torch(actual, exact, same_dtype)


def take_path(request, monkeypatch):
    """For a fixture over ``PATHS``: the path that is chosen, or the fused softmax everywhere."""
    if request.param == "softmax":
        forced = Path("softmax", "forced")
        for module in (dot_product_attention, _packed_attention):
            monkeypatch.setattr(module, "choose", lambda *args: forced)
    return request.param
