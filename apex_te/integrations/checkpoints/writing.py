"""A model's FP8 weights in the layout of the checkpoint that they were read from.

``file_state`` is the state dict of a whole model. If ranks have parts of it, ``gathered_state``
is that of the first rank; ``file_entries`` gives one tensor of the files after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from ...fp8.parameter.operands import dequantized
from ...fp8.parameter.parameter import FP8Parameter
from ...module._core.fp8_module import STATE_PREFIX
from .._file_tensors import Slot, original_format, plain_slots, unique_slots, views_of
from .._gathered import gathered
from ..fusion import key_map
from .description import Form
from .holding import unpadded
from .mapping import Held, matrix_shape


def file_state(
    model: nn.Module, weights: Mapping[str, Held], input_scales: Mapping[str, torch.Tensor]
) -> dict[str, Any]:
    """Returns a model's state dict in which codes and scales replace the FP8 weights.

    Scales have the names in the checkpoint, beside the weights, and the dtype there, unless that
    cannot hold the scale of a weight that was trained; then they are float32.
    """
    parameters = _fp8_weights(model)
    # State dicts have their scales, too, under names of their own.
    in_fp8 = parameters.keys() | {e.key for e in key_map(model).entries}
    found: dict[str, Any] = {}
    for name, value in model.state_dict().items():
        held, weight = weights.get(name), parameters.get(name)
        if held is None or weight is None:
            if not name.endswith("_scale_inv") or name.removesuffix("_scale_inv") not in in_fp8:
                found[name] = value
            continue
        prefix = name.rpartition(".")[0]
        found[name], found[f"{prefix}.{held.scale}"] = _stored(weight, held)
        if held.input_scale is not None:
            found[f"{prefix}.{held.input_scale}"] = input_scales[name]
    return found


class FileEntry(NamedTuple):
    """Tensor of the files; all of a group are made of the same parameters."""

    key: str
    size: int
    group: _Group

    def nbytes(self) -> int:
        """Returns the bytes of the tensor."""
        return self.size

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields name and tensor, once; collective if ranks have parts of it."""
        yield self.key, self.group.value(self.key)
        self.group.is_read()


def file_entries(
    model: nn.Module, weights: Mapping[str, Held], input_scales: Mapping[str, torch.Tensor]
) -> list[FileEntry]:
    """Returns the files' tensors, which all ranks must read in this order."""
    parts = _parts(model, weights, input_scales)
    bases = {key: (name, base) for name, part in parts.items() for key, base in part.bases()}
    groups: dict[tuple[str, ...], _Group] = {}
    for file in views_of(model, {key: base for key, (_, base) in bases.items()}):
        names = tuple(dict.fromkeys(bases[key][0] for key in file.slots))
        if names not in groups:
            groups[names] = _Group(model, [parts[name] for name in names])
        groups[names].add(file.key, file.view.nbytes)
    return [entry for group in groups.values() for entry in group.entries]


def gathered_state(
    model: nn.Module, weights: Mapping[str, Held], input_scales: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Returns ``file_state`` in CPU memory on the first rank, and nothing on others; collective."""
    found: dict[str, torch.Tensor] = {}
    is_first = torch.distributed.get_rank() == 0
    parts = _parts(model, weights, input_scales).values()
    for part in parts:
        part.parameter.readers += 1
    for part in parts:
        state = part.state()
        if is_first:
            found |= {name: value.to("cpu", copy=True) for name, value in state.items()}
        part.parameter.is_read()
    if is_first:
        state = model.state_dict()
        found |= {name: state[name].cpu() for name in state if f".{STATE_PREFIX}" in name}
    return found


def _parts(
    model: nn.Module, weights: Mapping[str, Held], input_scales: Mapping[str, torch.Tensor]
) -> dict[str, _Part]:
    """Returns the tensors of the plain model's state dict, shared ones once."""
    slots = unique_slots(plain_slots(model))
    parameters = {id(slot.tensor): _Parameter(slot) for slot in slots.values()}
    return {
        name: _Part(name, slot, parameters[id(slot.tensor)], weights.get(name), input_scales)
        for name, slot in slots.items()
    }


class _Parameter:
    """Parameter or buffer of the model, which is gathered once for all of its parts."""

    def __init__(self, slot: Slot) -> None:
        self.tensor, self.split = slot.tensor, slot.split
        self.is_fp8 = type(getattr(self.tensor, "_local_tensor", self.tensor)) is FP8Parameter
        self.readers = 0
        self._value: torch.Tensor | None = None

    def read(self) -> torch.Tensor:
        """Returns its value; collective if it is spread over ranks."""
        if self._value is None:
            self._value = gathered(self.tensor, None, False, self.split).value
        return self._value

    def is_read(self) -> None:
        self.readers -= 1
        if self.readers == 0:
            self._value = None


class _Part:
    """Tensor of the plain model's state dict, with its scales if it is an FP8 weight."""

    def __init__(
        self,
        name: str,
        slot: Slot,
        parameter: _Parameter,
        held: Held | None,
        input_scales: Mapping[str, torch.Tensor],
    ) -> None:
        self.name, self.slot, self.parameter = name, slot, parameter
        self.held = held if parameter.is_fp8 else None
        self.input_scale = input_scales.get(name)

    def _named(self, scale: str) -> str:
        return f"{self.name.rpartition('.')[0]}.{scale}"

    def bases(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields names and stand-ins on the meta device of what ``state`` returns."""
        if self.held is None:
            shape, dtype = self.slot.shape, self.slot.tensor.dtype
            yield self.name, torch.empty(shape, dtype=dtype, device="meta")
            return
        codes = torch.empty(self.held.shape, dtype=torch.float8_e4m3fn, device="meta")
        yield self.name, codes
        for scale, shape, dtype in scale_shapes_of(self.held):
            yield self._named(scale), torch.empty(shape, dtype=dtype, device="meta")

    def state(self) -> dict[str, torch.Tensor]:
        """Returns the tensors by name."""
        value, slot = self.parameter.read(), self.slot
        if self.held is None:
            return {self.name: slot.of(dequantized(value)).detach().contiguous()}
        if type(value) is not FP8Parameter:
            raise NotImplementedError(
                "export_fp8: layout must be None for FP8 weights of one scale that a tp_group "
                f"splits, got 'file' and {self.name}"
            )
        weight: Any = value[slot.start : slot.start + slot.rows]
        codes, scale = _stored(weight, self.held)
        found = {self.name: codes, self._named(self.held.scale): scale}
        if self.held.input_scale is not None:
            assert self.input_scale is not None
            found[self._named(self.held.input_scale)] = self.input_scale
        return found


class _Group:
    """Tensors of the files that transformers makes of the same parts."""

    def __init__(self, model: nn.Module, parts: list[_Part]) -> None:
        self.model, self.parts = model, parts
        self.entries: list[FileEntry] = []
        self._found: dict[str, torch.Tensor] = {}
        self._left = 0
        for part in parts:
            part.parameter.readers += 1

    def add(self, key: str, size: int) -> None:
        self.entries.append(FileEntry(key, size, self))
        self._left += 1

    def value(self, key: str) -> torch.Tensor:
        if not self._found:
            state: dict[str, torch.Tensor] = {}
            for part in self.parts:
                state |= part.state()
            self._found = original_format(self.model, state)
        return self._found.pop(key)

    def is_read(self) -> None:
        """Frees the parameters after the last tensor."""
        self._left -= 1
        if self._left == 0:
            for part in self.parts:
                part.parameter.is_read()


def scale_shapes_of(held: Held) -> Iterator[tuple[str, tuple[int, ...], torch.dtype]]:
    """Yields name, shape and dtype of the Parameters to which a weight's scales are loaded."""
    stored, count = held.stored, held.shape[:-2]
    shape, dtype = stored.scale_header.shape, stored.scale_header.dtype
    if held.pattern is not None:
        rows, cols = matrix_shape(shape)
        shape = (*count, held.parts * rows, cols)
    yield held.scale, shape, dtype if dtype is torch.uint8 else torch.float32
    if held.input_scale is not None:
        shape = (*count, held.parts, 1) if held.pattern else (1,) * stored.input_dims
        yield held.input_scale, shape, torch.float32


def _fp8_weights(model: nn.Module) -> dict[str, FP8Parameter]:
    """Returns the FP8 weights by name, those that are joined by the names before that."""
    found: dict[str, Any] = {
        name: parameter.detach()
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if type(parameter) is FP8Parameter
    }
    for entry in key_map(model).entries:
        whole = found.pop(entry.key, None)
        if whole is None:
            continue
        start = 0
        for key, rows in entry.parts:
            found[key] = whole[start : start + rows]
            start += rows
    return found


def _stored(weight: FP8Parameter, held: Held) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns codes and scales in the shapes to which the checkpoint's are loaded."""
    codes, scale = weight.codes()
    stored, shape = held.stored, held.shape
    if stored.form is Form.TENSOR:  # one for all parts of a matrix
        scale = scale.reshape(*shape[:-2], 1, 1).expand(*shape[:-2], held.parts, 1).contiguous()
    scale = _narrowed(scale, stored.scale_header.dtype)
    if held.pattern is None:
        scale = scale.reshape(stored.scale_header.shape)
    return unpadded(codes, shape, held.parts), scale


def _narrowed(scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns float32 scales in ``dtype`` if it holds them exactly."""
    is_bytes = dtype is torch.uint8
    narrow = scale.to(torch.float8_e8m0fnu if is_bytes else dtype)
    if not torch.equal(narrow.float(), scale):
        return scale
    return narrow.view(torch.uint8) if is_bytes else narrow
