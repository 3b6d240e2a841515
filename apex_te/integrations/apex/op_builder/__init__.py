"""apex's builders: ``from apex.op_builder import AmpCBuilder; AmpCBuilder().load()``.

Beside apex's 28 builders the package has those of apex_te's own ops and of added ones.
"""

from __future__ import annotations

from apex_te.op_builder import CPUOpBuilder, CUDAOpBuilder, OpBuilder, all_builders

from .builder import BUILDERS

__all__ = ["CPUOpBuilder", "CUDAOpBuilder", "OpBuilder", *BUILDERS]


def __getattr__(name: str) -> type[OpBuilder]:
    if name in BUILDERS:
        return BUILDERS[name]
    if name.endswith("Builder"):
        for builder in all_builders().values():
            if type(builder).__name__ == name:
                return type(builder)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
