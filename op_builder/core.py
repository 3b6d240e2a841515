"""Builder of the dispatcher, ``apex_te_core``, the pybind11 module that calls op libraries."""

from __future__ import annotations

import sys
from types import ModuleType

from .builder import CPUOpBuilder
from .jit.backends.dispatcher import DispatcherSpec
from .jit.build.extension import import_module
from .jit.build.service import open_library


class CoreBuilder(DispatcherSpec, CPUOpBuilder):
    """Builder of the dispatcher, which is compiled and cached as ops are."""

    NAME = DispatcherSpec.NAME
    BUILD_VAR = DispatcherSpec.BUILD_VAR

    def _load(self, verbose: bool, force: bool) -> ModuleType:
        """Returns the dispatcher's module; with ``force`` compiles and imports it anew."""
        if self.NAME in sys.modules and not force:
            return sys.modules[self.NAME]
        return import_module(self.NAME, open_library(self, "cpu", force=force, verbose=verbose))
