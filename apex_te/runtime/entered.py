"""Linked list of the context managers that a thread has entered, from which any link can be left.

A generator that is suspended inside a ``with`` block leaves the block when it is closed. By then
other blocks may have been entered, and the closing thread may be another than the entering one; so
blocks are not always left in reverse order.
"""

from __future__ import annotations

from typing import Any


class Entered:
    """Base of an entered context manager: one link of its thread's list.

    ``outer`` is the link that was innermost on entry, or None. ``holder`` is the ``__dict__`` of
    the entering thread's ``threading.local()``, the only way for other threads to its innermost
    link.
    """

    __slots__ = ("holder", "outer")

    outer: Any
    holder: dict[str, Any]


def leave(entered: list[Any], holder: dict[str, Any], name: str) -> Any:
    """Removes the link entered last from ``entered`` and its thread's list; None without one.

    Links of the calling thread are preferred, because threads may share the context manager.
    """
    if not entered:
        return None
    own = entered[-1]
    if own.holder is holder:
        entered.pop()
    else:
        own = next((link for link in reversed(entered) if link.holder is holder), own)
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
