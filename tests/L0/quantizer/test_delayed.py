"""DelayedScalingQuantizer and the update with the user's functions."""

import math

import pytest
import torch

from apex_te.fp8.delayed.state import nonfinite_count, update_scales
from apex_te.fp8.scheme.delayed import DelayedScalingQuantizer
from apex_te.ops.amax_scale_update import amax_scale_update
from apex_te.recipe import DelayedScaling

E4M3 = torch.float8_e4m3fn
INF, NAN = math.inf, math.nan


def test_quantize_copies_amax_and_own_scale_inv():
    x = torch.tensor([[1.0, -3.0, 0.5], [2.0, 0.25, -0.125]])
    scale, amax = torch.tensor([2.0]), torch.tensor([2.5])
    quantizer = DelayedScalingQuantizer(E4M3, scale, amax)
    quantized, dbias = quantizer.quantize(x, with_dbias=True)
    assert torch.equal(quantized.rowwise.float(), x * 2)
    assert torch.equal(quantized.columnwise.float(), (x * 2).t())
    assert torch.equal(dbias, x.sum(0))
    assert amax.item() == 3.0
    scale.fill_(64.0)  # a later update does not reach data already quantized
    assert quantized.rowwise_scale_inv.tolist() == [0.5]
    assert torch.equal(quantizer.dequantize(quantized), x)


def test_only_the_copies_asked_for():
    quantizer = DelayedScalingQuantizer(torch.float8_e5m2, torch.ones(1))
    x = torch.randn(5, 7)
    row, none = quantizer.quantize(x, True, False)
    column, _ = quantizer.quantize(x, False, True)
    assert row.columnwise is None
    assert column.rowwise is None
    assert none is None
    assert torch.equal(row.rowwise.t().float(), column.columnwise.float())
    assert torch.equal(quantizer.dequantize(row), quantizer.dequantize(column))


def test_record_stages_without_quantizing():
    amax = torch.zeros(1)
    quantizer = DelayedScalingQuantizer(E4M3, torch.ones(1), amax)
    quantizer.record(torch.tensor([[-4.0, 1.0]]))
    quantizer.record(torch.tensor([[2.0]]))
    assert amax.item() == 4.0


LAST = [0.0, 1e-45, 1e-38, 3.0, INF, NAN]


@pytest.mark.parametrize("length", [1, 2, 5])
@pytest.mark.parametrize("algo", ["max", "most_recent"])
@pytest.mark.parametrize("pow2", [False, True])
def test_callables_follow_the_rules_of_the_kernel(length, algo, pow2):
    generator = torch.Generator().manual_seed(length)
    history = torch.rand(length, len(LAST), generator=generator) * 8
    history[0] = torch.tensor(LAST)
    scale = torch.full((len(LAST),), 7.0)
    mine = [history.clone(), scale.clone(), scale.clone()]
    theirs = [history.clone(), scale.clone(), scale.clone()]
    counts = torch.zeros(2, dtype=torch.int32)
    recipe = DelayedScaling(
        margin=1,
        amax_compute_algo=(lambda h: h.amax(0)) if algo == "max" else (lambda h: h[0]),
        scaling_factor_compute_algo="pow2" if pow2 else None,
    )
    update_scales([mine[0]], [mine[1]], [mine[2]], [448.0], recipe, counts[:1])
    amax_scale_update(
        [theirs[0]], [theirs[1]], [theirs[2]], [448.0],
        margin=1, algo=algo, pow2=pow2, nonfinite_count=counts[1:],
    )  # fmt: skip
    for a, b in zip(mine, theirs, strict=True):
        assert torch.equal(a, b)
    assert counts.tolist() == [2, 2]
    assert mine[1][0] == 7.0
    assert mine[1][4] == 7.0
    assert mine[0][0].eq(0).all()


def test_scale_callable_gets_its_arguments():
    seen = []

    def half(amax, old_scale, fp8_max, recipe):
        seen.append((amax.tolist(), old_scale.tolist(), fp8_max, recipe))
        return fp8_max / amax / 2

    recipe = DelayedScaling(scaling_factor_compute_algo=half)
    history, scale = torch.tensor([[4.0, 0.0]]), torch.tensor([3.0, 5.0])
    update_scales([history], [scale], [torch.ones(2)], [448.0], recipe, None)
    assert seen == [([4.0, 0.0], [3.0, 5.0], 448.0, recipe)]
    assert scale.tolist() == [56.0, 5.0]


@pytest.mark.parametrize(
    ("result", "error", "message"),
    [
        (1.0, TypeError, "amax_compute_algo must return a tensor, got float"),
        (torch.ones(3), ValueError, r"amax_compute_algo must return shape \[2\], got \[3\]"),
    ],
)
def test_callable_result_is_checked(result, error, message):
    recipe = DelayedScaling(amax_compute_algo=lambda history: result)
    with pytest.raises(error, match=message):
        update_scales([torch.ones(1, 2)], [torch.ones(2)], [torch.ones(2)], [448.0], recipe, None)


def test_nonfinite_counter_is_one_per_device():
    assert nonfinite_count("cpu") is nonfinite_count()
    assert nonfinite_count().dtype == torch.int32
