"""Every op on the CPU: its time beside the plain PyTorch formula's, and casts against a copy.

    python benchmarks/cpu.py            # all functions, two to three minutes; results/cpu.json
    python benchmarks/cpu.py rope mx    # those with one of these words in their names; prints only

``over formula`` is the formula's time over ours. The formula is a fused torch op where there is
one, else a few lines of PyTorch in the same dtype; of a backward, autograd's pass through it. Casts
and quantizers also give GB/s over the fewest bytes that must move, and the fraction of what a copy_
of 512 MB reads and writes in that time. Each time is the best of many calls that take turns.
"""

from __future__ import annotations

import gc
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent / "ops"))
import bench_activations
import bench_bias_dropout_add
import bench_multi_tensor
import bench_quantizers
import bench_rope
import harness

from apex_te.ops import hif8, multi_tensor, multi_tensor_optim
from apex_te.ops.activation import activation_bwd, activation_fwd, activation_fwd_fp8
from apex_te.ops.bias_dropout_add import bias_dropout_add
from apex_te.ops.bias_gelu import bias_gelu_bwd, bias_gelu_fwd, bias_gelu_fwd_fp8
from apex_te.ops.block_quantize import block_dequantize, block_quantize
from apex_te.ops.cast_transpose import cast_transpose
from apex_te.ops.cross_entropy import cross_entropy_fwd
from apex_te.ops.current_scale import current_scale, tensor_amax
from apex_te.ops.layer_norm import layer_norm_bwd, layer_norm_fwd, layer_norm_fwd_fp8
from apex_te.ops.mx_quantize import mx_dequantize, mx_quantize
from apex_te.ops.rms_norm import rms_norm_bwd, rms_norm_fwd, rms_norm_fwd_fp8
from apex_te.ops.rope import rope
from apex_te.ops.scaled_softmax import scaled_softmax_bwd, scaled_softmax_fwd
from apex_te.ops.swiglu import swiglu_bwd, swiglu_fwd, swiglu_fwd_fp8

COPY_BYTES = 512 << 20
SECONDS = 0.5  # for one row
CAST_SHAPE = (8192, 8192)  # beyond the caches
SLOW_SHAPE = (512, 4096)  # of a slow formula
ROWS, COLS = 2048, 4096
EPS = 1e-5
E4M3 = torch.float8_e4m3fn
ONE = torch.ones(1)


class Row(NamedTuple):
    """One function: what runs, the formula it is compared with, the bytes a cast must move."""

    function: str
    call: Callable[[], Any]
    formula: Callable[[], Any] | None
    num_bytes: int = 0


Rows = Iterator[Row]


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


def backward_of(formula: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> Callable[[], Any]:
    """Autograd's backward pass through a formula, alone."""
    return harness.backward(formula, inputs)


def in_fp8(formula: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> Callable[[], Any]:
    """A formula whose result is cast with a scale of 1, and its transpose."""

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        codes = formula(*inputs).float().clamp(-448.0, 448.0).to(E4M3)
        return codes, codes.t().contiguous()

    return run


def casts(dtype: torch.dtype) -> Rows:
    """With one scale for the tensor: given, current, and HiF8."""
    x = randn(*CAST_SHAPE, dtype=dtype)
    n, size = x.numel(), x.element_size()
    given = {"amax": torch.zeros(1), "scale_inv": torch.empty(1)}
    for layout, copies, outputs in harness.layouts(x, E4M3):
        codes = {k: v if isinstance(v, bool) else v.view(torch.uint8) for k, v in outputs.items()}
        cast = partial(cast_transpose, x, ONE, E4M3, **given, **outputs)
        formula = in_fp8(lambda: x) if layout == "both" else None
        yield Row(f"cast_transpose {layout}", cast, formula, n * (size + copies))
        current = partial(current_scale, x, E4M3, **outputs)
        plain = partial(bench_quantizers.current_codes, x) if layout == "both" else None
        yield Row(f"current_scale {layout}", current, plain, n * (2 * size + copies))
        encode = partial(hif8.quantize, x, ONE, amax=given["amax"], **codes)
        yield Row(f"hif8 {layout}", encode, None, n * (size + copies))
    yield Row("tensor_amax", partial(tensor_amax, x), lambda: x.abs().max(), n * size)
    small, encoded, back = randn(*SLOW_SHAPE, dtype=dtype), hif8.encode(x), torch.empty_like(x)
    plain = partial(bench_quantizers.hif8_codes, small, ONE)
    yield Row("hif8 quantize, 512x4096", partial(hif8.quantize, small, ONE), plain)
    decoded = lambda: hif8.reference_decode(encoded).to(dtype)  # noqa: E731
    yield Row("hif8 decode", partial(hif8.decode, encoded, out=back), decoded, n * (1 + size))


def block_casts(dtype: torch.dtype) -> Rows:
    """Scales of 1 x 128, 128 x 128 and, MX, of 32 elements; both layouts from one read."""
    x = randn(*CAST_SHAPE, dtype=dtype)
    both, one = x.numel() * (x.element_size() + 2), x.numel() * (x.element_size() + 1)
    options = {"dtype": dtype, "out": torch.empty_like(x)}

    def plain_back(codes: torch.Tensor, block: int) -> Callable[[], Any]:
        scales = torch.ones(codes.numel() // block, 1)
        return lambda: (codes.float().view(-1, block) * scales).to(dtype)

    for rows, name in ((1, "1x128"), (128, "128x128")):
        out = block_quantize(x, E4M3, block_rows=rows)
        cast = partial(block_quantize, x, E4M3, block_rows=rows, out=out)
        formula = partial(bench_quantizers.block_codes, x, rows)
        yield Row(f"block_quantize {name} both", cast, formula, both)
        decode = partial(block_dequantize, *out[:2], block_rows=rows, **options)
        yield Row(f"block_dequantize {name}", decode, plain_back(out.rowwise, 128), one)
    mx = mx_quantize(x, E4M3)
    cast, formula = partial(mx_quantize, x, E4M3, out=mx), partial(bench_quantizers.mx_codes, x)
    yield Row("mx_quantize both", cast, formula, both)
    decode = partial(mx_dequantize, *mx[:2], **options)
    yield Row("mx_dequantize", decode, plain_back(mx.rowwise, 32), one)


def norms(dtype: torch.dtype) -> Rows:
    x, dy, residual = (randn(ROWS, COLS, dtype=dtype) for _ in range(3))
    w, b = randn(COLS, dtype=dtype), randn(COLS, dtype=dtype)

    def layer(x: torch.Tensor, *params: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (COLS,), *params, eps=EPS)

    def rms(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (COLS,), w, eps=EPS)

    stats, rstd = layer_norm_fwd(x, w, b, EPS), rms_norm_fwd(x, w, EPS).rstd
    yield Row("layer_norm fwd", partial(layer_norm_fwd, x, w, b, EPS), partial(layer, x, w, b))
    backward = partial(layer_norm_bwd, dy, x, w, stats.mean, stats.rstd)
    yield Row("layer_norm bwd", backward, backward_of(layer, x, w, b))
    to_fp8 = partial(layer_norm_fwd_fp8, x, w, b, EPS, ONE, E4M3)
    yield Row("layer_norm fwd to fp8", to_fp8, in_fp8(layer, x, w, b))
    yield Row("rms_norm fwd", partial(rms_norm_fwd, x, w, EPS), partial(rms, x, w))
    summed = partial(rms_norm_fwd, x, w, EPS, residual=residual)
    yield Row("rms_norm fwd, residual", summed, lambda: rms(x + residual, w))
    yield Row("rms_norm bwd", partial(rms_norm_bwd, dy, x, w, rstd), backward_of(rms, x, w))
    to_fp8 = partial(rms_norm_fwd_fp8, x, w, EPS, ONE, E4M3)
    yield Row("rms_norm fwd to fp8", to_fp8, in_fp8(rms, x, w))


def activations(dtype: torch.dtype) -> Rows:
    x, dy = (randn(ROWS, COLS, dtype=dtype) for _ in range(2))
    bias, wide = randn(COLS, dtype=dtype), randn(ROWS, 2 * COLS, dtype=dtype)
    glu, gelu = bench_activations.fwd, bench_activations.gelu
    yield Row("swiglu fwd", partial(swiglu_fwd, wide), partial(glu, wide))
    yield Row("swiglu bwd", partial(swiglu_bwd, dy, wide), backward_of(glu, wide))
    to_fp8 = partial(swiglu_fwd_fp8, wide, None, ONE, E4M3)
    yield Row("swiglu fwd to fp8", to_fp8, in_fp8(glu, wide))
    yield Row("bias_gelu fwd", partial(bias_gelu_fwd, x, bias), partial(gelu, x, bias))
    backward = partial(bias_gelu_bwd, dy, x, bias, with_dbias=True)
    yield Row("bias_gelu bwd", backward, backward_of(gelu, x, bias))
    to_fp8 = partial(bias_gelu_fwd_fp8, x, bias, ONE, E4M3)
    yield Row("bias_gelu fwd to fp8", to_fp8, in_fp8(gelu, x, bias))
    formulas: dict[str, Callable[..., torch.Tensor]] = {
        "gelu": F.gelu,
        "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
        "relu": F.relu,
        "squared_relu": lambda x: F.relu(x).square(),
        "silu": F.silu,
    }
    for kind, formula in formulas.items():
        yield Row(f"{kind} fwd", partial(activation_fwd, x, kind), partial(formula, x))
        yield Row(f"{kind} bwd", partial(activation_bwd, dy, x, kind), backward_of(formula, x))
    to_fp8 = partial(activation_fwd_fp8, x, "silu", ONE, E4M3)
    yield Row("silu fwd to fp8", to_fp8, in_fp8(F.silu, x))


def attention(dtype: torch.dtype) -> Rows:
    """Softmaxes of [2, 16, 512, 512], rope of [1024, 2, 32, 128]."""
    x = randn(2, 16, 512, 512, dtype=dtype)
    dy, y = torch.randn_like(x), torch.softmax(x, -1)
    mask = torch.rand(2, 1, 512, 512) < 0.3
    upper = torch.ones(512, 512, dtype=torch.bool).triu(1)
    fwd, bwd = partial(scaled_softmax_fwd, x, 0.125), partial(scaled_softmax_bwd, dy, y, 0.125)
    causal = {"causal": "upper_left"}

    def plain(x: torch.Tensor, hidden: torch.Tensor | None = None) -> torch.Tensor:
        x = 0.125 * x
        return torch.softmax(x if hidden is None else x.masked_fill(hidden, -1e4), -1)

    yield Row("scaled_softmax fwd", fwd, partial(plain, x))
    yield Row("scaled_softmax fwd, mask", partial(fwd, mask), partial(plain, x, mask))
    yield Row("scaled_softmax fwd, causal", partial(fwd, **causal), partial(plain, x, upper))
    yield Row("scaled_softmax bwd", bwd, backward_of(plain, x))
    formula = backward_of(partial(plain, hidden=upper), x)
    yield Row("scaled_softmax bwd, causal", partial(bwd, **causal), formula)
    q, dq = (randn(1024, 2, 32, 128, dtype=dtype) for _ in range(2))
    freqs = torch.outer(torch.arange(1024.0), 1e4 ** -torch.arange(0.0, 1.0, 1 / 64)).repeat(1, 2)
    cos, sin = (t[:, None, None, :].to(dtype) for t in (freqs.cos(), freqs.sin()))
    rotate = partial(bench_rope.formula, cos=cos, sin=sin)
    backward = harness.backward(partial(rope, freqs=freqs), [q], dq)
    yield Row("rope fwd", partial(rope, q, freqs), partial(rotate, q))
    yield Row("rope bwd", backward, backward_of(rotate, q))


def losses(dtype: torch.dtype) -> Rows:
    x, residual, dy = (randn(ROWS, COLS, dtype=dtype) for _ in range(3))
    inputs = (x, randn(COLS, dtype=dtype), residual)
    dropped = partial(bench_bias_dropout_add.formula, p=0.1)
    backward = harness.backward(partial(bias_dropout_add, p=0.1), inputs, dy)
    forward = partial(bias_dropout_add, *inputs, 0.1)
    yield Row("bias_dropout_add fwd", forward, partial(dropped, *inputs))
    yield Row("bias_dropout_add bwd", backward, backward_of(dropped, *inputs))
    logits, target = randn(256, 32000, dtype=dtype), torch.randint(32000, (256,))
    leaf, plain = logits.clone().requires_grad_(), F.cross_entropy
    forward = partial(cross_entropy_fwd, logits, target)
    yield Row("cross_entropy fwd", forward, partial(plain, logits, target, reduction="none"))
    yield Row(
        "cross_entropy fwd + bwd", partial(forward, grad=torch.empty_like(logits)),
        lambda: torch.autograd.grad(plain(leaf, target, reduction="sum"), leaf),
    )  # fmt: skip


def lists(dtype: torch.dtype) -> Rows:
    """multi_tensor over 8 x [1024, 1024]."""
    xs, ys, p = ([randn(1024, 1024, dtype=dtype) for _ in range(8)] for _ in range(3))
    m, v = ([torch.rand(1024, 1024) for _ in range(8)] for _ in range(2))
    flag, inverse, scales = torch.zeros(1), torch.ones(1), [ONE] * 8
    codes = [torch.empty_like(x, dtype=E4M3) for x in xs]
    mine, mm, vv = ([t.clone() for t in tensors] for tensors in (p, m, v))
    op, optim = multi_tensor, multi_tensor_optim

    def foreach_axpby() -> None:
        torch._foreach_mul_(ys, 0.5)
        torch._foreach_add_(ys, xs, alpha=0.5)

    decay: dict[str, Any] = bench_multi_tensor.DECAY

    def each(reference: Callable[..., Any], *tensors: list[torch.Tensor], **more: Any) -> Any:
        return lambda: [reference(*ts, **decay, **more) for ts in zip(*tensors, strict=True)]

    is_wide = dtype is torch.float32
    adamw, plain_sgd = bench_multi_tensor.torch_adamw, bench_multi_tensor.torch_sgd
    adam = adamw(mine, xs, mm, vv) if is_wide else each(optim.reference_adam, p, xs, m, v, step=5)
    sgd = plain_sgd(mine, xs, mm) if is_wide else each(optim.reference_sgd, p, xs, m, momentum=0.9)
    lamb = each(optim.reference_lamb, p, xs, m, v, step=5)
    unscale = partial(torch._amp_foreach_non_finite_check_and_unscale_, xs, flag, inverse)
    calls: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "amax": (partial(op.amax, xs, out=torch.zeros(8)),
                 partial(torch._foreach_norm, xs, float("inf"))),
        "l2norm": (partial(op.l2norm, xs), lambda: torch.stack(torch._foreach_norm(xs)).norm()),
        "scale": (partial(op.scale, xs, xs, 1.0, found_inf=flag), unscale),
        "axpby": (partial(op.axpby, xs, ys, ys, 0.5, 0.5), foreach_axpby),
        "quantize": (partial(op.quantize, xs, scales, outputs=codes),
                     lambda: [x.float().clamp(-448.0, 448.0).to(E4M3) for x in xs]),
        "adam": (partial(optim.adam, p, xs, m, v, step=5, **decay), adam),
        "sgd": (partial(optim.sgd, p, xs, m, momentum=0.9, **decay), sgd),
        "lamb": (partial(optim.lamb, p, xs, m, v, step=5, **decay), lamb),
    }  # fmt: skip
    for name, pair in calls.items():
        num_bytes = (8 << 20) * (xs[0].element_size() + 1) if name == "quantize" else 0
        yield Row(f"multi_tensor {name}", *pair, num_bytes)


FAMILIES = (casts, block_casts, norms, activations, attention, losses, lists)


def best_us(calls: list[Callable[[], Any]], seconds: float = SECONDS) -> list[float]:
    """The shortest time of each call; they take turns for so long, twice at least."""
    for call in calls:
        call()
    best = [float("inf")] * len(calls)
    turns, end = 0, time.perf_counter() + seconds
    while turns < 2 or time.perf_counter() < end:
        turns += 1
        for k, call in enumerate(calls):
            begin = time.perf_counter()
            call()
            best[k] = min(best[k], (time.perf_counter() - begin) * 1e6)
    return best


def copy_gigabytes_per_second() -> float:
    source = torch.empty(COPY_BYTES, dtype=torch.uint8).random_()
    target = torch.empty_like(source)
    (us,) = best_us([lambda: target.copy_(source)], seconds=2.0)
    return 2 * COPY_BYTES / us / 1e3


def measure(row: Row, dtype: torch.dtype, copy: float) -> dict[str, Any]:
    calls = [row.call] if row.formula is None else [row.call, row.formula]
    us, *formula = best_us(calls)
    name = str(dtype).removeprefix("torch.")
    result: dict[str, Any] = {"function": row.function, "dtype": name, "us": us}
    if formula:
        result |= {"formula us": formula[0], "over formula": formula[0] / us}
    if row.num_bytes:
        rate = row.num_bytes / us / 1e3
        result |= {"GB/s": rate, "of copy": rate / copy}
    return result


def main() -> None:
    wanted = sys.argv[1:]
    before, copy = os.getloadavg()[0], copy_gigabytes_per_second()
    rows = []
    for dtype, family in itertools.product((torch.bfloat16, torch.float32), FAMILIES):
        for row in family(dtype):
            if not wanted or any(name in row.function for name in wanted):
                rows.append(measure(row, dtype, copy))
        gc.collect()
    if wanted:
        os.environ["OUT"] = tempfile.mkdtemp()
    load = f"{before:.2f} to {os.getloadavg()[0]:.2f}"
    threads = torch.get_num_threads()
    harness.report("cpu", rows, threads=threads, copy_gb_s=round(copy, 1), load=load)


if __name__ == "__main__":
    main()
