"""Request to build one library."""

from __future__ import annotations

from typing import NamedTuple

from ...spec import OpSpec
from ..backends.archs import Arch
from ..find.cache import entry_tag


class Request(NamedTuple):
    """One library to build, and the decisions made before its build."""

    spec: OpSpec
    device: str
    key: str
    archs: tuple[Arch, ...]
    compiler: str
    flags: list[str]
    verbose: bool
    jobs: int | None

    @property
    def library(self) -> str:
        """File name of the library without ``.so``."""
        return self.spec.library_name(self.device)

    @property
    def what(self) -> str:
        """Op and device, for messages."""
        return f"{self.spec.NAME} ({self.device})"

    @property
    def tag(self) -> str:
        """Name of the entry's folder: the archs joined, or "cpu"."""
        return entry_tag(self.archs)
