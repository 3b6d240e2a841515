"""Offloading of activations to the CPU between forward and backward, for the first layers."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from types import TracebackType
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from .._names import named

__all__ = [
    "ActivationOffload", "CPUOffloadEnabled", "ManualOffloadSynchronizer",
    "get_cpu_offload_context", "is_cpu_offload_enabled", "mark_activation_offload",
    "mark_not_offload", "start_offload",
]  # fmt: skip

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
    offload_stream: torch.cuda.Stream | None = None,
) -> Any:
    """Returns a context in which layers run, and a function to call on each layer's output.

    What the first ``num_layers`` layers save for backward is copied to pinned memory on a stream of
    its own, and freed on the GPU. In backward a layer's tensors come back while the layer after it
    computes. Results are those without offloading, bitwise::

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
        manual_synchronization: the caller says when each layer is offloaded, by ``controller``.
        retain_pinned_cpu_buffers: keep the pinned memory for the next forward. CUDA graphs need
            that; their copies do not overlap with other work.
        offload_stream: stream of the copies of ``manual_synchronization``; None makes one.

    Returns:
        ``(context, synchronize)``: a context manager, to be entered for each layer, and a function
        that takes the layer's output and returns it, to be called after it. With
        ``manual_synchronization`` also a ``ManualOffloadSynchronizer``, None unless ``enabled``.

    Raises:
        ValueError: ``num_layers`` is not below ``model_layers``, nothing is to be offloaded, or
            ``offload_stream`` is given without ``manual_synchronization``.
    """
    owner = "get_cpu_offload_context"
    if offload_stream is not None and not manual_synchronization:
        raise ValueError(
            f"{owner}: offload_stream must be None without manual_synchronization, got a stream"
        )
    if not enabled:
        rest = (None,) if manual_synchronization else ()
        return contextlib.nullcontext(), _unchanged, *rest
    if offload_weights:
        warnings.warn(
            f"{owner}: offload_weights has no effect; weights stay where they are", stacklevel=2
        )
    if not offload_activations:
        raise ValueError(f"{owner}: offload_activations must be True with enabled=True, got False")
    if manual_synchronization:
        manual = ManualOffloadSynchronizer(
            model_layers, offload_stream, retain=retain_pinned_cpu_buffers
        )
        return manual, manual.synchronize, manual
    count = model_layers - 1 if num_layers is None else num_layers
    if not 0 <= count < model_layers:
        raise ValueError(
            f"{owner}: num_layers must be at least 0 and below model_layers, {model_layers}, since "
            f"the last layer's backward follows at once, got {num_layers}"
        )
    offload = ActivationOffload(count, model_layers, retain=retain_pinned_cpu_buffers)
    return offload, offload.synchronize


def _unchanged(tensor: torch.Tensor) -> torch.Tensor:
    """Returns its argument."""
    return tensor


def _kept(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a saved tensor that stays, without its node, which would own itself by an output."""
    return tensor if tensor.grad_fn is None else tensor.detach()


def is_cpu_offload_enabled() -> bool:
    """Returns True while a thread runs a layer in a context of ``get_cpu_offload_context``."""
    return ActivationOffload.entered > 0


def mark_not_offload(*tensors: torch.Tensor | None) -> None:
    """Marks tensors that stay on the GPU."""
    for tensor in tensors:
        if tensor is not None:
            tensor._apex_te_stays = True  # type: ignore[attr-defined]


def mark_activation_offload(*tensors: torch.Tensor | None) -> None:
    """Does nothing: every saved activation of an offloaded layer is offloaded."""


def start_offload(*tensors: torch.Tensor | None, offload_base_tensor: bool = False) -> None:
    """Does nothing: an activation is copied when a layer saves it."""


def _copy(host: torch.Tensor, tensor: torch.Tensor) -> None:
    """Begins a copy to pinned memory, which copies asynchronously only between equal strides."""
    if tensor.is_cuda and tensor.stride() != host.stride():
        tensor = torch.empty_like(host, device=tensor.device).copy_(tensor)
    host.copy_(tensor, non_blocking=True)


class _Saved:
    """Tensor that is on its device, on the CPU (``host``, after ``store``), or on both."""

    __slots__ = ("__weakref__", "_version", "device", "host", "loaded", "stored", "value")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.device = tensor.device
        self.value: torch.Tensor | None = tensor.detach()
        self._version = tensor._version
        self.host: torch.Tensor | None = None
        self.stored = self.loaded = None

    def store(self, stream: Any, host: torch.Tensor | None = None) -> None:
        """Begins to copy the tensor to the CPU."""
        tensor = self.value
        if tensor is None or self.host is not None:
            return
        self._check_version(tensor)
        if host is None:
            pinned = tensor.device.type == "cuda"
            host = torch.empty_like(tensor, device="cpu", pin_memory=pinned)
        self.host = host
        if stream is None:
            _copy(host, tensor)
            return
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            _copy(host, tensor)
            self.stored = stream.record_event()
        tensor.record_stream(stream)

    def release(self) -> None:
        """Drops the tensor on its device, if there is a copy on the CPU."""
        if self.host is not None:
            self.value = self.loaded = None

    def load(self, stream: Any) -> None:
        """Begins to bring the tensor back, unless that was begun before."""
        if self.value is not None:
            return
        assert self.host is not None
        # Allocated on the stream that computes, whose earlier work may still use the memory.
        value = torch.empty_like(self.host, device=self.device)
        self.value = value
        if stream is None:
            value.copy_(self.host, non_blocking=True)
            return
        stream.wait_event(self.stored)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            value.copy_(self.host, non_blocking=True)
            self.loaded = stream.record_event()
        value.record_stream(stream)

    def get(self, stream: Any) -> torch.Tensor:
        """Returns the tensor, for the current stream to read."""
        self.load(stream)
        if self.loaded is not None:
            torch.cuda.current_stream(self.device).wait_event(self.loaded)
        assert self.value is not None
        if self.host is None:
            self._check_version(self.value)
        return self.value

    def _check_version(self, value: torch.Tensor) -> None:
        """Raises RuntimeError if the tensor was written to since it was saved."""
        if value._version != self._version:
            raise RuntimeError(
                "get_cpu_offload_context: a tensor that is saved for backward must not be changed "
                "in place before it is offloaded, got a changed one"
            )


class _Layer:
    """Record of the tensors that one layer has saved in one forward."""

    def __init__(self, before: _Layer | None) -> None:
        self.saved: list[weakref.ref[_Saved]] = []
        self.before = before
        self._known: dict[Any, tuple[StorageWeakRef, _Saved]] = {}

    def find(self, key: Any) -> _Saved | None:
        """Returns the copy of a tensor that was saved before and is still alive, or None."""
        found = self._known.get(key)
        return None if found is None or found[0].expired() else found[1]

    def add(self, key: Any, storage: StorageWeakRef, saved: _Saved) -> None:
        """Records the copy of a tensor."""
        self.saved.append(weakref.ref(saved))
        self._known[key] = storage, saved

    def alive(self) -> list[_Saved]:
        """Returns the tensors that autograd still holds."""
        return [saved for saved in (ref() for ref in self.saved) if saved is not None]

    def finish(self) -> None:
        """Forgets which tensors were saved, since the layer has run."""
        self._known.clear()

    def load(self, stream: Any) -> None:
        """Begins to bring all tensors of the layer back, the last ones first."""
        for saved in reversed(self.alive()):
            saved.load(stream)
        self.saved.clear()


class ActivationOffload:
    """Context manager that offloads what the first layers of each forward save for backward.

    ``get_cpu_offload_context`` makes it and describes its use. Enter it for each layer, then call
    ``synchronize`` with the layer's output.

    Args:
        num_layers: number of layers to offload.
        model_layers: number of layers that one forward runs.
        smallest: tensors of fewer bytes stay.
        devices: types of devices whose tensors are offloaded.
        retain: keep pinned memory for the next forward, and for replays of a CUDA graph.

    Attributes:
        copies: number of tensors that have been saved to be copied to the CPU.
        entered: number of contexts that are entered at present, over all objects.
    """

    entered = 0

    def __init__(
        self,
        num_layers: int,
        model_layers: int,
        smallest: int = _SMALLEST,
        devices: tuple[str, ...] = ("cuda",),
        retain: bool = False,
    ) -> None:
        self.num_layers = num_layers
        self.model_layers = model_layers
        self.smallest = smallest
        self.devices = devices
        self.retain = retain
        self.copies = 0
        self._index = 0
        self._open: _Layer | None = None  # the layer that runs, if it is offloaded
        self._last: _Layer | None = None  # the offloaded layer that ran last in this forward
        self._hooks: list[saved_tensors_hooks] = []
        self._streams: dict[torch.device, tuple[Any, Any]] = {}
        self._layers: dict[int, _Layer] = {}  # of the last forward
        # Pinned memory by layer, number, shape and dtype, with the tensor that used it last.
        self._hosts: dict[Any, tuple[torch.Tensor, weakref.ref[_Saved]]] = {}
        self._captured: list[torch.Tensor] = []

    @property
    def offload_synchronizer(self) -> ActivationOffload:
        """This object, for code that looks for Transformer Engine's attribute."""
        return self

    def get_offloaded_total_size_mb(self) -> float:
        """Returns the MiB of tensors that are on the CPU for a coming backward."""
        sizes = [
            saved.host.numel() * saved.host.element_size()
            for layer in self._layers.values()
            for saved in layer.alive()
            if saved.host is not None
        ]
        return sum(sizes) / 2**20

    def __enter__(self) -> None:
        ActivationOffload.entered += 1
        hooks = saved_tensors_hooks(_kept, _unchanged)
        if self._index < self.num_layers and torch.is_grad_enabled():
            if self._open is None:
                self._open = _Layer(self._last if self._index else None)
                self._layers[self._index] = self._open
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
        """Returns the side streams of a device, to the CPU and back."""
        if device.type != "cuda":
            return None, None
        if torch.cuda.is_current_stream_capturing():
            if not self.retain:
                raise RuntimeError(
                    "get_cpu_offload_context: retain_pinned_cpu_buffers must be True for CUDA "
                    "graphs, got False"
                )
            return None, None
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device), torch.cuda.Stream(device)
        return self._streams[device]

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | _Saved:
        """Returns the copy of a saved tensor on the CPU, or the tensor where it is to stay."""
        if not self._is_wanted(tensor):
            return _kept(tensor)
        layer = self._open
        assert layer is not None
        storage = StorageWeakRef(tensor.untyped_storage())
        key = (
            storage.cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype,
            tensor._version,
        )  # fmt: skip
        saved = layer.find(key)
        if saved is None:
            saved = _Saved(tensor)
            self._store(saved)
            layer.add(key, storage, saved)
            self.copies += 1
        return saved

    def _store(self, saved: _Saved) -> None:
        """Copies a tensor that a layer saves to the CPU, and drops it on its device."""
        assert self._open is not None
        saved.store(
            self._sides(saved.device)[0], self._host(saved, self._index, len(self._open.saved))
        )
        saved.release()

    def _host(self, saved: _Saved, index: int, number: int) -> torch.Tensor | None:
        """Returns the retained memory for a tensor of a layer; None if none is to be retained."""
        tensor = saved.value
        if not self.retain or tensor is None:
            return None
        key = (index, number, tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        known = self._hosts.get(key)
        if known is not None and known[1]() is None:
            host = known[0]
        else:  # the first forward, or another forward's tensors still wait for their backward
            host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda")
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            self._hosts.pop(key, None)
            self._captured.append(host)  # replays write to it
        else:
            self._hosts[key] = host, weakref.ref(saved)
        return host

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


@named("transformer_engine.pytorch.cpu_offload")
class ManualOffloadSynchronizer(ActivationOffload):
    """``ActivationOffload`` whose caller says when each layer's tensors are copied and freed.

    A layer for which nothing is called stays on its device.
    """

    def __init__(
        self,
        model_layers: int,
        stream: torch.cuda.Stream | None = None,
        smallest: int = _SMALLEST,
        devices: tuple[str, ...] = ("cuda",),
        retain: bool = False,
    ) -> None:
        super().__init__(model_layers, model_layers, smallest, devices, retain)
        self._stream = stream

    def start_offload_layer(self, layer_id: int) -> None:
        """Begins to copy a layer's tensors to the CPU, on the stream of the copies."""
        for number, saved in enumerate(self._layer(layer_id).alive()):
            saved.store(self._sides(saved.device)[0], self._host(saved, layer_id, number))

    def release_activation_forward_gpu_memory(self, layer_id: int) -> None:
        """Frees a layer's tensors on their device; the current stream waits for their copies."""
        for saved in self._layer(layer_id).alive():
            if saved.stored is not None:
                torch.cuda.current_stream(saved.device).wait_event(saved.stored)
            saved.release()

    def start_reload_layer(self, layer_id: int) -> None:
        """Begins to bring a layer's tensors back; what is not begun, backward does."""
        for saved in self._layer(layer_id).alive():
            saved.load(self._sides(saved.device)[1])

    def synchronize(self, tensor: torch.Tensor) -> torch.Tensor:
        """Ends a layer, and returns its output."""
        if self._open is not None:
            self._open.finish()
        self._open = None
        self._index = (self._index + 1) % self.model_layers
        return tensor

    def _layer(self, layer_id: int) -> _Layer:
        """Returns the record of a layer that has run."""
        if layer_id not in self._layers:
            raise ValueError(
                f"get_cpu_offload_context: layer_id must be a layer that has run, one of "
                f"{sorted(self._layers)}, got {layer_id!r}"
            )
        return self._layers[layer_id]

    def _store(self, saved: _Saved) -> None:
        """Leaves a tensor that a layer saves on its device."""

    def _sides(self, device: torch.device) -> tuple[Any, Any]:
        """Returns the stream of the copies twice; None as in ``ActivationOffload``."""
        if self._stream is None or super()._sides(device)[0] is None:
            return super()._sides(device)
        return self._stream, self._stream
