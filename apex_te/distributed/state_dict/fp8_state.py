"""FP8 state of split modules in a state dict that all ranks share.

Ranks that split a GEMM save one state: the largest of their amaxes and the smallest of their
scales, which is what reduced amaxes give them anyway. Ranks with experts of their own save the
state of all experts, of which each has its slots.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed

from ...comm.collectives import max_over_ranks, world_size
from ...fp8.delayed.header import decode_header, encode_header
from ...fp8.delayed.state import BACKWARD_SLOTS, FORWARD_SLOTS, TENSORS
from ...module._core.fp8_module import STATE_PREFIX
from .split_model import SplitModel, SplitModule
from .split_tensor import Parts, parts_of

__all__ = ["parts_of_states", "share_headers", "share_states", "take_headers"]

_SCALES = tuple(name for name in TENSORS if name in ("scale_fwd", "scale_bwd"))
_LARGEST = tuple(name for name in TENSORS if name not in _SCALES)


def share_states(owner: str, split: SplitModel, values: dict[str, Any]) -> None:
    """Equalises, in place, the states in ``values`` that ranks of a group share; collective.

    Raises:
        ValueError: on all ranks, a state is allocated on some of them only.
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
    """Runs ``reduce`` on a flat copy of ``tensors`` and copies its results back."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors]).to(device)
    reduce(flat)
    sizes = [tensor.numel() for tensor in tensors]
    for tensor, found in zip(tensors, flat.split(sizes), strict=True):
        tensor.copy_(found.view(tensor.shape))


def parts_of_states(split: SplitModel) -> dict[str, Parts]:
    """Returns, by name, the place of this rank's slots in the states of all experts."""
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
    """Replaces the headers of experts' states by those of all experts; collective.

    Raises:
        ValueError: on all ranks, a state is allocated on some of them only.
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
    """Replaces the headers of all experts' states by those of this rank's.

    Raises:
        ValueError: a header that is not of all experts.
    """
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
    return f"{module.prefix}{STATE_PREFIX}{name}"


def _gathered_headers(
    owner: str, modules: list[SplitModule], group: Any, values: dict[str, Any]
) -> list[list[dict[str, Any] | None]]:
    """Returns, by rank, the header of each module's state, None for one that has none."""
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
