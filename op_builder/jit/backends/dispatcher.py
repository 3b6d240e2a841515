"""Declaration of the dispatcher, the suite's one library that is compiled against Python."""

from __future__ import annotations

import os

from ...spec import DISPATCHER, OpSpec
from ..platform import soabi
from . import toolchain
from .pythons import Python


class DispatcherSpec(OpSpec):
    """Declaration of the dispatcher for ``python``, or for the running Python if that is None."""

    NAME = DISPATCHER
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
        paths = (self.root / "csrc/core").glob("*.cpp")
        return sorted(str(path.relative_to(self.root)) for path in paths)

    def system_include_paths(self, device: str) -> list[str]:
        headers = self.python.include if self.python else toolchain.python_include()
        return [headers, toolchain.pybind11_include()]

    def library_name(self, device: str) -> str:
        return self.NAME

    def key_extras(self) -> list[str]:
        return [self.python.suffix if self.python else soabi()]
