"""FP8 states of modules that ranks split, in a state dict that is saved once for all ranks.

Tensor-parallel ranks that split a GEMM save one state for it: the largest of their amax values and
the smallest of their scales, which all of them have anyway if their amax values are reduced. The
ranks of an expert group save one state with the slots of all experts, each rank the slots of its
experts. A state is some tensors (``TENSORS``) and a header, an encoded dict with the history's
length and
``first_due``, a bool for each slot: its first scale is still to be computed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed

from ...comm.collectives import max_over_ranks, world_size
from ...fp8.delayed.serialize import NAMES
from ...fp8.delayed.state import (
    BACKWARD_SLOTS,
    FORWARD_SLOTS,
    TENSORS,
    decode_header,
    encode_header,
)
from ...module._core.fp8_module import STATE_PREFIX, FP8Module
from .split_model import SplitModel, SplitModule, state_name
from .split_tensor import Parts, parts_of

_SCALES = tuple(name for name in TENSORS if name in ("scale_fwd", "scale_bwd"))
_LARGEST = tuple(name for name in TENSORS if name not in _SCALES)


def use_own_keys(model: torch.nn.Module, values: dict[str, Any], on_cpu: bool) -> None:
    """Moves FP8 states that a class saves in another form to the keys of ``FP8Module``, in place.

    Modules of the Transformer Engine alias save bytes, ``_extra_state``, which cannot be split over
    ranks. They load both forms.
    """
    for name, module in model.named_modules(remove_duplicate=False):
        if not isinstance(module, FP8Module):
            continue
        if type(module)._save_fp8_state is FP8Module._save_fp8_state:
            continue
        key = state_name(model, f"{name}.fp8_state" if name else "fp8_state")
        prefix = key.removesuffix("fp8_state")
        if values.pop(prefix + "_extra_state", None) is not None:
            found: dict[str, Any] = {}
            FP8Module._save_fp8_state(module, found, prefix + STATE_PREFIX)
            values.update({k: v.cpu() if on_cpu else v for k, v in found.items()})


def use_raw_names(model: torch.nn.Module, values: dict[str, Any]) -> None:
    """Renames FP8 states, in place, to the model's own names, with prefixes of DDP and compile."""
    for name, module in model.named_modules(remove_duplicate=False):
        if not isinstance(module, FP8Module):
            continue
        raw = f"{name}.fp8_state" if name else "fp8_state"
        saved = state_name(model, raw)
        for entry in NAMES if saved != raw else ():
            if f"{saved}.{entry}" in values:
                values[f"{raw}.{entry}"] = values.pop(f"{saved}.{entry}")


def share_states(owner: str, split: SplitModel, values: dict[str, Any]) -> None:
    """Makes FP8 states of tensor-parallel modules equal on all ranks of a ``tp_group``; collective.

    Raises ValueError on all ranks if their states differ in allocation or history length.
    """
    groups: list[Any] = []
    for module in split.modules:
        if module.tp_group is not None and not any(module.tp_group is g for g in groups):
            groups.append(module.tp_group)
    for group in groups:
        modules = [module for module in split.modules if module.tp_group is group]
        _gathered_headers(owner, modules, group, values)
        states = [m for m in modules if _key(m, "header") in values]
        if states:
            device = states[0].module.fp8_state.device
            largest = [values[_key(m, name)] for m in states for name in _LARGEST]
            smallest = [values[_key(m, name)] for m in states for name in _SCALES]
            _reduced(largest, device, lambda flat, g=group: max_over_ranks(flat, g))
            _reduced(
                smallest,
                device,
                lambda flat, g=group: distributed.all_reduce(flat, distributed.ReduceOp.MIN, g),
            )


def _reduced(tensors: list[torch.Tensor], device: torch.device, reduce: Any) -> None:
    """Reduces several tensors, in place, by one in-place ``reduce`` of a 1-D tensor."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors]).to(device)
    reduce(flat)
    sizes = [tensor.numel() for tensor in tensors]
    for tensor, found in zip(tensors, flat.split(sizes), strict=True):
        tensor.copy_(found.view(tensor.shape))


def parts_of_states(split: SplitModel) -> dict[str, Parts]:
    """Returns, by state dict key, the place of this rank's slots in FP8 states of all experts."""
    found = {}
    for each in split.modules:
        if each.experts:
            rank, ranks = distributed.get_rank(split.expert_group), world_size(split.expert_group)
            for name in TENSORS:
                slots = FORWARD_SLOTS if name.endswith("fwd") else BACKWARD_SLOTS
                length = slots * each.module.num_gemms
                found[_key(each, name)] = parts_of(int("history" in name), length, rank, ranks)
    return found


def share_headers(owner: str, split: SplitModel, values: dict[str, Any]) -> None:
    """Replaces, in place, the header of each expert layer's state by one for all experts' slots.

    Collective; raises ValueError on all ranks if their states differ in allocation or history
    length.
    """
    modules = [module for module in split.modules if module.experts]
    if not modules:
        return
    every = _gathered_headers(owner, modules, split.expert_group, values)
    for i, each in enumerate(modules):
        headers = [found for of_rank in every if (found := of_rank[i]) is not None]
        if headers:  # of all ranks, then
            cut = FORWARD_SLOTS * each.module.num_gemms
            due = [header["first_due"] for header in headers]
            joined = [d for own in due for d in own[:cut]] + [d for own in due for d in own[cut:]]
            values[_key(each, "header")] = encode_header({**headers[0], "first_due": joined})


def take_headers(owner: str, split: SplitModel, values: dict[str, Any]) -> None:
    """Undoes ``share_headers``, in place, in a loaded state dict: own experts' slots remain."""
    for each in split.modules:
        key = _key(each, "header")
        if not each.experts or key not in values:
            continue
        header = decode_header(values[key])
        rank, ranks = distributed.get_rank(split.expert_group), world_size(split.expert_group)
        gemms, due = each.module.num_gemms, header.get("first_due")
        slots = (FORWARD_SLOTS + BACKWARD_SLOTS) * gemms * ranks
        if not isinstance(due, list) or len(due) != slots:
            raise ValueError(
                f"{owner}: first_due of {key} must be {slots} bools, of all "
                f"{gemms * ranks} experts, got {due!r}"
            )
        forward, backward = FORWARD_SLOTS * gemms, BACKWARD_SLOTS * gemms
        first = ranks * forward + rank * backward
        own = due[rank * forward :][:forward] + due[first:][:backward]
        values[key] = encode_header({**header, "first_due": own})


def _key(module: SplitModule, name: str) -> str:
    """Returns the key in a state dict of the entry ``name`` of the module's FP8 state."""
    return f"{module.prefix}{STATE_PREFIX}{name}"


def _gathered_headers(
    owner: str, modules: list[SplitModule], group: Any, values: dict[str, Any]
) -> list[list[dict[str, Any] | None]]:
    """Gathers decoded headers, by rank and module; None for a state not allocated; collective."""
    keys = [_key(module, "header") for module in modules]
    own = [decode_header(values[key]) if key in values else None for key in keys]
    every: list[Any] = [None] * world_size(group)
    distributed.all_gather_object(every, own, group=group)
    lengths = [[None if h is None else h["history"] for h in of_rank] for of_rank in every]
    if any(found != lengths[0] for found in lengths):
        at = next(
            (i for i, found in enumerate(zip(*lengths, strict=False)) if len({*found}) > 1), 0
        )
        raise ValueError(
            f"{owner}: FP8 state of {modules[at].name} must be allocated with one history "
            f"length on all {len(every)} ranks (init_fp8_state), got {[n[at] for n in lengths]}"
        )
    return every
