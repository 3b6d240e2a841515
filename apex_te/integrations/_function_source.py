"""Syntax trees of functions, and of the calls in a file."""

from __future__ import annotations

import ast
import functools
import inspect
from pathlib import Path
from typing import Any


class UnreadableError(Exception):
    """Raised for source that is not available or that has statements of other kinds."""


@functools.cache
def functions(path: str) -> dict[tuple[str, int], tuple[ast.FunctionDef, str]]:
    """Returns each function of a file and its class, by name and first line."""
    found = {}
    tree = ast.parse(Path(path).read_text(encoding="utf-8"))
    for owner in ast.walk(tree):
        for node in ast.iter_child_nodes(owner):
            if isinstance(node, ast.FunctionDef):
                line = min([node.lineno, *(one.lineno for one in node.decorator_list)])
                name = owner.name if isinstance(owner, ast.ClassDef) else ""
                found[node.name, line] = node, name
    return found


def source_of(function: Any) -> ast.FunctionDef:
    """Returns the syntax tree of a function, without its decorators."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    try:
        return functions(code.co_filename)[code.co_name, code.co_firstlineno][0]  # type: ignore
    except (OSError, SyntaxError, ValueError, KeyError, AttributeError) as error:
        raise UnreadableError(f"{function!r}") from error


@functools.cache
def calls_in(path: str) -> dict[str, list[tuple[ast.Call, str | None]]]:
    """Returns calls ``base.name(...)`` in a file by name; the class if ``base`` is its ``self``."""
    found: dict[str, list[tuple[ast.Call, str | None]]] = {}
    for function, owner in functions(path).values():
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                base = node.func.value
                own = isinstance(base, ast.Name) and base.id == "self"
                found.setdefault(node.func.attr, []).append((node, owner if own else None))
    return found


def files_of(kind: type) -> set[str]:
    """Returns the files that have the methods of a class and its bases, but torch's."""
    kinds = [one for one in kind.__mro__ if not one.__module__.startswith("torch.")]
    methods = [inspect.unwrap(m) for one in kinds for m in vars(one).values() if callable(m)]
    return {m.__code__.co_filename for m in methods if inspect.isfunction(m)}


@functools.cache
def assigned_in(path: str) -> frozenset[str]:
    """Returns the names of attributes that functions of a file other than ``__init__`` set."""
    return frozenset(
        node.attr
        for function, _ in functions(path).values()
        if function.name != "__init__"
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    )
