"""swiglu against its formula in float64; in FP8 code by code; in blocks the bits of two ops."""

import itertools

import pytest
import torch
from checks import (
    DTYPES,
    FP8,
    assert_adjacent_codes,
    assert_as_good_as_torch,
    assert_close_amax,
    assert_same_bits,
    codes,
    in_pairs,
    needs_cuda,
    needs_memory,
)
from swiglu_cases import ACTIVATIONS, SHAPES, formula, make, to
from torch._dynamo.testing import CompileCounterWithBackend

from apex_te.ops import swiglu
from apex_te.ops import swiglu as op
from apex_te.ops.block_quantize import block_quantize, scale_shape
from apex_te.ops.swiglu_block import swiglu_bwd_block, swiglu_fwd_block
from apex_te.runtime.op_options import BLOCK_SCALES


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
            if isinstance(activation, op.ClampedSwiglu):  # PyTorch's clamp has 0 there
                doubles = [t.double() for t in (grad_output, gate, up)]
                exact = exact[0], op.reference_bwd(*doubles, activation=activation)
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


NO_CLAMP = 0.0, 0.0, 0.0


@pytest.mark.parametrize(
    ("field", "error", "message"),
    [
        ({"limit": -1.0}, ValueError, "activation.limit must be at least 0, got -1.0"),
        ({"limit": float("nan")}, ValueError, "activation.limit must be at least 0, got nan"),
        ({"alpha": "1"}, TypeError, "activation.alpha must be a float, got str"),
        ({"offset": None}, TypeError, "activation.offset must be a float, got NoneType"),
    ],
)
def test_clamp_is_checked(field, error, message):
    with pytest.raises(error, match="swiglu_fwd: " + message):
        op.swiglu(torch.zeros(2, 8), activation=op.ClampedSwiglu(**field))


def test_library_rejects_what_python_cannot_make():
    x, out = torch.zeros(2, 8), torch.zeros(2, 4)
    with pytest.raises(ValueError, match="activation must be 0, 1 or 3 to 7, got 2"):
        op._fwd(x, None, None, None, out, 2, *NO_CLAMP)
    with pytest.raises(ValueError, match=r"input must have contiguous rows, got strides \[1, 2\]"):
        op._fwd(torch.zeros(8, 2).t(), None, None, None, out, 5, *NO_CLAMP)
    with pytest.raises(ValueError, match="workspace must be given with dbias, got None"):
        op._bwd(
            out, x, None, None, None, torch.zeros(2, 8), None, torch.zeros(8), None, 5, *NO_CLAMP
        )


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


def check_fp8(device, shape, dtype, fp8, activation, **form):
    inputs, grad_output = make(shape, dtype, spread=1, **form)
    dbias, same = (formula(inputs, grad_output, t, activation)[2] for t in (torch.float64, dtype))
    # The sums with biases are float32's, which a limit may lie beside.
    sums = op._gate_and_up(*[t if t is None else t.float() for t in inputs])
    exact = [t.double() for t in sums]
    out = op.reference(*exact, activation=activation)
    grad = op.reference_bwd(grad_output.double(), *exact, activation=activation)
    on_device, scale = to(device, inputs), torch.tensor([3.7])
    bias = {"bias": on_device[2], "up_bias": on_device[3], "activation": activation}

    def compare(made, values, amax):
        found = torch.zeros(1)
        expected = op.reference_fp8(values, scale, fp8, amax=found)
        assert_adjacent_codes(made.rowwise, expected.rowwise)
        assert torch.equal(codes(made.columnwise), codes(made.rowwise).t())
        assert made.scale_inv.item() == (1 / scale).item()
        assert_close_amax(amax, found)

    amax = torch.zeros(1, device=device)
    fwd = op.swiglu_fwd_fp8(*on_device[:2], scale.to(device), fp8, amax=amax, **bias)
    compare(fwd, out, amax)
    amax.zero_()
    bwd = op.swiglu_bwd_fp8(
        grad_output.to(device), *on_device[:2], scale.to(device), fp8, amax=amax, with_dbias=True,
        **bias,
    )  # fmt: skip
    compare(bwd.output, grad, amax)
    assert_as_good_as_torch(bwd.dbias, dbias, same)
    alone = op.swiglu_bwd_fp8(
        grad_output.to(device), *on_device[:2], scale.to(device), fp8, columnwise=False, **bias
    )
    assert alone.dbias is None
    assert alone.output.columnwise is None
    assert_same_bits(alone.output.rowwise, bwd.output.rowwise)
    alone = op.swiglu_fwd_fp8(*on_device[:2], scale.to(device), fp8, rowwise=False, **bias)
    assert alone.rowwise is None
    assert_same_bits(alone.columnwise, fwd.columnwise)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES, (1072, 528)], ids=str)
def test_fp8(device, poison, shape, dtype):
    check_fp8(device, shape, dtype, FP8[0], "silu")


@pytest.mark.cover(1)
@in_pairs(activation=ACTIVATIONS, dtype=DTYPES, fp8=FP8)
def test_fp8_every_activation_with_bias(device, poison, fp8, dtype, activation):
    two = activation in ("silu", "relu")
    rows = 1037 if device.type == "cuda" else 133  # three tiles of a CPU
    check_fp8(device, (rows, 528), dtype, fp8, activation, two=two, bias=True)


@pytest.mark.parametrize("position", [(0, 0), (63, 127), (64, 128), (127, 255), (200, 303)])
@pytest.mark.parametrize("value", [1e4, float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_amax_finds_planted_value(device, position, value, dtype):
    gate, up = torch.randn(201, 304).to(dtype), torch.randn(201, 304).to(dtype)
    gate[position] = up[position] = 1.0
    up[position] = value
    grad_output = torch.ones_like(up)
    gate, up, grad_output = to(device, (gate, up, grad_output))
    one = torch.ones(1, device=device)
    for transposed in (False, True):
        amax = torch.full((1,), 2.0, device=device)
        op.swiglu_fwd_fp8(gate, up, one, FP8[0], columnwise=transposed, amax=amax)
        largest = op.swiglu_fwd(gate.float(), up.float())[position].abs().item()
        grad_amax = torch.full((1,), 2.0, device=device)
        op.swiglu_bwd_fp8(grad_output, gate, up, one, FP8[0], columnwise=transposed, amax=grad_amax)
        if value != value:
            assert torch.isnan(amax).all()
            assert torch.isnan(grad_amax).all()
        else:
            assert_close_amax(amax, torch.tensor([largest]))
            dgate = op.swiglu_bwd(grad_output.float(), gate.float(), up.float()).input[position]
            assert_close_amax(grad_amax, dgate.abs())


def test_repeatable_and_alike_on_devices(device):
    inputs, grad_output = make((1000, 264), torch.bfloat16, bias=True)
    on_device, grad = to(device, inputs), grad_output.to(device)

    def run(grad, inputs):
        scale = torch.ones(1, device=grad.device)
        x, _, bias, _ = inputs
        made = op.swiglu_bwd_fp8(grad, x, None, scale, FP8[1], bias=bias, with_dbias=True)
        plain = op.swiglu_bwd(grad, x, None, bias, with_dbias=True)
        return made.output.rowwise, made.output.columnwise, made.dbias, plain.input, plain.dbias

    first = run(grad, on_device)
    assert_same_bits(run(grad, on_device), first)
    on_cpu = run(grad_output, inputs)
    assert_adjacent_codes(first[0], on_cpu[0])
    torch.testing.assert_close(first[2].cpu(), on_cpu[2])


@needs_cuda
def test_more_row_tiles_than_a_grid_has_rows():
    rows, cols = 64 * 65535 + 80, 8
    x = torch.randn(rows, 2 * cols, device="cuda").bfloat16()
    grad_output = torch.randn(rows, cols, device="cuda").bfloat16()
    one = torch.ones(1, device="cuda")
    fwd = op.swiglu_fwd_fp8(x, None, one, FP8[0])
    bwd = op.swiglu_bwd_fp8(grad_output, x, None, one, FP8[1], with_dbias=True)
    for begin in (0, rows - 160):
        part = slice(begin, begin + 160)
        expected = op.swiglu_fwd_fp8(x[part], None, one, FP8[0])
        expected_bwd = op.swiglu_bwd_fp8(grad_output[part], x[part], None, one, FP8[1])
        for made, wanted in ((fwd, expected), (bwd.output, expected_bwd.output)):
            assert_same_bits(made.rowwise[part], wanted.rowwise)
            assert_same_bits(made.columnwise[:, part].contiguous(), wanted.columnwise)
    dbias = op.swiglu_bwd(grad_output.float(), x.float(), with_dbias=True).dbias
    torch.testing.assert_close(bwd.dbias.float(), dbias, rtol=0.01, atol=1.0)


E4M3, E5M2 = FP8
NARROW = (torch.bfloat16, torch.float16)
# Whole tiles; a short last tile of rows, of columns; rows and columns that no vector fits.
BLOCK_SHAPES = [(256, 256), (130, 384), (128, 200), (77, 131), (3, 128), (1, 1), (0, 128), (4, 0)]


def assert_equal_casts(made, expected):
    for name, value in expected._asdict().items():
        got = getattr(made, name)
        assert (got is None) == (value is None), name
        if value is not None:
            assert got.shape == value.shape, name
            assert_same_bits(got, value)


def check_blocks(device, gate, up, bias, up_bias, grad, fp8, activation, **options):
    """Compares both directions; gate and up side by side where up is None."""
    inputs = [t if t is None else t.to(device) for t in (gate, up, bias, up_bias)]
    grad = grad.to(device)
    biases = {"bias": inputs[2], "up_bias": inputs[3], "activation": activation}
    amaxes = [torch.zeros(1, device=device) for _ in range(4)]
    values = swiglu.swiglu_fwd(*inputs, activation=activation)
    made = swiglu_fwd_block(*inputs[:2], fp8, **biases, amax=amaxes[0], **options)
    assert_equal_casts(made, block_quantize(values, fp8, amax=amaxes[1], **options))
    assert_same_bits(amaxes[0], amaxes[1])
    grads = swiglu.swiglu_bwd(grad, *inputs, activation=activation)
    values = grads.input if grads.up is None else torch.cat([grads.input, grads.up], 1)
    made = swiglu_bwd_block(grad, *inputs[:2], fp8, **biases, amax=amaxes[2], **options)
    assert_equal_casts(made, block_quantize(values, fp8, amax=amaxes[3], **options))
    assert_same_bits(amaxes[2], amaxes[3])
    return made


def matrix(rows, cols, dtype, spread=3):
    """Values whose blocks differ widely in their amax."""
    return (torch.randn(rows, cols) * torch.exp(spread * torch.randn(rows, 1))).to(dtype)


@pytest.mark.parametrize("dtype", [*NARROW, torch.float32], ids=str)
@pytest.mark.parametrize("shape", BLOCK_SHAPES, ids=str)
def test_bits(device, poison, shape, dtype):
    rows, cols = shape
    joined, grad = matrix(rows, 2 * cols, dtype), matrix(rows, cols, dtype)
    for fp8, scales, padded in itertools.product(FP8, BLOCK_SCALES, (True, False)):
        options = {"scales": scales, "pad_columnwise": padded}
        options["eps"] = 1e-3 if scales == "fp32" else 0.0
        check_blocks(device, joined, None, None, None, grad, fp8, "silu", **options)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_activations_and_biases(device, poison, dtype, activation):
    """Rows past the last are zeros although a bias makes something of zeros."""
    rows, cols = 141, 256
    gate, up, grad = (matrix(rows, cols, dtype) for _ in range(3))
    bias, up_bias = matrix(1, cols, dtype)[0], matrix(1, cols, dtype)[0]
    made = check_blocks(
        device, gate, up, bias, up_bias, grad, E5M2, activation, pad_columnwise=True
    )
    padding = made.columnwise.view(torch.uint8)[:, rows:]
    assert padding.shape[1] == 3
    assert not padding.any()
    stored = made.rowwise.untyped_storage()
    behind = torch.tensor([], dtype=torch.uint8, device=device).set_(stored)[rows * 2 * cols :]
    assert behind.numel() == 3 * 2 * cols
    assert not behind.any()
    joined = torch.cat([gate, up], 1)
    both = torch.cat([bias, up_bias])
    check_blocks(device, joined, None, both, None, grad, E4M3, activation)


@pytest.mark.parametrize("copies", [(True, False), (False, True)], ids=str)
def test_one_copy(device, poison, copies):
    joined, grad = matrix(136, 512, torch.bfloat16), matrix(136, 256, torch.bfloat16)
    options = {"rowwise": copies[0], "columnwise": copies[1]}
    check_blocks(device, joined, None, None, None, grad, E4M3, "silu", **options)


def test_views_at_any_alignment(device, poison):
    """Rows with gaps, and pointers and distances that no vector access fits."""
    for offset, gap in ((8, 16), (1, 3), (0, 1)):
        base = matrix(140, 2 * 256 + gap + offset, torch.bfloat16).to(device)
        gate, up = base[:, offset : offset + 256], base[:, offset + 256 : offset + 512]
        grad = matrix(140, 256, torch.bfloat16)
        bias = matrix(1, 513, torch.bfloat16)[0].to(device)
        check_blocks(device, gate, up, bias[1:257], bias[257:], grad, E4M3, "gelu")


def test_nonfinite_values(device):
    joined, grad = matrix(128, 512, torch.bfloat16), matrix(128, 256, torch.bfloat16)
    joined[3, 5], joined[40, 300], joined[77, 256 + 130] = torch.nan, torch.inf, -torch.inf
    grad[100, 7] = torch.inf
    check_blocks(device, joined, None, None, None, grad, E4M3, "relu", scales="server")
    check_blocks(device, joined, None, None, None, grad, E5M2, "silu")


def test_more_dimensions(device):
    joined = matrix(12, 512, torch.bfloat16).view(3, 4, 512).to(device)
    made = swiglu_fwd_block(joined, None, E4M3)
    assert made.rowwise.shape == (12, 256)
    assert made.rowwise_scale_inv.shape == scale_shape(12, 256, 1)
    assert_equal_casts(made, block_quantize(swiglu.swiglu_fwd(joined).view(12, 256), E4M3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["swiglu_fwd_block", "swiglu_bwd_block"])
def test_refusals_name_the_op(device, name, dtype):
    """Errors name the op that was called, also for float32, for which two other ops run."""
    other = torch.bfloat16 if dtype is torch.float32 else torch.float32
    good = {"input": torch.zeros(4, 256, dtype=dtype, device=device), "up": None}
    op = swiglu_fwd_block
    if name == "swiglu_bwd_block":
        op, good["grad_output"] = swiglu_bwd_block, good["input"][:, :128]
    op(**good, fp8_dtype=E4M3)
    wrong = {
        "bias": (TypeError, torch.zeros(256, dtype=other, device=device)),
        "amax": (TypeError, torch.zeros(1, dtype=torch.float64, device=device)),
        "eps": (ValueError, -1.0),
        "input": (TypeError, good["input"].double()),
    }
    for argument, (kind, value) in wrong.items():
        with pytest.raises(kind, match=f"^{name}: {argument} must "):
            op(**{**good, argument: value}, fp8_dtype=E4M3)
    with pytest.raises(ValueError, match=f"^{name}: rowwise, columnwise or amax must be asked for"):
        op(**good, fp8_dtype=E4M3, rowwise=False, columnwise=False)
    with pytest.raises(TypeError, match=f"{name}: bias must be a torch.Tensor, got int"):
        op(**good, fp8_dtype=E4M3, bias=1)
