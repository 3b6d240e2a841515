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
    "DenseGeneral", "DotProductAttention", "LayerNorm", "LayerNormDenseGeneral", "LayerNormMLP",
    "MultiHeadAttention", "RelativePositionBiases", "TransformerEngineBase", "TransformerLayer",
    "TransformerLayerType", "extend_logical_axis_rules", "make_dot_general_cls",
]  # fmt: skip


class TransformerEngineBase(module.TransformerEngineBase):
    """Base of the modules with the parameters and dtypes of Transformer Engine 1."""

    _is_v1: ClassVar[bool] = True


class DenseGeneral(module.DenseGeneral, TransformerEngineBase):
    """``apex_te.jax.flax.DenseGeneral`` with float32 parameters and output in ``dtype``."""


class LayerNorm(module.LayerNorm, TransformerEngineBase):
    """``apex_te.jax.flax.LayerNorm`` with float32 parameters and output in ``dtype``."""


class LayerNormDenseGeneral(module.LayerNormDenseGeneral, TransformerEngineBase):
    """``apex_te.jax.flax.LayerNormDenseGeneral`` with float32 parameters and output in ``dtype``.

    By default it also returns the norm's output.
    """

    return_layernorm_output: bool = True
    transpose_batch_sequence: bool = True


class LayerNormMLP(module.LayerNormMLP, TransformerEngineBase):
    """``apex_te.jax.flax.LayerNormMLP`` with float32 parameters and output in ``dtype``.

    By default it uses ReLU, drops activations with probability 0.1 and also returns the norm's
    output.
    """

    return_layernorm_output: bool = True
    activations: Sequence[str] = ("relu",)
    intermediate_dropout_rate: float = 0.1
    transpose_batch_sequence: bool = True


class DotProductAttention(attention.DotProductAttention, TransformerEngineBase):
    """``apex_te.jax.flax.DotProductAttention`` with inputs cast to ``dtype``.

    By default inputs and results are [s, b, ...].
    """

    transpose_batch_sequence: bool = True


class MultiHeadAttention(attention.MultiHeadAttention, TransformerEngineBase):
    """``apex_te.jax.flax.MultiHeadAttention`` with float32 parameters and output in ``dtype``.

    By default inputs and results are [s, b, ...].
    """

    transpose_batch_sequence: bool = True


class RelativePositionBiases(relative_position.RelativePositionBiases, TransformerEngineBase):
    """``apex_te.jax.flax.RelativePositionBiases`` with a float32 parameter."""


class TransformerLayer(transformer.TransformerLayer, TransformerEngineBase):
    """``apex_te.jax.flax.TransformerLayer`` with float32 parameters and output in ``dtype``.

    Inputs must have the width ``hidden_size``. By default the MLP uses ReLU and drops activations
    with probability 0.1.
    """

    mlp_activations: Sequence[str] = ("relu",)
    intermediate_dropout: float = 0.1
