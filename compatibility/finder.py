"""Finds the modules of ``apex_te.compatibility``, one for each op, none of which is a file.

``import apex_te.compatibility.rope`` reads the functions' names from the op's sources and compiles
nothing; the first call of a function finds, and if need be builds, the library. Ops that other
packages register are found, too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, MutableMapping
from importlib.abc import Loader, PathEntryFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..op_builder import OpBuilder

# Entry of the package's ``__path__`` that OpFinder answers, as if it were a folder of modules.
ENTRY = "<ops of apex_te>"


class OpFinder(PathEntryFinder):
    """Path entry finder of importlib for ``ENTRY``: finds and lists the ops' modules."""

    def __init__(self, entry: str) -> None:
        if entry != ENTRY:
            raise ImportError(f"OpFinder: entry must be {ENTRY!r}, got {entry!r}")

    def find_spec(self, fullname: str, target: ModuleType | None = None) -> ModuleSpec | None:
        from ..op_builder import builder_names, get_builder, user_ops

        op = fullname.rpartition(".")[2]
        if op not in builder_names() and op not in user_ops.names():
            return None
        cls = type(get_builder(op))
        origin = getattr(sys.modules.get(cls.__module__), "__file__", None)
        spec = ModuleSpec(fullname, OpLoader(op, cls.__doc__), origin=origin)
        spec.has_location = origin is not None
        return spec

    def iter_modules(self, prefix: str = "") -> Iterator[tuple[str, bool]]:
        """Yields ``(prefix + name, False)`` for each of apex_te's own ops, for ``pkgutil``."""
        from ..op_builder import builder_names

        for op in builder_names():
            yield prefix + op, False


class OpLoader(Loader):
    """Loader of importlib that fills the module of one op.

    Args:
        op: name of the op.
        doc: docstring of the module, that of the op's builder.
    """

    def __init__(self, op: str, doc: str | None) -> None:
        self._op = op
        self._doc = doc

    def exec_module(self, module: ModuleType) -> None:
        module.__doc__ = self._doc
        define_loader(vars(module), self._op)


def find_ops(path: list[str]) -> None:
    """Makes ops importable as modules of a package by appending ``ENTRY`` to its ``__path__``.

    Modules that are files take precedence.

    Args:
        path: the package's ``__path__``, which is changed.
    """
    if OpFinder not in sys.path_hooks:
        sys.path_hooks.append(OpFinder)
    if ENTRY not in path:
        path.append(ENTRY)


def _define(
    resolve: Callable[[], Callable[..., Any]], name: str, module: str, doc: str
) -> Callable[..., Any]:
    """Returns a function that stands for an op's function and resolves it at its first call.

    Args:
        resolve: returns the op's function; finds, and if need be builds, the library.
    """
    bound: Callable[..., Any] | None = None

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal bound
        if bound is None:
            bound = resolve()  # has its own lock, one that a fork does not leave locked
        return bound(*args, **kwargs)

    call.__name__ = call.__qualname__ = name
    call.__module__ = module
    call.__doc__ = f"{doc}\n\nBuilt on the first call; raises BuildError."
    return call


def define_loader(namespace: MutableMapping[str, Any], op: str) -> None:
    """Fills a module's namespace with stand-ins for the names that the sources of ``op`` define.

    It runs no compiler: ``hasattr``, ``dir`` and ``__all__`` know the names without a library.

    Args:
        namespace: ``vars`` of the module.
        op: name of the op.
    """
    from ..op_builder import get_builder

    builder = get_builder(op)
    if builder.BINDING == "pybind11":
        _define_extension(namespace, builder)
    else:
        _define_functions(namespace, builder)


def _define_functions(namespace: MutableMapping[str, Any], builder: OpBuilder) -> None:
    """Fills a module's namespace with stand-ins for the C functions of an op's libraries."""
    op = builder.NAME
    specs = builder.functions()

    def resolve(name: str) -> Callable[..., Any]:
        from apex_te.runtime import function, is_traced

        bound = function(op, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if is_traced():
                raise NotImplementedError(
                    f"{name}: a C function cannot be traced, nor seen by a mode of torch; "
                    "call what apex_te.ops has"
                )
            return bound(*args, **kwargs)

        return call

    for name, spec in specs.items():
        namespace[name] = _define(
            lambda name=name: resolve(name),  # type: ignore[misc]
            name,
            namespace["__name__"],
            f"{name}({spec.signature})\n\n``apex_te/contract.py`` explains types and shapes.",
        )
    namespace["__all__"] = sorted(specs)


class _Value:
    """Stand-in for a class or value of a pybind11 extension, whose first use builds the extension.

    Calls, attributes and ``isinstance`` are passed to the real object. Once anything of the
    extension was used, the op's module has the real object in place of the stand-in.
    """

    def __init__(self, resolve: Callable[[], Any], name: str) -> None:
        self.__dict__.update(_resolve=resolve, _name=name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._resolve()(*args, **kwargs)

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):  # introspection, such as inspect's and doctest's
            raise AttributeError(attribute)
        return getattr(self._resolve(), attribute)

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, self._resolve())

    def __repr__(self) -> str:
        return f"<{self._name}, not built yet>"


def _define_extension(namespace: MutableMapping[str, Any], builder: OpBuilder) -> None:
    """Fills a module's namespace with stand-ins for what a pybind11 extension exports."""
    op = builder.NAME
    exports = builder.exports()
    names = sorted((*exports.functions, *exports.values))

    def resolve(name: str) -> Any:
        module = builder.load()
        # the module's users get the extension's own objects from here on
        namespace.update((key, vars(module)[key]) for key in dir(module) if key[:2] != "__")
        if not hasattr(module, name):
            raise AttributeError(
                f"{op}: its sources export no {name!r}; the builder's EXPORTS are {names}"
            )
        return getattr(module, name)

    for name in exports.functions:
        namespace[name] = _define(
            lambda name=name: resolve(name),  # type: ignore[misc]
            name,
            namespace["__name__"],
            f"{name}: exported by {', '.join(builder.sources())}",
        )
    for name in exports.values:
        namespace[name] = _Value(
            lambda name=name: resolve(name),  # type: ignore[misc]
            f"{op}.{name}",
        )
    namespace["__all__"] = names
