"""InferenceParams: keys and values of earlier tokens, kept between calls while generating."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping
from typing import NamedTuple

import torch

__all__ = ["Cached", "InferenceParams", "Step", "extended"]


class InferenceParams:
    """Cache of keys and values of the tokens so far, for each layer; one object for a generation.

    All sequences grow alike if the caller sets ``sequence_len_offset``. Sequences of several
    lengths, and sequences that end or join, are announced before each call by ``pre_step``.

    Args:
        max_batch_size, max_sequence_length: sequences and tokens that there is room for.

    Attributes:
        sequence_len_offset: tokens cached so far; the caller adds the number that it has passed to
            the model after each call. Not read after ``pre_step``.
        batch_size_offset: first sequence, of ``max_batch_size``, of the batch that is passed next.
            Not read after ``pre_step``.
        key_value_memory_dict: layer number -> (keys, values), allocated by the layer: [s, b, g, d]
            or [b, s, g, d] as the layer's inputs are; after ``pre_step`` always [b, s, g, d].
        sequences: the sequences of the latest ``pre_step`` with their numbers of tokens after it;
            the i-th sequence is row i of the keys and values.
    """

    _is_batch_first = False  # memory is [b, s, g, d] before pre_step, too

    def __init__(self, max_batch_size: int, max_sequence_length: int) -> None:
        self.max_batch_size = max_batch_size
        self.max_sequence_length = max_sequence_length
        self.sequence_len_offset = 0
        self.batch_size_offset = 0
        self.key_value_memory_dict: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.sequences: OrderedDict[Hashable, int] = OrderedDict()
        self._step: Step | None = None

    def reset(self) -> None:
        """Begins another generation in the same memory."""
        self.sequence_len_offset = 0
        self.batch_size_offset = 0
        self.sequences = OrderedDict()
        self._step = None

    def pre_step(self, step_dict: Mapping[Hashable, int]) -> None:
        """Announces the tokens of the next call of the model.

        The inputs of that call have as many sequences: packed one after the other (thd), or each
        padded behind its tokens.

        Args:
            step_dict: for each sequence, by any name, the number of its new tokens, in the order of
                the batch. A name that is new begins a sequence, and one that is missing ends it.

        Raises:
            TypeError: a number of tokens is no int.
            ValueError: a number below 1, or more sequences or tokens than there is room for.
        """
        owner = "InferenceParams"
        if not step_dict or len(step_dict) > self.max_batch_size:
            raise ValueError(
                f"{owner}: step_dict must have 1 to max_batch_size = {self.max_batch_size} "
                f"sequences, got {len(step_dict)}"
            )
        for name, count in step_dict.items():
            if not isinstance(count, int) or isinstance(count, bool):
                raise TypeError(
                    f"{owner}: step_dict must have ints, got {type(count).__name__} for {name!r}"
                )
            total = self.sequences.get(name, 0) + count
            if count < 1 or total > self.max_sequence_length:
                raise ValueError(
                    f"{owner}: step_dict must add at least 1 token to a sequence, up to "
                    f"max_sequence_length = {self.max_sequence_length}, got {count} for {name!r}, "
                    f"which then has {total}"
                )
        self._reorder(list(step_dict))
        before = tuple(self.sequences.get(name, 0) for name in step_dict)
        new = tuple(step_dict.values())
        self.sequences = OrderedDict(
            (name, old + count) for name, old, count in zip(step_dict, before, new, strict=True)
        )
        self._step = Step(before, new, self.max_sequence_length)

    @property
    def step_lengths(self) -> Step | None:
        """Returns what the latest ``pre_step`` has announced; None without one."""
        return self._step

    def _reorder(self, names: list[Hashable]) -> None:
        """Moves the rows of sequences that go on to their places in ``names``."""
        rows = {name: row for row, name in enumerate(self.sequences)}
        if all(rows.get(name, row) == row for row, name in enumerate(names)):
            return
        # A sequence that begins finds no values in its row that it would read.
        order = torch.tensor([rows.get(name, 0) for name in names])
        for layer, kept in self.key_value_memory_dict.items():
            for memory in kept:
                memory[: len(names)] = memory.index_select(0, order.to(memory.device))
            self.key_value_memory_dict[layer] = kept


class Step:
    """Numbers of tokens that one call adds to the sequences of a cache, and their places in it.

    Args:
        before: tokens of each sequence that are cached already.
        new: tokens of each sequence that the call adds.
        room: tokens that a row of the cache has room for.

    Attributes:
        is_even: all sequences have the same two numbers.
        longest, longest_new: tokens of the longest sequence, with those added; the most added.
    """

    def __init__(self, before: tuple[int, ...], new: tuple[int, ...], room: int) -> None:
        self.before, self.new = before, new
        self.total = tuple(old + count for old, count in zip(before, new, strict=True))
        self.is_even = len(set(before)) == 1 and len(set(new)) == 1
        self.longest, self.longest_new = max(self.total), max(new)
        self._room = room
        self._tensors: dict[tuple[str, torch.device], torch.Tensor] = {}

    def starts(self, device: torch.device) -> torch.Tensor:
        """Returns ``before`` as an int32 tensor [sequences]."""
        return self._made("starts", device)

    def cu_new(self, device: torch.device) -> torch.Tensor:
        """Returns where the new tokens of each sequence begin, int32 [sequences + 1]."""
        return self._made("cu_new", device)

    def cu_total(self, device: torch.device) -> torch.Tensor:
        """Returns where all tokens of each sequence begin, int32 [sequences + 1]."""
        return self._made("cu_total", device)

    def new_places(self, device: torch.device) -> torch.Tensor:
        """Returns the places of the new tokens among all rows of the cache, int64."""
        return self._made("new_places", device)

    def all_places(self, device: torch.device) -> torch.Tensor:
        """Returns the places of all tokens of the sequences among all rows of the cache, int64."""
        return self._made("all_places", device)

    def inputs(self, device: torch.device) -> torch.Tensor:
        """Returns the places of the new tokens in inputs padded to ``longest_new``, int64."""
        return self._made("inputs", device)

    def _made(self, name: str, device: torch.device) -> torch.Tensor:
        """Returns the tensor called ``name``, made once a step and not once a layer."""
        key = (name, device)
        if key not in self._tensors:
            self._tensors[key] = self._make(name).to(device)
        return self._tensors[key]

    def _make(self, name: str) -> torch.Tensor:
        """Makes the tensor called ``name`` on the CPU."""
        if name == "starts":
            return torch.tensor(self.before, dtype=torch.int32)
        if name in ("cu_new", "cu_total"):
            counts = torch.tensor((0, *(self.new if name == "cu_new" else self.total)))
            return counts.cumsum(0).to(torch.int32)
        first = (0,) * len(self.new) if name in ("inputs", "all_places") else self.before
        last = self.new if name == "inputs" else self.total
        width = self.longest_new if name == "inputs" else self._room
        return torch.cat(
            [
                torch.arange(row * width + begin, row * width + end)
                for row, (begin, end) in enumerate(zip(first, last, strict=True))
            ]
        )


class Cached(NamedTuple):
    """Keys and values of all tokens so far, and what attention needs to know of their lengths.

    Attributes:
        keys, values: [s, b, g, d] or [b, s, g, d], views of the cache; or [t, g, d], packed.
        step: what ``pre_step`` has announced, or None.
        has_lengths: the sequences are packed or have several lengths.
    """

    keys: torch.Tensor
    values: torch.Tensor
    step: Step | None = None
    has_lengths: bool = False

    def mask_type(self, owner: str, name: str) -> str:
        """Returns the mask type by which the new tokens attend to those cached, too.

        Args:
            owner: the name of the module in errors.
            name: the mask type of a call without a cache.

        Raises:
            ValueError: ``pre_step`` has announced the tokens, and ``name`` is ``"arbitrary"``.
        """
        if self.step is None:
            return f"{name}_bottom_right" if name in ("causal", "padding_causal") else name
        if name == "arbitrary":
            raise ValueError(
                f"{owner}: attn_mask_type must not be 'arbitrary' after inference_params.pre_step"
            )
        if self.has_lengths:
            return "padding_causal_bottom_right" if "causal" in name else "padding"
        return "causal_bottom_right" if "causal" in name else "no_mask"

    def lengths(
        self,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, int | None, int | None]:
        """Returns ``cu_seqlens_q``, ``cu_seqlens_kv``, ``max_seqlen_q`` and ``max_seqlen_kv``."""
        if self.step is None or not self.has_lengths:
            return None, None, None, None
        step, device = self.step, self.keys.device
        return step.cu_new(device), step.cu_total(device), step.longest_new, step.longest


def extended(
    owner: str,
    params: InferenceParams,
    layer: int | None,
    keys: torch.Tensor,
    values: torch.Tensor,
    qkv_format: str,
) -> Cached:
    """Caches new keys and values of a layer, and returns them behind those of earlier tokens.

    Args:
        owner: the name of the module in errors.
        params: the cache.
        layer: the layer's number in the cache.
        keys, values: of the new tokens, [s, b, g, d] or [b, s, g, d]; after ``pre_step`` also
            [t, g, d].
        qkv_format: ``"sbhd"``, ``"bshd"`` or ``"thd"``.

    Raises:
        ValueError: the tokens do not fit, need a gradient, are packed without ``pre_step``, or have
            no layer number.
    """
    if layer is None:
        raise ValueError(f"{owner}: layer_number must be given for inference_params, got None")
    if torch.is_grad_enabled() and keys.requires_grad:
        raise ValueError(f"{owner}: inference_params must be None where gradients are recorded")
    if params.step_lengths is not None:
        return _extended_by_step(
            owner, params, params.step_lengths, layer, keys, values, qkv_format
        )
    if qkv_format == "thd":
        raise ValueError(
            f"{owner}: inference_params must be None with qkv_format 'thd' unless its pre_step has "
            "announced the tokens of each sequence"
        )
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
    out, own = [], 1 if params._is_batch_first else time
    for kept, new in zip(_memory(params, layer, keys, values, own), (keys, values), strict=True):
        kept = kept if own == time else kept.transpose(0, 1)
        batch = kept.narrow(1 - time, first, last - first)
        batch.narrow(time, start, end - start).copy_(new)
        out.append(batch.narrow(time, 0, end).to(new.dtype))
    return Cached(out[0], out[1])


def _extended_by_step(
    owner: str,
    params: InferenceParams,
    step: Step,
    layer: int,
    keys: torch.Tensor,
    values: torch.Tensor,
    qkv_format: str,
) -> Cached:
    """Does what ``extended`` does, for the sequences that ``pre_step`` has announced."""
    sequences, tokens = len(step.new), sum(step.new)
    if qkv_format == "thd":
        expected, actual = [tokens], [keys.shape[0]]
    else:
        batch = qkv_format.index("b")
        expected, actual = [sequences, step.longest_new], [keys.shape[batch], keys.shape[1 - batch]]
    if expected != actual:
        what = "tokens" if qkv_format == "thd" else "sequences and tokens"
        raise ValueError(
            f"{owner}: key_layer must have the {what} that inference_params.pre_step has "
            f"announced, {expected}, got {actual}"
        )
    out, device = [], keys.device
    for kept, new in zip(_memory(params, layer, keys, values, 1), (keys, values), strict=True):
        if qkv_format == "sbhd":
            new = new.transpose(0, 1)
        if qkv_format != "thd" and step.is_even:
            kept[:sequences, step.before[0] : step.total[0]] = new
        else:
            if qkv_format != "thd":
                new = new.flatten(0, 1).index_select(0, step.inputs(device))
            _rows(kept).index_copy_(0, step.new_places(device), new.to(kept.dtype))
        if qkv_format == "thd":
            seen = _rows(kept).index_select(0, step.all_places(device))
        else:
            seen = kept[:sequences, : step.longest]
            seen = seen.transpose(0, 1) if qkv_format == "sbhd" else seen
        out.append(seen.to(new.dtype))
    return Cached(out[0], out[1], step, qkv_format == "thd" or not step.is_even)


def _rows(kept: torch.Tensor) -> torch.Tensor:
    """Returns a view [b * s, g, d] of cached keys or values [b, s, g, d]."""
    return kept.view(-1, *kept.shape[2:])


def _memory(
    params: InferenceParams, layer: int, keys: torch.Tensor, values: torch.Tensor, time: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the cached keys and values of a layer, in new memory on its first call.

    Args:
        params: the cache.
        layer: the layer's number in the cache.
        keys, values: of the new tokens; give device, dtype and the last two extents.
        time: the memory's dimension of tokens, 0 or 1; the other one is that of sequences.
    """
    memory = params.key_value_memory_dict.get(layer)
    if memory is None:
        shape = [params.max_batch_size, params.max_batch_size]
        shape[time] = params.max_sequence_length
        # Zeros, since attention reads places that only its mask leaves out.
        memory = (
            keys.new_zeros(*shape, *keys.shape[-2:]),
            values.new_zeros(*shape, *values.shape[-2:]),
        )
    elif memory[0].device != keys.device:
        memory = (memory[0].to(keys.device), memory[1].to(keys.device))
    else:
        return memory
    params.key_value_memory_dict[layer] = memory
    return memory
