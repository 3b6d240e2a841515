"""Cases of test_on_a_gpu.py: ``python on_a_gpu.py CASE`` in a process whose JAX has a GPU."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import apex_te.jax as te
import apex_te.jax.flax as te_flax
import apex_te.jax.nnx as te_nnx
from apex_te import recipe

RECIPES = {
    "delayed": recipe.DelayedScaling(amax_history_len=4),
    "first": recipe.DelayedScaling(amax_history_len=4, first_step="current"),
    "tensorwise": recipe.CurrentScaling(),
    "blockwise": recipe.BlockScaling(),
    "mxfp8": recipe.MXFP8Scaling(),
}
TOKENS, IN, OUT = 256, 256, 512
LAYER = {
    "hidden_size": IN, "mlp_hidden_size": OUT, "num_attention_heads": 4, "hidden_dropout": 0.0,
    "attention_dropout": 0.0, "dtype": jnp.bfloat16,
}  # fmt: skip
MODELS = {
    "linear": (
        lambda rngs: te_nnx.Linear(IN, OUT, rngs=rngs, dtype=jnp.bfloat16),
        te_flax.DenseGeneral(OUT, dtype=jnp.bfloat16),
    ),
    "mlp": (
        lambda rngs: te_nnx.LayerNormMLP(
            IN, OUT, rngs=rngs, activations=("silu", "linear"), dtype=jnp.bfloat16
        ),
        te_flax.LayerNormMLP(OUT, activations=("silu", "linear"), dtype=jnp.bfloat16),
    ),
    "experts": (
        lambda rngs: te_nnx.MoEBlock(IN, 8, OUT, rngs=rngs, dtype=jnp.bfloat16),
        te_flax.MoEBlock(8, 2, OUT, dtype=jnp.bfloat16),
    ),
    "layer": (
        lambda rngs: te_nnx.TransformerLayer(rngs=rngs, **LAYER),
        te_flax.TransformerLayer(**LAYER),
    ),
}


def first(y):
    return y[0] if isinstance(y, tuple) else y


def data(number, width):
    """Tokens whose scale changes from step to step."""
    key = jax.random.key(number)
    return 2.0 ** (number % 3) * jax.random.normal(key, (2, TOKENS // 2, width), jnp.bfloat16)


def linen_step(module, chosen):
    @jax.jit
    def step(variables, x, grad):
        with te.fp8_autocast(True, chosen):
            y, pull = jax.vjp(lambda *given: first(module.apply(*given)), variables, x)
            return y, *pull(grad)

    return step


def pure(model, *filters):
    return jax.tree.map(np.array, nnx.to_pure_dict(nnx.state(model, *filters)))


def nnx_is_linen(kind, chosen):
    """Outputs, gradients and FP8 state of five steps, bitwise."""
    make, module = MODELS[kind]
    with te.fp8_autocast(True, chosen):
        model = make(nnx.Rngs(0))
    variables = {"params": pure(model, nnx.Param)}
    if chosen.keeps_state:
        variables["fp8_metas"] = pure(model, te_nnx.FP8State)

    @nnx.jit
    def step(model, x, grad):
        def loss(model, x):
            y = first(model(x))
            return (y.astype(jnp.float32) * grad).sum(), y

        with te.fp8_autocast(True, chosen):
            (_, y), found = nnx.value_and_grad(loss, argnums=(0, 1), has_aux=True)(model, x)
        return y, found

    linen = linen_step(module, chosen)
    for number in range(5):
        x, grad = data(number, IN), data(99 - number, OUT if kind == "linear" else IN)
        y, (grads, dx) = step(model, x, grad)
        expected, gradients, expected_dx = linen(variables, x, grad)
        ours = {"params": nnx.to_pure_dict(grads)}
        if chosen.keeps_state:
            state = {"fp8_metas": gradients["fp8_metas"]}
            variables = te.update_collections(state, variables)
            ours["fp8_metas"] = pure(model, te_nnx.FP8State)
            gradients = {**gradients, "fp8_metas": variables["fp8_metas"]}
        jax.tree.map(
            np.testing.assert_array_equal, (y, dx, ours), (expected, expected_dx, gradients)
        )


def assert_near_the_cpu(function, *args, bound=0.02):
    """Compares the norm of the difference of each result with its norm."""
    gpu, cpu = jax.devices()[0], jax.devices("cpu")[0]
    assert gpu.platform == "gpu"
    found, expected = (
        jax.tree.map(
            lambda t: np.asarray(t, np.float64), function(*jax.device_put(args, where))
        )
        for where in (gpu, cpu)
    )  # fmt: skip
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        error, size = (float(np.linalg.norm(t)) for t in (ours - theirs, theirs))
        assert error <= bound * size + 1e-6, (error, size, ours.shape)


def gpu_is_cpu(kind, chosen):
    """The first step of a layer: casts have the CPU's bits, GEMMs are rounded to bfloat16."""
    module = MODELS[kind][1]
    x, grad = data(0, IN), data(1, OUT if kind == "linear" else IN)
    with te.fp8_autocast(True, chosen):
        variables = jax.jit(module.init)(jax.random.key(0), x)
    assert_near_the_cpu(linen_step(module, chosen), variables, x, grad)


def einsum_and_vmap(chosen):
    x, w = data(0, IN).reshape(4, -1, IN), data(1, OUT).reshape(4, -1, OUT)[:, :IN]
    w = jnp.concatenate([w] * (IN // w.shape[1]), 1)

    @jax.jit
    def run(x, w):
        def batched(x, w):
            return te.einsum("bsi,bio->bso", x, w).astype(jnp.float32)

        def mapped(x, w):
            return jax.vmap(lambda x: te.einsum("si,io->so", x, w[0]))(x).astype(jnp.float32)

        with te.fp8_autocast(True, chosen):
            return [
                (f(x, w), jax.grad(lambda *given, f=f: (f(*given) ** 2).mean(), (0, 1))(x, w))
                for f in (batched, mapped)
            ]

    assert_near_the_cpu(run, x, w)


def optimizers():
    params = {"a": data(0, IN)[0], "b": jax.random.normal(jax.random.key(1), (OUT,))}
    for made in (te.optimizers.fused_adam(1e-2), te.optimizers.fused_lamb(1e-2)):

        @jax.jit
        def run(params, made=made):
            state = made.init(params)
            for number in range(3):
                grads = jax.tree.map(lambda p, n=number: jnp.cos(p * (n + 1)), params)
                updates, state = made.update(grads, state, params)
                params = optax.apply_updates(params, updates)
            return params

        assert_near_the_cpu(run, params, bound=1e-3)


CASES = {
    **{f"nnx {kind} {name}": (nnx_is_linen, kind, RECIPES[name])
       for kind in MODELS for name in ("delayed", "first", "blockwise")},
    **{f"cpu {kind} {name}": (gpu_is_cpu, kind, RECIPES[name])
       for kind in ("linear", "mlp", "experts")
       for name in ("first", "tensorwise", "blockwise", "mxfp8")},
    **{f"einsum {name}": (einsum_and_vmap, RECIPES[name])
       for name in ("tensorwise", "blockwise")},
    "optimizers": (optimizers,),
}  # fmt: skip

if __name__ == "__main__":
    function, *given = CASES[sys.argv[1]]
    function(*given)
