"""InferenceParams: keys and values of earlier tokens, kept between calls while generating."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from ...ops.binding import OpFunction
from ...runtime.named_arguments import check_count, named_arguments

__all__ = ["Cached", "InferenceParams", "PaddedStep", "Step", "extended", "without_gradient"]


class InferenceParams:
    """Cache of the keys and values of all tokens so far, for each layer, during generation.

    If all sequences have the same length, the caller sets ``sequence_len_offset``. If lengths
    differ, or sequences end or are added, the caller passes them to ``pre_step`` before each call.
    CUDA graphs require ``pre_step``: they read its numbers on the device, so that a replay computes
    the step of the latest ``pre_step``, from inputs padded to the captured sizes.

    Args:
        max_batch_size: largest number of sequences.
        max_sequence_length: largest number of tokens of a sequence.

    Attributes:
        sequence_len_offset: number of tokens cached so far. After each call of the model the caller
            adds the number of tokens that it passed. Not read after ``pre_step``.
        batch_size_offset: index, below ``max_batch_size``, of the first sequence in the next batch.
            Not read after ``pre_step``.
        key_value_memory_dict: ``(keys, values)`` by layer number, which the layer allocates: [s, b,
            g, d] or [b, s, g, d] like the layer's inputs; after ``pre_step`` always [b, s, g, d]. b
            are sequences, s tokens, g groups of key and value heads, d the head size.
        sequences: number of tokens, the new ones included, of each sequence of the latest
            ``pre_step``; the i-th sequence is row i of the keys and values.

    Raises:
        TypeError: a size is not an int.
        ValueError: a size is below 1.

    Names follow TransformerEngine's InferenceParams.
    """

    _is_batch_first = False  # memory is [b, s, g, d] before pre_step, too

    @named_arguments()
    def __init__(self, max_batch_size: int, max_sequence_length: int) -> None:
        name = type(self).__name__
        check_count(name, "max_batch_size", max_batch_size)
        check_count(name, "max_sequence_length", max_sequence_length)
        self.max_batch_size = max_batch_size
        self.max_sequence_length = max_sequence_length
        self.sequence_len_offset = 0
        self.batch_size_offset = 0
        self.key_value_memory_dict: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.sequences: OrderedDict[Hashable, int] = OrderedDict()
        self._step: Step | None = None
        # int32 [4, max_batch_size + 1] for each device, which graphs read; see PaddedStep.table.
        self._tables: dict[torch.device, torch.Tensor] = {}
        self._room: dict[str, int] | None = None  # what the capture that runs has room for

    def reset(self) -> None:
        """Starts another generation in the same memory."""
        self.sequence_len_offset = 0
        self.batch_size_offset = 0
        self.sequences = OrderedDict()
        self._step = None
        self._write_tables()

    def pre_step(self, step_dict: Mapping[Hashable, int]) -> None:
        """Announces the tokens of the next call of the model.

        The inputs of that call have these sequences, either packed (thd) or each padded at its end.
        Like inputs of a CUDA graph, they may have further tokens and sequences at the end, for
        which attention returns zeros.

        Args:
            step_dict: number of new tokens by sequence id, in the order of the batch; ids are any
                hashables. A new id starts a sequence, a missing one ends it.

        Raises:
            TypeError: ``step_dict`` is not a dict, or a number of tokens is not an int.
            ValueError: a number is below 1, or there is no room for so many sequences or tokens.
        """
        owner = "InferenceParams"
        if not isinstance(step_dict, Mapping):
            raise TypeError(
                f"{owner}: step_dict must be a dict of new tokens by sequence, "
                f"got {type(step_dict).__name__}"
            )
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
        self._write_tables()

    @property
    def step_lengths(self) -> Step | None:
        """Returns what the latest ``pre_step`` has announced; None without one."""
        return self._step

    def step_of(self, owner: str, name: str, x: torch.Tensor, layout: str) -> Any:
        """Returns the announced step in the form that a call with an input like ``x`` reads.

        That is a ``Step`` for an input without padding, a ``PaddedStep`` for a padded input and in
        a CUDA graph, None without ``pre_step``.

        Args:
            owner, name: names of the module and of ``x`` in errors.
            x: an input or keys of the call.
            layout: ``"sbhd"``, ``"bshd"`` or ``"thd"``, that of ``x``.

        Raises:
            RuntimeError: a CUDA graph is captured before ``pre_step``.
            ValueError: ``x`` has fewer sequences or tokens than announced, or too many sequences.
        """
        step, is_captured = self._step, self._is_captured(x)
        if step is None:
            if is_captured:
                raise RuntimeError(
                    f"{owner}: inference_params must have announced its tokens by pre_step before "
                    "a CUDA graph is captured, because its replays would all use one "
                    "sequence_len_offset"
                )
            return None
        if layout == "thd":
            expected, actual = [sum(step.new)], [x.shape[0]]
        else:
            batch = layout.index("b")
            expected = [len(step.new), step.longest_new]
            actual = [x.shape[batch], x.shape[1 - batch]]
        if not is_captured and expected == actual:
            return step
        too_many = layout != "thd" and actual[0] > self.max_batch_size
        if too_many or any(a < e for a, e in zip(actual, expected, strict=True)):
            what = "tokens" if layout == "thd" else "sequences and tokens"
            limit = f", and at most max_batch_size = {self.max_batch_size}" if too_many else ""
            raise ValueError(
                f"{owner}: {name} must have at least the {what} that inference_params.pre_step has "
                f"announced, {expected}{limit}, got {actual}"
            )
        if layout == "thd":
            sequences, longest = self.max_batch_size, min(actual[0], self.max_sequence_length)
            self.note_room(tokens=actual[0])
        else:
            sequences, longest = actual
            self.note_room(sequences=sequences, longest_new=longest)
        table = self.table(x.device)[:, : sequences + 1]
        return PaddedStep(table, longest, self.max_sequence_length)

    def table(self, device: torch.device) -> torch.Tensor:
        """Returns the announced step as ``PaddedStep.table``; later steps overwrite it in place."""
        if device not in self._tables:
            self._check_not_capturing(device)
            shape = (4, self.max_batch_size + 1)
            with torch.inference_mode(False):  # pre_step may be called outside of it
                self._tables[device] = torch.zeros(shape, dtype=torch.int32, device=device)
            self._write_tables()
        return self._tables[device]

    @contextlib.contextmanager
    def captured(self, room: dict[str, int]) -> Iterator[None]:
        """Makes calls inside the ``with`` block read the step on the device, as a CUDA graph must.

        They write the sizes that their inputs have room for to ``room``, for ``check_room``.
        """
        outer, self._room = self._room, room
        try:
            yield
        finally:
            self._room = outer

    @contextlib.contextmanager
    def preserved(self) -> Iterator[None]:
        """Context manager that on exit restores the cache where the step's new tokens go."""
        kept = []
        if self._step is not None:
            for memory in self.key_value_memory_dict.values():
                places = self._step.made("new_places", memory[0].device)
                kept += [(_rows(x), places, _rows(x).index_select(0, places)) for x in memory]
        try:
            yield
        finally:
            for rows, places, values in kept:
                rows.index_copy_(0, places, values)

    def note_room(self, **room: int) -> None:
        """Records limits on the step that the graph being captured can replay; the least count."""
        if self._room is not None:
            for name, size in room.items():
                self._room[name] = min(size, self._room.get(name, size))

    def check_room(self, owner: str, room: dict[str, int]) -> None:
        """Raises ValueError unless a step is announced that fits the room of a captured graph."""
        step = self._step
        if step is None:
            raise ValueError(
                f"{owner}: inference_params.pre_step must be called before each replay of a CUDA "
                "graph, got none"
            )
        for name, value, what in (
            ("sequences", len(step.new), "sequences"),
            ("longest_new", step.longest_new, "new tokens of a sequence"),
            ("tokens", sum(step.new), "new tokens"),
            ("longest", step.longest, "tokens of a sequence, for which there are angles"),
        ):
            if value > room.get(name, value):
                raise ValueError(
                    f"{owner}: inference_params must have at most {room[name]} {what} as captured, "
                    f"got {value}"
                )

    def _is_captured(self, x: torch.Tensor) -> bool:
        """Returns True if a call with ``x`` becomes part of a CUDA graph."""
        return self._room is not None or (x.is_cuda and torch.cuda.is_current_stream_capturing())

    def _check_not_capturing(self, device: torch.device) -> None:
        """Raises RuntimeError where what is allocated now would belong to a CUDA graph."""
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "InferenceParams: the layers must have run once, after pre_step, before a CUDA "
                "graph is captured, since the first run allocates the cache"
            )

    def _write_tables(self) -> None:
        """Writes the announced step into the tables of all devices, in place."""
        if not self._tables:
            return
        step = self._step
        before, new = ((), ()) if step is None else (step.before, step.new)
        rest = (0,) * (self.max_batch_size + 1 - len(new))
        starts, counts = torch.tensor((before + rest, new + rest), dtype=torch.int32)
        ends = functional.pad(torch.stack((counts, starts + counts))[:, :-1].cumsum(1), (1, 0))
        table = torch.stack((starts, counts, *ends.int()))
        for kept in self._tables.values():
            kept.copy_(table, non_blocking=True)

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
    """Numbers of tokens that one call adds to the sequences of a cache, and their positions.

    Args:
        before: number of cached tokens of each sequence.
        new: number of tokens that each sequence gets.
        room: tokens of a row of the cache, ``max_sequence_length``.

    Attributes:
        total: sum of ``before`` and ``new`` for each sequence.
        longest, longest_new: maximum of ``total`` and of ``new``.
        is_even: True if all sequences have equally many cached and equally many new tokens.
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
        return self.made("starts", device)

    def cu_new(self, device: torch.device) -> torch.Tensor:
        """Returns where the new tokens of each sequence begin, int32 [sequences + 1]."""
        return self.made("cu_new", device)

    def cu_total(self, device: torch.device) -> torch.Tensor:
        """Returns where all tokens of each sequence begin, int32 [sequences + 1]."""
        return self.made("cu_total", device)

    def made(self, name: str, device: torch.device) -> torch.Tensor:
        """Returns a tensor of the step, made once and not in each layer.

        Args:
            name: ``"new_places"`` and ``"all_places"`` are indices of the new and of all tokens in
                the rows of the cache, int64; ``"inputs"`` those of the new tokens in inputs padded
                to ``longest_new``. ``"starts"``, ``"cu_new"`` and ``"cu_total"`` are described by
                the methods of these names.
            device: device of the tensor.
        """
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


class PaddedStep:
    """``Step`` of inputs with padding, whose numbers are read on the device alone.

    Args:
        table: int32 [4, sequences + 1], whose rows are, for each sequence, the number of cached
            tokens and of new tokens, both followed by a 0, and then the ``cu_seqlens`` of the new
            and of all tokens.
        longest_new: upper bound of the new tokens of a sequence.
        longest: upper bound of all tokens of a sequence: the tokens of a row of the cache.
    """

    is_even = False

    def __init__(self, table: torch.Tensor, longest_new: int, longest: int) -> None:
        self._starts, self._new, self._cu_new, self._cu_total = table
        self.longest_new, self.longest = longest_new, longest

    def starts(self, device: torch.device) -> torch.Tensor:
        """Returns the number of cached tokens of each sequence, int32 [sequences].

        ``device`` is ignored: the result is a view of ``table``, on its device.
        """
        return self._starts[:-1]

    def cu_new(self, device: torch.device) -> torch.Tensor:
        """Returns where the new tokens of each sequence begin, int32 [sequences + 1].

        ``device`` is ignored: the result is a view of ``table``, on its device.
        """
        return self._cu_new

    def cu_total(self, device: torch.device) -> torch.Tensor:
        """Returns where all tokens of each sequence begin, int32 [sequences + 1].

        ``device`` is ignored: the result is a view of ``table``, on its device.
        """
        return self._cu_total

    def row_starts(self) -> torch.Tensor:
        """Returns where the rows of the cache begin among all its tokens, int32 [sequences + 1]."""
        rows = torch.arange(len(self._cu_new), dtype=torch.int32, device=self._cu_new.device)
        return rows * self.longest

    def write(self, kept: torch.Tensor, new: torch.Tensor) -> None:
        """Writes new keys or values to their positions in the cache, and does not write padding.

        A padded token repeats the write of its sequence's last new token; in a sequence without
        tokens it writes the value already there. So all writes to one position have the same value.
        """
        device = new.device
        if new.dim() == 3:
            token = torch.arange(len(new), dtype=torch.int32, device=device)
            source = torch.minimum(token, self._cu_new[-1:] - 1).clamp(min=0)
            row = torch.searchsorted(self._cu_new[1:], source, right=True, out_int32=True)
            row = row.clamp(max=len(self._cu_new) - 2)
            place = row * self.longest + self._starts[row] + source - self._cu_new[row]
            is_new = (self._new[row] > 0)[:, None, None]
        else:
            rows, width = new.shape[:2]
            offset = torch.arange(width, dtype=torch.int32, device=device)
            last = (self._new[:-1, None] - 1).clamp(min=0)
            offset = torch.minimum(offset, last)
            row = torch.arange(rows, dtype=torch.int32, device=device)[:, None]
            source = (row * width + offset).flatten()
            place = (row * self.longest + self._starts[:-1, None] + offset).flatten()
            is_new = (self._new[:-1] > 0).repeat_interleave(width)[:, None, None]
            new = new.flatten(0, 1)
        memory = _rows(kept)
        values = new.index_select(0, source).to(kept.dtype)
        memory.index_copy_(
            0, place.long(), torch.where(is_new, values, memory.index_select(0, place))
        )


class Cached(NamedTuple):
    """Keys and values of all tokens so far: views of the cache, or packed [t, g, d].

    Attributes:
        keys, values: in the layout of the layer's inputs.
        step: the ``Step`` or ``PaddedStep`` of the call, None without ``pre_step``.
        has_lengths: True if attention must be given the lengths of the sequences.
        key_starts: ``cu_seqlens_kv_padded`` for packed keys with gaps, else None.
    """

    keys: torch.Tensor
    values: torch.Tensor
    step: Any = None
    has_lengths: bool = False
    key_starts: torch.Tensor | None = None

    def mask_type(self, owner: str, name: str) -> str:
        """Returns the mask type with which the new tokens also attend to the cached tokens.

        Args:
            owner: name of the module in errors.
            name: the mask type of the call.

        Raises:
            ValueError: ``name`` is ``"arbitrary"``, and ``pre_step`` has announced the tokens.
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
    training: bool = True,
) -> Cached:
    """Caches new keys and values of a layer; returns them after those of earlier tokens.

    Args:
        owner: name of the module in errors.
        params: the cache.
        layer: the layer's number.
        keys, values: new ones, [s, b, g, d], [b, s, g, d] or [t, g, d] as ``qkv_format`` says.
        training: the module is in training mode, where keys must not require grad.

    Raises:
        ValueError: ``layer`` is None, gradients are recorded, or the cache has too little room.
        RuntimeError: a CUDA graph is captured before ``pre_step`` or a first run.
    """
    if layer is None:
        raise ValueError(f"{owner}: layer_number must be given for inference_params, got None")
    if training and torch.is_grad_enabled() and keys.requires_grad:
        raise ValueError(
            f"{owner}: inference_params must be None if gradients are recorded (in training "
            "mode without torch.no_grad), got some"
        )
    keys, values = keys.detach(), values.detach()
    step = params.step_of(owner, "key_layer", keys, qkv_format)
    if step is not None:
        return _extended_by_step(params, step, layer, keys, values, qkv_format)
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


def without_gradient(owner: str, queries: torch.Tensor, training: bool) -> torch.Tensor:
    """Returns queries whose backward raises RuntimeError: the cache holds keys without history.

    Args:
        owner: name of the module, for the error.
        queries: the queries; they are returned themselves if no gradient can reach them.
        training: True returns the queries unguarded; the caller refuses a cache in training.
    """
    if training or not (torch.is_grad_enabled() and queries.requires_grad):
        return queries
    guarded: torch.Tensor = _NoGradient.apply(queries, owner)
    return guarded


class _NoGradient(OpFunction):
    """Identity without a backward."""

    LABEL = "DotProductAttention"

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, owner: str) -> torch.Tensor:
        ctx.owner = owner
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        raise RuntimeError(
            f"{ctx.owner}: inference_params must be None for a backward, since cached keys and "
            "values have no gradient"
        )


def _extended_by_step(
    params: InferenceParams,
    step: Any,
    layer: int,
    keys: torch.Tensor,
    values: torch.Tensor,
    qkv_format: str,
) -> Cached:
    """Does what ``extended`` does, for the sequences that ``pre_step`` has announced."""
    out, device = [], keys.device
    is_packed, is_padded = qkv_format == "thd", isinstance(step, PaddedStep)
    for kept, new in zip(_memory(params, layer, keys, values, 1), (keys, values), strict=True):
        if qkv_format == "sbhd":
            new = new.transpose(0, 1)
        if is_padded:
            step.write(kept, new)
        elif not is_packed and step.is_even:
            kept[: len(step.new), step.before[0] : step.total[0]] = new
        else:
            if not is_packed:
                new = new.flatten(0, 1).index_select(0, step.made("inputs", device))
            _rows(kept).index_copy_(0, step.made("new_places", device), new.to(kept.dtype))
        if is_packed:
            seen = _rows(kept)
            seen = seen if is_padded else seen.index_select(0, step.made("all_places", device))
        else:
            sequences = len(step.starts(device)) if is_padded else len(step.new)
            seen = kept[:sequences, : step.longest]
            seen = seen.transpose(0, 1) if qkv_format == "sbhd" else seen
        out.append(seen.to(new.dtype))
    gaps = step.row_starts() if is_packed and is_padded else None
    return Cached(out[0], out[1], step, is_packed or not step.is_even, gaps)


def _rows(kept: torch.Tensor) -> torch.Tensor:
    """Returns a view [b * s, g, d] of cached keys or values [b, s, g, d]."""
    return kept.flatten(0, 1)


def _memory(
    params: InferenceParams, layer: int, keys: torch.Tensor, values: torch.Tensor, time: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a layer's cached keys and values, allocated on its first call."""
    memory = params.key_value_memory_dict.get(layer)
    if memory is None:
        shape = [params.max_batch_size, params.max_batch_size]
        shape[time] = params.max_sequence_length
        params._check_not_capturing(keys.device)
        # Zeros, since attention reads places that only its mask leaves out.
        with torch.inference_mode(False):  # a later call may be made outside of it
            memory = (
                keys.new_zeros(*shape, *keys.shape[-2:]),
                values.new_zeros(*shape, *values.shape[-2:]),
            )
    elif memory[0].device != keys.device:
        params._check_not_capturing(keys.device)
        memory = (memory[0].to(keys.device), memory[1].to(keys.device))
    else:
        return memory
    params.key_value_memory_dict[layer] = memory
    if keys.is_cuda:
        params.table(keys.device)  # for a CUDA graph, which could not make it
    return memory
