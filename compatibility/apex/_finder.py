"""Finder that makes the modules of this package importable at top level, on request only."""

from __future__ import annotations

import importlib
import os
import sys
import threading
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from types import ModuleType

from apex_te.op_builder import added, builder_names, get_builder

from .. import aliases
from ..aliases import APEX
from ..finder import ENTRY, OpFinder, OpLoader

NAMES = (
    "_apex_nccl_allocator",
    "amp_C",
    "apex_C",
    "bnp",
    "distributed_adam_cuda",
    "distributed_lamb_cuda",
    "fast_multihead_attn",
    "focal_loss_cuda",
    "fused_adam_cuda",
    "fused_bias_swiglu",
    "fused_conv_bias_relu",
    "fused_dense_cuda",
    "fused_index_mul_2d",
    "fused_lamb_cuda",
    "fused_layer_norm_cuda",
    "fused_rotary_positional_embedding",
    "fused_weight_gradient_mlp_cuda",
    "generic_scaled_masked_softmax_cuda",
    "mlp_cuda",
    "nccl_p2p_cuda",
    "peer_memory_cuda",
    "scaled_masked_softmax_cuda",
    "scaled_softmax_cuda",
    "scaled_upper_triang_masked_softmax_cuda",
    "syncbn",
    "transducer_joint_cuda",
    "transducer_loss_cuda",
    "xentropy_cuda",
)

_PACKAGE = __name__.rpartition(".")[0]
_FOLDER = os.path.dirname(os.path.realpath(__file__))
_lock = threading.Lock()


class _Loader(SourceFileLoader):
    """Loader that fills a top-level module, such as ``amp_C``, with this package's functions."""

    def exec_module(self, module: ModuleType) -> None:
        source = importlib.import_module(f"{_PACKAGE}.{self.name}")
        names = [*source.__all__, "__all__", "__doc__", "__version__"]
        module.__dict__.update((name, getattr(source, name)) for name in names)


class _Finder:
    """Meta path finder for the names in ``NAMES`` and the suite's pybind11 ops at top level."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if _is_extension(fullname):
            return OpFinder(ENTRY).find_spec(fullname)
        if fullname not in NAMES:
            return None
        file = os.path.join(_FOLDER, f"{fullname}.py")
        return spec_from_file_location(fullname, file, loader=_Loader(fullname, file))


def _is_extension(name: str) -> bool:
    """Returns True for an op that was added to the suite, as ``scripts/new_op.py`` does."""
    return name in added() or (name in builder_names() and get_builder(name).BINDING == "pybind11")


_finder = _Finder()


def install(*, first: bool = False) -> None:
    """Makes ``import amp_C``, the other names and ``import apex`` work in this process.

    Nothing is compiled. So do the names of extensions that ``scripts/new_op.py`` added to the
    suite. A module that is imported already is not replaced. The ``first`` of the last call counts;
    ``uninstall`` undoes all calls.

    Args:
        first: True to prefer apex_te's extension modules to those of an installed apex, False to
            prefer apex's. The package ``apex`` is always that of an installed apex.

    Raises:
        AliasError: the files of ``python -m apex_te install-alias apex`` were made for another
            version of apex_te.
    """
    aliases.install(APEX, missing_ok=True)
    _insert(0 if first else len(sys.meta_path))


def uninstall() -> None:
    """Undoes ``install``, and removes apex_te's modules such as ``amp_C`` from ``sys.modules``.

    The modules of an installed apex are not touched; references that a program holds stay valid.
    """
    aliases.uninstall(APEX)
    with _lock:
        _remove()
        for name in (*NAMES, *builder_names()):
            spec = getattr(sys.modules.get(name), "__spec__", None)
            if isinstance(getattr(spec, "loader", None), (_Loader, OpLoader)):
                del sys.modules[name]


def install_from_environment() -> None:
    """Serves apex's names if ``APEX_TE_APEX`` or ``APEX_TE_TOPLEVEL_COMPAT`` is true.

    Raises:
        AliasError: ``APEX_TE_APEX`` is true beside a real apex.
        SettingError: a variable's value is no boolean.
    """
    from apex_te.op_builder.jit import env

    if aliases.install_from_environment(APEX):
        _insert(len(sys.meta_path))
    if env.boolean("APEX_TE_TOPLEVEL_COMPAT", False):
        install()


def serve(made_for: str, version: str) -> None:
    """Puts apex_te's package in the place of the stub package, whose code calls this function."""
    aliases.serve(APEX, made_for, version)
    _insert(len(sys.meta_path))


def _insert(index: int) -> None:
    """Puts the finder of extensions at a place in ``sys.meta_path``, once."""
    with _lock:
        _remove()
        sys.meta_path.insert(index, _finder)


def _remove() -> None:
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
