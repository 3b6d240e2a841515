"""GroupedLinear with m_splits as a tensor: no wait, CUDA graphs, splits that are none, refusals."""

import copy

import pytest
import torch
from grouped_splits import (
    E4M3,
    RECIPES,
    assert_same_state,
    gradients,
    pair,
    read_on_device,
    tensor_of,
)

from apex_te import fp8_autocast
from apex_te.fp8.statistics import fp8_statistics
from apex_te.module.grouped.linear import GroupedLinear
from apex_te.recipe import CurrentScaling, DelayedScaling, Format, MXFP8Scaling
from tests.checks import assert_same_bits, needs_cuda

pytestmark = pytest.mark.filterwarnings("ignore:apex_te. FP8 matrix products of groups")


@pytest.fixture(autouse=True)
def _splits_stay_on_device(request, monkeypatch):
    if "device" in request.fixturenames:
        read_on_device(monkeypatch)


@pytest.mark.parametrize("name", [None, "delayed", "tensorwise", "hybrid"])
@pytest.mark.parametrize("splits", [[5, -1, 16, 3], [16, 16, 16, 16]])
def test_bad_splits_give_nan(device, name, splits):
    module, _ = pair(device)
    x = torch.randn(32, 48).to(device, torch.bfloat16).requires_grad_()
    with fp8_autocast(name is not None, RECIPES.get(name)):
        out = module(x, tensor_of(splits, device))
    assert out.isnan().all()
    out.backward(torch.ones_like(out))
    assert x.grad.isnan().all()
    assert all(grad.isnan().all() for grad in gradients(module).values())


def test_bad_splits_raise_on_the_cpu():
    module, _ = pair("cpu")
    for splits in ([5, -1, 16, 3], [16, 16, 16, 16]):
        with pytest.raises(ValueError, match="m_splits must be counts of at most the 32 rows"):
            module(torch.randn(32, 48).bfloat16(), tensor_of(splits, "cpu"))


def test_no_rows(device):
    module, _ = pair(device)
    x = torch.empty(0, 48, device=device, dtype=torch.bfloat16, requires_grad=True)
    with fp8_autocast(True, RECIPES["delayed"]):
        out = module(x, tensor_of([0, 0, 0, 0], device))
    out.sum().backward()
    assert x.grad.shape == (0, 48)
    assert all(not grad.any() for grad in gradients(module).values())


@pytest.mark.parametrize(
    ("splits", "error", "message"),
    [
        (torch.zeros(4), TypeError, "m_splits must be int32 or int64, got torch.float32"),
        (torch.zeros(3, dtype=torch.int32), ValueError, r"m_splits must have shape \[4\], got"),
        (torch.zeros(4, dtype=torch.int32, device="meta"), ValueError, "tensor on cpu like inp"),
    ],
)
def test_rejects_splits(splits, error, message):
    module, _ = pair("cpu")
    with pytest.raises(error, match=message):
        module(torch.randn(8, 48).bfloat16(), splits)


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (MXFP8Scaling(), "must be a list of ints with MXFP8Scaling"),
        (CurrentScaling(fp8_format=Format.HIF8), "must be a list of ints with CurrentScaling"),
    ],
)
def test_schemes_without_it(device, recipe, message):
    module, _ = pair(device)
    x = torch.randn(24, 48).to(device, torch.bfloat16)
    with pytest.raises(NotImplementedError, match=message), fp8_autocast(True, recipe):
        module(x, tensor_of([5, 0, 16, 3], device))


@pytest.mark.parametrize("option", ["delay_wgrad_compute", "save_original_input"])
def test_options_without_it(device, option):
    module, _ = pair(device, **{option: True})
    x = torch.randn(24, 48).to(device, torch.bfloat16)
    message = f"must be a list of ints with {option}=True"
    with pytest.raises(NotImplementedError, match=message), fp8_autocast(True, RECIPES["delayed"]):
        module(x, tensor_of([5, 0, 16, 3], device))


def test_sizes_without_it(device):
    x, splits = torch.randn(24, 48).to(device, torch.bfloat16), tensor_of([5, 0, 16, 3], device)
    module, _ = pair(device, sizes=(48, 24))
    with (
        pytest.raises(NotImplementedError, match="out_features must be multiples of 16 for FP8"),
        fp8_autocast(True, RECIPES["tensorwise"]),
    ):
        module(x, splits)


def test_copies_do_not_share_quantizers(device):
    module, _ = pair(device)
    x, splits = torch.randn(24, 48).to(device, torch.bfloat16), tensor_of([5, 0, 16, 3], device)
    scheme = DelayedScaling(first_step="current", interval=9, **E4M3)
    with fp8_autocast(True, scheme):
        module(x, splits).sum().backward()
    other = copy.deepcopy(module)
    before = module.fp8_state.amax_history_fwd.clone()
    with fp8_autocast(True, scheme):
        other(x * 100, splits)
    assert torch.equal(module.fp8_state.amax_history_fwd, before)
    assert other.fp8_state.amax_history_fwd[0, 0] > 50 * before[0, 0]


def test_one_group(device):
    module = GroupedLinear(1, 32, 16, device=device, params_dtype=torch.bfloat16)
    x = torch.randn(20, 32).to(device, torch.bfloat16)
    with fp8_autocast(True, RECIPES["delayed"]):
        out = module(x, tensor_of([17], device, torch.int64))
        expected = module(x[:17].contiguous(), [17])
    assert (out[:17].float() - expected.float()).abs().max() <= 2**-7 * expected.abs().max()
    assert not out[17:].any()


def test_statistics_change_nothing(device):
    """They do not note groups whose sizes only the device knows."""
    module, other = pair(device)
    x, splits = torch.randn(24, 48).to(device, torch.bfloat16), tensor_of([5, 0, 16, 3], device)
    with fp8_statistics(other) as stats:
        for each in (module, other):
            with fp8_autocast(True, DelayedScaling(first_step="current", interval=9, **E4M3)):
                each(x, splits).sum().backward()
    assert stats.to_dict() == {}
    assert_same_bits(list(gradients(module).values()), list(gradients(other).values()))
    assert_same_state(module, other)


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("name", [None, *RECIPES])
def test_nothing_waits_for_the_device(name):
    module, _ = pair("cuda", fuse_wgrad_accumulation=name == "delayed")
    for weight in module.parameters():
        weight.main_grad = torch.zeros_like(weight)
    x = torch.randn(96, 48, device="cuda").bfloat16().requires_grad_()
    splits = tensor_of([16, 0, 48, 16], "cuda")

    def run():
        with fp8_autocast(name is not None, RECIPES.get(name)):
            out = module(x, splits)
        out.backward(torch.ones_like(out))

    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert x.grad.isfinite().all()


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("name", [None, *RECIPES])
def test_capture_takes_any_splits(name):
    """One graph, replayed with other splits than those it was captured with."""
    module, _ = pair("cuda")
    region = lambda: fp8_autocast(name is not None, RECIPES.get(name))  # noqa: E731
    x = torch.randn(96, 48, device="cuda").bfloat16().requires_grad_()
    dy = torch.randn(96, 32, device="cuda").bfloat16()
    splits = tensor_of([24, 24, 24, 24], "cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            with region():
                module(x, splits).backward(dy)
    torch.cuda.current_stream().wait_stream(side)
    x.grad = None
    module.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with region():
            out = module(x, splits)
        out.backward(dy)
    for counts in ([16, 0, 48, 16], [0, 0, 0, 90]):
        splits.copy_(tensor_of(counts, "cuda"))
        graph.replay()
        total = sum(counts)
        exact = torch.cat(
            [
                part.float() @ getattr(module, f"weight{i}").float().t()
                + getattr(module, f"bias{i}").float()
                for i, part in enumerate(x.detach()[:total].split(counts))
            ]
        )
        assert not out[total:].any()
        assert not x.grad[total:].any()
        error = (out[:total].float() - exact).norm() / exact.norm()
        assert error < (0.01 if name is None else 0.06)
        for i, (rows, grads) in enumerate(
            zip(x.detach()[:total].split(counts), dy[:total].split(counts), strict=True)
        ):
            grad = getattr(module, f"weight{i}").grad.float()
            wanted = grads.float().t() @ rows.float()
            assert (grad - wanted).norm() <= (0.01 if name is None else 0.12) * wanted.norm() + 1e-6
