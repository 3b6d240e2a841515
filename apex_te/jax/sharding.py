"""Names of mesh axes for a program, under Transformer Engine's names."""

from __future__ import annotations

import contextlib

from . import region
from .region import MeshResource as MeshResource

__all__ = ["MeshResource", "global_mesh_resource", "global_shard_guard"]


def global_mesh_resource() -> MeshResource:
    """Returns the names of mesh axes of the innermost region or ``global_shard_guard``."""
    return region.active_mesh_resource()


def global_shard_guard(resource: MeshResource) -> contextlib.AbstractContextManager[None]:
    """Context manager with names of mesh axes for the regions in it that have none of their own.

    Raises:
        TypeError: ``resource`` is not a ``MeshResource``.
    """
    return region.named_mesh("global_shard_guard", resource)
