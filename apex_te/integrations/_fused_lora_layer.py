"""PEFT's LoRA layer with base and adapter computed together; imported only where PEFT is."""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.lora.layer import Linear as LoraLinear
from torch import nn

from ..module.linear import Linear

# Attributes of a module that has more to do in a call than its class's forward.
_HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "forward",
)  # fmt: skip


def is_fusable(module: nn.Module) -> bool:
    """Returns True if a module is exactly PEFT's LoRA layer, over an ``apex_te.Linear``."""
    if type(module) is not LoraLinear:
        return False
    base = module.base_layer
    return type(base) is Linear and not base.return_bias and base.parallel_mode is None


class FusedLoraLinear(LoraLinear):
    """PEFT's LoRA layer over an ``apex_te.Linear`` whose GEMM also adds the adapter's result."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Applies base and adapters to ``x`` like PEFT's layer; see ``fuse_lora``."""
        name = None if args or kwargs else self._one_adapter(x)
        if name is None:
            return super().forward(x, *args, **kwargs)
        dropout: Any = self.lora_dropout[name]
        drops = dropout.training and getattr(dropout, "p", 0.0) > 0
        base: Any = self.base_layer
        return base.forward_low_rank(
            x,
            self.lora_A[name].weight,
            self.lora_B[name].weight,
            self.scaling[name],
            dropout(x) if drops else None,
        )

    def _one_adapter(self, x: torch.Tensor) -> str | None:
        """Returns the name of the active adapter if the base's GEMM can add it, else None."""
        if torch.compiler.is_compiling() or self.disable_adapters or self.merged:
            return None
        names = [name for name in self.active_adapters if name in self.lora_A]
        if len(names) != 1 or names[0] in getattr(self, "lora_variant", ()):
            return None
        name, base = names[0], self.base_layer
        down, up = self.lora_A[name], self.lora_B[name]
        if type(base) is not Linear or type(down) is not nn.Linear or type(up) is not nn.Linear:
            return None
        if up.bias is not None:
            return None
        if type(self.scaling[name]) not in (float, int):
            return None
        if type(self.lora_dropout[name]) not in (nn.Identity, nn.Dropout):
            return None
        if nn.modules.module._has_any_global_hook():
            return None
        if any(vars(part).get(hooks) for part in (base, down, up) for hooks in _HOOKS):
            return None
        return name if self._dtypes_agree(x, down.weight, up.weight) else None

    def _dtypes_agree(self, x: torch.Tensor, down: torch.Tensor, up: torch.Tensor) -> bool:
        """Returns True if base and adapter compute in one dtype, on plain tensors."""
        plain = (torch.Tensor, nn.Parameter)
        if type(x) is not torch.Tensor or type(down) not in plain or type(up) not in plain:
            return False
        if torch.is_autocast_enabled(x.device.type):
            return True
        return x.dtype is down.dtype is up.dtype
