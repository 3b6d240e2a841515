"""Look-up of an op's library in the cache folders, without running a compiler."""

from __future__ import annotations

from collections.abc import Sequence

from ...spec import OpSpec
from ..backends.archs import Arch, Capability, choose, named_arch_list
from . import cache
from .entry import OpenedLibrary
from .key import key_of


def wanted_archs(spec: OpSpec, device: str, capability: Capability | None) -> tuple[Arch, ...]:
    """Returns the archs to build a library for, none if it has no GPU code."""
    if not spec.needs_archs(device):
        return ()
    return choose(spec.NAME, spec.min_arch, spec.specific_archs(), capability)


def look_up(
    spec: OpSpec, device: str, capability: Capability | None = None
) -> OpenedLibrary | None:
    """Returns the opened library for ``device`` if a cache folder holds it, else None.

    Without ``capability`` it must hold the archs that the environment lists, if any.
    """
    key = key_of(spec, device)
    library = spec.library_name(device)
    wanted: Sequence[str] = ()
    if spec.needs_archs(device) and capability is None:
        # without a device and a list any arch will do: opening is possible everywhere
        named = named_arch_list() is not None
        wanted = [str(arch) for arch in wanted_archs(spec, device, None)] if named else ()
    return cache.look_up(spec.prebuilt_folder, library, key, capability, wanted)
