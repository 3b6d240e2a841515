"""swiglu against its formula in float64 and PyTorch in the same dtype."""

import pytest
import torch
from checks import (
    DTYPES,
    FP8,
    assert_adjacent_codes,
    assert_as_good_as_torch,
    assert_same_bits,
    in_pairs,
    needs_cuda,
    needs_memory,
)
from swiglu_cases import ACTIVATIONS, SHAPES, formula, make, to
from torch._dynamo.testing import CompileCounterWithBackend

from apex_te.ops import swiglu as op


def check(device, shape, dtype, activation, **form):
    # The largest of a few errors is an accident: small shapes are drawn often.
    draws = min(128, max(-(-4096 // (shape[0] * shape[1])), -(-1024 // shape[1])))
    collected = []
    for _ in range(draws):
        inputs, grad_output = make(shape, dtype, **form)
        on_device, grad_on_device = to(device, inputs), grad_output.to(device)
        out = op.swiglu_fwd(*on_device, activation=activation)
        grads = op.swiglu_bwd(grad_on_device, *on_device, activation=activation, with_dbias=True)
        without = op.swiglu_bwd(grad_on_device, *on_device, activation=activation)
        grad = grads.input if grads.up is None else torch.cat([grads.input, grads.up], dim=1)
        assert without.dbias is None
        assert_same_bits(without[:2], grads[:2])
        collected.append(
            (
                (out, grad, grads.dbias),
                formula(inputs, grad_output, torch.float64, activation),
                formula(inputs, grad_output, dtype, activation),
            )
        )
    for part in range(3):
        actual, exact, same = (
            torch.cat([results[i][part] for results in collected]) for i in range(3)
        )
        assert_as_good_as_torch(actual, exact, same)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fwd_and_bwd(device, poison, shape, dtype):
    check(device, shape, dtype, "silu")


@in_pairs(activation=ACTIVATIONS, dtype=DTYPES, two=[False, True], shape=[(70, 136), (66, 77)])
def test_every_activation_with_bias(device, poison, shape, two, dtype, activation):
    check(device, shape, dtype, activation, two=two, bias=True)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_reference_bwd_is_the_gradient(activation):
    inputs, grad_output = make((50, 60), torch.float64, two=True, bias=True)
    grad = formula(inputs, grad_output, torch.float64, activation)[1]
    torch.testing.assert_close(op.reference_bwd(grad_output, *inputs, activation=activation), grad)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("cols", [16, 13])
def test_not_finite_inputs_show(device, activation, cols):
    for bad in (float("nan"), float("inf"), -float("inf")):
        for part in (0, 1, 2):  # gate, up, grad_output
            tensors = [torch.rand(4, cols).bfloat16() + 0.5 for _ in range(3)]
            tensors[part][1, 3] = bad
            gate, up, grad_output = tensors
            exact = formula((gate, up, None, None), grad_output, torch.float64, activation)
            same = formula((gate, up, None, None), grad_output, torch.bfloat16, activation)
            # PyTorch's relu passes the gradient on where the gate is NaN; here NaN stays NaN.
            exact[1][:, :cols][torch.isnan(gate)] = float("nan")
            gate, up, grad_output = to(device, tensors)
            out = op.swiglu_fwd(gate, up, activation=activation)
            grads = op.swiglu_bwd(grad_output, gate, up, activation=activation)
            assert_as_good_as_torch(out, exact[0], same[0])
            assert_as_good_as_torch(torch.cat(grads[:2], 1), exact[1], same[1])


def test_autograd_with_leading_dims(device):
    x = torch.randn(2, 3, 5, 48, device=device, requires_grad=True)
    bias = torch.randn(48, device=device, requires_grad=True)
    gate, up = (t.detach().requires_grad_() for t in x.chunk(2, dim=-1))
    gate_bias, up_bias = (t.detach().requires_grad_() for t in bias.chunk(2))
    grad_output = torch.randn(2, 3, 5, 24, device=device)
    one = op.swiglu(x, bias=bias, activation="gelu")
    two = op.swiglu(gate, up, gate_bias, up_bias, activation="gelu")
    assert one.shape == grad_output.shape
    assert_same_bits(one, two)
    one.backward(grad_output)
    two.backward(grad_output)
    assert_same_bits(x.grad, torch.cat([gate.grad, up.grad], dim=-1))
    assert_same_bits(bias.grad, torch.cat([gate_bias.grad, up_bias.grad]))
    flat = formula(
        (x.detach().cpu().view(30, 48), None, bias.detach().cpu(), None),
        grad_output.cpu().view(30, 24), torch.float64, "gelu",
    )  # fmt: skip
    torch.testing.assert_close(x.grad.cpu().view(30, 48), flat[1].float())
    torch.testing.assert_close(bias.grad.cpu(), flat[2].float())


def test_autograd_frozen_bias_and_one_dimension(device):
    x = torch.randn(16, device=device, requires_grad=True)
    bias = torch.randn(16, device=device)
    op.swiglu(x, bias=bias).sum().backward()
    assert bias.grad is None
    expected = torch.autograd.grad(op.reference(x, bias=bias).sum(), x)[0]
    torch.testing.assert_close(x.grad, expected)


def test_library_rejects_what_python_cannot_make():
    x, out = torch.zeros(2, 8), torch.zeros(2, 4)
    with pytest.raises(ValueError, match="activation must be 0, 1, 3, 5 or 6, got 2"):
        op._fwd(x, None, None, None, out, 2)
    with pytest.raises(ValueError, match=r"input must have contiguous rows, got strides \[1, 2\]"):
        op._fwd(torch.zeros(8, 2).t(), None, None, None, out, 5)
    with pytest.raises(ValueError, match="workspace must be given with dbias, got None"):
        op._bwd(out, x, None, None, None, torch.zeros(2, 8), None, torch.zeros(8), None, 5)


def test_compile_with_dynamic_shapes():
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(op.swiglu, fullgraph=True, dynamic=True, backend=counter)
    for rows, cols in ((8, 32), (24, 32), (200, 46)):
        ours, theirs = (torch.ones(rows, cols, requires_grad=True) for _ in range(2))
        assert_same_bits(compiled(ours), op.swiglu(theirs))
        compiled(ours).sum().backward()
        op.swiglu(theirs).sum().backward()
        assert_same_bits(ours.grad, theirs.grad)
    assert counter.frame_count == 1


@needs_cuda
def test_more_than_2_to_31_elements():
    needs_memory(64)
    rows, cols = 131088, 16400  # 2.150e9 elements of output
    x = torch.empty(rows, 2 * cols, dtype=torch.bfloat16, device="cuda").normal_()
    grad_output = torch.empty(rows, cols, dtype=torch.bfloat16, device="cuda").normal_()
    one = torch.ones(1, device="cuda")
    out, grads = op.swiglu_fwd(x), op.swiglu_bwd(grad_output, x)
    made = op.swiglu_fwd_fp8(x, None, one, FP8[0])
    grads_made = op.swiglu_bwd_fp8(grad_output, x, None, one, FP8[1], with_dbias=True)
    for begin in (0, rows // 2, rows - 8):
        part = slice(begin, begin + 8)
        inputs = (x[part].cpu(), None, None, None)
        exact = formula(inputs, grad_output[part].cpu(), torch.float64, "silu")
        same = formula(inputs, grad_output[part].cpu(), torch.bfloat16, "silu")
        assert_as_good_as_torch(out[part], exact[0], same[0])
        assert_as_good_as_torch(grads.input[part], exact[1], same[1])
        for result, values, fp8 in (
            (made, exact[0], FP8[0]), (grads_made.output, exact[1], FP8[1]),
        ):  # fmt: skip
            assert_adjacent_codes(
                result.rowwise[part], op.reference_fp8(values, torch.ones(1), fp8).rowwise
            )
            assert_same_bits(result.columnwise[:, part].t(), result.rowwise[part])
    last = grads.input[:, -1].float().sum()
    torch.testing.assert_close(grads_made.dbias[-1].float(), last, rtol=0.05, atol=1.0)


@needs_cuda
def test_more_vectors_than_one_launch_takes():
    needs_memory(40)
    rows, cols = (1 << 21) + 3, 8192  # 1.72e10 elements of output, 2^31 vectors
    row = torch.randn(1, 2 * cols, device="cuda").bfloat16()
    out = op.swiglu_fwd(row.expand(rows, 2 * cols))
    expected = op.swiglu_fwd(row)[0]
    for part in out.split(1 << 17):
        assert torch.equal(part, expected.expand_as(part))
