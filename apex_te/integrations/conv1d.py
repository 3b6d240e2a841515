"""Conv1DLinear: Hugging Face's Conv1D that computes in FP8 inside ``fp8_autocast``."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..module.linear import LinearLayer

__all__ = ["Conv1DLinear", "conv1d_linear"]


class Conv1DLinear(LinearLayer):
    """Hugging Face's Conv1D in FP8: ``y = x @ weight + bias`` with ``weight`` ``[in, out]``.

    The layer computes with the transposed view of that Parameter, so that keys, shapes and
    gradients stay as they were. FP8 packs the view anew on each call, which costs one more pass
    over the weight than ``Linear``; ``from_torch(fuse=True)`` stores the weight transposed instead.

    Layers that ``from_torch`` makes are Conv1D, too, and no ``torch.nn.Linear``: libraries that
    read or change a weight (PEFT's merging) tell by that class which dimension is which.
    """

    weight: nn.Parameter

    def forward(  # type: ignore[override]
        self, inp: torch.Tensor, is_first_microbatch: bool | None = None
    ) -> Any:
        """Applies the layer as ``Linear.forward`` does."""
        return super().forward(inp, self.weight.t(), None, is_first_microbatch)

    # Conv1D's own names its two sizes only.
    __repr__ = nn.Module.__repr__

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Names the Conv1D class, from which unpickling derives this layer's class again."""
        kind = type(self)
        if kind is Conv1DLinear:
            return super().__reduce_ex__(protocol)
        base = kind.__mro__[kind.__mro__.index(nn.Module) - 1]
        return _new, (base,), self.__getstate__()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if type(self) is Conv1DLinear:  # a pickle from when this was the layer's whole class
            try:
                from transformers.pytorch_utils import Conv1D
            except ImportError:
                return
            self.__class__ = conv1d_linear(Conv1D)


_CLASSES: dict[type, type[Conv1DLinear]] = {}


def conv1d_linear(base: type[nn.Module]) -> type[Conv1DLinear]:
    """Returns the class that is both ``Conv1DLinear`` and ``base``, the Conv1D of transformers."""
    if base not in _CLASSES:
        namespace = {"__module__": __name__, "__doc__": Conv1DLinear.__doc__}
        _CLASSES[base] = type("Conv1DLinear", (Conv1DLinear, base), namespace)
    return _CLASSES[base]


def _new(base: type[nn.Module]) -> Conv1DLinear:
    kind = conv1d_linear(base)
    return kind.__new__(kind)
