"""``_extra_state`` of alias modules: the FP8 state as one byte tensor, read without unpickling."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch

from ...fp8.delayed.ranks import amax_groups
from ...fp8.delayed.serialize import load_state
from ...module._core.fp8_module import STATE_PREFIX, FP8Module
from ...module.grouped.linear import GroupedLinear
from .._extra_state_bytes import encoded, no_bytes
from ..te_state import TEStateError, saved_state

__all__ = ["ExtraState", "WithoutExtraState"]

KEY = "_extra_state"


class ExtraState(torch.nn.Module):
    """Base of modules whose state dicts always have the key ``_extra_state``.

    Its value is a uint8 vector, which frameworks filter, shard and split by name. A module with an
    FP8 state saves it there, instead of the keys ``fp8_state.*`` of apex_te's own modules; without,
    and before its first forward in FP8, the vector is empty. A load takes the FP8 state from either
    of the two, or from what any release of Transformer Engine has saved, and nothing in it is
    imported or called. Modules without an FP8 state, such as norms, do not look at it.

    It comes before ``FP8Module`` in a class's bases.
    """

    def get_extra_state(self) -> torch.Tensor:
        """Returns the value of ``_extra_state`` in a state dict, a uint8 vector on the CPU.

        It is empty without an FP8 state and before the first forward in FP8.
        """
        if not isinstance(self, FP8Module):
            return no_bytes()
        by_kind = isinstance(self, GroupedLinear)
        return encoded(self.fp8_state, self._fp8.recipe, by_kind)

    def set_extra_state(self, state: Any) -> None:
        """Sets the FP8 state from an ``_extra_state`` of apex_te or Transformer Engine.

        It may be of any release. An empty one changes nothing; nor does a module without an FP8
        state read it.

        Args:
            state: the value; nothing in it is imported or called.

        Raises:
            TypeError: as for ``read_te_extra_state``.
            TEStateError: as for ``read_te_extra_state``.
        """
        if not isinstance(self, FP8Module):
            return
        entries = self._entries(state, STATE_PREFIX)
        if not entries:
            return
        errors: list[str] = []
        load_state(self._fp8, entries, STATE_PREFIX, self._state_device(), [], errors)
        assert not errors, errors  # what saved_state has checked is as save_state has it

    def _entries(self, state: Any, prefix: str) -> dict[str, Any]:
        """Returns the entries ``fp8_state.*`` of a state dict that equal an ``_extra_state``."""
        assert isinstance(self, FP8Module)
        found = saved_state(state, self)
        if found is None:
            return {}
        if found.pending:
            amax_groups.pending = max(amax_groups.pending, 1)
        return found.entries(prefix)

    def _save_fp8_state(self, destination: dict[str, Any], prefix: str) -> None:
        """Adds nothing to a state dict: ``get_extra_state`` has the FP8 state."""

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        # They may change what is to be loaded: Megatron's merge states of several GEMMs.
        for hook in self._load_state_dict_pre_hooks.values():
            hook(
                state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys,
                error_msgs,
            )  # fmt: skip
        key, own = prefix + KEY, prefix + STATE_PREFIX
        found = state_dict
        is_replaced = type(self).set_extra_state is not ExtraState.set_extra_state
        if key in state_dict:
            found = {name: value for name, value in state_dict.items() if name != key}
            reads = isinstance(self, FP8Module) and not is_replaced
            if reads and not any(name.startswith(own) for name in found):
                try:
                    found.update(self._entries(state_dict[key], own))
                except (TEStateError, TypeError) as error:
                    error_msgs.append(f"{key}: {error}")
                    return
        with _without_load_hooks(self):
            super()._load_from_state_dict(
                found, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
            )
        # Checkpoints of plain layers, and of apex_te's own modules, do not have it.
        missing_keys[:] = [name for name in missing_keys if name != key]
        if is_replaced and key in state_dict:  # by a subclass, or by a framework
            self.set_extra_state(state_dict[key])


@contextlib.contextmanager
def _without_load_hooks(module: torch.nn.Module) -> Iterator[None]:
    """Hides the module's pre-hooks of ``load_state_dict``, which have run, from torch."""
    hooks = module._load_state_dict_pre_hooks
    module._load_state_dict_pre_hooks = OrderedDict()
    try:
        yield
    finally:
        module._load_state_dict_pre_hooks = hooks


class WithoutExtraState(torch.nn.Module):
    """Base of alias modules that have no ``_extra_state`` in Transformer Engine, either."""

    get_extra_state = torch.nn.Module.get_extra_state
    set_extra_state = torch.nn.Module.set_extra_state
    _load_from_state_dict = torch.nn.Module._load_from_state_dict
