"""Logical axes of the attention and Transformer layers, under Transformer Engine's names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..region import active_mesh_resource

__all__ = [
    "BATCH", "HEAD", "HIDDEN", "HIDDEN_TP", "JOINED", "SEQLEN", "SEQLEN_TP", "W_FSDP", "W_JOINED",
    "W_NO_SHARD", "W_TP", "extend_logical_axis_rules",
]  # fmt: skip

Rule = tuple[str, Any]

# Of activations.
BATCH = "nvte_batch"
SEQLEN = "nvte_seqlen"
SEQLEN_TP = "nvte_seqlen_tp"
SEQLEN_CP = "nvte_seqlen_cp"
HEAD = "nvte_head"
HIDDEN = "nvte_hidden"
HIDDEN_TP = "nvte_hidden_tp"
JOINED = "nvte_joined"
# Of parameters.
W_NO_SHARD = "nvte_w_no_shard"
W_FSDP = "nvte_w_fsdp"
W_TP = "nvte_w_tp"
W_JOINED = "nvte_w_joined"

# The mesh axes of each, by the fields of a mesh resource.
_RESOURCES: dict[str, tuple[str, ...]] = {
    BATCH: ("fsdp_resource", "dp_resource"),
    SEQLEN: (),
    SEQLEN_TP: ("tp_resource",),
    SEQLEN_CP: ("cp_resource",),
    HEAD: ("tp_resource",),
    HIDDEN: (),
    HIDDEN_TP: ("tp_resource",),
    JOINED: (),
    W_NO_SHARD: (),
    W_FSDP: ("fsdp_resource",),
    W_TP: ("tp_resource",),
    W_JOINED: (),
}


def extend_logical_axis_rules(rules: Sequence[Rule]) -> tuple[Rule, ...]:
    """Returns ``rules`` followed by Flax's logical axis rules for the Transformer layers.

    These rules map the layers' axes to the mesh axes that are named in ``mesh_resource`` of the
    ``fp8_autocast`` region.

    Args:
        rules: pairs of a logical axis and its mesh axis, several mesh axes, or None.

    Raises:
        TypeError: a rule is not a pair that begins with a name.
        ValueError: a rule maps one of the layers' axes to other mesh axes than the layers do.
    """
    resource = active_mesh_resource()
    for rule in rules:
        if len(rule) != 2 or not isinstance(rule[0], str):
            raise TypeError(
                "extend_logical_axis_rules: rules must be pairs of a logical axis and a mesh axis,"
                f" got {rule!r}"
            )
    given: dict[str, list[Any]] = {}
    for name, axes in rules:
        given.setdefault(name, []).append(axes)
    found = [*map(tuple, rules)]
    for name, fields in _RESOURCES.items():
        axes = tuple(a for a in (getattr(resource, field) for field in fields) if a)
        wanted = axes if len(axes) > 1 else axes[0] if axes else None
        if name not in given:
            found.append((name, wanted))
        elif given[name] != [wanted]:
            raise ValueError(
                f"extend_logical_axis_rules: rules must map {name} to {wanted!r}, as the layers do,"
                f" got {given[name]}"
            )
    return tuple(found)


def leading(module: Any, is_split: bool = True) -> tuple[str, str]:
    """Returns the logical axes of a module's batch and sequence, in its order.

    ``is_split``: its option ``enable_sequence_parallel`` splits sequences.
    """
    sequence = SEQLEN_TP if is_split and module.enable_sequence_parallel else SEQLEN
    if module.context_parallel_axis:
        sequence = SEQLEN_CP
    return (sequence, BATCH) if module.transpose_batch_sequence else (BATCH, sequence)
