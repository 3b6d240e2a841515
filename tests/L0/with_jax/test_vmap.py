"""``jax.vmap`` over data of FP8 layers and casts: the bits of the folded batch and of a loop."""

import re

import numpy as np
import pytest

jax = pytest.importorskip("jax")
nn = pytest.importorskip("flax.linen")
import jax.numpy as jnp  # noqa: E402
from arrays import bits, calls  # noqa: E402

import apex_te.jax as te  # noqa: E402
import apex_te.jax.flax as te_flax  # noqa: E402
from apex_te import recipe  # noqa: E402
from apex_te.jax import ops  # noqa: E402
from apex_te.jax import state as fp8_state  # noqa: E402
from apex_te.jax.dense import dense_with_state as dense  # noqa: E402

E4M3 = jnp.float8_e4m3fn
RECIPES = {
    "delayed": recipe.DelayedScaling(amax_history_len=4),
    "first step": recipe.DelayedScaling(
        amax_history_len=4, first_step="current", scaling_factor_compute_algo="pow2"
    ),
    "tensorwise": recipe.CurrentScaling(pow2=True),
    "hif8": recipe.CurrentScaling(fp8_format=recipe.Format.HIF8, pow2=True),
    "blockwise": recipe.BlockScaling(),
    "precise wgrad": recipe.BlockScaling(override_linear_precision=(False, False, True)),
    "mxfp8": recipe.MXFP8Scaling(),
}
BATCH, IN, OUT = 3, 128, 32


def quarters(key, *shape):
    """Multiples of 1/4, whose products and sums are exact in float32 in any order."""
    return jax.random.randint(jax.random.key(key), shape, -8, 9) / 4


def initial(chosen):
    return fp8_state.initial(chosen) if chosen.keeps_state else {}


@pytest.mark.parametrize("rows", [4, 128])
@pytest.mark.parametrize("chosen", RECIPES.values(), ids=RECIPES)
def test_a_mapped_layer_is_the_layer_of_the_whole_batch(chosen, rows):
    """Outputs, all gradients and the FP8 state; blocks of 128 rows are those of the whole batch."""
    if rows == 4 and chosen.quantizer in ("block", "mx"):
        pytest.skip("blocks of few rows are those of each element, as the next test has them")
    x, grad = quarters(0, BATCH, rows, IN), quarters(1, BATCH, rows, OUT)
    kernel, bias, state = quarters(2, IN, OUT), quarters(3, OUT), initial(chosen)

    def step(layer):
        def loss(x, kernel, bias, state):
            y = layer(x, kernel, bias, state)
            return (y * grad).sum(), y

        with te.fp8_autocast(chosen):
            return jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True))(
                x, kernel, bias, state
            )

    mapped = step(jax.vmap(lambda *args: dense(*args[:3], args[3] or None), (0, None, None, None)))
    folded = step(lambda *args: dense(*args[:3], args[3] or None))
    for ours, theirs in zip(*map(jax.tree.leaves, (mapped, folded)), strict=True):
        assert bits(ours) == bits(theirs)


@pytest.mark.parametrize("chosen", ["delayed", "blockwise", "mxfp8"])
def test_a_mapped_layer_is_a_loop_with_the_same_scales(chosen):
    """Gradients of each element, too; the FP8 state has the largest amax."""
    chosen = RECIPES[chosen]
    x, kernel = jax.random.normal(jax.random.key(0), (BATCH, 5, IN)), quarters(2, IN, OUT)
    bias, state = quarters(3, OUT), initial(chosen)
    x = x * jnp.array([1.0, 4.0, 0.5]).reshape(-1, 1, 1)

    def gradients(x, kernel, bias, state):
        def loss(*args):
            y = dense(*args[:3], args[3] or None)
            return (y**2).sum(), y

        return jax.grad(loss, (0, 1, 2, 3), has_aux=True)(x, kernel, bias, state)

    with te.fp8_autocast(chosen):
        made, y = jax.jit(jax.vmap(gradients, (0, None, None, None)))(x, kernel, bias, state)
        one = jax.jit(gradients)
        for i in range(BATCH):
            expected, alone = one(x[i], kernel, bias, state)
            assert bits(y[i]) == bits(alone)
            for ours, theirs in zip(made[:3], expected[:3], strict=True):
                assert bits(ours[i]) == bits(theirs)
    if state:
        assert float(made[3]["amax_history_fwd"][0, 0, 0]) == float(jnp.abs(x).max())


def test_mapped_casts_have_one_scale_or_the_blocks_of_each_element():
    x = jax.random.normal(jax.random.key(0), (2, 3, 128, 160))
    flat = x.reshape(-1, 160)
    made = jax.jit(jax.vmap(jax.vmap(lambda x: ops.current_scale.current_scale(x, E4M3))))(x)
    whole = ops.current_scale.current_scale(flat, E4M3)
    assert bits(made.rowwise) == bits(whole.rowwise)
    columns = whole.columnwise.reshape(160, 2, 3, 128).transpose(1, 2, 0, 3)
    assert bits(made.columnwise) == bits(columns)
    assert (made.scale_inv == whole.scale_inv).all()
    assert (jax.vmap(ops.current_scale.tensor_amax)(x[0]) == jnp.abs(x[0]).max()).all()
    for rows in (128, 100):  # whole blocks are folded, others not
        for cast in (
            lambda x: ops.block_quantize.block_quantize(x, E4M3, padded=False),
            lambda x: ops.block_quantize.block_quantize(x, E4M3, block_rows=128),
            lambda x: ops.mx_quantize.mx_quantize(x, E4M3),
        ):
            made = jax.jit(jax.vmap(cast))(x[0, :, :rows])
            for i in range(3):
                for ours, theirs in zip(made, cast(x[0, i, :rows]), strict=True):
                    assert bits(ours[i]) == bits(theirs)


def test_a_folded_call_is_one_call():
    """Products and casts of a mapped layer are as many as those of one element."""
    x, kernel = quarters(0, BATCH, 128, IN), quarters(2, IN, OUT)
    for chosen in ("tensorwise", "blockwise"):
        with te.fp8_autocast(RECIPES[chosen]):

            def text(f, *args):
                return jax.jit(f).lower(*args).as_text()

            def layer(x):
                return dense(x, kernel)

            def count(text):
                return len(re.findall(r"call @apex_te|custom_call @apex_te", text))

            one, mapped = text(layer, x[0]), text(jax.vmap(layer), x)
            assert count(one) == count(mapped) > 0
            assert "stablehlo.while" not in mapped
            assert calls(jax.vmap(layer), x) == calls(layer, x[0])


@pytest.mark.parametrize("chosen", ["delayed", "tensorwise", "blockwise"])
@pytest.mark.parametrize("kind", ["gated", "attention"])
def test_mapped_modules_are_modules_of_the_batch(kind, chosen):
    """Layers whose norms, activations and projections write FP8 themselves."""
    chosen = RECIPES[chosen]
    module = {
        "gated": te_flax.LayerNormMLP(128, activations=("silu", "linear"), use_bias=True),
        "attention": te_flax.MultiHeadAttention(32, 4, use_bias=True),
    }[kind]
    x = jax.random.normal(jax.random.key(0), (2, 1, 128, IN))
    with te.fp8_autocast(chosen):
        variables = nn.unbox(module.init(jax.random.key(1), x[0]))

    def step(layer, x):
        def loss(variables, x):
            y = layer(variables, x)
            return (y.reshape(2, 128, IN) ** 2).sum(), y

        with te.fp8_autocast(chosen):
            (_, y), grads = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(variables, x)
        return y.reshape(x.shape), grads

    def apply(variables, x):
        return module.apply(variables, x)[0]

    (y, (ours, dx)), (wanted, (theirs, dx_of_batch)) = (
        step(jax.vmap(apply, (None, 0)), x), step(apply, x[:, 0]),
    )  # fmt: skip
    assert bits(y) == bits(wanted)
    if kind == "attention":
        return  # XLA adds the gradients of scores in another order
    assert bits(dx) == bits(dx_of_batch)
    for a, b in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5 * float(jnp.abs(b).max()))
    if chosen.keeps_state:
        states = (jax.tree.leaves(each["fp8_metas"]) for each in (ours, theirs))
        assert all(bits(a) == bits(b) for a, b in zip(*states, strict=True))
