"""apex's functions of distributed and reversible optimizers, and amp_C's steps of one moment."""

import math

import pytest
import torch
from apex_lists import (
    CHUNK,
    adam,
    apply,
    check_step,
    clones,
    draw,
    flag,
    lamb_update,
    one,
    same_bits,
)
from apex_te.compatibility.apex import (
    amp_C,
    distributed_adam_cuda,
    distributed_lamb_cuda,
    fused_adam_cuda,
)
from checks import DTYPES

from apex_te.ops import multi_tensor_optim as op


@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_adagrad(device, dtype, mode):
    lists = [draw(device, dtype), draw(device, dtype), draw(device, dtype, positive=True)]
    before = clones(*lists)
    apply(amp_C.multi_tensor_adagrad, flag(device, 1), lists, 0.1, 1e-3, mode, 0.2)

    def formula(g, p, h):
        return op.reference_adagrad(
            p, g, h, lr=0.1, eps=1e-3, weight_decay=0.2, adagrad_w=mode == 1
        )

    check_step(formula, before, lists, [1, 2])
    assert same_bits(lists[:1], before[:1])


@pytest.mark.parametrize("norm_type", [0, 2])
@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_novograd(device, dtype, mode, norm_type):
    lists = [draw(device, dtype) for _ in range(3)]
    norms = torch.rand(len(lists[0]), device=device) + 0.5
    old, before = norms.tolist(), clones(*lists)
    apply(
        amp_C.multi_tensor_novograd, flag(device, 1), lists, norms, 0.1, 0.9, 0.8, 1e-3, 3, 1, 0.2,
        1, mode, norm_type,
    )  # fmt: skip
    exact = []
    for g, v in zip(before[0], old, strict=True):
        g = g.double().cpu()
        if norm_type == 2:
            exact.append(math.sqrt(0.8 * v * v + 0.2 * g.square().sum().item()))
        else:
            exact.append(0.8 * v + 0.2 * (g.abs().max().item() if g.numel() else 0.0))
    torch.testing.assert_close(norms.cpu(), torch.tensor(exact), rtol=1e-6, atol=0)
    kept = iter(norms.tolist() * 2)  # of each row, in float64 and in float32

    def formula(g, p, m):
        return op.reference_novograd(
            p, g, m, next(kept), lr=0.1, betas=(0.9, 0.8), eps=1e-3, step=3, weight_decay=0.2,
            decoupled=mode == 1,
        )  # fmt: skip

    check_step(formula, before, lists, [1, 2])


@pytest.mark.parametrize("is_skipped", [False, True])
@pytest.mark.parametrize("copy_dtype", [None, torch.float16])
@pytest.mark.parametrize("nesterov", [False, True])
def test_lars(device, nesterov, copy_dtype, is_skipped):
    lists = [draw(device, torch.float16), draw(device, torch.float32), draw(device, torch.float32)]
    if copy_dtype is not None:
        lists.append(draw(device, copy_dtype))
    norms = [torch.stack([t.float().norm() for t in tensors]) for tensors in lists[:2]]
    before = clones(*lists)
    arguments = (0.1, 0.02, 1e-4, 0.1, 0.9, 0.0, nesterov, False, False, 1.0, is_skipped)
    apply(amp_C.multi_tensor_lars, flag(device, 1), lists, *norms, *arguments)
    assert same_bits(lists, before)
    apply(amp_C.multi_tensor_lars, flag(device), lists, *norms, *arguments)

    def formula(g, p, m, *_):
        return op.reference_lars(
            p, g, m, g.norm().item(), p.norm().item(), lr=0.1, trust_coefficient=0.02, eps=1e-4,
            weight_decay=0.1, momentum=0.9, nesterov=nesterov, adapt=not is_skipped,
        )  # fmt: skip

    check_step(formula, before, lists, [1, 2])
    if copy_dtype is not None:
        assert same_bits(lists[3:], [[p.to(copy_dtype) for p in lists[1]]])


OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-3, "step": 6, "correction": 1, "decay": 0.1}


def _distributed_adam_arguments(device, mode, capturable):
    lr, step = OPTIONS["lr"], OPTIONS["step"]
    if capturable:
        lr, step = one(lr, device), one(step, device, torch.int32)
    return (one(0.25, device), lr, *OPTIONS["betas"], OPTIONS["eps"], step, mode, 1, 0.1)


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.float32, torch.float32, torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float32, torch.float16, torch.float32),
        (torch.bfloat16, torch.float16, torch.float32, torch.float16),
    ],
    ids=str,
)
def test_distributed_adam(device, dtypes, mode, capturable):
    p_dtype, state_dtype, g_dtype, out_dtype = dtypes
    lists = [draw(device, p_dtype), draw(device, state_dtype)]
    lists += [draw(device, state_dtype, positive=True), draw(device, g_dtype)]
    lists.append(draw(device, out_dtype))
    before = clones(*lists)
    name = f"multi_tensor_fused_adam{'_capturable' if capturable else ''}"
    step = getattr(distributed_adam_cuda, name)
    arguments = _distributed_adam_arguments(device, mode, capturable)
    if capturable:
        apply(step, flag(device, 1), lists, *arguments)
        assert same_bits(lists, before)
    apply(step, flag(device, 0 if capturable else 1), lists, *arguments)
    check_step(
        lambda p, m, v, g, _: adam(g, p, m, v, factor=0.25, mode=mode, **OPTIONS),
        before, lists, [0, 1, 2],
    )  # fmt: skip
    assert same_bits(lists[3:4], before[3:4])
    if p_dtype is torch.float32:
        assert same_bits(lists[4:], [[p.to(out_dtype) for p in lists[0]]])


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("mode", [0, 1])
def test_distributed_adam_with_param_remainders(device, mode, in_place):
    weights = draw(device, torch.float32)
    bits = [w.view(torch.int32) for w in weights]
    p = [((b + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16) for b in bits]
    rest = [((b << 16) >> 16).to(torch.int16) for b in bits]
    state = [draw(device, torch.float32), draw(device, torch.float32, positive=True)]
    g = draw(device, torch.bfloat16)
    plain = [weights, *clones(*state), g, [torch.empty_like(w) for w in weights]]
    arguments = _distributed_adam_arguments(device, mode, False)
    out = p if in_place else [torch.empty_like(t) for t in p]
    given = clones(p)
    apply(distributed_adam_cuda.multi_tensor_fused_adam, flag(device), plain, *arguments)
    apply(
        distributed_adam_cuda.multi_tensor_fused_adam_with_param_remainders, flag(device),
        [p, rest, *state, g, out], *arguments,
    )  # fmt: skip
    joined = [
        ((high.view(torch.int16).int() << 16) + low).view(torch.float32)
        for high, low in zip(out, rest, strict=True)
    ]
    assert same_bits([joined, *state], plain[:3])
    if not in_place:
        assert same_bits([p], given)


@pytest.mark.parametrize("max_norm", [0.0, 0.5])
@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_distributed_lamb_update_term(device, dtype, mode, max_norm):
    lists = [draw(device, torch.float16), draw(device, dtype), draw(device, dtype)]
    lists += [draw(device, dtype, positive=True), draw(device, dtype)]
    n = len(lists[0])
    vectors = [torch.full((n,), x, device=device, dtype=dtype) for x in (0.5, 0.75, 0.5, 0.0625)]
    decay = (torch.arange(n, device=device) % 2 * 0.125).to(dtype)
    correction = torch.ones(n, dtype=torch.int32, device=device)
    scale, norm = one(8.0, device), one(40.0, device)
    before, noop = clones(*lists), flag(device, 1)
    arguments = (
        *vectors[:3], correction, one(3, device, torch.int32), vectors[3], mode, decay, scale, norm,
        max_norm,
    )  # fmt: skip
    step = distributed_lamb_cuda.multi_tensor_lamb_compute_update_term
    apply(step, noop, lists, *arguments)
    assert same_bits(lists, before)
    apply(step, flag(device), lists, *arguments)
    factor = min(1.0, max_norm / (40.0 / 8.0 + 1e-6)) / 8.0 if max_norm else 1 / 8.0
    decays = iter(decay.tolist() * 2)

    def formula(g, p, m, v, _):
        return lamb_update(
            g, p, m, v, betas=(0.5, 0.75), eps=0.0625, step=3, mode=mode, correction=1,
            decay=next(decays), averaging=1, factor=factor,
        )  # fmt: skip

    check_step(formula, before, lists, [4, 2, 3])
    assert same_bits(lists[:2], before[:2])


@pytest.mark.parametrize("nvlamb", [False, True])
@pytest.mark.parametrize(
    ("dtype", "copy_dtype"),
    [(torch.float32, torch.float16), (torch.float16, torch.float32), (torch.float32, torch.uint8)],
)
def test_distributed_lamb_weights(device, dtype, copy_dtype, nvlamb):
    lists = [draw(device, torch.float32), draw(device, dtype)]
    lists.append([torch.zeros(p.shape, dtype=copy_dtype, device=device) for p in lists[1]])
    n = len(lists[0])
    param_norm, offset = torch.rand(n, device=device) + 0.5, torch.randperm(n, device=device)
    update_norm = torch.rand(n, device=device) + 0.5
    param_norm[3] = 0.0
    update_norm[offset[6]] = 0.0
    decay = torch.arange(n, device=device).float() % 3
    arguments = (param_norm, update_norm, offset, one(0.1, device), decay, one(1.0, device), nvlamb)
    step, before = distributed_lamb_cuda.multi_tensor_lamb_update_weights, clones(*lists)
    apply(step, flag(device, 1), lists, *arguments)
    assert same_bits(lists, before)
    apply(step, flag(device), lists, *arguments)
    rates = []
    for i in range(n):
        norms = param_norm[i].item(), update_norm[offset[i]].item()
        has_ratio = all(norms) and (nvlamb or decay[i] != 0)
        rates.append(0.1 * norms[0] / norms[1] if has_ratio else 0.1)
    rates = iter(rates * 2)
    check_step(lambda u, p, _: (p - next(rates) * u,), before, lists, [1])
    if copy_dtype is not torch.uint8:
        assert same_bits([[c.half() for c in lists[2]]], [[p.half() for p in lists[1]]])
    else:
        for p, copy in zip(lists[1], lists[2], strict=True):
            back = copy.view(torch.float8_e5m2).float()
            assert (back - p).abs().le(p.abs() / 8 + 2.0**-17).all()


BITS = [0.0, 1.0, -1.0, 1.125, -1.125, 1.12, 1.375, 1.874, 1.876, 57344.0, math.inf, -math.inf]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_casts_to_and_from_e5m2(device, dtype):
    """To nearest, ties away from zero; back exactly."""
    values = torch.tensor(BITS, device=device).to(dtype)
    out = torch.zeros(len(BITS), dtype=torch.uint8, device=device)
    none = flag(device)[:0]
    fused_adam_cuda.maybe_cast(none, values, out)
    wanted = [0.0, 1.0, -1.0, 1.25, -1.25, 1.0, 1.5, 1.75, 2.0, 57344.0, math.inf, -math.inf]
    assert out.view(torch.float8_e5m2).float().tolist() == wanted
    back = torch.zeros_like(values)
    fused_adam_cuda.maybe_cast_mt(CHUNK, flag(device), [[out], [back]])
    assert back.tolist() == wanted
    fused_adam_cuda.maybe_cast(flag(device, 1), torch.zeros_like(values), back)
    assert back.tolist() == wanted
    nan = torch.full((2,), math.nan, device=device, dtype=dtype)
    fused_adam_cuda.maybe_cast(none, nan, out[:2])
    assert out[:2].view(torch.float8_e5m2).float().isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.uint8])
def test_strided_check_finite(device, dtype):
    bad = torch.tensor(0x7C, dtype=torch.uint8) if dtype is torch.uint8 else math.inf
    values, found = torch.zeros(10, dtype=dtype, device=device), flag(device)
    values[4] = bad
    fused_adam_cuda.strided_check_finite(found, values, 3, 0)
    assert found.item() == 0
    fused_adam_cuda.strided_check_finite(found, values, 2, 0)
    assert found.item() == 1
    fused_adam_cuda.strided_check_finite(found, values, 3, 0)
    assert found.item() == 1
    fused_adam_cuda.strided_check_finite(found, values, 3, 1)
    assert found.item() == 0
    with pytest.raises(ValueError, match="stride must be at least 1, got 0"):
        fused_adam_cuda.strided_check_finite(found, values, 0, 1)


@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("copy_dtype", [None, torch.float16, torch.uint8])
def test_reversible_adam_and_its_undoing(device, copy_dtype, mode):
    made = [torch.randn(4, 33, device=device) for _ in range(4)]
    p, m, v, g = made[0], made[1], made[2].abs(), (made[3] * 16).half()
    g[0, :2] = torch.tensor([math.inf, math.nan])
    options = (1e-2, 0.9, 0.95, 1e-3, 16.0, 6, mode, 1, 0.1)
    copy = torch.zeros(p.shape, dtype=copy_dtype or torch.float32, device=device)
    given = copy if copy_dtype is not None else copy[:0]
    kept = [t.clone() for t in (p, m, v)]
    fused_adam_cuda.reversible_adam(p, given, m, v, g, *options)
    plain = [t.clone() for t in kept]
    fused_adam_cuda.adam(plain[0], copy[:0], *plain[1:], g.float(), *options)
    for ours, stepped, old in zip((p, m, v), plain, kept, strict=True):
        assert torch.equal(ours[0, :2], old[0, :2])
        assert torch.equal(ours[1:], stepped[1:])
    if copy_dtype is torch.float16:
        assert copy[0, 0].item() == math.inf
        assert torch.equal(copy.view(-1)[1:], p.half().view(-1)[1:])
    elif copy_dtype is torch.uint8:
        assert copy[0, 0].item() == 0x7C
    after = [t.clone() for t in (p, m, v)]
    fused_adam_cuda.maybe_adam_undo(flag(device), p, m, v, g, *options)
    assert same_bits([[p, m, v]], [after])
    fused_adam_cuda.maybe_adam_undo(flag(device, 1), p, m, v, g, *options)
    for ours, old in zip((p, m, v), kept, strict=True):
        torch.testing.assert_close(ours, old, rtol=1e-5, atol=1e-5)


def test_refusals_name_what_is_wrong(device):
    lists = [draw(device, torch.float32) for _ in range(4)]
    with pytest.raises(ValueError, match="norm_type must be 0 or 2, got 1"):
        amp_C.multi_tensor_novograd(
            CHUNK, flag(device), lists[:3], torch.ones(9), 0.1, 0.9, 0.9, 0.0, 1, 1, 0.0, 1, 0, 1
        )
    with pytest.raises(ValueError, match="multi_tensor_fused_adam: tensor_lists must be 5 lists"):
        apply(
            distributed_adam_cuda.multi_tensor_fused_adam, flag(device), lists,
            *_distributed_adam_arguments(device, 0, False),
        )  # fmt: skip
    p = torch.ones(3, device=device)
    with pytest.raises(ValueError, match="reversible_adam: v must have 3 elements, got 2"):
        fused_adam_cuda.reversible_adam(
            p, p[:0], p.clone(), p[:2], p, 0.1, 0.9, 0.9, 0.0, 1.0, 1, 1, 1, 0.0
        )
