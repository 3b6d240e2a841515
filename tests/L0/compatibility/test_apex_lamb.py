"""apex's LAMB in amp_C, its contrib optimizers' extensions, and the loss scale's hysteresis."""

import math

import pytest
import torch
from apex_lists import (
    CHUNK,
    apply,
    check_step,
    clip,
    clones,
    draw,
    flag,
    global_norm,
    lamb,
    lamb_update,
    one,
    same_bits,
)
from apex_te.compatibility.apex import amp_C, fused_adam_cuda, fused_lamb_cuda
from checks import DTYPES

LAMB = [
    {"step": 1, "correction": 1, "decay": 0.1, "averaging": 1, "mode": 1, "nvlamb": False},
    {"step": 7, "correction": 1, "decay": 0.1, "averaging": 0, "mode": 0, "nvlamb": False},
    {"step": 3, "correction": 0, "decay": 0.0, "averaging": 1, "mode": 1, "nvlamb": True},
    {"step": 3, "correction": 1, "decay": 0.0, "averaging": 1, "mode": 1, "nvlamb": False},
]
FIXED = {"lr": 0.05, "betas": (0.9, 0.99), "eps": 1e-6}


def state(device, dtype, state_dtype):
    return [
        draw(device, dtype),
        draw(device, dtype),
        draw(device, state_dtype),
        draw(device, state_dtype, positive=True),
    ]


def arguments(o, norm, max_norm):
    return (
        FIXED["lr"], *FIXED["betas"], FIXED["eps"], o["step"], o["correction"], o["decay"],
        o["averaging"], o["mode"], norm, max_norm,
    )  # fmt: skip


@pytest.mark.parametrize("max_norm", [1.0, 1e6])
@pytest.mark.parametrize("options", LAMB, ids=range(len(LAMB)))
@pytest.mark.parametrize("dtype", DTYPES)
def test_lamb(device, dtype, options, max_norm):
    """apex's FusedLAMB: the global norm by l2norm, then one call a dtype; moments as parameters."""
    lists = state(device, dtype, dtype)
    lists[1][5].zero_()
    before, noop = clones(*lists), flag(device)
    norm = apply(amp_C.multi_tensor_l2norm, noop, [lists[0]], False)[0]
    apply(
        amp_C.multi_tensor_lamb, noop, lists, *arguments(options, norm, max_norm),
        options["nvlamb"],
    )  # fmt: skip
    factor = clip(global_norm(before[0]), max_norm)
    check_step(lambda *r: lamb(*r, factor=factor, **FIXED, **options), before, lists, [1, 2, 3])


@pytest.mark.parametrize("options", LAMB[:2], ids=range(2))
def test_contrib_lamb(device, options):
    lists = state(device, torch.float32, torch.float32)
    before, noop = clones(*lists), flag(device)
    norm = global_norm(lists[0])
    apply(fused_lamb_cuda.lamb, noop, lists, *arguments(options, norm, 2.0))
    factor = clip(norm, 2.0)
    check_step(lambda *r: lamb(*r, factor=factor, **FIXED, **options), before, lists, [1, 2, 3])


@pytest.mark.parametrize("options", LAMB, ids=range(len(LAMB)))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_copy", [False, True])
def test_lamb_mp(device, dtype, options, with_copy):
    """apex's FusedMixedPrecisionLamb with a grad scaler: norm and limit are of scaled gradients."""
    scale = 64.0
    lists = state(device, dtype, torch.float32 if with_copy else dtype)
    lists[0] = [g * scale for g in lists[0]]
    if with_copy:
        lists[1] = draw(device, torch.float32)
        lists.append([p.to(dtype) for p in lists[1]])
    before, noop, found_inf = clones(*lists), flag(device), one(0.0, device)
    noop.copy_(found_inf)
    norm = apply(amp_C.multi_tensor_l2norm_mp, noop, [lists[0]], False)[0]
    o = options
    rest = (
        one(FIXED["lr"], device).squeeze(), *FIXED["betas"], FIXED["eps"],
        one(o["step"], device, torch.int32), o["correction"], o["decay"], o["averaging"],
        o["mode"], norm, one(1.0, device) * scale, o["nvlamb"], found_inf, one(1 / scale, device),
    )  # fmt: skip
    apply(amp_C.multi_tensor_lamb_mp, flag(device, 1), lists, *rest)
    assert same_bits(lists, before)
    apply(amp_C.multi_tensor_lamb_mp, noop, lists, *rest)
    factor = clip(global_norm(before[0]), scale) / scale
    check_step(
        lambda *r: lamb(*r[:4], factor=factor, **FIXED, **options), before[:4], lists, [1, 2, 3]
    )
    if with_copy:
        assert same_bits(lists[4:], [[p.to(dtype) for p in lists[1]]])


@pytest.mark.parametrize("norm_device", ["same", "cpu"])
@pytest.mark.parametrize("update_dtype", DTYPES)
def test_lamb_stages(device, update_dtype, norm_device):
    """The two stages with the norms taken between, as the older optimizer calls them."""
    lists = state(device, torch.float32, torch.float32)
    updates = draw(device, update_dtype)
    decays = torch.linspace(0.0, 0.2, len(updates), device=device)
    before, noop = clones(*lists), flag(device)
    norm = global_norm(lists[0])
    apply(
        amp_C.multi_tensor_lamb_stage1_cuda, noop, [*lists, updates], decays, 4, *FIXED["betas"],
        FIXED["eps"], one(norm, "cpu" if norm_device == "cpu" else device), 1.0,
    )  # fmt: skip
    fixed = {"betas": FIXED["betas"], "eps": FIXED["eps"], "averaging": 1, "mode": 1}
    rows = [*before, [d.cpu().expand(len(p)) for d, p in zip(decays, before[1], strict=True)]]

    def first(g, p, m, v, decay):
        return lamb_update(
            g, p, m, v, step=5, correction=1, decay=decay, factor=clip(norm, 1.0), **fixed
        )

    check_step(first, rows, [updates, lists[2], lists[3]], [0, 1, 2])
    params = apply(amp_C.multi_tensor_l2norm, noop, [lists[1]], True)[1]
    sizes = apply(amp_C.multi_tensor_l2norm, noop, [updates], True)[1]
    for decay, nvlamb in ((0.1, None), (0.0, True), (0.0, False)):
        weights = [p.clone() for p in before[1]]
        weights[5].zero_()
        stood = clones(weights, updates)
        norms = params.clone()
        norms[5] = 0.0
        apply(
            amp_C.multi_tensor_lamb_stage2_cuda, noop, [weights, updates], norms, sizes, 0.05,
            decay, nvlamb,
        )  # fmt: skip

        def second(p, u, has_ratio=bool(decay or nvlamb)):
            sizes = p.norm(), u.norm()
            ratio = sizes[0] / sizes[1] if has_ratio and sizes[0] and sizes[1] else 1.0
            return (p - 0.05 * ratio * u,)

        check_step(second, stood, [weights], [0])


def contrib_adam(p, m, v, g, lr, b1, b2, eps, scale, step, mode, correction, decay):
    """(p, m, v) after apex's contrib FusedAdam, epsilon inside the root in mode 0."""
    size = lr * math.sqrt(1 - b2**step) / (1 - b1**step) if correction else lr
    g = g / scale
    m = b1 * m + (1 - b1) * g
    v = b2 * v + (1 - b2) * g * g
    root = v.sqrt() + eps if mode else (v + eps).sqrt()
    return p - size * (m / root + decay * p), m, v


# lr, beta1, beta2, eps, grad_scale, step, mode, bias_correction, decay
CONTRIB = [
    (1e-2, 0.9, 0.999, 1e-8, 1.0, 1, 1, 1, 0.0),
    (1e-2, 0.9, 0.95, 1e-3, 128.0, 6, 1, 1, 0.1),
    (1e-2, 0.9, 0.999, 1e-8, 16.0, 3, 1, 0, 0.1),
    (1e-2, 0.9, 0.95, 1e-3, 128.0, 6, 0, 1, 0.1),
    (1e-2, 0.9, 0.999, 1e-8, 16.0, 3, 0, 0, 0.1),
]


@pytest.mark.parametrize("options", CONTRIB, ids=range(len(CONTRIB)))
@pytest.mark.parametrize("copy_dtype", [None, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("together", [False, True])
def test_contrib_adam(device, copy_dtype, together, options):
    lists = [draw(device, torch.float32), draw(device, torch.float32)]
    lists.append(draw(device, torch.float32, positive=True))
    lists.append(draw(device, copy_dtype or torch.float32, factor=options[4]))
    if copy_dtype is not None:
        lists.append(draw(device, copy_dtype))
    before = clones(*lists)
    if together:
        apply(fused_adam_cuda.adam_mt, flag(device), lists, *options)
    else:
        none = torch.tensor([], dtype=torch.float, device=device)
        for i in range(len(lists[0])):
            p, m, v, g, *copy = (tensors[i] for tensors in lists)
            fused_adam_cuda.adam(p, copy[0] if copy else none, m, v, g, *options)
    check_step(lambda *r: contrib_adam(*r, *options), before[:4], lists, [0, 1, 2])
    if copy_dtype is not None:
        assert same_bits(lists[4:], [[p.to(copy_dtype) for p in lists[0]]])


def test_contrib_adam_refuses(device):
    p, m, v, g = (torch.ones(4, device=device) for _ in range(4))
    options = list(CONTRIB[0])
    with pytest.raises(ValueError, match="m must have 4 elements, got 3"):
        fused_adam_cuda.adam(p, p[:0], m[:3], v, g, *options)
    options[6] = 2
    with pytest.raises(ValueError, match="mode must be 0 or 1, got 2"):
        fused_adam_cuda.adam(p, p[:0], m, v, g, *options)


def hysteresis_rule(scale, growth, left, found, grow, backoff, interval, hysteresis):
    """apex's update of the loss scale and its counters, on the host."""
    if found > 0:
        left -= 1
        if left > 0:
            return scale, 0, left
        return scale * backoff, 0, left
    growth += 1
    if growth == interval:
        return (scale * grow if math.isfinite(scale * grow) else scale), 0, hysteresis
    return scale, growth, hysteresis


def test_update_scale_hysteresis(device):
    found = [0, 0, 1, 0, 1, 1, 1, 0, 0, 0, 0, 1, 1, 0]
    scale, growth, left = one(1024.0, device), flag(device), flag(device, 2)
    expected = (1024.0, 0, 2)
    for value in found:
        result = amp_C.update_scale_hysteresis(
            scale, growth, left, one(float(value), device), 2.0, 0.5, 3, 2
        )
        assert result is scale
        expected = hysteresis_rule(*expected, value, 2.0, 0.5, 3, 2)
        assert (scale.item(), growth.item(), left.item()) == expected
    largest = one(3e38, device)
    amp_C.update_scale_hysteresis(
        largest, flag(device, 2), flag(device, 2), one(0.0, device), 2.0, 0.5, 3, 2
    )
    assert largest.item() == pytest.approx(3e38)


def test_no_tensors_is_no_step(device):
    empty = [[], [], [], [], []]
    amp_C.multi_tensor_scale(CHUNK, flag(device), empty[:2], 1.0)
    amp_C.multi_tensor_sgd(CHUNK, flag(device), empty[:3], 0.1, 0.9, 0, 0.1, False, False, True, 1)
    amp_C.multi_tensor_lamb(
        CHUNK, flag(device), empty[:4], *arguments(LAMB[0], one(1.0, device), 1.0)
    )
    fused_adam_cuda.adam_mt(CHUNK, flag(device), empty[:4], *CONTRIB[0])
