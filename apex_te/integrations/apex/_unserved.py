"""apex's modules that are not served: they can be imported, and their names raise at use."""

from __future__ import annotations

import sys
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from ..transformer_engine._names import not_served

_PACKAGE = __name__.rpartition(".")[0]
_RNN = "torch.nn has RNN, LSTM and GRU"
_AMP = "use apex.amp's public functions"
_OPENFOLD = "use torch.nn.functional.scaled_dot_product_attention and torch.compile"
_SCHED = "use torch.compile with its own backends"
_TEST = "use torch.distributed and torchrun"
# Reasons by module; modules that are files of this package take precedence.
REASONS = {
    "RNN": _RNN,
    "RNN.RNNBackend": _RNN,
    "RNN.cells": _RNN,
    "RNN.models": _RNN,
    "amp.__version__": _AMP,
    "amp._initialize": _AMP,
    "amp._process_optimizer": _AMP,
    "amp.compat": _AMP,
    "amp.rnn_compat": _AMP,
    "amp.utils": _AMP,
    "amp.wrap": _AMP,
    "contrib.cudnn_gbn": "use apex.contrib.groupbn.BatchNorm2d_NHWC or torch.nn.SyncBatchNorm",
    "contrib.cudnn_gbn.batch_norm": (
        "use apex.contrib.groupbn.BatchNorm2d_NHWC or torch.nn.SyncBatchNorm"
    ),
    "contrib.gpu_direct_storage": "use torch.cuda.gds",
    "contrib.openfold_triton": _OPENFOLD,
    "contrib.openfold_triton.fused_adam_swa": (
        "use apex.optimizers.FusedAdam and torch.optim.swa_utils"
    ),
    "contrib.openfold_triton.layer_norm": "use apex.normalization.FusedLayerNorm",
    "contrib.openfold_triton.mha": _OPENFOLD,
    "contrib.torchsched": _SCHED,
    "contrib.torchsched.config": _SCHED,
    "contrib.torchsched.backend": _SCHED,
    "contrib.torchsched.inductor": _SCHED,
    "contrib.torchsched.ops": _SCHED,
    "contrib.torchsched.passes": _SCHED,
}


class _Loader(Loader):
    """Loader of a module any of whose names raises NotImplementedError when it is used."""

    def __init__(self, name: str, reason: str) -> None:
        self._name = name
        self._reason = reason

    def exec_module(self, module: ModuleType) -> None:
        module.__doc__ = f"Not served: {self._reason}."

        def get(name: str) -> Any:
            if name.startswith("__"):  # which Python and tools ask for
                raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
            value = not_served(f"apex.{self._name}.{name}", self._reason)
            if isinstance(value, type):  # of an autograd function
                value.apply = value.__new__  # type: ignore[attr-defined]
            setattr(module, name, value)
            return value

        module.__getattr__ = get  # type: ignore[method-assign]


class _Finder:
    """Meta path finder of the modules in ``REASONS``."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        name = fullname.removeprefix(f"{_PACKAGE}.")
        reason = REASONS.get(name) if fullname.startswith(_PACKAGE) else None
        if reason is None:
            return None
        is_package = any(other.startswith(f"{name}.") for other in REASONS)
        return ModuleSpec(fullname, _Loader(name, reason), is_package=is_package)


def find_unserved() -> None:
    """Installs the finder of unserved modules, once, behind all other finders."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
