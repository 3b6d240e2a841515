"""transducer_joint against its formula in float64: packed and not, ReLU, dropout, gradients."""

import pytest
import torch
from checks import DTYPES, assert_as_good_as_torch, assert_same_bits, in_pairs, needs_cuda

from apex_te.ops.transducer_joint import (
    cells_of,
    reference,
    transducer_joint,
    transducer_joint_bwd,
    transducer_joint_fwd,
)


def inputs(batch, frames, places, cols, dtype=torch.float32):
    """f, g, and lengths, of which one sample has all and one none of either."""
    f, g = torch.randn(batch, frames, cols).to(dtype), torch.randn(batch, places, cols).to(dtype)
    f_len = torch.randint(0, frames + 1, (batch,), dtype=torch.int32)
    g_len = torch.randint(0, places + 1, (batch,), dtype=torch.int32)
    f_len[0], g_len[0] = frames, places
    if batch > 2:
        f_len[1] = g_len[2] = 0
    return f, g, f_len, g_len


def packing(f_len, g_len):
    offset = torch.cumsum(f_len.long() * g_len, 0)
    return offset, int(offset[-1]) if len(offset) else 0


def run(function, f, g, f_len, g_len, grad, is_packed, **options):
    """The result and the gradients of f and g, of which a packed grad has the rows that count."""
    leaves = [t.clone().requires_grad_() for t in (f, g)]
    pack = packing(f_len, g_len) if is_packed else ()
    out = function(*leaves, f_len, g_len, *pack, **options)
    if is_packed:
        grad = grad[cells_of(f_len, g_len, *grad.shape[1:3])]
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


@in_pairs(
    dtype=DTYPES, is_packed=[False, True], relu=[False, True], p=[0.0, 0.3, 1.0],
    cols=[5, 8, 13, 64, 264], sizes=[(1, 1, 1), (3, 7, 5), (2, 130, 3), (4, 65, 18), (2, 9, 140)],
)  # fmt: skip
def test_result_and_gradients(device, poison, dtype, is_packed, relu, p, cols, sizes):
    f, g, f_len, g_len = inputs(*sizes, cols, dtype)
    grad = torch.randn(*sizes, cols).to(dtype)
    options = {"relu": relu, "p": p, "seed": torch.tensor([5])}
    exact, same = (
        run(reference, *(t.to(wide) for t in (f, g)), f_len, g_len, grad.to(wide), is_packed,
            **options)
        for wide in (torch.float64, torch.float32)
    )  # fmt: skip
    args = (t.to(device) for t in (f, g, f_len, g_len, grad))
    options["seed"] = options["seed"].to(device)
    ours = run(transducer_joint, *args, is_packed, **options)
    for a, b, c in zip(ours, exact, same, strict=True):
        assert a.dtype is dtype
        assert_as_good_as_torch(a, b, c.to(dtype))
    if not is_packed:
        assert ours[0].cpu()[~cells_of(f_len, g_len, *sizes[1:])].eq(-1).all()


@pytest.mark.parametrize("is_packed", [False, True])
def test_what_does_not_count_is_not_read(device, is_packed):
    """NaN behind the lengths changes nothing."""
    f, g, f_len, g_len = (t.to(device) for t in inputs(4, 20, 6, 24))
    grad = torch.randn(4, 20, 6, 24, device=device)
    clean = run(transducer_joint, f, g, f_len, g_len, grad, is_packed, relu=True)
    frames, places = torch.arange(20, device=device), torch.arange(6, device=device)
    f[frames >= f_len[:, None]] = torch.nan
    g[places >= g_len[:, None]] = torch.nan
    grad[~cells_of(f_len, g_len, 20, 6)] = torch.nan
    assert_same_bits(run(transducer_joint, f, g, f_len, g_len, grad, is_packed, relu=True), clean)


def test_nan_shows(device):
    f, g, f_len, g_len = (t.to(device) for t in inputs(1, 5, 4, 16))
    f[0, 2, 3] = torch.nan
    out = transducer_joint(f, g, f_len, g_len, relu=True)
    assert out.isnan().nonzero().tolist() == [[0, 2, u, 3] for u in range(4)]


def test_mask(device):
    """What the mask of forward says of the result, and backward with it."""
    f, g, f_len, g_len = (t.to(device) for t in inputs(3, 9, 5, 40))
    seed = torch.tensor([11], device=device)
    out, mask = transducer_joint_fwd(f, g, f_len, g_len, relu=True, p=0.4, seed=seed)
    counts = cells_of(f_len, g_len, 9, 5)
    assert mask.dtype is torch.uint8
    assert torch.equal(mask[counts].bool(), out[counts] > 0)
    assert not mask[~counts].any()
    df, dg = transducer_joint_bwd(torch.ones_like(out), mask, f_len, g_len, None, 9, 5, 2.0)
    torch.testing.assert_close(df, mask.sum(2) * 2.0)
    torch.testing.assert_close(dg, mask.sum(1) * 2.0)


def test_draws(device):
    """Another seed, another mask; torch.manual_seed determines it."""
    f, g, f_len, g_len = (t.to(device) for t in inputs(1, 30, 20, 64))
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(transducer_joint(f, g, f_len, g_len, p=0.25))
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])
    assert abs(outs[0].eq(0).float().mean() - 0.25) < 0.01


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("sizes", [(0, 3, 4, 8), (2, 0, 4, 8), (2, 3, 0, 8), (2, 3, 4, 0)])
def test_empty(device, sizes, is_packed):
    f, g = torch.randn(*sizes[:2], sizes[3]), torch.randn(sizes[0], *sizes[2:])
    lengths = [torch.full(sizes[:1], n, dtype=torch.int32) for n in sizes[1:3]]
    args = [t.to(device) for t in (f, g, *lengths, torch.randn(sizes))]
    out, df, dg = run(transducer_joint, *args, is_packed)
    assert out.shape == (sizes if not is_packed else (sizes[0] * sizes[1] * sizes[2], sizes[3]))
    assert df.shape == f.shape
    assert dg.shape == g.shape
    assert not df.any()
    assert not dg.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(130, 33, 2), (250, 65, 3)])
def test_gradients_of_many_samples(device, poison, sizes, dtype):
    """Tiles of 32 and of 64 frames, where others have 16."""
    f, g, f_len, g_len = inputs(*sizes, 8, dtype)
    grad = torch.randn(*sizes, 8).to(dtype)
    exact, same = (
        run(reference, *(t.to(wide) for t in (f, g)), f_len, g_len, grad.to(wide), False, relu=True)
        for wide in (torch.float64, torch.float32)
    )
    args = (t.to(device) for t in (f, g, f_len, g_len, grad))
    ours = run(transducer_joint, *args, False, relu=True)
    for a, b, c in zip(ours, exact, same, strict=True):
        assert_as_good_as_torch(a, b, c.to(dtype))


@pytest.mark.cuda
@needs_cuda
def test_many_tiles_of_frames():
    f, g, f_len, g_len = (t.cuda() for t in inputs(2, 2000, 9, 520))
    grad = torch.randn(2, 2000, 9, 520, device="cuda")
    ours = run(transducer_joint, f, g, f_len, g_len, grad, False)
    exact = run(reference, f.double(), g.double(), f_len, g_len, grad.double(), False)
    same = run(reference, f, g, f_len, g_len, grad, False)
    for a, b, c in zip(ours, exact, same, strict=True):
        assert_as_good_as_torch(a, b, c)


def test_rejects():
    f, g, f_len, g_len = inputs(3, 7, 5, 8)
    offset, rows = packing(f_len, g_len)
    cases = [
        ((f, g[:2], f_len, g_len), ValueError, r"g must have shape \[3, 5, 8\], got \[2, 5, 8\]"),
        ((f, g.half(), f_len, g_len), TypeError, "g must have dtype float32, got float16"),
        ((f, g, f_len.long(), g_len), TypeError, "f_len must have dtype int32, got int64"),
        ((f, g, f_len, g_len[:2]), ValueError, r"g_len must have shape \[3\], got \[2\]"),
        ((f, g, f_len + 1, g_len), ValueError, r"f_len\[0\] must be from 0 to 7, got 8"),
        ((f, g, f_len, g_len - 6), ValueError, r"g_len\[0\] must be from 0 to 5, got -1"),
        ((f, g, f_len, g_len, offset + 1, rows), ValueError, r"batch_offset\[0\] must be 35"),
        ((f, g, f_len, g_len, offset, rows - 1), ValueError, "end at most at the"),
    ]
    for args, error, text in cases:
        with pytest.raises(error, match=text):
            transducer_joint(*args)
    with pytest.raises(ValueError, match="p must be from 0 to 1"):
        transducer_joint(f, g, f_len, g_len, p=1.5)
    with pytest.raises(ValueError, match="seed must be given for p"):
        transducer_joint_fwd(f, g, f_len, g_len, p=0.5)
