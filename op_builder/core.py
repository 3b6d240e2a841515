"""Builder of the dispatcher: the one library that knows Python."""

from __future__ import annotations

import sys
from types import ModuleType

from .builder import CPUOpBuilder
from .jit import extension, toolchain
from .jit.service import open_library


class CoreBuilder(CPUOpBuilder):
    """``apex_te_core`` out of ``csrc/core/*.cpp``."""

    NAME = "apex_te_core"
    BUILD_VAR = "APEX_BUILD_CPP_OPS"  # whatever is prebuilt, the dispatcher goes along

    def absolute_name(self) -> str:
        return self.NAME

    def sources(self) -> list[str]:
        return sorted(
            str(path.relative_to(self.root)) for path in (self.root / "csrc/core").glob("*.cpp")
        )

    def system_include_paths(self, device: str) -> list[str]:
        return [toolchain.python_include(), toolchain.pybind11_include()]

    def library_name(self, device: str) -> str:
        return self.NAME

    def key_extras(self) -> list[str]:
        return [extension.soabi(), f"pybind11 {toolchain.pybind11_version()}"]

    def _load(self, verbose: bool, force: bool) -> ModuleType:
        if self.NAME in sys.modules and not force:
            return sys.modules[self.NAME]
        opened = open_library(self, "cpu", force=force, verbose=verbose)
        return extension.import_module(self.NAME, opened)
