"""One request to build a library."""

from __future__ import annotations

from typing import NamedTuple

from ...spec import OpSpec
from ..backends.archs import Arch
from ..find.entry import entry_tag


class Request(NamedTuple):
    """One library to build, with what is decided about it before."""

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
        """Op and device as messages name them."""
        return f"{self.spec.NAME} ({self.device})"

    @property
    def tag(self) -> str:
        """Name of the entry's folder."""
        return entry_tag(self.archs)
