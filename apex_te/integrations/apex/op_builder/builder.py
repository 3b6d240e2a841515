"""Base classes of apex's builders, and the builders of its extensions."""

from __future__ import annotations

import importlib
from types import ModuleType

from apex_te.op_builder import CPUOpBuilder, CUDAOpBuilder, OpBuilder, get_builder
from apex_te.op_builder.apex_names import EXTENSIONS, Extension, served_by
from apex_te.op_builder.jit.text import tell

__all__ = ["BUILDERS", "CPUOpBuilder", "CUDAOpBuilder", "ExtensionBuilder", "OpBuilder"]


class ExtensionBuilder(CUDAOpBuilder):
    """Base of the builders of apex's extensions, each served by a module over other ops' libraries.

    ``load`` builds the libraries of those ops and returns the module, such as
    ``apex_te.compatibility.apex.amp_C``.
    """

    def ops(self) -> tuple[str, ...]:
        """Returns the names of the ops that serve the extension; none for one that PyTorch serves.

        Raises:
            NotImplementedError: the extension is not supported.
        """
        served = served_by(self.NAME)
        if served is None:
            raise NotImplementedError(
                f"{type(self).__name__}: apex_te does not serve {self.NAME};"
                " docs/apex.md names alternatives"
            )
        return served

    def absolute_name(self) -> str:
        """Returns the import name of the module that ``load`` returns."""
        return f"apex_te.compatibility.apex.{self.NAME}"

    def sources(self) -> list[str]:
        """Returns the sources of the ops that serve the extension, relative to ``root``."""
        return [source for op in self.ops() for source in get_builder(op).sources()]

    def is_compatible(self, verbose: bool = False) -> bool:
        """Returns True if the extension is supported and its ops can be built for these GPUs."""
        try:
            return all(get_builder(op).is_compatible(verbose) for op in self.ops())
        except NotImplementedError as error:
            if verbose:
                tell(f"apex_te: {error}")
            return False

    def _load(self, verbose: bool, force: bool) -> ModuleType:
        for op in self.ops():
            builder = get_builder(op)
            builder.jit_load(verbose) if force else builder.load(verbose)
        return importlib.import_module(self.absolute_name())


def _builder_class(extension: Extension) -> type[ExtensionBuilder]:
    """Returns the builder class of an extension, such as ``AmpCBuilder``."""
    is_cpp = extension.module == "apex_C"
    attributes = {
        "__doc__": f"Builder of apex's extension {extension.module}.",
        "__module__": __name__,
        "NAME": extension.module,
        "BUILD_VAR": f"APEX_BUILD_{extension.variable}",
        "INCLUDE_FLAG": f"APEX_BUILD_{'CPP' if is_cpp else 'CUDA'}_OPS",
    }
    return type(f"{extension.builder}Builder", (ExtensionBuilder,), attributes)


BUILDERS: dict[str, type[ExtensionBuilder]] = {
    f"{extension.builder}Builder": _builder_class(extension) for extension in EXTENSIONS
}
