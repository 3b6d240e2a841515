"""Libraries to build for a request: ops, devices, archs, dispatchers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ...spec import OpSpec
from ..backends import pythons
from ..backends.archs import (
    Arch,
    Capability,
    choose,
    named_arch_list,
    parse_arch_list,
    visible_capabilities,
)
from ..backends.dispatcher import DispatcherSpec
from ..errors import ArchError
from ..platform import soabi
from .batch import Wanted
from .build_report import LibraryReport

DEVICES = ("cpu", "cuda")


class Choice(NamedTuple):
    """A library and the decision about it: wanted, insisted on, or the reason it is skipped."""

    op: str
    device: str
    wanted: bool
    insisted: bool = False
    reason: str = ""


class Targets(NamedTuple):
    """Archs to build for: a list with its origin, or the GPUs that are visible."""

    named: tuple[str, str] | None
    capabilities: tuple[Capability, ...] = ()

    @classmethod
    def find(cls, text: str | None = None) -> Targets:
        """Returns the archs of ``text``, else the environment's list, else the GPUs."""
        named = ("arch", text) if text is not None else named_arch_list()
        if named is None:
            return cls(None, tuple(visible_capabilities()))
        archs = parse_arch_list(named[1], visible_capabilities)
        if not archs:
            raise ArchError(f"{named[0]} names no CUDA arch, got {named[1]!r}")
        return cls((named[0], ";".join(str(arch) for arch in archs)))

    @property
    def known(self) -> bool:
        """True if there is any arch to build for."""
        return self.named is not None or bool(self.capabilities)

    def of(self, spec: OpSpec) -> tuple[Arch, ...]:
        """Returns the archs of one op; raises ``ArchError`` where none serves."""
        named = self.named
        if named is None and self.capabilities:
            named = ("the visible GPUs", ";".join(str(Arch(*c)) for c in self.capabilities))
        return choose(spec.NAME, spec.min_arch, spec.specific_archs(), None, named)


def plan(
    builders: Mapping[str, OpSpec], choices: Iterable[Choice], targets: Targets
) -> tuple[list[Wanted], list[LibraryReport]]:
    """Turns choices into libraries to build.

    Returns:
        The libraries to build, and the rows of those that are left out.

    Raises:
        ArchError: there is no arch to build for, or none that serves an op insisted on.
    """
    wanted: list[Wanted] = []
    rows: list[LibraryReport] = []
    for choice in choices:
        spec, device = builders[choice.op], choice.device
        if not choice.wanted:
            rows.append(LibraryReport(choice.op, device, "skipped", reason=choice.reason))
            continue
        archs: tuple[Arch, ...] = ()
        if spec.needs_archs(device):
            try:
                archs = targets.of(spec)
            except ArchError as error:
                # a group takes what there is for these archs; but without any, nothing is right
                if choice.insisted or not targets.known:
                    raise
                rows.append(LibraryReport(choice.op, device, "skipped", reason=str(error)))
                continue
        wanted.append(Wanted(spec, device, archs))
    return wanted, rows


def dispatchers(named: Sequence[pythons.Python | None]) -> list[Wanted]:
    """Returns one dispatcher per Python; None is the running one, whose headers may be missing."""
    wanted = []
    for python in named:
        version = pythons.name_of(python.suffix if python else soabi())
        wanted.append(Wanted(DispatcherSpec(python=python), "cpu", label=f"dispatcher {version}"))
    return wanted
