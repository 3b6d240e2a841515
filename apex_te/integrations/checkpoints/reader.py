"""``read_checkpoint``, which finds the FP8 weights of a checkpoint and what scales them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .config import Rules, rules_of
from .description import (
    BLOCKS,
    CHANNEL,
    MXFP4,
    PACKED,
    TENSOR,
    Checkpoint,
    Expected,
    Header,
    Stored,
    scale_shapes,
)

_SCALES = ("weight_scale_inv", "weight_scale", "scale", "qscale_weight")
_INPUT_SCALES = ("input_scale", "activation_scale")
_BYTES = (torch.uint8, torch.float8_e8m0fnu)  # powers of two


def read_checkpoint(config: Mapping[str, Any], headers: Mapping[str, Header]) -> Checkpoint:
    """Returns the FP8 weights of a checkpoint: those stored with a scale.

    Args:
        config: ``quantization_config`` of ``config.json``, or ``hf_quant_config.json``.
        headers: dtypes and shapes by key.
    """
    rules = rules_of(config)
    weights: dict[str, Stored] = {}
    for key, header in headers.items():
        if header.dtype is torch.float8_e5m2:
            raise NotImplementedError(
                f"from_fp8_checkpoint: {key} must be E4M3 to be held in FP8, got {header.dtype}"
            )
        if header.dtype is torch.float8_e4m3fn and len(header.shape) >= 2:
            weights[key] = _stored(key, header, headers, rules)
        elif rules.method == "mxfp4" and key.endswith(PACKED) and len(header.shape) == 4:
            weights[key] = _packed(key, header, headers)
    if not weights:
        raise ValueError(
            "from_fp8_checkpoint: path_or_name must have weights in FP8 with scales beside them, "
            f"got {len(headers)} tensors without any"
        )
    return Checkpoint(rules.method, config, rules.static, weights)


def _stored(key: str, weight: Header, headers: Mapping[str, Header], rules: Rules) -> Stored:
    """Returns how one weight is stored, from the scale that is found beside it."""
    stem, of_layer = key.removesuffix("weight"), key.endswith(".weight")

    def beside(names: tuple[str, ...]) -> str | None:
        places = [stem + name if of_layer else f"{key}_{name}" for name in names]
        return next((place for place in places if place in headers), None)

    names = _SCALES if of_layer else ("scale_inv", "scale")
    scale = beside(names)
    if scale is None:
        raise ValueError(
            f"from_fp8_checkpoint: {key} must have a scale beside it, such as {stem}{names[0]}, "
            "got none in the files"
        )
    found = headers[scale]
    if not found.dtype.is_floating_point and found.dtype not in _BYTES:
        raise _mismatch(scale, "floating-point numbers or bytes of exponents", found.dtype)
    expected = rules.of(stem.removesuffix(".")) or _guessed(found.shape, weight.shape)
    if found.shape not in scale_shapes(expected, weight.shape):
        wanted = " or ".join(str(list(shape)) for shape in scale_shapes(expected, weight.shape))
        what = f"{wanted} for {expected.form.value} scales of {key} {list(weight.shape)}"
        raise _mismatch(scale, what, list(found.shape))
    inp = beside(_INPUT_SCALES)
    return Stored(*expected, scale, found, inp, len(headers[inp].shape) if inp else 0)


def _packed(key: str, weight: Header, headers: Mapping[str, Header]) -> Stored:
    """Returns how stacked weights ``[experts, rows, groups, 16]`` in MXFP4 are stored."""
    scale = key.removesuffix(PACKED) + "_scales"
    found = headers.get(scale)
    wanted = Header(torch.uint8, weight.shape[:-1])
    if weight.dtype is not torch.uint8 or weight.shape[-1] != 16 or found != wanted:
        what = f"uint8 {list(wanted.shape)} beside uint8 bytes [.., 16] of {key}"
        raise _mismatch(scale, what, f"{found} beside {weight}")
    return Stored(*MXFP4, scale, found)


def _guessed(scale: tuple[int, ...], weight: tuple[int, ...]) -> Expected:
    """Returns the form of a weight, by the shape of its scale."""
    for expected in (BLOCKS, TENSOR, CHANNEL):
        if scale in scale_shapes(expected, weight):
            return expected
    return BLOCKS  # whose shape the error names


def _mismatch(key: str, wanted: str, found: Any) -> ValueError:
    return ValueError(f"from_fp8_checkpoint: {key} must be {wanted}, got {found}")
