"""Transformer layers of Flax and of PyTorch with the same parameters, and steps of both."""

import jax
import jax.numpy as jnp
import numpy as np
import torch
from arrays import to_jax

import apex_te
import apex_te.jax as te
import apex_te.jax.flax as te_flax

BATCH, TOKENS, HIDDEN, MLP, HEADS = 2, 16, 32, 64, 4
DECODER = te_flax.TransformerLayerType.DECODER


def torch_layer(**options):
    """Returns a layer of PyTorch without dropout, with parameters that differ from their start."""
    layer = apex_te.TransformerLayer(
        HIDDEN, MLP, HEADS, hidden_dropout=0.0, attention_dropout=0.0, attn_input_format="bshd",
        **options,
    )  # fmt: skip
    with torch.no_grad():
        for name, p in layer.named_parameters():
            p.copy_(torch.randn_like(p) * (0.2 if p.dim() > 1 else 0.1))
            if name.endswith(("layer_norm_weight", "layernorm.weight")):
                p.add_(0.0 if options.get("zero_centered_gamma") else 1.0)
    return layer


def flax_layer(**options):
    """Returns a layer of Flax that computes what ``torch_layer`` does."""
    defaults = {
        "hidden_dropout": 0.0, "attention_dropout": 0.0,
        "layernorm_epsilon": 1e-5, "scale_attn_logits": True, "enable_relative_embedding": False,
        "use_bias": True, "hidden_size": HIDDEN,
        "mlp_hidden_size": MLP, "num_attention_heads": HEADS,
    }  # fmt: skip
    return te_flax.TransformerLayer(**defaults | options)


def variables_of(module, layer, chosen, *args):
    """Returns variables of a Flax module with the parameters of one of PyTorch, new state."""
    with te.fp8_autocast(chosen is not None, chosen):
        shapes = jax.eval_shape(lambda: module.init(jax.random.key(0), *args, deterministic=True))
    made = {
        name: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes[name])
        for name in ("params", "fp8_metas")
        if name in shapes
    }
    made["params"] = te.state.from_torch(layer.state_dict(), {"params": made["params"]})["params"]
    if "fp8_metas" in made:
        made["fp8_metas"] = jax.tree.map_with_path(
            lambda path, x: jnp.zeros_like(x) if "amax" in path[-1].key else jnp.ones_like(x),
            made["fp8_metas"],
        )
    return made


def make_step(module, chosen, **options):
    """Returns a jitted function of (variables, x, output gradient, *others): y, and gradients."""

    @jax.jit
    def step(variables, x, grad, *others):
        def loss(variables, x):
            y = module.apply(variables, x, *others, deterministic=True, **options)
            return (y * grad).sum(), y

        with te.fp8_autocast(chosen is not None, chosen):
            (_, y), found = jax.value_and_grad(loss, (0, 1), has_aux=True)(variables, x)
        return y, found

    return step


def assert_near(ours, theirs, name=""):
    """Asserts equality within 2 units in the last place of bf16 of the largest element."""
    theirs = theirs.detach().numpy()
    assert ours.shape == theirs.shape, name
    bound = 2.0**-7 * np.abs(theirs).max() + 1e-6
    assert np.abs(np.asarray(ours) - theirs).max() <= bound, name


def assert_same_steps(layer, module, chosen, steps, *, encoder=False, **call):
    """Asserts equal outputs, gradients and FP8 state of two layers over some steps.

    Args:
        layer: the layer of PyTorch.
        module: that of Flax.
        chosen: the recipe or None.
        steps: number of steps.
        encoder: also pass an encoder's output.
        call: arguments of the calls, pairs of PyTorch's and Flax's value: ``attention_mask``.
    """
    names = {"attention_mask": "attention_mask", "enc_dec_attn_mask": "encoder_decoder_mask"}
    theirs = {name: pair[0] for name, pair in call.items()}
    ours = {names.get(n, n): pair[1] for n, pair in call.items() if pair[1] is not None}
    x = torch.randn(BATCH, TOKENS, HIDDEN)
    encoded = torch.randn(BATCH, TOKENS - 4, HIDDEN) if encoder else None
    others = (None,) if encoded is None else (to_jax(encoded),)
    variables = variables_of(module, layer, chosen, to_jax(x), *others)
    step = make_step(module, chosen, **ours)
    for number in range(steps):
        x = (torch.randn(BATCH, TOKENS, HIDDEN) * 2.0 ** (number % 3)).requires_grad_()
        grad = torch.randn(BATCH, TOKENS, HIDDEN)
        with apex_te.fp8_autocast(enabled=chosen is not None, fp8_recipe=chosen):
            y = layer(x, encoder_output=encoded, **theirs)
        layer.zero_grad()
        y.backward(grad)
        yj, (gradients, dx) = step(variables, to_jax(x), to_jax(grad), *others)
        assert_near(yj, y, "y")
        assert_near(dx, x.grad, "dx")
        with te.fp8_autocast(chosen is not None, chosen):
            found = te.state.to_torch(gradients)
        for name, p in layer.named_parameters():
            # The softmax does not depend on the keys' bias: its gradient is rounding alone.
            if not name.endswith("key_bias"):
                assert_near(found[name], p.grad, name)
        if "fp8_metas" in variables:
            state = layer.state_dict()
            for name in (n for n in state if "fp8_state" in n and "header" not in n):
                assert_near(found[name], state[name], name)
            variables = te.update_collections({"fp8_metas": gradients["fp8_metas"]}, variables)
