"""Cross entropy of a split vocabulary on 2 and 3 ranks: losses and gradients of one rank."""

import sys

import pytest
import torch
from on_rank import assert_told, device_of, recorded, told
from rank_sets import ranks_of

from apex_te import linear_cross_entropy, linear_log_probs
from apex_te.distributed import parallel_cross_entropy
from apex_te.integrations.transformer_engine.pytorch import cross_entropy as te
from apex_te.ops import cross_entropy as op
from apex_te.recipe import CurrentScaling

ROWS = (3, 7)
OPTIONS = {
    "plain": {},
    "smooth": {"label_smoothing": 0.1},
    "all smooth": {"label_smoothing": 1.0},
    "ignored": {"ignore_index": 5},
    "ignored and smooth": {"ignore_index": 5, "label_smoothing": 0.3},
}


def make(dtype, vocab):
    generator = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(*ROWS, vocab, generator=generator) * 4).to(dtype)
    target = torch.randint(0, vocab, ROWS, generator=generator)
    target.view(-1)[3] = 5
    target.view(-1)[8] = 0
    target.view(-1)[9] = vocab - 1
    return logits, target


def reference(logits, target, factor, **options):
    """Losses, and gradients of the sum of losses times ``factor``, in float64."""
    loss, grad = op.reference(logits.double(), target, **options)
    return loss, grad * factor.double().unsqueeze(-1)


def _split(rank, dtype, sizes, options, reduction, int32=False):
    """Loss and gradient of this rank's columns."""
    device = device_of(rank)
    logits, target = make(dtype, sum(sizes))
    start = sum(sizes[:rank])
    # A part of a larger tensor: not contiguous.
    own = logits[..., start : start + sizes[rank]].to(device).requires_grad_()
    uneven = {"first_index": start, "vocab_size": sum(sizes)} if len(set(sizes)) > 1 else {}
    target = target.to(device, torch.int32 if int32 else torch.int64)
    group, add = torch.distributed.group.WORLD, torch.distributed.ReduceOp.SUM
    with recorded("all_reduce", lambda *args, op=add, **kwargs: str(op)) as collectives:
        loss = parallel_cross_entropy(
            own, target, group=group, reduction=reduction, **options, **uneven
        )
        factor = torch.linspace(0.5, 2.0, loss.numel()).view(loss.shape).to(device)
        (loss * factor).sum().backward()
    assert [name.split(".")[-1] for name in collectives] == ["MAX", "SUM"]
    assert loss.dtype is torch.float32
    assert own.grad.dtype is dtype
    return loss.detach().cpu(), own.grad.cpu()


def check(ranks, dtype, sizes, options, reduction):
    results = ranks.run(_split, dtype, sizes, options, reduction)
    logits, target = make(dtype, sum(sizes))
    valid = target != options.get("ignore_index", -100)
    count = {"none": 1, "sum": 1, "mean": int(valid.sum())}[reduction]
    factor = torch.linspace(0.5, 2.0, target.numel()).view(target.shape)
    factor = factor if reduction == "none" else torch.full(target.shape, 0.5 / count)
    losses, grads = reference(logits, target, factor, **options)
    losses = losses if reduction == "none" else losses.sum() / count
    found = torch.cat([grad for _, grad in results], -1)
    for loss, _ in results:
        assert torch.equal(loss, results[0][0])
        torch.testing.assert_close(loss.double(), losses, rtol=3e-6, atol=3e-6)
    steps = {torch.float32: 2e-5, torch.float16: 2**-10, torch.bfloat16: 2**-7}
    error = (found.double() - grads).abs()
    assert (error <= steps[dtype] * grads.abs() + 1e-7).all()
    assert not found[~valid].any()


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("size", [2, 3])
def test_against_one_rank(all_ranks, size, name, reduction):
    check(ranks_of(all_ranks, size, "gloo"), torch.float32, (17,) * size, OPTIONS[name], reduction)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(1, 1), (301, 301), (13, 28), (40, 1), (9, 2, 6)])
def test_odd_and_uneven_vocabularies(all_ranks, sizes, dtype):
    ranks = ranks_of(all_ranks, len(sizes), "gloo")
    if sum(sizes) < 6:
        with pytest.raises(Exception, match="target must be in"):
            check(ranks, dtype, sizes, {}, "none")
        return
    check(ranks, dtype, sizes, OPTIONS["ignored and smooth"], "none")


def _infinite(rank):
    """A rank whose logits are all -inf, as of padding, adds nothing."""
    device = device_of(rank)
    logits, target = make(torch.float32, 12)
    own = logits[..., :12] if rank == 0 else torch.full((*ROWS, 12), -torch.inf)
    own = own.contiguous().to(device).requires_grad_()
    loss = parallel_cross_entropy(own, target.to(device), group=torch.distributed.group.WORLD)
    loss.backward()
    return loss.detach().cpu(), own.grad.cpu()


def test_columns_of_minus_infinity(two_ranks):
    (loss, grad), (_, other) = two_ranks.run(_infinite)
    logits, target = make(torch.float32, 12)
    losses, grads = reference(logits, target, torch.full(ROWS, 1 / 21))
    torch.testing.assert_close(loss.double(), losses.mean(), rtol=3e-6, atol=0)
    torch.testing.assert_close(grad.double(), grads, rtol=1e-5, atol=1e-8)
    assert not other.any()


def _te(rank, reduce_loss):
    device = device_of(rank)
    logits, target = make(torch.bfloat16, 34)
    own = logits[..., 17 * rank : 17 * rank + 17].contiguous().to(device).requires_grad_()
    group = torch.distributed.group.WORLD
    loss = te.parallel_cross_entropy(
        own, target.to(device), 0.1, reduce_loss, group, 5, is_cg_capturable=True
    )
    loss.sum().backward()
    return loss.detach().cpu(), own.grad.cpu()


@pytest.mark.parametrize("reduce_loss", [False, True])
def test_transformer_engine_s_arguments(two_ranks, reduce_loss):
    results = two_ranks.run(_te, reduce_loss)
    logits, target = make(torch.bfloat16, 34)
    given = logits.clone().requires_grad_()
    expected = te.parallel_cross_entropy(given, target, 0.1, reduce_loss, None, 5)
    expected.sum().backward()
    assert expected.shape == (() if reduce_loss else ROWS)
    found = torch.cat([grad for _, grad in results], -1)
    for loss, _ in results:
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found, given.grad, rtol=2**-7, atol=1e-7)


def _wrong(rank):
    group = torch.distributed.group.WORLD
    logits, target = make(torch.float32, 8)
    changes = (
        {"target": target + 9},
        {"target": target[:2]},
        {"label_smoothing": 1.5},
        {"reduction": "all"},
        {"first_index": 3},
        {"first_index": 9, "vocab_size": 16},
        {"logits": logits.double()},
        {"target": target.double()},
        {"group": 3},
    )
    given = {"logits": logits, "target": target, "group": group}
    return [told(parallel_cross_entropy, **given | changed) for changed in changes]


def test_wrong_arguments(two_ranks):
    expected = [
        "ValueError: parallel_cross_entropy: target must be in [0, 16) or ignore_index -100",
        "ValueError: parallel_cross_entropy: target must have the shape of logits",
        "ValueError: parallel_cross_entropy: label_smoothing must be from 0 to 1, got 1.5",
        "ValueError: parallel_cross_entropy: reduction must be 'mean', 'sum' or 'none'",
        "ValueError: parallel_cross_entropy: vocab_size must be given with first_index",
        "ValueError: parallel_cross_entropy: first_index must be from 0 to 8 for 8 columns of 16",
        "TypeError: parallel_cross_entropy: logits must be float32, float16 or bfloat16",
        "TypeError: parallel_cross_entropy: target must be int64 or int32",
        "TypeError: parallel_cross_entropy: group must be a torch.distributed.ProcessGroup",
    ]
    assert_told(two_ranks.run(_wrong)[0], expected)


HIDDEN = 24


def head(dtype, vocab, bias):
    """Hidden states, weight, bias and targets of a head; some targets are ignored."""
    generator = torch.Generator().manual_seed(vocab)
    x = torch.randn(*ROWS, HIDDEN, generator=generator).to(dtype)
    w = (torch.randn(vocab, HIDDEN, generator=generator) / 4).to(dtype)
    b = torch.randn(vocab, generator=generator).to(dtype) if bias else None
    return x, w, b, make(dtype, vocab)[1]


def _head(rank, dtype, sizes, options, bias=True, fp8=False, int32=False):
    """Loss, and gradients of hidden states and of this rank's rows of weight and bias."""
    device = device_of(rank)
    x, w, b, target = head(dtype, sum(sizes), bias)
    start = sum(sizes[:rank])
    part = slice(start, start + sizes[rank])
    given = [x, w[part], None if b is None else b[part]]
    given = [None if t is None else t.to(device).requires_grad_() for t in given]
    uneven = {"first_index": start, "vocab_size": sum(sizes)} if len(set(sizes)) > 1 else {}
    loss = linear_cross_entropy(
        given[0],
        given[1],
        target.to(device, torch.int32 if int32 else torch.int64),
        given[2],
        tp_group=torch.distributed.group.WORLD,
        fp8_recipe=CurrentScaling() if fp8 else None,
        **options,
        **uneven,
    )
    factor = torch.linspace(0.5, 2.0, loss.numel()).view(loss.shape).to(device)
    grads = torch.autograd.grad((loss * factor).sum(), [t for t in given if t is not None])
    return loss.detach().cpu(), [grad.cpu() for grad in grads]


def check_head(ranks, dtype, sizes, options, bias=True):
    results = ranks.run(_head, dtype, sizes, options, bias)
    x, w, b, target = head(dtype, sum(sizes), bias)
    wide = [None if t is None else t.double().requires_grad_() for t in (x, w, b)]
    plain = {k: v for k, v in options.items() if k != "chunk_rows"}
    logits = torch.nn.functional.linear(*wide).flatten(0, -2)
    loss = torch.nn.functional.cross_entropy(logits, target.flatten(), **plain)
    loss = loss.view(target.shape) if plain.get("reduction") == "none" else loss
    factor = torch.linspace(0.5, 2.0, loss.numel()).view(loss.shape)
    expected = torch.autograd.grad((loss * factor).sum(), [t for t in wide if t is not None])
    step = {torch.float32: 2**-20, torch.float16: 2**-9, torch.bfloat16: 2**-6}[dtype]
    for found, (dx, *_) in results:
        assert torch.equal(found, results[0][0])
        assert torch.equal(dx, results[0][1][0])
        assert (found.double() - loss).abs().max() <= 4 * step * loss.abs().max()
    joined = [torch.cat(parts) for parts in zip(*(grads[1:] for _, grads in results), strict=True)]
    for found, wanted in zip([results[0][1][0], *joined], expected, strict=True):
        assert found.dtype is dtype
        assert (found.double() - wanted).abs().max() <= 4 * step * wanted.abs().max() + 1e-7


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("size", [2, 3])
def test_head_against_one_rank(all_ranks, size, name, reduction):
    options = {**OPTIONS[name], "reduction": reduction, "chunk_rows": 4}
    check_head(ranks_of(all_ranks, size, "gloo"), torch.float32, (17,) * size, options)


def _ignored(rank, dtype, reduction, fp8):
    """Gradients of ignored rows, and of the weight without other rows, for an infinite factor."""
    device = device_of(rank)
    x, w, _, target = head(dtype, 32, bias=False)
    x, w = (t.to(device).requires_grad_() for t in (x, w[16 * rank : 16 * rank + 16]))
    logits = torch.randn(*ROWS, 16, device=device).to(dtype).requires_grad_()
    found = []
    target = target.to(device)
    for targets in (torch.full_like(target, -100), target.index_fill(0, target.new_ones(1), -100)):
        ignored = targets == -100
        group = torch.distributed.group.WORLD
        loss = linear_cross_entropy(
            x, w, targets, reduction=reduction, chunk_rows=4, tp_group=group,
            fp8_recipe=CurrentScaling() if fp8 else None,
        )  # fmt: skip
        dx, dw = torch.autograd.grad(loss, [x, w], torch.full_like(loss, torch.inf))
        found += [dx[ignored], dw] if ignored.all() else [dx[ignored]]
        loss = parallel_cross_entropy(logits, targets, group=group, reduction=reduction)
        (grad,) = torch.autograd.grad(loss, logits, torch.full_like(loss, torch.inf))
        found.append(grad[ignored])
    return [tensor.cpu() for tensor in found]


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_ignored_rows_have_gradient_0_whatever_the_incoming_one(two_ranks, reduction, dtype, fp8):
    for found in two_ranks.run(_ignored, dtype, reduction, fp8):
        for grad in found:
            assert grad.numel()
            assert not grad.any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(13, 28), (40, 1), (9, 2, 6)])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_head_of_uneven_parts(all_ranks, sizes, dtype, reduction):
    options = {**OPTIONS["ignored and smooth"], "reduction": reduction}
    check_head(ranks_of(all_ranks, len(sizes), "gloo"), dtype, sizes, options, bias=False)


def _small_chunks(rank, sizes):
    """The head in as many chunks on each rank as its default takes, which is rows of few bytes."""
    module = sys.modules["apex_te.module._core.vocabulary_losses"]
    names = ("_CHUNK_BYTES", "_LEAST_ROWS", "_ROW_MULTIPLE")
    before = [getattr(module, name) for name in names]
    for name, value in zip(names, (2 * 4 * sum(sizes), 1, 1), strict=True):
        setattr(module, name, value)
    try:
        return _head(rank, torch.float32, sizes, {})
    finally:
        for name, value in zip(names, before, strict=True):
            setattr(module, name, value)


def test_uneven_parts_have_as_many_chunks(two_ranks):
    found = two_ranks.run(_small_chunks, (40, 1))
    expected = two_ranks.run(_head, torch.float32, (40, 1), {"chunk_rows": 4})
    for (loss, _), (wanted, _) in zip(found, expected, strict=True):
        assert torch.equal(loss, wanted)


def test_head_in_fp8(two_ranks):
    """Near the head in float32, and other than it."""
    exact = two_ranks.run(_head, torch.float32, (32, 32), {})
    found = two_ranks.run(_head, torch.float32, (32, 32), {}, True, True, True)
    for (loss, grads), (wanted, others) in zip(found, exact, strict=True):
        assert abs(loss - wanted) < 0.05 * wanted
        for grad, other in zip(grads, others, strict=True):
            assert 0 < (grad - other).norm() < 0.15 * other.norm()


def _log_probs(rank, dtype, sizes, fp8):
    """Log-probabilities, entropies and the gradients of a weighting of both."""
    device = device_of(rank)
    x, w, b, target = head(dtype, sum(sizes), True)
    start = sum(sizes[:rank])
    part = slice(start, start + sizes[rank])
    given = [t.to(device).requires_grad_() for t in (x, w[part], b[part])]
    uneven = {"first_index": start, "vocab_size": sum(sizes)} if len(set(sizes)) > 1 else {}
    group, add = torch.distributed.group.WORLD, torch.distributed.ReduceOp.SUM
    with recorded("all_reduce", lambda *args, op=add, **kwargs: str(op)) as collectives:
        found = linear_log_probs(
            given[0], given[1], target.to(device), given[2],
            temperature=0.7, return_entropy=True, ignore_index=5, chunk_rows=21, tp_group=group,
            fp8_recipe=CurrentScaling() if fp8 else None, **uneven,
        )  # fmt: skip
        factors = torch.linspace(-1.0, 2.0, 2 * target.numel(), device=device).view(2, *ROWS)
        grads = torch.autograd.grad(found, given, [*factors])
    assert [name.split(".")[-1] for name in collectives] == ["MAX", "SUM", "SUM", "SUM"]
    return [each.detach().cpu() for each in found], [grad.cpu() for grad in grads]


def check_log_probs(ranks, dtype, sizes, fp8=False):
    results = ranks.run(_log_probs, dtype, sizes, fp8)
    x, w, b, target = head(dtype, sum(sizes), True)
    wide = [t.double().requires_grad_() for t in (x, w, b)]
    log_p = (torch.nn.functional.linear(*wide) / 0.7).log_softmax(-1)
    chosen = log_p.gather(-1, target.unsqueeze(-1)).squeeze(-1), -(log_p.exp() * log_p).sum(-1)
    expected = [each.masked_fill(target == 5, 0.0) for each in chosen]
    factors = torch.linspace(-1.0, 2.0, 2 * target.numel()).view(2, *ROWS)
    wanted = torch.autograd.grad(expected, wide, [*factors.double()])
    found, (dx, *_) = results[0]
    for others, (other, *_) in results[1:]:
        assert all(map(torch.equal, others, found))
        assert torch.equal(other, dx)
    joined = [torch.cat(parts) for parts in zip(*(grads[1:] for _, grads in results), strict=True)]
    step = {torch.float32: 2**-18, torch.bfloat16: 2**-4}[dtype]
    for a, e in zip([*found, dx, *joined], [*expected, *wanted], strict=True):
        error = (a.double() - e).abs().max() / e.abs().max()
        assert error <= (0.15 if fp8 else step)
        assert not fp8 or error > step


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(17, 17), (13, 28), (9, 2, 6)])
def test_log_probabilities(all_ranks, sizes, dtype):
    check_log_probs(ranks_of(all_ranks, len(sizes), "gloo"), dtype, sizes)


def test_log_probabilities_in_fp8(two_ranks):
    check_log_probs(two_ranks, torch.float32, (32, 32), fp8=True)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probabilities_on_two_gpus(two_gpus, dtype):
    check_log_probs(two_gpus, dtype, (264, 264))


def _wrong_head(rank):
    x, w, b, target = head(torch.float32, 8, True)
    changes = (
        {"tp_group": 3},
        {"first_index": 3},
        {"first_index": 9, "vocab_size": 16},
        {"target": target + 9},
    )
    given = {"target": target, "tp_group": torch.distributed.group.WORLD, "bias": b}
    return [told(linear_cross_entropy, x, w, **given | changed) for changed in changes]


def test_wrong_arguments_of_a_head(two_ranks):
    expected = [
        "TypeError: linear_cross_entropy: tp_group must be a torch.distributed.ProcessGroup",
        "ValueError: linear_cross_entropy: vocab_size must be given with first_index",
        "ValueError: linear_cross_entropy: first_index must be from 0 to 8 for 8 columns of 16",
        "ValueError: linear_cross_entropy: target must be in [0, 16) or ignore_index -100",
    ]
    assert_told(two_ranks.run(_wrong_head)[0], expected)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_head_on_two_gpus(two_gpus, dtype):
    check_head(two_gpus, dtype, (264, 264), OPTIONS["ignored and smooth"])


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_two_gpus(two_gpus, dtype):
    check(two_gpus, dtype, (257, 257), OPTIONS["ignored and smooth"], "none")
