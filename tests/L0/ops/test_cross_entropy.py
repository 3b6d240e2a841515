"""cross_entropy against PyTorch's formula in float64, loss and gradient, on each device."""

import checks
import pytest
import torch
from checks import (
    DTYPES,
    assert_as_good_as_torch,
    assert_same_bits,
    in_pairs,
    needs_cuda,
    needs_memory,
)
from torch.nn import functional as F

from apex_te.ops import cross_entropy as op
from apex_te.ops.cross_entropy import cross_entropy

COLUMNS = [1, 3, 7, 8, 16, 17, 127, 129, 1000, 4095, 8192, 8200, 32000, 50257]


def make(rows, cols, dtype, spread=3.0):
    logits = (torch.randn(rows, cols) * spread).to(dtype)
    return logits, torch.randint(0, cols, (rows,))


def check_rows(device, logits, target, **options):
    """Unreduced loss and gradient of the kernel, held against the formula."""
    x, t = logits.to(device), target.to(device)
    grad = torch.empty_like(x)
    loss = op.cross_entropy_fwd(x, t, grad=grad, **options)
    exact = op.reference(logits.double(), target, **options)
    same = op.reference(logits, target, **options)
    assert_as_good_as_torch(loss, exact[0], op.reference(logits.float(), target, **options)[0])
    assert_as_good_as_torch(grad, exact[1], same[1])
    # That bound is of the largest gradient; most are far smaller and must be right for themselves.
    error = (grad.detach().cpu().double() - exact[1]).abs()
    steps = {torch.float32: 2**-16, torch.float16: 2**-9, torch.bfloat16: 2**-7}
    assert (error <= steps[grad.dtype] * exact[1].abs() + 1e-7).all()
    return loss, grad


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cols", COLUMNS)
def test_fwd(device, poison, cols, dtype):
    # Enough rows that the largest error of either side is no accident.
    logits, target = make(5 if cols > 8192 else 64, cols, dtype)
    target[2] = -100
    loss, grad = check_rows(device, logits, target)
    assert loss[2] == 0
    assert not grad[2].any()


@pytest.mark.parametrize("cols", [5, 129, 33000])
@pytest.mark.parametrize("smoothing", [0.1, 1.0])
def test_fwd_label_smoothing(device, poison, cols, smoothing):
    logits, target = make(4 if cols > 8192 else 64, cols, torch.float32)
    check_rows(device, logits, target, label_smoothing=smoothing)


@needs_cuda
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cols", [32768, 32769, 65529, 128256, 131073, 262137, 262144, 300001])
def test_fwd_long_rows(poison, cols, dtype):
    """Each kernel, its limits, and rows of which a part is read twice."""
    logits, target = make(12, cols, dtype)
    check_rows(torch.device("cuda"), logits, target, label_smoothing=0.1)


@needs_cuda
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("cols", [65529, 131077, 200000])
def test_many_long_rows_are_as_few(poison, cols, smoothing):
    """A row takes its block's turn, or its cluster's, and shared memory after others."""
    x = 3 * torch.randn(330, cols, device="cuda").bfloat16()
    target = torch.randint(0, cols, (330,), device="cuda")
    target[::7] = -100
    grad = torch.empty_like(x)
    loss = op.cross_entropy_fwd(x, target, grad=grad, label_smoothing=smoothing)
    losses, grads = [], []
    for few, t in zip(x.split(24), target.split(24), strict=True):
        grads.append(torch.empty_like(few))
        losses.append(op.cross_entropy_fwd(few, t, grad=grads[-1], label_smoothing=smoothing))
    assert_same_bits((loss, grad), (torch.cat(losses), torch.cat(grads)))
    over = op.cross_entropy_fwd(x, target, grad=x, label_smoothing=smoothing)
    assert_same_bits((over, x), (loss, grad))


@in_pairs(
    reduction=["mean", "sum", "none"],
    overwrite=[False, True],
    dtype=[torch.float32, torch.bfloat16],
)
def test_autograd(device, reduction, overwrite, dtype):
    logits, target = make(24, 131, dtype)
    target[::5] = 7
    options = {"ignore_index": 7, "label_smoothing": 0.1, "reduction": reduction}

    def run(x, t, function, **more):
        x = x.clone().requires_grad_()
        y = x * 1.0 if more else x
        loss = function(y.view(4, 6, -1), t.view(4, 6), **options, **more)
        weight = torch.arange(1.0, 25.0, device=loss.device).view(4, 6)
        (loss * (weight if loss.dim() else 3.0)).sum().backward()
        return loss.detach(), x.grad

    def formula(x, t, **kwargs):
        out = F.cross_entropy(x.reshape(24, -1), t.reshape(-1), **kwargs)
        return out.view(4, 6) if out.dim() else out

    actual = run(logits.to(device), target.to(device), cross_entropy, overwrite_logits=overwrite)
    exact = run(logits.double(), target, formula)
    same = run(logits, target, formula)
    assert_as_good_as_torch(actual[0], exact[0], run(logits.float(), target, formula)[0])
    assert_as_good_as_torch(actual[1], exact[1], same[1])


def test_overwrite_puts_gradient_into_logits(device):
    logits, target = make(6, 40, torch.bfloat16)
    leaf = logits.to(device).requires_grad_()
    shared = leaf * 1.0
    loss = cross_entropy(shared, target.to(device), overwrite_logits=True)
    version = shared._version
    (grad,) = torch.autograd.grad(loss, shared)
    assert grad.data_ptr() == shared.data_ptr()
    assert version > 0
    expected = cross_entropy(leaf, target.to(device))
    (other,) = torch.autograd.grad(expected, leaf)
    assert_same_bits(grad, other)


@pytest.mark.parametrize(("overwrite", "reduction"), [(False, "mean"), (True, "sum")])
def test_second_backward_is_refused_where_the_first_wrote(device, overwrite, reduction):
    logits, target = make(6, 40, torch.float32)
    x = logits.to(device).requires_grad_() * 1.0
    loss = cross_entropy(x, target.to(device), overwrite_logits=overwrite, reduction=reduction)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_second_backward_of_a_sum(device):
    logits, target = make(6, 40, torch.float16)
    x = logits.to(device).requires_grad_()
    loss = cross_entropy(x, target.to(device), reduction="sum")
    first, second = (torch.autograd.grad(loss, x, retain_graph=True)[0] for _ in range(2))
    assert_same_bits(first, second)


def test_changed_logits_are_refused(device):
    """Backward reads the logits: what they became must not pass for what they were."""
    logits, target = make(6, 40, torch.float16)
    x = logits.to(device).requires_grad_() * 1.0
    loss = cross_entropy(x, target.to(device))
    x.detach().mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_float16_gradients_survive_a_loss_scale(device):
    x = torch.zeros(8192, 512, dtype=torch.float16, device=device, requires_grad=True)
    target = torch.zeros(8192, dtype=torch.int64, device=device)
    (cross_entropy(x, target) * 65536).backward()
    exact = torch.tensor(65536 / 8192 / 512, dtype=torch.float64)
    assert (x.grad[:, 1:].double() == exact.half().double()).all()
    assert (x.grad[:, 0].double() == (exact - 8).half().double()).all()


GRAD_OUTPUTS = {
    "one": lambda rows: torch.ones(rows),
    "loss scale": lambda rows: torch.full((rows,), 65536.0),
    "third": lambda rows: torch.full((rows,), 1 / 3),
    "of each row": lambda rows: torch.randn(rows) * 5,
}


@in_pairs(grad_output=GRAD_OUTPUTS, reduction=["mean", "sum", "none"], dtype=DTYPES)
def test_gradients_are_as_accurate_as_torch(device, dtype, reduction, grad_output):
    """16-bit gradients are rounded once, those of float32 as PyTorch's, whatever the factor is."""
    rows, cols = 96, 1031
    logits, target = make(rows, cols, dtype)
    target[::5] = 7
    factor = GRAD_OUTPUTS[grad_output](rows)
    factor = factor if reduction == "none" else factor[0] / 4096
    for smoothing in (0.0, 0.1):
        options = {"ignore_index": 7, "label_smoothing": smoothing, "reduction": reduction}

        def gradient(function, x, place, options=options):
            x = x.to(place).requires_grad_()
            loss = function(x, target.to(place), **options)
            return torch.autograd.grad(loss, x, factor.to(place, loss.dtype))[0].cpu()

        exact = gradient(F.cross_entropy, logits.double(), "cpu")
        actual = gradient(cross_entropy, logits, device)
        if dtype is torch.float32:
            checks.assert_error_as_torch(actual, exact, gradient(F.cross_entropy, logits, device))
        else:
            checks.assert_error_as_torch(actual, exact, exact.to(dtype))
        assert not actual[::5].any()


@in_pairs(smoothing=[0.0, 0.1], dtype=DTYPES, cols=COLUMNS)
def test_bwd_gives_the_gradient_of_fwd(device, poison, cols, dtype, smoothing):
    logits, target = make(9, cols, dtype)
    target[2] = -100
    logits[2, 0] = torch.nan  # not read
    x, t = logits.to(device), target.to(device)
    expected = torch.empty_like(x)
    stats = x.new_empty(9, 2, dtype=torch.float32)
    options = {"num_valid": op.count_valid(t), "label_smoothing": smoothing}
    op.cross_entropy_fwd(x, t, grad=expected, stats=stats, **options)
    one, two = (torch.full((1,), value, device=device) for value in (1.0, 2.0))
    grad = op.cross_entropy_bwd(x, t, stats, one, torch.empty_like(x), **options)
    assert_same_bits(grad, expected)
    each = op.cross_entropy_bwd(x, t, stats, one.expand(9).clone(), torch.empty_like(x), **options)
    assert_same_bits(each, expected)
    # The gradient that is there already is left alone for a factor of 1, else written over.
    marked = torch.full_like(x, 5.0)
    op.cross_entropy_bwd(x, t, stats, one, marked, made=True, **options)
    assert (marked == 5).all()
    op.cross_entropy_bwd(x, t, stats, two, marked, made=True, **options)
    other = op.cross_entropy_bwd(x, t, stats, two, torch.empty_like(x), **options)
    assert_same_bits(marked, other)
    if dtype is not torch.float16:
        assert_same_bits(other, expected * 2)
    over = x.clone()
    assert_same_bits(op.cross_entropy_bwd(over, t, stats, two, over, **options), other)
    # A gradient that is not aligned as the logits are.
    aside = torch.empty(9 * cols + 1, dtype=dtype, device=device)[1:].view(9, cols)
    assert_same_bits(op.cross_entropy_bwd(x, t, stats, two, aside, **options), other)


@needs_cuda
@pytest.mark.parametrize("dtype", DTYPES)
def test_bwd_of_many_long_rows(poison, dtype):
    """More pieces of rows than blocks, and rows of the ring's kernel."""
    x = torch.randn(330, 65529, device="cuda").to(dtype)
    t = torch.randint(0, 65529, (330,), device="cuda")
    t[::7] = -100
    expected, stats = torch.empty_like(x), x.new_empty(330, 2, dtype=torch.float32)
    op.cross_entropy_fwd(x, t, grad=expected, stats=stats)
    one = torch.ones(1, device="cuda")
    op.cross_entropy_bwd(x, t, stats, one, x)
    assert_same_bits(x, expected)


def test_bwd_refuses(device):
    x, t = torch.zeros(3, 5, device=device), torch.zeros(3, dtype=torch.int64, device=device)
    stats, factor = torch.ones(3, 2, device=device), torch.ones(3, device=device)
    for change, error, message in (
        ({"grad_output": factor[:2]}, ValueError, "grad_output must have one element"),
        ({"grad_output": factor.half()}, TypeError, "grad_output must have dtype float32"),
        ({"made": True}, ValueError, "grad_output must have one element where grad is made, got 3"),
    ):
        given = {"stats": stats, "grad_output": factor, "grad": torch.empty_like(x), **change}
        with pytest.raises(error, match=message):
            op.cross_entropy_bwd(x, t, **given)


@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts(device, dtype):
    logits, target = make(9, 203, dtype)
    expected = cross_entropy(logits.to(device), target.to(device), reduction="none")
    for name, x in checks.layouts(logits.to(device)):
        x = x.requires_grad_()
        loss = cross_entropy(x, target.to(device), reduction="none")
        assert (loss - expected).abs().max() <= 4e-6
        (grad,) = torch.autograd.grad(loss.sum(), x)
        exact = op.reference(logits.double(), target)[1]
        assert_as_good_as_torch(grad, exact, op.reference(logits, target)[1])
        assert name


@pytest.mark.parametrize("target_dtype", [torch.int32, torch.int64])
def test_target_dtypes_and_expanded(device, target_dtype):
    logits, target = make(6, 33, torch.float32)
    x = logits[:1].expand(6, 33).to(device)
    actual = cross_entropy(x, target.to(device, target_dtype), reduction="none")
    expected = F.cross_entropy(logits[:1].expand(6, 33).double(), target, reduction="none")
    assert (actual.cpu().double() - expected).abs().max() < 1e-6


def test_all_ignored_is_as_in_torch(device):
    x = torch.randn(3, 9, device=device, requires_grad=True)
    target = torch.full((3,), -100, device=device)
    loss = cross_entropy(x, target)
    loss.backward()
    assert torch.isnan(loss)
    assert not x.grad.any()


@pytest.mark.parametrize("factor", [float("inf"), float("nan"), -2.0])
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("valid", [0, 3])
def test_ignored_rows_have_gradient_0_whatever_the_incoming_one(
    device, dtype, reduction, overwrite, factor, valid
):
    """Ignored rows stay 0 for an infinite or NaN incoming gradient, and the others show it."""
    logits, target = (t.to(device) for t in make(9, 131, dtype))
    target[valid:] = -100
    leaf = logits.requires_grad_()
    loss = cross_entropy(leaf * 1.0, target, reduction=reduction, overwrite_logits=overwrite)
    loss.backward(torch.full_like(loss, factor))
    assert not leaf.grad[valid:].any()
    plain = logits.detach().requires_grad_()
    loss = F.cross_entropy(plain.float(), target, reduction=reduction)
    loss.backward(torch.full_like(loss, factor))
    assert torch.equal(leaf.grad.isfinite().all(1), plain.grad.isfinite().all(1))


@pytest.mark.parametrize("cols", [9, 2000, 40000])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_special_values(device, cols, value):
    """NaN and +Inf make the row NaN; -Inf is a probability of 0; other rows are untouched."""
    logits, target = make(3, cols, torch.float32)
    target[:] = 1
    logits[1, cols // 2] = value
    x = logits.to(device)
    grad = torch.empty_like(x)
    loss = op.cross_entropy_fwd(x, target.to(device), grad=grad)
    if value == float("-inf"):
        expected = F.cross_entropy(logits.double(), target, reduction="none")
        assert (loss.cpu().double() - expected).abs().max() < 1e-5
        assert grad[1, cols // 2] == 0
    else:
        assert torch.isnan(loss[1])
        assert torch.isnan(grad[1]).all()
    assert torch.isfinite(loss[[0, 2]]).all()
    assert torch.isfinite(grad[[0, 2]]).all()


def test_large_logits(device):
    logits = torch.tensor([[1e4, -1e4, 0.0], [3e38, 0.0, -3e38]], device=device)
    loss = cross_entropy(logits, torch.tensor([1, 0], device=device), reduction="none")
    assert loss.tolist() == [2e4, 0.0]


def test_target_out_of_range():
    logits = torch.randn(3, 5)
    with pytest.raises(ValueError, match=r"target\[1\] must be in \[0, 5\) or ignore_index -100"):
        cross_entropy(logits, torch.tensor([0, 5, -100]))


@needs_cuda
def test_target_out_of_range_is_nan_on_gpu():
    x = torch.randn(3, 5, device="cuda", requires_grad=True)
    loss = cross_entropy(x, torch.tensor([0, 5, -1], device="cuda"), reduction="none")
    assert torch.isnan(loss).tolist() == [False, True, True]
    loss.sum().backward()
    assert torch.isnan(x.grad[1:]).all()
    assert torch.isfinite(x.grad[0]).all()


def test_compiled_with_every_reduction():
    logits, target = make(4, 33, torch.float32)

    def step(x, overwrite, reduction):
        loss = cross_entropy(
            x * 2, target, label_smoothing=0.1, overwrite_logits=overwrite, reduction=reduction
        )
        return loss.sum() * 4

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for reduction in ("mean", "sum", "none"):
        for overwrite in (False, True):
            a, b = logits.clone().requires_grad_(), logits.clone().requires_grad_()
            actual, expected = (f(x, overwrite, reduction) for f, x in ((compiled, a), (step, b)))
            actual.backward()
            expected.backward()
            assert_same_bits((actual, a.grad), (expected, b.grad))


@needs_cuda
def test_more_than_2_to_31_elements():
    needs_memory(20)
    rows, cols = 16500, 131072  # 2.163e9 elements
    x = torch.empty(rows, cols, dtype=torch.bfloat16, device="cuda").normal_()
    target = torch.randint(0, cols, (rows,), device="cuda")
    kept = [0, rows // 2, rows - 1]
    before = x[kept].cpu()
    loss = op.cross_entropy_fwd(x, target, grad=x)
    exact = op.reference(before.double(), target[kept].cpu())
    same = op.reference(before, target[kept].cpu())
    assert_as_good_as_torch(x[kept], exact[1], same[1])
    expected = op.reference(before.float(), target[kept].cpu())[0]
    assert_as_good_as_torch(loss[kept], exact[0], expected)
