"""ScaleSnapshot: scales as they are now, for the recompute of a forward to use again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class ScaleSnapshot:
    """Copies of scales, with version counters that show which scales were written later."""

    __slots__ = ("__weakref__", "copies", "tensors", "versions")

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors
        self.versions = [tensor._version for tensor in tensors]
        with torch.inference_mode(False), torch.no_grad():
            self.copies = [tensor.clone() for tensor in tensors]

    def holds(self, tensors: list[torch.Tensor]) -> bool:
        """Returns True if the snapshot is of exactly ``tensors``, and none was written since."""
        return len(tensors) == len(self.tensors) and all(
            new is old and new._version == version
            for new, old, version in zip(tensors, self.tensors, self.versions, strict=True)
        )

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Context manager inside which scales have the values of the snapshot again."""
        moved = []
        with torch.no_grad():
            for tensor, version, copy in zip(self.tensors, self.versions, self.copies, strict=True):
                if tensor._version != version:
                    moved.append((tensor, tensor.clone()))
                    tensor.copy_(copy)
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, value in moved:
                    tensor.copy_(value)
