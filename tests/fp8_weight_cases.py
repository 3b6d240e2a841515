"""Modules whose weights are held in FP8 only, beside plain ones of the same values."""

import torch
from schemes import SCHEMES

from apex_te import Linear, fp8_autocast
from apex_te.fp8.model_init import fp8_model_init
from apex_te.ops import current_scale
from apex_te.recipe import CurrentScaling

RECIPES = SCHEMES
E4M3 = torch.float8_e4m3fn


def build(kind=Linear, *args, scheme=None, preserve=False, **kwargs):
    with fp8_model_init(True, scheme or CurrentScaling(), preserve):
        return kind(*(args or (160, 48)), **kwargs)


def plain_twin(module):
    """The same module with plain parameters of the same values."""
    twin = Linear(
        module.in_features, module.out_features, module.bias is not None,
        params_dtype=module.weight.dtype, device=module.weight.device,
    )  # fmt: skip
    twin.load_state_dict({k: v for k, v in module.state_dict().items() if "fp8_state" not in k})
    return twin


def run(module, x, dy, scheme, fp8=True, **kwargs):
    x = x.clone().requires_grad_()
    module.zero_grad()
    with fp8_autocast(fp8, scheme):
        out = module(x, **kwargs)
    out.backward(dy)
    return out.detach(), x.grad, module.weight.grad, module.bias.grad


def reference(values):
    """Codes and scale of values by their amax, which is rounded to bfloat16."""
    values = values.detach().cpu()
    amax = values.float().abs().amax().reshape(1).bfloat16().float()
    return current_scale.reference(values, E4M3, amax=amax)
