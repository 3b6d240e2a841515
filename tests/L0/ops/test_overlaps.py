"""A written argument that shares memory with another one is refused, unless it may be that one."""

import pytest
import torch
from public_functions import NAMES, find, make_case

from apex_te.ops import (
    activation,
    bias_gelu,
    byte_transpose,
    cast_transpose,
    cross_entropy,
    grouped_quantize,
    multi_tensor,
    rope,
    scaled_softmax,
    wgrad_gemm,
)

E4M3 = torch.float8_e4m3fn
# Functions that fold into amax; not those that run several ops, one after the other, on a CPU.
FOLDING = [
    name
    for name in NAMES
    if "amax" in make_case(name).written and not name.startswith("dense_gemm_")
]


def inputs_of(case):
    """Float32 tensors of a case that are only read, by name."""
    return {
        key: value
        for key, value in case.args.items()
        if isinstance(value, torch.Tensor)
        and value.dtype is torch.float32
        and key not in case.written
    }


@pytest.mark.parametrize("name", FOLDING)
def test_an_amax_within_an_input_is_refused(name):
    case = make_case(name)
    for key, value in inputs_of(case).items():
        amax = value.view(-1)[-1:]
        before = value.clone()
        with pytest.raises(ValueError, match=r"share no memory with .*, got 4 bytes in common"):
            find(name)(**{**case.args, "amax": amax})
        assert torch.equal(value, before), f"{name}: {key} was written"


def test_neighbours_in_one_buffer_are_taken():
    """Slots of one history, and scales of one buffer, share storage but no memory."""
    x, buffer = torch.randn(32, 48), torch.ones(6)
    scale, scale_inv, amax, other = (buffer[i : i + 1] for i in (2, 3, 4, 5))
    cast_transpose.cast_transpose(x, scale, E4M3, amax=amax, scale_inv=scale_inv)
    assert buffer.tolist() == [1, 1, 1, 1, x.abs().max().item(), 1]
    whole = torch.cat([x, x])
    activation.activation_fwd(whole[:32], "silu", out=whole[32:])
    assert torch.equal(whole[32:], activation.activation_fwd(x, "silu"))
    cast_transpose.cast_transpose(x[:0], scale, E4M3, amax=other, scale_inv=scale_inv)


def test_rows_that_lie_between_each_other_are_taken():
    """Heads of a fused projection are written by ``rope`` between those that it leaves alone."""
    qkv = torch.randn(4, 1, 3, 2, 8)
    freqs = torch.rand(4, 8)
    expected = rope.rope(qkv[:, :, 0].clone(), freqs)
    rest = qkv[:, :, 1:].clone()
    rope.rope(qkv[:, :, 0], freqs, inplace=True)
    assert torch.equal(qkv[:, :, 0], expected)
    assert torch.equal(qkv[:, :, 1:], rest)


IN_PLACE = {
    "activation_fwd": lambda x, dy, out: activation.activation_fwd(x, "gelu", out=out),
    "activation_bwd": lambda dy, x, out: activation.activation_bwd(dy, x, "gelu", out=out),
    "bias_gelu_fwd": lambda x, dy, out: bias_gelu.bias_gelu_fwd(x, None, out=out),
    "bias_gelu_bwd": lambda dy, x, out: bias_gelu.bias_gelu_bwd(dy, x, None, out=out).input,
    "scaled_softmax_fwd": lambda x, dy, out: scaled_softmax.scaled_softmax_fwd(x, 0.5, out=out),
    "scaled_softmax_bwd": lambda dy, y, out: scaled_softmax.scaled_softmax_bwd(dy, y, 0.5, out=out),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place_is_whole_or_refused(name):
    function = IN_PLACE[name]
    storage = torch.randn(2 * 24 * 24 + 24)
    first, other = storage[: 24 * 24 * 2].view(2, 24, 24), torch.rand(2, 24, 24)
    expected = function(first.clone(), other, torch.full_like(first, float("nan")))
    shifted = storage[24:].view(2, 24, 24)
    with pytest.raises(ValueError, match=rf"{name}: \w+ must be \w+ itself or share no memory"):
        function(first, other, shifted)
    assert torch.equal(function(first, other, first), expected)


def test_what_cannot_run_in_place_is_refused():
    square = torch.zeros(16, 16, dtype=torch.uint8)
    with pytest.raises(ValueError, match="byte_transpose: out must share no memory with fp8_data"):
        byte_transpose.byte_transpose(square, out=square)
    dy, y = torch.rand(1, 4, 8), torch.rand(1, 4, 8)
    with pytest.raises(ValueError, match="scaled_softmax_bwd: dx must share no memory with y"):
        scaled_softmax.scaled_softmax_bwd(dy, y, 0.5, out=y)
    logits, target = torch.randn(8, 16), torch.zeros(8, dtype=torch.int64)
    with pytest.raises(ValueError, match="stats must share no memory with logits, got 64 bytes"):
        cross_entropy.cross_entropy_fwd(logits, target, stats=logits[:1].view(8, 2))


def test_outputs_share_no_memory_with_each_other():
    x, both = torch.randn(16, 16), torch.zeros(16, 16, dtype=E4M3)
    with pytest.raises(ValueError, match=r"columnwise must share no memory with rowwise"):
        cast_transpose.cast_transpose(x, torch.ones(1), E4M3, out_rowwise=both, out_columnwise=both)


def test_a_flag_within_a_list_is_refused():
    tensors = [torch.randn(3, 4) for _ in range(3)]
    flag = tensors[1].view(-1)[2:3]
    with pytest.raises(ValueError, match=r"found_inf must share no memory with inputs\[1\]"):
        multi_tensor.scale(tensors, [torch.empty(3, 4) for _ in tensors], 2.0, found_inf=flag)
    doubled = [2 * t for t in tensors]
    multi_tensor.scale(tensors, tensors, 2.0, found_inf=torch.zeros(1))
    assert all(map(torch.equal, tensors, doubled))


def test_groups_measure_into_a_scale_only_where_nothing_is_cast():
    x, groups = torch.randn(32, 16), grouped_quantize.groups_of(torch.tensor([16, 16]), 32)
    amax = torch.zeros(2)
    grouped_quantize.quantize_groups(
        x, groups, amax, E4M3, rowwise=False, columnwise=False, amax=amax
    )
    assert amax.tolist() == [half.abs().max().item() for half in x.split(16)]
    with pytest.raises(ValueError, match="amax must share no memory with scale, as data is cast"):
        grouped_quantize.quantize_groups(x, groups, amax, E4M3, amax=amax)
    with pytest.raises(ValueError, match="amax must share no memory with scale, as data is cast"):
        grouped_quantize.quantize_matrices([x, x], amax, E4M3, amax=amax)


def test_a_weight_gradient_within_an_operand_is_refused():
    dy, rows = torch.randn(8, 8), torch.randn(12, 8)
    with pytest.raises(ValueError, match="wgrad_gemm: out must share no memory with dy, got 256"):
        wgrad_gemm.wgrad_gemm(dy, rows[:8], dy)
    with pytest.raises(ValueError, match="wgrad_gemm: out must share no memory with x, got 128"):
        wgrad_gemm.wgrad_gemm(dy, rows[:8], rows[4:], accumulate=True)
    expected = torch.mm(dy.t(), rows[:8].clone())[:, :4] + 1
    total = torch.cat([rows[:8], torch.ones(8, 8)])
    wgrad_gemm.wgrad_gemm(dy, total[:8, :4].contiguous(), total[8:12].view(8, 4), accumulate=True)
    assert torch.allclose(total[8:12].view(8, 4), expected)
