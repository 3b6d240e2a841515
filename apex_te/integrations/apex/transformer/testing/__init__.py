"""apex's test models; only ``distributed_test_base`` is supported.

The others can be imported, and their names raise NotImplementedError when they are used.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from ....transformer_engine._names import not_served

__all__ = [
    "arguments", "commons", "distributed_test_base", "global_vars", "standalone_bert",
    "standalone_gpt", "standalone_transformer_lm",
]  # fmt: skip


def _unserved(module: str) -> ModuleType:
    """Returns a module of names that raise when they are used."""
    full = f"{__name__}.{module}"
    made = ModuleType(full, f"Not served: apex's {module} of its tests.")

    def get(name: str) -> Any:
        if name.startswith("__"):  # which Python and tools ask for
            raise AttributeError(f"module {full!r} has no attribute {name!r}")
        reason = "megatron.core.models has GPT and BERT models, megatron.training their arguments"
        return not_served(f"apex.transformer.testing.{module}.{name}", reason)

    made.__getattr__ = get  # type: ignore[method-assign]
    return made


for _module in __all__:
    if _module != "distributed_test_base":
        globals()[_module] = sys.modules[f"{__name__}.{_module}"] = _unserved(_module)
