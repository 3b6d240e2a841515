"""The ops that cpu.py compares with plain PyTorch, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from cpu_casts import E4M3, ONE, Row, Rows, backward_of, both, randn, to_fp8
from torch.nn import functional as F

from apex_te.ops import multi_tensor, multi_tensor_optim
from apex_te.ops.activation import activation_bwd, activation_fwd, activation_fwd_fp8
from apex_te.ops.bias_dropout_add import bias_dropout_add
from apex_te.ops.bias_gelu import bias_gelu_bwd, bias_gelu_fwd, bias_gelu_fwd_fp8
from apex_te.ops.cross_entropy import cross_entropy_fwd
from apex_te.ops.layer_norm import layer_norm_bwd, layer_norm_fwd, layer_norm_fwd_fp8
from apex_te.ops.rms_norm import rms_norm_bwd, rms_norm_fwd, rms_norm_fwd_fp8
from apex_te.ops.rope import rope
from apex_te.ops.scaled_softmax import scaled_softmax_bwd, scaled_softmax_fwd
from apex_te.ops.swiglu import swiglu_bwd, swiglu_fwd, swiglu_fwd_fp8

ROWS, COLS = 2048, 4096
EPS = 1e-5


def norms(dtype: torch.dtype) -> Rows:
    x, dy, residual = (randn(ROWS, COLS, dtype=dtype) for _ in range(3))
    w, b = randn(COLS, dtype=dtype), randn(COLS, dtype=dtype)

    def layer(x: torch.Tensor, *params: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (COLS,), *params, eps=EPS)

    def rms(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (COLS,), w, eps=EPS)

    stats = layer_norm_fwd(x, w, b, EPS)
    yield Row("layer_norm fwd", lambda: layer_norm_fwd(x, w, b, EPS), lambda: layer(x, w, b))
    yield Row(
        "layer_norm bwd",
        lambda: layer_norm_bwd(dy, x, w, stats.mean, stats.rstd),
        backward_of(layer, x, w, b),
    )
    yield Row(
        "layer_norm fwd to fp8",
        lambda: layer_norm_fwd_fp8(x, w, b, EPS, ONE, E4M3),
        lambda: both(to_fp8(layer(x, w, b))),
    )
    rstd = rms_norm_fwd(x, w, EPS).rstd
    yield Row("rms_norm fwd", lambda: rms_norm_fwd(x, w, EPS), lambda: rms(x, w))
    yield Row(
        "rms_norm fwd, residual",
        lambda: rms_norm_fwd(x, w, EPS, residual=residual),
        lambda: rms(x + residual, w),
    )
    yield Row("rms_norm bwd", lambda: rms_norm_bwd(dy, x, w, rstd), backward_of(rms, x, w))
    yield Row(
        "rms_norm fwd to fp8",
        lambda: rms_norm_fwd_fp8(x, w, EPS, ONE, E4M3),
        lambda: both(to_fp8(rms(x, w))),
    )


def activations(dtype: torch.dtype) -> Rows:
    x, dy = (randn(ROWS, COLS, dtype=dtype) for _ in range(2))
    bias = randn(COLS, dtype=dtype)
    wide = randn(ROWS, 2 * COLS, dtype=dtype)

    def glu(x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up

    def gelu(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return F.gelu(x + bias, approximate="tanh")

    yield Row("swiglu fwd", lambda: swiglu_fwd(wide), lambda: glu(wide))
    yield Row("swiglu bwd", lambda: swiglu_bwd(dy, wide), backward_of(glu, wide))
    yield Row(
        "swiglu fwd to fp8",
        lambda: swiglu_fwd_fp8(wide, None, ONE, E4M3),
        lambda: both(to_fp8(glu(wide))),
    )
    yield Row("bias_gelu fwd", lambda: bias_gelu_fwd(x, bias), lambda: gelu(x, bias))
    yield Row(
        "bias_gelu bwd",
        lambda: bias_gelu_bwd(dy, x, bias, with_dbias=True),
        backward_of(gelu, x, bias),
    )
    yield Row(
        "bias_gelu fwd to fp8",
        lambda: bias_gelu_fwd_fp8(x, bias, ONE, E4M3),
        lambda: both(to_fp8(gelu(x, bias))),
    )
    formulas = {
        "gelu": F.gelu,
        "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
        "relu": F.relu,
        "squared_relu": lambda x: F.relu(x).square(),
        "silu": F.silu,
    }
    for kind, formula in formulas.items():
        yield Row(f"{kind} fwd", lambda k=kind: activation_fwd(x, k), lambda f=formula: f(x))
        yield Row(f"{kind} bwd", lambda k=kind: activation_bwd(dy, x, k), backward_of(formula, x))
    yield Row(
        "silu fwd to fp8",
        lambda: activation_fwd_fp8(x, "silu", ONE, E4M3),
        lambda: both(to_fp8(F.silu(x))),
    )


def attention(dtype: torch.dtype) -> Rows:
    """Softmaxes of [2, 16, 512, 512], rope of [1024, 2, 32, 128]."""
    x = randn(2, 16, 512, 512, dtype=dtype)
    dy, y = torch.randn_like(x), torch.softmax(x, -1)
    mask = torch.rand(2, 1, 512, 512) < 0.3
    upper = torch.ones(512, 512, dtype=torch.bool).triu(1)

    def plain(x: torch.Tensor, hidden: torch.Tensor | None = None) -> torch.Tensor:
        x = 0.125 * x
        return torch.softmax(x if hidden is None else x.masked_fill(hidden, -1e4), -1)

    yield Row("scaled_softmax fwd", lambda: scaled_softmax_fwd(x, 0.125), lambda: plain(x))
    yield Row(
        "scaled_softmax fwd, mask",
        lambda: scaled_softmax_fwd(x, 0.125, mask),
        lambda: plain(x, mask),
    )
    yield Row(
        "scaled_softmax fwd, causal",
        lambda: scaled_softmax_fwd(x, 0.125, causal="upper_left"),
        lambda: plain(x, upper),
    )
    yield Row("scaled_softmax bwd", lambda: scaled_softmax_bwd(dy, y, 0.125), backward_of(plain, x))
    yield Row(
        "scaled_softmax bwd, causal",
        lambda: scaled_softmax_bwd(dy, y, 0.125, causal="upper_left"),
        backward_of(lambda x: plain(x, upper), x),
    )
    q, dq = (randn(1024, 2, 32, 128, dtype=dtype) for _ in range(2))
    freqs = torch.outer(torch.arange(1024.0), 1e4 ** -torch.arange(0.0, 1.0, 1 / 64)).repeat(1, 2)
    cos, sin = (t[:, None, None, :].to(dtype) for t in (freqs.cos(), freqs.sin()))

    def rotate(q: torch.Tensor) -> torch.Tensor:
        first, second = q.chunk(2, -1)
        return q * cos + torch.cat([-second, first], -1) * sin

    leaf = q.clone().requires_grad_()
    turned = rope(leaf, freqs)
    yield Row("rope fwd", lambda: rope(q, freqs), lambda: rotate(q))
    yield Row(
        "rope bwd",
        lambda: torch.autograd.grad(turned, leaf, dq, retain_graph=True),
        backward_of(rotate, q),
    )


def losses(dtype: torch.dtype) -> Rows:
    x, residual, dy = (randn(ROWS, COLS, dtype=dtype) for _ in range(3))
    bias = randn(COLS, dtype=dtype)

    def dropped(x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return residual + F.dropout(x + bias, 0.1, True)

    leaves = [t.clone().requires_grad_() for t in (x, bias, residual)]
    out = bias_dropout_add(*leaves, 0.1)
    yield Row(
        "bias_dropout_add fwd",
        lambda: bias_dropout_add(x, bias, residual, 0.1),
        lambda: dropped(x, bias, residual),
    )
    yield Row(
        "bias_dropout_add bwd",
        lambda: torch.autograd.grad(out, leaves, dy, retain_graph=True),
        backward_of(dropped, x, bias, residual),
    )
    logits, target = randn(256, 32000, dtype=dtype), torch.randint(32000, (256,))
    grad = torch.empty_like(logits)
    leaf = logits.clone().requires_grad_()
    yield Row(
        "cross_entropy fwd",
        lambda: cross_entropy_fwd(logits, target),
        lambda: F.cross_entropy(logits, target, reduction="none"),
    )
    yield Row(
        "cross_entropy fwd + bwd",
        lambda: cross_entropy_fwd(logits, target, grad=grad),
        lambda: torch.autograd.grad(F.cross_entropy(leaf, target, reduction="sum"), leaf),
    )


def lists(dtype: torch.dtype) -> Rows:
    """multi_tensor over 8 x [1024, 1024]."""
    xs, ys, p = ([randn(1024, 1024, dtype=dtype) for _ in range(8)] for _ in range(3))
    m, v = ([torch.rand(1024, 1024) for _ in range(8)] for _ in range(2))
    found, flag, inverse = torch.zeros(8), torch.zeros(1), torch.ones(1)
    codes, scales = [torch.empty_like(x, dtype=E4M3) for x in xs], [ONE] * 8
    numel, size = 8 << 20, xs[0].element_size()
    is_wide = dtype is torch.float32
    peer = [t.clone() for t in p], [t.clone() for t in m], [t.clone() for t in v]
    steps = [torch.ones(()) for _ in p]

    def foreach_axpby() -> None:
        torch._foreach_mul_(ys, 0.5)
        torch._foreach_add_(ys, xs, alpha=0.5)

    def fused_adamw() -> None:
        torch._fused_adamw_(
            peer[0], xs, peer[1], peer[2], [], steps, lr=1e-3, beta1=0.9, beta2=0.999,
            weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip

    def fused_sgd() -> None:
        torch._fused_sgd_(
            peer[0], xs, peer[1], weight_decay=0.1, momentum=0.9, lr=1e-3, dampening=0.0,
            nesterov=False, maximize=False, is_first_step=False,
        )  # fmt: skip

    def each(reference: Callable[..., Any], *tensors: list[torch.Tensor], **options: Any) -> Any:
        return [
            reference(*ts, lr=1e-3, weight_decay=0.1, **options)
            for ts in zip(*tensors, strict=True)
        ]

    decay: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1}
    yield Row(
        "multi_tensor amax",
        lambda: multi_tensor.amax(xs, out=found),
        lambda: torch._foreach_norm(xs, float("inf")),
    )
    yield Row(
        "multi_tensor l2norm",
        lambda: multi_tensor.l2norm(xs),
        lambda: torch.stack(torch._foreach_norm(xs)).norm(),
    )
    yield Row(
        "multi_tensor scale",
        lambda: multi_tensor.scale(xs, xs, 1.0, found_inf=flag),
        lambda: torch._amp_foreach_non_finite_check_and_unscale_(xs, flag, inverse),
    )
    yield Row("multi_tensor axpby", lambda: multi_tensor.axpby(xs, ys, ys, 0.5, 0.5), foreach_axpby)
    yield Row(
        "multi_tensor quantize",
        lambda: multi_tensor.quantize(xs, scales, outputs=codes),
        lambda: [to_fp8(x) for x in xs],
        numel * (size + 1),
    )
    yield Row(
        "multi_tensor adam",
        lambda: multi_tensor_optim.adam(p, xs, m, v, step=5, **decay),
        fused_adamw
        if is_wide
        else lambda: each(multi_tensor_optim.reference_adam, p, xs, m, v, step=5),
    )
    yield Row(
        "multi_tensor sgd",
        lambda: multi_tensor_optim.sgd(p, xs, m, momentum=0.9, **decay),
        fused_sgd
        if is_wide
        else lambda: each(multi_tensor_optim.reference_sgd, p, xs, m, momentum=0.9),
    )
    yield Row(
        "multi_tensor lamb",
        lambda: multi_tensor_optim.lamb(p, xs, m, v, step=5, **decay),
        lambda: each(multi_tensor_optim.reference_lamb, p, xs, m, v, step=5),
    )


OPS = (norms, activations, attention, losses, lists)
