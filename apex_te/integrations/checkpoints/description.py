"""Neutral description of the FP8 weights in a checkpoint, whatever tool wrote it."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

BLOCK = 128
PACKED = "_blocks"  # end of the keys of weights in MXFP4


class Form(enum.Enum):
    """Kinds of scales, by the elements of a weight that share one."""

    TENSOR = "tensor"
    BLOCK = "block"
    CHANNEL = "channel"
    GROUP = "group"  # of a row; those of 32 are MXFP8's
    PACKED = "mxfp4"  # groups of 32, two codes of 4 bits in a byte


class Header(NamedTuple):
    """dtype and shape of a tensor, from a file's header."""

    dtype: torch.dtype
    shape: tuple[int, ...]


class Stored(NamedTuple):
    """Weight in a checkpoint whose codes are multiplied by scales.

    ``block`` has the rows and columns that share a scale, 0 for all. ``scale`` and ``input_scale``
    are keys, ``input_dims`` is the number of dimensions of the latter.
    """

    form: Form
    block: tuple[int, int]
    scale: str
    scale_header: Header
    input_scale: str | None = None
    input_dims: int = 0


class Checkpoint(NamedTuple):
    """FP8 weights of a checkpoint, and the configuration that describes them.

    Attributes:
        method: name of the quantization method in the configuration.
        config: the configuration.
        static: True if inputs have scales of their own in the checkpoint.
        weights: the weights by their keys.
    """

    method: str
    config: Mapping[str, Any]
    static: bool
    weights: Mapping[str, Stored]


class Expected(NamedTuple):
    """Form that a configuration tells of a weight, with the rows and columns of its blocks."""

    form: Form
    block: tuple[int, int]


TENSOR = Expected(Form.TENSOR, (0, 0))
CHANNEL = Expected(Form.CHANNEL, (1, 0))
BLOCKS = Expected(Form.BLOCK, (BLOCK, BLOCK))
MXFP8 = Expected(Form.GROUP, (1, 32))
MXFP4 = Expected(Form.PACKED, (1, 32))


def scale_shapes(expected: Expected, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Returns the shapes that files give the scales of a weight ``[.., rows, cols]``."""
    *count, rows, cols = shape
    if expected.form is Form.TENSOR:
        return [tuple(count), (*count, 1), (*count, 1, 1)]
    if expected.form is Form.CHANNEL:
        return [(*count, rows, 1), (*count, rows)]
    height, width = -(-rows // expected.block[0]), -(-cols // expected.block[1])
    return [(*count, height, width), (*count, height, 1, width, 1)]
