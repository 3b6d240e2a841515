"""Kinds of layers, attention, masks and models."""

import enum


class LayerType(enum.Enum):
    """Kind of a transformer layer: ``encoder``, or ``decoder`` with cross attention."""

    encoder = 1
    decoder = 2


class AttnType(enum.Enum):
    """Kind of attention: ``self_attn``, or ``cross_attn``, to the output of an encoder."""

    self_attn = 1
    cross_attn = 2


class AttnMaskType(enum.Enum):
    """Kind of an attention mask: ``padding``, a mask that is given, or ``causal``."""

    padding = 1
    causal = 2


class ModelType(enum.Enum):
    """Kind of a model: ``encoder_or_decoder``, one stack of layers, or ``encoder_and_decoder``."""

    encoder_or_decoder = 1
    encoder_and_decoder = 2
