"""Policies of jax.checkpoint: what backward computes again of FP8 products and casts."""

import pytest

jax = pytest.importorskip("jax")
nn = pytest.importorskip("flax.linen")
import jax.numpy as jnp  # noqa: E402

import apex_te.jax as te  # noqa: E402
import apex_te.jax.flax as te_flax  # noqa: E402
from apex_te.jax import checkpoint_policies as policies  # noqa: E402

RECIPES = ["tensorwise", "delayed", "blockwise"]
CASTS = {
    "tensorwise": "apex_te.current_scale_fwd", "delayed": "apex_te.cast_transpose",
    "blockwise": "apex_te.block_quantize",
}  # fmt: skip


class Net(nn.Module):
    """Two products, computed again in backward but for what a policy saves."""

    policy: object = None
    remat: bool = True

    @nn.compact
    def __call__(self, x):
        def body(module, x):
            x = jnp.tanh(te_flax.DenseGeneral(256, name="first", parent=module)(x))
            return jnp.tanh(te_flax.DenseGeneral(128, name="second", parent=module)(x))

        return (nn.remat(body, policy=self.policy) if self.remat else body)(self, x)


def gradients_of(net, recipe):
    """Returns a function of the variables, and these."""
    x = jax.random.normal(jax.random.key(1), (128, 128))
    variables = net.init(jax.random.key(0), x)
    return jax.grad(lambda variables: (net.apply(variables, x) ** 2).sum()), variables


def lowered(net, recipe):
    with te.fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe or "delayed"):
        function, variables = gradients_of(net, recipe)
        return jax.jit(function).lower(variables).as_text()


def products(net, recipe):
    """Number of products; each program of one that XLA has is a call of a function."""
    text = lowered(net, recipe)
    if recipe is None:
        return text.count("stablehlo.dot_general")
    return text.count("apex_te.fp8_gemm_epilogue")


@pytest.mark.parametrize("recipe", RECIPES[:2])
@pytest.mark.parametrize(
    ("policy", "plain"),
    [
        (policies.checkpoint_dots_and_te_gemms, jax.checkpoint_policies.checkpoint_dots),
        (
            policies.dots_and_te_gemms_with_no_batch_dims,
            jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        ),
        (policies.te_gemms_saveable, jax.checkpoint_policies.dots_saveable),
        (None, None),
    ],
    ids=["dots", "no batch", "gemms", "none"],
)
def test_fp8_products_are_saved_like_dots(recipe, policy, plain):
    assert products(Net(policy), recipe) == products(Net(plain), None)


@pytest.mark.parametrize("recipe", RECIPES)
def test_saved_casts_are_not_repeated(recipe):
    counts = [
        lowered(net, recipe).count(CASTS[recipe])
        for net in (Net(remat=False), Net(policies.fp8_casts_saveable), Net())
    ]
    assert counts[0] == counts[1] < counts[2]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    "policy",
    [
        policies.te_gemms_saveable,
        policies.fp8_casts_saveable,
        jax.checkpoint_policies.everything_saveable,
    ],
    ids=["products", "casts", "everything"],
)
def test_results_have_the_same_bits(recipe, policy):
    found = []
    for net in (Net(remat=False), Net(policy)):
        with te.fp8_autocast(enabled=True, fp8_recipe=recipe):
            function, variables = gradients_of(net, recipe)
            found.append(jax.tree.leaves(jax.jit(function)(variables)))
    for a, b in zip(*found, strict=True):
        assert jnp.array_equal(a, b)
