"""Shards of a whole module on one rank, and the comparison of what they compute with the whole."""

import torch

import apex_te
from apex_te import fp8_autocast

IN, OUT, FFN, BATCH, TOKENS = 32, 48, 64, 2, 16
STEPS = 4

MODULES = {
    "column": (apex_te.Linear, (IN, OUT), {"parallel_mode": "column"}),
    "row": (apex_te.Linear, (IN, OUT), {"parallel_mode": "Row"}),
    "norm": (
        apex_te.LayerNormLinear,
        (IN, OUT),
        {"parallel_mode": "Column", "normalization": "RMSNorm"},
    ),
    "mlp": (apex_te.LayerNormMLP, (IN, FFN), {"set_parallel_mode": True}),
    "gated": (
        apex_te.LayerNormMLP,
        (IN, FFN),
        {"set_parallel_mode": True, "activation": "swiglu", "bias": False},
    ),
}


def part_of(name, full, rank, ranks, gated):
    """This rank's part of a whole parameter, by what the shard's says of itself."""

    def part(parameter):
        if not getattr(parameter, "tensor_model_parallel", False):
            return full
        dim = parameter.partition_dim
        if gated and name.startswith("fc1"):  # gate and up, each split
            halves = [half.chunk(ranks, dim)[rank] for half in full.chunk(2, dim)]
            return torch.cat(halves, dim)
        return full.chunk(ranks, dim)[rank]

    return part


def build(name, device, dtype, sequence_parallel, group=None, **more):
    """The whole module, and this rank's shard of it with the same values."""
    kind, sizes, options = MODULES[name]
    options = {**options, **more}
    torch.manual_seed(3)
    shared = {"params_dtype": dtype, "device": device}
    modes = ("parallel_mode", "set_parallel_mode")
    whole = kind(*sizes, **shared, **{k: v for k, v in options.items() if k not in modes})
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    group = torch.distributed.group.WORLD if group is None else group
    shard = kind(*sizes, **shared, **options, tp_group=group, sequence_parallel=sequence_parallel)
    rank, ranks = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    gated = options.get("activation") == "swiglu"
    with torch.no_grad():
        for key, parameter in shard.named_parameters():
            full = whole.get_parameter(key)
            parameter.copy_(part_of(key, full, rank, ranks, gated)(parameter))
    return whole, shard


def rows(x, rank, ranks):
    """This rank's rows (dimension 0)."""
    return x.chunk(ranks, 0)[rank]


def features(x, rank, ranks):
    return x.chunk(ranks, -1)[rank]


def gathered(x, dim=0):
    """The parts of all ranks, side by side."""
    x = x.contiguous()
    parts = [torch.empty_like(x) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(parts, x)
    return torch.cat(parts, dim)


def summed(x):
    x = x.clone()
    torch.distributed.all_reduce(x)
    return x


def step(module, x, dy, recipe, **options):
    """Output, input gradient and parameter gradients of one step."""
    x = x.clone().requires_grad_()
    module.zero_grad()
    with fp8_autocast(recipe is not None, recipe):
        y = module(x, **options)
    y.backward(dy)
    return y.detach(), x.grad, {k: p.grad.clone() for k, p in module.named_parameters()}


def compare(name, sequence_parallel, recipe, device, dtype, close, steps=STEPS, **more):
    """Runs whole and shard side by side; ``close(what, found, expected)`` judges the last step."""
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    whole, shard = build(name, device, dtype, sequence_parallel, **more)
    column_only = name in ("column", "norm")
    generator = torch.Generator().manual_seed(7)
    for _ in range(steps):
        x = torch.randn(TOKENS, BATCH, IN, generator=generator).to(device, dtype)
        y, dx, grads = None, None, None
        dy = torch.randn(TOKENS, BATCH, whole_features(whole), generator=generator)
        dy = dy.to(device, dtype)
        y, dx, grads = step(whole, x, dy, recipe)
        own_x, own_dy = x, dy
        if name == "row":
            own_x = features(x, rank, ranks)
        elif sequence_parallel:
            own_x = rows(x, rank, ranks)
        if column_only:
            own_dy = features(dy, rank, ranks)
        elif sequence_parallel:
            own_dy = rows(dy, rank, ranks)
        found_y, found_dx, found = step(shard, own_x.contiguous(), own_dy.contiguous(), recipe)
    if column_only:
        found_y = gathered(found_y, -1)
    elif sequence_parallel:
        found_y = gathered(found_y)
    close("output", found_y, y)
    if name == "row":
        found_dx = gathered(found_dx, -1)
    elif sequence_parallel:
        found_dx = gathered(found_dx)
    close("input", found_dx, dx)
    gated = MODULES[name][2].get("activation") == "swiglu"
    for key, parameter in shard.named_parameters():
        grad = found[key]
        if getattr(parameter, "sequence_parallel", False):
            grad = summed(grad)  # what a trainer does with these
        close(key, grad, part_of(key, grads[key], rank, ranks, gated)(parameter))
    return whole, shard


def whole_features(module):
    return module.hidden_size if hasattr(module, "hidden_size") else module.out_features


def decibels(found, expected):
    """Signal to noise."""
    found, expected = found.double(), expected.double()
    error = (found - expected).square().mean()
    return 300.0 if error == 0 else (10 * torch.log10(expected.square().mean() / error)).item()
