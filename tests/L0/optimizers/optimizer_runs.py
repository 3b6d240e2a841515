"""Runs of optimizers over the same parameters and gradients."""

import torch

SHAPES = [(5,), (0,), (300,), (), (2, 3, 4, 4), (40, 70)]


def make_params(device, dtype=torch.float32):
    """Parameters of many shapes, one of them channels_last."""
    generator = torch.Generator().manual_seed(1)
    values = [torch.randn(shape, generator=generator).to(dtype).to(device) for shape in SHAPES]
    values[4] = values[4].to(memory_format=torch.channels_last)
    return [value.requires_grad_() for value in values]


def copies(params, dtype=None):
    return [p.detach().clone().to(dtype or p.dtype).requires_grad_() for p in params]


def give_grads(runs, seed, leave_out=()):
    """The same new gradients, of the first run's dtype, to the parameters of each run."""
    generator = torch.Generator().manual_seed(seed)
    for i, params in enumerate(zip(*runs, strict=True)):
        first = params[0]
        grad = torch.randn(first.shape, generator=generator).to(first.dtype).to(first.device)
        for param in params:
            param.grad = None if i in leave_out else grad.to(param.dtype, copy=True)


def flat(tensors, dtype=None):
    parts = [t.detach().reshape(-1) for t in tensors]
    return torch.cat([p if dtype is None else p.to(dtype) for p in parts])


def steps(optimizer, params, count, first=0):
    """`count` steps; the third parameter has no gradient in every fourth."""
    for i in range(first, first + count):
        give_grads([params], i, leave_out=(2,) if i % 4 == 3 else ())
        optimizer.step()


def state_tensors(optimizer):
    """All state, in the order of the state dict; step counts, numbers or not, as float32."""
    found = []
    for _, values in sorted(optimizer.state_dict()["state"].items()):
        for name, value in sorted(values.items()):
            dtype = torch.float32 if name == "step" else None
            found.append(torch.as_tensor(value, dtype=dtype, device="cpu").clone())
    return found
