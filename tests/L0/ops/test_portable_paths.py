"""Each op on a CPU gives the same bits with every instruction set that it has kernels for."""

import pytest
from checks import assert_portable_gives_same_bits

# Statements after `import torch`; `run()` yields the results, of values after torch's seed 0.
RUNS = {
    "activation": """
from apex_te.ops.activation import *
from apex_te.ops import activation as op
def run():
    bits = torch.randint(-2**31, 2**31, (133, 300), dtype=torch.int64).to(torch.int32)
    floats = bits.view(torch.float32)
    floats[torch.isnan(floats)] = 1.0  # the sign of a NaN means nothing
    for x in (floats, bits.to(torch.int16).view(torch.float16),
              torch.randn(133, 300) * 4, torch.randn(133, 300).bfloat16()):
        for kind in op.KINDS:
            grad = torch.randn(x.shape).to(x.dtype)
            yield op.activation_fwd(x, kind)
            yield op.activation_bwd(grad, x, kind)
            args = (kind, torch.tensor([3.0]), torch.float8_e5m2)
            yield op.activation_fwd_fp8(x, *args).columnwise
            yield op.activation_bwd_fp8(grad, x, *args).rowwise
""",
    "bias_dropout_add": """
from apex_te.ops.bias_dropout_add import bias_dropout_add
def run():
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        x, residual = (torch.randn(300, 1001).to(dtype) for _ in range(2))
        leaves = [x, torch.randn(1001), residual]
        leaves = [t.requires_grad_() for t in leaves]
        out = bias_dropout_add(*leaves, 0.3)
        yield out
        yield from torch.autograd.grad(out, leaves, x)
""",
    "bias_gelu": """
from apex_te.ops.bias_gelu import *
from apex_te.ops import bias_gelu as op
def run():
    bits = torch.randint(-2**31, 2**31, (133, 300), dtype=torch.int64).to(torch.int32)
    floats = bits.view(torch.float32)
    floats[torch.isnan(floats)] = 1.0  # the sign of a NaN means nothing
    for x in (floats, bits.to(torch.int16).view(torch.float16),
              torch.randn(133, 300) * 4, torch.randn(133, 300).bfloat16()):
        for form in ('tanh', 'erf'):
            grad, bias = (torch.randn(s).to(x.dtype) for s in (x.shape, (300,)))
            yield op.bias_gelu_fwd(x, bias, form=form)
            yield from op.bias_gelu_bwd(grad, x, bias, form=form, with_dbias=True)
            args = (bias, torch.tensor([3.0]), torch.float8_e4m3fn)
            yield op.bias_gelu_fwd_fp8(x, *args, form=form).columnwise
            grads = op.bias_gelu_bwd_fp8(grad, x, *args, form=form, with_dbias=True)
            yield from (grads.output.rowwise, grads.dbias)
""",
    "block_quantize": """
from apex_te.ops.block_quantize import *
def run():
    for x in (torch.randn(300, 300), torch.randn(300, 300).half()):
        for fp8 in (torch.float8_e4m3fn, torch.float8_e5m2):
            for b in (1, 128):
                q = block_quantize(x, fp8, block_rows=b, pow2=False)
                yield from q
                yield block_dequantize(*q[:2], block_rows=b)
""",
    "cast_transpose": """
from apex_te.ops.cast_transpose import cast_transpose
def run():
    bits = torch.randint(-2**31, 2**31, (300, 300), dtype=torch.int64).to(torch.int32)
    for x in (bits.view(torch.float32), bits.to(torch.int16).view(torch.float16)):
        for f in (torch.float8_e4m3fn, torch.float8_e5m2):
            o = cast_transpose(x, torch.tensor([1.1]), f)
            yield from (o.rowwise, o.columnwise)
    x = torch.randn(300, 300)  # a sum's NaN has one of several bit patterns
    yield cast_transpose(x, torch.tensor([1.1]), f, with_dbias=True).dbias
""",
    "cross_entropy": """
from apex_te.ops.cross_entropy import cross_entropy_bwd, cross_entropy_fwd
def run():
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        x = (torch.randn(9, 1003) * 4).to(dtype)
        grad = torch.empty_like(x)
        stats, t = torch.empty(9, 2), torch.arange(9)
        loss = cross_entropy_fwd(x, t, grad=grad, stats=stats, label_smoothing=0.1)
        yield from (loss, grad, stats)
        yield cross_entropy_bwd(x, t, stats, torch.randn(9), torch.empty_like(x))
""",
    "current_scale": """
from apex_te.ops.current_scale import current_scale
def run():
    bits = torch.randint(-2**31, 2**31, (300, 300), dtype=torch.int64).to(torch.int32)
    for x in (bits.view(torch.float32), bits.to(torch.int16).view(torch.float16)):
        for f in (torch.float8_e4m3fn, torch.float8_e5m2):
            yield from current_scale(x, f, amax=torch.ones(1))[:2]
            yield from current_scale(torch.where(torch.isfinite(x), x, 0), f)
""",
    "grouped_quantize": """
from apex_te.ops import grouped_quantize as op
def run():
    x = torch.randn(300, 300)
    groups = op.groups_of(torch.tensor([100, 0, 150]), 300)
    for t in (x, x.half(), x.bfloat16()):
        o = op.quantize_groups(t, groups, torch.rand(3), torch.float8_e4m3fn)
        yield from (o.rowwise[:250], o.columnwise[:, :288].contiguous())
        yield op.column_sums(t, groups)
""",
    "hif8": """
from apex_te.ops import hif8
def run():
    bits = torch.randint(-2**31, 2**31, (300, 300), dtype=torch.int64).to(torch.int32)
    for x in (bits.view(torch.float32), bits.to(torch.int16).view(torch.float16)):
        yield hif8.encode(x)
        yield from hif8.quantize_current(torch.where(torch.isfinite(x), x, 0))
        yield hif8.decode(bits.view(torch.uint8), x.dtype, scale_inv=torch.ones(1) / 3)
""",
    "moe_permute": """
from apex_te import permutation as moe
def run():
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        x = torch.randn(50, 1111).to(dtype).requires_grad_()
        probs = torch.rand(50, 8).requires_grad_()
        mask = torch.rand(50, 8) < 0.4
        out, out_probs, row_id_map = moe.moe_permute_with_probs(x, probs, mask)
        y = moe.moe_unpermute(out, row_id_map, probs)
        y.backward(torch.randn(50, 1111).to(dtype))
        yield from (out.detach(), out_probs.detach(), y.detach(), x.grad, probs.grad)
""",
    "moe_router": """
from apex_te.ops import moe_router as op
def run():
    for experts in (7, 128, 300):
        x = 3 * torch.randn(40, experts)
        for score, pre in (("softmax", 0), ("softmax", 1), ("sigmoid", 0), ("sqrtsoftplus", 0)):
            made = op.moe_router_fwd(
                x, 5, score, use_pre_softmax=bool(pre), outputs=("probs", "scores", "lse"))
            yield from (made.index, made.probs, made.scores, made.lse)
            yield op.moe_router_bwd(
                x, made.index, score, use_pre_softmax=bool(pre), grad_probs=made.probs.cos(),
                grad_scores=made.scores.cos(), grad_lse=made.lse)
""",
    "multi_tensor": """
from apex_te.ops import multi_tensor as op
def run():
    sizes = [5, 20000, 0, 1030]
    types = [torch.float32, torch.float16, torch.bfloat16, torch.float16]
    xs = [torch.randn(n).to(t) for n, t in zip(sizes, types)]
    yield op.amax(xs)
    yield from op.l2norm(xs, per_tensor=True)
    for t in types[:3]:
        outs = [torch.empty_like(x, dtype=t) for x in xs]
        op.scale(xs, outs, 1.1)
        op.axpby(xs, outs, outs, 1.1, -0.3)
        yield from outs
    scales = [torch.tensor([7.3])] * 4
    for f in (torch.float8_e4m3fn, torch.float8_e5m2):
        yield from op.quantize(xs, scales, f)
""",
    "multi_tensor_optim": """
from apex_te.ops import multi_tensor_optim as op
def run():
    for t in (torch.float32, torch.float16, torch.bfloat16):
        sizes = [5, 20000, 1030]
        p, g = ([torch.randn(n).to(t) for n in sizes] for _ in range(2))
        m, v = ([torch.rand(n) for n in sizes] for _ in range(2))
        op.adam(p, g, m, v, step=2, lr=0.1, weight_decay=0.1)
        op.sgd(p, g, m, lr=0.1, momentum=0.9, nesterov=True)
        op.lamb(p, g, m, v, step=2, lr=0.1, weight_decay=0.1, max_grad_norm=1.0)
        yield from (*p, *m, *v)
""",
    "mx_quantize": """
from apex_te.ops.mx_quantize import *
bits = torch.randint(-2**31, 2**31, (300, 300), dtype=torch.int64).to(torch.int32)
def run():
    for x in (torch.randn(300, 300).half(), bits.view(torch.float32)):
        for fp8 in (torch.float8_e4m3fn, torch.float8_e5m2):
            q = mx_quantize(x, fp8)
            yield from q
            yield mx_dequantize(*q[:2])
""",
    "padded_block_casts": """
from apex_te.ops.block_quantize import block_quantize
from apex_te.ops.hif8 import quantize_current
from apex_te.ops.mx_quantize import mx_quantize
def run():
    for rows in (1, 17, 250):
        x = torch.randn(rows, 136).bfloat16()
        for block_rows in (1, 128):
            options = {"block_rows": block_rows, "pad_columnwise": True}
            yield from block_quantize(x, torch.float8_e4m3fn, **options)
        yield from mx_quantize(x, pad_columnwise=True)
        yield quantize_current(x, pad_columnwise=True).columnwise
""",
    "rope": """
from apex_te.ops.rope import rope
def run():
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        x = torch.randn(50, 2, 3, 200).to(dtype)
        for scale in (1.0, 1e4, 1e8):
            freqs = torch.randn(50, 75) * scale
            yield rope(x, freqs, rotary_dim=150)
            yield rope(x, freqs, rotary_dim=150, interleaved=True)
""",
    "scaled_softmax": """
from apex_te.ops.scaled_softmax import scaled_softmax_bwd, scaled_softmax_fwd
def run():
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for cols in (3, 37, 1029, 3000):
            x = (torch.randn(2, 2, 9, cols) * 4).to(dtype)
            x[0, 0, 0, 0], x[1, 1, 1, 2] = float('nan'), float('inf')
            mask = torch.rand(2, 1, 9, cols) < 0.3
            y = scaled_softmax_fwd(x, -0.7, mask)
            yield y
            yield scaled_softmax_bwd(torch.randn(x.shape).to(dtype), y, 0.3)
            y = scaled_softmax_fwd(x, 1.1, causal='bottom_right')
            yield y
""",
    "swiglu": """
from apex_te.ops import swiglu as op
def run():
    one = torch.ones(1)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        x, dy = (6 * torch.randn(67, 300)).to(dtype), torch.randn(67, 150).to(dtype)
        for act in op.ACTIVATIONS:
            yield op.swiglu_fwd(x, activation=act)
            g = op.swiglu_bwd(dy, x, activation=act, with_dbias=True)
            yield from (g.input, g.dbias)
            f8 = torch.float8_e5m2
            yield op.swiglu_bwd_fp8(dy, x, None, one, f8, activation=act).output[1]
""",
}


@pytest.mark.parametrize("name", RUNS)
def test_every_instruction_set_gives_the_same_bits(name):
    assert_portable_gives_same_bits(f"import torch\n{RUNS[name]}")
