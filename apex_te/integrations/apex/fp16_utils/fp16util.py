"""Conversion of models to 16 bits, and copies between parameters and master weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.nn.utils import clip_grad_norm_ as clip_grad_norm

from ....amp._model import cast_floats
from ....ops import multi_tensor

__all__ = [
    "BN_convert_float", "FP16Model", "clip_grad_norm", "convert_module", "convert_network",
    "master_params_to_model_params", "model_grads_to_master_grads", "network_to_half",
    "prep_param_lists", "to_python_float", "tofp16",
]  # fmt: skip
_Tensors = Sequence[torch.Tensor]


class tofp16(torch.nn.Module):
    """Module that casts its input to float16."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Returns ``input`` in float16."""
        return input.half()


def _is_affine_batch_norm(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.modules.batchnorm._BatchNorm) and module.affine


def BN_convert_float(module: torch.nn.Module) -> torch.nn.Module:
    """Converts affine batch norms in ``module`` to float32, in place, and returns it."""
    for each in module.modules():
        if _is_affine_batch_norm(each):
            each.float()
    return module


def network_to_half(network: torch.nn.Module) -> torch.nn.Module:
    """Returns a module of a cast to float16 and ``network`` in float16 except batch norms."""
    return torch.nn.Sequential(tofp16(), BN_convert_float(network.half()))


def convert_module(module: torch.nn.Module, dtype: torch.dtype) -> None:
    """Casts a module's own floating-point parameters, gradients and buffers to ``dtype``."""
    module._apply(lambda x: x.to(dtype) if x.is_floating_point() else x, recurse=False)


def convert_network(network: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """Casts all modules of ``network`` to ``dtype`` except affine batch norms, and returns it."""
    for module in network.modules():
        if _is_affine_batch_norm(module):
            continue
        convert_module(module, dtype)
        if isinstance(module, torch.nn.RNNBase):
            module.flatten_parameters()
    return network


class FP16Model(torch.nn.Module):
    """Module that runs a network in float16, except affine batch norms.

    Args:
        network: the network, which is converted in place.
    """

    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__()
        self.network = convert_network(network, dtype=torch.half)

    def forward(self, *inputs: Any) -> Any:
        """Calls the network with floating-point tensors of ``inputs`` in float16."""
        return self.network(*cast_floats(inputs, torch.half))


def prep_param_lists(
    model: torch.nn.Module, flat_master: bool = False
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Makes float32 master weights of the parameters that require a gradient.

    Args:
        model: the model.
        flat_master: make one flat master weight of all parameters, which must have one dtype.

    Returns:
        A tuple of the parameters and their master weights.

    Raises:
        TypeError: parameters have several dtypes with ``flat_master``.
    """
    params: list[torch.Tensor] = [p for p in model.parameters() if p.requires_grad]
    if not flat_master:
        return params, [_master(param.detach().clone()) for param in params]
    dtypes = {param.dtype for param in params}
    if len(dtypes) > 1:
        raise TypeError(
            "prep_param_lists: model must have parameters of one dtype with flat_master=True, got "
            f"{', '.join(sorted(map(str, dtypes)))}"
        )
    master = _master(_flatten_dense_tensors([param.detach() for param in params]))
    master.grad = torch.empty_like(master)
    return params, [master]


def _master(value: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(value.float())


@torch.no_grad()
def model_grads_to_master_grads(
    model_params: _Tensors, master_params: _Tensors, flat_master: bool = False
) -> None:
    """Copies the gradients of parameters to their master weights, which ``prep_param_lists`` made.

    A parameter without a gradient leaves its master weight without one, or zeros in a flat one.

    Args:
        model_params, master_params: results of ``prep_param_lists``.
        flat_master: as it was there: ``master_params`` has one flat float32 tensor for all.
    """
    if flat_master:
        master = master_params[0]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model_params]
        flat = _flatten_dense_tensors(grads)
        master.grad = flat.float() if master.grad is None else master.grad.copy_(flat)
        return
    sources, targets = paired_grads(model_params, master_params)
    if sources:
        multi_tensor.scale(sources, targets, 1.0)


def paired_grads(
    model_params: _Tensors, master_params: _Tensors
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Returns the gradients of parameters, and those of their master weights to write them to."""
    sources, targets = [], []
    for param, master in zip(model_params, master_params, strict=True):
        if param.grad is None:
            master.grad = None
            continue
        if master.grad is None:
            master.grad = torch.empty_like(master)
        sources.append(param.grad)
        targets.append(master.grad)
    return sources, targets


@torch.no_grad()
def master_params_to_model_params(
    model_params: _Tensors, master_params: _Tensors, flat_master: bool = False
) -> None:
    """Copies master weights to their parameters.

    Args:
        model_params, master_params, flat_master: as in ``model_grads_to_master_grads``.
    """
    masters = [master.detach() for master in master_params]
    params = [param.detach() for param in model_params]
    if flat_master:
        masters = [*_unflatten_dense_tensors(masters[0], params)]
    if masters:
        multi_tensor.scale(masters, params, 1.0)


def to_python_float(t: Any) -> float:
    """Returns the number in a tensor or sequence of one element."""
    return t.item() if hasattr(t, "item") else t[0]
