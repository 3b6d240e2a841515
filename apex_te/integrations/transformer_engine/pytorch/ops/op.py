"""Base classes of Transformer Engine's operations, which exist for annotations only."""

import torch

from ..._names import not_served

__all__ = ["BasicOperation", "FusedOperation", "FusibleOperation", "OperationContext"]

_MODULE = "transformer_engine.pytorch.ops.op"
_REASON = "apex_te fuses inside its modules, such as LayerNormLinear and LayerNormMLP"

FusibleOperation = not_served(f"{_MODULE}.FusibleOperation", _REASON, torch.nn.Module)
BasicOperation = not_served(f"{_MODULE}.BasicOperation", _REASON, FusibleOperation)
FusedOperation = not_served(f"{_MODULE}.FusedOperation", _REASON, FusibleOperation)
OperationContext = not_served(f"{_MODULE}.OperationContext", _REASON)
