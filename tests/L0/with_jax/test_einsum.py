"""``te.einsum`` and batch dimensions of the class of ``make_dot_general_cls`` against XLA's."""

import re

import numpy as np
import pytest

jax = pytest.importorskip("jax")
nn = pytest.importorskip("flax.linen")
import jax.numpy as jnp  # noqa: E402
from arrays import bits, mesh_of  # noqa: E402

import apex_te.jax as te  # noqa: E402
import apex_te.jax.flax as te_flax  # noqa: E402
from apex_te import recipe  # noqa: E402
from apex_te.jax import state as fp8_state  # noqa: E402
from apex_te.jax.contraction import terms  # noqa: E402

DELAYED = recipe.DelayedScaling(amax_history_len=4)
RECIPES = {
    "delayed": DELAYED,
    "tensorwise": recipe.CurrentScaling(pow2=True),
    "blockwise": recipe.BlockScaling(),
    "mxfp8": recipe.MXFP8Scaling(),
}
# By what is batched: experts, heads on both sides; several contracted dimensions, and none.
CASES = {
    "becd,edf->becf": ((2, 3, 5, 160), (3, 160, 32)),
    "bqhd,bkhd->bhqk": ((2, 4, 3, 32), (2, 5, 3, 32)),
    "...ab,...cbd->d...ca": ((2, 4, 8), (2, 3, 8, 5)),
    "acbd,bdc->ab": ((3, 2, 5, 8), (5, 8, 2)),
    "...a,ab->b...": ((2, 3, 8), (8, 5)),
    "bk,bk->b": ((3, 32), (3, 32)),
    "a,b->ba": ((3,), (4,)),
}
EVERY = [
    *(("becd,edf->becf", name) for name in RECIPES),
    *((spec, "delayed") for spec in CASES if spec != "becd,edf->becf"),
    ("bqhd,bkhd->bhqk", "blockwise"), ("acbd,bdc->ab", "mxfp8"), ("bk,bk->b", "tensorwise"),
]  # fmt: skip


def quarters(key, *shape):
    """Multiples of 1/4, exact in both FP8 formats with scales that are powers of two."""
    return jax.random.randint(jax.random.key(key), shape, -8, 9) / 4


def exact(spec, x, kernel):
    return jnp.einsum(spec, x, kernel, precision="highest")


def step(product, x, kernel, state, grad):
    """Returns the output and gradients of a product of x, a kernel and a state."""

    def loss(x, kernel, state):
        y = product(x, kernel, state)
        return (y * grad).sum(), y

    (_, y), grads = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(x, kernel, state)
    return y, grads


@pytest.mark.parametrize(("spec", "chosen"), EVERY)
def test_einsum_is_xlas_of_values_that_fp8_holds(spec, chosen):
    chosen = RECIPES[chosen]
    x, kernel = (quarters(i, *shape) for i, shape in enumerate(CASES[spec]))
    expected = exact(spec, x, kernel)
    grad = quarters(2, *expected.shape)
    state = fp8_state.initial(chosen) if chosen.keeps_state else {}
    with te.fp8_autocast(chosen):
        y, (dx, dkernel, moved) = step(
            lambda x, kernel, state: te.einsum(spec, x, kernel, state or None),
            x, kernel, state, grad,
        )  # fmt: skip
    assert np.array_equal(y, expected)
    _, pull = jax.vjp(lambda *given: exact(spec, *given), x, kernel)
    for ours, theirs in zip((dx, dkernel), pull(grad), strict=True):
        assert np.array_equal(ours, theirs)
    if state:
        staged = [float(jnp.abs(each).max()) for each in (x, kernel)]
        assert moved["amax_history_fwd"][0, :2].tolist() == staged
        assert float(moved["amax_history_bwd"][0, 0]) == float(jnp.abs(grad).max())
        assert moved["uses"].tolist() == [1.0]


def test_einsum_multiplies_decoded_operands():
    """Values that FP8 rounds, with one scale for all experts: delayed scaling's first, 1."""
    spec, (x_shape, kernel_shape) = "becd,edf->becf", CASES["becd,edf->becf"]
    x, kernel = (
        jax.random.normal(jax.random.key(i), s) for i, s in enumerate((x_shape, kernel_shape))
    )
    x = x * jnp.array([0.25, 1.0, 4.0]).reshape(1, 3, 1, 1)
    grad = jax.random.normal(jax.random.key(2), (*x.shape[:-1], 32))
    with te.fp8_autocast(DELAYED):
        y, (dx, dkernel, _) = step(
            lambda x, kernel, state: te.einsum(spec, x, kernel, state),
            x, kernel, fp8_state.initial(DELAYED), grad,
        )  # fmt: skip
    cast = [each.astype(jnp.float8_e4m3fn).astype(jnp.float32) for each in (x, kernel)]
    expected, pull = jax.vjp(lambda *given: exact(spec, *given), *cast)
    wanted = pull(grad.astype(jnp.float8_e5m2).astype(jnp.float32))
    for ours, theirs in zip((y, dx, dkernel), (expected, *wanted), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    assert float(jnp.abs(y - exact(spec, x, kernel)).max()) > 1e-2


def test_einsum_outside_of_regions_is_xlas():
    x, kernel = quarters(0, 2, 3, 5, 16), quarters(1, 3, 16, 4)
    y = te.einsum("becd,edf->becf", x, kernel)
    assert np.array_equal(y, exact("becd,edf->becf", x, kernel))
    assert (
        jax.eval_shape(lambda: te.einsum("ab,bc->ac", jnp.ones((2, 3)), jnp.ones((3, 0)))).size == 0
    )


@pytest.mark.parametrize(
    ("spec", "shapes", "error", "text"),
    [
        ("ab,bc", [(2, 3), (3, 4)], ValueError, "spec must have the form .*, got 'ab,bc'"),
        ("ab->a", [(2, 3), (3, 4)], ValueError, "spec must have the form"),
        ("ab,bc->ac", [(2, 3), (3, 4, 5)], ValueError, "for arrays of 2 and 3 dimensions"),
        ("ab,bc->ad", [(2, 3), (3, 4)], ValueError, "spec must have the form"),
        ("ab,bc->aa", [(2, 3), (3, 4)], ValueError, "spec must have the form"),
        ("a1,1c->ac", [(2, 3), (3, 4)], ValueError, "spec must have the form"),
        ("ab,bc->ac", [(2, 3), (4, 5)], ValueError, r"equal extents .*, got \[2, 3\] and \[4, 5\]"),
        ("aab,bc->ac", [(2, 2, 3), (3, 4)], NotImplementedError, "each index of x must be in it"),
        ("ab,bcd->ac", [(2, 3), (3, 4, 5)], NotImplementedError, "each index of kernel must"),
    ],
)
def test_specs_that_do_not_fit_are_refused(spec, shapes, error, text):
    with pytest.raises(error, match=f"einsum: .*{text}"):
        te.einsum(spec, *map(jnp.ones, shapes))


def test_dots_stand_for_the_last_of_further_dimensions():
    left, right, out = terms("...a,...ab->b...", 3, 3)  # two further ones of x, one of kernel
    assert left[1:] == right[:2] == f"{right[0]}a"
    assert out == f"b{left[:2]}"


def test_what_einsum_needs_of_its_arrays():
    x, kernel = jnp.ones((2, 3)), jnp.ones((3, 4))
    with te.fp8_autocast("delayed"), pytest.raises(ValueError, match="state must be given"):
        te.einsum("ab,bc->ac", x, kernel)
    with pytest.raises(TypeError, match="kernel must have x's dtype float32, got bfloat16"):
        te.einsum("ab,bc->ac", x, kernel.astype(jnp.bfloat16))


@pytest.mark.parametrize("chosen", ["delayed", "blockwise"])
def test_dense_general_with_batch_dimensions_is_flaxs(chosen):
    """Two batch dimensions and two contracted ones, with the state in TrainState's collection."""
    dims = {"features": (6,), "axis": (-1, 2), "batch_dims": (0, 1)}
    x = quarters(0, 2, 3, 4, 5, 16)
    plain = nn.DenseGeneral(**dims)
    layer = nn.DenseGeneral(**dims, dot_general_cls=te_flax.make_dot_general_cls(RECIPES[chosen]))
    variables = layer.init(jax.random.key(0), x)
    kernel = quarters(1, *variables["params"]["kernel"].shape)
    variables = {**variables, "params": {**variables["params"], "kernel": kernel}}
    y, grads = jax.jit(jax.value_and_grad(lambda v: layer.apply(v, x).sum()))(variables)
    expected, theirs = jax.value_and_grad(lambda v: plain.apply(v, x).sum())(
        {"params": variables["params"]}
    )
    assert float(y) == float(expected)
    for name, leaf in theirs["params"].items():
        assert np.array_equal(grads["params"][name], leaf)
    if chosen == "delayed":
        (state,) = grads["_overwrite_with_gradient"].values()
        assert float(state["amax_history_fwd"][0, 0]) == float(jnp.abs(x).max())


@pytest.mark.parametrize("chosen", ["delayed", "blockwise"])
def test_experts_stay_on_their_devices(chosen):
    chosen, mesh, P = RECIPES[chosen], mesh_of("Auto", d=4), jax.sharding.PartitionSpec
    x, kernel, grad = quarters(0, 4, 128, 128), quarters(1, 4, 128, 32), quarters(2, 4, 128, 32)
    state = fp8_state.initial(chosen) if chosen.keeps_state else {}

    def product(x, kernel, state):
        return te.einsum("ecd,edf->ecf", x, kernel, state or None)

    def run(x, kernel, grad, state):
        def loss(x, kernel, state):
            return (product(x, kernel, state) * grad).sum()

        return jax.grad(loss, (0, 1, 2))(x, kernel, state)

    place = jax.sharding.NamedSharding(mesh, P("d"))
    with te.fp8_autocast(chosen):
        expected = jax.jit(run)(x, kernel, grad, state)
        placed = [jax.device_put(each, place) for each in (x, kernel, grad)]
        program = jax.jit(run).lower(*placed, state).compile()
    assert not re.search(
        r" (?:all-gather|all-to-all|collective-permute)(?:-start)?\(", program.as_text()
    )
    for ours, theirs in zip(
        *map(jax.tree.leaves, (program(*placed, state), expected)), strict=True
    ):
        assert bits(ours) == bits(theirs)


def test_experts_on_explicit_axes_are_refused():
    mesh, P = mesh_of("Explicit", d=4), jax.sharding.PartitionSpec
    x = jax.device_put(jnp.ones((4, 8, 16)), jax.sharding.NamedSharding(mesh, P("d")))
    with te.fp8_autocast("tensorwise"), pytest.raises(NotImplementedError, match="Auto axes"):
        jax.jit(lambda x: te.einsum("ecd,edf->ecf", x, jnp.ones((4, 16, 8)))).trace(x)
