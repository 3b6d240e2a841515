"""Mistakes in calls of the ops' functions, and their errors."""

import pytest
import torch

from apex_te import linear_cross_entropy, permutation
from apex_te.ops import (
    activation,
    bias_dropout_add,
    bias_gelu,
    block_quantize,
    cast_transpose,
    cross_entropy,
    current_scale,
    dense_gemm,
    emulated_gemm,
    fp8_gemm,
    grouped_gemm,
    hif8,
    layer_norm,
    moe_permute,
    multi_tensor,
    multi_tensor_optim,
    mx_quantize,
    rms_norm,
    rope,
    scaled_softmax,
    swiglu,
    swiglu_block,
    wgrad_gemm,
)

META = torch.device("meta")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
X = torch.randn(6, 16)
W = torch.ones(16)
S = torch.randn(2, 3, 8, 8)  # [b, heads, queries, keys]
Q = torch.randn(6, 2, 3, 16)  # [s, b, heads, size]
F = torch.rand(8, 16)  # [positions, size]
HEAD = torch.randn(32, 16)
TARGET = torch.randint(0, 32, (6,))
CLASSES = torch.randint(0, 16, (6,))
CODES = X.to(E4M3)
ROUTES = torch.eye(6, dtype=torch.bool)
ONE = torch.ones(1)


def rms(x=X, weight=W, eps=1e-5, **options):
    return rms_norm.rms_norm(x, weight, eps, **options)


def layer(x=X, weight=W, bias=W, eps=1e-5, **options):
    return layer_norm.layer_norm(x, weight, bias, eps, **options)


def softmax(x=S, scale=0.5, mask=None, **options):
    return scaled_softmax.scaled_softmax(x, scale, mask, **options)


def losses(logits=X, target=CLASSES, **options):
    return cross_entropy.cross_entropy(logits, target, **options)


def head(hidden=X, weight=HEAD, target=TARGET, *args, **options):
    return linear_cross_entropy(hidden, weight, target, *args, **options)


def rotated(x=Q, freqs=F, **options):
    return rope.rope(x, freqs, **options)


def cast(x=X, scale=ONE, dtype=E4M3, **options):
    return cast_transpose.cast_transpose(x, scale, dtype, **options)


def product(a=CODES, b=CODES, a_scale=ONE, b_scale=ONE, **options):
    return fp8_gemm.fp8_gemm(a, b, a_scale, b_scale, **options)


def adam(**options):
    lists = [[torch.ones(3)] for _ in range(4)]
    return multi_tensor_optim.adam(*lists, **{"step": 1, "lr": 0.1, **options})


def permuted(inp=X, routing_map=ROUTES, *args, **options):
    return permutation.moe_permute(inp, routing_map, *args, **options)


def dropped(x, bias, residual, p=0.5, **options):
    return bias_dropout_add.bias_dropout_add(x, bias, residual, p, **options)


def blocks(codes, scale_inv, dtype=E4M3):
    out = block_quantize.BlockQuantized(codes.clone(), scale_inv, None, None)
    return block_quantize.block_quantize(X, dtype, out=out)


def mx(codes, scale):
    return mx_quantize.mx_quantize(X, out=mx_quantize.MXQuantized(codes.clone(), scale, None, None))


NORMS = {
    "x as array": (
        lambda: rms(X.numpy()), TypeError, "rms_norm: x must be a torch.Tensor", "got ndarray"),
    "x as list": (
        lambda: layer([1.0]), TypeError, "layer_norm: x must be a torch.Tensor", "got list"),
    "x of int64": (
        lambda: rms(X.long()), TypeError, "rms_norm: x must have dtype float32", "got int64"),
    "weight on meta": (
        lambda: rms(weight=W.to(META)), TypeError, "rms_norm: weight must be a dense tensor",
        "on the meta device"),
    "weight of another size": (
        lambda: rms(weight=torch.ones(8)), ValueError, r"rms_norm: weight must have shape \[16\]",
        r"got \[8\]"),
    "weight of another dtype": (
        lambda: rms(weight=W.half()), TypeError, "rms_norm: weight must have dtype float32",
        "got float16"),
    "residual of another size": (
        lambda: layer(residual=X[:3]), ValueError,
        r"layer_norm: residual must have shape \[6, 16\]", r"got \[3, 16\]"),
    "negative eps": (
        lambda: rms(eps=-1e-5), ValueError, "rms_norm: eps must be zero or more", "got -1e-05"),
    "eps of NaN": (
        lambda: layer(eps=float("nan")), ValueError, "layer_norm: eps must be zero or more",
        "got nan"),
    "infinite eps": (
        lambda: rms_norm.rms_norm_fwd(X, W, float("inf")), ValueError,
        "rms_norm_fwd: eps must be zero or more and finite", "got inf"),
    "eps as text": (lambda: rms(eps="1e-5"), TypeError, "rms_norm: eps must be a float", "got str"),
    "eps of a layer norm as text": (
        lambda: layer(eps="1e-5"), TypeError, "layer_norm: eps must be a float", "got str"),
    "weight and eps exchanged": (
        lambda: rms(weight=1e-5, eps=W), TypeError, "rms_norm: weight must be a torch.Tensor",
        "got float"),
    "shape as torch's function takes it": (
        lambda: layer_norm.layer_norm(X, (16,), W, W), TypeError,
        "layer_norm: weight must be a torch.Tensor", "got tuple"),
    "misspelt eps": (
        lambda: layer_norm.layer_norm(X, W, W, epsilon=1e-5), TypeError,
        "layer_norm: unexpected argument 'epsilon'", r"did you mean 'eps'\?"),
}  # fmt: skip

SOFTMAX_AND_LOSS = {
    "scores of two dimensions": (
        lambda: softmax(X), ValueError, "scaled_softmax: x must have 4 dimensions",
        r"got \[6, 16\]"),
    "mask of floats": (
        lambda: softmax(mask=torch.zeros(2, 1, 8, 8)), TypeError,
        "scaled_softmax: mask must have dtype bool", "got float32"),
    "misspelt causal": (
        lambda: softmax(causal="upper-left"), ValueError, "scaled_softmax: causal must be None",
        r"got 'upper-left'"),
    "causal as a flag": (
        lambda: softmax(causal=True), TypeError, "scaled_softmax: causal must be a str or None",
        "got bool"),
    "no scale": (
        lambda: scaled_softmax.scaled_softmax(S), TypeError,
        "scaled_softmax: scale must be given", "got nothing"),
    "out of another dtype": (
        lambda: scaled_softmax.scaled_softmax_fwd(S, 0.5, out=S.half()), TypeError,
        "scaled_softmax_fwd: y must have dtype float32", "got float16"),
    "out of another size in backward": (
        lambda: scaled_softmax.scaled_softmax_bwd(S, S, 0.5, out=S[:1].clone()), ValueError,
        r"scaled_softmax_bwd: dx must have shape \[2, 3, 8, 8\]", r"got \[1, 3, 8, 8\]"),
    "target of floats": (
        lambda: losses(target=CLASSES.float()), TypeError,
        "cross_entropy: target must have dtype int64 or int32", "got float32"),
    "too few targets": (
        lambda: losses(target=CLASSES[:5]), ValueError, "cross_entropy: target must have the shape",
        r"\[6\], got \[5\]"),
    "target that is not a class": (
        lambda: losses(target=CLASSES + 99), ValueError,
        r"cross_entropy: target\[0\] must be in \[0, 16\)", "got"),
    "smoothing above 1": (
        lambda: losses(label_smoothing=2), ValueError,
        r"cross_entropy: label_smoothing must be in \[0, 1\]", "got 2"),
    "misspelt reduction": (
        lambda: losses(reduction="men"), ValueError, "cross_entropy: reduction must be 'mean'",
        "got 'men'"),
    "misspelt smoothing": (
        lambda: losses(smoothing=0.1), TypeError, "cross_entropy: unexpected argument 'smoothing'",
        r"did you mean 'label_smoothing'\?"),
    "hidden states as a list": (
        lambda: head(X.tolist()), TypeError, "linear_cross_entropy: hidden must be a torch.Tensor",
        "got list"),
    "module in place of its weight": (
        lambda: head(weight=torch.nn.Linear(16, 32)), TypeError,
        "linear_cross_entropy: weight must be a torch.Tensor", "got Linear"),
    "target of a head in floats": (
        lambda: head(target=TARGET.float()), TypeError,
        "linear_cross_entropy: target must have dtype int64 or int32", "got float32"),
    "target as a list": (
        lambda: head(target=TARGET.tolist()), TypeError,
        "linear_cross_entropy: target must be a torch.Tensor", "got list"),
    "weight of another size": (
        lambda: head(weight=HEAD[:, :8]), ValueError, "linear_cross_entropy: weight must be",
        r"16\], got \[32, 8\]"),
    "bias as a list": (
        lambda: head(X, HEAD, TARGET, [1.0]), TypeError,
        "linear_cross_entropy: bias must be a torch.Tensor", "got list"),
    "smoothing as text": (
        lambda: head(label_smoothing="0.1"), ValueError,
        r"linear_cross_entropy: label_smoothing must be in \[0, 1\]", "got 0.1"),
    "misspelt smoothing of a head": (
        lambda: head(label_smooth=0.1), TypeError,
        "linear_cross_entropy: unexpected argument 'label_smooth'", "mean 'label_smoothing'"),
    "no target": (
        lambda: linear_cross_entropy(X, HEAD), TypeError,
        "linear_cross_entropy: target must be given", "got nothing"),
    "index by position": (
        lambda: head(X, HEAD, TARGET, None, -100), TypeError,
        "linear_cross_entropy: at most 4 arguments may be given by position", "got 5"),
    "misspelt recipe": (
        lambda: head(fp8_recipe="tensorwse"), ValueError,
        "linear_cross_entropy: fp8_recipe must be a recipe or one of", "mean 'tensorwise'"),
    "group that is a number": (
        lambda: head(tp_group=3), TypeError,
        "linear_cross_entropy: tp_group must be a torch.distributed.ProcessGroup", "got int"),
}  # fmt: skip

POINTWISE = {
    "misspelt layout": (
        lambda: rotated(layout="bhsd"), ValueError, "rope: layout must be",
        r"got 'bhsd'"),
    "no angles": (
        lambda: rope.rope(Q), ValueError, "rope: freqs, or cos and sin, must be given",
        ""),
    "cos without sin": (
        lambda: rotated(freqs=None, cos=F), ValueError,
        "rope: freqs, or cos and sin, must be given", ""),
    "too few positions": (
        lambda: rotated(freqs=F[:3]), ValueError, "rope: start must be at least 0 and leave 6",
        "table of 3, got 0"),
    "packed tokens without their bounds": (
        lambda: rotated(Q[:, 0], layout="thd"), ValueError, "rope: cu_seqlens must be given",
        "with layout thd"),
    "more angles than elements": (
        lambda: rotated(rotary_dim=32), ValueError, "rope: rotary_dim must be even and from 0",
        "got 32"),
    "misspelt activation": (
        lambda: activation.activation(X, "gel"), ValueError, "activation: kind must be one of",
        r"got 'gel'"),
    "function as activation": (
        lambda: activation.activation(X, torch.nn.functional.gelu), TypeError,
        "activation: kind must be a str", "got builtin_function_or_method"),
    "out of another size of an activation": (
        lambda: activation.activation_fwd(X, "gelu", out=X[:3].clone()), ValueError,
        "activation_fwd: y must have x's shape", r"got \[3, 16\]"),
    "gradient of another dtype": (
        lambda: activation.activation_bwd(X.half(), X, "gelu"), TypeError,
        "activation_bwd: dy must have dtype float32", "got float16"),
    "odd number of columns": (
        lambda: swiglu.swiglu(X[:, :7]), ValueError, "swiglu: input must have an even number",
        r"got \[6, 7\]"),
    "up of another size": (
        lambda: swiglu.swiglu(X, X[:, :4]), ValueError, "swiglu: up must have the shape of input",
        r"got \[6, 4\]"),
    "activation that has no gate": (
        lambda: swiglu.swiglu(X, activation="swiglu"), ValueError,
        "swiglu: activation must be one of", r"got 'swiglu'"),
    "form of another library": (
        lambda: bias_gelu.bias_gelu(X, W, form="none"), ValueError,
        "bias_gelu: form must be 'tanh' or 'erf'", "got 'none'"),
    "probability above 1": (
        lambda: bias_dropout_add.bias_dropout_add(X, W, X, 1.5), ValueError,
        "bias_dropout_add: p must be from 0 to 1", "got 1.5"),
    "residual of another shape": (
        lambda: bias_dropout_add.bias_dropout_add(X, W, X[:3], 0.5), ValueError,
        r"bias_dropout_add: residual must have shape \[6, 16\]", r"got \[3, 16\]"),
}  # fmt: skip

QUANTIZED = {
    "format as text": (
        lambda: cast(dtype="e4m3"), TypeError, "cast_transpose: fp8_dtype must be", "got"),
    "format that is not FP8": (
        lambda: cast(dtype=torch.int8), TypeError, "cast_transpose: fp8_dtype must be", "got"),
    "scale as a number": (
        lambda: cast(scale=1.0), TypeError, "cast_transpose: scale must be a torch.Tensor",
        "got float"),
    "two scales": (
        lambda: cast(scale=torch.ones(2)), ValueError, "cast_transpose: scale must have one",
        r"got \[2\]"),
    "out of another size of a cast": (
        lambda: cast(out_rowwise=CODES[:3].clone()), ValueError,
        r"cast_transpose: rowwise must have shape \[6, 16\]", r"got \[3, 16\]"),
    "out that is not FP8": (
        lambda: cast(out_columnwise=X.t().contiguous()), TypeError,
        "cast_transpose: columnwise must have dtype float8_e4m3fn", "got float32"),
    "negative eps of a scale": (
        lambda: current_scale.current_scale(X, E4M3, eps=-1.0), ValueError,
        "current_scale: eps must be zero or more", "got -1"),
    "out of a scale": (
        lambda: current_scale.current_scale(X, E4M3, out_rowwise=CODES[:3].clone()), ValueError,
        r"current_scale_fwd: rowwise must have shape \[6, 16\]", r"got \[3, 16\]"),
    "blocks of 64 rows": (
        lambda: block_quantize.block_quantize(X, E4M3, block_rows=64), ValueError,
        "block_quantize: block_rows must be 1 or 128", "got 64"),
    "scales of other blocks": (
        lambda: block_quantize.block_dequantize(CODES, torch.ones(3)), ValueError,
        "block_dequantize: scale_inv must have shape", r"got \[3\]"),
    "misspelt rounding": (
        lambda: mx_quantize.mx_quantize(X, rounding="upp"), ValueError,
        "mx_quantize: rounding must be 'up' or 'floor'", "got 'upp'"),
    "codes of another dtype": (
        lambda: hif8.decode(X), TypeError, "hif8.decode: fp8_data must have dtype uint8",
        "got float32"),
    "out of HiF8": (
        lambda: hif8.quantize(X, ONE, out_rowwise=X.clone()), TypeError,
        "hif8_quantize: rowwise must have dtype uint8", "got float32"),
    "operands in high precision": (
        lambda: product(X), TypeError, "fp8_decode: fp8_data must have dtype float8_e4m3fn",
        "got float32"),
    "operands that do not fit": (
        lambda: product(b=CODES[:, :8]), ValueError, "fp8_gemm: a and b must be",
        r"got \[6, 16\] and \[6, 8\]"),
    "out of a product": (
        lambda: product(out=torch.zeros(6, 5)), ValueError,
        r"fp8_gemm: out must have shape \[6, 6\]", r"got \[6, 5\]"),
    "sum into nothing": (
        lambda: product(accumulate=True), ValueError, "fp8_gemm: out must be given", "got None"),
    "dtype of a product as text": (
        lambda: product(out_dtype="bfloat16"), TypeError, "fp8_gemm: out_dtype must be",
        "got str"),
    "scale of a product as a number": (
        lambda: product(a_scale=1.0), TypeError, "fp8_gemm: a_scale_inv must be a torch.Tensor",
        "got float"),
    "operand in high precision of a dense product": (
        lambda: dense_gemm.dense_gemm(CODES, X, ONE, ONE), TypeError,
        "dense_gemm: b must have dtype float8_e4m3fn", "got torch.float32"),
    "scales of MXFP8": (
        lambda: emulated_gemm.mx_gemm(CODES, CODES, ONE, ONE), ValueError,
        "mx_dequantize: scale must have shape", "got"),
    "blocks of a product": (
        lambda: emulated_gemm.emulated_block_gemm(
            CODES, CODES, torch.ones(1, 6), torch.ones(1, 4), a_block_rows=2), ValueError,
        "block_dequantize: block_rows must be 1 or 128",
        "got 2"),
    "groups as a list": (
        lambda: grouped_gemm.multiply_groups(X, X[None], [6]), TypeError,
        "grouped_gemm.multiply_groups: groups must be", "got list"),
    "operands of two dtypes": (
        lambda: wgrad_gemm.wgrad_gemm(X.half(), X, torch.zeros(16, 16)), TypeError,
        "wgrad_gemm: x must have dtype torch.float16 like dy", "got torch.float32"),
}  # fmt: skip

LISTS_AND_ROUTES = {
    "one beta": (
        lambda: adam(betas=(0.9,)), TypeError, "adam: betas must be a tuple of two floats",
        r"got \(0.9,\)"),
    "three betas": (
        lambda: adam(betas=(0.9, 0.99, 0.999)), TypeError,
        "adam: betas must be a tuple of two floats", r"got \(0.9, 0.99, 0.999\)"),
    "betas as a number": (
        lambda: adam(betas=0.9), TypeError, "adam: betas must be a tuple of two floats",
        "got 0.9"),
    "tensor for a list": (
        lambda: multi_tensor.l2norm(X), TypeError,
        "multi_tensor.l2norm: tensors must be a list or tuple", "got Tensor"),
    "number in a list": (
        lambda: multi_tensor.scale([1.0], [W], 2.0), TypeError,
        r"multi_tensor.scale: inputs\[0\] must be a torch.Tensor", "got float"),
    "factor as text": (
        lambda: multi_tensor.scale([W], [W.clone()], "2"), TypeError,
        "multi_tensor.scale: factor must be a float", "got str"),
    "out of amax": (
        lambda: multi_tensor.amax([W, W], out=torch.zeros(1)), ValueError,
        r"multi_tensor_amax: amax must have shape \[2\]", r"got \[1\]"),
    "lists of two lengths": (
        lambda: multi_tensor.scale([W, W], [W.clone()], 2.0), ValueError,
        "multi_tensor.scale: outputs must", "got"),
    "beta of 1": (
        lambda: adam(betas=(0.9, 1.0)), ValueError,
        r"multi_tensor_adam: beta2 must be at least 0 and below 1", "got 1"),
    "eps below 0": (
        lambda: adam(eps=-1e-8), ValueError, "multi_tensor_optim.adam: eps must be zero or more",
        "got -1e-08"),
    "step of 0": (
        lambda: adam(step=0), ValueError, "multi_tensor_optim.adam: step must be at least 1",
        "got 0"),
    "misspelt decay": (
        lambda: adam(weight_decy=0.1), TypeError,
        "multi_tensor_optim.adam: unexpected argument 'weight_decy'", "mean 'weight_decay'"),
    "tokens as a list": (
        lambda: permuted(X.tolist()), TypeError, "moe_permute: inp must be a torch.Tensor",
        "got list"),
    "map of floats": (
        lambda: permuted(routing_map=ROUTES.float()), TypeError,
        "moe_permute: routing_map must have dtype bool", "got float32"),
    "map of fewer tokens": (
        lambda: permuted(routing_map=ROUTES[:3]), ValueError,
        r"moe_permute: inp must have shape \[3, 16\]", r"got \[6, 16\]"),
    "misspelt kind of map": (
        lambda: permuted(map_type="msk"), ValueError, "moe_permute: map_type must be 'mask'",
        "got 'msk'"),
    "negative number of rows": (
        lambda: permuted(X, ROUTES, -5), ValueError,
        "moe_permute: num_out_tokens must be at least 0", "got -5"),
    "number of rows as text": (
        lambda: permuted(X, ROUTES, "6"), TypeError,
        "moe_permute: num_out_tokens must be an int or None", "got str"),
    "misspelt number of rows": (
        lambda: permuted(num_out_token=6), TypeError,
        "moe_permute: unexpected argument 'num_out_token'", "mean 'num_out_tokens'"),
    "probs of another size": (
        lambda: permutation.moe_permute_with_probs(X, W, ROUTES), ValueError,
        r"moe_permute_with_probs: probs must have shape \[6, 6\]", r"got \[16\]"),
    "counts as a list": (
        lambda: permutation.moe_permute_and_pad_with_probs(X, W, ROUTES, [1] * 6, 16), TypeError,
        "moe_permute_and_pad_with_probs: tokens_per_expert must be a torch.Tensor", "got list"),
    "no map to go back by": (
        lambda: permutation.moe_unpermute(X, None), TypeError,
        "moe_unpermute: row_id_map must be a torch.Tensor", "got NoneType"),
    "chunk that is not there": (
        lambda: permutation.moe_sort_chunks_by_index(
            X, torch.tensor([2, 4]), torch.tensor([1, 5])), ValueError,
        "moe_sort_chunks_by_index: sorted_index must hold each chunk once", "got 5"),
    "gradient of permuted tokens": (
        lambda: moe_permute.permute_bwd(X.long(), moe_permute.make_map(ROUTES).row_id_map),
        TypeError, "moe_unpermute_fwd: inp must have dtype float32", "got int64"),
}  # fmt: skip

VALUES = {
    "eps below 0 of blocks": (
        lambda: block_quantize.block_quantize(X, E4M3, eps=-1.0), ValueError,
        "block_quantize: eps must be zero or more and finite", "got -1"),
    "no dimension": (
        lambda: activation.activation_fwd_fp8(torch.tensor(1.0), "gelu", ONE, E4M3), ValueError,
        "activation_fwd_fp8: x must have at least one dimension", ""),
    "no dimension of a gate": (
        lambda: swiglu.swiglu_fwd_fp8(torch.zeros(()), None, ONE, E4M3), ValueError,
        "swiglu_fwd_fp8: input must have at least 1 dimension", ""),
    "no dimension to drop of": (
        lambda: dropped(X[0, 0], None, X[0, 0]), ValueError,
        "bias_dropout_add: x must have at least 1 dimension", ""),
    "no copy of a current scale": (
        lambda: current_scale.current_scale(X, E4M3, rowwise=False, columnwise=False), ValueError,
        "current_scale: rowwise or columnwise must be True", "got False for both"),
    "no copy of blocks": (
        lambda: block_quantize.block_quantize(X, E4M3, rowwise=False, columnwise=False), ValueError,
        "block_quantize: rowwise, columnwise or amax must be asked for", ""),
    "no copy of MXFP8": (
        lambda: mx_quantize.mx_quantize(X, rowwise=False, columnwise=False), ValueError,
        "mx_quantize: rowwise or columnwise must be asked for", ""),
    "no copy of HiF8": (
        lambda: hif8.quantize(X, ONE, rowwise=False, columnwise=False), ValueError,
        "hif8.quantize: rowwise or columnwise must be True", ""),
    "copies of two formats": (
        lambda: current_scale.current_scale(X, E4M3, out_rowwise=CODES.view(E5M2)), TypeError,
        "current_scale_fwd: columnwise must have dtype float8_e5m2", "got float8_e4m3fn"),
    "blocks of another format": (
        lambda: blocks(CODES, torch.ones(1, 8), dtype=E5M2), TypeError,
        "block_quantize: rowwise must have dtype float8_e5m2", "got float8_e4m3fn"),
    "blocks without scales": (
        lambda: blocks(CODES, None), ValueError,
        "block_quantize: each of rowwise and columnwise must be given with its scale_inv", ""),
    "scales of other blocks to write": (
        lambda: blocks(CODES, torch.ones(1, 2)), ValueError,
        r"block_quantize: rowwise_scale_inv must have shape \[1, 8\]", r"got \[1, 2\]"),
    "MXFP8 without scales": (
        lambda: mx(CODES, None), ValueError,
        "mx_quantize: each of rowwise and columnwise must be given with its scale", ""),
    "MXFP8 with scales in float32": (
        lambda: mx(CODES, torch.ones(6, 1)), TypeError,
        "mx_quantize: rowwise_scale must have dtype float8_e8m0fnu", "got float32"),
    "MXFP8 of another format": (
        lambda: mx(CODES.view(E5M2), torch.ones(6, 1)), TypeError,
        "mx_quantize: rowwise must have dtype float8_e4m3fn", "got float8_e5m2"),
    "blocks decoded in float64": (
        lambda: block_quantize.block_dequantize(CODES, torch.ones(1, 8), dtype=torch.float64),
        TypeError, "block_dequantize: out must have dtype float32, float16 or bfloat16", ""),
    "HiF8 decoded in float64": (
        lambda: hif8.decode(X.byte(), torch.float64), TypeError,
        "hif8.decode: out must have dtype float32, float16 or bfloat16", "got float64"),
    "out of another size of HiF8": (
        lambda: hif8.decode(X.byte(), out=X[:1].clone()), ValueError,
        r"hif8.decode: out must be contiguous with shape \[6, 16\]", r"got shape \[1, 16\]"),
    "target of HiF8": (
        lambda: hif8.quantize_current(X, 0.0), ValueError,
        "hif8.quantize_current: target must be above 0 and at most 32768", "got 0"),
    "bias of one half": (
        lambda: swiglu.swiglu_fwd_fp8(X, None, ONE, E4M3, up_bias=W), ValueError,
        "swiglu_fwd_fp8: bias must be given with up_bias", "got None"),
    "gradient of both halves": (
        lambda: swiglu.swiglu_bwd(X, X), ValueError,
        r"swiglu_bwd: grad_output must have shape \[6, 8\]", r"got \[6, 16\]"),
    "gradient of another dtype of a gate": (
        lambda: swiglu.swiglu_bwd(X[:, :8].half(), X), TypeError,
        "swiglu_bwd: grad_output must have dtype float32", "got float16"),
    "gradient of blocks of both halves": (
        lambda: swiglu_block.swiglu_bwd_block(X.bfloat16(), X.bfloat16(), None, E4M3), ValueError,
        "swiglu_bwd_block: grad_output must have shape", ""),
    "gradient of blocks of another dtype": (
        lambda: swiglu_block.swiglu_bwd_block(X[:, :8], X.bfloat16(), None, E4M3), TypeError,
        "swiglu_bwd_block: grad_output must have dtype bfloat16", ""),
    "activation of blocks": (
        lambda: swiglu_block.swiglu_fwd_block(X, None, E4M3, activation="tanh"), ValueError,
        "swiglu_fwd_block: activation must be one of", ""),
    "strided logits to overwrite": (
        lambda: losses(X.t().contiguous().t(), overwrite_logits=True), ValueError,
        "cross_entropy: logits must be contiguous to be overwritten", ""),
    "angles in float64": (
        lambda: rotated(freqs=F.double()), TypeError, "rope_fwd: freqs must have dtype float32",
        "got float64"),
    "angles of one dimension": (
        lambda: rotated(freqs=F[0]), ValueError, "rope: freqs must have 2 dimensions",
        r"got \[16\]"),
    "angles of another dimension": (
        lambda: rotated(freqs=F[:, :6], rotary_dim=8), ValueError,
        "rope: freqs must have rotary_dim = 8 or half as many columns", "got 6"),
    "odd number of angles": (
        lambda: rotated(freqs=F[:, :5]), ValueError,
        "rope: rotary_dim must be even and from 0 to 16", "got 5"),
    "too many angles": (
        lambda: rotated(torch.zeros(1, 1, 1, 8194), torch.zeros(1, 8194)), NotImplementedError,
        "rope: rotary_dim must be at most 8192", "got 8194"),
    "start too late": (
        lambda: rotated(start=3), ValueError, "rope: .*leave 6 positions in a table of 8", "got 3"),
    "start before 0": (
        lambda: rotated(start=-1), ValueError, "rope: start must be at least 0", ""),
    "angles and their cosines": (
        lambda: rotated(cos=F, sin=F), ValueError, "rope: freqs, or cos and sin, must be given",
        ""),
    "angles that learn": (
        lambda: rotated(freqs=F.clone().requires_grad_()), NotImplementedError,
        "rope: freqs must not require a gradient", ""),
    "bounds without packed tokens": (
        lambda: rotated(cu_seqlens=torch.zeros(2, dtype=torch.int32)), ValueError,
        "rope: cu_seqlens must be given with layout thd and with no other", ""),
    "no bounds": (
        lambda: rotated(Q[:, 0], layout="thd", cu_seqlens=torch.zeros(0, dtype=torch.int32)),
        ValueError, r"rope: cu_seqlens must have batch \+ 1 elements", ""),
    "strided rows to overwrite": (
        lambda: rotated(Q.transpose(2, 3), F[:, :2], inplace=True), ValueError,
        "rope: x must be dense in its last dimension to be overwritten", ""),
    "expanded rows to overwrite": (
        lambda: rotated(Q[:1].expand(6, 2, 3, 16), inplace=True), ValueError,
        "rope: out must not overlap itself", "got a stride of 0"),
    "mask of two dimensions": (
        lambda: softmax(mask=S[0, 0] > 0), ValueError,
        "scaled_softmax: mask must have 4 dimensions", r"got \[8, 8\]"),
    "mask of other rows": (
        lambda: softmax(mask=S[:, :, :3] > 0), ValueError,
        "scaled_softmax: mask must broadcast over any dimension but the last",
        r"got \[2, 3, 3, 8\]"),
    "causal scores that are not square": (
        lambda: softmax(S[:, :, :3], causal="upper_left"), ValueError,
        "scaled_softmax: x must have as many rows as columns to be causal from the upper left",
        r"got shape \[2, 3, 3, 8\]"),
    "scale as text": (
        lambda: softmax(scale="1"), TypeError, "scaled_softmax: scale must be", ""),
    "strided scores to write": (
        lambda: scaled_softmax.scaled_softmax_fwd(S, 0.5, out=S.transpose(2, 3)), ValueError,
        "scaled_softmax_fwd: y must be contiguous", ""),
    "probability below 0": (
        lambda: dropped(X, W, X, -0.1), ValueError, "bias_dropout_add: p must be from 0 to 1",
        "got -0.1"),
    "probability of NaN": (
        lambda: dropped(X, W, X, float("nan")), ValueError,
        "bias_dropout_add: p must be from 0 to 1", "got nan"),
    "bias of the other short dtype": (
        lambda: dropped(X.half(), W.bfloat16(), X), TypeError,
        "bias_dropout_add: bias must have dtype float16 or float32", "got bfloat16"),
    "seed and generator": (
        lambda: dropped(X, W, X, seed=torch.tensor([3]), generator=torch.default_generator),
        ValueError, "bias_dropout_add: generator must be None where seed is given", ""),
}  # fmt: skip

KINDS = (NORMS, SOFTMAX_AND_LOSS, POINTWISE, QUANTIZED, LISTS_AND_ROUTES, VALUES)
MISTAKES = {f"{i}: {name}": row for i, kind in enumerate(KINDS) for name, row in kind.items()}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_error_names_function_and_argument(mistake):
    call, error, subject, text = MISTAKES[mistake]
    subject = subject.partition(": ")[2]  # kernels name their direction, as in rms_norm_fwd
    with pytest.raises(error, match=rf"^[a-z_\d.]+: {subject}.*{text}") as caught:
        call()
    assert type(caught.value) is error
    assert "\n" not in str(caught.value)


def test_error_of_backward_names_its_function():
    with pytest.raises(TypeError, match=r"^rms_norm_bwd: x must have dtype float16, got float32"):
        rms_norm.rms_norm_bwd(X.half(), X, W, torch.ones(6))


def test_meta_tensor_alone_is_no_mistake():
    assert activation.activation(X.to(META), "gelu").is_meta
