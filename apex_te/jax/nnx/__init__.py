"""Modules of ``flax.nnx``, whose FP8 state is updated by ``nnx.value_and_grad``."""

from .module import DotGeneral as DotGeneral
from .module import DotProductAttention as DotProductAttention
from .module import LayerNorm as LayerNorm
from .module import LayerNormLinear as LayerNormLinear
from .module import LayerNormMLP as LayerNormMLP
from .module import Linear as Linear
from .module import MoEBlock as MoEBlock
from .module import MultiHeadAttention as MultiHeadAttention
from .module import TransformerLayer as TransformerLayer
from .module import TransformerLayerType as TransformerLayerType
from .state import FP8State as FP8State
from .state import grad as grad
from .state import use_refs as use_refs
from .state import value_and_grad as value_and_grad

__all__ = [
    "DotGeneral", "DotProductAttention", "FP8State", "LayerNorm", "LayerNormLinear",
    "LayerNormMLP", "Linear", "MoEBlock", "MultiHeadAttention", "TransformerLayer",
    "TransformerLayerType", "grad", "use_refs", "value_and_grad",
]  # fmt: skip
