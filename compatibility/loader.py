"""The one helper behind every loader module."""

from __future__ import annotations

import threading
from collections.abc import Callable, MutableMapping
from typing import Any


def _define(op: str, name: str, module: str, signature: str) -> Callable[..., Any]:
    """A plain function that finds, and if need be builds, the op when it is first called."""
    lock = threading.Lock()
    bound: Callable[..., Any] | None = None

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal bound
        if bound is None:
            with lock:
                if bound is None:
                    from apex_te.runtime import function

                    bound = function(op, name)
        return bound(*args, **kwargs)

    call.__name__ = call.__qualname__ = name
    call.__module__ = module
    call.__doc__ = f"{name}({signature})\n\nBuilt on the first call; raises BuildError."
    return call


def define_loader(namespace: MutableMapping[str, Any], op: str) -> None:
    """Fill a module's namespace with the functions of ``op``, read from its header.

    Runs no compiler: ``hasattr``, ``dir`` and ``__all__`` know the functions without a library.
    """
    from ..op_builder import get_builder

    specs = get_builder(op).functions()
    for name, spec in specs.items():
        namespace[name] = _define(op, name, namespace["__name__"], spec.signature)
    namespace["__all__"] = sorted(specs)
