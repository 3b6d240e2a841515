"""Builder of the dispatcher: the one library that knows Python."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING

from .builder import CPUOpBuilder
from .jit.backends import extension, toolchain
from .jit.build.service import open_library

if TYPE_CHECKING:
    from .jit.backends.archs import Arch
    from .jit.backends.pythons import Python


class CoreBuilder(CPUOpBuilder):
    """``apex_te_core`` out of ``csrc/core/*.cpp``, for the running Python or for ``python``."""

    NAME = "apex_te_core"
    BUILD_VAR = "APEX_BUILD_CPP_OPS"  # whatever is prebuilt, the dispatcher goes along

    def __init__(
        self, root: str | os.PathLike[str] | None = None, python: Python | None = None
    ) -> None:
        super().__init__(root)
        self.python = python

    def absolute_name(self) -> str:
        return self.NAME

    @property
    def exports_c_functions(self) -> bool:
        return False

    def sources(self) -> list[str]:
        return sorted(
            str(path.relative_to(self.root)) for path in (self.root / "csrc/core").glob("*.cpp")
        )

    def system_include_paths(self, device: str) -> list[str]:
        headers = self.python.include if self.python else toolchain.python_include()
        return [headers, toolchain.pybind11_include()]

    def library_name(self, device: str) -> str:
        return self.NAME

    def key_extras(self) -> list[str]:
        return [self.python.suffix if self.python else extension.soabi()]

    def compiler_version(self, device: str, archs: Sequence[Arch]) -> str:
        # pybind11 is all headers: like the compiler it makes the library, and is not needed by it
        compiler = super().compiler_version(device, archs)
        return f"{compiler}, pybind11 {toolchain.pybind11_version()}"

    def why_missing(self, device: str) -> str:
        from .jit.backends import pythons

        others = pythons.prebuilt_for(self)
        if not others or self.python is not None:
            return ""
        return (
            f"this installation's dispatchers are for Python {', '.join(others)}, this is Python"
            f" {pythons.name_of(extension.soabi())} (a wheel carries those that"
            f" {pythons.VARIABLE} names)"
        )

    def _load(self, verbose: bool, force: bool) -> ModuleType:
        if self.NAME in sys.modules and not force:
            return sys.modules[self.NAME]
        opened = open_library(self, "cpu", force=force, verbose=verbose)
        return extension.import_module(self.NAME, opened)
