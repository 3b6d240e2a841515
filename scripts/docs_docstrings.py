"""Extension of griffe: docstrings and names of the project as the reference shows them.

Several names may share a description, and their list may take several lines; a tuple's parts stand
under ``Returns:`` as ``name: description``. griffe wants an item for each name, and takes what
stands before the first colon of a result for its type.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension

_SECTION = re.compile(r"^(\w+):\n((?:(?: {4}.*)?(?:\n|\Z))+)", re.MULTILINE)
# "    a, b,\n        c: description": the names of an item that go on below it.
_NAMES = re.compile(r"^    (?:\w+, )*\w+,\n(?: +(?:\w+, )*\w+,\n)* +(?:\w+, )*\w+:", re.MULTILINE)
_SHARED = re.compile(r"^    ((?:\w+, )+\w+):(.*(?:\n {8}.*)*)", re.MULTILINE)
_PART = re.compile(r"^    (\w+(?:, \w+)*): ", re.MULTILINE)


def mended(text: str) -> str:
    """Returns a docstring with an item for each argument, and results without a type."""
    return _SECTION.sub(_mended_section, text)


def _mended_section(section: re.Match[str]) -> str:
    heading, body = section.groups()
    if heading in ("Args", "Attributes"):
        body = _NAMES.sub(lambda names: re.sub(r",\n +", ", ", names[0]), body)
        body = _SHARED.sub(_one_for_each, body)
    elif heading in ("Returns", "Yields"):
        # With an empty type the annotation shows.
        body = re.sub(r"^    ", "    : ", _PART.sub(r"    - ``\1``: ", body), count=1)
    return f"{heading}:\n{body}"


def _one_for_each(item: re.Match[str]) -> str:
    return "\n".join(f"    {name}:{item[2]}" for name in item[1].split(", "))


# Classes that are made when they are first asked for, from those that are written.
_PUBLIC_NAMES = {"apex_te.integrations.huggingface._FP8Training": "FP8Callback"}


class MendDocstrings(Extension):
    """Gives each object its public name, and its mended docstring before it is parsed."""

    def __init__(self) -> None:
        super().__init__()
        self._mended: set[int] = set()  # ids of docstrings, which several objects may share

    def on_object(self, *, obj: Any, **others: Any) -> None:
        """Mends the docstring of a module, class, function or attribute.

        Args:
            obj: the object.
            others: what else griffe hands over.
        """
        own = obj.members.get("__doc__") if obj.is_class else None
        if own is not None:  # ``__doc__ = Other.__doc__`` of a class beside it
            obj.docstring = obj.parent.members[str(own.value).removesuffix(".__doc__")].docstring
        if obj.docstring is not None and id(obj.docstring) not in self._mended:
            self._mended.add(id(obj.docstring))
            obj.docstring.value = mended(obj.docstring.value)
        obj.name = _PUBLIC_NAMES.get(obj.path, obj.name)
