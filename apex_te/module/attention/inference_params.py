"""InferenceParams: keys and values of earlier tokens, kept between calls while generating."""

from __future__ import annotations

import torch

__all__ = ["InferenceParams"]


class InferenceParams:
    """Cache of keys and values of the tokens so far, for each layer; one object for a generation.

    Args:
        max_batch_size, max_sequence_length: sequences and tokens that there is room for.

    Attributes:
        sequence_len_offset: tokens cached so far; the caller adds the number that it has passed to
            the model after each call.
        batch_size_offset: first sequence, of ``max_batch_size``, of the batch that is passed next.
        key_value_memory_dict: layer number -> (keys, values), [s, b, g, d] or [b, s, g, d] as the
            layer's inputs are; allocated by the layer.
    """

    def __init__(self, max_batch_size: int, max_sequence_length: int) -> None:
        self.max_batch_size = max_batch_size
        self.max_sequence_length = max_sequence_length
        self.sequence_len_offset = 0
        self.batch_size_offset = 0
        self.key_value_memory_dict: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def reset(self) -> None:
        """Begins another generation in the same memory."""
        self.sequence_len_offset = 0
        self.batch_size_offset = 0


def extended(
    owner: str,
    params: InferenceParams,
    layer: int | None,
    keys: torch.Tensor,
    values: torch.Tensor,
    qkv_format: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Caches new keys and values of a layer, and returns them behind those of earlier tokens.

    Args:
        owner: the name of the module in errors.
        params: the cache.
        layer: the layer's number in the cache.
        keys, values: of the new tokens, [s, b, g, d] or [b, s, g, d].
        qkv_format: ``"sbhd"`` or ``"bshd"``.

    Returns:
        ``(keys, values)`` of all tokens so far, as views of the cache.

    Raises:
        ValueError: the tokens do not fit, need a gradient, are packed, or have no layer number.
    """
    if layer is None:
        raise ValueError(f"{owner}: layer_number must be given for inference_params, got None")
    if qkv_format == "thd":
        raise ValueError(f"{owner}: inference_params must be None with qkv_format 'thd'")
    if torch.is_grad_enabled() and keys.requires_grad:
        raise ValueError(f"{owner}: inference_params must be None where gradients are recorded")
    time = qkv_format.index("s")
    start, first = params.sequence_len_offset, params.batch_size_offset
    end, last = start + keys.shape[time], first + keys.shape[1 - time]
    for name, value, limit in (
        ("max_sequence_length", end, params.max_sequence_length),
        ("max_batch_size", last, params.max_batch_size),
    ):
        if value > limit:
            raise ValueError(
                f"{owner}: inference_params.{name} must be at least {value}, got {limit}"
            )
    memory = params.key_value_memory_dict.get(layer)
    if memory is None:
        shape = [params.max_batch_size, params.max_batch_size]
        shape[time] = params.max_sequence_length
        memory = (
            keys.new_empty(*shape, *keys.shape[2:]),
            values.new_empty(*shape, *values.shape[2:]),
        )
        params.key_value_memory_dict[layer] = memory
    out = []
    for kept, new in zip(memory, (keys, values), strict=True):
        batch = kept.narrow(1 - time, first, last - first)
        batch.narrow(time, start, end - start).copy_(new)
        out.append(batch.narrow(time, 0, end))
    return out[0], out[1]
