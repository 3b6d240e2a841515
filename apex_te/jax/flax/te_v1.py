"""The modules of ``apex_te.jax.flax`` with the defaults of Transformer Engine 1.

``import apex_te.jax.flax.te_v1 as te_flax`` in place of ``apex_te.jax.flax`` is the whole switch.
Besides the defaults below, ``dtype`` is that of inputs and results while parameters are float32,
parameters are plain arrays whose logical axes are in the collection "params_axes", and a
``TransformerLayer`` refuses inputs of another width than ``hidden_size``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from . import attention, module, relative_position, transformer
from .dot_general import make_dot_general_cls as make_dot_general_cls
from .logical_axes import extend_logical_axis_rules as extend_logical_axis_rules
from .transformer import TransformerLayerType as TransformerLayerType

__all__ = [
    "DenseGeneral",
    "DotProductAttention",
    "LayerNorm",
    "LayerNormDenseGeneral",
    "LayerNormMLP",
    "MultiHeadAttention",
    "RelativePositionBiases",
    "TransformerEngineBase",
    "TransformerLayer",
    "TransformerLayerType",
    "extend_logical_axis_rules",
    "make_dot_general_cls",
]


class TransformerEngineBase(module.TransformerEngineBase):
    """``TransformerEngineBase`` as in Transformer Engine 1."""

    _is_v1: ClassVar[bool] = True


class DenseGeneral(module.DenseGeneral):
    """``DenseGeneral`` as in Transformer Engine 1."""

    _is_v1: ClassVar[bool] = True


class LayerNorm(module.LayerNorm):
    """``LayerNorm`` as in Transformer Engine 1."""

    _is_v1: ClassVar[bool] = True


class LayerNormDenseGeneral(module.LayerNormDenseGeneral):
    """``LayerNormDenseGeneral`` as in Transformer Engine 1."""

    _is_v1: ClassVar[bool] = True
    return_layernorm_output: bool = True
    transpose_batch_sequence: bool = True


class LayerNormMLP(module.LayerNormMLP):
    """``LayerNormMLP`` as in Transformer Engine 1."""

    _is_v1: ClassVar[bool] = True
    return_layernorm_output: bool = True
    activations: Sequence[str] = ("relu",)
    intermediate_dropout_rate: float = 0.1
    transpose_batch_sequence: bool = True


class DotProductAttention(attention.DotProductAttention):
    """``DotProductAttention`` as in Transformer Engine 1."""

    _is_v1: ClassVar[bool] = True
    transpose_batch_sequence: bool = True


class MultiHeadAttention(attention.MultiHeadAttention):
    """``MultiHeadAttention`` as in Transformer Engine 1."""

    _is_v1: ClassVar[bool] = True
    transpose_batch_sequence: bool = True


class RelativePositionBiases(relative_position.RelativePositionBiases):
    """``RelativePositionBiases`` as in Transformer Engine 1."""

    _is_v1: ClassVar[bool] = True


class TransformerLayer(transformer.TransformerLayer):
    """``TransformerLayer`` as in Transformer Engine 1."""

    _is_v1: ClassVar[bool] = True
    mlp_activations: Sequence[str] = ("relu",)
    intermediate_dropout: float = 0.1
