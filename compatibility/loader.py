"""The helpers behind every loader module."""

from __future__ import annotations

import sys
from collections.abc import Callable, MutableMapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..op_builder import OpBuilder


def _define(
    resolve: Callable[[], Callable[..., Any]], name: str, module: str, doc: str
) -> Callable[..., Any]:
    """A plain function that finds, and if need be builds, the op when it is first called."""
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
    """Fill a module's namespace with what ``op`` defines, read from its sources.

    Runs no compiler: ``hasattr``, ``dir`` and ``__all__`` know the names without a library.
    """
    from ..op_builder import get_builder

    builder = get_builder(op)
    if builder.BINDING == "pybind11":
        _define_extension(namespace, builder)
    else:
        _define_functions(namespace, builder)


def _define_functions(namespace: MutableMapping[str, Any], builder: OpBuilder) -> None:
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
            f"{name}({spec.signature})",
        )
    namespace["__all__"] = sorted(specs)


class _Value:
    """Stands for a class or a value of an extension, which is built when something is done with it.

    Calls, attributes and ``isinstance`` reach the real one. After any use of the extension the
    loader module has the real one itself.
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


def make_loader(builder: OpBuilder) -> ModuleType:
    """The loader module of an op outside of the suite that has no file for one; registered."""
    name = builder.absolute_name()
    module = sys.modules.get(name)
    if module is None:
        module = ModuleType(name, type(builder).__doc__)
        module.__file__ = getattr(sys.modules.get(type(builder).__module__), "__file__", None)
        module.__spec__ = ModuleSpec(name, None, origin=module.__file__)
        define_loader(vars(module), builder.NAME)
        module = sys.modules.setdefault(name, module)
    return module
