"""Attention written out, and the comparison that the attention modules' tests share."""

import math

import torch
from checks import assert_as_good_as_torch

from apex_te.module.attention import packed, plan
from apex_te.module.attention.candidates import Path
from apex_te.module.attention.dot_product import DotProductAttention

PATHS = ["chosen", "softmax"]
B, H, G, D = 2, 4, 2, 8
TO_HEADS = {"sbhd": (1, 2, 0, 3), "bshd": (0, 2, 1, 3)}


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
        for module in (plan, packed):
            monkeypatch.setattr(module, "choose", lambda *args: forced)
        monkeypatch.setattr(plan, "choose_with_alibi", lambda *args: forced)
        monkeypatch.setattr(plan, "packs", lambda *args: False)
    return request.param


def hides(kind, window, queries, keys, lengths):
    """Plain statement of the mask types: bool [b, 1, queries, keys], True = masked out."""
    hidden = torch.zeros(B, 1, queries, keys, dtype=torch.bool)
    left, right = window or (-1, -1)
    right = 0 if "causal" in kind else right
    for b in range(B):
        q_length, k_length = lengths[b] if "padding" in kind else (queries, keys)
        offset = 0 if kind in ("causal", "padding_causal") else k_length - q_length
        for i in range(queries):
            for j in range(keys):
                hidden[b, 0, i, j] = (
                    i >= q_length
                    or j >= k_length
                    or (right >= 0 and j > i + offset + right)
                    or (left >= 0 and j < i + offset - left)
                )
    return hidden


def padding_masks(queries, keys, lengths):
    q, k = (torch.zeros(B, 1, 1, n, dtype=torch.bool) for n in (queries, keys))
    for b, (q_length, k_length) in enumerate(lengths):
        q[b, ..., q_length:] = True
        k[b, ..., k_length:] = True
    return q, k


def check(
    module, inputs, hidden, fmt, *, mask=None, scale=None, bias=None, constant=None, **kwargs
):
    """Output and gradients for inputs [b, h, s, d] on the CPU; q may be on any device.

    ``constant``: what the module adds to the scores by itself.
    """
    device = module.device

    def run(dtype):
        tensors = [t.to(dtype).requires_grad_() for t in inputs]
        added = None if bias is None else bias.to(dtype).requires_grad_()
        known = added if constant is None else constant.to(dtype)
        out = exact_attention(*tensors, hidden, scale, known)
        leaves = tensors if bias is None else [*tensors, added]
        return [out, *torch.autograd.grad(out, leaves, grad.to(dtype))]

    dtype = inputs[0].dtype
    grad = torch.randn(*inputs[0].shape[:-1], inputs[2].shape[-1]).to(dtype)
    order = TO_HEADS[fmt]
    back = [order.index(i) for i in range(4)]
    tensors = [t.to(device).permute(back).contiguous().requires_grad_() for t in inputs]
    added = None if bias is None else bias.to(device).to(dtype).requires_grad_()
    if mask is not None:
        mask = tuple(m.to(device) for m in mask) if isinstance(mask, tuple) else mask.to(device)
    if bias is not None:
        kwargs.setdefault("core_attention_bias_type", "post_scale_bias")
    out = module(*tensors, mask, qkv_format=fmt, core_attention_bias=added, **kwargs)
    assert out.dtype == dtype
    leaves = tensors if bias is None else [*tensors, added]
    grad_out = grad.to(device).permute(back).flatten(2)
    grads = torch.autograd.grad(out, leaves, grad_out)
    heads = out.unflatten(2, (H, -1))
    actual = [t.permute(order) for t in (heads, *grads[:3])] + list(grads[3:])
    for triple in zip(actual, run(torch.float64), run(dtype), strict=True):
        assert_matches(*triple)
    dead = hidden.all(-1).expand(B, H, -1)
    if dead.any():
        assert actual[0].cpu()[dead].eq(0).all()
        assert actual[1].cpu()[dead].eq(0).all()


def build(device, *args, **kwargs):
    module = DotProductAttention(*args, **kwargs)
    module.device = device
    return module


def tensors(queries, keys, groups=G, dtype=torch.float32, value=D):
    shapes = ((H, queries, D), (groups, keys, D), (groups, keys, value))
    return [torch.randn(B, *shape).to(dtype) for shape in shapes]
