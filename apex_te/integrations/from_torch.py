"""from_torch: a PyTorch model's layers become those of apex_te, in place."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from ..module.layer_norm import LayerNorm
from ..module.linear import Linear
from ..module.rms_norm import RMSNorm
from ._matching import is_conv1d, is_llama_norm, is_plain, norm_eps
from .fusion import fuse_blocks, refuse_optimized

__all__ = ["Conv1DLinear", "from_torch"]

_NORM_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_REPLACED = (nn.Linear, nn.LayerNorm, nn.RMSNorm)
_REPLACING = (Linear, LayerNorm, RMSNorm)
# What nn.Module itself keeps; a converted module goes on with its own.
_KEPT = frozenset(vars(nn.Module()))


class Conv1DLinear(Linear):
    """``y = x @ weight + bias`` with Hugging Face's Conv1D parameter, ``weight`` [in, out].

    The layer computes with the transposed view of that Parameter, so that keys, shapes and
    gradients stay as they were. FP8 packs the view anew on each call, which costs one more pass
    over the weight than ``Linear``; ``from_torch(fuse=True)`` stores it transposed instead.
    """

    def forward(  # type: ignore[override]
        self, inp: torch.Tensor, is_first_microbatch: bool | None = None
    ) -> Any:
        """As ``Linear.forward``."""
        return super().forward(inp, self.weight.t(), None, is_first_microbatch)


def from_torch(model: nn.Module, fuse: bool = False, *, optimizer: Any = None) -> nn.Module:
    """Make the layers of ``model`` compute in FP8 inside ``fp8_autocast``; gives ``model`` back.

    nn.Linear, nn.LayerNorm, nn.RMSNorm and, in models of Hugging Face, LlamaRMSNorm and GPT-2's
    Conv1D change their class where they are: the module objects, Parameters, keys, hooks, modes,
    dtypes and devices (``meta`` included) stay, and outputs are equal outside FP8. A Parameter that
    two layers share stays shared. Optimizers made before or after see the same Parameters.

    Left as they are, and named in one warning: subclasses of these layers (their forward is their
    own), layers whose forward was replaced on the instance, and norms in a dtype other than fp32,
    fp16 and bf16.

    Args:
        model: any model or layer.
        fuse: also join, in the blocks of Hugging Face's Llama and GPT-2, the input norm with the
            query, key and value projections (one LayerNormLinear) and the norm before the MLP with
            the MLP (one LayerNormMLP). That makes new Parameters under new keys;
            ``apex_te.integrations.key_map(model)`` translates state dicts both ways. Blocks that
            do not allow it (hooks, shared or differing parameters, an activation that
            LayerNormMLP has not) are converted one to one and named in the warning.
        optimizer: an optimizer, or several, to check when fusing. Those of torch.optim that are
            alive in this process are found without.

    Errors: TypeError for an argument of a wrong type; ValueError for ``fuse=True`` once an
    optimizer holds a parameter of ``model``, which would go on updating what is gone.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"from_torch: model must be a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(fuse, bool):
        raise TypeError(f"from_torch: fuse must be a bool, got {type(fuse).__name__}")
    left: list[str] = []
    if fuse:
        refuse_optimized(model, optimizer)
        left += fuse_blocks(model)
    for name, module in list(model.named_modules()):
        reason = _convert(module)
        if reason:
            left.append(f"{name or type(module).__name__} ({reason})")
    if left:
        warnings.warn(f"from_torch: left as they are: {', '.join(left)}", stacklevel=2)
    return model


def _convert(module: Any) -> str | None:
    """Change the class of ``module`` if it is a layer to replace; else say why one was left."""
    if is_plain(module, nn.Linear):
        _become(module, Linear, _linear(module, module.in_features, module.out_features))
    elif is_conv1d(module):
        _become(module, Conv1DLinear, _linear(module, *module.weight.shape))
    elif is_plain(module, nn.LayerNorm):
        return _become_norm(module, LayerNorm, module.normalized_shape)
    elif is_plain(module, nn.RMSNorm):
        return _become_norm(module, RMSNorm, module.normalized_shape)
    elif is_llama_norm(module):
        return _become_norm(module, RMSNorm, tuple(module.weight.shape))
    elif isinstance(module, _REPLACED) and not isinstance(module, _REPLACING):
        if "forward" in vars(module):
            return "its forward was replaced"
        return f"{type(module).__name__} is a subclass"
    return None


def _linear(module: Any, in_features: int, out_features: int) -> Linear:
    """A Linear without parameters that has the attributes ``module`` needs."""
    return Linear(
        in_features,
        out_features,
        module.bias is not None,
        skip_weight_param_allocation=True,
        params_dtype=module.weight.dtype,
    )


def _become_norm(module: Any, kind: Any, shape: tuple[int, ...]) -> str | None:
    weight = module.weight
    if weight is not None and weight.dtype not in _NORM_DTYPES:
        return f"norms of {weight.dtype} are not available"
    template = kind(shape, norm_eps(module), device="meta")
    template.elementwise_affine = weight is not None
    _become(module, kind, template)
    return None


def _become(module: nn.Module, kind: type[nn.Module], template: nn.Module) -> None:
    """Give ``module`` the class ``kind`` and what ``template`` has that nn.Module has not."""
    attributes = vars(module)
    attributes.update({k: v for k, v in vars(template).items() if k not in _KEPT})
    # Not a new object: whoever holds the module, or a bound method of it, holds the converted one.
    module.__class__ = kind
