"""Libraries to compile for a request: ops, devices, archs and dispatchers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ...spec import JaxHandlersSpec, OpSpec
from ..backends import pythons
from ..backends.archs import (
    Arch,
    Capability,
    choose,
    named_arch_list,
    parse_arch_list,
    visible_capabilities,
)
from ..backends.pythons import DispatcherSpec
from ..errors import ArchError
from ..platform import soabi
from .batch import Wanted
from .build_report import LibraryReport

DEVICES = ("cpu", "cuda")


class Choice(NamedTuple):
    """Decision about one library of a prebuild; if ``insisted``, it is an error if no arch fits."""

    op: str
    device: str
    wanted: bool
    insisted: bool = False
    reason: str = ""


class Targets(NamedTuple):
    """Archs that a prebuild compiles for: those ``named``, as ``(source, list)``, or the GPUs'."""

    named: tuple[str, str] | None
    capabilities: tuple[Capability, ...] = ()

    @classmethod
    def find(cls, text: str | None = None) -> Targets:
        """Returns the archs of ``text``, else of the environment's list, else of the GPUs."""
        named = ("arch", text) if text is not None else named_arch_list()
        if named is None:
            return cls(None, tuple(visible_capabilities()))
        archs = parse_arch_list(named[1], visible_capabilities)
        if not archs:
            raise ArchError(f"{named[0]} names no CUDA arch, got {named[1]!r}")
        return cls((named[0], ";".join(str(arch) for arch in archs)))

    @property
    def known(self) -> bool:
        """True if there is a list or a visible GPU."""
        return self.named is not None or bool(self.capabilities)

    def of(self, spec: OpSpec) -> tuple[Arch, ...]:
        """Returns the archs to compile the op ``spec`` for."""
        named = self.named
        if named is None and self.capabilities:
            named = ("the visible GPUs", ";".join(str(Arch(*c)) for c in self.capabilities))
        return choose(spec.NAME, spec.min_arch, spec.specific_archs(), None, named)


def plan(
    builders: Mapping[str, OpSpec], choices: Iterable[Choice], targets: Targets
) -> tuple[list[Wanted], list[LibraryReport]]:
    """Turns decisions into libraries to compile and rows of those skipped."""
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
    """Returns one dispatcher to compile for each Python; None stands for the running one.

    Unlike a ``Python``, None does not need the headers to be there before the build.
    """
    wanted = []
    for python in named:
        version = pythons.name_of(python.suffix if python else soabi())
        wanted.append(Wanted(DispatcherSpec(python=python), "cpu", label=f"dispatcher {version}"))
    return wanted


def jax_handlers() -> list[Wanted]:
    """Returns the library of handlers for JAX, one for all Pythons."""
    return [Wanted(JaxHandlersSpec(), "cpu")]
