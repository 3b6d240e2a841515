"""linear_log_probs against log_softmax and gather in float64: values, entropies, any gradients."""

import math

import pytest
import torch
from checks import assert_same_bits, needs_cuda
from schemes import SCHEMES, STATELESS
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import apex_te
from apex_te import linear_cross_entropy, linear_log_probs, recipe

ROWS, HIDDEN, VOCABULARY = 37, 48, 131
STEPS = {torch.float32: 2**-20, torch.float16: 2**-9, torch.bfloat16: 2**-6}


def make(device, dtype, rows=ROWS, hidden=HIDDEN, vocabulary=VOCABULARY, bias=True):
    """Hidden states, weight, bias, targets, of which some are ignored, and incoming gradients."""
    x = torch.randn(rows, hidden, device=device, dtype=dtype, requires_grad=True)
    w = 2 * torch.randn(vocabulary, hidden, device=device) / hidden**0.5
    w = w.to(dtype).requires_grad_()
    b = torch.randn(vocabulary, device=device, dtype=dtype, requires_grad=True) if bias else None
    targets = torch.randint(0, vocabulary, (rows,), device=device)
    targets[::17] = -100
    return x, w, b, targets, torch.randn(2, rows, device=device)


def given(x, w, b):
    return [tensor for tensor in (x, w, b) if tensor is not None]


def exact(x, w, b, targets, factors, temperature=1.0):
    """Log-probabilities, entropies and gradients in float64, of logits that are rounded twice."""
    wide = [None if t is None else t.detach().double().requires_grad_() for t in (x, w, b)]
    log_p = (F.linear(*wide) / temperature).log_softmax(-1)
    ignored = targets == -100
    found = log_p.gather(1, targets.masked_fill(ignored, 0)[:, None]).squeeze(1)
    entropies = torch.special.entr(log_p.exp()).sum(1)
    results = [each.masked_fill(ignored, 0.0) for each in (found, entropies)]
    total = sum((each * factor).sum() for each, factor in zip(results, factors, strict=True))
    return results, torch.autograd.grad(total, given(*wide))


def assert_near(found, wanted, step):
    """Errors stay within some roundings of the largest value."""
    for a, e in zip(found, wanted, strict=True):
        assert (a.double() - e).abs().max() <= 4 * step * e.abs().max() + 1e-7


@pytest.mark.parametrize("dtype", list(STEPS))
@pytest.mark.parametrize("temperature", [1, 0.7, 3.0])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("chunk", [1, 16, 64, None])
def test_against_float64(device, poison, dtype, temperature, entropy, bias, chunk):
    *tensors, targets, factors = make(device, dtype, bias=bias)
    if not entropy:
        factors[1] = 0
    found = linear_log_probs(
        *tensors[:2], targets, tensors[2],
        temperature=temperature, return_entropy=entropy, chunk_rows=chunk,
    )  # fmt: skip
    found = list(found) if entropy else [found]
    wanted, gradients = exact(*tensors, targets, factors, temperature)
    for each in found:
        assert each.dtype is torch.float32
        assert not each[targets == -100].signbit().any()
        assert not each[targets == -100].any()
    assert_near(found, wanted[: len(found)], STEPS[dtype])
    grads = torch.autograd.grad(found, given(*tensors), [*factors[: len(found)]])
    assert_near(grads, gradients, STEPS[dtype])


@pytest.mark.parametrize("name", [None, *STATELESS])
@pytest.mark.parametrize("held", [False, True])
def test_bits_of_single_losses(device, name, held):
    """They are those of linear_cross_entropy, with entropies or not, in FP8 or not."""
    x, w, _, targets, factors = make(device, torch.float32, 48, 64, 128, bias=False)
    if held:
        with apex_te.fp8_model_init(recipe=recipe.CurrentScaling()):
            w = apex_te.Linear(64, 128, bias=False, device=device).weight
    options = {"fp8_recipe": None if name is None else SCHEMES[name], "chunk_rows": 16}
    losses = linear_cross_entropy(x, w, targets, reduction="none", **options)
    wanted = torch.autograd.grad(losses, [x, w], -factors[0])
    found = linear_log_probs(x, w, targets, **options)
    assert torch.equal(found, -losses)
    for grads in (torch.autograd.grad(found, [x, w], factors[0], retain_graph=True) for _ in "ab"):
        assert_same_bits(grads, wanted)
    both, entropies = linear_log_probs(x, w, targets, return_entropy=True, **options)
    assert_same_bits(both, found)
    assert_near([entropies], exact(x, w.detach().to(x), None, targets, factors)[0][1:],
                2**-20 if name is None else 2**-5)  # fmt: skip


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2)])
@pytest.mark.parametrize("used", [0, 1])
def test_only_what_is_wanted(device, wanted, used):
    """Gradients of some tensors, of one of the two results."""
    *tensors, targets, factors = make(device, torch.float32)
    for i, tensor in enumerate(tensors):
        tensor.requires_grad_(i in wanted)
    x, w, b = tensors
    results = linear_log_probs(x, w, targets, b, return_entropy=True, chunk_rows=10)
    (results[used] * factors[used]).sum().backward()
    for tensor in tensors:
        tensor.requires_grad_()
    factors[1 - used] = 0
    _, gradients = exact(*tensors, targets, factors)
    for i, tensor in enumerate(tensors):
        assert (tensor.grad is not None) == (i in wanted)
        if i in wanted:
            assert_near([tensor.grad], [gradients[i]], STEPS[torch.float32])
    with torch.no_grad():
        for found in linear_log_probs(x, w, targets, b, return_entropy=True):
            assert not found.requires_grad


@pytest.mark.parametrize("dtype", list(STEPS))
@pytest.mark.parametrize("name", [None, *STATELESS])
@pytest.mark.parametrize("entropy", [False, True])
def test_ignored_rows_have_gradient_0_whatever_the_incoming_one(device, dtype, name, entropy):
    x, w, _, targets, _ = make(device, dtype, bias=False)
    options = {"fp8_recipe": None if name is None else SCHEMES[name], "return_entropy": entropy}
    for rows in (torch.full_like(targets, -100), targets):
        for factor in (math.inf, math.nan):
            found = linear_log_probs(x, w, rows, temperature=0.5, chunk_rows=8, **options)
            found = found if entropy else (found,)
            grads = torch.autograd.grad(found, [x, w], [torch.full_like(t, factor) for t in found])
            assert not grads[0][rows == -100].any()
            if rows is not targets:
                assert not grads[1].any()


def test_certain_and_impossible_tokens(device):
    """Probabilities of 0 and 1, and logits of -inf, add no NaN to entropies and gradients."""
    x, w, b, targets, factors = make(device, torch.float32)
    with torch.no_grad():
        x[:9] *= 50
        b[40:] = -torch.inf
        targets.clamp_(-100, 39)
    found = linear_log_probs(x, w, targets, b, return_entropy=True, chunk_rows=16)
    wanted, gradients = exact(x, w[:40], b[:40], targets, factors)
    assert_near(found, wanted, STEPS[torch.float32])
    assert (found[1][1:9] == 0).any()
    grads = torch.autograd.grad(found, (x, w, b), [*factors])
    assert not grads[1][40:].any()
    assert not grads[2][40:].any()
    assert_near([grads[0], grads[1][:40], grads[2][:40]], gradients, 2**-19)


def test_shapes_of_sequences_and_no_rows(device):
    x, w, b, targets, _ = make(device, torch.float32, rows=24)
    shaped = linear_log_probs(x.view(2, 12, -1), w, targets.view(2, 12).int(), b)
    assert_same_bits(shaped.view(-1), linear_log_probs(x, w, targets, b))
    assert shaped.shape == (2, 12)
    for found in linear_log_probs(x[:0], w, targets[:0], b, return_entropy=True):
        assert found.shape == (0,)
        assert not torch.autograd.grad(found.sum(), w, retain_graph=True)[0].any()


def test_autocast(device):
    """As in bfloat16, backward inside or outside; gradients in the dtype of the tensors."""
    x, w, b, targets, factors = make(device, torch.float32)
    narrow = [t.detach().bfloat16().requires_grad_() for t in (x, w, b)]
    options = {"temperature": 0.7, "return_entropy": True, "chunk_rows": 16}
    same = linear_log_probs(*narrow[:2], targets, narrow[2], **options)
    wanted = torch.autograd.grad(same, narrow, [*factors])
    with torch.autocast(device.type, torch.bfloat16):
        found = linear_log_probs(x, w, targets, b, **options)
        inside = torch.autograd.grad(found, (x, w, b), [*factors], retain_graph=True)
    outside = torch.autograd.grad(found, (x, w, b), [*factors])
    assert_same_bits(list(found), list(same))
    for grads in (inside, outside):
        assert_same_bits(list(grads), [grad.float() for grad in wanted])


def test_compiled(device):
    x, w, b, targets, factors = make(device, torch.float32)
    # As the default backend traces and splits it; its C++ for a CPU would take half a minute.
    backend = "aot_eager_decomp_partition" if device.type == "cpu" else "inductor"
    call = torch.compile(linear_log_probs, fullgraph=True, backend=backend)
    options = {"temperature": 0.7, "return_entropy": True, "chunk_rows": 32}
    results = [function(x, w, targets, b, **options) for function in (call, linear_log_probs)]
    torch.testing.assert_close(*results)
    grads = [torch.autograd.grad(found, (x, w, b), [*factors]) for found in results]
    torch.testing.assert_close(*grads)


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that ops made."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (list, tuple)) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


@pytest.mark.parametrize("name", [None, "blockwise"])
def test_no_tensor_is_larger_than_a_chunk(name):
    """With many rows, forward and backward make none larger than one chunk's logits."""
    rows, hidden, vocabulary = 1024, 16, 256
    x, w, _, targets, factors = make("cpu", torch.float32, rows, hidden, vocabulary, bias=False)
    scheme = None if name is None else SCHEMES[name]
    with Largest() as made:
        found = linear_log_probs(
            x, w, targets, temperature=0.7, return_entropy=True, chunk_rows=64, fp8_recipe=scheme
        )
        torch.autograd.grad(found, [x, w], [*factors])
    assert 64 * vocabulary <= made.elements <= max(64 * vocabulary, x.numel(), w.numel())
    assert made.elements <= rows * vocabulary / 8


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("fp8_recipe", [None, recipe.CurrentScaling()])
@pytest.mark.parametrize("entropy", [False, True])
def test_memory_of_a_vocabulary(fp8_recipe, entropy):
    """Beside the gradients the peak is an eighth of the logits, with chunks as by default."""
    rows, hidden, vocabulary = 32768, 512, 131072
    x, w, _, targets, _ = make("cuda", torch.bfloat16, rows, hidden, vocabulary, bias=False)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = linear_log_probs(
        x, w, targets, temperature=0.7, return_entropy=entropy, fp8_recipe=fp8_recipe
    )
    (sum(found) if entropy else found).sum().backward()
    peak = torch.cuda.max_memory_allocated() - before
    kept = 2 * (x.numel() + w.numel()) * (1 if fp8_recipe is None else 3)
    assert peak - kept <= 2 * rows * vocabulary / 8


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"temperature": 0.0}, ValueError, "temperature must be positive and finite, got 0.0"),
        ({"temperature": math.nan}, ValueError, "temperature must be positive and finite"),
        ({"temperature": "1"}, TypeError, "temperature must be a float, got str"),
        ({"temperature": True}, TypeError, "temperature must be a float, got bool"),
        ({"return_entropy": 1}, TypeError, "return_entropy must be a bool, got int"),
        ({"chunk_rows": 0}, ValueError, "chunk_rows must be a positive integer"),
        ({"weight_grad_dtype": torch.float16}, TypeError, "weight_grad_dtype must be"),
        ({"fp8_recipe": recipe.DelayedScaling()}, ValueError, "fp8_recipe must be.*without state"),
        ({"bias": torch.zeros(3)}, ValueError, r"bias must be \[131\], got \[3\]"),
        ({"weight": torch.zeros(131, 5)}, ValueError, r"weight must be \[vocabulary, 48\]"),
        ({"weight": 3}, TypeError, "weight must be a torch.Tensor, got int"),
        ({"targets": None}, TypeError, "targets must be a torch.Tensor, got NoneType"),
        ({"targets": torch.zeros(3).long()}, ValueError, "targets must have the shape of hidden"),
        ({"targets": torch.full((37,), 131)}, ValueError, r"targets\[0\] must be in \[0, 131\)"),
        ({"targets": torch.zeros(37)}, TypeError, "targets must have dtype int64"),
        ({"hidden": torch.zeros(37, 48).double()}, TypeError, "hidden must be float32"),
        ({"tp_group": 3}, TypeError, "tp_group must be a torch.distributed.ProcessGroup"),
        ({"first_index": 3}, ValueError, "vocab_size must be given with first_index"),
    ],
)
def test_rejects(changes, error, text):
    x, w, _, targets, _ = make("cpu", torch.float32)
    arguments = {"hidden": x, "weight": w, "targets": targets} | changes
    with pytest.raises(error, match=f"^linear_log_probs: .*{text}"):
        linear_log_probs(**arguments)
