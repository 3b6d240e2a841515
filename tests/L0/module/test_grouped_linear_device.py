"""GroupedLinear with m_splits as a tensor, against a list of the same splits."""

import contextlib
import copy

import pytest
import torch
from grouped_splits import (
    E4M3,
    LAYOUTS,
    RECIPES,
    assert_close,
    assert_same_state,
    gradients,
    padded,
    pair,
    read_on_device,
    step,
    tensor_of,
)
from torch.utils.checkpoint import checkpoint

from apex_te import fp8_autocast
from apex_te.recipe import DelayedScaling
from tests.checks import assert_same_bits

pytestmark = pytest.mark.filterwarnings("ignore:apex_te. FP8 matrix products of groups")


@pytest.fixture(autouse=True)
def _splits_stay_on_device(request, monkeypatch):
    if "device" in request.fixturenames:
        read_on_device(monkeypatch)


@pytest.mark.parametrize("int64", [False, True])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", [None, *RECIPES])
@pytest.mark.parametrize("shape", [(40, [5, 0, 16, 3]), (24, [5, 0, 16, 3])])
def test_on_the_cpu_it_is_a_list(name, bias, int64, shape):
    """Bit for bit; what is behind the last group is not read."""
    rows, splits = shape
    module, other = pair("cpu", torch.float32, bias=bias)
    total = sum(splits)
    for _ in range(2):
        x, dy = torch.randn(total, 48), torch.randn(total, 32)
        inputs = [padded(x, rows, float("nan")).requires_grad_(), x.clone().requires_grad_()]
        kind = torch.int64 if int64 else torch.int32
        with fp8_autocast(name is not None, RECIPES.get(name)):
            out = module(inputs[0], tensor_of(splits, "cpu", kind))
            expected = other(inputs[1], splits)
        out.backward(padded(dy, rows, float("nan")))
        expected.backward(dy)
        assert torch.equal(out, padded(expected, rows, 0))
        assert torch.equal(inputs[0].grad, padded(inputs[1].grad, rows, 0))
        for key, grad in gradients(other).items():
            assert torch.equal(gradients(module)[key], grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("rows", "splits"), LAYOUTS, ids=str)
def test_in_high_precision(device, rows, splits, dtype):
    module, other = pair(device, dtype)
    x = torch.randn(sum(splits), 48).to(device, dtype)
    dy = torch.randn(sum(splits), 32).to(device, dtype)
    step(module, other, x, dy, splits, rows, contextlib.nullcontext)
    for name, grad in gradients(other).items():
        assert_close(gradients(module)[name], grad)
    assert not module.fp8_state.allocated


@pytest.mark.parametrize("sizes", [(20, 12), (24, 8)])
def test_in_high_precision_any_sizes(device, sizes):
    module, other = pair(device, sizes=sizes)
    x = torch.randn(24, sizes[0]).to(device, torch.bfloat16)
    dy = torch.randn(24, sizes[1]).to(device, torch.bfloat16)
    step(module, other, x, dy, [5, 0, 16, 3], 30, contextlib.nullcontext)
    for name, grad in gradients(other).items():
        assert_close(gradients(module)[name], grad)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize(("rows", "splits"), LAYOUTS, ids=str)
def test_in_fp8(device, name, rows, splits):
    module, other = pair(device)
    for _ in range(3):
        x = torch.randn(sum(splits), 48).to(device, torch.bfloat16) * 3
        dy = torch.randn(sum(splits), 32).to(device, torch.bfloat16) * 1e-3
        for each in (module, other):
            each.zero_grad()
        step(module, other, x, dy, splits, rows, lambda: fp8_autocast(True, RECIPES[name]))
        for key, grad in gradients(other).items():
            assert_close(gradients(module)[key], grad)
        for i, count in enumerate(splits):
            if not count:
                assert not getattr(module, f"weight{i}").grad.any()
    if RECIPES[name].keeps_state:
        assert_same_state(module, other)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_in_fp8_of_other_dtypes(device, dtype):
    module, other = pair(device, dtype)
    x, dy = torch.randn(24, 48).to(device, dtype), torch.randn(24, 32).to(device, dtype)
    for _ in range(2):
        for each in (module, other):
            each.zero_grad()
        step(module, other, x, dy, [5, 0, 16, 3], 30, lambda: fp8_autocast(True, RECIPES["first"]))
        for key, grad in gradients(other).items():
            assert_close(gradients(module)[key], grad)
    assert_same_state(module, other)


def test_first_step_waits_for_rows(device):
    """A group has its first scales when it first has rows, in whichever step; others keep 1."""
    module, other = pair(device)
    for splits in ([16, 0, 8, 0], [0, 0, 16, 8], [8, 8, 0, 8]):
        x = torch.randn(24, 48).to(device, torch.bfloat16) * 50
        dy = torch.randn(24, 32).to(device, torch.bfloat16) * 1e-4
        region = lambda: fp8_autocast(True, RECIPES["first"])  # noqa: E731
        step(module, other, x, dy, splits, 40, region)
        assert_same_state(module, other)
        used = [scale != 1 for scale in module.fp8_state.scale_fwd[::3].tolist()]
        assert used[: len(splits)] == [
            scale != 1 for scale in other.fp8_state.scale_fwd[::3].tolist()
        ]
    assert all(used)


def test_a_list_may_take_turns_with_a_tensor(device):
    module, other = pair(device)
    for turn, splits in enumerate(([8, 8, 4, 4], [16, 0, 4, 4], [8, 8, 0, 8])):
        x = torch.randn(24, 48).to(device, torch.bfloat16)
        given = splits if turn == 1 else tensor_of(splits, device)
        with fp8_autocast(True, RECIPES["first"]):
            out, expected = module(x, given), other(x, splits)
        out.sum().backward()
        expected.sum().backward()
        assert_close(out, expected)
        assert_same_state(module, other)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", [None, "delayed", "first", "tensorwise", "blockwise"])
def test_recompute_is_bitwise_equal(device, name, reentrant):
    module, other = pair(device)
    x, splits = torch.randn(40, 48).to(device, torch.bfloat16), tensor_of([5, 0, 16, 3], device)
    for _ in range(2):
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        with fp8_autocast(name is not None, RECIPES.get(name)):
            out = module(inputs[0], splits)
            again = checkpoint(other, inputs[1], splits, use_reentrant=reentrant)
        out.sum().backward()
        again.sum().backward()
        assert_same_bits(inputs[0].grad, inputs[1].grad)
    assert_same_bits(list(gradients(module).values()), list(gradients(other).values()))
    if name in ("delayed", "first"):
        assert_same_state(module, other)


@pytest.mark.parametrize("name", [None, "delayed", "tensorwise", "plain wgrad", "blockwise"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_weight_gradient(device, name, dtype):
    module, other = pair(device, fuse_wgrad_accumulation=True)
    for each in (module, other):
        for i in range(4):
            weight = getattr(each, f"weight{i}")
            weight.main_grad = torch.full(weight.shape, 2.0, dtype=dtype, device=device)
    module.weight2.grad_added_to_main_grad = False
    x = torch.randn(24, 48).to(device, torch.bfloat16)
    dy = torch.randn(24, 32).to(device, torch.bfloat16)
    for first in (True, False):
        region = lambda: fp8_autocast(name is not None, RECIPES.get(name))  # noqa: E731
        step(module, other, x, dy, [5, 0, 16, 3], 30, region, first)
        for i in range(4):
            weights = getattr(module, f"weight{i}"), getattr(other, f"weight{i}")
            assert_close(weights[0].main_grad, weights[1].main_grad)
    assert not module.weight1.main_grad.any()
    assert module.weight0.grad is None
    assert module.weight2.grad_added_to_main_grad
    assert_close(module.bias2.grad, other.bias2.grad)


@pytest.mark.parametrize("name", [None, "tensorwise", "blockwise", "plain wgrad"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_fused_weight_gradient_is_not_rounded_to_16_bits(device, name, dtype):
    """A sum of 257 products of 16 is no bfloat16, one of 257 times 512 no float16."""
    if device.type == "cuda" and (dtype is torch.bfloat16) and name in (None, "plain wgrad"):
        pytest.skip("torch's grouped product of bfloat16 has no float32 result")
    module, _ = pair(device, dtype, fuse_wgrad_accumulation=True)
    for i in range(4):
        weight = getattr(module, f"weight{i}")
        weight.main_grad = torch.zeros(weight.shape, device=device)
    factor = 512.0 if dtype is torch.float16 else 16.0
    for first in (True, False):
        with fp8_autocast(name is not None, RECIPES.get(name)):
            x = torch.full((304, 48), 1.0, dtype=dtype, device=device)
            out = module(x, tensor_of([257, 0, 31, 16], device), is_first_microbatch=first)
        out.backward(torch.full_like(out, factor))
    for i, rows in enumerate([257, 0, 31, 16]):
        main_grad = getattr(module, f"weight{i}").main_grad
        expected = torch.full_like(main_grad, 2 * rows * factor)
        torch.testing.assert_close(main_grad, expected, rtol=1e-5, atol=0.0)


def test_missing_main_grad_is_named(device):
    module, _ = pair(device, fuse_wgrad_accumulation=True)
    x = torch.randn(24, 48).to(device, torch.bfloat16)
    with pytest.raises(ValueError, match="main_grad must be a preallocated tensor"):
        module(x, tensor_of([5, 0, 16, 3], device)).sum().backward()


@pytest.mark.parametrize("name", ["delayed", "tensorwise", "first", "blockwise"])
def test_microbatches_share_fp8_weights(device, name):
    module, other = pair(device)
    for first, splits in ((True, [16, 0, 8, 0]), (False, [0, 16, 4, 4]), (False, [6, 6, 6, 6])):
        x = torch.randn(24, 48).to(device, torch.bfloat16)
        dy = torch.randn(24, 32).to(device, torch.bfloat16)
        region = lambda: fp8_autocast(True, RECIPES[name])  # noqa: E731
        step(module, other, x, dy, splits, 40, region, first)
    with torch.no_grad():
        for value in (*module.parameters(), *other.parameters()):
            value.add_(1)
    step(module, other, x, dy, splits, 40, region, False)


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", [None, "delayed", "tensorwise", "blockwise"])
def test_evaluation(device, name, guard):
    module, _ = pair(device)
    x, splits = torch.randn(30, 48).to(device, torch.bfloat16), tensor_of([5, 0, 16, 3], device)
    region = lambda: fp8_autocast(name is not None, RECIPES.get(name))  # noqa: E731
    for _ in range(2):  # the same amaxes twice: the scales that an evaluation reads are these
        with region():
            expected = module(x, splits)
    before = copy.deepcopy(module.fp8_state)
    with guard(), region():
        assert torch.equal(module(x, splits), expected)
    if name == "delayed":
        assert torch.equal(before.amax_history_fwd, module.fp8_state.amax_history_fwd)


def test_calibrating_stages_what_a_list_does(device):
    module, other = pair(device)
    x = torch.randn(24, 48).to(device, torch.bfloat16)
    dy = torch.randn(24, 32).to(device, torch.bfloat16)
    scheme = DelayedScaling(interval=9, **E4M3)
    region = lambda: fp8_autocast(False, scheme, calibrating=True)  # noqa: E731
    step(module, other, x, dy, [5, 0, 16, 3], 30, region)
    assert_same_state(module, other)
    assert module.fp8_state.amax_history_fwd[0].count_nonzero() == 6
    assert module.fp8_state.amax_history_bwd[0].count_nonzero() == 3


@pytest.mark.parametrize("name", [None, "delayed", "blockwise"])
def test_frozen_parts(device, name):
    module, other = pair(device)
    for each in (module, other):
        each.weight0.requires_grad_(False)
        each.bias2.requires_grad_(False)
    x = torch.randn(24, 48).to(device, torch.bfloat16)
    dy = torch.randn(24, 32).to(device, torch.bfloat16)
    region = lambda: fp8_autocast(name is not None, RECIPES.get(name))  # noqa: E731
    step(module, other, x, dy, [5, 0, 16, 3], 30, region)
    for key, grad in gradients(other).items():
        assert (gradients(module)[key] is None) == (grad is None)
        if grad is not None:
            assert_close(gradients(module)[key], grad)
    for value in module.parameters():
        value.requires_grad_(False)
    inp = x.clone().requires_grad_()
    with region():
        module(inp, tensor_of([5, 0, 16, 3], device)).backward(dy)
    assert inp.grad.isfinite().all()


@pytest.mark.parametrize("name", [None, "tensorwise", "blockwise"])
def test_leading_dimensions_return_bias_and_autocast(device, name):
    module, other = pair(device, torch.float32, return_bias=True)
    x = torch.randn(4, 6, 48).to(device)
    splits = [5, 0, 16, 3]
    with (
        torch.autocast(device.type, torch.bfloat16),
        fp8_autocast(name is not None, RECIPES.get(name)),
    ):
        out, biases = module(x, tensor_of(splits, device))
        expected, _ = other(x, splits)
    assert out.shape == (4, 6, 32)
    assert out.dtype == torch.bfloat16
    assert_close(out, expected)
    torch.relu_(out).sum().backward()
    assert module.weight0.grad.dtype == torch.float32
    assert_same_bits(biases, [getattr(module, f"bias{i}").bfloat16() for i in range(4)])
