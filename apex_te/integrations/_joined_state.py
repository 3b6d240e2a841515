"""State dicts of blocks with joined layers: they have the keys of the original layers.

Hooks of the block cut each joined parameter into the original ones when a state dict is made, and
join these when one is loaded. So files of a fused model are those of the plain model.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

__all__ = ["JoinedKey", "JoinedState", "PartView", "joined", "original_part"]


class JoinedKey(NamedTuple):
    """A parameter made of others.

    Attributes:
        key: the parameter's key.
        parts: key and rows of each original parameter, stacked in this order.
        transposed: True if the original parameters are stored ``[in, out]``.
    """

    key: str
    parts: tuple[tuple[str, int], ...]
    transposed: bool = False

    def prefixed(self, prefix: str) -> JoinedKey:
        """Returns this entry with ``prefix`` before each of its keys."""
        parts = tuple((prefix + key, rows) for key, rows in self.parts)
        return JoinedKey(prefix + self.key, parts, self.transposed)

    def split(self, value: torch.Tensor) -> list[torch.Tensor]:
        """Returns the original parameters as views of the joined one."""
        rows = [count for _, count in self.parts]
        return [original_part(part, self.transposed) for part in value.split(rows)]


def original_part(part: torch.Tensor, transposed: bool) -> torch.Tensor:
    """Returns rows of a joined parameter as the original parameter is laid out."""
    return part.t() if transposed else part


def joined(values: list[torch.Tensor], transposed: bool) -> torch.Tensor:
    """Returns ``values`` stacked by rows; ``transposed`` ones are stored ``[in, out]``."""
    if len(values) == 1 and not transposed:
        return values[0]
    return torch.cat([value.t() if transposed else value for value in values]).contiguous()


class PartView:
    """Weight and bias of a layer that was joined, as views of the joined parameters.

    Attributes:
        rows: by attribute, ``(name, start, rows, transposed)``: the joined parameter's name, the
            part's first row and number of rows, and if it is stored ``[in, out]``.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.rows: dict[str, tuple[str, int, int, bool]] = {}

    def part(self, attribute: str) -> torch.Tensor | None:
        """Returns the original parameter ``attribute``, None if the layer has none."""
        if attribute not in self.rows:
            return None
        name, start, rows, transposed = self.rows[attribute]
        value: torch.Tensor = getattr(self.module, name)
        return original_part(value.narrow(0, start, rows), transposed)

    @property
    def weight(self) -> torch.Tensor | None:
        """Returns the original weight as a view of the joined one."""
        return self.part("weight")

    @property
    def bias(self) -> torch.Tensor | None:
        """Returns the original bias as a view of the joined one, None without a bias."""
        return self.part("bias")


class JoinedState:
    """State dict hooks of one block.

    Args:
        entries: the joined parameters, by keys in the block.
        order: the keys of the block's state dict before anything was joined.
    """

    def __init__(self, entries: Iterable[JoinedKey], order: list[str]) -> None:
        self.entries = tuple(entries)
        self.order = order
        self._prefix = ""

    def install(self, block: nn.Module) -> None:
        """Registers the hooks."""
        block.register_state_dict_post_hook(self)
        block.register_load_state_dict_pre_hook(self.before_load)
        block.register_load_state_dict_post_hook(self.after_load)

    def __call__(
        self, block: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any
    ) -> None:
        """Gives ``state_dict`` the original keys, in their order."""
        own = {key: state_dict.pop(key) for key in list(state_dict) if key.startswith(prefix)}
        for entry in self.entries:
            entry = entry.prefixed(prefix)
            value = own.pop(entry.key, None)
            if value is not None:
                parts = zip(entry.parts, entry.split(value), strict=True)
                own.update({key: _own_storage(part) for (key, _), part in parts})
        for key in self.order:
            if prefix + key in own:
                state_dict[prefix + key] = own.pop(prefix + key)
        state_dict.update(own)

    def before_load(
        self,
        block: nn.Module,
        state_dict: dict[str, Any],
        prefix: str,
        metadata: Any,
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        """Joins what ``state_dict`` has of the original keys; joined keys are taken as they are."""
        self._prefix = prefix
        for entry in self.entries:
            own = block.get_parameter(entry.key).detach()
            entry = entry.prefixed(prefix)
            if self._is_joined(entry, state_dict, own):
                continue
            if not any(key in state_dict for key, _ in entry.parts):
                continue
            values = []
            for (key, _), current in zip(entry.parts, entry.split(own), strict=True):
                value = state_dict.pop(key, None)
                if value is None:
                    missing.append(key)
                elif not isinstance(value, torch.Tensor) or value.shape != current.shape:
                    errors.append(_mismatch(key, value, current))
                    value = None
                values.append(current if value is None else value)
            device = next((v.device for v in values if not v.is_meta), own.device)
            # Parts that are not there keep their values, those that are have the file's.
            if not any(v.is_meta for v in values):
                values = [v.to(device) for v in values]
            elif not all(v.is_meta for v in values):
                continue  # after_load says that all of them are missing
            state_dict[entry.key] = _like(own, joined(values, entry.transposed))

    def _is_joined(self, entry: JoinedKey, state_dict: dict[str, Any], own: torch.Tensor) -> bool:
        """Returns True if ``state_dict`` has the joined parameter, as earlier releases saved it."""
        if entry.key not in state_dict:
            return False
        if entry.key != entry.parts[0][0]:
            # Where all of both are there, a tool has added the model's own: the joined one.
            return not all(key in state_dict for key, _ in entry.parts)
        # GPT-2's c_attn has one name for both: [in, 3 in] originally, [3 in, in] joined.
        shape = getattr(state_dict[entry.key], "shape", None)
        return shape == own.shape and shape != entry.split(own)[0].shape

    def after_load(self, block: nn.Module, incompatible: Any) -> None:
        """Replaces missing joined keys by the original ones in the report of a load."""
        missing: list[str] = incompatible.missing_keys
        for entry in self.entries:
            entry = entry.prefixed(self._prefix)
            if entry.key in missing:
                missing.remove(entry.key)
                missing += [key for key, _ in entry.parts if key not in missing]


def _mismatch(key: str, value: Any, current: torch.Tensor) -> str:
    if not isinstance(value, torch.Tensor):
        return f"{key} must be a tensor, got {type(value).__name__}"
    return (
        f"size mismatch for {key}: copying a param with shape {value.shape} from checkpoint, "
        f"the shape in current model is {current.shape}."
    )


def _like(own: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Returns ``value``, sharded as ``own`` is if that is a DTensor and ``value`` is whole."""
    if type(own) is torch.Tensor or not torch.distributed.is_available():
        return value
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(own, DTensor) or isinstance(value, DTensor):
        return value
    return distribute_tensor(value.to(own.device), own.device_mesh, own.placements)


def _own_storage(part: torch.Tensor) -> torch.Tensor:
    """Returns ``part`` with a storage of its own in the same memory.

    Tools that write safetensors drop all but one of the tensors that have one storage; a copy
    would not follow the parameter, as other entries of a state dict do.
    """
    if type(part) is not torch.Tensor or part.is_meta or part.requires_grad:
        return part  # DTensors, fake tensors, and views that keep_vars=True wants differentiable
    return torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(part))
