"""Buffers of memory that tensors are carved out of."""

from __future__ import annotations

import torch

_buffers: dict[str, MemoryBuffer] = {}


class MemoryBuffer:
    """One flat tensor; ``add`` copies tensors to it, one after the other, and returns views.

    It is on the current GPU, without one on the CPU.

    Args:
        name: name for messages.
        numel: elements.
        dtype: dtype of the elements.
        track_usage: count the elements that are in use at each ``get_data``.
    """

    def __init__(self, name: str, numel: int, dtype: torch.dtype, track_usage: bool) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.name = name
        self.numel = numel
        self.dtype = dtype
        self.data = torch.empty(numel, dtype=dtype, device=device)
        self.track_usage = track_usage
        self.in_use_value = 0.0
        self.total_value = 0.0
        self._start = 0

    def reset(self) -> None:
        """Makes all memory available again; earlier views become invalid."""
        self._start = 0

    def is_in_use(self) -> bool:
        """Returns True if part of the memory was handed out."""
        return self._start > 0

    def numel_in_use(self) -> int:
        """Returns the number of elements that were handed out."""
        return self._start

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copies a tensor to the buffer's next elements, and returns the view of them in its shape.

        Raises:
            TypeError: ``tensor`` has another dtype.
            RuntimeError: not enough memory is left.
        """
        if tensor.dtype != self.dtype:
            raise TypeError(f"{self.name}: tensor must have dtype {self.dtype}, got {tensor.dtype}")
        end = self._start + tensor.numel()
        if end > self.numel:
            raise RuntimeError(
                f"{self.name}: {self.numel - self._start} elements are left, got {tensor.numel()}"
            )
        view = self.data[self._start : end].view(tensor.shape)
        self._start = end
        return view.copy_(tensor)

    def get_data(self) -> torch.Tensor:
        """Returns the memory that was handed out, one-dimensional; ``track_usage`` counts it."""
        if self.track_usage:
            self.in_use_value += float(self._start)
            self.total_value += float(self.numel)
        return self.data[: self._start]

    def print_average_usage(self) -> None:
        """Prints the average share in use over all ``get_data``; 0 without ``track_usage``."""
        share = 100.0 * self.in_use_value / max(1.0, self.total_value)
        print(f" > usage of {self.name} memory buffer: {share:.2f} %", flush=True)


class RingMemBuffer:
    """Several buffers, used in turn.

    Args:
        name: the buffers are called ``name 0``, ``name 1`` and so on.
        num_buffers: number of buffers.
        numel, dtype, track_usage: of each buffer, as in ``MemoryBuffer``.

    Raises:
        ValueError: a buffer has one of the names.
    """

    def __init__(
        self, name: str, num_buffers: int, numel: int, dtype: torch.dtype, track_usage: bool
    ) -> None:
        self.num_buffers = num_buffers
        self.buffers = [
            allocate_mem_buff(f"{name} {i}", numel, dtype, track_usage) for i in range(num_buffers)
        ]
        self._index = -1

    def get_next_buffer(self) -> MemoryBuffer:
        """Returns the next buffer, which must have been reset since its last use.

        Raises:
            RuntimeError: it is in use.
        """
        self._index = (self._index + 1) % self.num_buffers
        buffer = self.buffers[self._index]
        if buffer.is_in_use():
            raise RuntimeError(f"{buffer.name} is in use, reset it first")
        return buffer


def allocate_mem_buff(name: str, numel: int, dtype: torch.dtype, track_usage: bool) -> MemoryBuffer:
    """Makes a buffer that ``get_mem_buff`` finds by its name.

    Args:
        name, numel, dtype, track_usage: as in ``MemoryBuffer``.

    Raises:
        ValueError: a buffer has the name.
    """
    if name in _buffers:
        raise ValueError(f"name must be new, got {name!r}")
    return _buffers.setdefault(name, MemoryBuffer(name, numel, dtype, track_usage))


def get_mem_buff(name: str) -> MemoryBuffer:
    """Returns the buffer that ``allocate_mem_buff`` made with a name.

    Raises:
        KeyError: no buffer has the name.
    """
    return _buffers[name]
