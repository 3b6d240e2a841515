"""Builders of the suite: of the ops in builtin.py, the dispatcher and the handlers for JAX."""

from __future__ import annotations

import sys
from types import ModuleType

from .builder import CPUOpBuilder, CUDAOpBuilder, OpBuilder
from .builtin import OPS, Op
from .jit.backends.library import blas_include
from .jit.backends.pythons import DispatcherSpec
from .jit.build.service import import_module, open_library
from .spec import JaxHandlersSpec


class CoreBuilder(DispatcherSpec, CPUOpBuilder):
    """Builder of the dispatcher, which is compiled and cached as ops are."""

    BUILD_VAR = DispatcherSpec.BUILD_VAR

    def _load(self, verbose: bool, force: bool) -> ModuleType:
        if self.NAME in sys.modules and not force:
            return sys.modules[self.NAME]
        return import_module(self.NAME, open_library(self, "cpu", force=force, verbose=verbose))


class JaxBuilder(JaxHandlersSpec, CPUOpBuilder):
    """Builder of the handler library, which is compiled and cached as ops are."""

    BUILD_VAR = JaxHandlersSpec.BUILD_VAR


class _BuiltinBuilder(CUDAOpBuilder):
    op: Op  # its line in the table

    def cxx_args(self) -> list[str]:
        return list(self.op.cxx_args)

    def system_include_paths(self, device: str) -> list[str]:
        return blas_include() if self.op.needs_blas and device == "cuda" else []


def _builder_class(name: str, op: Op) -> type[OpBuilder]:
    """Returns the builder class of an op in the table, such as ``RmsNormBuilder``."""
    title = "".join(part.capitalize() for part in name.split("_"))
    about = {"__doc__": f"Builder of {op.text}.", "__module__": __name__}
    declared = {"NAME": name, "DEVICES": op.devices, "min_arch": op.min_arch, "op": op}
    return type(f"{title}Builder", (_BuiltinBuilder,), {**about, **declared})


BUILDERS: dict[str, type[OpBuilder]] = {
    CoreBuilder.NAME: CoreBuilder,
    JaxBuilder.NAME: JaxBuilder,
    **{name: _builder_class(name, op) for name, op in OPS.items()},
}
# Imports and pickles may name the classes, and the modules that once held one each.
globals().update((each.__name__, each) for each in BUILDERS.values())
for _former in ("jax_ffi", *OPS):
    sys.modules.setdefault(f"{__package__}.{_former}", sys.modules[__name__])
