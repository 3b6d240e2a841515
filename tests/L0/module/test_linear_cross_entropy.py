"""linear_cross_entropy against product and cross entropy in float64, in chunks of any size."""

import itertools

import pytest
import torch
from checks import assert_same_bits, needs_cuda
from schemes import SCHEMES, STATELESS
from torch.nn import functional as F

import apex_te
from apex_te import recipe
from apex_te.ops.cross_entropy import cross_entropy

ROWS, HIDDEN, VOCABULARY = 37, 48, 131
STEPS = {torch.float32: 2**-20, torch.float16: 2**-9, torch.bfloat16: 2**-6}


def make(device, dtype, rows=ROWS, hidden=HIDDEN, vocabulary=VOCABULARY, bias=True):
    """Hidden states, weight, bias and targets, of which two are ignored."""
    x = torch.randn(rows, hidden, device=device, dtype=dtype, requires_grad=True)
    w = torch.randn(vocabulary, hidden, device=device) / hidden**0.5
    w = w.to(dtype).requires_grad_()
    b = torch.randn(vocabulary, device=device, dtype=dtype, requires_grad=True) if bias else None
    target = torch.randint(0, vocabulary, (rows,), device=device)
    target[::17] = -100
    return x, w, b, target


def gradients(loss, tensors, scale=1.0):
    """Gradients of ``scale * loss.sum()``."""
    return torch.autograd.grad(loss.sum() * scale, [t for t in tensors if t is not None])


def exact(x, w, b, target, scale=1.0, **options):
    """Loss and gradients in float64."""
    wide = [None if t is None else t.detach().double().requires_grad_() for t in (x, w, b)]
    loss = F.cross_entropy(F.linear(*wide), target, **options)
    return loss, gradients(loss, wide, scale)


def assert_near(found, wanted, step):
    """Errors stay within some roundings of the largest value."""
    for a, e in zip(found, wanted, strict=True):
        assert (a.double() - e).abs().max() <= 4 * step * e.abs().max() + 1e-7


@pytest.mark.parametrize("dtype", list(STEPS))
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("chunk", [1, 16, 37, 64, None])
def test_against_float64(device, poison, dtype, reduction, chunk):
    tensors = make(device, dtype)
    options = {"reduction": reduction, "label_smoothing": 0.1}
    loss = apex_te.linear_cross_entropy(
        *tensors[:2], tensors[3], tensors[2], chunk_rows=chunk, **options
    )
    wanted, grads = exact(*tensors, **options)
    assert loss.dtype is torch.float32
    assert loss.shape == wanted.shape
    assert_near([loss], [wanted], STEPS[dtype])
    assert_near(gradients(loss, tensors[:3]), grads, STEPS[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_chunk_has_the_bits_of_product_and_loss(device, dtype):
    x, w, _, target = make(device, dtype, bias=False)
    plain = cross_entropy(F.linear(x, w), target)
    loss = apex_te.linear_cross_entropy(x, w, target, chunk_rows=ROWS)
    assert torch.equal(loss, plain)
    for a, e in zip(gradients(loss, [x, w]), gradients(plain, [x, w]), strict=True):
        assert torch.equal(a, e)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 1), (1, 2)])
def test_only_the_gradients_that_are_wanted(device, reduction, wanted):
    tensors = make(device, torch.float32)
    for i, tensor in enumerate(tensors[:3]):
        tensor.requires_grad_(i in wanted)
    x, w, b, target = tensors
    loss = apex_te.linear_cross_entropy(x, w, target, b, reduction=reduction, chunk_rows=10)
    loss.sum().backward()
    _, grads = exact(x, w, b, target, reduction=reduction)
    for i, tensor in enumerate(tensors[:3]):
        if i in wanted:
            assert_near([tensor.grad], [grads[i]], STEPS[torch.float32])
        else:
            assert tensor.grad is None


def test_without_gradients_nothing_is_kept(device):
    x, w, b, target = make(device, torch.bfloat16)
    with torch.no_grad():
        loss = apex_te.linear_cross_entropy(x, w, target, b, chunk_rows=8)
    assert not loss.requires_grad
    assert_near([loss], [exact(x, w, b, target)[0]], STEPS[torch.bfloat16])


@pytest.mark.parametrize("dtype", list(STEPS))
def test_loss_scale(device, dtype):
    """A factor of the loss reaches float16 gradients before they are rounded."""
    tensors = make(device, dtype)
    x, w, b, target = tensors
    loss = apex_te.linear_cross_entropy(x, w, target, b, chunk_rows=16)
    _, grads = exact(*tensors, scale=1024.0)
    assert_near(gradients(loss, tensors[:3], 1024.0), grads, STEPS[dtype])


@pytest.mark.parametrize("name", [None, *STATELESS])
@pytest.mark.parametrize("dtype", list(STEPS))
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_ignored_rows_have_gradient_0_whatever_the_incoming_one(device, dtype, reduction, name):
    """Without a valid row all gradients are 0, and with some those of ignored rows are."""
    x, w, b, target = make(device, dtype)
    if name is not None:
        b = None
    tensors = [t for t in (x, w, b) if t is not None]
    for chunk, factor in itertools.product((8, None), (float("inf"), float("nan"), 0.5)):
        options = {"reduction": reduction, "chunk_rows": chunk, "label_smoothing": 0.1}
        options["fp8_recipe"] = None if name is None else SCHEMES[name]
        loss = apex_te.linear_cross_entropy(x, w, torch.full_like(target, -100), b, **options)
        for grad in torch.autograd.grad(loss, tensors, torch.full_like(loss, factor)):
            assert not grad.any()
        loss = apex_te.linear_cross_entropy(x, w, target, b, **options)
        grads = torch.autograd.grad(loss, tensors, torch.full_like(loss, factor))
        assert not grads[0][target == -100].any()
        assert all(bool(grad.isfinite().all()) == (factor == 0.5) for grad in grads)


@pytest.mark.parametrize("dtype", list(STEPS))
def test_a_step_without_valid_rows_adds_nothing(device, dtype):
    """A loss scale and gradients accumulated before and after it stay as they are."""
    x, w, _, target = make(device, dtype, bias=False)
    # On a GPU a scaler refuses float16 weights, as float16 runs under autocast there.
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**4)
    optimizer = torch.optim.SGD([w.detach().float().requires_grad_()], lr=0.1)
    (master,) = optimizer.param_groups[0]["params"]
    grads = []
    for targets in ((target,), (target, torch.full_like(target, -100))):
        w.grad = None
        for part in targets:
            valid = (part != -100).sum()
            loss = apex_te.linear_cross_entropy(x, w, part, reduction="sum") / valid
            scaler.scale(loss).backward()
        grads.append(w.grad)
    assert_same_bits(*grads)
    before, scale = master.detach().clone(), scaler.get_scale()
    w.grad = None
    loss = apex_te.linear_cross_entropy(x, w, torch.full_like(target, -100), reduction="sum")
    scaler.scale(loss / 0).backward()
    master.grad = w.grad.float()
    scaler.step(optimizer)
    scaler.update()
    assert_same_bits(master.detach(), before)
    assert scaler.get_scale() == scale


def test_second_backward_is_refused(device):
    x, w, _, target = make(device, torch.float32, bias=False)
    loss = apex_te.linear_cross_entropy(x, w, target)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_shapes_of_sequences(device):
    x, w, _, target = make(device, torch.float32, rows=24, bias=False)
    losses = apex_te.linear_cross_entropy(
        x.view(2, 12, -1), w, target.view(2, 12), reduction="none", chunk_rows=7
    )
    assert losses.shape == (2, 12)
    whole = apex_te.linear_cross_entropy(x, w, target, reduction="none", chunk_rows=24)
    torch.testing.assert_close(losses.view(-1), whole)
    losses.sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("rows", [0, 1])
def test_few_rows(device, rows):
    x, w, b, target = make(device, torch.float32, rows=rows)
    loss = apex_te.linear_cross_entropy(x, w, target, b, reduction="sum")
    loss.backward()
    assert_near([loss], [exact(x, w, b, target, reduction="sum")[0]], STEPS[torch.float32])
    if rows == 0:
        assert not w.grad.any()
        assert not b.grad.any()


def test_autocast(device):
    x, w, b, target = make(device, torch.float32)
    with torch.autocast(device.type, torch.bfloat16):
        loss = apex_te.linear_cross_entropy(x, w, target, b, chunk_rows=16)
    loss.backward()
    assert w.grad.dtype is torch.float32
    short = [t.detach().bfloat16() for t in (x, w, b)]
    assert_near([loss], [exact(*short, target)[0]], STEPS[torch.bfloat16])


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("name", STATELESS)
def test_autocast_in_fp8(device, name, reduction, inside):
    """The products are those without autocast, which leaves their float32 sums alone."""
    x, w, _, target = make(device, torch.float32, bias=False)
    options = {"fp8_recipe": SCHEMES[name], "reduction": reduction, "chunk_rows": 16}
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        loss = apex_te.linear_cross_entropy(x, w, target, **options)
        grads = gradients(loss, (x, w)) if inside else None
    grads = grads or gradients(loss, (x, w))
    narrow = [t.detach().bfloat16().requires_grad_() for t in (x, w)]
    same = apex_te.linear_cross_entropy(*narrow, target, **options)
    assert_same_bits(loss, same)
    for found, wanted in zip(grads, gradients(same, narrow), strict=True):
        assert_same_bits(found, wanted.float())


def test_sums_of_chunks_in_float32(device):
    x, w, _, target = make(device, torch.bfloat16, rows=512, bias=False)
    _, (_, grad) = exact(x, w, None, target)
    errors = {}
    for dtype in (torch.bfloat16, torch.float32):
        loss = apex_te.linear_cross_entropy(x, w, target, chunk_rows=16, weight_grad_dtype=dtype)
        found = torch.autograd.grad(loss, w)[0]
        assert found.dtype is torch.bfloat16
        errors[dtype] = (found.double() - grad).square().mean()
    assert errors[torch.float32] < errors[torch.bfloat16]


@pytest.mark.parametrize("name", STATELESS)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("vocabulary", [131, 256])
def test_fp8(device, name, reduction, vocabulary):
    """In FP8, one chunk equals a Linear in that recipe and its loss."""
    x, w, _, target = make(device, torch.float32, 40, 64, vocabulary, bias=False)
    head = apex_te.Linear(64, vocabulary, bias=False, device=device)
    head.weight.data.copy_(w)
    with apex_te.fp8_autocast(fp8_recipe=SCHEMES[name]):
        logits = head(x)
    plain = cross_entropy(logits, target, reduction=reduction)
    loss = apex_te.linear_cross_entropy(
        x, w, target, reduction=reduction, fp8_recipe=SCHEMES[name], chunk_rows=64
    )
    assert torch.equal(loss, plain)
    found, wanted = gradients(loss, [x, w]), gradients(plain, [x, head.weight])
    for a, e in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, e, rtol=2**-6, atol=float(e.abs().max()) * 2**-7)
    chunks = apex_te.linear_cross_entropy(
        x, w, target, reduction=reduction, fp8_recipe=SCHEMES[name], chunk_rows=16
    )
    # Each chunk has scales of its own: single losses differ by the rounding to FP8.
    assert (chunks - plain).norm() <= 0.02 * plain.norm()
    for a, e in zip(gradients(chunks, [x, w]), wanted, strict=True):
        assert (a - e).norm() <= 0.1 * e.norm()


@pytest.mark.parametrize("scheme", [None, recipe.CurrentScaling(), recipe.BlockScaling()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_weight_held_in_fp8_is_its_values(device, dtype, scheme):
    with apex_te.fp8_model_init(recipe=recipe.CurrentScaling()):
        head = apex_te.Linear(HIDDEN, 128, bias=False, params_dtype=dtype, device=device)
    x, _, _, target = make(device, dtype, vocabulary=128, bias=False)
    plain = head.weight.detach().dequantize().requires_grad_()
    found, wanted = [], []
    for weight, results in ((head.weight, found), (plain, wanted)):
        loss = apex_te.linear_cross_entropy(x, weight, target, fp8_recipe=scheme, chunk_rows=16)
        results += [loss, *gradients(loss, (x, weight))]
    assert_same_bits(found, wanted)


def test_compiled(device):
    x, w, b, target = make(device, torch.float32)
    # As the default backend traces and splits it; its C++ for a CPU would take half a minute.
    backend = "aot_eager_decomp_partition" if device.type == "cpu" else "inductor"
    call = torch.compile(apex_te.linear_cross_entropy, fullgraph=True, backend=backend)
    loss = call(x, w, target, b, chunk_rows=16)
    eager = apex_te.linear_cross_entropy(x, w, target, b, chunk_rows=16)
    torch.testing.assert_close(loss, eager)
    for a, e in zip(gradients(loss, [x, w, b]), gradients(eager, [x, w, b]), strict=True):
        torch.testing.assert_close(a, e)


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("fp8_recipe", [None, recipe.CurrentScaling()])
def test_memory_of_a_vocabulary(fp8_recipe):
    """Beside the gradients the peak is a fraction of the logits and their gradient."""
    rows, hidden, vocabulary = 4096, 512, 65536
    x, w, _, target = make("cuda", torch.bfloat16, rows, hidden, vocabulary, bias=False)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = apex_te.linear_cross_entropy(x, w, target, chunk_rows=256, fp8_recipe=fp8_recipe)
    loss.backward()
    peak = torch.cuda.max_memory_allocated() - before
    kept = 2 * (x.numel() + w.numel()) * (1 if fp8_recipe is None else 3)
    assert peak - kept <= 2 * 2 * rows * vocabulary / 8


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"reduction": "avg"}, ValueError, "reduction must be"),
        ({"label_smoothing": 2.0}, ValueError, "label_smoothing must be in"),
        ({"chunk_rows": 0}, ValueError, "chunk_rows must be a positive integer"),
        ({"weight_grad_dtype": torch.float16}, TypeError, "weight_grad_dtype must be"),
        ({"fp8_recipe": recipe.DelayedScaling()}, ValueError, "recipe without state"),
        ({"bias": torch.zeros(3)}, ValueError, r"bias must be \[131\], got \[3\]"),
        ({"weight": torch.zeros(131, 5)}, ValueError, r"weight must be \[vocabulary, 48\]"),
        ({"weight": torch.zeros(131, 48).half()}, TypeError, "weight must have dtype"),
        ({"target": torch.zeros(3, dtype=torch.int64)}, ValueError, "target must have the shape"),
        ({"hidden": torch.zeros(37, 48).double()}, TypeError, "hidden must be float32"),
        ({"weight": torch.zeros(131, 48, device="meta")}, ValueError, "weight must be on cpu"),
    ],
)
def test_rejects(changes, error, text):
    x, w, _, target = make("cpu", torch.float32)
    arguments = {"hidden": x, "weight": w, "target": target} | changes
    with pytest.raises(error, match=f"linear_cross_entropy: .*{text}"):
        apex_te.linear_cross_entropy(**arguments)


def test_the_recipe_may_be_given_by_its_name():
    x, w = torch.randn(32, 64), torch.randn(48, 64)
    target = torch.randint(0, 48, (32,))
    loss = apex_te.linear_cross_entropy(x, w, target, fp8_recipe="tensorwise")
    assert loss == apex_te.linear_cross_entropy(x, w, target, fp8_recipe=recipe.CurrentScaling())
    assert loss != apex_te.linear_cross_entropy(x, w, target)
