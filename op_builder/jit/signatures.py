"""Reading an op's functions from its header, without a compiler."""

from __future__ import annotations

import re
from typing import NamedTuple

_LITERAL = r'"(?:[^"\\\n]|\\.)*"'
_COMMENT = re.compile(rf"({_LITERAL})|//[^\n]*|/\*.*?\*/", re.DOTALL)
_FUNCTION = re.compile(
    rf'\bAPEX_TE_FUNCTION\(\s*(\w+)\s*,\s*((?:{_LITERAL}\s*)+)(?:,\s*"(cpu|cuda)"\s*)?\)'
)


class FunctionSpec(NamedTuple):
    """Signature text of a function and the devices that offer it."""

    signature: str
    devices: tuple[str, ...]


def parse(text: str) -> dict[str, FunctionSpec]:
    """The ``APEX_TE_FUNCTION`` declarations of a header, by name."""
    code = _COMMENT.sub(lambda match: match[1] or " ", text)
    found = {}
    for name, literals, device in _FUNCTION.findall(code):
        parts = [literal[1:-1] for literal in re.findall(_LITERAL, literals)]
        signature = "".join(parts).replace('\\"', '"').replace("\\\\", "\\")
        found[name] = FunctionSpec(signature, (device,) if device else ("cpu", "cuda"))
    return found
