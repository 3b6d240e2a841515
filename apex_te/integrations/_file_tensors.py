"""The tensors of a plain model's files, as views of a converted model's, found without values.

transformers renames, splits and joins tensors as it saves a model. Here it does so to tensors on
the meta device, which note the elements that they are views of.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from ..module._core.fp8_module import STATE_PREFIX
from .fusion import key_map

if TYPE_CHECKING:
    from ..distributed.state_dict.split_model import Split

# By model, what was found for which tensors: thousands of experts take transformers a second.
_found: WeakKeyDictionary[nn.Module, tuple[Any, list[FileTensor]]] = WeakKeyDictionary()


class Slot(NamedTuple):
    """Tensor of the plain model's state dict.

    Attributes:
        tensor: parameter or buffer of the model that contains it.
        name: name of ``tensor`` in the model.
        start, rows: its rows, the first and their number.
        transposed: the plain model has them as columns.
        size: shape of the value of ``tensor``, of all ranks' parts if a ``tp_group`` splits it.
        split: how it does, or None.
    """

    tensor: torch.Tensor
    name: str
    start: int
    rows: int
    transposed: bool
    size: tuple[int, ...]
    split: Split | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in the plain model."""
        if not self.size:
            return ()
        shape = (self.rows, *self.size[1:])
        return shape[::-1] if self.transposed else shape

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Returns a view of the value of ``tensor`` as the plain model has it."""
        if whole.dim() and self.rows != len(whole):
            whole = whole[self.start : self.start + self.rows]
        return whole.t() if self.transposed else whole


class FileTensor(NamedTuple):
    """Tensor of the files.

    Attributes:
        key: its name there.
        slots: names in the plain model's state dict of the tensors that it is made of.
        view: its sizes, strides and offset in the one tensor that it is a view of, on the meta
            device; of a tensor that is computed otherwise, its sizes.
        is_view: which of the two it is.
    """

    key: str
    slots: tuple[str, ...]
    view: torch.Tensor
    is_view: bool

    def of(self, value: torch.Tensor) -> torch.Tensor:
        """Returns the tensor as a view of the value of its only slot."""
        value = value.contiguous()
        offset = value.storage_offset() + self.view.storage_offset()
        return value.as_strided(self.view.shape, self.view.stride(), offset)

    def rows_in(self, shape: tuple[int, ...]) -> tuple[int | None, int, int] | None:
        """Returns where whole rows are in a matrix or a stack of matrices of ``shape``.

        Returns:
            The matrix's index in the stack, or None; the first row and the number of rows. None if
            the tensor is something else.
        """
        view = self.view
        if not self.is_view or view.dim() != 2 or len(shape) not in (2, 3):
            return None
        rows, cols = view.shape
        if cols != shape[-1] or view.stride() != (cols, 1):
            return None
        first, inside = divmod(int(view.storage_offset()), cols)
        index, start = divmod(first, shape[-2])
        if inside or start + rows > shape[-2]:
            return None
        return (index if len(shape) == 3 else None), start, rows


def plain_slots(model: nn.Module) -> dict[str, Slot]:
    """Returns the tensors of the plain model's state dict; what is shared has several names."""
    joined = {entry.key: entry for entry in key_map(model).entries if not entry.former}
    splits = _splits(model)
    found: dict[str, Slot] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        own = {**module._parameters, **module._buffers}
        for short, tensor in own.items():
            name = f"{prefix}.{short}" if prefix else short
            if tensor is None or short in module._non_persistent_buffers_set:
                continue
            if short.startswith(STATE_PREFIX):
                continue
            entry, start, size = joined.get(name), 0, tuple(tensor.shape)
            split = splits.get(id(tensor))
            ranks = 1
            if split is not None:
                if entry is not None and split.dim == 0:
                    split = split._replace(matrices=tuple(rows for _, rows in entry.parts))
                    ranks = split.ranks
                size = tuple(split.parts(size[split.dim], 0).whole_shape(size))
            if entry is None:
                rows = size[0] if size else 1
                found[name] = Slot(tensor, name, 0, rows, False, size, split)
                continue
            for key, rows in entry.parts:
                rows *= ranks
                found[key] = Slot(tensor, name, start, rows, entry.transposed, size, split)
                start += rows
    return found


def _splits(model: nn.Module) -> dict[int, Split]:
    """Returns how ranks split parameters of the modules of apex_te, by ``id``."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return {}
    from ..distributed.state_dict.split_model import splits_of

    return splits_of("entries", model)


def file_tensors(model: nn.Module, slots: Mapping[str, Slot]) -> list[FileTensor]:
    """Returns the tensors of the files that ``save_pretrained`` writes for ``slots``, cached."""
    stamp = tuple((key, slot.shape, slot.tensor.dtype) for key, slot in slots.items())
    known = _found.get(model)
    if known is None or known[0] != stamp:
        known = _found[model] = stamp, _file_tensors(model, slots)
    return known[1]


def _file_tensors(model: nn.Module, slots: Mapping[str, Slot]) -> list[FileTensor]:
    return views_of(
        model,
        {
            key: torch.empty(slot.shape, dtype=slot.tensor.dtype, device="meta")
            for key, slot in slots.items()
        },
    )


def views_of(model: nn.Module, bases: Mapping[str, torch.Tensor]) -> list[FileTensor]:
    """Returns the tensors of the files for a state dict of tensors on the meta device."""
    storages = {key: base.untyped_storage()._cdata for key, base in bases.items()}
    found = []
    for key, value in original_format(
        model, {key: _Tracked(base, (key,)) for key, base in bases.items()}
    ).items():
        view = value.tracked
        is_view = len(value.keys) == 1 and (
            view.untyped_storage()._cdata == storages[value.keys[0]]
        )
        found.append(FileTensor(key, value.keys, view, is_view))
    return found


def unique_slots(complete: Mapping[str, Slot]) -> dict[str, Slot]:
    """Returns the slots without further names of shared tensors."""
    first = {(id(slot.tensor), slot.start): key for key, slot in reversed([*complete.items()])}
    unique = set(first.values())
    return {key: slot for key, slot in complete.items() if key in unique}


def original_format(model: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """Returns ``state`` under the names of the files that ``save_pretrained`` writes."""
    from transformers import core_model_loading

    revert = getattr(core_model_loading, "revert_weight_conversion", None)
    return state if revert is None else dict(revert(model, state))


class _Tracked(torch.Tensor):
    """Stand-in for a contiguous tensor, with the meta tensor that is its view of the model's."""

    tracked: torch.Tensor
    keys: tuple[str, ...]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls: type[_Tracked], tracked: torch.Tensor, keys: tuple[str, ...]) -> _Tracked:
        self = torch.Tensor._make_wrapper_subclass(
            cls, tracked.shape, dtype=tracked.dtype, device=tracked.device
        )
        self.tracked, self.keys = tracked, keys
        return self

    def __init__(self, *args: Any) -> None:
        pass

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, cls)]
        keys = tuple(dict.fromkeys(key for each in given for key in each.keys))

        def run(contiguous: bool) -> Any:
            def untracked(each: Any) -> Any:
                if not isinstance(each, cls):
                    return each
                return each.tracked.contiguous() if contiguous else each.tracked

            return func(*tree_map(untracked, args), **tree_map(untracked, kwargs or {}))

        try:
            out = run(False)
        except RuntimeError:  # a view of contiguous memory that there is not
            out = run(True)
        return tree_map(
            lambda each: cls(each, keys) if isinstance(each, torch.Tensor) else each, out
        )
