"""Transformer Engine's functions of layers: those of the Flax modules, and loops over groups."""

from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("flax.linen")
import jax.numpy as jnp  # noqa: E402
from flax import linen as nn  # noqa: E402

import apex_te.jax as te  # noqa: E402
import apex_te.jax.flax as te_flax  # noqa: E402
from apex_te import recipe  # noqa: E402
from apex_te.jax.activation import activation  # noqa: E402
from apex_te.jax.dense import dense, grouped_dense  # noqa: E402
from apex_te.jax.layernorm import layernorm  # noqa: E402
from apex_te.jax.layernorm_dense import layernorm_dense  # noqa: E402
from apex_te.jax.layernorm_mlp import layernorm_mlp  # noqa: E402
from apex_te.jax.ops.swiglu import ClampedSwiglu  # noqa: E402
from apex_te.jax.quantize import (  # noqa: E402
    QuantizerFactory,
    QuantizerSet,
    ScalingMode,
    noop_quantizer_set,
)
from apex_te.jax.softmax import SoftmaxFusionType, softmax  # noqa: E402

DELAYED = recipe.DelayedScaling(amax_history_len=3)
RECIPES = {
    "none": None,
    "delayed": DELAYED,
    "tensorwise": recipe.CurrentScaling(),
    "blockwise": recipe.BlockScaling(),
    "mxfp8": recipe.MXFP8Scaling(),
}
ROWS, WIDTH, MLP = 32, 64, 32


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def same(found, expected):
    """Asserts bitwise equal trees."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.array_equal(np.asarray(one), np.asarray(other))


# By module: its state's number of GEMMs.
MODULES = {
    "dense": te_flax.DenseGeneral(48, kernel_init=jax.nn.initializers.normal(0.2)),
    "norm_dense": te_flax.LayerNormDenseGeneral(
        (2, 24), use_bias=True, bias_init=jax.nn.initializers.normal(1.0)
    ),
    "gated": te_flax.LayerNormMLP(
        MLP, layernorm_type="rmsnorm", activations=("quick_gelu", "linear")
    ),
    "mlp": te_flax.LayerNormMLP(MLP, activations=("squared_relu",), use_bias=True),
}


def of_modules(params, states, x):
    """Applies all modules; ``states`` are their FP8 states, empty without."""
    found = {}
    for name, module in MODULES.items():
        state = {"fp8_metas": states[name]} if states[name] else {}
        y = module.apply({"params": params[name], **state}, x)
        found[name] = y[0] if isinstance(y, tuple) else y
    return found


def of_functions(params, sets, x):
    """Calls the functions that are the same; ``sets`` are the modules' sets of quantizers."""
    p = {name: {key: box.value for key, box in params[name].items()} for name in params}
    one, norm, gated, mlp = (p[name] for name in MODULES)
    return {
        "dense": dense(x, one["kernel"], one["bias"], quantizer_set=sets["dense"][0]),
        "norm_dense": layernorm_dense(
            x, norm["kernel"], norm["scale"], norm["ln_bias"], norm["bias"],
            quantizer_set=sets["norm_dense"][0],
        ),
        "gated": layernorm_mlp(
            x, gated["scale"], None, [gated["wi_kernel"], gated["wo_kernel"]], [None, None],
            "rmsnorm", activation_type=("linear", "quick_gelu"), quantizer_sets=sets["gated"],
        ),
        "mlp": layernorm_mlp(
            x, mlp["scale"], mlp["ln_bias"], [mlp["wi_kernel"], mlp["wo_kernel"]],
            [mlp["wi_bias"], mlp["wo_bias"]], "layernorm", activation_type=("squared_relu",),
            quantizer_sets=sets["mlp"],
        ),
    }  # fmt: skip


def step(apply):
    """Returns a jitted step: outputs and gradients, which of states are the next states."""

    def loss(params, states, x):
        found = apply(params, states, x)
        return sum((y**2).sum() * 0.1 for y in found.values()), found

    return jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))


@pytest.mark.parametrize("name", RECIPES)
def test_functions_have_the_modules_bits(name):
    """Outputs, gradients and FP8 state, over two steps, by sets of quantizers."""
    chosen, x = RECIPES[name], normal(0, ROWS, WIDTH)
    region = te.fp8_autocast(chosen is not None, chosen)
    with region:
        made = {key: module.init(jax.random.key(1), x) for key, module in MODULES.items()}
    params = {key: value["params"] for key, value in made.items()}
    states = {key: value.get("fp8_metas", {}) for key, value in made.items()}
    sets = {
        key: (QuantizerFactory.create_set(fp8_recipe=chosen) if chosen else noop_quantizer_set,) * n
        for key, n in {"dense": 1, "norm_dense": 1, "gated": 2, "mlp": 2}.items()
    }
    theirs, ours = step(of_modules), step(of_functions)
    for at in range(2 if name == "delayed" else 1):
        x = normal(at, ROWS, WIDTH) * (1.0 + at)
        with te.fp8_autocast(chosen is not None, chosen):
            (dp, states, dx), y = theirs(params, states, x)
        (dp_, sets, dx_), y_ = ours(params, sets, x)
        assert y["norm_dense"].shape == (ROWS, 2, 24)
        same((y_, dp_, dx_), (y, dp, dx))
        assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves((y, dx)))
    for key, state in states.items():
        for gemm, one in enumerate(sets[key]):
            assert isinstance(one, QuantizerSet)
            assert set(one.state) == set(state)
            for leaf, value in state.items():
                slots = {"fwd": 3, "bwd": 2}.get(leaf[-3:], 1)
                part = value[..., slots * gemm : slots * (gemm + 1)]
                assert np.array_equal(one.state[leaf], part)
                if leaf == "amax_history_fwd":
                    assert np.array_equal((np.asarray(part) > 0).sum(0), [2, 2, 0])  # two steps


def test_a_region_gives_a_recipe_and_a_set_another_one():
    x, kernel = normal(0, ROWS, WIDTH), normal(1, WIDTH, 16)
    plain, wanted = dense(x, kernel), QuantizerFactory.create_set(fp8_recipe="tensorwise")
    with te.fp8_autocast(True, "tensorwise"):
        in_region = dense(x, kernel)
        assert np.array_equal(dense(x, kernel, quantizer_set=noop_quantizer_set), plain)
        assert QuantizerFactory.create_set().recipe == wanted.recipe
    assert np.array_equal(dense(x, kernel, quantizer_set=wanted), in_region)
    assert not np.array_equal(in_region, plain)
    assert QuantizerFactory.create_set() is noop_quantizer_set
    kept = jax.tree.map(lambda leaf: leaf, noop_quantizer_set)
    assert kept is noop_quantizer_set
    jax.jit(lambda given: given)(wanted)  # a static recipe


def test_sets_are_made_of_recipes_modes_and_dtypes():
    create = QuantizerFactory.create_set
    mode = ScalingMode.DELAYED_TENSOR_SCALING
    assert create(scaling_mode=mode).recipe == recipe.DelayedScaling()
    assert create(scaling_mode=ScalingMode.NO_SCALING) is noop_quantizer_set
    e4m3, e5m2 = jnp.float8_e4m3fn, jnp.float8_e5m2
    mx = create(scaling_mode=ScalingMode.MXFP8_1D_SCALING, fwd_dtype=e4m3, bwd_dtype=e5m2)
    assert mx.recipe == recipe.MXFP8Scaling(fp8_format=recipe.Format.HYBRID)
    both = create(2, fp8_recipe=DELAYED, n_groups=5)
    assert [each.state["scale_fwd"].shape for each in both] == [(15,), (15,)]
    refused = (
        (TypeError, "scaling_mode must be None beside", {"fp8_recipe": "mxfp8"}),
        (NotImplementedError, "checkpoint_name must be None", {"checkpoint_name": "x"}),
        (ValueError, "must be those of a format", {"fwd_dtype": e5m2, "bwd_dtype": e4m3}),
    )
    for kind, text, more in refused:
        with pytest.raises(kind, match=text):
            create(scaling_mode=mode, **more)
    with pytest.raises(NotImplementedError, match="must not be one of FP4, got NVFP4_1D_SCALING"):
        create(scaling_mode=ScalingMode.NVFP4_1D_SCALING)
    with pytest.raises(TypeError, match="scaling_mode must be a ScalingMode, got str"):
        create(scaling_mode="delayed")


def test_any_dimensions_are_contracted():
    x, kernel, bias = normal(0, 2, 3, 4, 5), normal(1, 5, 6, 3, 7), normal(2, 6, 7)
    found = dense(x, kernel, bias, contracting_dims=((1, -1), (2, 0)))
    expected = jnp.einsum("abcd,dfbg->acfg", x, kernel) + bias
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


SIZES = ([7, 0, 20, 5], [0, 0, 0, 40], [0, 0, 0, 0], [10, 10, 10, 10])


@pytest.mark.parametrize("name", [*RECIPES, "first"])
def test_groups_are_a_loop_over_groups(name):
    """Sizes are on the device: one trace serves all, also with empty groups and rows of none."""
    first = recipe.DelayedScaling(amax_history_len=3, first_step="current")
    chosen, rows, traces = RECIPES.get(name, first), 40, []
    x, kernel, bias = normal(0, rows, 32), normal(1, 4, 32, 16), normal(2, 4, 16)
    cotangent = normal(3, rows, 16)

    def loss(x, kernel, bias, sets, sizes):
        traces.append(1)
        y = grouped_dense(x, kernel, sizes, bias=bias, quantizer_set=sets)
        return (y * cotangent).sum(), y

    def of_one(x, kernel, bias, given, cotangent):
        y = dense(x, kernel, bias, quantizer_set=given)
        return (y * cotangent).sum(), y

    made = noop_quantizer_set, noop_quantizer_set
    if chosen:
        made = tuple(QuantizerFactory.create_set(fp8_recipe=chosen, n_groups=n) for n in (4, None))
    run = jax.jit(jax.grad(loss, (0, 1, 2, 3), has_aux=True))
    # FP8 products of groups are rounded to bfloat16, all else is exact or in float32.
    close = 2.0**-7 if chosen else 1e-6
    for counts in SIZES:
        (dx, dk, db, after), y = run(x, kernel, bias, made[0], jnp.array(counts, jnp.int32))
        begin = 0
        for g, count in enumerate(counts):
            part = slice(begin, begin + count)
            begin += count
            if not count:
                assert not np.any(dk[g])
                assert not np.any(db[g])
                continue
            (dx1, dk1, db1, after1), y1 = jax.grad(of_one, (0, 1, 2, 3), has_aux=True)(
                x[part], kernel[g], bias[g], made[1], cotangent[part]
            )
            for found, wanted, tolerance in (
                (y[part], y1, close), (dx[part], dx1, close), (dk[g], dk1, 2e-6), (db[g], db1, 2e-6)
            ):  # fmt: skip
                scale = np.abs(wanted).max()
                np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=tolerance * scale)
            for leaf, value in after1.state.items():
                found = after.state[leaf]
                if leaf == "first_due":  # the forward slots of all groups come first
                    own = [*range(3 * g, 3 * g + 3), *range(12 + 2 * g, 14 + 2 * g)]
                else:
                    slots = {"fwd": 3, "bwd": 2}.get(leaf[-3:], 1)
                    own = slice(slots * g, slots * (g + 1))
                assert np.array_equal(found[..., own], value), leaf
        assert not np.any(y[begin:])
        assert not np.any(dx[begin:])
    assert len(traces) == 1
    for wrong in ([-1, 3, 3, 3], [40, 1, 0, 0]):
        assert np.isnan(run(x, kernel, bias, made[0], jnp.array(wrong, jnp.int32))[1]).all()


def test_functions_without_jit_and_with_64_bit_types_have_the_same_bits():
    x, kernel, gamma = np.ones((8, 32), np.float32), np.ones((2, 32, 16), np.float32), np.ones(32)
    x[3] = 2.0

    def run(sizes):
        one = QuantizerFactory.create_set(fp8_recipe="tensorwise")
        scale = jnp.asarray(gamma, jnp.float32)
        return (
            grouped_dense(jnp.asarray(x), jnp.asarray(kernel), sizes, quantizer_set=one),
            layernorm_dense(jnp.asarray(x), jnp.asarray(kernel[0]), scale, None, None, "rmsnorm"),
            activation(jnp.asarray(x)[:, None], ("quick_gelu",)),
        )

    sizes = np.array([3, 5])
    expected = jax.jit(run)(jnp.asarray(sizes))
    with jax.disable_jit():
        same(run(jnp.asarray(sizes)), expected)
    with jax.enable_x64(True):
        assert jnp.asarray(sizes).dtype == jnp.int64
        same(jax.jit(run)(jnp.asarray(sizes)), expected)


NAMES = {
    ("gelu",): jax.nn.gelu,
    ("gelu_erf",): lambda x: jax.nn.gelu(x, approximate=False),
    ("quick_gelu",): lambda x: x * jax.nn.sigmoid(1.702 * x),
    ("relu",): jax.nn.relu,
    ("squared_relu",): lambda x: jax.nn.relu(x) ** 2,
    ("silu",): jax.nn.silu,
    ("sigmoid",): jax.nn.sigmoid,
    ("tanh",): jnp.tanh,
}


@pytest.mark.parametrize("names", NAMES, ids="".join)
def test_activations_are_their_formulas(names):
    """Alone, gated with "linear" in either place, and beside a function."""
    formula, x = NAMES[names], normal(0, 6, 2, 8) * 2

    def found(x):
        return (
            activation(x[:, :1], names),
            activation(x, (*names, "linear")),
            activation(x, ("linear", *names)),
            activation(x, (names[0], jnp.sin)),
        )

    def expected(x):
        gate, up = x[:, 0], x[:, 1]
        one = formula(gate)
        return one, one * up, one * up, one * jnp.sin(up)

    def both(f):
        return *f(x), jax.grad(lambda x: sum((y**3).sum() for y in f(x)))(x)

    for one, other in zip(both(found), both(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)


def test_clamped_activation_and_its_parameters():
    x, names = normal(0, 6, 2, 8) * 6, ("clamped_silu", "clamped_linear")
    for given, limit, alpha, offset in (
        (None, 7.0, 1.702, 1.0),
        ({"limit": 2.0, "glu_linear_offset": 0.5}, 2.0, 1.702, 0.5),
        (ClampedSwiglu(3.0, 1.0, 0.0), 3.0, 1.0, 0.0),
    ):
        gate, up = jnp.minimum(x[:, 0], limit), jnp.clip(x[:, 1], -limit, limit)
        expected = gate * jax.nn.sigmoid(alpha * gate) * (up + offset)
        for order in (names, names[::-1]):
            found = activation(x, order, act_params=given)
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(TypeError, match=r"act_params must have keys of .*, got \['beta'\]"):
        activation(x, names, act_params={"beta": 1.0})


def test_softmax_hides_what_its_type_says():
    x = normal(0, 2, 3, 8, 8)
    mask = np.random.default_rng(0).random((2, 1, 8, 8)) < 0.5
    mask[0, 0, 0] = True
    causal = ~np.tri(8, dtype=bool)
    kinds = SoftmaxFusionType
    for kind, given, hidden in (
        (kinds.SCALED, None, np.zeros((8, 8), bool)),
        (kinds.SCALED_MASKED, jnp.asarray(mask, jnp.uint8), mask),
        (kinds.SCALED_UPPER_TRIANG_MASKED, None, causal),
    ):

        def formula(x, hidden=hidden):
            raised = jnp.where(hidden, 0.0, jnp.exp(x * 0.5))
            total = raised.sum(-1, keepdims=True)
            return raised / jnp.where(total == 0, 1.0, total)

        both = [
            jax.value_and_grad(lambda x, f=f: (f(x) ** 2).sum())(x)
            for f in (lambda x, kind=kind, given=given: softmax(x, given, 0.5, kind), formula)
        ]
        for one, other in zip(*both, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


X, K = jnp.ones((4, 8)), jnp.ones((8, 6))
G = jnp.ones((2, 8, 6))
PRECISE = QuantizerFactory.create_set(
    fp8_recipe=recipe.DelayedScaling(override_linear_precision=(False, False, True)), n_groups=2
)
MISTAKES = {
    "set": (TypeError, "dense: quantizer_set must be None or of QuantizerSet, got str",
            lambda: dense(X, K, quantizer_set="delayed")),
    "no state": (ValueError, "dense: quantizer_set must be given with DelayedScaling, got None",
                 lambda: in_delayed(dense, X, K)),
    "two recipes": (ValueError, "layernorm_mlp: quantizer_sets must all have one recipe",
                    lambda: mlp(quantizer_sets=(noop_quantizer_set, None))),
    "other state": (ValueError, "must have the FP8 state that create_set makes, got the names",
                    lambda: dense(X, K, quantizer_set=QuantizerSet(DELAYED))),
    "groups of state": (ValueError, "grouped_dense: scale_fwd of the FP8 state must have shape",
                        lambda: grouped_dense(X, G, jnp.array([1, 2]), quantizer_set=
                                              QuantizerFactory.create_set(fp8_recipe=DELAYED))),
    "dims": (ValueError, r"contracting_dims must be different dimensions of x \[4, 8\], got \(2,\)",
             lambda: dense(X, K, contracting_dims=((2,), (0,)))),
    "numbers of dims": (ValueError, "contracting_dims must be as many dimensions of x as of kernel",
                        lambda: dense(X, K, contracting_dims=((0, 1), (0,)))),
    "collective": (NotImplementedError, "dense: collective_op_set must be None, got int",
                   lambda: dense(X, K, collective_op_set=1)),
    "norm": (ValueError, 'layernorm: norm_type must be "layernorm" or "rmsnorm", got \'batch\'',
             lambda: layernorm(X, X[0], X[0], "batch")),
    "beta": (ValueError, "layernorm: beta must be None with norm_type 'rmsnorm', got an array",
             lambda: layernorm(X, X[0], X[0], "RMS_Norm")),
    "quantizer": (NotImplementedError, "layernorm: quantizer must be None",
                  lambda: layernorm(X, X[0], X[0], "layernorm", quantizer=1)),
    "parts": (ValueError, r"activation: x must have shape \[..., 2, F\], got \[4, 8\]",
              lambda: activation(X, ("gelu", "linear"))),
    "name": (ValueError, "activation: activations must be one of gelu, .* got \\('nothing',\\)",
             lambda: activation(X[:, None], "nothing")),
    "kernels": (ValueError, r"layernorm_mlp: kernels must be \[in, 2, F\] and \[F, out\]",
                lambda: mlp(activation_type=("gelu", "linear"))),
    "softmax": (TypeError, "softmax: softmax_fusion_type must be a SoftmaxFusionType, got str",
                lambda: softmax(G[None], softmax_fusion_type="scaled")),
    "mask": (ValueError, "softmax: mask must be given with SCALED_MASKED, got None",
             lambda: softmax(G[None], softmax_fusion_type=SoftmaxFusionType.SCALED_MASKED)),
    "group dims": (NotImplementedError, "contracting_dims and kernel_fsdp_info must be",
                   lambda: grouped_dense(X, G, jnp.array([1, 2]), ((0,), (1,)))),
    "group shapes": (ValueError, "x, kernel and group_sizes must be",
                     lambda: grouped_dense(X, G, jnp.array([1, 2, 3]))),
    "group bias": (ValueError, r"bias must be \[2, 6\], got \[6\]",
                   lambda: grouped_dense(X, G, jnp.array([1, 2]), bias=jnp.ones(6))),
    "group precision": (NotImplementedError, "grouped_dense: override_linear_precision must",
                        lambda: grouped_dense(X, G, jnp.array([1, 2]), quantizer_set=PRECISE)),
}  # fmt: skip


def in_delayed(function, *args):
    with te.fp8_autocast(True, DELAYED):
        return function(*args)


def mlp(**options):
    kernels = [jnp.ones((8, 1, 6)), jnp.ones((6, 8))]
    return layernorm_mlp(X, X[0], None, kernels, [None, None], "rmsnorm", **options)


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_name_the_argument(name):
    kind, text, call = MISTAKES[name]
    with pytest.raises(kind, match=text):
        call()


def test_state_that_is_not_differentiated_is_refused():
    given = QuantizerFactory.create_set(fp8_recipe=DELAYED)
    with pytest.raises(ValueError, match="FP8 state: its collection must be differentiated"):
        jax.grad(lambda k: dense(X, k, quantizer_set=given).sum())(K)


def test_mesh_axes_have_names_within_a_guard():
    from apex_te.jax.sharding import MeshResource, global_mesh_resource, global_shard_guard

    wanted = MeshResource(dp_resource="data")
    with global_shard_guard(wanted):
        assert global_mesh_resource() == wanted
        with te.fp8_autocast(True, "tensorwise"):
            assert global_mesh_resource() == wanted
    assert global_mesh_resource() == MeshResource()
    with pytest.raises(TypeError, match="resource must be a MeshResource, got str"):
        global_shard_guard("data").__enter__()


DATA = normal(11, ROWS, WIDTH)


class TwoProducts(te_flax.TransformerEngineBase):
    """Two products whose sets of quantizers the module makes; None takes the region's recipe."""

    recipe: Any = None

    @nn.compact
    def __call__(self, x):
        for name in ("_one", "_two"):
            kernel = self.param(f"kernel{name}", nn.initializers.normal(0.2), (WIDTH, WIDTH))
            made = self.generate_quantizer_set(name, fp8_recipe=self.recipe)
            x = dense(x, kernel, quantizer_set=made)
        return x


@pytest.mark.parametrize("in_region", [False, True], ids=["given", "region"])
@pytest.mark.parametrize("name", RECIPES)
def test_modules_make_their_sets_and_keep_the_state(name, in_region):
    chosen = RECIPES[name]
    module = TwoProducts(None if in_region else chosen)
    with te.fp8_autocast(in_region and chosen is not None, chosen if in_region else None):
        variables = module.init(jax.random.key(1), DATA)
        params, state = variables["params"], {k: v for k, v in variables.items() if k != "params"}
        one = QuantizerFactory.create_set(fp8_recipe=None if in_region else chosen)
    assert set(state) == ({"fp8_metas"} if name == "delayed" else set())
    sets = [one, one]

    @jax.jit
    def step(params, state):
        return jax.grad(lambda p, s: (module.apply({"params": p, **s}, DATA) ** 2).sum(), (0, 1))(
            params, state
        )

    @jax.jit
    def expected(params, sets):
        def loss(p, sets):
            y = dense(DATA, p["kernel_one"], quantizer_set=sets[0])
            return (dense(y, p["kernel_two"], quantizer_set=sets[1]) ** 2).sum()

        return jax.grad(loss, (0, 1))(params, sets)

    with te.fp8_autocast(in_region and chosen is not None, chosen if in_region else None):
        for _ in range(4):
            grads, state = step(params, state)
            wanted, sets = expected(params, sets)
            same(grads, wanted)
    if state:
        kept = state["fp8_metas"]
        same([kept["quantizer_set_one"], kept["quantizer_set_two"]], [s.state for s in sets])


def test_a_set_without_its_state_is_refused():
    variables = TwoProducts("tensorwise").init(jax.random.key(1), DATA)
    text = "TwoProducts: variables must have 'quantizer_set_one' in the collection 'fp8_metas'"
    with pytest.raises(ValueError, match=text):
        TwoProducts(DELAYED).apply(variables, DATA)
