"""Search for stale entries: damaged ones, and those of other sources, flags or compilers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping

from ...spec import OpSpec
from ..backends import library
from ..backends.pythons import DispatcherSpec
from ..errors import BuildError
from ..find.inventory import Entry, key_for
from ..find.key import key_of


class Current:
    """First digits of up-to-date keys, and compilers, by library; only of installed ops."""

    def __init__(
        self,
        keys: Mapping[str, set[str]],
        compilers: Mapping[str, str],
        machine: str,
        dispatcher: DispatcherSpec | None = None,
    ) -> None:
        """Takes the attributes; entries of ``dispatcher`` for other Pythons are up to date, too."""
        self.keys, self.compilers, self.machine = keys, compilers, machine
        self._dispatcher = dispatcher

    def _other_python(self, entry: Entry) -> str:
        """Returns the version of the other Python that an up-to-date dispatcher is for, else ""."""
        if self._dispatcher is None or entry.library != self._dispatcher.NAME:
            return ""
        key, version = key_for(self._dispatcher, entry.manifest)
        return version if key and key.startswith(entry.digits) else ""

    def stale(self, entry: Entry) -> str:
        """Returns the reason why an entry is stale, "" if it is not.

        It is if damaged, of other sources or flags, or built by another compiler; a look-up still
        loads the last kind. Entries for other CPUs and of ops that are not installed are not stale.
        """
        if entry.problem:
            return entry.problem
        keys = self.keys.get(entry.library)
        if keys is None:
            return ""  # an op of somebody else's package: nobody here knows
        if entry.digits not in keys and not self._other_python(entry):
            machine = entry.manifest.get("machine", self.machine)
            return "" if machine != self.machine else "other sources or flags"
        mine, theirs = self.compilers.get(entry.library), entry.manifest.get("compiler")
        if mine and theirs != mine:
            return f"built by {theirs}, the compiler now is {mine}"
        return ""

    def use(self, entry: Entry) -> str:
        """Returns whom an entry serves other than this process, such as "Python 3.12", or ""."""
        keys = self.keys.get(entry.library)
        if keys is None:
            return "an op that is not installed here"
        if entry.digits in keys:
            return ""
        if version := self._other_python(entry):
            return f"Python {version}"
        return "another machine" if not self.stale(entry) else ""


def current(specs: Iterable[OpSpec]) -> Current:
    """Returns keys and compilers of the up-to-date entries of ``specs``; runs the compilers."""
    keys: dict[str, set[str]] = {}
    compilers: dict[str, str] = {}
    dispatcher = None
    for spec in specs:
        if isinstance(spec, DispatcherSpec):
            dispatcher = spec
        for device in spec.built_devices():
            name = spec.library_name(device)
            known = keys.setdefault(name, set())
            with contextlib.suppress(OSError):
                known.add(key_of(spec, device)[:24])
            with contextlib.suppress(BuildError, OSError):
                compilers[name] = library.compiler_version(spec, device)
    return Current(keys, compilers, os.uname().machine, dispatcher)
