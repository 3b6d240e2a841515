"""Experts as one function in FP8, against the same ops one at a time."""

import copy
import weakref

import pytest
import torch
from grouped_splits import RECIPES, assert_close
from torch.utils.checkpoint import checkpoint

from apex_te import fp8_autocast
from apex_te.integrations.experts import ExpertGemm, set_weights
from apex_te.module._core import fused_casts
from apex_te.module.grouped import experts
from apex_te.module.grouped.linear import GroupedLinear
from apex_te.module.grouped.on_device import GroupsCall
from apex_te.ops.swiglu import ClampedSwiglu
from tests.checks import assert_same_bits, each_of, in_pairs

pytestmark = pytest.mark.filterwarnings("ignore:apex_te")
TOKENS, TOP_K, EXPERTS, HIDDEN, FFN = 24, 2, 5, 48, 128
NAMES = [name for name in RECIPES if name != "plain wgrad"]


ACTIVATIONS = [*fused_casts.GATED, ClampedSwiglu(limit=0.5)]


class Experts(torch.nn.Module):
    def __init__(self, device, dtype, activation="swiglu", **options):
        super().__init__()
        self.activation = activation
        options = {"bias": False, "single_parameter": True, "device": device, **options}
        self.fc1 = GroupedLinear(EXPERTS, HIDDEN, 2 * FFN, params_dtype=dtype, **options)
        self.fc2 = GroupedLinear(EXPERTS, FFN, HIDDEN, params_dtype=dtype, **options)

    def forward(self, x, indices, probs, *rest):
        layers = self.fc1, self.fc2
        return experts.run_experts(*layers, x, indices, probs, self.activation, *rest)[0]


class Ordered(Experts):
    """Calls ``run_ordered``."""

    def forward(self, rows, m_splits, *rest):
        return experts.run_ordered(self.fc1, self.fc2, rows, m_splits, "swiglu", *rest)


def dtype_on(device):
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def pair(device, kind=Experts, **options):
    torch.manual_seed(2)
    model = kind(device, dtype_on(device), **options)
    for value in model.parameters():
        torch.nn.init.normal_(value, std=0.1)
    other = copy.deepcopy(model)
    if options.get("fuse_wgrad_accumulation"):
        for value in (*model.parameters(), *other.parameters()):
            value.main_grad = torch.full(value.shape, 0.5, device=device)
    return model, other


def batch(device, unused=True):
    """Tokens, experts of which one gets none and a choice that is none, and powers of two."""
    x = torch.randn(TOKENS, HIDDEN).to(device, dtype_on(device)).requires_grad_()
    indices = torch.stack([torch.randperm(EXPERTS - unused)[:TOP_K] for _ in range(TOKENS)]).int()
    indices[3, 1] = -1
    probs = (2.0 ** torch.randint(-2, 2, (TOKENS, TOP_K))).to(device).requires_grad_()
    dy = torch.randn(TOKENS, HIDDEN).to(device, dtype_on(device))
    return x, indices.to(device), probs, dy


def run(model, monkeypatch, fused, given, name, *rest):
    x, indices, probs, dy = given
    x, probs = (t.detach().clone().requires_grad_(t.requires_grad) for t in (x, probs))
    with monkeypatch.context() as patch:
        if not fused:
            patch.setattr(experts, "_fused_calls", lambda *args, **options: None)
        calls = []
        of = experts.ExpertsFunction.apply
        patch.setattr(experts.ExpertsFunction, "apply", lambda *a: calls.append(1) or of(*a))
        with fp8_autocast(name is not None, RECIPES.get(name)):
            out = model(x, indices, probs, *rest)
        assert bool(calls) == (fused and name is not None)
    out.backward(dy)
    return out, x.grad, probs.grad


def assert_same_gradients(model, other, device):
    """Bitwise; but on a GPU the sums of FC1's bias are added in another order."""
    for (name, value), wanted in zip(model.named_parameters(), other.parameters(), strict=True):
        assert (value.grad is None) == (wanted.grad is None)
        if value.grad is None:
            continue
        if name == "fc1.bias" and device.type == "cuda":
            assert_close(value.grad, wanted.grad)
        else:
            assert_same_bits(value.grad, wanted.grad)


def assert_alike(results, device):
    (out, dx, dprobs), (expected, wanted, wanted_probs) = results
    assert_same_bits([out, dx], [expected, wanted])
    # One op adds rounded products, the other rounds at last.
    assert_close(dprobs, wanted_probs)


@each_of(name=NAMES, unused=[True, False], activation=ACTIVATIONS, bias=[False, True])
def test_same_bits_as_one_op_at_a_time(device, monkeypatch, name, unused, activation, bias):
    model, other = pair(device, activation=activation, bias=bias)
    for _ in range(3):
        given = batch(device, unused)
        results = [run(each, monkeypatch, each is model, given, name) for each in (model, other)]
        assert_alike(results, device)
    assert_same_gradients(model, other, device)


@in_pairs(
    name=["delayed", "first", "tensorwise", "blockwise"], microbatches=[True, False],
    delayed=[True, False], fused_wgrad=[True, False], bias=[True, False],
)  # fmt: skip
def test_options(device, monkeypatch, name, microbatches, delayed, fused_wgrad, bias):
    model, other = pair(
        device, fuse_wgrad_accumulation=fused_wgrad, delay_wgrad_compute=delayed, bias=bias
    )
    for first in (True, False, True):
        given = batch(device)
        rest = (first,) if microbatches else ()
        results = [
            run(each, monkeypatch, each is model, given, name, *rest) for each in (model, other)
        ]
        assert_alike(results, device)
    for each in (model, other):
        each.fc1.backward_dw()
        each.fc2.backward_dw()
    if fused_wgrad:
        assert_same_bits(
            [value.main_grad for value in model.parameters()],
            [value.main_grad for value in other.parameters()],
        )
    assert_same_gradients(model, other, device)


@pytest.mark.parametrize("name", ["delayed", "first", "tensorwise", "blockwise"])
@pytest.mark.parametrize(
    "frozen",
    [
        "x",
        "probs",
        "fc1",
        "fc2",
        "x probs fc1",
        "x probs",
        "x probs fc1 bias",
        "fc1.bias",
        "x bias",
    ],
)
def test_frozen_parts(device, monkeypatch, name, frozen):
    model, other = pair(device, bias="bias" in frozen)
    learns_bias = frozen == "x probs fc1 bias"  # FC1's alone, of what comes before the gate
    for each in (model, other):
        for part in ("fc1", "fc2"):
            getattr(each, part).weight.requires_grad_(part not in frozen)
        if "bias" in frozen and not learns_bias:
            each.fc1.bias.requires_grad_(False)
    x, indices, probs, dy = batch(device)
    x.requires_grad_("x" not in frozen)
    probs.requires_grad_("probs" not in frozen)
    given = x, indices, probs, dy
    results = [run(each, monkeypatch, each is model, given, name) for each in (model, other)]
    for value, wanted in zip(*results, strict=True):
        assert (value is None) == (wanted is None)
        if value is not None:
            assert_close(value, wanted)
    assert_same_gradients(model, other, device)


@pytest.mark.parametrize("name", ["delayed", "first", "tensorwise", "blockwise"])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_recompute(device, name, reentrant, bias):
    model, other = pair(device, bias=bias)
    for _ in range(2):
        x, indices, probs, dy = batch(device)
        inputs = [(x.detach().clone().requires_grad_(), probs) for _ in range(2)]
        with fp8_autocast(True, RECIPES[name]):
            out = model(inputs[0][0], indices, inputs[0][1])
            again = checkpoint(other, inputs[1][0], indices, inputs[1][1], use_reentrant=reentrant)
        out.backward(dy)
        again.backward(dy)
        assert_same_bits(inputs[0][0].grad, inputs[1][0].grad)
    assert_same_bits(
        [value.grad for value in model.parameters()],
        [value.grad for value in other.parameters()],
    )


@pytest.mark.parametrize("name", ["tensorwise", "blockwise"])
def test_recompute_that_enters_its_region(device, monkeypatch, name):
    """Fused as its forward was, whose results with any probs have other bits than unfused ones."""
    model, _ = pair(device)
    x, indices, _, dy = batch(device)
    probs = torch.rand(TOKENS, TOP_K).to(device)
    calls = []
    of = experts.ExpertsFunction.forward
    monkeypatch.setattr(experts.ExpertsFunction, "forward", lambda *a: calls.append(1) or of(*a))

    def run(x):
        with fp8_autocast(True, RECIPES[name]):
            return model(x, indices, probs)

    checkpoint(run, x, use_reentrant=True).backward(dy)
    assert len(calls) == 2


@pytest.mark.parametrize("name", ["delayed", "tensorwise"])
@pytest.mark.parametrize("part", ["fc1", "fc2"])
@pytest.mark.parametrize("bias", [True, False])
def test_hooks_see_their_layer(device, name, part, bias):
    """Hooks of one layer, as those by which FSDP2 gathers its weights, run."""
    model, other = pair(device, bias=bias)
    x, indices, probs, dy = batch(device)
    seen = []
    getattr(model, part).register_forward_pre_hook(lambda *args: seen.append(args))
    results = []
    for each in (model, other):
        inp = x.detach().clone().requires_grad_()
        with fp8_autocast(True, RECIPES[name]):
            out = each(inp, indices, probs)
        out.backward(dy)
        results.append((out, inp.grad))
    assert len(seen) == 1
    if bias and part == "fc2":  # what it casts is not multiplied by the probs
        for value, wanted in zip(*results, strict=True):
            assert (value - wanted).norm() < 0.1 * wanted.norm()
    else:
        assert_same_bits(*results)


@pytest.mark.parametrize(
    ("name", "fused"), [(None, False), ("tensorwise", False), ("tensorwise", True)]
)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ["swiglu", "clamped_swiglu"])
def test_against_plain_torch(device, monkeypatch, name, bias, activation, fused):
    """Any probs; in float64, expert by expert."""
    model, _ = pair(device, bias=bias, activation=activation)
    x, indices, _, dy = batch(device)
    probs = torch.rand(TOKENS, TOP_K).to(device).requires_grad_()
    found = run(model, monkeypatch, fused, (x, indices, probs, dy), name)
    found = [*found, *(value.grad for value in model.parameters())]
    double = {k: v.detach().double().requires_grad_() for k, v in model.named_parameters()}
    w1, w2 = double["fc1.weight"], double["fc2.weight"]
    b1, b2 = (double.get(f"fc{i}.bias", torch.zeros(EXPERTS, 1, device=device)) for i in (1, 2))
    inp, exact = x.detach().double().requires_grad_(), probs.detach().double().requires_grad_()
    out = torch.zeros_like(inp)
    for t in range(TOKENS):
        for j in range(TOP_K):
            e = int(indices[t, j])
            if e >= 0:
                gate, up = (w1[e] @ inp[t] + b1[e]).chunk(2)
                if activation == "swiglu":
                    hidden = torch.nn.functional.silu(gate) * up
                else:
                    gate, up = gate.clamp(max=7), up.clamp(-7, 7)
                    hidden = gate * torch.sigmoid(1.702 * gate) * (up + 1)
                result = (w2[e] @ hidden + b2[e]) * exact[t, j]
                out = out + torch.nn.functional.pad(result[None], (0, 0, t, TOKENS - 1 - t))
    out.backward(dy.double())
    references = out, inp.grad, exact.grad, *(value.grad for value in double.values())
    for value, wanted in zip(found, references, strict=True):
        error = (value.double() - wanted).norm() / wanted.norm()
        assert error < (0.02 if name is None else 0.1)


@pytest.mark.parametrize("name", ["delayed", "tensorwise", "blockwise"])
def test_evaluation_and_no_tokens(device, name):
    model, _ = pair(device)
    x, indices, probs, _ = batch(device)
    for _ in range(4):  # until no scale changes
        with fp8_autocast(True, RECIPES[name]):
            expected = model(x, indices, probs)
    with torch.no_grad(), fp8_autocast(True, RECIPES[name]):
        assert_same_bits(model(x, indices, probs), expected)
        empty = model(x[:0], indices[:0], probs[:0])
    assert empty.shape == (0, HIDDEN)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("as_list", [True, False])
@pytest.mark.parametrize("frozen", ["", "rows", "fc1", "fc2", "rows fc1"])
@pytest.mark.parametrize("options", [{}, {"fuse_wgrad_accumulation": True}])
@pytest.mark.parametrize("weighted", [None, False, True])
def test_ordered_rows(device, monkeypatch, name, as_list, frozen, options, weighted):
    """Bitwise as one op at a time, also in rows after those of the last expert.

    ``weighted``: without probs, with constant ones, or with those that get a gradient.
    """
    model, other = pair(device, Ordered, **options)
    counts = [9, 0, 16, 3, 4]
    splits = counts if as_list else torch.tensor(counts, dtype=torch.int32, device=device)
    for each in (model, other):
        for part in ("fc1", "fc2"):
            getattr(each, part).weight.requires_grad_(part not in frozen)
    calls, of = [], experts.ExpertsFunction.apply
    monkeypatch.setattr(experts.ExpertsFunction, "apply", lambda *a: calls.append(1) or of(*a))
    for step in range(3):
        rows, dy = torch.randn(2, sum(counts) + 5, HIDDEN).to(device, dtype_on(device))
        factors = (2.0 ** torch.randint(-2, 2, (len(rows),))).to(device)
        results, of_probs = [], []
        for each in (model, other):
            inp = rows.clone().requires_grad_("rows" not in frozen)
            probs = None if weighted is None else factors.clone().requires_grad_(weighted)
            with monkeypatch.context() as patch, fp8_autocast(name is not None, RECIPES.get(name)):
                if each is other:
                    patch.setattr(experts, "_fused_calls", lambda *args, **options: None)
                out = each(inp, splits, step == 0, probs)
            out.backward(dy)
            of_probs += [probs.grad] if weighted else []
            results.append([out] if inp.grad is None else [out, inp.grad])
            assert not any(value[sum(counts) :].any() for value in results[-1])
        assert_same_bits(*results)
        if weighted:
            assert_close(*of_probs)
            assert not any(value[sum(counts) :].any() for value in of_probs)
    assert len(calls) == (0 if name is None else 3)
    for value, wanted in zip(model.parameters(), other.parameters(), strict=True):
        for attribute in ("grad", "main_grad"):
            found = [getattr(each, attribute, None) for each in (value, wanted)]
            assert (found[0] is None) == (found[1] is None)
            if found[0] is not None:
                assert_same_bits(*found)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("frozen", ["", "gates", "ups", "gates ups", "fc2", "x"])
def test_gates_and_ups_in_two_parameters(device, monkeypatch, name, fused, frozen):
    """Bitwise as with both in one; the fused function does not join them."""
    joined, _ = pair(device)
    halves = [each.contiguous() for each in joined.fc1.weight.detach().chunk(2, 1)]
    dtype = dtype_on(device)
    gemms = ExpertGemm(EXPERTS, HIDDEN, 2 * FFN, dtype), ExpertGemm(EXPERTS, FFN, HIDDEN, dtype)
    joined.fc2.weight.requires_grad_("fc2" not in frozen)
    for _ in range(3):
        weights = [
            each.detach().clone().requires_grad_(key not in frozen)
            for key, each in zip(("gates", "ups", "fc2"), (*halves, joined.fc2.weight), strict=True)
        ]
        x, indices, probs, dy = batch(device)
        x.requires_grad_("x" not in frozen)

        def apart(x, indices, probs, weights=weights):
            gates, ups, last = weights
            calls, of = [], ExpertGemm._weights_and_biases
            with monkeypatch.context() as patch, set_weights(gemms, (gates, ups), (last,)):
                patch.setattr(
                    ExpertGemm, "_weights_and_biases", lambda self: calls.append(1) or of(self)
                )
                out = experts.run_experts(*gemms, x, indices, probs, "swiglu")[0]
            assert bool(calls) != fused
            return out

        given = x, indices, probs, dy
        joined.zero_grad()
        assert_alike(
            [run(each, monkeypatch, fused, given, name) for each in (apart, joined)], device
        )
        wanted = [*joined.fc1.weight.grad.chunk(2, 1), joined.fc2.weight.grad]
        for weight, grad in zip(weights, wanted, strict=True):
            assert (weight.grad is None) == (not weight.requires_grad)
            if weight.grad is not None:
                assert_same_bits(weight.grad, grad)
                assert weight.grad.is_contiguous()


@pytest.mark.parametrize("name", NAMES)
def test_weights_that_lie_transposed(device, monkeypatch, name):
    """Bitwise as with contiguous ones, whose weight gradients have the operands in other order."""
    straight, _ = pair(device)
    dtype = dtype_on(device)
    gemms = ExpertGemm(EXPERTS, HIDDEN, 2 * FFN, dtype), ExpertGemm(EXPERTS, FFN, HIDDEN, dtype)
    stored = [
        layer.weight.detach().transpose(1, 2).contiguous().requires_grad_()
        for layer in (straight.fc1, straight.fc2)
    ]
    given = batch(device)

    def transposed(x, indices, probs):
        first, second = (each.transpose(1, 2) for each in stored)
        with set_weights(gemms, (first,), (second,)):
            return experts.run_experts(*gemms, x, indices, probs, "swiglu")[0]

    models = transposed, straight
    assert_alike([run(each, monkeypatch, True, given, name) for each in models], device)
    for each, layer in zip(stored, (straight.fc1, straight.fc2), strict=True):
        assert_same_bits(each.grad.transpose(1, 2).contiguous(), layer.weight.grad)


@pytest.mark.parametrize("first", [None, True], ids=["one batch", "microbatch"])
@pytest.mark.parametrize("fused_wgrad", [False, True], ids=["grad", "main_grad"])
@pytest.mark.parametrize("name", ["delayed", "tensorwise", "blockwise"])
def test_memory(device, monkeypatch, name, fused_wgrad, first):
    """Of copies of weights there is one at a time, and none beside all new gradients."""
    model, _ = pair(device, fuse_wgrad_accumulation=fused_wgrad)
    made, peak = {}, 0

    def keep(function):
        def call(*args, **options):
            nonlocal peak
            result = function(*args, **options)
            for part in result if isinstance(result, (tuple, list)) else (result,):
                for t in part if isinstance(part, tuple) else (part,):
                    if isinstance(t, torch.Tensor) and not isinstance(t, torch.nn.Parameter):
                        made[t.data_ptr()] = weakref.ref(t), t.nbytes
            alive = sum(size for ref, size in made.values() if ref() is not None)
            peak = max(peak, alive)
            return result

        return call

    for method in ("cast_weights", "recast_weights"):
        monkeypatch.setattr(GroupsCall, method, keep(getattr(GroupsCall, method)))
    monkeypatch.setattr(experts, "_wgrads", keep(experts._wgrads))
    run(model, monkeypatch, True, batch(device), name, first)
    weights = model.fc1.weight, model.fc2.weight
    copies = [weight.numel() for weight in weights]  # of one byte
    if fused_wgrad:
        wanted = copies[0] if first is None else 2 * sum(copies)
    else:
        wanted = sum(weight.nbytes for weight in weights)
        wanted += 0 if first is None else 2 * sum(copies)
    assert wanted <= peak < 1.1 * wanted  # with scales
