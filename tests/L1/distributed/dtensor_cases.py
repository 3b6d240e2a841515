"""Modules, the styles that split them, and steps of both for the tests of DTensor parameters."""

import copy

import torch
from schemes import chosen
from shards import gathered, rows
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import apex_te
from apex_te import fp8_autocast
from apex_te.distributed.dtensor.parallel_styles import (
    ColumnParallel,
    LayerParallel,
    Replicated,
    RowParallel,
    SequenceParallel,
)

HIDDEN, FFN, HEADS, TOKENS, BATCH = 64, 128, 4, 16, 2
RECIPES = {None: None, **chosen("delayed", "tensorwise")}
QUIET = {"hidden_dropout": 0.0, "attention_dropout": 0.0}


def _pair(own):
    """A norm, a column-parallel and a row-parallel layer."""
    column, row = ({"parallel_mode": mode, **own} if own else {} for mode in ("column", "row"))
    return nn.Sequential(
        apex_te.LayerNorm(HIDDEN, sequence_parallel=own.get("sequence_parallel", False)),
        apex_te.Linear(HIDDEN, FFN, **column),
        apex_te.Linear(FFN, HIDDEN, **row),
    )


class _Gated(nn.Module):
    """What LayerNormMLP is with a gated activation, of two layers and named parts."""

    def __init__(self, own):
        super().__init__()
        column, row = ({"parallel_mode": mode, **own} if own else {} for mode in ("column", "row"))
        self.first = apex_te.LayerNormLinear(
            HIDDEN, 2 * FFN, normalization="RMSNorm", parameters_split=("gate", "up"), **column
        )
        self.second = apex_te.Linear(FFN, HIDDEN, bias=False, **row)

    def forward(self, x):
        gate, up = self.first(x).chunk(2, -1)
        return self.second(nn.functional.silu(gate) * up)


def _inside(kind, *sizes, **options):
    """A module that is split inside."""

    def build(own):
        return kind(*sizes, **options, **({"set_parallel_mode": True, **own} if own else {}))

    return build


class _Cross(nn.Module):
    """Attention to the input itself, through the projections of cross attention."""

    def __init__(self, own):
        super().__init__()
        own = {"set_parallel_mode": True, **own} if own else {}
        self.inner = apex_te.MultiheadAttention(
            HIDDEN, HEADS, attention_dropout=0.0, attention_type="cross", **FLAT, **own
        )

    def forward(self, x):
        return self.inner(x, encoder_output=x)


FLAT = {"fuse_qkv_params": True, "qkv_weight_interleaved": False}
LLAMA = {
    "normalization": "RMSNorm", "num_gqa_groups": 2, "fuse_qkv_params": True, "bias": False,
    "activation": "swiglu",
}  # fmt: skip
MODULES = {
    "pair": _pair,
    "gated": _Gated,
    "mlp": _inside(apex_te.LayerNormMLP, HIDDEN, FFN, activation="gelu"),
    "attention": _inside(
        apex_te.MultiheadAttention, HIDDEN, HEADS, attention_dropout=0.0, qk_norm_type="RMSNorm"
    ),
    "flat": _inside(
        apex_te.MultiheadAttention, HIDDEN, HEADS, attention_dropout=0.0, num_gqa_groups=2,
        input_layernorm=True, softmax_type="learnable", **FLAT,
    ),
    "cross": _Cross,
    "geglu": _inside(apex_te.LayerNormMLP, HIDDEN, FFN, activation="geglu"),
    "layer": _inside(apex_te.TransformerLayer, HIDDEN, FFN, HEADS, **QUIET, **LLAMA),
    "block": lambda own: nn.Sequential(*(MODULES["mlp"](own) for _ in range(2))),
    "post-norm": _inside(
        apex_te.TransformerLayer, HIDDEN, FFN, HEADS, **QUIET, output_layernorm=True,
        apply_residual_connection_post_layernorm=True,
    ),
}  # fmt: skip


def _plan(name, sequence_parallel):
    options = {"sequence_parallel": sequence_parallel}
    if name == "pair":
        plan = {"1": ColumnParallel(**options), "2": RowParallel(**options)}
        return {"0": SequenceParallel() if sequence_parallel else Replicated(), **plan}
    if name == "block":
        return {"*": LayerParallel(**options)}
    if name == "cross":
        return {"inner": LayerParallel(**options)}
    if name == "gated":
        return {"first": ColumnParallel(**options), "second": RowParallel(**options)}
    return LayerParallel(**options)


def matrices_of(key):
    """Rows of the matrices that a parameter of "layer", "flat", "cross" or "geglu" holds."""
    rows = {"fc1": [FFN, FFN], "layernorm_qkv": [HIDDEN, HIDDEN // 2, HIDDEN // 2]}
    rows["key_value"] = [HIDDEN, HIDDEN]
    return next((found for part, found in rows.items() if part in key), None)


def computed_with(name, key, value):
    """A rank's part of a whole parameter as its module has it when made with ``tp_group``."""
    flat = "fc1" in key or name in ("flat", "cross")
    matrices = matrices_of(key) if name != "mlp" and flat else None
    if matrices is None or "layer_norm" in key:
        return value.to_local()
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    return torch.cat([m.chunk(ranks)[rank] for m in value.full_tensor().split(matrices)])


def whole_module(name, device="cpu", dtype=torch.float32):
    torch.manual_seed(3)
    whole = MODULES[name]({})
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return whole.to(device, dtype)


def tp_mesh(ranks=None, device="cpu"):
    ranks = distributed.get_world_size() if ranks is None else ranks
    return init_device_mesh(device, (ranks,), mesh_dim_names=("tp",))


def parallelized(whole, name, sequence_parallel, mesh):
    return parallelize_module(copy.deepcopy(whole), mesh, _plan(name, sequence_parallel))


def step(module, x, dy, recipe, optimizer=None):
    """Output and input gradient of one step."""
    x = x.clone().requires_grad_()
    module.zero_grad()
    with fp8_autocast(recipe is not None, recipe):
        y = module(x)
    y.backward(dy)
    if optimizer is not None:
        optimizer.step()
    return y.detach(), x.grad


def batches(steps, device="cpu", dtype=torch.float32):
    generator = torch.Generator().manual_seed(7)
    for _ in range(steps):
        x, dy = (torch.randn(TOKENS, BATCH, HIDDEN, generator=generator) for _ in range(2))
        yield x.to(device, dtype), dy.to(device, dtype)


def decibels(found, expected):
    error = (found.float() - expected.float()).square().mean()
    power = expected.float().square().mean().clamp(min=1e-2)  # a key's bias has no gradient
    return 10 * torch.log10(power / error).item() if error > 0 else 200.0


def against_one_rank(rank, name, sequence_parallel, recipe, steps, device="cpu"):
    """dB of outputs, gradients and updated weights against the whole module's."""
    dtype = torch.float32
    if device == "cuda":
        device, dtype = torch.device("cuda", rank), torch.bfloat16
    ranks, recipe = distributed.get_world_size(), RECIPES[recipe]
    whole = whole_module(name, device, dtype)
    part = parallelized(whole, name, sequence_parallel, tp_mesh(device=torch.device(device).type))
    kept = {key: parameter.shape for key, parameter in whole.named_parameters()}
    assert {key: parameter.shape for key, parameter in part.named_parameters()} == kept
    optimizers = [
        torch.optim.SGD(module.parameters(), lr=0.01, foreach=True) for module in (whole, part)
    ]
    found = {}
    for x, dy in batches(steps, device, dtype):
        expected = step(whole, x, dy, recipe, optimizers[0])
        if sequence_parallel:
            x, dy = (rows(t, rank, ranks).contiguous() for t in (x, dy))
        actual = step(part, x, dy, recipe, optimizers[1])
        for what, a, b in zip(("output", "input"), actual, expected, strict=True):
            found[what] = decibels(gathered(a) if sequence_parallel else a, b)
    for key, parameter in part.named_parameters():
        whole_parameter = whole.get_parameter(key)
        assert parameter.grad.placements == parameter.placements
        value, grad = parameter.detach().full_tensor(), parameter.grad.full_tensor()
        found[f"{key} gradient"] = decibels(grad, whole_parameter.grad)
        found[key] = decibels(value, whole_parameter.detach())
    return found
