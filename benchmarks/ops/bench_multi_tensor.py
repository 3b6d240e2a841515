"""multi_tensor: reductions, maps and optimizer steps over lists, against torch's foreach and fused.

Bytes of the floor for one element of a list of bf16 tensors: amax and l2norm 2; scale 4; quantize
3; axpby 6; adam with float32 moments and master weights 28 (read gradient 2, moments 8, master 4;
write parameter 2, moments 8, master 4), 30 if it also casts to both FP8 copies; sgd with momentum
and master 20; lamb reads moments and master twice: 40. torch's fused optimizers move the same bytes
with float32 parameters and gradients. Lists are prepared ones; over 1000 small tensors the host's
part is what is timed.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import harness
import torch
from torch.optim.adagrad import adagrad as foreach_adagrad

from apex_te.ops import multi_tensor as op
from apex_te.ops import multi_tensor_optim as optim
from apex_te.ops.block_quantize import block_quantize
from apex_te.ops.cast_transpose import cast_transpose
from apex_te.runtime import tensor_list
from apex_te.runtime.fp8_copies import Casts

Lists = tuple[list[torch.Tensor], ...]
Functions = dict[str, tuple[int, Any, dict[str, Any]]]  # bytes an element, call, peers
DECAY = {"lr": 1e-3, "weight_decay": 0.1}


def random_list(count: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.randn(shape, device="cuda").to(dtype) for _ in range(count)]


def optimizer_lists(count: int, shape: tuple[int, ...], dtype: torch.dtype) -> Lists:
    """Parameters, gradients, exp_avg, exp_avg_sq, master weights."""
    return (
        random_list(count, shape, dtype),
        random_list(count, shape, dtype),
        random_list(count, shape, torch.float32),
        [t.abs_() for t in random_list(count, shape, torch.float32)],
        random_list(count, shape, torch.float32) if dtype is not torch.float32 else [],
    )


def maps(xs: list[torch.Tensor]) -> Functions:
    outs = [torch.empty_like(x) for x in xs]
    found, flag = torch.zeros(len(xs), device="cuda"), torch.zeros(1, device="cuda")
    codes = [torch.empty_like(x, dtype=torch.float8_e4m3fn) for x in xs]
    scales, amaxes, inverses = ([torch.ones(1, device="cuda") for _ in xs] for _ in range(3))
    x, out, q, scale, top, inverse = map(tensor_list, (xs, outs, codes, scales, amaxes, inverses))

    def torch_total() -> None:
        torch.linalg.vector_norm(torch.stack(torch._foreach_norm(xs)))

    def torch_axpby() -> None:
        torch._foreach_mul_(outs, 0.5)
        torch._foreach_add_(outs, xs, alpha=0.5)

    inf, norms = partial(torch._foreach_norm, xs, float("inf")), {"foreach": torch_total}
    quantize = partial(op.quantize, x, scale, amaxes=top, scale_invs=inverse, outputs=q)
    twice = {"foreach": partial(torch._foreach_mul_, xs, 1.0)}
    return {
        "amax": (2, partial(op.amax, x, out=found), {"foreach": inf}),
        "l2norm": (2, partial(op.l2norm, x, per_tensor=True), norms),
        "scale": (4, partial(op.scale, x, x, 1.0, found_inf=flag), twice),
        "axpby": (6, partial(op.axpby, x, out, out, 0.5, 0.5), {"foreach": torch_axpby}),
        "quantize": (3, quantize, {}),
    }


def torch_adamw(p: Any, g: Any, m: Any, v: Any) -> partial[None]:
    """torch's fused step of lists, as ``torch_sgd`` is."""
    steps = [torch.ones((), device=each.device) for each in p]
    adamw = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "amsgrad": False, "maximize": False}
    return partial(torch._fused_adamw_, p, g, m, v, [], steps, **DECAY, **adamw)


def torch_sgd(p: Any, g: Any, m: Any) -> partial[None]:
    nesterov = {"dampening": 0.0, "nesterov": False, "maximize": False, "is_first_step": False}
    return partial(torch._fused_sgd_, p, g, m, momentum=0.9, **DECAY, **nesterov)


def optimizers(count: int, shape: tuple[int, ...]) -> Functions:
    p, g, m, v, masters = optimizer_lists(count, shape, torch.bfloat16)
    wide_p, wide_g, wide_m, wide_v, _ = optimizer_lists(count, shape, torch.float32)
    fused_adamw = torch_adamw(wide_p, wide_g, wide_m, wide_v)
    fused_sgd = torch_sgd(wide_p, wide_g, wide_m)
    low = [tensor_list(tensors) for tensors in (p, g, m, v)]
    wide = [tensor_list(tensors) for tensors in (wide_p, wide_g, wide_m, wide_v)]
    options = {**DECAY, "masters": tensor_list(masters)}
    rest = [torch.zeros_like(t, dtype=torch.int16) for t in p]
    sgd = partial(optim.sgd, *low[:3], momentum=0.9, **options)
    return {
        "adam": (28, partial(optim.adam, *low, step=5, **options), {"fused fp32": fused_adamw}),
        "adam fp32": (28, partial(optim.adam, *wide, step=5, **DECAY), {"fused": fused_adamw}),
        "sgd": (20, sgd, {"fused fp32": fused_sgd}),
        "lamb": (40, partial(optim.lamb, *low, step=5, **options), {}),
        **of_one_moment(wide_p, wide_g, wide_m),
        "adam halves": (26, partial(optim.adam, *low, step=5, **DECAY, masters=rest), {}),
    }


def of_one_moment(p: list[torch.Tensor], g: list[torch.Tensor], m: list[torch.Tensor]) -> Functions:
    """Steps of float32 parameters with one moment; LARS and NovoGrad without the norms."""
    sums = [t.abs() for t in m]
    counts = [torch.ones(()) for _ in p]  # on the CPU, where torch keeps them, so that it captures

    adagrad = {"lr_decay": 0.0, "eps": 1e-10, "maximize": False, "foreach": True}
    foreach = partial(foreach_adagrad, p, g, sums, counts, **DECAY, **adagrad)
    norms = torch.ones(len(p), device="cuda")
    lists = [tensor_list(tensors) for tensors in (p, g, m)]
    ours = partial(optim.adagrad, *lists[:2], tensor_list(sums), **DECAY)
    return {
        "adagrad": (20, ours, {"foreach": foreach}),
        "novograd": (20, partial(optim.novograd, *lists, norms, step=5, **DECAY), {}),
        "lars": (20, partial(optim.lars, *lists, norms, norms, momentum=0.9, **DECAY), {}),
    }


def casting(count: int, shape: tuple[int, int]) -> Functions:
    """adam that casts what it updates, against adam and then one cast of each parameter."""
    p, g, m, v, masters = optimizer_lists(count, shape, torch.bfloat16)
    lists: tuple[Any, ...] = tuple(map(tensor_list, (p, g, m, v)))
    prepared = tensor_list(masters)
    options: dict[str, Any] = {
        "step": 5, **DECAY, "betas": (0.9, 0.999), "eps": 1e-8, "adamw": True,
        "bias_correction": True, "masters": prepared, "inv_scale": None, "found_inf": None,
        "unscale_grads": False,
    }  # fmt: skip
    one = [torch.ones(1, device="cuda") for _ in range(3)]
    scaled, blocks, made = [], [], []
    for x in p:
        out: Any = block_quantize(x, torch.float8_e4m3fn, block_rows=128)
        made.append(out)
        copies = out.rowwise, out.columnwise
        scaled.append(Casts(*copies, one[0], None, one[1], one[2], None))
        inverses = out.rowwise_scale_inv, out.columnwise_scale_inv
        blocks.append(Casts(*copies, *inverses, None, None, (0.0, 1)))

    adam = partial(optim.adam, *lists, step=5, **DECAY, masters=prepared)

    def then_cast() -> None:
        adam()
        for x, out in zip(p, made, strict=True):
            copies = {"out_rowwise": out.rowwise, "out_columnwise": out.columnwise}
            cast_transpose(x, one[1], torch.float8_e4m3fn, amax=one[2], **copies)

    def then_blocks() -> None:
        adam()
        for x, out in zip(p, made, strict=True):
            block_quantize(x, torch.float8_e4m3fn, block_rows=128, out=out)

    step: Any = partial(optim.adam_with_casts, *lists, **options)
    return {
        "adam and casts": (30, partial(step, casts=scaled), {"adam, casts": then_cast}),
        "adam and block casts": (30, partial(step, casts=blocks), {"adam, casts": then_blocks}),
    }


def unscale(count: int, shape: tuple[int, ...], name: str) -> dict[str, Any]:
    """``scale`` in place of float32 gradients, against what torch's GradScaler calls."""
    xs = random_list(count, shape, torch.float32)
    prepared = tensor_list(xs)
    flag, one = torch.zeros(1, device="cuda"), torch.ones(1, device="cuda")
    return harness.measure(
        "scale fp32", name, 8 * count * xs[0].numel(),
        lambda: op.scale(prepared, prepared, one, found_inf=flag),
        {"unscale": lambda: torch._amp_foreach_non_finite_check_and_unscale_(xs, flag, one)},
    )  # fmt: skip


@harness.case("multi_tensor")
def rows() -> Iterator[harness.Row]:
    for count, shape in ((32, (4096, 4096)), (1000, (16384,))):
        name = f"{count}x[{','.join(map(str, shape))}]"
        numel = count * torch.Size(shape).numel()
        functions = maps(random_list(count, shape, torch.bfloat16))
        for function, (num_bytes, call, peers) in functions.items():
            yield harness.measure(function, name, numel * num_bytes, call, peers)
        functions = optimizers(count, shape) | (casting(count, shape) if len(shape) == 2 else {})
        for function, (num_bytes, call, peers) in functions.items():
            yield harness.measure(function, name, numel * num_bytes, call, peers, repeats=15)
        yield unscale(count, shape, name)
    small = maps([harness.normal(64, 4096)]) | optimizers(1, (64, 4096))
    for function, (_, call, peers) in small.items():
        row = harness.in_graph(function, call, "64x4096 graph")
        yield row | {f"{name} us": harness.graph_us(peer) for name, peer in peers.items()}
    lists = optimizer_lists(1000, (64,), torch.bfloat16)
    for kind, used in (("list", lists), ("prepared", tuple(map(tensor_list, lists)))):
        adam = partial(optim.adam, *used[:4], step=1, lr=1e-3, masters=used[4])
        for function, call in (("adam", adam), ("l2norm", partial(op.l2norm, used[0]))):
            shape = f"1000x[64] {kind}"
            yield {"function": function, "shape": shape, "host us": harness.host_us(call, 100)}
