"""Registers the ops' functions with torch.library, which compiled regions call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_library = torch.library.Library("apex_te", "DEF")


def register(schema: str, call: Callable[..., Any]) -> None:
    """Defines `apex_te::<op>` for CPU and CUDA from a schema whose outputs are all arguments.

    Such an op returns nothing, so its fake does nothing either; no build is triggered by tracing.
    """
    name = schema.partition("(")[0]
    _library.define(schema)
    for key in ("CPU", "CUDA"):
        _library.impl(name, call, key)
    torch.library.register_fake(f"apex_te::{name}", lambda *args: None, lib=_library)
