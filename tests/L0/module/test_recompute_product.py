"""Recomputing gives what not recomputing gives, bitwise, whatever draws random numbers.

Modules x recipes x dropout x a tracker x what is recomputed; training steps, and after them the
states of FP8 and of every random generator.
"""

import functools

import pytest
import torch
from checks import assert_same_bits
from graph_models import fp8_state
from layer_kinds import repeatable
from schemes import chosen
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from apex_te import fp8_autocast
from apex_te.distributed import CudaRNGStatesTracker, checkpoint
from apex_te.module.attention.multihead import MultiheadAttention
from apex_te.module.transformer_layer import TransformerLayer
from apex_te.recipe import make_recipe

RECIPES = {"high precision": None, **chosen("delayed", "tensorwise", "blockwise")}
STEPS, HEADS, TOKENS = 3, 4, 8
aten = torch.ops.aten
PRODUCTS = (aten.mm, aten.addmm, aten.bmm, aten.baddbmm)
ATTENTION = (
    aten._scaled_dot_product_flash_attention, aten._scaled_dot_product_flash_attention_for_cpu,
    aten._scaled_dot_product_efficient_attention, aten._scaled_dot_product_cudnn_attention,
    aten._softmax,
)  # fmt: skip


def selective(*saved):
    """Saves the results of these ops and computes the others again."""

    def policy(ctx, func, *args, **kwargs):
        if func.overloadpacket in saved:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    context_fn = functools.partial(create_selective_checkpoint_contexts, policy)
    return {"use_reentrant": False, "context_fn": context_fn}


WAYS = {
    "full, reentrant": {"use_reentrant": True},
    "full": {"use_reentrant": False},
    "core attention": None,
    "core attention in full": {"use_reentrant": False},
    "all but products": selective(*PRODUCTS),
    "all but products and attention": selective(*PRODUCTS, *ATTENTION),
    "all but nothing": selective(),
}


def width_on(device):
    return 128 if device.type == "cuda" else 16


def build(kind, dropout, tracker, device):
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    width = width_on(device)
    options = {
        "attention_dropout": dropout, "params_dtype": dtype, "device": device,
        "get_rng_state_tracker": None if tracker is None else lambda: tracker,
    }  # fmt: skip
    torch.manual_seed(3)
    if kind == "MultiheadAttention":
        return MultiheadAttention(width, HEADS, input_layernorm=True, **options)
    more = {"layer_type": "decoder"} if kind == "decoder" else {}
    return TransformerLayer(width, 2 * width, HEADS, hidden_dropout=dropout, **more, **options)


def generators(device, tracker):
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state())
    return states if tracker is None else [*states, *tracker.get_states().values()]


def train(kind, recipe, dropout, tracked, way, device, plain=False):
    """Everything that must not depend on ``way``, the name of what is recomputed, or None.

    ``plain``: by torch.utils.checkpoint, which knows no tracker, instead of apex_te.checkpoint.
    """
    tracker = None
    if tracked:
        tracker = CudaRNGStatesTracker()
        tracker.add("model-parallel-rng", 11)
    layer = build(kind, dropout, tracker, device)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
    torch.manual_seed(4)
    data = torch.randn(STEPS, 2, 3, TOKENS, 2, width_on(device))
    data = data.to(device, next(layer.parameters()).dtype)
    run = torch_checkpoint if plain else checkpoint
    fixed = {} if tracker is None or plain else {"get_rng_state_tracker": lambda: tracker}
    seen = []
    for step in data:
        for x, other, dy in step:
            x = x.clone().requires_grad_()
            given = (x, other) if kind == "decoder" else (x,)
            core = {"checkpoint_core_attention": way is not None and "core" in way}

            def call(x, *encoder_output, core=core):
                names = {"encoder_output": encoder_output[0]} if encoder_output else {}
                return layer(x, **core, **names)

            with fp8_autocast(recipe is not None, recipe):
                if way is None or WAYS[way] is None:
                    out = call(*given)
                else:
                    out = run(call, *given, **WAYS[way], **fixed)
            out.backward(dy)
            seen += [out.detach().clone(), x.grad]
        seen += [p.grad.clone() for p in layer.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        seen += [*fp8_state(layer), *generators(device, tracker)]
    return seen + [p.detach().clone() for p in layer.parameters()]


@pytest.fixture(autouse=True)
def _repeatable(device):
    with repeatable(device):
        yield


def check(device, ways, tracked, *case):
    if tracked and device.type == "cpu" and torch.cuda.is_available():
        pytest.skip("the tracker follows the GPU's generator where there is one")
    expected = train(*case, tracked, None, device)
    assert all(torch.isfinite(x.float()).all() for x in expected)
    for way, plain in ways:
        found = train(*case, tracked, way, device, plain)
        assert_same_bits(found, expected)


@pytest.mark.parametrize("kind", ["TransformerLayer", "decoder", "MultiheadAttention"])
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("tracked", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_equals_none(way, tracked, dropout, name, kind, device):
    if dropout and "and attention" in way:
        pytest.skip("of ops that draw, a selective policy may save all or none")
    ways = [(way, False)]
    if not (tracked and dropout):
        ways.append((way, True))
    check(device, ways, tracked, kind, RECIPES[name], dropout)


@pytest.mark.parametrize("recipe", [make_recipe("mxfp8"), make_recipe("tensorwise", "hif8")])
@pytest.mark.parametrize("way", ["full", "all but products"])
def test_decoded_products(way, recipe, device):
    check(device, [(way, False), (way, True)], False, "TransformerLayer", recipe, 0.1)
