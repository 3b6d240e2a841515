"""apex's fast_multihead_attn: attention layers against plain PyTorch, forward and backward."""

import pytest
import torch
from apex_te.compatibility.apex import fast_multihead_attn as ext
from checks import DTYPES, assert_as_good_as_torch, assert_same_bits, in_pairs
from torch.nn import functional as F

HEADS, SEQS, QUERIES, KEYS, EMBED = 4, 4, 17, 11, 64
KINDS = ("self_attn", "self_attn_bias", "self_attn_bias_additive_mask", "self_attn_norm_add")
KINDS += ("encdec_multihead_attn", "encdec_multihead_attn_norm_add")
# The forward's results before the output, and how backward takes them.
LINS = {"self": ["lin"], "encdec": ["q_lin", "kv_lin"]}


def tensors_of(kind, device, dtype):
    """The differentiable arguments in the forward's order."""
    shapes = {"x": (QUERIES, SEQS, EMBED)}
    encdec = kind.startswith("encdec")
    if encdec:
        shapes["kv"] = (KEYS, SEQS, EMBED)
    if "norm" in kind:
        shapes.update(gamma=(EMBED,), beta=(EMBED,))
    if encdec:
        shapes.update(w_q=(EMBED, EMBED), w_kv=(2 * EMBED, EMBED))
    else:
        shapes["w_in"] = (3 * EMBED, EMBED)
    shapes["w_out"] = (EMBED, EMBED)
    if "bias" in kind:
        shapes.update(b_in=(3 * EMBED,), b_out=(EMBED,))
    made = {k: torch.randn(s) * (0.3 if k[0] == "w" else 1) for k, s in shapes.items()}
    return {name: t.to(dtype).to(device) for name, t in made.items()}


def mask_of(form, kind, device, dtype):
    keys = KEYS if kind.startswith("encdec") else QUERIES
    if form == "none":
        return None
    if "additive" in kind:
        return torch.randn(SEQS, keys).to(dtype).to(device)
    if form == "time":
        return torch.ones(QUERIES, keys, device=device).triu(1).to(torch.uint8)
    mask = torch.zeros(SEQS, keys, dtype=torch.uint8, device=device)
    mask[1, 4:] = 1
    mask[2, :] = 1  # a sequence of padding alone
    return mask


def formula(kind, mask, over_time, kept, kept_out, p, **t):
    """The layer in plain PyTorch, in the tensors' dtype, with the dropout masks given."""
    x = t["x"]
    source = F.layer_norm(x, (EMBED,), t["gamma"], t["beta"]) if "norm" in kind else x

    def heads(lin, parts):
        split = lin.view(*lin.shape[:2], HEADS, parts, EMBED // HEADS)
        return [part.permute(1, 2, 0, 3) for part in split.unbind(3)]

    if kind.startswith("encdec"):
        (q,), (k, v) = heads(F.linear(source, t["w_q"]), 1), heads(F.linear(t["kv"], t["w_kv"]), 2)
    else:
        q, k, v = heads(F.linear(source, t["w_in"], t.get("b_in")), 3)
    scores = q @ k.mT * (EMBED // HEADS) ** -0.5
    if mask is not None:
        shaped = mask[None, None] if over_time else mask[:, None, None]
        if "additive" in kind:
            scores = scores + shaped.to(scores.dtype)
        else:
            scores = scores.masked_fill(shaped.bool(), -torch.inf)
    blind = (scores == -torch.inf).all(-1, keepdim=True)
    softmax = torch.softmax(scores.masked_fill(blind, 0), -1).masked_fill(blind, 0)
    if kept is not None:
        softmax = softmax * kept.view(softmax.shape) / (1 - p)
    out = F.linear((softmax @ v).permute(2, 0, 1, 3).flatten(2), t["w_out"], t.get("b_out"))
    if kept_out is not None:
        out = out * kept_out / (1 - p)
    return x + out if "norm" in kind else out


def run(kind, heads, mask, over_time, is_training, p, dy, tensors):
    """[output, gradients in the order of ``tensors``] of the extension, and its dropout masks."""
    given = list(tensors.values())
    call = (mask is not None, over_time, is_training, heads, *given)
    *saved, out = getattr(ext, kind + "_forward")(*call, mask, p)
    kept_out = saved.pop() if "norm" in kind else None
    norm = [saved.pop(0) for _ in range(3)] if "norm" in kind else []
    context, kept, dropped, softmax, *lins = reversed(saved)
    lins.reverse()
    masks = [mask if mask is not None else torch.empty(0)] if "additive" in kind else []
    affine = [tensors[name] for name in ("gamma", "beta") if name in tensors]
    inputs = [tensors[name] for name in ("x", "kv") if name in tensors]
    weights = [t for name, t in tensors.items() if name[0] == "w"]
    adds = [kept_out] if "norm" in kind else []
    grads = getattr(ext, kind + "_backward")(
        heads, dy, context, dropped, softmax, *masks, *lins, *norm, *inputs, *affine, *weights,
        kept, *adds, p,
    )  # fmt: skip
    return [out, *grads], [t if t is not None and t.numel() else None for t in (kept, kept_out)]


@in_pairs(
    kind=KINDS, form=["none", "padding", "time"], dtype=DTYPES, drop=["no", "eval", "training"]
)
def test_layer(device, poison, kind, form, dtype, drop):
    """Output and all gradients, with the dropout masks that the forward returned."""
    if "additive" in kind and form == "time":
        form = "padding"
    tensors, mask = tensors_of(kind, device, dtype), mask_of(form, kind, device, dtype)
    dy = torch.randn(QUERIES, SEQS, EMBED).to(dtype).to(device)
    p = 0.0 if drop == "no" else 0.25
    over_time = form == "time"
    actual, masks = run(kind, HEADS, mask, over_time, drop != "eval", p, dy, tensors)
    dropped = [m is not None for m in masks]
    assert dropped == [drop == "training", drop == "training" and "norm" in kind]
    # dict order is the forward's; backward returns inputs, gamma, beta, weights, biases: the same.
    results = []
    for wide in (torch.float64, dtype):
        leaves = {k: t.cpu().to(wide).requires_grad_() for k, t in tensors.items()}
        cpu = [None if m is None else m.cpu() for m in (mask, *masks)]
        out = formula(kind, cpu[0], over_time, cpu[1], cpu[2], p, **leaves)
        grads = torch.autograd.grad(out, list(leaves.values()), dy.cpu().to(wide))
        results.append([out.detach(), *grads])
    for a, exact, same in zip(actual, *results, strict=True):
        assert_as_good_as_torch(a, exact, same)


@pytest.mark.parametrize("kind", KINDS)
def test_layer_again_gives_the_same_bits(device, kind):
    """Also where heads and p are elements of tensors, as apex's callers pass them to backward."""
    tensors = tensors_of(kind, device, torch.float32)
    dy = torch.randn(QUERIES, SEQS, EMBED).to(device)
    results = []
    for heads, p in ((HEADS, 0.5), (torch.tensor([HEADS])[0], torch.tensor([0.5])[0])):
        torch.manual_seed(3)
        results.append(run(kind, heads, None, False, True, p, dy, tensors)[0])
    assert_same_bits(*results)


@in_pairs(additive=[False, True], masked=[False, True], dtype=DTYPES, training=[False, True])
def test_softmax(device, additive, masked, dtype, training):
    scores = torch.randn(SEQS * HEADS, QUERIES, KEYS).to(dtype).to(device)
    dy = torch.randn(scores.shape).to(dtype).to(device)
    name = "additive_mask_softmax_dropout" if additive else "mask_softmax_dropout"
    mask = None
    if masked:
        mask = torch.randn(SEQS, KEYS).to(dtype).to(device) * 3
        mask = mask if additive else (mask > 1).to(torch.uint8)
    given = mask if masked else torch.empty(0, device=device)
    forward, backward = (getattr(ext, f"{name}_{way}") for way in ("forward", "backward"))
    dropped, kept, softmax = forward(masked, training, HEADS, scores, given, 0.25)
    grad = backward(
        masked, HEADS, dy, softmax, kept, *([] if additive else [given]), 0.25
    )  # fmt: skip
    assert bool(kept.numel()) == training
    results = []
    for wide in (torch.float64, dtype):
        leaf = scores.cpu().to(wide).requires_grad_()
        shaped = leaf.view(SEQS, HEADS, QUERIES, KEYS)
        if masked and additive:
            shaped = shaped + mask.cpu().to(wide)[:, None, None]
        elif masked:
            shaped = shaped.masked_fill(mask.cpu().bool()[:, None, None], -torch.inf)
        y = torch.softmax(shaped, -1).view(scores.shape)
        if training:
            y = y * kept.cpu() / 0.75
        results.append([y.detach(), torch.autograd.grad(y, leaf, dy.cpu().to(wide))[0]])
    for a, exact, same in zip((dropped, grad), *results, strict=True):
        assert_as_good_as_torch(a, exact, same)


@pytest.mark.parametrize("kind", KINDS)
def test_no_sequences(device, kind):
    """Empty outputs; gradients of the weights are zeros."""
    tensors = tensors_of(kind, device, torch.float32)
    tensors.update({name: tensors[name][:, :0] for name in ("x", "kv") if name in tensors})
    dy = torch.empty(QUERIES, 0, EMBED, device=device)
    (out, *grads), _ = run(kind, HEADS, None, False, True, 0.5, dy, tensors)
    assert out.shape == dy.shape
    for grad, t in zip(grads, tensors.values(), strict=True):
        assert grad.shape == t.shape
        assert not grad.any()


def test_dropping_everything(device):
    tensors = tensors_of("self_attn", device, torch.float32)
    dy = torch.randn(QUERIES, SEQS, EMBED).to(device)
    results, _ = run("self_attn", HEADS, None, False, True, 1.0, dy, tensors)
    assert all(not t.any() for t in results)


def test_refuses(device):
    t = tensors_of("self_attn", device, torch.float32)
    x, w_in, w_out = t.values()
    call = ext.self_attn_forward
    with pytest.raises(ValueError, match="heads must divide the 64 channels, got 5"):
        call(False, False, True, 5, x, w_in, w_out, None, 0.0)
    with pytest.raises(ValueError, match=r"input_weights must have shape \[192, 64\], got \[64"):
        call(False, False, True, 4, x, w_out, w_out, None, 0.0)
    with pytest.raises(TypeError, match=r"output_weights must be torch.float32 as inputs is"):
        call(False, False, True, 4, x, w_in, w_out.half(), None, 0.0)
    with pytest.raises(ValueError, match=r"pad_mask must have shape \[4, 17\], got \[9, 9\]"):
        call(True, False, True, 4, x, w_in, w_out, torch.ones(9, 9, device=device), 0.0)
    with pytest.raises(ValueError, match="use_time_mask must be False, got True"):
        ext.self_attn_bias_additive_mask_forward(
            True, True, True, 4, x, w_in, w_out, w_in[:, 0], w_out[0], None, 0.0
        )
    with pytest.raises(ValueError, match=r"inputs must have shape \[seqs \* 5, queries, keys\]"):
        ext.mask_softmax_dropout_forward(False, True, 5, x, None, 0.0)
