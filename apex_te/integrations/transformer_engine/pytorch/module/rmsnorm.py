"""Transformer Engine's RMSNorm: apex_te's norm, which is no ``torch.nn.RMSNorm`` here."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .....module.rms_norm import RMSNormLayer
from ..._device import default_device
from ..._names import named
from .base import TransformerEngineBaseModule

__all__ = ["RMSNorm"]


@named("transformer_engine.pytorch.module.rmsnorm")
class RMSNorm(TransformerEngineBaseModule, RMSNormLayer):
    """Normalisation of the last dimension(s), as ``apex_te.RMSNorm`` does it.

    Args:
        normalized_shape, eps, params_dtype, zero_centered_gamma, hidden_size, dtype: as in
            ``apex_te.RMSNorm``.
        sequence_parallel: sets the attribute of that name on the parameters; None stands for False.
        device: where the parameters live; None takes PyTorch's default device if one is set, else
            the current GPU, else the CPU.

    Raises:
        TypeError, ValueError: as ``apex_te.RMSNorm`` raises them.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int] | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        *,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            normalized_shape,
            eps,
            hidden_size=hidden_size,
            sequence_parallel=bool(sequence_parallel),
            params_dtype=params_dtype,
            zero_centered_gamma=zero_centered_gamma,
            device=default_device(device),
            dtype=dtype,
        )
