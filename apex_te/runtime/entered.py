"""Chains of entered context managers, one a thread, that may be left in any order, by any thread.

A generator that is suspended inside of a ``with`` block leaves it when it is closed: after others
have been entered, or in another thread than that which entered it.
"""

from __future__ import annotations

from typing import Any

__all__ = ["Entered", "leave"]


class Entered:
    """One entered context manager, a link of its thread's chain.

    Attributes:
        outer: the link that was the innermost one before, or None.
        holder: the attributes of the thread (``threading.local().__dict__``), in which the
            innermost link is found by name; other threads reach them only through it.
    """

    __slots__ = ("holder", "outer")

    outer: Any
    holder: dict[str, Any]


def leave(entered: list[Any], holder: dict[str, Any], name: str) -> Any:
    """Takes the link that a context manager has entered last out of its chain, wherever that is.

    Args:
        entered: the links of the context manager, of which this one is removed. Those of the
            calling thread go first, since threads may share the context manager.
        holder: the attributes of the calling thread.
        name: of the attribute that is the innermost link.

    Returns:
        The link, or None where the context manager has entered none.
    """
    if not entered:
        return None
    own = next((link for link in reversed(entered) if link.holder is holder), entered[-1])
    entered.remove(own)
    innermost = own.holder.get(name)
    if innermost is own:
        own.holder[name] = own.outer
        return own
    while innermost is not None and innermost.outer is not own:
        innermost = innermost.outer
    if innermost is not None:
        innermost.outer = own.outer
    return own
