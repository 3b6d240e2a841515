"""``onnx_export``, a context that frameworks enter around an export."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

__all__ = ["is_in_onnx_export_mode", "onnx_export", "te_translation_table"]

# ``custom_translation_table`` of torch.onnx.export. It is empty and cannot be changed: apex_te has
# no ONNX translation of its ops.
te_translation_table: MappingProxyType[Any, Any] = MappingProxyType({})

_enabled: ContextVar[bool] = ContextVar("onnx_export", default=False)


@contextmanager
def onnx_export(enabled: bool = False) -> Iterator[None]:
    """Marks the ``with`` block as an export, which changes nothing in apex_te's modules."""
    before = _enabled.set(enabled)
    try:
        yield
    finally:
        _enabled.reset(before)


def is_in_onnx_export_mode() -> bool:
    """Returns True inside ``onnx_export(enabled=True)``."""
    return _enabled.get()
