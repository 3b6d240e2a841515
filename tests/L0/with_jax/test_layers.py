"""Regions, FP8 state and Flax modules: numbers as PyTorch's modules have them."""

import inspect

import numpy as np
import pytest
import torch

jax = pytest.importorskip("jax")
nn = pytest.importorskip("flax.linen")
import jax.numpy as jnp  # noqa: E402
from arrays import assert_same, to_jax  # noqa: E402
from flax.core import FrozenDict, freeze, pop  # noqa: E402

import apex_te  # noqa: E402
import apex_te.jax as te  # noqa: E402
import apex_te.jax.flax as te_flax  # noqa: E402
from apex_te import recipe  # noqa: E402
from apex_te.jax import state as fp8_state  # noqa: E402
from apex_te.jax.region import active_recipe  # noqa: E402

DELAYED = recipe.DelayedScaling(amax_history_len=4)
RECIPES = [
    DELAYED,
    recipe.DelayedScaling(
        amax_history_len=3, margin=1, amax_compute_algo="most_recent",
        scaling_factor_compute_algo="pow2", fp8_format=recipe.Format.E4M3,
    ),
    recipe.CurrentScaling(pow2=True),
    recipe.BlockScaling(),
    recipe.BlockScaling(wgrad_input="1x128"),
    recipe.BlockScaling(override_linear_precision=(False, False, True)),
    recipe.DelayedScaling(amax_history_len=4, first_step="current", margin=1),
    recipe.MXFP8Scaling(),
    recipe.MXFP8Scaling(fp8_format=recipe.Format.HYBRID, rounding="floor"),
    recipe.CurrentScaling(fp8_format=recipe.Format.HIF8),
    recipe.CurrentScaling(fp8_format=recipe.Format.HIF8, pow2=True),
]  # fmt: skip
IN, OUT = 48, 32


def quarters(*shape):
    """Multiples of 1/4, whose products and sums are exact in float32 in any order."""
    return torch.randint(-8, 9, shape).float() / 4


def torch_linear():
    layer = apex_te.Linear(IN, OUT)
    with torch.no_grad():
        layer.weight.copy_(quarters(OUT, IN))
        layer.bias.copy_(quarters(OUT))
    return layer


def flax_variables(module, layer, chosen):
    """Returns variables with the parameters of a torch layer."""
    with te.fp8_autocast(True, chosen):
        variables = module.init(jax.random.key(0), jnp.ones((1, IN)))
    plain = {name: t.detach() for name, t in layer.state_dict().items() if "fp8" not in name}
    parts = {"kernel": plain["weight"].T, "bias": plain["bias"]}
    return {**variables, "params": {name: to_jax(t) for name, t in parts.items()}}


def make_step(module, chosen):
    @jax.jit
    def step(variables, x, grad):
        def loss(variables, x):
            y = module.apply(variables, x)
            return (y * grad).sum(), y

        with te.fp8_autocast(True, chosen):
            (_, y), found = jax.value_and_grad(loss, (0, 1), has_aux=True)(variables, x)
        return y, found

    return step


@pytest.mark.parametrize("chosen", RECIPES, ids=repr)
def test_dense_general_is_torchs_linear_over_20_steps(chosen):
    layer, module = torch_linear(), te_flax.DenseGeneral(OUT)
    variables = flax_variables(module, layer, chosen)
    assert ("fp8_metas" in variables) == chosen.keeps_state
    step = make_step(module, chosen)
    for number in range(20):
        scale = 2.0 ** (number % 5)
        x, grad = (quarters(16, IN) * scale).requires_grad_(), quarters(16, OUT) / scale
        with apex_te.fp8_autocast(fp8_recipe=chosen):
            y = layer(x)
        layer.zero_grad()
        y.backward(grad)
        ours, (gradients, dx) = step(variables, to_jax(x), to_jax(grad))
        assert_same(ours, y)
        assert_same(dx, x.grad)
        assert_same(gradients["params"]["kernel"], layer.weight.grad.T)
        assert_same(gradients["params"]["bias"], layer.bias.grad)
        if chosen.keeps_state:
            for name in fp8_state.TENSORS:
                assert_same(gradients["fp8_metas"][name], getattr(layer.fp8_state, name))
            variables = te.update_collections({"fp8_metas": gradients["fp8_metas"]}, variables)


@pytest.mark.parametrize("calls", [0, 1, 2])
def test_calling_update_fp8_metas_or_not_gives_the_same_numbers(calls):
    module, layer = te_flax.DenseGeneral(OUT), torch_linear()
    variables = flax_variables(module, layer, DELAYED)
    plain = variables
    step = make_step(module, DELAYED)
    for _ in range(4):
        x, grad = to_jax(quarters(8, IN)), to_jax(quarters(8, OUT))
        expected, (gradients, _) = step(plain, x, grad)
        plain = te.update_collections({"fp8_metas": gradients["fp8_metas"]}, plain)
        y, (gradients, _) = step(variables, x, grad)
        assert np.array_equal(y, expected)
        variables = te.update_collections({"fp8_metas": gradients["fp8_metas"]}, variables)
        with te.fp8_autocast(True, DELAYED):
            for _ in range(calls):
                variables = te.update_fp8_metas(variables)


def test_an_evaluation_uses_the_next_steps_scales_and_changes_nothing():
    module, layer = te_flax.DenseGeneral(OUT), torch_linear()
    variables = flax_variables(module, layer, DELAYED)
    x, grad = quarters(8, IN) * 9, quarters(8, OUT)
    _, (gradients, _) = make_step(module, DELAYED)(variables, to_jax(x), to_jax(grad))
    variables = te.update_collections({"fp8_metas": gradients["fp8_metas"]}, variables)
    with te.fp8_autocast(True, DELAYED):
        y, changed = module.apply(variables, to_jax(x), mutable=["fp8_metas"])
    for name, before in variables["fp8_metas"].items():
        assert np.array_equal(changed["fp8_metas"][name], before)
    with apex_te.fp8_autocast(fp8_recipe=DELAYED):
        layer(x).backward(grad)
    apex_te.flush_fp8_state()
    with torch.no_grad(), apex_te.fp8_autocast(fp8_recipe=DELAYED):
        assert_same(y, layer(x))


def test_the_region_is_part_of_jits_cache_key():
    module = te_flax.DenseGeneral(OUT, use_bias=False)
    x = to_jax(torch.randn(8, IN))
    variables = module.init(jax.random.key(1), x)
    apply = jax.jit(module.apply)
    plain = apply(variables, x)
    seen = []
    for chosen in (recipe.CurrentScaling(), recipe.CurrentScaling(pow2=True), None):
        with te.fp8_autocast(chosen is not None, chosen):
            seen.append(apply(variables, x))
    assert np.array_equal(seen[2], plain)
    assert not np.array_equal(seen[0], plain)
    assert not np.array_equal(seen[0], seen[1])
    assert np.array_equal(apply(variables, x), plain)
    with te.fp8_autocast(True, recipe.CurrentScaling()):
        assert np.array_equal(apply(variables, x), seen[0])
        with te.autocast(False):
            assert np.array_equal(apply(variables, x), plain)


class Twice(nn.Module):
    """Applies one dense layer two times."""

    @nn.compact
    def __call__(self, x):
        layer = te_flax.DenseGeneral(IN, use_bias=False, name="layer")
        return layer(layer(x))


def test_a_module_used_twice_keeps_its_scales():
    module, x = Twice(), to_jax(torch.randn(8, IN))
    with te.fp8_autocast(True, DELAYED):
        variables = module.init(jax.random.key(0), x)

    @jax.jit
    def step(variables):
        with te.fp8_autocast(True, DELAYED):
            return jax.grad(lambda v: (module.apply(v, x) ** 2).sum())(variables)

    for _ in range(3):
        found = step(variables)["fp8_metas"]
        assert found["layer"]["uses"].tolist() == [2.0]
        variables = te.update_collections({"fp8_metas": found}, variables)
        with te.fp8_autocast(True, DELAYED):
            moved = te.update_fp8_metas(variables)["fp8_metas"]["layer"]
        # The sum of both uses' amaxes is an upper bound, at most twice the largest.
        amax = 448.0 / float(moved["scale_fwd"][0])
        assert float(jnp.abs(x).max()) <= amax * 1.001
        assert float(moved["scale_fwd"][1]) == pytest.approx(
            448.0 / (2 * float(jnp.abs(nn.unbox(variables)["params"]["layer"]["kernel"]).max())),
            rel=1e-5,
        )
        assert moved["uses"].tolist() == [1.0]


def test_scans_over_layers_and_over_microbatches_carry_the_state():
    layers = nn.scan(
        lambda module, x, _: (module(x), None),
        variable_axes={"params": 0, "fp8_metas": 0}, split_rngs={"params": True}, length=3,
        metadata_params={nn.PARTITION_NAME: None},
    )  # fmt: skip

    class Stack(nn.Module):
        @nn.compact
        def __call__(self, x):
            return layers(te_flax.DenseGeneral(IN, use_bias=False, name="layer"), x, None)[0]

    x = to_jax(torch.randn(2, 8, IN))
    module = Stack()
    with te.fp8_autocast(True, DELAYED):
        variables = module.init(jax.random.key(0), x[0])
    assert variables["fp8_metas"]["layer"]["scale_fwd"].shape == (3, 3)

    def state_after(params, state, x):
        with te.fp8_autocast(True, DELAYED):
            return jax.grad(
                lambda s: (module.apply({"params": params, "fp8_metas": s}, x) ** 2).sum()
            )(state)

    @jax.jit
    def scanned(params, state):
        return jax.lax.scan(lambda s, x: (state_after(params, s, x), None), state, x)[0]

    state = variables["fp8_metas"]
    for each in x:
        state = jax.jit(state_after)(variables["params"], state, each)
    found = scanned(variables["params"], variables["fp8_metas"])
    for name, wanted in state["layer"].items():
        assert np.array_equal(found["layer"][name], wanted), name
    assert (np.asarray(found["layer"]["amax_history_fwd"])[:, 0, :2] > 0).all()


def test_states_and_parameters_go_to_torch_and_back():
    layer, module = torch_linear(), te_flax.DenseGeneral(OUT)
    variables = flax_variables(module, layer, DELAYED)
    step = make_step(module, DELAYED)
    for _ in range(2):
        x, grad = quarters(8, IN), quarters(8, OUT)
        _, (gradients, _) = step(variables, to_jax(x), to_jax(grad))
        variables = te.update_collections({"fp8_metas": gradients["fp8_metas"]}, variables)
    with te.fp8_autocast(True, DELAYED):
        saved = te.state.to_torch(variables)
    other = apex_te.Linear(IN, OUT)
    other.load_state_dict({name: torch.from_numpy(v.copy()) for name, v in saved.items()})
    again = te.state.from_torch(
        {name: t.numpy() for name, t in other.state_dict().items()}, variables
    )
    for ours, theirs in zip(jax.tree.leaves(again), jax.tree.leaves(variables), strict=True):
        assert np.array_equal(ours, theirs)
    x, grad = quarters(8, IN), quarters(8, OUT)
    with apex_te.fp8_autocast(fp8_recipe=DELAYED):
        y = other(x)
    y.backward(grad)
    ours, (gradients, _) = step(variables, to_jax(x), to_jax(grad))
    assert_same(ours, y)
    for name in fp8_state.TENSORS:
        assert_same(gradients["fp8_metas"][name], getattr(other.fp8_state, name))
    with pytest.raises(ValueError, match=r"from_torch: weight must have shape"):
        te.state.from_torch({**saved, "weight": saved["weight"][:4]}, variables)
    if "first_due" in variables["fp8_metas"]:
        texts = (b"", b"[", b"[" * 50_000, b"{}", b'{"first_due": [1]}', b'{"first_due": 1}')
        for header in (*(np.frombuffer(text, np.uint8) for text in texts), None):
            with pytest.raises(ValueError, match=r"fp8_state.header must be JSON text"):
                te.state.from_torch({**saved, "fp8_state.header": header}, variables)


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("centered", [False, True])
def test_layer_norm_is_torchs_module(kind, centered):
    module = te_flax.LayerNorm(layernorm_type=kind, zero_centered_gamma=centered)
    x = torch.randn(4, 6, IN)
    variables = nn.unbox(module.init(jax.random.key(0), to_jax(x)))
    scale = float(variables["params"]["scale"][0])
    assert scale == (0.0 if centered else 1.0)
    if kind == "layernorm":
        theirs = apex_te.LayerNorm(IN, eps=1e-6, zero_centered_gamma=centered)
    else:
        theirs = apex_te.RMSNorm(IN, eps=1e-6, zero_centered_gamma=centered)
    assert_same(module.apply(variables, to_jax(x)), theirs(x))


def test_layer_norm_dense_general_and_mlp_are_their_parts():
    x = to_jax(torch.randn(3, 5, IN))
    norm, chosen = te_flax.LayerNorm(), recipe.CurrentScaling()
    both = te_flax.LayerNormDenseGeneral((4, 8), use_bias=True, return_layernorm_output=True)
    mlp = te_flax.LayerNormMLP(
        intermediate_dim=24, activations=("silu", "linear"), use_bias=True,
        return_layernorm_output=True,
    )  # fmt: skip
    with te.fp8_autocast(True, chosen):
        variables = nn.unbox(both.init(jax.random.key(0), x))
        params = variables["params"]
        y, normed = both.apply(variables, x)
        parts = {name: params[name] for name in ("scale", "ln_bias")}
        assert np.array_equal(normed, norm.apply({"params": parts}, x))
        parts = {name: params[name] for name in ("kernel", "bias")}
        assert np.array_equal(y, te_flax.DenseGeneral((4, 8)).apply({"params": parts}, normed))
        assert y.shape == (3, 5, 4, 8)

        variables = nn.unbox(mlp.init(jax.random.key(0), x, deterministic=True))
        params = variables["params"]
        assert params["wi_kernel"].shape == (IN, 2, 24)
        assert params["wo_kernel"].shape == (24, IN)
        y, normed = mlp.apply(variables, x, deterministic=True)
        parts = {"kernel": params["wi_kernel"], "bias": params["wi_bias"]}
        h = te_flax.DenseGeneral((2, 24)).apply({"params": parts}, normed)
        h = te.ops.swiglu.swiglu(h.reshape(3, 5, 48))
        parts = {"kernel": params["wo_kernel"], "bias": params["wo_bias"]}
        assert np.array_equal(y, te_flax.DenseGeneral(IN).apply({"params": parts}, h))
    with te.fp8_autocast(True, DELAYED):
        variables = mlp.init(jax.random.key(0), x, deterministic=True)
        assert variables["fp8_metas"]["scale_fwd"].shape == (6,)
        grads = jax.grad(lambda v: (mlp.apply(v, x, deterministic=True)[0] ** 2).sum())(variables)
        assert grads["fp8_metas"]["uses"].tolist() == [1.0, 1.0]
        staged = np.asarray(grads["fp8_metas"]["amax_history_fwd"])[0]
        assert (staged[[0, 1, 3, 4]] > 0).all()
        assert (staged[[2, 5]] == 0).all()


def test_fields_that_are_not_known_raise():
    with pytest.raises(TypeError):
        te_flax.DenseGeneral(4, colour="red")
    with pytest.raises(ValueError, match="LayerNormMLP: activations must be one of gelu"):
        te_flax.LayerNormMLP(activations=("sine",)).init(
            jax.random.key(0), jnp.ones((2, 4)), deterministic=True
        )


def test_kernels_and_logical_axes_are_transformer_engines():
    module = te_flax.DenseGeneral((4, 8), axis=(-2, -1), kernel_axes=("a", "b", "c", "d"))
    variables = module.init(jax.random.key(0), jnp.ones((2, 3, 5)))
    kernel = variables["params"]["kernel"]
    assert kernel.value.shape == (3, 5, 4, 8)
    assert kernel.names == ("a", "b", "c", "d")
    assert module.apply(variables, jnp.ones((2, 3, 5))).shape == (2, 4, 8)


class Mine(recipe.CurrentScaling):
    """A recipe whose scheme PyTorch's side alone may know."""

    quantizer = "mine"


@pytest.mark.parametrize(
    ("chosen", "error", "text"),
    [
        (recipe.DelayedScaling(interval=2), NotImplementedError, "interval must be 1 in JAX"),
        (recipe.DelayedScaling(amax_compute_algo=max), NotImplementedError, "given by name"),
        (Mine(), NotImplementedError, "fp8_recipe must be DelayedScaling, .* in JAX, got"),
        (7, TypeError, "fp8_recipe must be a recipe from apex_te.recipe or its name, got int"),
        ("late", ValueError, "fp8_recipe must be a recipe or one of delayed, .*, got 'late'"),
    ],
)
def test_recipes_that_jax_lacks_are_refused(chosen, error, text):
    with pytest.raises(error, match=f"fp8_autocast: .*{text}"), te.fp8_autocast(True, chosen):
        pass


def test_every_public_function_that_takes_a_recipe_takes_its_name():
    takers = {
        name: getattr(module, name)
        for module in (te, te_flax)
        for name in module.__all__
        if callable(getattr(module, name))
        and {"recipe", "fp8_recipe"} & set(inspect.signature(getattr(module, name)).parameters)
    }
    classes = "make_dot_general_cls", "make_einsum_cls"
    assert set(takers) == {"autocast", "fp8_autocast", "from_flax", *classes}
    wrong = "must be a recipe or one of delayed, tensorwise, blockwise, mxfp8, rowwise, got 'late'"
    for name in ("autocast", "fp8_autocast"):
        with takers[name](True, "blockwise"):
            assert active_recipe() == recipe.BlockScaling()
        with pytest.raises(ValueError, match=f"^{name}: .*{wrong}"), takers[name](True, "late"):
            pass
    for name in classes:
        assert issubclass(takers[name]("blockwise"), nn.Module)
        with pytest.raises(ValueError, match=f"^{name}: recipe {wrong}"):
            takers[name]("late")
    assert isinstance(te_flax.from_flax(nn.Dense(4), "blockwise"), nn.Dense)
    with pytest.raises(ValueError, match=f"^from_flax: recipe {wrong}"):
        te_flax.from_flax(nn.Dense(4), "late")


@pytest.mark.parametrize("region", [te.fp8_autocast, te.autocast])
def test_a_recipe_may_be_the_first_argument_of_a_region(region):
    for chosen in ("tensorwise", recipe.CurrentScaling()):
        with region(chosen):
            assert active_recipe() == recipe.CurrentScaling()
    name = region.__name__
    for args, error, text in (
        (("late",), ValueError, f"{name}: the first argument must be a recipe or one of .* 'late'"),
        (("mxfp8", "mxfp8"), TypeError, f"{name}: enabled must be a bool beside .* got 'mxfp8'"),
        ((None,), TypeError, f"{name}: enabled must be a bool, or a recipe .* got NoneType"),
    ):
        with pytest.raises(error, match=text), region(*args):
            pass


@pytest.mark.parametrize(
    ("module", "error", "text"),
    [
        (te_flax.DenseGeneral(0), ValueError, "DenseGeneral: features must be at least 1, got 0"),
        (te_flax.DenseGeneral((4, -1)), ValueError, "features must be at least 1, got -1"),
        (te_flax.DenseGeneral(2.5), TypeError, "features must be an int, got float"),
        (te_flax.LayerNormMLP(0), ValueError, "intermediate_dim must be at least 1, got 0"),
    ],
    ids=["none", "negative", "float", "mlp"],
)
def test_widths_that_are_no_counts_are_refused(module, error, text):
    with pytest.raises(error, match=text):
        module.init(jax.random.key(0), jnp.ones((2, IN)))


def test_a_missing_or_other_state_is_refused():
    module, x = te_flax.DenseGeneral(OUT), jnp.ones((2, IN))
    plain = module.init(jax.random.key(0), x)
    with (
        pytest.raises(ValueError, match="DenseGeneral: variables must have the collection"),
        te.fp8_autocast(True, DELAYED),
    ):
        module.apply(plain, x)
    with te.fp8_autocast(True, DELAYED):
        variables = module.init(jax.random.key(0), x)
    with (
        pytest.raises(ValueError, match="amax_history_len must be 4, that of the state, got 7"),
        te.fp8_autocast(True, recipe.DelayedScaling(amax_history_len=7)),
    ):
        module.apply(variables, x)
    with (
        pytest.raises(TypeError, match="mesh_resource must be a MeshResource, got object"),
        te.fp8_autocast(True, DELAYED, object()),
    ):
        pass


def test_collections_keep_their_type():
    new, old = {"fp8_metas": 1}, {"params": 2, "fp8_metas": 0}
    assert te.update_collections(new, old) == {"params": 2, "fp8_metas": 1}
    assert isinstance(te.update_collections(new, freeze(old)), FrozenDict)
    assert te.is_fp8_available() == (True, "")
    assert te.get_delayed_scaling() == recipe.DelayedScaling()
    with te.fp8_autocast(True, "mxfp8"):
        assert te.region.active_recipe() == recipe.MXFP8Scaling()
    with te.fp8_autocast(True, DELAYED):
        assert te.get_delayed_scaling() is DELAYED


class Model(nn.Module):
    """Two dense layers, as in Transformer Engine's first example for JAX."""

    @nn.compact
    def __call__(self, x):
        x = te_flax.DenseGeneral(64)(x)
        return te_flax.DenseGeneral(4)(nn.relu(x))


@pytest.mark.parametrize("chosen", [None, DELAYED, recipe.CurrentScaling(), recipe.BlockScaling()])
def test_the_training_loop_of_the_example_learns(chosen):
    module = Model()
    key = jax.random.key(3)
    x = jax.random.normal(key, (128, 32))
    target = jnp.tanh(x @ jax.random.normal(jax.random.key(4), (32, 4)) / 4)
    with te.fp8_autocast(chosen is not None, chosen):
        variables = module.init(key, x)
        others, params = pop(freeze(variables), "params")

        @jax.jit
        def step(params, others):
            def loss(collections):
                return ((module.apply(collections, x) - target) ** 2).mean()

            value, grads = jax.value_and_grad(loss)({"params": params, **others})
            rest, moves = pop(freeze(grads), "params")
            params = jax.tree.map(lambda p, g: p - 0.3 * g, params, moves)
            return params, te.update_collections(rest, others), value

        losses = []
        for _ in range(150):
            params, others, value = step(params, others)
            others = te.update_fp8_metas(others)
            losses.append(float(value))
    assert losses[-1] < 0.2 * losses[0], losses[::30]


def test_max_over_uses_stages_the_largest_amax_of_all_uses():
    module, x = Twice(), to_jax(torch.randn(8, IN))
    with te.fp8_autocast(True, DELAYED):
        variables = module.init(jax.random.key(0), x)

    def loss(variables):
        return (module.apply(variables, x) ** 2).sum()

    @jax.jit
    def step(variables):
        with te.fp8_autocast(True, DELAYED):
            found = jax.grad(lambda v: loss(te.max_over_uses(v)))(variables)
            return found, jax.grad(loss)(variables)

    for _ in range(3):
        found, summed = step(variables)
        state = found["fp8_metas"]["layer"]
        assert np.array_equal(
            *(nn.unbox(each)["params"]["layer"]["kernel"] for each in (found, summed))
        )
        assert state["uses"].tolist() == [1.0]
        weight = float(jnp.abs(nn.unbox(variables)["params"]["layer"]["kernel"]).max())
        assert float(state["amax_history_fwd"][0, 1]) == weight
        staged = summed["fp8_metas"]["layer"]["amax_history_fwd"][0]
        assert (np.asarray(state["amax_history_fwd"][0, :2]) < np.asarray(staged)[:2]).all()
        variables = te.update_collections({"fp8_metas": found["fp8_metas"]}, variables)
    # A module that is used once has the same state either way.
    single = te_flax.LayerNormMLP(intermediate_dim=16, activations=("relu",))
    with te.fp8_autocast(True, DELAYED):
        variables = single.init(jax.random.key(0), x, deterministic=True)

        def total(variables):
            return (single.apply(variables, x, deterministic=True)[0] ** 2).sum()

        both = jax.jit(
            lambda v: (jax.grad(lambda v: total(te.max_over_uses(v)))(v), jax.grad(total)(v))
        )(variables)
    for ours, theirs in zip(*map(jax.tree.leaves, both), strict=True):
        assert np.array_equal(ours, theirs)


@pytest.mark.parametrize("chosen", [DELAYED, recipe.BlockScaling()])
def test_dot_general_cls_trains_with_flaxs_train_state(chosen):
    optax = pytest.importorskip("optax")
    from flax.training.train_state import TrainState

    module = nn.Dense(OUT, dot_general_cls=te_flax.make_dot_general_cls(chosen))
    layer = torch_linear()
    params = module.init(jax.random.key(0), jnp.ones((1, IN)))
    assert ("_overwrite_with_gradient" in params) == chosen.keeps_state
    parts = {"kernel": to_jax(layer.weight.detach().T), "bias": to_jax(layer.bias.detach())}
    train = TrainState.create(
        apply_fn=module.apply, params={**params, "params": parts}, tx=optax.sgd(0.0)
    )

    @jax.jit
    def step(train, x, grad):
        def loss(params):
            y = train.apply_fn(params, x)
            return (y * grad).sum(), y

        (_, y), grads = jax.value_and_grad(loss, has_aux=True)(train.params)
        return train.apply_gradients(grads=grads), y, grads["params"]["kernel"]

    for _ in range(4):
        x, grad = quarters(8, IN), quarters(8, OUT)
        with apex_te.fp8_autocast(fp8_recipe=chosen):
            product = layer(x) - layer.bias
        layer.zero_grad()
        product.backward(grad)
        train, y, dkernel = step(train, to_jax(x), to_jax(grad))
        assert np.array_equal(y - parts["bias"], product.detach().numpy())
        assert_same(dkernel, layer.weight.grad.T)
        if chosen.keeps_state:
            (state,) = train.params["_overwrite_with_gradient"].values()
            for name in fp8_state.TENSORS:
                assert_same(state[name], getattr(layer.fp8_state, name))
