"""Shared expert of ``MoELayer``: a dense MLP of all tokens, with an optional gate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from ._core.arguments import fill, materialize
from ._core.fused_casts import activate, is_gated
from ._core.parallel import CompositeModule
from .linear import Linear


class SharedExpert(CompositeModule):
    """``act(x @ fc1.T) @ fc2.T``, with ``gate`` times ``sigmoid(x @ gate_weight.T)``.

    ``activation`` is in the form of ``_core.fused_casts``; ``shared`` are options of both linear
    layers, ``inits`` their initialisations. The gate is not in FP8.
    """

    gate_weight: torch.nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        activation: Any,
        gate: bool,
        inits: tuple[Callable[[torch.Tensor], Any] | None, ...],
        dtype: torch.dtype,
        device: Any,
        name: str,
        **shared: Any,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.init_method = inits[0]
        inner = ffn_hidden_size * (2 if is_gated(activation) else 1)
        shared |= {"params_dtype": dtype, "device": device}
        self.fc1 = Linear(hidden_size, inner, init_method=inits[0], name=f"{name}.fc1", **shared)
        self.fc2 = Linear(
            ffn_hidden_size, hidden_size, init_method=inits[1], name=f"{name}.fc2", **shared
        )
        weight = None
        if gate:
            weight = torch.nn.Parameter(torch.empty(1, hidden_size, dtype=dtype, device=device))
        self.register_parameter("gate_weight", weight)
        if weight is not None and not weight.is_meta:
            fill(weight, self.init_method)

    def reset_parameters(self) -> None:
        """Sets the parameters to new initial values; see ``Linear.reset_parameters``."""
        materialize(self)
        super().reset_parameters()
        fill(self.gate_weight, self.init_method)

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None) -> torch.Tensor:
        """Returns the expert's result for ``x`` [tokens, hidden_size], in the same shape."""
        hidden = self.fc1(x, is_first_microbatch=is_first_microbatch)
        out: torch.Tensor = self.fc2(
            activate(self.activation, hidden), is_first_microbatch=is_first_microbatch
        )
        if self.gate_weight is None:
            return out
        return out * torch.sigmoid(functional.linear(x, self.gate_weight)).to(out.dtype)

    def backward_dw(self) -> None:
        """Computes delayed weight gradients; see ``Linear.backward_dw``."""
        self._call_children("backward_dw")
