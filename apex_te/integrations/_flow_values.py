"""Values of expressions in source that is followed without running it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

UNKNOWN = object()


class Value:
    """Value of an expression: which tensors it may be, and a constant or module if it is one.

    ``present`` says that it is not None; ``proves`` has the values that are not if it is true.
    """

    __slots__ = ("const", "ids", "items", "method", "module", "present", "proves")

    def __init__(self, ids: Iterable[Any] = (), const: Any = UNKNOWN, **others: Any) -> None:
        self.ids = frozenset(ids)
        self.const = const
        self.module: Any = others.get("module")
        self.method: Any = others.get("method")
        self.items: list[Value] | None = others.get("items")
        self.present = others.get("present", False)
        self.proves: frozenset[Value] = frozenset(others.get("proves", ()))

    def all_ids(self) -> frozenset[Any]:
        """Returns the tensors that it may be or contain."""
        return self.ids.union(*[item.all_ids() for item in self.items or ()])


Env = dict[str, Value]


def either(a: Value, b: Value) -> Value:
    """Returns the value of an expression that is one of two."""
    if a is b:
        return a
    same = type(a.const) is type(b.const) and a.const == b.const
    items = None
    if a.items is not None and b.items is not None and len(a.items) == len(b.items):
        items = [either(*pair) for pair in zip(a.items, b.items, strict=True)]
    ids = a.ids | b.ids if items is not None else a.all_ids() | b.all_ids()
    module = a.module if a.module is b.module and a.method is b.method else None
    return Value(ids, a.const if same else UNKNOWN, module=module, method=module and a.method,
                  items=items)  # fmt: skip


def merge(a: Env | None, b: Env | None) -> Env | None:
    """Returns the names after two branches; None stands for one that does not end."""
    if a is None or b is None:
        return b if a is None else a
    return {name: either(a[name], b[name]) if name in a and name in b else (a.get(name) or b[name])
            for name in (*a, *b)}  # fmt: skip
