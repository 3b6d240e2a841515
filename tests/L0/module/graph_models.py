"""Models, batches and FP8 states for the tests of CUDA graphs."""

import pytest
import torch
from checks import needs_cuda
from schemes import FIRST_STEP, SCHEMES

from apex_te import Linear
from apex_te.fp8.delayed.state import TENSORS
from apex_te.graphs.graphed_callables import make_graphed_callables
from apex_te.module.layer_norm_linear import LayerNormLinear
from apex_te.module.layer_norm_mlp import LayerNormMLP

RECIPES = {**SCHEMES, "first step": FIRST_STEP}
DELAYED = RECIPES["delayed"]
each_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
STEPS, ROWS, WIDTH = 20, 64, 128


def on_gpu(test):
    return needs_cuda(pytest.mark.cuda(test))


def layer(kind=LayerNormMLP, **kwargs):
    features = (WIDTH, 2 * WIDTH) if kind is LayerNormMLP else (WIDTH, WIDTH)
    return kind(*features, params_dtype=torch.bfloat16, device="cuda", **kwargs)


def stack():
    return torch.nn.Sequential(layer(Linear), torch.nn.GELU(), layer(LayerNormLinear), layer())


def data(count=STEPS):
    torch.manual_seed(7)
    return torch.randn(count, 2, ROWS, WIDTH, device="cuda", dtype=torch.bfloat16)


def fp8_state(model):
    """The tensors of every FP8 state."""
    states = [
        m.fp8_state for m in model.modules() if hasattr(m, "fp8_state") and m.fp8_state.allocated
    ]
    return [getattr(state, name).clone() for state in states for name in TENSORS]


def graphed(model, recipe=None, **kwargs):
    x = torch.randn(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    fp8 = {"fp8_enabled": True, "fp8_recipe": recipe} if recipe is not None else {}
    return make_graphed_callables(model, (x,), **fp8, **kwargs)


def count_replays(model):
    """Counts the runs of a graphed module's graph."""
    return model.forward.capture.run
