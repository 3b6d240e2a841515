"""apex's amp_C: scaling, norms, SGD and Adam against apex's formulas."""

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
    global_norm,
    one,
    same_bits,
    sgd,
)
from apex_te.compatibility.apex import amp_C
from checks import DTYPES, assert_as_good_as_torch

LOW = [torch.float16, torch.bfloat16]
BAD = [math.inf, -math.inf, math.nan]


@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_scale(device, dtype, out_dtype):
    inputs, noop = draw(device, dtype), flag(device)
    outputs = draw(device, out_dtype)
    assert apply(amp_C.multi_tensor_scale, noop, [inputs, outputs], 0.3) is None
    check_step(lambda x, _: (x * 0.3,), [inputs, inputs], [outputs], [0])
    assert noop.item() == 0


@pytest.mark.parametrize("bad", BAD)
def test_scale_sets_the_flag_and_writes_all(device, bad):
    inputs, noop = draw(device, torch.float16), flag(device)
    outputs = draw(device, torch.float32)
    inputs[6][1000] = bad
    apply(amp_C.multi_tensor_scale, noop, [inputs, outputs], 2.0)
    assert noop.dtype == torch.int32
    assert noop.item() == 1
    for x, out in zip(inputs, outputs, strict=True):
        torch.testing.assert_close(out, x.float() * 2.0, rtol=0, atol=0, equal_nan=True)
    # A set flag neither stops the kernel nor is it cleared.
    inputs[6][1000] = 1.0
    apply(amp_C.multi_tensor_scale, noop, [inputs, outputs], 4.0)
    assert noop.item() == 1
    assert torch.equal(outputs[3], inputs[3].float() * 4.0)


def test_amp_unscales_in_place_and_detects_overflow(device):
    """apex.amp's scaler: model gradients to master gradients, then one read of the flag."""
    overflow = flag(device)
    grads = draw(device, torch.float16, factor=1024.0)
    master = [torch.empty_like(g, dtype=torch.float32) for g in grads]
    apply(amp_C.multi_tensor_scale, overflow, [grads, master], 1.0 / 1024.0)
    assert not overflow.item()
    apply(amp_C.multi_tensor_scale, overflow, [master, master], 2.0)
    for g, m in zip(grads, master, strict=True):
        assert torch.equal(m, g.float() / 512.0)


@pytest.mark.parametrize("dtypes", [DTYPES, DTYPES[::-1], [torch.float16] * 3], ids=str)
def test_axpby(device, dtypes):
    x, y, out = (draw(device, dtype) for dtype in dtypes)
    noop = flag(device)
    apply(amp_C.multi_tensor_axpby, noop, [x, y, out], 0.7, -1.5, -1)
    check_step(lambda x, y, _: (0.7 * x - 1.5 * y,), [x, y, x], [out], [0])
    assert noop.item() == 0


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize(
    ("where", "check", "expected"),
    [(0, -1, 1), (1, -1, 1), (0, 0, 1), (1, 0, 0), (0, 1, 0), (1, 1, 1)],
)
def test_axpby_checks_what_is_asked_for(device, where, check, expected, bad):
    lists = [draw(device, torch.float16), draw(device, torch.float32), draw(device, torch.float32)]
    lists[where][3][7] = bad
    noop = flag(device)
    apply(amp_C.multi_tensor_axpby, noop, lists, 1.0, 1.0, check)
    assert noop.item() == expected


@pytest.mark.parametrize("name", ["multi_tensor_l2norm", "multi_tensor_l2norm_mp"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_l2norm(device, dtype, name):
    tensors, noop = draw(device, dtype), flag(device)
    found = apply(getattr(amp_C, name), noop, [tensors], True)
    assert isinstance(found, tuple)
    total, norms = found
    assert total.shape == (1,)
    assert norms.shape == (len(tensors),)
    exact = torch.stack([t.double().cpu().norm() for t in tensors])
    same = torch.stack([t.float().cpu().norm() for t in tensors])
    assert_as_good_as_torch(norms, exact, same)
    assert_as_good_as_torch(total, exact.norm().view(1), same.norm().view(1))
    alone, none = apply(getattr(amp_C, name), noop, [tensors], False)
    assert torch.equal(alone, total)
    assert none.shape == (0,)
    assert noop.item() == 0


def test_l2norm_flags_and_shows_what_is_not_finite(device):
    for bad in BAD:
        tensors, noop = draw(device, torch.bfloat16), flag(device)
        tensors[1][0] = bad
        total, norms = apply(amp_C.multi_tensor_l2norm, noop, [tensors], True)
        assert noop.item() == 1
        assert not total.isfinite().any()
        assert [i for i, n in enumerate(norms) if not n.isfinite()] == [1]
    total, norms = amp_C.multi_tensor_l2norm(CHUNK, flag(device), [[]], True)
    assert (total.tolist(), norms.tolist()) == ([0.0], [])


def test_clip_grad_norm(device):
    """apex.contrib.clip_grad: norms by l2norm, one multi_tensor_scale in place."""
    grads, noop = draw(device, torch.float32), flag(device)
    before = [g.clone() for g in grads]
    total = apply(amp_C.multi_tensor_l2norm, noop, [grads], False)[0]
    coefficient = 0.5 / (total + 1e-6).item()
    apply(amp_C.multi_tensor_scale, noop, [grads, grads], coefficient)
    for g, b in zip(grads, before, strict=True):
        assert torch.equal(g, b * coefficient)
    assert global_norm(grads) == pytest.approx(0.5, rel=1e-5)


def test_l2norm_scale_and_unscale_l2norm(device):
    inputs, noop = draw(device, torch.float16), flag(device)
    outputs = draw(device, torch.float32)
    expected = amp_C.multi_tensor_l2norm(CHUNK, noop, [inputs], True)
    found = apply(amp_C.multi_tensor_l2norm_scale, noop, [inputs, outputs], 0.25, True)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert all(torch.equal(o, x.float() * 0.25) for x, o in zip(inputs, outputs, strict=True))
    before = clones(inputs)
    found = apply(amp_C.multi_tensor_unscale_l2norm, noop, [inputs], one(0.25, device), True)
    for norm, unscaled in zip(expected, found, strict=True):
        torch.testing.assert_close(unscaled, norm * 0.25, rtol=1e-7, atol=0)
    assert same_bits([inputs], before)
    apply(amp_C.multi_tensor_unscale_l2norm, noop, [inputs], one(math.inf, device))
    assert noop.item() == 1


SGD_TYPES = [
    (torch.float32, torch.float32, None),
    (torch.float16, torch.float16, None),
    (torch.bfloat16, torch.bfloat16, None),
    (torch.float16, torch.float32, torch.float16),
    (torch.float32, torch.float32, torch.float16),
    (torch.bfloat16, torch.float32, torch.bfloat16),
]
# wd, momentum, dampening, lr, nesterov, first_run, wd_after_momentum, scale
SGD = [
    (0.0, 0.0, 0.0, 0.1, False, False, False, 1.0),
    (0.1, 0.9, 0.3, 0.1, False, True, False, 0.125),
    (0.1, 0.9, 0.3, 0.1, False, False, True, 1.0),
    (0.1, 0.9, 0.0, 0.1, True, False, True, 0.125),
]
SGD_NAMES = ["wd", "momentum", "dampening", "lr", "nesterov", "first_run", "after", "scale"]


@pytest.mark.parametrize("options", SGD, ids=range(len(SGD)))
@pytest.mark.parametrize(("grad_dtype", "dtype", "copy_dtype"), SGD_TYPES)
def test_sgd(device, grad_dtype, dtype, copy_dtype, options):
    lists = [draw(device, grad_dtype), draw(device, dtype), draw(device, dtype)]
    if copy_dtype is not None:
        lists.append([p.to(copy_dtype) for p in lists[1]])
    before, noop = clones(*lists), flag(device)
    apply(amp_C.multi_tensor_sgd, noop, lists, *options)

    def formula(*row):
        return sgd(*row[:3], **dict(zip(SGD_NAMES, options, strict=True)))

    check_step(formula, before[:3], lists, [1, 2])
    assert same_bits(lists[:1], before[:1])
    if copy_dtype is not None:
        assert same_bits(lists[3:], [[p.to(copy_dtype) for p in lists[1]]])


@pytest.mark.parametrize("after", [False, True])
def test_sgd_skips_where_the_flag_is_set(device, after):
    lists = [draw(device, torch.float16) for _ in range(3)]
    lists[0][3][5] = math.nan
    before = clones(*lists)
    apply(
        amp_C.multi_tensor_sgd, flag(device, 1), lists,
        0.1, 0.9, 0.0, 0.1, False, False, after, 1.0,
    )  # fmt: skip
    assert same_bits(lists, before)


ADAM = [
    {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "step": 1, "correction": 1, "decay": 0.1},
    {"lr": 0.3, "betas": (0.8, 0.95), "eps": 1e-3, "step": 9, "correction": 1, "decay": 0.1},
    {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-6, "step": 3, "correction": 0, "decay": 0.0},
]


def adam_arguments(o, mode):
    return o["lr"], *o["betas"], o["eps"], o["step"], mode, o["correction"], o["decay"]


@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("options", ADAM, ids=range(len(ADAM)))
@pytest.mark.parametrize(
    ("dtype", "state_dtype"),
    [(d, torch.float32) for d in DTYPES] + [(d, d) for d in LOW],
)
def test_adam(device, dtype, state_dtype, options, mode):
    lists = [draw(device, dtype), draw(device, dtype), draw(device, state_dtype)]
    lists.append(draw(device, state_dtype, positive=True))
    before = clones(*lists)
    apply(amp_C.multi_tensor_adam, flag(device, 1), lists, *adam_arguments(options, mode))
    check_step(lambda *row: adam(*row, mode=mode, **options), before, lists, [1, 2, 3])
    assert same_bits(lists[:1], before[:1])


@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("with_master", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_adam_capturable(device, dtype, with_master, mode):
    """apex's FusedAdam(capturable=True): lr, step and inv_scale on the device."""
    options = ADAM[1]
    lists = [draw(device, dtype), draw(device, dtype), draw(device, torch.float32)]
    lists.append(draw(device, torch.float32, positive=True))
    step = amp_C.multi_tensor_adam_capturable
    if with_master:
        lists.append([p.float() for p in draw(device, torch.float32)])
        step = amp_C.multi_tensor_adam_capturable_master
    before = clones(*lists)
    arguments = (
        one(options["lr"], device).squeeze(), *options["betas"], options["eps"],
        one(options["step"], device, torch.int32), mode, options["correction"], options["decay"],
        one(0.125, device),
    )  # fmt: skip
    apply(step, flag(device, 1), lists, *arguments)
    assert same_bits(lists, before)
    apply(step, flag(device), lists, *arguments)

    def formula(*row):
        return adam(row[0], row[-1], *row[2:4], mode=mode, factor=0.125, **options)

    weights = before if with_master else [*before, before[1]]
    check_step(formula, weights, lists, [4 if with_master else 1, 2, 3])
    if with_master:
        assert same_bits([lists[1]], [[p.to(dtype) for p in lists[4]]])
    assert same_bits([lists[0]], [[(g.float() * 0.125).to(dtype) for g in before[0]]])


def test_a_flagged_capturable_step_keeps_what_is_not_finite(device):
    lists = [draw(device, torch.float16), draw(device, torch.float16)]
    lists += [draw(device, torch.float32), draw(device, torch.float32)]
    lists[0][3][:3] = torch.tensor(BAD)
    before, noop = clones(*lists), flag(device, 1)
    apply(
        amp_C.multi_tensor_adam_capturable, noop, lists, one(0.1, device), 0.9, 0.99, 1e-8,
        one(1, device, torch.int32), 1, 1, 0.1, one(0.5, device),
    )  # fmt: skip
    for tensors, kept in zip(lists, before, strict=True):
        torch.testing.assert_close(tensors, kept, rtol=0, atol=0, equal_nan=True)


def _of_images(device, dtype, layout):
    made = [torch.randn(6, 5, 3, 2), torch.randn(4, 8, 3, 3, 2), torch.randn(7)]
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    made = [t.to(dtype).to(device) for t in made]
    if layout == "contiguous":
        return made
    return [t.contiguous(memory_format=formats[t.dim()]) if t.dim() > 1 else t for t in made]


CALLS = {
    "scale": (amp_C.multi_tensor_scale, "in out", (0.5,)),
    "axpby": (amp_C.multi_tensor_axpby, "x y out", (0.7, -1.5, -1)),
    "l2norm_scale": (amp_C.multi_tensor_l2norm_scale, "in out", (0.5, True)),
    "sgd": (
        amp_C.multi_tensor_sgd, "g p m", (1e-2, 0.9, 0.0, 0.1, True, False, False, 1.0),
    ),
    "adam": (
        amp_C.multi_tensor_adam, "g p m v", (1e-2, 0.9, 0.99, 1e-8, 3, 1, 1, 0.1),
    ),
    "adagrad": (amp_C.multi_tensor_adagrad, "g p m", (1e-2, 1e-3, 0, 0.1)),
    "novograd": (
        amp_C.multi_tensor_novograd, "g p m",
        (torch.ones(3), 1e-2, 0.9, 0.99, 1e-8, 3, 1, 0.1, 1, 1, 2),
    ),
    "lars": (
        amp_C.multi_tensor_lars, "g p m",
        (torch.ones(3), torch.ones(3), 0.1, 0.1, 0.0, 0.1, 0.9, 0.0, True, False, False, 1.0,
         False),
    ),
    "lamb": (
        amp_C.multi_tensor_lamb, "g p m v",
        (1e-2, 0.9, 0.99, 1e-6, 3, 1, 0.1, 1, 1, torch.ones(1), 1.0, False),
    ),
}  # fmt: skip


@pytest.mark.parametrize("mixed", [False, True], ids=["channels_last", "read contiguous"])
@pytest.mark.parametrize("name", CALLS)
def test_channels_last(device, name, mixed):
    """The same values as of contiguous lists, in tensors that keep their layout."""
    op, names, _ = CALLS[name]
    after = []
    for layout in ("contiguous", "channels_last"):
        torch.manual_seed(5)
        arguments = [a.clone().to(device) if hasattr(a, "clone") else a for a in CALLS[name][2]]
        lists = []
        for each in names.split():
            read_only = each in ("in", "x", "y", "g")
            made = _of_images(
                device, torch.float32, "contiguous" if mixed and read_only else layout
            )
            lists.append([t.abs_() if each in "vm" else t for t in made])
        strides = [[t.stride() for t in tensors] for tensors in lists]
        versions = [t._version for t in lists[-1]]
        apply(op, flag(device), lists, *arguments)
        assert [[t.stride() for t in tensors] for tensors in lists] == strides
        assert all(t._version > v for t, v in zip(lists[-1], versions, strict=True))
        after.append([t for tensors in lists for t in tensors])
    for a, b in zip(*after, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_lists_of_two_layouts_are_refused(device):
    """apex would take the memory of one for that of the other."""
    lists = [_of_images(device, torch.float32, x) for x in ("contiguous", "channels_last")]
    with pytest.raises(ValueError, match="contiguous"):
        apply(
            amp_C.multi_tensor_sgd, flag(device), [lists[0], lists[1], lists[0]],
            0.0, 0.9, 0.0, 0.1, False, False, False, 1.0,
        )  # fmt: skip


def test_bad_arguments_name_themselves(device):
    noop, lists = flag(device), [draw(device, torch.float32) for _ in range(4)]
    options = adam_arguments(ADAM[0], 1)
    with pytest.raises(ValueError, match=r"multi_tensor_adam: tensor_lists must be 4 lists.*got 3"):
        apply(amp_C.multi_tensor_adam, noop, lists[:3], *options)
    with pytest.raises(ValueError, match=r"mode must be 0 \(L2\) or 1"):
        apply(amp_C.multi_tensor_adam, noop, lists, *adam_arguments(ADAM[0], 2))
    with pytest.raises(ValueError, match="chunk_size must be at least 1, got 0"):
        amp_C.multi_tensor_adam(0, noop, lists, *options)
    with pytest.raises(ValueError, match="arg_to_check must be -1, 0 or 1, got 2"):
        apply(amp_C.multi_tensor_axpby, noop, lists[:3], 1.0, 1.0, 2)
    double = [[t.double() for t in tensors] for tensors in lists]
    with pytest.raises(TypeError, match="float64"):
        apply(amp_C.multi_tensor_adam, noop, double, *options)
    with pytest.raises(ValueError, match=r"multi_tensor_sgd.*3 lists .* or 4 with"):
        apply(amp_C.multi_tensor_sgd, noop, lists[:2], *SGD[0])
