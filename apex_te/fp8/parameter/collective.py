"""Collectives of ``torch.distributed`` on weights that are held in FP8."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

# Ops that write to their first argument what a weight can take: as many values as it has.
_WRITING = ("allreduce_", "allreduce_coalesced_", "broadcast_", "reduce_")


def run_collective(cls: type[Any], func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Runs an op of ``torch.ops.c10d`` on the values of its FP8Parameters.

    The schemas of these ops do not say what they write. Written values are quantized before this
    returns, even with ``async_op=True``.
    """
    name = func._schema.name.removeprefix("c10d::")
    written = [x for x in tree_leaves(args[0]) if isinstance(x, cls)] if name[-1] == "_" else []
    if written and name not in _WRITING:
        raise NotImplementedError(
            f"FP8Parameter: c10d.{name} must write to a plain tensor, of which copy_ makes an FP8 "
            "weight, got an FP8Parameter"
        )
    values = {id(x): x._values() for x in tree_leaves((args, kwargs)) if isinstance(x, cls)}
    originals = {id(values[id(x)]): x for x in written}
    plain_args, plain_kwargs = tree_map_only(cls, lambda x: values[id(x)], (args, kwargs))
    out = func(*plain_args, **plain_kwargs)
    if written:
        work = out[-1] if isinstance(out, tuple) else out
        torch.distributed.Work.unbox(work).wait()
        cls.copy_all(written, [values[id(x)] for x in written])
    return tree_map_only(torch.Tensor, lambda t: originals.get(id(t), t), out)
