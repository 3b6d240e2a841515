"""attention_sink against its formulas in float64, and the identities that attention makes of it."""

import pytest
import torch
from checks import DTYPES, assert_as_good_as_torch, assert_same_bits, in_pairs, needs_cuda

from apex_te.ops.attention_sink import (
    attention_join,
    attention_sink_bwd,
    attention_sink_fwd,
    reference,
    reference_join,
)

# Memory of [b, h, s, d], as an order of dimensions.
LAYOUTS = {"bhsd": (0, 1, 2, 3), "bshd": (0, 2, 1, 3), "sbhd": (2, 0, 1, 3)}


def laid(x, layout):
    order = LAYOUTS[layout]
    return x.permute(order).contiguous().permute([order.index(i) for i in range(4)])


def inputs(shape, dtype):
    values, dout = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    lse = torch.randn(shape[:3]) * 4
    lse[..., ::5] = -torch.inf  # queries that see no key
    lse[..., 1::7] = 90.0
    return values, dout, lse, torch.randn(shape[1]) * 3


@in_pairs(
    dtype=DTYPES, layout=LAYOUTS, other=LAYOUTS, with_sink=[True, False], in_place=[True, False],
    shape=[(2, 3, 130, 64), (1, 2, 65, 128), (3, 1, 7, 256), (2, 2, 5, 300), (1, 3, 64, 7),
           (2, 1, 9, 12), (1, 1, 1, 1)],
)  # fmt: skip
def test_fwd_and_bwd(device, poison, shape, dtype, layout, other, with_sink, in_place):
    values, dout, lse, sink = inputs(shape, dtype)
    given = [laid(values, layout).clone().to(device), lse.to(device)]
    given.append(sink.to(device) if with_sink else None)
    out, total = attention_sink_fwd(*given, out=given[0] if in_place else None)
    assert out.stride() == laid(values, layout).stride()
    assert (out.data_ptr() == given[0].data_ptr()) == in_place
    leaf = sink.double().requires_grad_() if with_sink else None
    exact, exact_total = reference(values.double(), lse.double(), leaf)
    same, _ = reference(values, lse, sink if with_sink else None)
    torch.testing.assert_close(total.cpu(), exact_total.detach().float(), rtol=1e-6, atol=1e-6)
    assert_as_good_as_torch(out, exact.detach(), same)
    if with_sink:
        dsink = attention_sink_bwd(laid(dout, other).to(device), out, total, given[2])
        # Of what forward has rounded, and so near the gradient of its formula.
        weight = (leaf[:, None] - exact_total).exp()
        wanted = -(weight * (dout.double() * out.cpu().double()).sum(-1)).sum((0, 2))
        torch.testing.assert_close(dsink.cpu(), wanted.detach().float(), rtol=1e-5, atol=1e-5)


def test_gradient_is_that_of_attention(device):
    """Of softmax over scores and the sink, which the formulas alone do not tell."""
    scores, values = torch.randn(2, 3, 9, 11).double(), torch.randn(2, 3, 11, 8).double()
    sink = torch.randn(3).double().requires_grad_()
    column = sink[:, None, None].expand(2, 3, 9, 1)
    wanted = torch.cat((scores, column), -1).softmax(-1)[..., :-1] @ values
    dout = torch.randn(2, 3, 9, 8)
    wanted.backward(dout.double())
    given = (scores.softmax(-1) @ values).float().to(device)
    logits = sink.detach().float().to(device)
    out, total = attention_sink_fwd(given, scores.logsumexp(-1).float().to(device), logits)
    dsink = attention_sink_bwd(dout.to(device), out, total, logits)
    torch.testing.assert_close(out.cpu(), wanted.detach().float())
    torch.testing.assert_close(dsink.cpu(), sink.grad.float(), rtol=1e-5, atol=1e-5)


def test_extremes(device):
    """Sinks and scores of -Inf and large ones; a NaN that no query sees is not used."""
    lse = torch.tensor([[[-torch.inf, 3.0, 0.0, 200.0, -200.0, torch.nan]]], device=device)
    values = torch.ones(1, 1, 6, 8, device=device)
    values[0, 0, 0] = torch.nan
    for sink in (-torch.inf, 0.0, 100.0):
        logit = torch.tensor([sink], device=device)
        out, total = attention_sink_fwd(values, lse, logit)
        assert out[0, 0, 0].eq(0).all()
        assert total[0, 0, 0] == sink
        assert out[0, 0, 5].isnan().all()
        assert total[0, 0, 5].isnan()
        seen = lse[0, 0, 1:5].double()
        both = torch.logaddexp(seen, logit.double())
        torch.testing.assert_close(total[0, 0, 1:5].double(), both, rtol=1e-6, atol=1e-6)
        expected = (seen - both).exp().float()[:, None].expand(4, 8)
        torch.testing.assert_close(out[0, 0, 1:5], expected, rtol=1e-5, atol=1e-37)
        dsink = attention_sink_bwd(out[:, :, :5], out[:, :, :5], total[..., :5], logit)
        assert dsink.isfinite().all()


@pytest.mark.parametrize("shape", [(0, 3, 5, 8), (2, 0, 5, 8), (2, 3, 0, 8), (2, 3, 5, 0)])
def test_empty(device, shape):
    values, dout, lse, sink = (x.to(device) for x in inputs(shape, torch.bfloat16))
    out, total = attention_sink_fwd(values, lse, sink)
    assert out.shape == shape
    torch.testing.assert_close(
        total, torch.logaddexp(lse, sink[:, None].expand_as(lse)), rtol=1e-6, atol=1e-6
    )
    assert attention_sink_bwd(dout, out, total, sink).eq(0).all()


@pytest.mark.cuda
@needs_cuda
def test_beyond_32_bits():
    """Strides above 2 ** 31 elements, of a sequence that comes first in memory."""
    wide = torch.empty(3, 2**30 + 64, dtype=torch.bfloat16, device="cuda")
    values = wide.as_strided((1, 1, 3, 64), (64, 64, 2**30 + 64, 1)).normal_()
    lse, sink = torch.randn(1, 1, 3, device="cuda"), torch.randn(1, device="cuda")
    again, other = attention_sink_fwd(values.contiguous(), lse, sink)
    out, total = attention_sink_fwd(values, lse, sink, out=values)
    assert_same_bits(out.contiguous(), again)
    assert_same_bits(total, other)


def test_rejects():
    values, dout, lse, sink = inputs((2, 3, 5, 8), torch.float32)
    with pytest.raises(ValueError, match=r"lse must have shape \[2, 3, 5\], got \[2, 3, 4\]"):
        attention_sink_fwd(values, lse[..., :4], sink)
    with pytest.raises(ValueError, match=r"sink must have shape \[3\], got \[2\]"):
        attention_sink_fwd(values, lse, sink[:2])
    with pytest.raises(TypeError, match="sink must have dtype float32, got bfloat16"):
        attention_sink_fwd(values, lse, sink.bfloat16())
    with pytest.raises(ValueError, match="out must have contiguous rows, got other strides"):
        attention_sink_fwd(values, lse, sink, out=values.mT.contiguous().mT)
    with pytest.raises(ValueError, match=r"dout must have 4 dimensions, got \[3, 5, 8\]"):
        attention_sink_bwd(dout[0], values, lse, sink)


@in_pairs(
    dtype=DTYPES, layout=LAYOUTS, other=LAYOUTS, counts=[(1.0,), (0.5,), (1.0, 0.5), (0.3, 1.0)],
    in_place=[True, False],
    shape=[(2, 9, 130, 64), (1, 2, 65, 128), (3, 1, 7, 256), (2, 2, 5, 300), (1, 3, 64, 7),
           (2, 1, 9, 12), (1, 1, 1, 1)],
)  # fmt: skip
def test_join(device, poison, shape, dtype, layout, other, counts, in_place):
    values, _, lse, _ = inputs(shape, dtype)
    parts = [(laid(values, layout).clone(), lse)]
    for share in counts:
        first = shape[2] - int(share * shape[2])
        part, scores = torch.randn(shape).to(dtype), torch.randn(shape[:3]) * 4
        scores[..., ::3] = -torch.inf
        part[scores == -torch.inf] = torch.nan  # which are not used
        parts.append((laid(part, other)[:, :, first:], scores[..., first:]))
    exact, exact_total = reference_join(*[(x.double(), y.double()) for x, y in parts])
    same, _ = reference_join(*parts)
    given = [x.to(device) for part in parts for x in part]
    out, total = attention_join(*given, out=given[0] if in_place else None)
    assert out.stride() == parts[0][0].stride()
    assert (out.data_ptr() == given[0].data_ptr()) == in_place
    torch.testing.assert_close(total.cpu(), exact_total.float(), rtol=1e-6, atol=1e-6)
    assert_as_good_as_torch(out, exact, same)


def test_join_is_attention_to_all_keys(device):
    scores, values = torch.randn(2, 3, 9, 11), torch.randn(2, 3, 11, 8)
    parts = [(scores[..., a:b], values[:, :, a:b]) for a, b in ((0, 4), (4, 5), (5, 11))]
    given = [y.to(device) for x, v in parts for y in (x.softmax(-1) @ v, x.logsumexp(-1))]
    out, total = attention_join(*given)
    torch.testing.assert_close(out.cpu(), scores.softmax(-1) @ values)
    torch.testing.assert_close(total.cpu(), scores.logsumexp(-1))


def test_join_of_nothing(device):
    """A query that sees no key in any part; no queries; no columns."""
    values, lse = torch.full((1, 2, 3, 8), torch.nan, device=device), torch.zeros(1, 2, 3)
    lse = (lse - torch.inf).to(device)
    out, total = attention_join(values, lse, values, lse)
    assert out.eq(0).all()
    assert total.eq(-torch.inf).all()
    for empty in (values[:, :, :0], values[..., :0]):
        scores = lse[..., : empty.shape[2]]
        out, total = attention_join(empty, scores, empty, scores)
        assert out.shape == empty.shape
        assert total.eq(-torch.inf).all()


def test_errors_of_join(device):
    values, lse = torch.ones(2, 3, 5, 8, device=device), torch.ones(2, 3, 5, device=device)
    with pytest.raises(ValueError, match="part must have at most as many queries as values"):
        attention_join(values[:, :, 1:], lse[..., 1:], values, lse)
    with pytest.raises(ValueError, match=r"part_lse must have shape \[2, 3, 4\]"):
        attention_join(values, lse, values[:, :, 1:], lse)
    with pytest.raises(TypeError, match="part must have dtype float32"):
        attention_join(values, lse, values.half(), lse)
    with pytest.raises(ValueError, match="part2_lse must be given with part2"):
        attention_join(values, lse, values, lse, values)
