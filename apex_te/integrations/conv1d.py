"""``Conv1DLinear``, Hugging Face's Conv1D computed in FP8 inside ``fp8_autocast``."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..module.linear import LinearLayer


class Conv1DLinear(LinearLayer):
    """Hugging Face's Conv1D in FP8: ``y = x @ weight + bias`` with ``weight`` ``[in, out]``.

    In FP8 each call copies ``weight.t()`` to contiguous memory; ``from_torch(fuse=True)`` avoids
    the copy by storing the weight transposed. Converted layers have a subclass of this class and of
    Conv1D, so that libraries such as PEFT know the order of the weight's dimensions.
    """

    weight: nn.Parameter

    def forward(  # type: ignore[override]
        self, inp: torch.Tensor, is_first_microbatch: bool | None = None
    ) -> Any:
        """Applies the layer as ``Linear.forward`` does, with the weight transposed."""
        return super().forward(inp, self.weight.t(), None, is_first_microbatch)

    # Conv1D's own __repr__ names its two sizes only.
    __repr__ = nn.Module.__repr__

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Returns instructions for pickle that derive the layer's class from that of Conv1D."""
        kind = type(self)
        if kind is Conv1DLinear:
            return super().__reduce_ex__(protocol)
        base = kind.__mro__[kind.__mro__.index(nn.Module) - 1]
        return _new, (base,), self.__getstate__()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if type(self) is Conv1DLinear:  # pickled by a release that made no subclass of Conv1D
            try:
                from transformers.pytorch_utils import Conv1D
            except ImportError:
                return
            self.__class__ = conv1d_linear(Conv1D)


_CLASSES: dict[type, type[Conv1DLinear]] = {}


def conv1d_linear(base: type[nn.Module]) -> type[Conv1DLinear]:
    """Returns the subclass of ``Conv1DLinear`` and ``base``, one for each ``base``."""
    if base not in _CLASSES:
        namespace = {"__module__": __name__, "__doc__": Conv1DLinear.__doc__}
        _CLASSES[base] = type("Conv1DLinear", (Conv1DLinear, base), namespace)
    return _CLASSES[base]


def _new(base: type[nn.Module]) -> Conv1DLinear:
    """Returns an empty layer, for pickle to fill."""
    kind = conv1d_linear(base)
    return kind.__new__(kind)
