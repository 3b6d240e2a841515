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


NORMS = [
    (lambda: rms(X.numpy()), TypeError, "x must be a torch.Tensor.*got ndarray"),
    (lambda: rms(weight=W.to(META)), TypeError,
     "weight must be a dense tensor.*on the meta device"),
    (lambda: rms(eps=-1e-5), ValueError, "eps must be zero or more.*got -1e-05"),
    (lambda: layer(eps=float("nan")), ValueError, "eps must be zero or more.*got nan"),
    (lambda: rms_norm.rms_norm_fwd(X, W, float("inf")), ValueError,
     "eps must be zero or more and finite.*got inf"),
    (lambda: rms(eps="1e-5"), TypeError, "eps must be a float.*got str"),
    (lambda: layer(eps="1e-5"), TypeError, "eps must be a float.*got str"),
    (lambda: rms(weight=1e-5, eps=W), TypeError, "weight must be a torch.Tensor.*got float"),
    (lambda: layer_norm.layer_norm(X, (16,), W, W), TypeError,
     "weight must be a torch.Tensor.*got tuple"),
    (lambda: layer_norm.layer_norm(X, W, W, epsilon=1e-5), TypeError,
     r"unexpected argument 'epsilon'.*did you mean 'eps'\?"),
]  # fmt: skip

SOFTMAX_AND_LOSS = [
    (lambda: softmax(mask=torch.zeros(2, 1, 8, 8)), TypeError,
     "mask must have dtype bool.*got float32"),
    (lambda: softmax(causal="upper-left"), ValueError, "causal must be None.*got 'upper-left'"),
    (lambda: softmax(causal=True), TypeError, "causal must be a str or None.*got bool"),
    (lambda: scaled_softmax.scaled_softmax(S), TypeError, "scale must be given.*got nothing"),
    (lambda: losses(target=CLASSES[:5]), ValueError,
     r"target must have the shape.*\[6\], got \[5\]"),
    (lambda: losses(target=CLASSES + 99), ValueError, r"target\[0\] must be in \[0, 16\).*got"),
    (lambda: losses(label_smoothing=2), ValueError, r"label_smoothing must be in \[0, 1\].*got 2"),
    (lambda: losses(reduction="men"), ValueError, "reduction must be 'mean'.*got 'men'"),
    (lambda: losses(smoothing=0.1), TypeError,
     r"unexpected argument 'smoothing'.*did you mean 'label_smoothing'\?"),
    (lambda: head(X.tolist()), TypeError, "hidden must be a torch.Tensor.*got list"),
    (lambda: head(weight=torch.nn.Linear(16, 32)), TypeError,
     "weight must be a torch.Tensor.*got Linear"),
    (lambda: head(target=TARGET.float()), TypeError,
     "target must have dtype int64 or int32.*got float32"),
    (lambda: head(target=TARGET.tolist()), TypeError, "target must be a torch.Tensor.*got list"),
    (lambda: head(X, HEAD, TARGET, [1.0]), TypeError, "bias must be a torch.Tensor.*got list"),
    (lambda: head(label_smoothing="0.1"), ValueError,
     r"label_smoothing must be in \[0, 1\].*got 0.1"),
    (lambda: head(label_smooth=0.1), TypeError,
     "unexpected argument 'label_smooth'.*mean 'label_smoothing'"),
    (lambda: linear_cross_entropy(X, HEAD), TypeError, "target must be given.*got nothing"),
    (lambda: head(X, HEAD, TARGET, None, -100), TypeError,
     "at most 4 arguments may be given by position.*got 5"),
    (lambda: head(fp8_recipe="tensorwse"), ValueError,
     "fp8_recipe must be a recipe or one of.*mean 'tensorwise'"),
    (lambda: head(tp_group=3), TypeError,
     "tp_group must be a torch.distributed.ProcessGroup.*got int"),
]  # fmt: skip

POINTWISE = [
    (lambda: rotated(layout="bhsd"), ValueError, "layout must be.*got 'bhsd'"),
    (lambda: rope.rope(Q), ValueError, "freqs, or cos and sin, must be given"),
    (lambda: rotated(freqs=None, cos=F), ValueError, "freqs, or cos and sin, must be given"),
    (lambda: rotated(freqs=F[:3]), ValueError,
     "start must be at least 0 and leave 6.*table of 3, got 0"),
    (lambda: rotated(Q[:, 0], layout="thd"), ValueError,
     "cu_seqlens must be given.*with layout thd"),
    (lambda: rotated(rotary_dim=32), ValueError, "rotary_dim must be even and from 0.*got 32"),
    (lambda: activation.activation(X, "gel"), ValueError, "kind must be one of.*got 'gel'"),
    (lambda: activation.activation(X, torch.nn.functional.gelu), TypeError,
     "kind must be a str.*got builtin_function_or_method"),
    (lambda: swiglu.swiglu(X[:, :7]), ValueError, r"input must have an even number.*got \[6, 7\]"),
    (lambda: swiglu.swiglu(X, X[:, :4]), ValueError,
     r"up must have the shape of input.*got \[6, 4\]"),
    (lambda: swiglu.swiglu(X, activation="swiglu"), ValueError,
     "activation must be one of.*got 'swiglu'"),
    (lambda: bias_gelu.bias_gelu(X, W, form="none"), ValueError,
     "form must be 'tanh' or 'erf'.*got 'none'"),
    (lambda: bias_dropout_add.bias_dropout_add(X, W, X, 1.5), ValueError,
     "p must be from 0 to 1.*got 1.5"),
]  # fmt: skip

QUANTIZED = [
    (lambda: cast(dtype="e4m3"), TypeError, "fp8_dtype must be.*got"),
    (lambda: cast(dtype=torch.int8), TypeError, "fp8_dtype must be.*got"),
    (lambda: cast(scale=1.0), TypeError, "scale must be a torch.Tensor.*got float"),
    (lambda: current_scale.current_scale(X, E4M3, eps=-1.0), ValueError,
     "eps must be zero or more.*got -1"),
    (lambda: block_quantize.block_quantize(X, E4M3, block_rows=64), ValueError,
     "block_rows must be 1 or 128.*got 64"),
    (lambda: mx_quantize.mx_quantize(X, rounding="upp"), ValueError,
     "rounding must be 'up' or 'floor'.*got 'upp'"),
    (lambda: hif8.decode(X), TypeError, "fp8_data must have dtype uint8.*got float32"),
    (lambda: product(b=CODES[:, :8]), ValueError, r"a and b must be.*got \[6, 16\] and \[6, 8\]"),
    (lambda: product(out=torch.zeros(6, 5)), ValueError,
     r"out must have shape \[6, 6\].*got \[6, 5\]"),
    (lambda: product(accumulate=True), ValueError, "out must be given.*got None"),
    (lambda: product(out_dtype="bfloat16"), TypeError, "out_dtype must be.*got str"),
    (lambda: dense_gemm.dense_gemm(CODES, X, ONE, ONE), TypeError,
     "b must have dtype float8_e4m3fn.*got torch.float32"),
    (lambda: emulated_gemm.emulated_block_gemm(
        CODES, CODES, torch.ones(1, 6), torch.ones(1, 4), a_block_rows=2),
     ValueError, "block_rows must be 1 or 128.*got 2"),
    (lambda: grouped_gemm.multiply_groups(X, X[None], [6]), TypeError, "groups must be.*got list"),
    (lambda: wgrad_gemm.wgrad_gemm(X.half(), X, torch.zeros(16, 16)), TypeError,
     "x must have dtype torch.float16 like dy.*got torch.float32"),
]  # fmt: skip

LISTS_AND_ROUTES = [
    (lambda: adam(betas=(0.9,)), TypeError, r"betas must be a tuple of two floats.*got \(0.9,\)"),
    (lambda: adam(betas=(0.9, 0.99, 0.999)), TypeError,
     r"betas must be a tuple of two floats.*got \(0.9, 0.99, 0.999\)"),
    (lambda: adam(betas=0.9), TypeError, "betas must be a tuple of two floats.*got 0.9"),
    (lambda: multi_tensor.l2norm(X), TypeError, "tensors must be a list or tuple.*got Tensor"),
    (lambda: multi_tensor.scale([W], [W.clone()], "2"), TypeError,
     "factor must be a float.*got str"),
    (lambda: multi_tensor.scale([W, W], [W.clone()], 2.0), ValueError, "outputs must.*got"),
    (lambda: adam(eps=-1e-8), ValueError, "eps must be zero or more.*got -1e-08"),
    (lambda: adam(weight_decy=0.1), TypeError,
     "unexpected argument 'weight_decy'.*mean 'weight_decay'"),
    (lambda: permuted(X.tolist()), TypeError, "inp must be a torch.Tensor.*got list"),
    (lambda: permuted(X, ROUTES, "6"), TypeError, "num_out_tokens must be an int or None.*got str"),
    (lambda: permuted(num_out_token=6), TypeError,
     "unexpected argument 'num_out_token'.*mean 'num_out_tokens'"),
    (lambda: permutation.moe_permute_and_pad_with_probs(X, W, ROUTES, [1] * 6, 16), TypeError,
     "tokens_per_expert must be a torch.Tensor.*got list"),
    (lambda: permutation.moe_unpermute(X, None), TypeError,
     "row_id_map must be a torch.Tensor.*got NoneType"),
]  # fmt: skip

VALUES = [
    (lambda: block_quantize.block_quantize(X, E4M3, eps=-1.0), ValueError,
     "eps must be zero or more and finite.*got -1"),
    (lambda: activation.activation_fwd_fp8(torch.tensor(1.0), "gelu", ONE, E4M3), ValueError,
     "x must have at least one dimension"),
    (lambda: swiglu.swiglu_fwd_fp8(torch.zeros(()), None, ONE, E4M3), ValueError,
     "input must have at least 1 dimension"),
    (lambda: dropped(X[0, 0], None, X[0, 0]), ValueError, "x must have at least 1 dimension"),
    (lambda: current_scale.current_scale(X, E4M3, rowwise=False, columnwise=False), ValueError,
     "rowwise or columnwise must be True.*got False for both"),
    (lambda: block_quantize.block_quantize(X, E4M3, rowwise=False, columnwise=False), ValueError,
     "rowwise, columnwise or amax must be asked for"),
    (lambda: mx_quantize.mx_quantize(X, rowwise=False, columnwise=False), ValueError,
     "rowwise or columnwise must be asked for"),
    (lambda: hif8.quantize(X, ONE, rowwise=False, columnwise=False), ValueError,
     "rowwise or columnwise must be True"),
    (lambda: hif8.decode(X.byte(), torch.float64), TypeError,
     "out must have dtype float32, float16 or bfloat16.*got float64"),
    (lambda: hif8.decode(X.byte(), out=X[:1].clone()), ValueError,
     r"out must be contiguous with shape \[6, 16\].*got shape \[1, 16\]"),
    (lambda: hif8.quantize_current(X, 0.0), ValueError,
     "target must be above 0 and at most 32768.*got 0"),
    (lambda: swiglu.swiglu_fwd_fp8(X, None, ONE, E4M3, up_bias=W), ValueError,
     "bias must be given with up_bias.*got None"),
    (lambda: swiglu_block.swiglu_fwd_block(X, None, E4M3, activation="tanh"), ValueError,
     "activation must be one of"),
    (lambda: losses(X.t().contiguous().t(), overwrite_logits=True), ValueError,
     "logits must be contiguous to be overwritten"),
    (lambda: rotated(freqs=F[:, :6], rotary_dim=8), ValueError,
     "freqs must have rotary_dim = 8 or half as many columns.*got 6"),
    (lambda: rotated(freqs=F[:, :5]), ValueError,
     "rotary_dim must be even and from 0 to 16.*got 5"),
    (lambda: rotated(torch.zeros(1, 1, 1, 8194), torch.zeros(1, 8194)), NotImplementedError,
     "rotary_dim must be at most 8192.*got 8194"),
    (lambda: rotated(start=3), ValueError, ".*leave 6 positions in a table of 8.*got 3"),
    (lambda: rotated(start=-1), ValueError, "start must be at least 0"),
    (lambda: rotated(cos=F, sin=F), ValueError, "freqs, or cos and sin, must be given"),
    (lambda: rotated(freqs=F.clone().requires_grad_()), NotImplementedError,
     "freqs must not require a gradient"),
    (lambda: rotated(cu_seqlens=torch.zeros(2, dtype=torch.int32)), ValueError,
     "cu_seqlens must be given with layout thd and with no other"),
    (lambda: rotated(Q[:, 0], layout="thd", cu_seqlens=torch.zeros(0, dtype=torch.int32)),
     ValueError, r"cu_seqlens must have batch \+ 1 elements"),
    (lambda: rotated(Q.transpose(2, 3), F[:, :2], inplace=True), ValueError,
     "x must be dense in its last dimension to be overwritten"),
    (lambda: rotated(Q[:1].expand(6, 2, 3, 16), inplace=True), ValueError,
     "out must not overlap itself.*got a stride of 0"),
    (lambda: softmax(mask=S[0, 0] > 0), ValueError, r"mask must have 4 dimensions.*got \[8, 8\]"),
    (lambda: softmax(mask=S[:, :, :3] > 0), ValueError,
     r"mask must broadcast over any dimension but the last.*got \[2, 3, 3, 8\]"),
    (lambda: softmax(S[:, :, :3], causal="upper_left"), ValueError,
     "x must have as many rows as columns to be causal from the upper left.*"
     r"got shape \[2, 3, 3, 8\]"),
    (lambda: softmax(scale="1"), TypeError, "scale must be"),
    (lambda: scaled_softmax.scaled_softmax_fwd(S, 0.5, out=S.transpose(2, 3)), ValueError,
     "y must be contiguous"),
    (lambda: dropped(X, W, X, -0.1), ValueError, "p must be from 0 to 1.*got -0.1"),
    (lambda: dropped(X, W, X, float("nan")), ValueError, "p must be from 0 to 1.*got nan"),
    (lambda: dropped(X.half(), W.bfloat16(), X), TypeError,
     "bias must have dtype float16 or float32.*got bfloat16"),
    (lambda: dropped(X, W, X, seed=torch.tensor([3]), generator=torch.default_generator),
     ValueError, "generator must be None if seed is given"),
]  # fmt: skip

MISTAKES = [*NORMS, *SOFTMAX_AND_LOSS, *POINTWISE, *QUANTIZED, *LISTS_AND_ROUTES, *VALUES]


@pytest.mark.parametrize(("call", "error", "message"), MISTAKES, ids=[row[2] for row in MISTAKES])
def test_error_names_function_and_argument(call, error, message):
    with pytest.raises(error, match=rf"^[a-z_\d.]+: {message}") as caught:
        call()
    assert type(caught.value) is error
    assert "\n" not in str(caught.value)


def test_error_of_backward_names_its_function():
    with pytest.raises(TypeError, match=r"^rms_norm_bwd: x must have dtype float16, got float32"):
        rms_norm.rms_norm_bwd(X.half(), X, W, torch.ones(6))


def test_meta_tensor_alone_is_no_mistake():
    assert activation.activation(X.to(META), "gelu").is_meta
