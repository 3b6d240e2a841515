"""Errors of look-up and compilation, one subclass of ``BuildError`` per situation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from .text import did_you_mean

if TYPE_CHECKING:
    from .prebuild.build_report import BuildReport


class BuildError(RuntimeError):
    """An op library could not be found or built."""


class SettingError(BuildError, ValueError):
    """An environment variable or an option has a value that cannot be used."""


class UnknownOpError(BuildError, KeyError):
    """No usable builder has this name, or the op lacks a source, its header or the device."""

    def __str__(self) -> str:  # KeyError would show the repr of the text
        return str(self.args[0]) if self.args else ""


def unknown_op(name: object, known: Iterable[str], others: Iterable[str] = ()) -> UnknownOpError:
    """Returns the error about the name of an op that does not exist here or in ``others``."""
    known, others = list(known), list(others)
    hint = did_you_mean(name, [*known, *others])
    if not hint:
        hint = f"; there are: {', '.join(known) or 'none'}"
        hint += f"; from other packages: {', '.join(others)}" if others else ""
    return UnknownOpError(f"there is no op {name!r}{hint}")


class DuplicateOpError(BuildError, ValueError):
    """Two ops have the same NAME or import name; the message says where both are defined."""


class CompilerNotFoundError(BuildError):
    """There is no C++ compiler."""


class NvccNotFoundError(BuildError):
    """There is no nvcc, which a CUDA library needs."""


class HipccNotFoundError(BuildError):
    """There is no hipcc, which a library for AMD GPUs needs."""


class NinjaNotFoundError(BuildError):
    """There is no ninja."""


class HeaderNotFoundError(BuildError):
    """A header outside the project is missing, such as Python's, pybind11's or cuBLASLt's."""


class ArchError(BuildError, ValueError):
    """A GPU arch is unknown or unsupported, or no arch can be chosen to build for."""


class CacheError(BuildError):
    """A cache folder, or a file in it, cannot be used or could be written by another user."""


class DiskFullError(BuildError):
    """No space is left on the disk on which a library is built."""


class NoPermissionError(BuildError):
    """A file or folder that the build reads or writes may not be read or written."""


class JitDisabledError(BuildError):
    """A library is missing and APEX_TE_DISABLE_JIT forbids building it."""


class LockTimeoutError(BuildError):
    """Another process held a lock for longer than this process was to wait."""


class BuildInterruptedError(BuildError):
    """A build ended before the compiler accepted or refused sources; another try may succeed."""


class ReentrantLoadError(BuildError):
    """Loading a library led, in the same thread, to loading that library once more."""


class CompileError(BuildError):
    """The compiler refused the sources.

    Attributes:
        first_error: first line of the compiler's own message.
        command: command line that failed.
        log: path of the file with the whole output.
        hint: advice on this kind of error, "" without any.
    """

    def __init__(
        self, message: str, first_error: str = "", command: str = "", log: str = "", hint: str = ""
    ) -> None:
        super().__init__(message)
        self.first_error = first_error
        self.command = command
        self.log = log
        self.hint = hint


class PythonNotFoundError(BuildError):
    """A Python named in APEX_BUILD_PYTHONS, or its headers, cannot be found."""


class PrebuildError(BuildError):
    """Compilation of several libraries before their first use failed for at least one library.

    Attributes:
        report: state of each library that was to be compiled; None if there is no report.
    """

    def __init__(self, message: str, report: BuildReport | None = None) -> None:
        super().__init__(message)
        self.report = report


@contextlib.contextmanager
def build_errors(what: str) -> Iterator[None]:
    """Turns errors that nothing in the block expects into ``BuildError``, with their cause."""
    try:
        yield
    except (BuildError, ImportError, MemoryError, Warning):
        raise
    except Exception as error:
        text = f"{what}: its library cannot be found, built or loaded"
        raise BuildError(f"{text}: {type(error).__name__}: {error}") from error
