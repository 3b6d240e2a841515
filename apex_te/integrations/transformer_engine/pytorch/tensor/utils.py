"""Functions by which a distributed optimizer keeps weights in FP8 only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .....fp8.parameter.sharded_write import drop_columnwise, replace_data, write_parts
from ..._names import neutral
from ..quantized_tensor import QuantizedTensor

__all__ = [
    "cast_master_weights_to_fp8",
    "post_all_gather_processing",
    "quantize_master_weights",
    "replace_raw_data",
]


def replace_raw_data(tensor: QuantizedTensor, new_raw_data: torch.Tensor) -> None:
    """Moves the FP8 data of a weight to other memory, such as a part of an optimizer's buffer.

    Args:
        tensor: the weight, whose values do not change.
        new_raw_data: uint8, contiguous, with as many elements as the weight, on its device.

    Raises:
        TypeError: ``tensor`` is not an FP8 weight, or ``new_raw_data`` has another dtype.
        ValueError: ``new_raw_data`` has another size or device, or is not contiguous.
    """
    replace_data(tensor, new_raw_data)  # type: ignore[arg-type]


def quantize_master_weights(
    model_weights: Sequence[QuantizedTensor],
    master_weights: Sequence[torch.Tensor | None],
    start_offsets: Sequence[int | None],
    group: Any,
    fsdp_shard_model_weights: Any = None,
    manual_post_all_gather_processing: bool = False,
) -> None:
    """Quantizes this rank's parts of master weights, with the scales of the whole FP8 weights.

    The master weights are rounded to the weights' nominal dtypes first, as Transformer Engine does,
    so that training equals that with high-precision weights. One all-reduce by maximum exchanges
    the amax values.

    Args:
        model_weights: the FP8 weights, whole, the same on all ranks.
        master_weights: for each weight this rank's part of the flattened master weight; None if it
            has none.
        start_offsets: index of the part's first element; None without a part.
        group: process group over which the master weights are split.
        fsdp_shard_model_weights: must be None, or a list of None.
        manual_post_all_gather_processing: has no effect; columnwise copies are freed here, and made
            again in backward.

    Raises:
        NotImplementedError: ``fsdp_shard_model_weights`` has another value.
        TypeError: a weight is not an FP8 weight.
        ValueError: the sequences differ in length, or a part is beyond its weight.
    """
    if isinstance(fsdp_shard_model_weights, (list, tuple)):
        shards = [shard for shard in fsdp_shard_model_weights if shard is not None]
        fsdp_shard_model_weights = shards or None
    neutral("quantize_master_weights", fsdp_shard_model_weights=(fsdp_shard_model_weights, None))
    parts = []
    for weight, master in zip(model_weights, master_weights, strict=True):
        if hasattr(weight, "clear_high_precision_init_val"):
            weight.clear_high_precision_init_val()
        parts.append(None if master is None else master.detach().to(weight.dtype))
    write_parts(model_weights, parts, start_offsets, group)  # type: ignore[arg-type]


def cast_master_weights_to_fp8(
    model_weights: Sequence[QuantizedTensor],
    master_weights: Sequence[torch.Tensor | None],
    start_offsets: Sequence[int | None],
    group: Any,
    fsdp_shard_model_weights: Any = None,
    manual_post_all_gather_processing: bool = False,
) -> None:
    """Quantizes this rank's parts of master weights, as ``quantize_master_weights`` does.

    It is that function's earlier name, with its arguments and errors.
    """
    quantize_master_weights(
        model_weights, master_weights, start_offsets, group, fsdp_shard_model_weights,
        manual_post_all_gather_processing,
    )  # fmt: skip


def post_all_gather_processing(model_weights: QuantizedTensor | Sequence[QuantizedTensor]) -> None:
    """Frees the columnwise copies of FP8 weights whose data an all-gather has just written.

    Args:
        model_weights: an FP8 weight, or several.

    Raises:
        TypeError: a weight is not an FP8 weight.
    """
    single = isinstance(model_weights, torch.Tensor)
    for weight in [model_weights] if single else model_weights:
        drop_columnwise(weight)  # type: ignore[arg-type]
