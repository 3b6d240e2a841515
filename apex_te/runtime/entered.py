"""Linked list of the context managers that a thread has entered, from which any link can be left.

A generator that is suspended inside a ``with`` block leaves the block when it is closed. By then
other blocks may have been entered, and the closing thread may be another than the entering one; so
blocks are not always left in reverse order.
"""

from __future__ import annotations

from typing import Any


class Entered:
    """Base of an entered context manager: one link of its thread's list.

    Attributes:
        outer: the link that was innermost when this one was entered, or None.
        holder: ``__dict__`` of the ``threading.local()`` of the entering thread. One of its entries
            is the thread's innermost link; other threads can reach it through this attribute only.
    """

    __slots__ = ("holder", "outer")

    outer: Any
    holder: dict[str, Any]


def leave(entered: list[Any], holder: dict[str, Any], name: str) -> Any:
    """Removes from its thread's list the link that a context manager entered last.

    Returns:
        The link that was removed; None if ``entered`` is empty, so that there is nothing to leave.
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
