"""Reading of the environment variables that control look-up and compilation."""

from __future__ import annotations

import functools
import os
from typing import TypeVar

from .errors import SettingError

_TRUE = frozenset(("1", "true", "yes", "on"))
_FALSE = frozenset(("0", "false", "no", "off"))
_Default = TypeVar("_Default", bool, None)


def boolean(name: str, default: _Default) -> bool | _Default:
    """Returns the boolean in environment variable ``name``; ``default`` if it is unset or empty."""
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    if text.lower() not in _TRUE | _FALSE:
        raise SettingError(f"{name} must be one of 1/0, true/false, yes/no, on/off, got {text!r}")
    return text.lower() in _TRUE


def number(name: str, default: int, minimum: int = 1) -> int:
    """Returns the integer in environment variable ``name``; ``default`` if it is unset or empty."""
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    try:
        value = int(text)
    except ValueError:
        value = minimum - 1
    if value < minimum:
        raise SettingError(f"{name} must be an integer >= {minimum}, got {text!r}")
    return value


jit_disabled = functools.partial(boolean, "APEX_TE_DISABLE_JIT", False)  # forbids compiling
jit_verbose = functools.partial(boolean, "APEX_TE_JIT_VERBOSE", False)  # shows the commands
# compiles although the same build just failed
jit_retry = functools.partial(boolean, "APEX_TE_JIT_RETRY", False)
# seconds to wait for another process's build
lock_timeout = functools.partial(number, "APEX_TE_LOCK_TIMEOUT", 1800)


def sanitizers() -> list[str]:
    """Returns the compiler flags for the sanitizers in ``APEX_TE_SANITIZE``, none if unset."""
    text = os.environ.get("APEX_TE_SANITIZE", "").strip()
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not set(names) <= {"address", "undefined"}:
        raise SettingError(
            "APEX_TE_SANITIZE must be a list of address and undefined, separated by commas,"
            f" got {text!r}"
        )
    if not names:
        return []
    # a report must not end the process, and names the line
    chosen = ",".join(sorted(set(names)))
    flags = [f"-fsanitize={chosen}", f"-fsanitize-recover={chosen}", "-fno-omit-frame-pointer"]
    return [*flags, "-g1", "-O1"]
