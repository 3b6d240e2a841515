"""apex's attention modules and functions against torch's multi_head_attention_forward."""

import pytest
import torch
from checks import DTYPES, assert_as_good_as_torch, in_pairs
from torch.nn import functional as F

from apex_te.integrations.apex.contrib.multihead_attn import (
    EncdecMultiheadAttn,
    SelfMultiheadAttn,
    fast_mask_softmax_dropout_func,
)
from apex_te.integrations.apex.contrib.multihead_attn.fast_self_multihead_attn_func import (
    FastSelfAttnFunc,
)

EMBED, HEADS, SEQS, QUERIES, KEYS = 64, 4, 4, 17, 11


def rows_in_order(t, parts):
    """A projection's rows ordered part, head, channel, which apex orders head, part, channel."""
    return t.unflatten(0, (HEADS, parts, -1)).transpose(0, 1).flatten(0, 2)


def formula(module, p, query, key, mask, over_time):
    """What ``module`` computes, by torch, of the tensors ``p`` in their dtype."""
    wide = next(iter(p.values())).dtype
    names = ("lyr_nrm_gamma_weights", "lyr_nrm_beta_weights")
    names = names if names[0] in p else ("lyr_nrm.weight", "lyr_nrm.bias")
    source = query
    if module.include_norm_add:
        source = F.layer_norm(query, (EMBED,), *(p[n] for n in names))
    if "in_proj_weight_q" in p:
        parts = [[p["in_proj_weight_q"]], rows_in_order(p["in_proj_weight_kv"], 2).chunk(2)]
        weight = torch.cat([*parts[0], *parts[1]])
        bias = [p.get("in_proj_bias_q"), p.get("in_proj_bias_kv")]
        bias = None if bias[0] is None else torch.cat([bias[0], rows_in_order(bias[1], 2)])
    elif "q_weight" in p:
        key, weight = source, torch.cat([p[f"{n}_weight"] for n in "qkv"])
        bias = torch.cat([p[f"{n}_bias"] for n in "qkv"]) if module.bias else None
    else:
        key, weight = source, rows_in_order(p["in_proj_weight"], 3)
        bias = rows_in_order(p["in_proj_bias"], 3) if module.bias else None
    if mask is not None:
        mask = mask.to(wide) if mask.is_floating_point() else mask.bool()
    masks = {"attn_mask" if over_time else "key_padding_mask": mask}
    out, _ = F.multi_head_attention_forward(
        source, key, key, EMBED, HEADS, weight, bias, None, None, False, 0.0,
        p["out_proj_weight"], p.get("out_proj_bias"), need_weights=True, **masks,
    )  # fmt: skip
    return query + out if module.include_norm_add else out


def made(device, encdec, impl, bias, norm, separate, additive):
    """A module; where apex refuses the combination of options, with the one that it takes."""
    if bias and (norm or encdec):
        impl = "default"
    options = {"bias": bias, "include_norm_add": norm, "impl": impl}
    if not encdec:
        options["separate_qkv_params"] = separate
    if additive:
        options.update(bias=True, mask_additive=True, include_norm_add=False)
    module = (EncdecMultiheadAttn if encdec else SelfMultiheadAttn)(EMBED, HEADS, **options)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return module.to(device)


@in_pairs(
    encdec=[False, True], impl=["fast", "default"], bias=[False, True], norm=[False, True],
    separate=[False, True], mask=["none", "padding", "time", "additive"], dtype=DTYPES,
)  # fmt: skip
def test_module(device, encdec, impl, bias, norm, separate, mask, dtype):
    """Output and the gradients of inputs and parameters; inference gives the output, too."""
    if encdec and mask == "additive":
        mask = "padding"
    module = made(device, encdec, impl, bias, norm, separate, mask == "additive")
    module = module.to(dtype)
    keys = KEYS if encdec else QUERIES
    # Not contiguous, as a batch-first tensor's transpose.
    query, key = (
        torch.randn(SEQS, n, EMBED).to(dtype).to(device).transpose(0, 1).requires_grad_()
        for n in (QUERIES, keys)
    )
    given = None
    if mask == "padding":
        given = torch.zeros(SEQS, keys, dtype=torch.uint8, device=device)
        given[1, 7:] = 1
    elif mask == "time":
        given = torch.ones(QUERIES, keys, device=device).triu(1).bool()
    elif mask == "additive":
        given = torch.randn(SEQS, keys).to(dtype).to(device)
    name = "attn_mask" if mask == "time" else "key_padding_mask"
    out, weights = module(query, key, key, **{name: given}, is_training=True)
    assert weights is None
    leaves = [query, *([key] if encdec else []), *module.parameters()]
    dy = torch.randn(out.shape).to(dtype).to(device)
    actual = [out, *torch.autograd.grad(out, leaves, dy)]
    with torch.no_grad():
        actual.append(module(query, key, key, **{name: given}, is_training=False)[0])
    results = []
    for wide in (torch.float64, dtype):
        p = {n: t.detach().cpu().to(wide).requires_grad_() for n, t in module.named_parameters()}
        q, k = (t.detach().cpu().to(wide).requires_grad_() for t in (query, key))
        hidden = None if given is None else given.cpu()
        y = formula(module, p, q, k, hidden, mask == "time")
        grads = torch.autograd.grad(
            y, [q, *([k] if encdec else []), *p.values()], dy.cpu().to(wide)
        )
        results.append([y.detach(), *grads, y.detach()])
    for a, exact, same in zip(actual, *results, strict=True):
        assert_as_good_as_torch(a, exact, same)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("kind", [SelfMultiheadAttn, EncdecMultiheadAttn])
def test_dropout_in_training_alone(device, kind, norm):
    """It changes the output with the seed, keeps its mean, and is left out without training."""
    module = kind(EMBED, HEADS, dropout=0.4, include_norm_add=norm).to(device)
    x = torch.randn(QUERIES, SEQS, EMBED, device=device)
    outs = {}
    for grad_mode in (True, False):
        with torch.set_grad_enabled(grad_mode):
            torch.manual_seed(5)
            outs[grad_mode] = module(x, x, x)[0]
            plain = module(x, x, x, is_training=False)[0]
            again = module(x, x, x, is_training=False)[0]
            assert torch.equal(plain, again)
            assert not torch.equal(outs[grad_mode], plain)
    assert torch.equal(*outs.values())
    with torch.no_grad():
        mean = torch.stack([module(x, x, x)[0] for _ in range(300)]).mean(0)
    assert (mean - plain).abs().max() < 0.25 * (plain - x if norm else plain).abs().max()


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("impl", ["fast", "default"])
def test_autocast(device, impl, norm):
    """fp32 modules compute in autocast's dtype, and their gradients are fp32."""
    module = SelfMultiheadAttn(EMBED, HEADS, include_norm_add=norm, impl=impl).to(device)
    x = torch.randn(QUERIES, SEQS, EMBED, device=device)
    expected = module(x)[0]
    with torch.autocast(device.type, torch.bfloat16):
        out = module(x)[0]
    out.float().sum().backward()
    assert module.out_proj_weight.grad.dtype is torch.float32
    torch.testing.assert_close(out.float(), expected, atol=0.03, rtol=0.03)


def test_names_of_parameters():
    """apex's checkpoints load."""

    def names(kind, **options):  # fmt: skip
        return set(kind(EMBED, HEADS, **options).state_dict())

    both = {"in_proj_weight", "out_proj_weight"}
    norm = {"lyr_nrm_gamma_weights", "lyr_nrm_beta_weights"}
    assert names(SelfMultiheadAttn) == both
    assert names(SelfMultiheadAttn, bias=True) == both | {"in_proj_bias", "out_proj_bias"}
    assert names(SelfMultiheadAttn, include_norm_add=True) == both | norm
    default = names(SelfMultiheadAttn, include_norm_add=True, impl="default")
    assert default == both | {"lyr_nrm.weight", "lyr_nrm.bias"}
    separate = {f"{n}_{kind}" for n in "qkv" for kind in ("weight", "bias")}
    assert names(SelfMultiheadAttn, bias=True, separate_qkv_params=True) == separate | {
        "out_proj_weight", "out_proj_bias",
    }  # fmt: skip
    encdec = {"in_proj_weight_q", "in_proj_weight_kv", "out_proj_weight"}
    assert names(EncdecMultiheadAttn) == encdec
    biases = {"in_proj_bias_q", "in_proj_bias_kv", "out_proj_bias"}
    assert names(EncdecMultiheadAttn, bias=True, impl="default") == encdec | biases


def test_initial_weights():
    """Each of q, k and v as a square matrix of its own; biases 0, the norm the identity."""
    bound = (6 / (2 * EMBED)) ** 0.5
    for weight in (
        SelfMultiheadAttn(EMBED, HEADS).in_proj_weight,
        EncdecMultiheadAttn(EMBED, HEADS).in_proj_weight_kv,
    ):
        assert 0.95 * bound < weight.abs().max() <= bound
    module = SelfMultiheadAttn(EMBED, HEADS, bias=True)
    assert not module.in_proj_bias.any()
    module = SelfMultiheadAttn(EMBED, HEADS, include_norm_add=True)
    assert (module.lyr_nrm_gamma_weights == 1).all()


def masked(scores, hidden):
    return scores.masked_fill(hidden.bool(), -torch.inf)


@pytest.mark.parametrize("additive", [False, True])
def test_mask_softmax_dropout(device, additive):
    scores = torch.randn(SEQS * HEADS, QUERIES, KEYS, device=device, requires_grad=True)
    mask = torch.randn(SEQS, KEYS, device=device)
    mask = mask if additive else (mask > 1).byte()
    y = fast_mask_softmax_dropout_func(True, HEADS, scores, mask, additive, 0.0)
    dy = torch.randn_like(y)
    results = [[y, torch.autograd.grad(y, scores, dy)[0]]]
    for wide in (torch.float64, torch.float32):
        leaf = scores.detach().cpu().to(wide).requires_grad_()
        shaped, hidden = leaf.view(SEQS, HEADS, QUERIES, KEYS), mask.cpu()[:, None, None]
        hide = torch.Tensor.add if additive else masked
        out = hide(shaped, hidden).softmax(-1).view(scores.shape)
        results.append([out, torch.autograd.grad(out, leaf, dy.cpu().to(wide))[0]])
    for a, exact, same in zip(*results, strict=True):
        assert_as_good_as_torch(a, exact, same)


class Layer(torch.nn.Module):
    """A decoder layer with apex's modules, or with torch's of the same weights."""

    def __init__(self, apex):
        super().__init__()
        torch.manual_seed(0)
        self.own = SelfMultiheadAttn(EMBED, HEADS, include_norm_add=True)
        self.cross = EncdecMultiheadAttn(EMBED, HEADS, bias=True, impl="default")
        self.last = torch.nn.Linear(EMBED, EMBED)
        self.apex = apex

    def forward(self, x, memory):
        future = torch.ones(len(x), len(x)).triu(1).bool()
        if self.apex:
            y, _ = self.own(x, x, x, attn_mask=future)
            z, _ = self.cross(y, memory, memory)
        else:
            y = formula(self.own, dict(self.own.named_parameters()), x, x, future, True)
            z = formula(self.cross, dict(self.cross.named_parameters()), y, memory, None, False)
        return self.last(torch.relu(z))


def test_twenty_steps_as_plain_torch():
    """Losses and trained weights, within torch's own error."""
    runs = []
    for apex, wide in ((True, torch.float32), (False, torch.float64), (False, torch.float32)):
        model = Layer(apex).to(wide)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        losses = []
        torch.manual_seed(1)
        for _ in range(20):
            x, memory = torch.randn(2, QUERIES, SEQS, EMBED).to(wide)
            loss = (model(x, memory) - x.roll(1, -1)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        runs.append([torch.stack(losses), *model.parameters()])
    for a, exact, same in zip(*runs, strict=True):
        assert_as_good_as_torch(a, exact, same)
    assert runs[0][0][-1] < runs[0][0][0]


def test_refuses(device):
    with pytest.raises(ValueError, match="embed_dim must be divisible by num_heads, got 64 and 5"):
        SelfMultiheadAttn(64, 5)
    with pytest.raises(ValueError, match="impl must be 'fast' or 'default', got 'slow'"):
        EncdecMultiheadAttn(32, 4, impl="slow")
    with pytest.raises(ValueError, match="EncdecMultiheadAttn: bias must be False with impl"):
        EncdecMultiheadAttn(32, 4, bias=True)
    with pytest.raises(ValueError, match="SelfMultiheadAttn: bias must be False with include"):
        SelfMultiheadAttn(32, 4, bias=True, include_norm_add=True)
    for options in ({"include_norm_add": True, "impl": "default"}, {}):
        with pytest.raises(ValueError, match="mask_additive must be False with include_norm_add"):
            SelfMultiheadAttn(32, 4, mask_additive=True, **options)
    x, mask = torch.randn(5, 2, 32, device=device), torch.zeros(2, 5, device=device)
    module = SelfMultiheadAttn(32, 4, bias=True, mask_additive=True).to(device)
    with pytest.raises(ValueError, match="attn_mask must be None if key_padding_mask is given"):
        module(x, key_padding_mask=mask, attn_mask=mask)
    with pytest.raises(ValueError, match="attn_mask must be None with mask_additive"):
        module(x, attn_mask=mask)
    weights = (torch.randn(96, 32, device=device), torch.randn(32, 32, device=device))
    with pytest.raises(NotImplementedError, match="mask_additive must be False without biases"):
        FastSelfAttnFunc.apply(False, True, 4, x, *weights, None, None, mask, True, 0.0)
