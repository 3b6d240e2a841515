"""apex's modules that are not supported: they can be imported, and their names raise at use."""

from __future__ import annotations

import sys
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from ..transformer_engine._names import not_served

_PACKAGE = __name__.rpartition(".")[0]
# Reasons, each with the modules it is for; modules that are files of this package take precedence.
_TABLE = {
    "torch.nn has RNN, LSTM and GRU": "RNN RNN.RNNBackend RNN.cells RNN.models",
    "use torch.cuda.gds": "contrib.gpu_direct_storage",
    "use torch.nn.functional.scaled_dot_product_attention and torch.compile": (
        "contrib.openfold_triton contrib.openfold_triton.mha"
    ),
    "use apex.optimizers.FusedAdam and torch.optim.swa_utils": (
        "contrib.openfold_triton.fused_adam_swa"
    ),
    "use apex.normalization.FusedLayerNorm": "contrib.openfold_triton.layer_norm",
    "use torch.compile with its own backends": (
        "contrib.torchsched contrib.torchsched.backend contrib.torchsched.config "
        "contrib.torchsched.inductor contrib.torchsched.ops contrib.torchsched.passes"
    ),
    "use torch.distributed and torchrun": (
        "transformer._ucc_util transformer.testing.arguments transformer.testing.commons "
        "transformer.testing.global_vars transformer.testing.standalone_bert "
        "transformer.testing.standalone_gpt transformer.testing.standalone_transformer_lm"
    ),
    "use the public names of its package": (
        "amp.__version__ amp._initialize amp._process_optimizer amp.compat amp.rnn_compat "
        "amp.utils amp.wrap contrib.sparsity.permutation_search_kernels "
        "contrib.transducer._transducer_ref parallel.sync_batchnorm_kernel"
    ),
}
REASONS = {name: reason for reason, names in _TABLE.items() for name in names.split()}


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
