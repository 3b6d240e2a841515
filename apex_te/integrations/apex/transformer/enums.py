"""Kinds of layers, attention, masks and models."""

import enum


class LayerType(enum.Enum):
    """Kind of a transformer layer."""

    encoder = 1
    decoder = 2


class AttnType(enum.Enum):
    """Kind of attention."""

    self_attn = 1
    cross_attn = 2


class AttnMaskType(enum.Enum):
    """Kind of an attention mask."""

    padding = 1
    causal = 2


class ModelType(enum.Enum):
    """Kind of a model: one stack of layers, or an encoder and a decoder."""

    encoder_or_decoder = 1
    encoder_and_decoder = 2
