"""Request to build one library."""

from __future__ import annotations

from typing import NamedTuple

from ...spec import OpSpec
from ..backends.archs import Arch
from ..find.entry import entry_tag


class Request(NamedTuple):
    """One library to build, and the decisions made before its build.

    Attributes:
        spec: the op.
        device: "cpu" or "cuda".
        key: the library's cache key.
        archs: GPU archs to compile for; none without GPU code.
        compiler: version text of the compilers, for the manifest.
        flags: flags of the key, for the manifest.
        verbose: shows the compiler commands.
        jobs: number of compilers at once; None for as many as the machine's limits allow.
    """

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
