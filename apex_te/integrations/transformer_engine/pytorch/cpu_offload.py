"""Offloading of activations to the CPU between forward and backward, for the first layers."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from .._names import neutral

__all__ = [
    "ActivationOffload",
    "CPUOffloadEnabled",
    "get_cpu_offload_context",
    "is_cpu_offload_enabled",
    "mark_activation_offload",
    "mark_not_offload",
]

# Frameworks that offload by themselves assign it; apex_te's modules do not read it.
CPUOffloadEnabled = False

_SMALLEST = 1 << 16  # bytes; smaller tensors stay, since each copy costs a launch


def get_cpu_offload_context(
    enabled: bool = False,
    num_layers: int | None = 1,
    model_layers: int = 1,
    offload_activations: bool = True,
    offload_weights: bool = False,
    double_buffering: bool = False,
    manual_synchronization: bool = False,
    retain_pinned_cpu_buffers: bool = False,
) -> tuple[Any, Callable[[torch.Tensor], torch.Tensor]]:
    """Returns a context in which layers run, and a function to call on each layer's output.

    What the first ``num_layers`` layers save for backward is copied to pinned memory on a stream of
    its own, and freed on the GPU. In backward a layer's tensors come back while the layer after it
    computes. Results are those without offloading, to the bit::

        for layer in layers:
            with context:
                x = layer(x)
            x = synchronize(x)

    Args:
        enabled: offload; False returns a context and a function that do nothing.
        num_layers: number of layers to offload, fewer than ``model_layers``.
        model_layers: number of layers that are run in the context in one forward.
        offload_activations: must be True where ``enabled`` is.
        offload_weights: has no effect but a warning, as in Transformer Engine.
        double_buffering: has no effect; torch's allocators keep buffers for reuse.
        manual_synchronization: must be False.
        retain_pinned_cpu_buffers: has no effect; torch keeps pinned memory for reuse.

    Returns:
        context: context manager, to be entered for each layer.
        synchronize: function that takes the layer's output and returns it, to be called after it.

    Raises:
        NotImplementedError: ``manual_synchronization`` is True.
        ValueError: ``num_layers`` is not below ``model_layers``, or nothing is to be offloaded.
    """
    if not enabled:
        return contextlib.nullcontext(), _unchanged
    owner = "get_cpu_offload_context"
    neutral(owner, manual_synchronization=(manual_synchronization, False))
    if offload_weights:
        warnings.warn(
            f"{owner}: offload_weights has no effect; weights stay where they are", stacklevel=2
        )
    if not offload_activations:
        raise ValueError(f"{owner}: offload_activations must be True with enabled=True, got False")
    count = model_layers - 1 if num_layers is None else num_layers
    if not 0 <= count < model_layers:
        raise ValueError(
            f"{owner}: num_layers must be at least 0 and below model_layers, {model_layers}, since "
            f"the last layer's backward follows at once, got {num_layers}"
        )
    offload = ActivationOffload(count, model_layers)
    return offload, offload.synchronize


def _unchanged(tensor: torch.Tensor) -> torch.Tensor:
    """Returns its argument."""
    return tensor


def is_cpu_offload_enabled() -> bool:
    """Returns True while a thread runs a layer in a context of ``get_cpu_offload_context``."""
    return ActivationOffload.entered > 0


def mark_not_offload(*tensors: torch.Tensor | None) -> None:
    """Marks tensors that stay on the GPU."""
    for tensor in tensors:
        if tensor is not None:
            tensor._apex_te_stays = True  # type: ignore[attr-defined]


def mark_activation_offload(*tensors: torch.Tensor | None) -> None:
    """Does nothing: every saved activation of an offloaded layer is offloaded.

    Args:
        tensors: activations.
    """


class _Saved:
    """Tensor that has been copied to the CPU.

    Attributes:
        host: the copy.
        device: device that the tensor was on.
        stored: event after the copy to the CPU; None without a GPU.
        value: the tensor again, once it has been brought back.
        loaded: event after the copy back; None without a GPU.
    """

    __slots__ = ("device", "host", "loaded", "stored", "value")

    def __init__(self, tensor: torch.Tensor, stream: Any) -> None:
        self.device = tensor.device
        self.value: torch.Tensor | None = None
        self.stored = self.loaded = None
        if stream is None:
            self.host = tensor.detach().clone()
            return
        self.host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            self.host.copy_(tensor.detach(), non_blocking=True)
            self.stored = stream.record_event()
        tensor.record_stream(stream)

    def load(self, stream: Any) -> None:
        """Begins to bring the tensor back, unless that was begun before.

        Args:
            stream: side stream for the copy; None without a GPU.
        """
        if self.value is not None:
            return
        if stream is None:
            self.value = self.host.to(self.device, copy=True)
            return
        stream.wait_event(self.stored)
        # Allocated on the stream that computes, whose earlier work may still use the memory.
        value = torch.empty_like(self.host, device=self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            value.copy_(self.host, non_blocking=True)
            self.loaded = stream.record_event()
        value.record_stream(stream)
        self.value = value

    def get(self, stream: Any) -> torch.Tensor:
        """Returns the tensor, for the current stream to read.

        Args:
            stream: side stream for the copy; None without a GPU.
        """
        self.load(stream)
        if self.loaded is not None:
            torch.cuda.current_stream(self.device).wait_event(self.loaded)
        assert self.value is not None
        return self.value


class _Layer:
    """Record of the tensors that one layer has saved in one forward.

    Attributes:
        saved: the offloaded tensors, in the order in which they were saved.
        before: the layer before it, which is offloaded, too; else None.
    """

    def __init__(self, before: _Layer | None) -> None:
        self.saved: list[_Saved] = []
        self.before = before
        self._known: dict[Any, tuple[StorageWeakRef, _Saved]] = {}

    def find(self, key: Any) -> _Saved | None:
        """Returns the copy of a tensor that was saved before and is still alive, or None.

        Args:
            key: what identifies the tensor's memory, layout and version.
        """
        found = self._known.get(key)
        return None if found is None or found[0].expired() else found[1]

    def add(self, key: Any, storage: StorageWeakRef, saved: _Saved) -> None:
        """Notes the copy of a tensor.

        Args:
            key: what identifies the tensor's memory, layout and version.
            storage: reference to the tensor's storage, which keeps its number from being reused.
            saved: the copy.
        """
        self.saved.append(saved)
        self._known[key] = storage, saved

    def finish(self) -> None:
        """Forgets which tensors were saved, since the layer has run."""
        self._known.clear()

    def load(self, stream: Any) -> None:
        """Begins to bring all tensors of the layer back, the last ones first.

        Args:
            stream: side stream for the copies; None without a GPU.
        """
        for saved in reversed(self.saved):
            saved.load(stream)
        self.saved.clear()


class ActivationOffload:
    """Context manager that offloads what the first layers of each forward save for backward.

    Args:
        num_layers: number of layers to offload.
        model_layers: number of layers of a forward.
        smallest: bytes below which tensors stay.
        devices: types of the devices whose tensors are offloaded.

    Attributes:
        copies: number of tensors that have been copied to the CPU.
        entered: number of contexts of this class that are entered at present.
    """

    entered = 0

    def __init__(
        self,
        num_layers: int,
        model_layers: int,
        smallest: int = _SMALLEST,
        devices: tuple[str, ...] = ("cuda",),
    ) -> None:
        self.num_layers = num_layers
        self.model_layers = model_layers
        self.smallest = smallest
        self.devices = devices
        self.copies = 0
        self._index = 0
        self._open: _Layer | None = None  # the layer that runs, if it is offloaded
        self._last: _Layer | None = None  # the offloaded layer that ran last in this forward
        self._hooks: list[saved_tensors_hooks] = []
        self._streams: dict[torch.device, tuple[Any, Any]] = {}

    def __enter__(self) -> None:
        ActivationOffload.entered += 1
        hooks = saved_tensors_hooks(_unchanged, _unchanged)
        if self._index < self.num_layers and torch.is_grad_enabled():
            if self._open is None:
                self._open = _Layer(self._last if self._index else None)
            hooks = saved_tensors_hooks(self._pack, self._unpack)
        hooks.__enter__()
        self._hooks.append(hooks)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        ActivationOffload.entered -= 1
        self._hooks.pop().__exit__(kind, error, trace)

    def synchronize(self, tensor: torch.Tensor) -> torch.Tensor:
        """Ends a layer, and returns its output, to go on with.

        When the output has its gradient, the layer's tensors begin to come back.

        Args:
            tensor: the layer's output.
        """
        index, layer = self._index, self._open
        self._index = (index + 1) % self.model_layers
        if layer is not None:
            layer.finish()
            self._last, self._open = layer, None
        elif index == self.num_layers:
            # The tensors of the layer before come back while this layer's backward computes.
            layer = self._last
        if index >= self.num_layers:
            self._last = None
        if layer is None or not (torch.is_grad_enabled() and tensor.requires_grad):
            return tensor
        before = layer.before if index < self.num_layers else None

        def load(grad: torch.Tensor) -> None:
            stream = self._sides(grad.device)[1]
            for wanted in (layer, before):
                if wanted is not None:
                    wanted.load(stream)

        tensor.register_hook(load)  # runs before the layer's backward
        return tensor

    def _sides(self, device: torch.device) -> tuple[Any, Any]:
        """Returns the side streams of a device, to the CPU and back; None for the CPU."""
        if device.type != "cuda":
            return None, None
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device), torch.cuda.Stream(device)
        return self._streams[device]

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | _Saved:
        """Returns the copy of a saved tensor on the CPU, or the tensor where it is to stay."""
        if not self._is_wanted(tensor):
            return tensor
        layer = self._open
        assert layer is not None
        storage = StorageWeakRef(tensor.untyped_storage())
        key = (
            storage.cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype,
            tensor._version,
        )  # fmt: skip
        saved = layer.find(key)
        if saved is None:
            saved = _Saved(tensor, self._sides(tensor.device)[0])
            layer.add(key, storage, saved)
            self.copies += 1
        return saved

    def _unpack(self, packed: torch.Tensor | _Saved) -> torch.Tensor:
        """Returns the tensor that ``_pack`` was given."""
        if isinstance(packed, torch.Tensor):
            return packed
        return packed.get(self._sides(packed.device)[1])

    def _is_wanted(self, tensor: torch.Tensor) -> bool:
        """Returns True for an activation that is large enough and was not marked to stay."""
        if type(tensor) is not torch.Tensor or tensor.device.type not in self.devices:
            return False
        if tensor.numel() * tensor.element_size() < self.smallest:
            return False
        base = tensor if tensor._base is None else tensor._base
        return not isinstance(base, torch.nn.Parameter) and not hasattr(tensor, "_apex_te_stays")
