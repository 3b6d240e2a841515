"""Builders of installed packages: entry points of the group ``apex_te.op_builders``, by op."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from . import builder as builder_module
from .builder import OpBuilder, register, suite_names
from .jit.errors import DuplicateOpError, UnknownOpError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "apex_te.op_builders"
_warned: set[str] = set()


def _entry_points() -> dict[str, list[EntryPoint]]:
    """Returns ``apex_te.op_builders`` entry points by name, without a distribution's doubles."""
    from importlib.metadata import entry_points

    found: dict[str, dict[str, EntryPoint]] = {}
    for entry in entry_points(group=GROUP):
        found.setdefault(entry.name, {}).setdefault(_where(entry), entry)
    return {name: list(entries.values()) for name, entries in sorted(found.items())}


def _where(entry: Any) -> str:
    dist = getattr(entry, "dist", None)
    owner = f"{dist.name} {dist.version}" if dist is not None else "an unknown distribution"
    return f"{entry.value} of {owner}"


def _load(name: str, entries: list[EntryPoint]) -> OpBuilder:
    if name in suite_names():
        raise DuplicateOpError(f"{_where(entries[0])}: the suite has an op {name!r} already")
    if len(entries) > 1:
        both = ", ".join(_where(entry) for entry in entries)
        raise DuplicateOpError(f"two builders have NAME = {name!r}: {both}")
    (entry,) = entries
    try:
        loaded = entry.load()
    except (Exception, SystemExit) as error:  # of somebody else: whatever it is, it does not load
        raise UnknownOpError(
            f"{name}: its builder {_where(entry)} cannot be imported:"
            f" {type(error).__name__}: {error}"
        ) from error
    if not (isinstance(loaded, type) and issubclass(loaded, OpBuilder) and name == loaded.NAME):
        raise UnknownOpError(
            f"{name}: {_where(entry)} must be a subclass of OpBuilder with NAME = {name!r},"
            f" got {loaded!r}"
        )
    try:
        made = loaded()
        for declare in (made.built_devices, made.include_paths, made.cxx_args, made.nvcc_args):
            declare()  # here, where an error is told to be of this builder
    except Exception as error:
        raise UnknownOpError(
            f"{name}: its builder {_where(entry)} cannot be used: {type(error).__name__}: {error}"
        ) from error
    return register(made)


def find(name: str) -> OpBuilder | None:
    """Returns another package's builder, registered or of an entry point, or None."""
    if name in builder_module.registered:
        return builder_module.registered[name]
    entries = _entry_points().get(name)
    return _load(name, entries) if entries else None


def names() -> list[str]:
    """Returns the sorted names of other packages' ops; imports none of those packages."""
    return sorted({*builder_module.registered, *_entry_points()} - set(suite_names()))


def builders() -> dict[str, OpBuilder]:
    """Returns all ops of other packages by name; of those that do not load it warns, once each."""
    found, problems = builders_and_problems()
    for problem in sorted({*problems.values()} - _warned):
        _warned.add(problem)
        warnings.warn(f"apex_te: left out {problem}", RuntimeWarning, stacklevel=2)
    return found


def builders_and_problems() -> tuple[dict[str, OpBuilder], dict[str, str]]:
    """Returns the builders of other packages, and why further ones do not load, by op name."""
    found, problems = dict(builder_module.registered), {}
    for name, entries in _entry_points().items():
        try:
            if name not in found:
                found[name] = _load(name, entries)
        except (DuplicateOpError, UnknownOpError) as error:
            problems[name] = str(error)
    return dict(sorted(found.items())), problems
