"""Reading of a released FP8 checkpoint by parts: of each tensor the rows that a rank has."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from ...fp8.parameter.parameter import FP8Parameter
from ...fp8.scheme.base import layout_of
from .._file_tensors import FileTensor, Slot, plain_slots, unique_slots, views_of
from .description import BLOCK, Form, Stored
from .holding import are_powers_of_two, form_of, widened
from .mapping import Held
from .writing import scale_shapes_of

_ME = "load_fp8_shards"


def read_shards(model: nn.Module, quantizer: Any) -> None:
    """Reads this rank's part of the files' tensors into the model, in place."""
    tied: Any = model
    tied.tie_weights()  # which to_empty has made apart
    with _Files(quantizer.files) as files, torch.no_grad():
        for target in _targets(model, quantizer.held):
            target.load(files)
    for module in model.modules():
        if module._non_persistent_buffers_set and not [*module.parameters()]:
            model._init_weights(module)  # type: ignore[operator]
    quantizer.is_on_meta = False


def have_powers_of_two(paths: Iterable[str], weights: Iterable[Stored]) -> bool:
    """Returns True if the scales of blocks in files are powers of two."""
    with _Files(paths) as files:
        return all(
            are_powers_of_two(widened(files.read(stored.scale)))
            for stored in weights
            if stored.form is Form.BLOCK
        )


def hold_without_values(model: nn.Module, quantizer: Any) -> None:
    """Gives layers FP8 Parameters on the meta device instead of those for codes."""
    given = quantizer.quantization_config.recipe
    odd = getattr(given, "pow2", False) and not have_powers_of_two(
        quantizer.files, quantizer.checkpoint.weights.values()
    )
    for name, held in quantizer.held.items():
        path, _, own = name.rpartition(".")
        module, recipe = model.get_submodule(path), quantizer.recipes[name]
        form, (*count, rows, cols) = held.stored.form, held.shape
        ends = form is Form.BLOCK and len(held.shape) == 3 and rows // held.parts % BLOCK
        for wrong, what in (
            (form is not form_of(recipe), f"{form.value} scales, held by {type(recipe).__name__}"),
            (form is Form.BLOCK and held.stored.block != (BLOCK, BLOCK), "blocks of another size"),
            (form is Form.BLOCK and odd, "scales that are not powers of two"),
            (form is Form.CHANNEL and getattr(recipe, "scales", "") == "pow2", "any scales"),
            (ends and held.parts > 1, f"{rows // held.parts} features, no multiple of {BLOCK}"),
            (held.input_scale is not None, "scales of inputs"),
        ):
            if wrong:
                raise NotImplementedError(
                    "from_fp8_checkpoint: device_map must be of devices with memory for weights "
                    f"that are not held as the files have them, got 'meta' and {held.key} with "
                    f"{what}"
                )
        scales = layout_of(recipe).scales_of_file(rows, cols)
        assert scales is not None
        weight = FP8Parameter.from_codes(
            module._parameters.pop(own).data,  # type: ignore[union-attr]
            torch.empty(*count, *scales, device="meta"),
            recipe,
            held.dtype,
        )
        module.register_parameter(own, nn.Parameter(weight))


class _Files:
    """Open safetensors files, to read parts of their tensors."""

    def __init__(self, paths: Iterable[str]) -> None:
        self._paths = list(paths)
        self._of: dict[str, Any] = {}

    def __enter__(self) -> _Files:
        from safetensors import safe_open

        self._open = [safe_open(path, framework="pt") for path in self._paths]
        for file in self._open:
            file.__enter__()
            self._of.update(dict.fromkeys(file.keys(), file))
        return self

    def __exit__(self, *error: Any) -> None:
        for file in self._open:
            file.__exit__(*error)

    def read(self, key: str, rows: slice = slice(None)) -> torch.Tensor:
        """Returns rows of a tensor, all by default."""
        if key not in self._of:
            raise ValueError(f"{_ME}: files must have all of the model's tensors, got no {key}")
        file = self._of[key]
        if rows == slice(None):
            found: torch.Tensor = file.get_tensor(key)
            return found
        found = file.get_slice(key)[rows]
        return found


class _Source(NamedTuple):
    """Tensor of the files ``shape``, and its first element in a tensor of the state dict."""

    key: str
    slot: Slot
    first: int
    shape: tuple[int, ...]


class _Target:
    """Parameter or buffer, and where its values and scales are in the files."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self.name, self.tensor = name, tensor
        self.held: Held | None = None
        self.values: list[_Source] = []
        self.scales: list[_Source] = []

    def load(self, files: _Files) -> None:
        """Reads this rank's rows, or experts."""
        local: Any = getattr(self.tensor, "_local_tensor", self.tensor)
        rows = _own_rows(self.name, self.tensor)
        if not len(rows):
            return
        if self.held is None:
            self._read(files, rows, local)
            return
        codes = torch.empty(local.shape, dtype=torch.uint8)
        self._read(files, rows, codes)
        scale = self._scale(files, rows, self.held)
        device = local.device
        local.set_codes_(codes.view(torch.float8_e4m3fn).to(device), scale.to(device))

    def _read(self, files: _Files, rows: range, out: torch.Tensor) -> None:
        """Copies values to ``out``, this rank's rows."""
        size = self.tensor.shape
        for key, slot, first, shape in self.values:
            if not size:
                out.copy_(files.read(key))
                continue
            start, inside = divmod(first, math.prod(size[1:]))
            if len(shape) == len(size) - 1:  # rows of a matrix of a stack
                if start in rows:
                    into = out[start - rows.start].narrow(0, inside // size[-1], shape[0])
                    into.copy_(_bytes(files.read(key)))
                continue
            start += slot.start
            begin, end = max(start, rows.start), min(start + shape[0], rows.stop)
            if begin < end:
                found = files.read(key, slice(begin - start, end - start))
                out[begin - rows.start : end - rows.start].copy_(_bytes(found))

    def _scale(self, files: _Files, rows: range, held: Held) -> torch.Tensor:
        """Returns the scales of this rank's rows, or experts."""
        if held.stored.form is Form.TENSOR:
            return self._single(files, rows, held)
        stack = len(self.tensor.shape) == 3
        high, wide = held.stored.block
        width = -(-self.tensor.shape[-1] // wide) if wide else 1
        height = -(-self.tensor.shape[-2] // high)
        blocks = rows if stack else range(rows.start // high, -(-rows.stop // high))
        out = torch.empty(len(blocks), *([height] if stack else []), width)
        for key, slot, first, shape in self.scales:
            start, length = first // width + slot.start // high, math.prod(shape) // width
            if stack:
                index, start = divmod(start, height)
                if index in blocks:
                    found = widened(files.read(key)).reshape(length, width)
                    out[index - blocks.start, start : start + length] = found
                continue
            begin, end = max(start, blocks.start), min(start + length, blocks.stop)
            if begin < end:
                found = widened(files.read(key, slice(begin - start, end - start)))
                out[begin - blocks.start : end - blocks.start] = found.reshape(-1, width)
        return out

    def _single(self, files: _Files, rows: range, held: Held) -> torch.Tensor:
        """Returns the one scale of each matrix."""
        stack = len(self.tensor.shape) == 3
        found: dict[int, torch.Tensor] = {}
        for key, _, first, _ in self.scales:
            index = first // held.parts if stack else 0
            if stack and index not in rows:
                continue
            scale = widened(files.read(key)).reshape(1)
            if not torch.equal(found.setdefault(index, scale), scale):
                raise NotImplementedError(
                    f"{_ME}: files must have the same scale for weights that the model joins, got "
                    f"{float(scale)} in {key} and {float(found[index])}"
                )
        return torch.stack([found[i] for i in sorted(found)]) if stack else found[0]


def _bytes(value: torch.Tensor) -> torch.Tensor:
    return value.view(torch.uint8) if value.dtype is torch.float8_e4m3fn else value


def _own_rows(name: str, tensor: Any) -> range:
    """Returns the rows, or matrices of a stack, that this rank has of a tensor."""
    if not hasattr(tensor, "device_mesh"):
        return range(tensor.shape[0] if tensor.dim() else 1)
    (chunk,) = tensor.__create_chunk_list__()
    if tuple(chunk.sizes[1:]) != tuple(tensor.shape[1:]) and chunk.sizes[0]:
        raise NotImplementedError(
            f"{_ME}: model must be sharded by rows, got {name} with {tensor.placements}"
        )
    return range(chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0])


def _targets(model: nn.Module, weights: dict[str, Held]) -> list[_Target]:
    """Returns the model's tensors, with the files' tensors that they are made of."""
    slots = unique_slots(plain_slots(model))
    targets: dict[int, _Target] = {}
    bases: dict[str, torch.Tensor] = {}
    owners: dict[str, tuple[_Target, Slot, bool]] = {}
    for name, slot in slots.items():
        target = targets.setdefault(id(slot.tensor), _Target(slot.name, slot.tensor))
        held = weights.get(name)
        found = {name: (slot.shape, slot.tensor.dtype)}
        if held is not None:
            target.held = held
            found[name] = held.shape, torch.float8_e4m3fn
            for scale, shape, dtype in scale_shapes_of(held):
                found[f"{name.rpartition('.')[0]}.{scale}"] = shape, dtype
        for key, (shape, dtype) in found.items():
            bases[key] = torch.empty(shape, dtype=dtype, device="meta")
            owners[key] = target, slot, key != name
    for file in views_of(model, bases):
        target, slot, is_scale = owners[file.slots[0]]
        source = _source(file, slot)
        less = len(slot.size) - len(source.shape)
        if not is_scale and less and (less, len(slot.size)) != (1, 3):
            raise _refused(file)
        (target.scales if is_scale else target.values).append(source)
    return list(targets.values())


def _source(file: FileTensor, slot: Slot) -> _Source:
    """Returns where a tensor of the files is in one of the state dict."""
    if not file.is_view or not file.view.is_contiguous() or slot.transposed:
        raise _refused(file)
    return _Source(file.key, slot, int(file.view.storage_offset()), tuple(file.view.shape))


def _refused(file: FileTensor) -> NotImplementedError:
    return NotImplementedError(
        f"{_ME}: files' tensors must be stacked or joined only to become the model's, got "
        f"{file.key}"
    )
