"""The tensors of a plain model's files in which FP8 data and scales replace weights of GEMMs.

``export_fp8`` writes them to files, ``fp8_tensors`` hands them over in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from ..comm.collectives import max_over_ranks
from ..fp8.parameter.codes import of_file
from ..fp8.parameter.decode import quantizers_of
from ..fp8.parameter.operands import dequantized
from ..fp8.parameter.parameter import FP8Parameter
from ..fp8.scheme.base import layout_of
from ..module._core.fp8_module import FP8Module
from ..module._core.parallel import ParallelModule
from ..module.linear import Linear
from ..recipe import Recipe
from ._file_tensors import (
    FileTensor,
    Slot,
    file_tensors,
    original_format,
    plain_slots,
    unique_slots,
)  # fmt: skip
from ._gathered import Gathered, gathered
from .experts import StackedExperts
from .fusion import key_map

BLOCK = 128


class Form(NamedTuple):
    """Form of quantized weights and of what is beside them.

    Attributes:
        recipe: recipe without state whose cast of weights makes FP8 data and scales.
        static: also give the inputs' scales of delayed scaling.
        scale_key: last part of the name of a weight's scale.
        scalars: single scales are ``[]`` and not ``[1]``.
        input_key: last part of the name of an input's scale.
        own_experts: of experts that are spread over ranks, give each rank's own, and not all.
    """

    recipe: Recipe
    static: bool
    scale_key: str
    scalars: bool = False
    input_key: str = "input_scale"
    own_experts: bool = False

    @property
    def block_rows(self) -> int:
        """Number of rows of a weight that share scales; 0 if the weight has one scale."""
        return layout_of(self.recipe).block_rows

    def scale(self, scale: torch.Tensor) -> torch.Tensor:
        """Returns a weight's or an input's scale in its final shape."""
        if self.block_rows:
            return scale.contiguous()
        return scale.reshape(()) if self.scalars else scale.reshape(1)


class _Weight:
    """Parameter of the model, read once for all tensors of the files that have parts of it."""

    def __init__(self, slot: Slot, form: Form, has_own_experts: bool) -> None:
        self.tensor, self.split, self.form = slot.tensor, slot.split, form
        self.has_own_experts = has_own_experts
        self.readers = 0  # tensors that are still to come
        self.is_in_codes = True  # all tensors are FP8 data of whole blocks
        self._gathered: Gathered | None = None
        self._whole: dict[int | None, tuple[torch.Tensor, torch.Tensor]] = {}

    def read(self) -> Gathered:
        """Returns the parameter's value; collective if it is spread over ranks."""
        if self._gathered is None:
            recipe = self.form.recipe if self.is_in_codes else None
            self._gathered = gathered(self.tensor, recipe, self.has_own_experts, self.split)
        return self._gathered

    def is_read(self) -> None:
        """Frees what was made of the parameter after the last tensor."""
        self.readers -= 1
        if self.readers == 0:
            self._gathered = None
            self._whole.clear()

    def quantized(
        self, index: int | None, start: int, rows: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns FP8 data of rows of a matrix and scales: one, or those of the rows."""
        block, recipe = self.form.block_rows, self.form.recipe
        value, first = self.read()
        weight = value if index is None else value[index - first]
        if not block:
            if index not in self._whole:
                self._whole.clear()
                self._whole[index] = _quantized(weight, recipe)
            data, scale = self._whole[index]
            return data[start : start + rows], scale
        if start == 0 and rows == weight.shape[0]:
            return _quantized(weight, recipe)
        held, stop = _held(weight, recipe), start + rows
        if held is not None and start % block == 0 and stop in (len(weight), stop // block * block):
            data, scale = held
            return data[start:stop], scale[start // block : -(-stop // block)]
        return _quantized(dequantized(weight)[start:stop], recipe)


def _held(weight: torch.Tensor, recipe: Recipe) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Returns FP8 data and scales of a weight that is held in FP8 in the wanted layout."""
    if type(weight) is not FP8Parameter:
        return None
    held = weight._held
    data, scale = held.rowwise, held.rowwise_scale_inv
    if held.dtype is not torch.float8_e4m3fn or data is None or scale is None:
        return None
    if type(layout_of(weight.recipe)) is not type(layout_of(recipe)):
        return None
    return data, _trimmed(scale, data, recipe)


def _quantized(weight: torch.Tensor, recipe: Recipe) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns FP8 data ``[rows, cols]`` and fp32 scales of a weight."""
    held = _held(weight, recipe)
    if held is not None:
        return held
    values = dequantized(weight.detach()).contiguous()
    made = quantizers_of(recipe, values.device).weight.quantize(values, True, False)[0]
    data, scale = made.rowwise, made.rowwise_scale_inv
    assert data is not None
    assert scale is not None
    if made.dtype is not torch.float8_e4m3fn:
        raise NotImplementedError(f"entries: weights must be cast to E4M3, got {made.dtype}")
    return data.view(made.dtype), _trimmed(scale, data, recipe)


def _trimmed(scale: torch.Tensor, data: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """Returns the scales that ``data`` has in files, without those that pad their rows."""
    shape = layout_of(recipe).scales_of_file(*data.shape)
    assert shape is not None
    return scale.view(1) if shape == (1,) else of_file(scale, shape)


class _Conversion:
    """Tensors of the files that transformers computes, and that are not parts of a parameter."""

    def __init__(self, model: nn.Module, slots: Mapping[str, Slot], weights: list[_Weight]) -> None:
        self.model, self.slots, self.weights = model, slots, weights
        self.readers = 0
        self._found: dict[str, torch.Tensor] = {}
        for weight in weights:
            weight.readers += 1

    def value(self, key: str) -> torch.Tensor:
        """Returns one of the tensors."""
        if not self._found:
            pairs = zip(self.slots.items(), self.weights, strict=True)
            state = {
                name: slot.of(dequantized(weight.read().value)) for (name, slot), weight in pairs
            }
            self._found = original_format(self.model, state)
        return self._found[key]

    def is_read(self) -> None:
        """Frees the tensors after the last one."""
        self.readers -= 1
        if self.readers == 0:
            self._found = {}
            for weight in self.weights:
                weight.is_read()


class Entry:
    """Tensor of the files, with its scales if it is quantized; to be read once.

    Attributes:
        key: its name in the files.
        shape: its shape there.
        place: index in a stack, first row and number of rows in the parameter; None if it is not
            rows of one.
        is_quantized: FP8 data and scales replace it.
        input_scale: the input's ``scale_inv`` ``[1]``, or None.
    """

    def __init__(
        self, file: FileTensor, slot: Slot, reader: _Weight | _Conversion, form: Form
    ) -> None:
        self.key, self.shape = file.key, file.view.shape
        self._file, self._slot, self._reader, self._form = file, slot, reader, form
        place = None if slot.transposed else file.rows_in(slot.shape)
        if place is not None and place[0] is None:
            place = None, place[1] + slot.start, place[2]
        self.place = place
        self.is_quantized = False
        self.input_scale: torch.Tensor | None = None
        reader.readers += 1

    def begins_a_block(self) -> bool:
        """Returns True for FP8 data of rows whose first one begins blocks of the parameter."""
        block = self._form.block_rows or BLOCK
        return self.is_quantized and self.place is not None and self.place[1] % block == 0

    def nbytes(self) -> int:
        """Returns the bytes of the tensor in the files, without its scales."""
        view = self._file.view
        return view.numel() if self.is_quantized else view.nbytes

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields names and tensors, none for other ranks' experts; they may be the model's own."""
        if self._is_here():
            if self.is_quantized:
                yield from self._quantized()
            else:
                yield self.key, self._value().detach().contiguous()
        self._reader.is_read()

    def _quantized(self) -> Iterator[tuple[str, torch.Tensor]]:
        form, stem = self._form, self.key.removesuffix("weight")
        if isinstance(self._reader, _Weight) and self.place is not None:
            data, scale = self._reader.quantized(*self.place)
        else:
            data, scale = _quantized(self._value(), form.recipe)
        yield self.key, data.contiguous()
        yield stem + form.scale_key, form.scale(scale)
        if self.input_scale is not None:
            yield stem + form.input_key, form.scale(self.input_scale)

    def _is_here(self) -> bool:
        """Returns False for an expert that another rank has."""
        reader = self._reader
        if not isinstance(reader, _Weight) or not reader.has_own_experts:
            return True
        assert self.place is not None
        value, first = reader.read()
        return first <= (self.place[0] or 0) < first + len(value)

    def _value(self) -> torch.Tensor:
        """Returns the tensor without quantizing it."""
        if isinstance(self._reader, _Conversion):
            return self._reader.value(self.key)
        value, first = self._reader.read()
        index, start, rows = self.place or (None, 0, 0)
        if index is not None:
            return dequantized(value[index - first])[start : start + rows]
        return self._file.of(self._slot.of(dequantized(value)))


def entries(model: Any, form: Form) -> tuple[list[Entry], list[str]]:
    """Returns the files' tensors, and names of the linear layers that are not quantized.

    All ranks of a sharded model must read all entries, in this order.
    """
    chosen = _Chosen(model, form)
    complete = plain_slots(model)
    slots = unique_slots(complete)
    ignored = [
        key.removesuffix(".weight") for key, slot in complete.items()
        if key not in slots and len(slot.shape) == 2 and chosen.is_left(key)
    ]  # fmt: skip
    weights = {
        id(slot.tensor): _Weight(slot, form, chosen.has_own_experts(slot))
        for slot in slots.values()
    }
    groups: dict[Any, list[Entry]] = {}  # by parameter, which is read once
    conversions: dict[tuple[str, ...], _Conversion] = {}
    for file in file_tensors(model, slots):
        slot = slots[file.slots[0]]
        weight = weights[id(slot.tensor)]
        reader: _Weight | _Conversion = weight
        if not file.is_view:
            if file.slots not in conversions:
                own = {key: slots[key] for key in file.slots}
                conversions[file.slots] = _Conversion(
                    model, own, [weights[id(each.tensor)] for each in own.values()]
                )
            reader = conversions[file.slots]
        entry = Entry(file, slot, reader, form)
        if weight.has_own_experts and (entry.place is None or entry.place[0] is None):
            raise NotImplementedError(
                "entries: model must have experts that are rows of their parameters to be spread "
                f"over ranks, got {entry.key}"
            )
        groups.setdefault(reader, []).append(entry)
        if len(entry.shape) == 2:
            chosen.choose(entry, file.slots[0], slot)
            if not entry.is_quantized and chosen.is_left(file.slots[0]):
                ignored.append(file.key.removesuffix(".weight"))
        for each in (weights[id(slots[key].tensor)] for key in file.slots):
            each.is_in_codes &= entry.begins_a_block()
    found = []
    for group in groups.values():
        found += sorted(group, key=lambda entry: tuple(n or 0 for n in entry.place or ()))
    return found, ignored


class _Chosen:
    """Weights of the model that are quantized, by name in the plain model, and layers of experts.

    Attributes:
        linear: input's ``scale_inv``, or None, of each matrix.
        experts: layers of stacked experts.
    """

    def __init__(self, model: nn.Module, form: Form) -> None:
        self._model, self._form = model, form
        self.linear: dict[str, torch.Tensor | None] = {}
        self.experts: dict[str, StackedExperts] = {}
        embeddings = []
        for name, module in model.named_modules():
            if isinstance(module, Linear) and module._parameters["weight"] is not None:
                self.linear[f"{name}.weight"] = self._input_scale(name, module, 0)
            elif isinstance(module, StackedExperts):
                self.experts[name] = module
            elif isinstance(module, nn.Embedding):
                embeddings.append(f"{name}.weight")
        for entry in key_map(model).entries:
            self.linear.pop(entry.key, None)
            owner, _, attribute = entry.key.rpartition(".")
            if not attribute.endswith("weight") or attribute.startswith("layer_norm"):
                continue
            if entry.transposed:
                continue
            gemm = int(attribute.startswith("fc2"))
            scale = self._input_scale(owner, model.get_submodule(owner), gemm)
            self.linear.update(dict.fromkeys([key for key, _ in entry.parts], scale))
        for key in _tied_to_others(model, self.linear):
            del self.linear[key]
        if not self.linear and not self.experts:
            raise ValueError(
                "entries: model must have linear layers converted by from_torch, got none"
            )
        self._embeddings = frozenset(embeddings)

    def has_own_experts(self, slot: Slot) -> bool:
        """Returns True for a stack of experts if each rank gives its own."""
        if not self._form.own_experts:
            return False
        owner = self._model.get_submodule(slot.name.rpartition(".")[0])
        return getattr(owner, "_is_expert_parallel", False) and hasattr(slot.tensor, "device_mesh")

    def is_left(self, key: str) -> bool:
        """Returns True for the name of a matrix of a linear layer that is not quantized."""
        return key.endswith(".weight") and key not in self.linear and key not in self._embeddings

    def choose(self, entry: Entry, key: str, slot: Slot) -> None:
        """Marks a matrix as quantized, if ``key`` or the owner of ``slot`` says so."""
        owner, _, attribute = slot.name.rpartition(".")
        if not entry.key.endswith(".weight"):
            return
        if key in self.linear:
            entry.is_quantized, entry.input_scale = True, self.linear[key]
        elif owner in self.experts:
            layer = self.experts[owner]
            gemm = layer.down_gemm if attribute == "down_proj" else layer.gate_up_gemm
            index = 0 if entry.place is None else entry.place[0] or 0
            entry.is_quantized = True
            entry.input_scale = self._input_scale(owner, gemm, index)

    def _input_scale(self, name: str, module: Any, gemm: int) -> torch.Tensor | None:
        """Returns ``scale_inv`` of a GEMM's input, ``[1]``, from the module's FP8 state."""
        if not self._form.static:
            return None
        state = module.fp8_state if isinstance(module, FP8Module) else None
        if state is None or not state.allocated:
            raise ValueError(
                'entries: activations must be "dynamic" for layers without the state of delayed '
                f'scaling, got "static" and none in {name}'
            )
        scale_inv = state.scale_inv_fwd[3 * gemm : 3 * gemm + 1]
        group = module.tp_group if isinstance(module, ParallelModule) else None
        if group is not None and module.tp_size > 1:  # ranks' parts of an input have other scales
            scale_inv = scale_inv.clone()
            max_over_ranks(scale_inv, group)
        return scale_inv


def _tied_to_others(model: nn.Module, linear: Mapping[str, Any]) -> list[str]:
    """Returns the keys of ``linear`` whose weight a module shares that cannot read FP8."""
    holders: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for key, parameter in module.named_parameters(name, recurse=False):
            holders.setdefault(id(parameter), []).append(key)
    tied = [keys for keys in holders.values() if not all(key in linear for key in keys)]
    return [key for keys in tied for key in keys if key in linear]


def is_spread(model: nn.Module) -> bool:
    """Returns True if ranks have parts of parameters, so that reading entries is collective."""
    slots = plain_slots(model).values()
    return any(slot.split is not None or hasattr(slot.tensor, "device_mesh") for slot in slots)


def check_model(model: Any) -> None:
    """Raises an error if ``model`` is not a model of Hugging Face whose weights can be read."""
    if not isinstance(model, nn.Module) or not hasattr(model, "config"):
        raise TypeError(
            f"entries: model must be a model of Hugging Face, got {type(model).__name__}"
        )
    for module in model.modules():
        if any(kind.__name__ == "BaseTunerLayer" for kind in type(module).__mro__):
            raise ValueError(
                "entries: model must not have adapters; call merge_and_unload() first, "
                f"got {type(module).__name__}"
            )
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ValueError(f"entries: model must have values, got {name} on the meta device")
