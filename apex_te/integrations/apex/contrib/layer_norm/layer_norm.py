"""``FastLayerNorm``: layer norm of any hidden size."""

from __future__ import annotations

from ...normalization.fused_layer_norm import FusedLayerNorm


class FastLayerNorm(FusedLayerNorm):
    """Layer norm of a hidden size; its parameters are ``weight`` and ``bias``.

    It is ``FusedLayerNorm`` of apex's ``normalization``, whose forward it has.

    Args:
        hidden_size: size of the last dimension; any size.
        eps: added to the variance.
        memory_efficient: save the output instead of the input.

    Source: apex.contrib.layer_norm.
    """

    def __init__(self, hidden_size: int, eps: float = 1e-5, memory_efficient: bool = False) -> None:
        super().__init__(hidden_size, eps, True, memory_efficient)
