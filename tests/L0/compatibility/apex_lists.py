"""Lists of tensors, apex's formulas of its optimizer steps, and the way apex's Python calls."""

import torch
from checks import assert_as_good_as_torch

SIZES = [0, 5, 33, 2049, 0, 300, 16400, 7, 0]
CHUNK = 2048 * 32  # what apex's MultiTensorApply is made with


def apply(op, noop, lists, *args):
    """apex's MultiTensorApply: the chunk size first, then the flag, the lists and the rest."""
    return op(CHUNK, noop, lists, *args)


def flag(device, value=0):
    return torch.tensor([value], dtype=torch.int32, device=device)


def one(value, device, dtype=torch.float32):
    return torch.tensor([value], dtype=dtype, device=device)


def draw(device, dtype, factor=1.0, positive=False):
    made = [torch.randn(n) * factor for n in SIZES]
    return [(t.abs() if positive else t).to(dtype).to(device) for t in made]


def clones(*lists):
    return [[t.clone() for t in tensors] for tensors in lists]


def same_bits(lists, others):
    """Whether lists of lists hold the same bits; NaN equals itself."""
    return all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for first, second in zip(lists, others, strict=True)
        for a, b in zip(first, second, strict=True)
    )


def check_step(formula, before, after, outputs):
    """What stands in ``after`` against ``formula`` of what stood in ``before``.

    ``formula`` takes the tensors of one position, gives new values for the positions ``outputs``
    of the lists, and is computed in float64 and in float32; the latter is rounded as stored.
    """
    wide, narrow = (
        [formula(*(t.detach().cpu().to(dtype) for t in row)) for row in zip(*before, strict=True)]
        for dtype in (torch.float64, torch.float32)
    )
    for k, output in enumerate(outputs):
        actual = torch.cat([t.cpu() for t in after[output]])
        exact = torch.cat([row[k] for row in wide])
        same = torch.cat([row[k] for row in narrow]).to(actual.dtype)
        assert_as_good_as_torch(actual, exact, same)


def adam(g, p, m, v, *, lr, betas, eps, step, mode, correction, decay, factor=1.0):
    """(p, m, v) after apex's multi_tensor_adam."""
    b1, b2 = betas
    c1, c2 = (1 - b1**step, 1 - b2**step) if correction else (1.0, 1.0)
    g = g * factor
    if mode == 0:
        g = g + decay * p
    m = b1 * m + (1 - b1) * g
    v = b2 * v + (1 - b2) * g * g
    update = (m / c1) / ((v / c2).sqrt() + eps)
    if mode == 1:
        update = update + decay * p
    return p - lr * update, m, v


def sgd(g, p, m, *, wd, momentum, dampening, lr, nesterov, first_run, after, scale):
    """(p, m) after apex's multi_tensor_sgd."""
    g = g * scale
    if wd and not after:
        g = g + wd * p
    if momentum:
        m = g if first_run else m * momentum + (1 - dampening) * g
        g = g + momentum * m if nesterov else m
    if wd and after:
        g = g + wd * p
    return p - lr * g, m


def lamb_update(g, p, m, v, *, betas, eps, step, mode, correction, decay, averaging, factor):
    """(update, m, v) of apex's first LAMB stage; the gradient is multiplied with ``factor``."""
    b1, b2 = betas
    c1, c2 = (1 - b1**step, 1 - b2**step) if correction else (1.0, 1.0)
    g = g * factor
    if mode == 0:
        g = g + decay * p
    m = m * b1 + (1 - b1 if averaging else 1.0) * g
    v = v * b2 + (1 - b2) * g * g
    update = (m / c1) / ((v / c2).sqrt() + eps)
    return (update + decay * p if mode == 1 else update), m, v


def lamb(g, p, m, v, *, lr, nvlamb, **options):
    """(p, m, v) after apex's multi_tensor_lamb."""
    update, m, v = lamb_update(g, p, m, v, **options)
    sizes = p.norm(), update.norm()
    if (nvlamb or options["decay"]) and sizes[0] and sizes[1]:
        lr = lr * sizes[0] / sizes[1]
    return p - lr * update, m, v


def clip(norm, max_norm):
    return max_norm / norm if norm > max_norm else 1.0


def global_norm(tensors):
    return torch.linalg.vector_norm(torch.cat([t.double().cpu() for t in tensors])).item()
