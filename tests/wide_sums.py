"""torch's own products and sums of float32 without a trace of their order."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
ADDED = {aten.addmm.default: aten.mm.default, aten.baddbmm.default: aten.bmm.default}
WIDE = {*ADDED, *ADDED.values(), aten.sum.default, aten.sum.dim_IntList}


class WideSums(TorchDispatchMode):
    """Makes products and sums of float32 in float64 and rounds each once to float32.

    A product of two float32 is exact in float64 and a sum of some thousand of them is, up to 2^-42
    or so of their magnitudes: in whichever order and batches they are added, the rounded result is
    the same, unless it lies that close to halfway between two float32.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        tensors = [t for t in args if isinstance(t, torch.Tensor)]
        is_plain = any(t.dtype is not torch.float32 for t in tensors)
        if is_plain or func not in WIDE or kwargs.get("dtype") not in (None, torch.float32):
            return func(*args, **kwargs)
        kwargs.pop("dtype", None)
        if func in ADDED:
            # The rounding before the addition, as where a batch of them is made of two ops.
            product = ADDED[func](*(t.double() for t in args[1:])).float()
            return kwargs.get("beta", 1) * args[0] + kwargs.get("alpha", 1) * product
        wide = [t.double() if isinstance(t, torch.Tensor) else t for t in args]
        return func(*wide, **kwargs).float()
