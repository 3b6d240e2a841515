"""``from_flax``: models of plain Flax in FP8 by one line."""

import re

import numpy as np
import pytest

jax = pytest.importorskip("jax")
nn = pytest.importorskip("flax.linen")
optax = pytest.importorskip("optax")
import jax.numpy as jnp  # noqa: E402
from flax import nnx  # noqa: E402
from flax.training.train_state import TrainState  # noqa: E402

import apex_te.jax.flax as te_flax  # noqa: E402
from apex_te import recipe  # noqa: E402
from apex_te.jax.flax.maxtext import FP8Quantization  # noqa: E402

STATE = "_overwrite_with_gradient"
VOCABULARY, WIDTH, LENGTH, STEPS = 32, 32, 8, 30
RECIPES = ["delayed", "tensorwise", "blockwise", "mxfp8"]


class Block(nn.Module):
    """Attention and an MLP whose second product is an einsum, in the form of a scan's body."""

    @nn.compact
    def __call__(self, x, _=None):
        h = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=2, qkv_features=WIDTH)(h, h)
        h = nn.gelu(nn.Dense(2 * WIDTH, name="up")(nn.LayerNorm()(x)))
        return x + nn.Einsum((2 * WIDTH, WIDTH), "...a,ab->...b", name="down")(h), None


class Model(nn.Module):
    """Language model; ``wrap`` is "scan" or "remat" of its block, or neither."""

    wrap: str = ""
    collections: tuple = ("params", STATE)

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCABULARY, WIDTH)(tokens)
        x = x + self.param("positions", nn.initializers.normal(0.02), (LENGTH, WIDTH))
        if self.wrap == "scan":
            body = nn.scan(
                Block, variable_axes=dict.fromkeys(self.collections, 0),
                split_rngs={"params": True}, length=2,
            )  # fmt: skip
            x, _ = body(name="blocks")(x, None)
        else:
            x, _ = (nn.remat(Block) if self.wrap == "remat" else Block)(name="block_0")(x)
        return nn.Dense(VOCABULARY)(nn.LayerNorm()(x))

    def features(self, tokens):
        return self(tokens).mean()


def batch(step=0):
    """Random tokens, and for each a target: the third token after it, but half of them random."""
    keys = jax.random.split(jax.random.fold_in(jax.random.key(0), step), 3)
    tokens, others = (jax.random.randint(key, (8, LENGTH), 0, VOCABULARY) for key in keys[:2])
    return tokens, jnp.where(
        jax.random.bernoulli(keys[2], 0.5, tokens.shape), tokens + 3, others
    ) % VOCABULARY


def start(model):
    variables = jax.jit(model.init)(jax.random.key(1), batch()[0])
    return TrainState.create(apply_fn=model.apply, params=variables, tx=optax.adam(3e-3))


@jax.jit
def train(state):
    tokens, targets = batch(state.step)

    def loss(params):
        logits = state.apply_fn(params, tokens)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    value, grads = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=grads), value


def losses(model, steps=STEPS):
    """Trains; returns the last state and all losses."""
    state, found = start(model), []
    for _ in range(steps):
        state, value = train(state)
        found.append(float(value))
    return state, found


@pytest.fixture(scope="module")
def in_fp32():
    return losses(Model())


def paths(tree):
    return {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)}


@pytest.mark.parametrize("chosen", RECIPES)
def test_a_model_of_plain_flax_trains(chosen, in_fp32):
    """30 steps by TrainState: first, last and mean loss are within 1% of float32's."""
    plain, expected = in_fp32
    state, found = losses(te_flax.from_flax(Model(), chosen))
    assert paths(state.params["params"]) == paths(plain.params["params"])
    assert expected[-1] < 0.9 * expected[0]
    assert found != expected
    figures = ((each[0], each[-1], np.mean(each)) for each in (found, expected))
    np.testing.assert_allclose(*figures, rtol=0.01)
    assert (STATE in state.params) == (chosen == "delayed")
    if chosen == "delayed":
        leaves = jax.tree_util.tree_leaves_with_path(state.params[STATE])
        names = {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
        scales = {name: leaf for name, leaf in names.items() if "'scale_fwd'" in name}
        # Four projections and two products of the MLP; not the head.
        assert len(scales) == 6
        assert all((leaf[:2] > 1).all() for leaf in scales.values())
        assert all("block_0" in name for name in scales)


@pytest.mark.parametrize("chosen", ["delayed", "blockwise"])
def test_remat_and_scan_of_a_model_are_its_blocks(chosen):
    plain, ours = (losses(te_flax.from_flax(Model(wrap), chosen), 2)[1] for wrap in ("", "remat"))
    np.testing.assert_allclose(ours, plain, rtol=1e-5)
    collections = ("params", STATE) if chosen == "delayed" else ("params",)
    state, found = losses(te_flax.from_flax(Model("scan", collections), chosen), 3)
    assert found[-1] < found[0]
    if chosen == "delayed":
        histories = state.params[STATE]["blocks"]["up"]["DotGeneral_0"]["amax_history_fwd"]
        assert histories.shape[0] == 2
        assert (histories[:, 0, :2] > 0).all()


def test_a_scan_without_the_state_is_refused():
    model = te_flax.from_flax(Model("scan", ("params",)), "delayed")
    with pytest.raises(ValueError, match=r"must have the FP8 state of blocks/.*variable_axes"):
        model.init(jax.random.key(0), batch()[0])
    model = te_flax.from_flax(Model(), "delayed")
    with pytest.raises(
        ValueError, match=r"must have the FP8 state of block_0/.*as init returns it"
    ):
        model.apply(Model().init(jax.random.key(0), batch()[0]), batch()[0])


def casts(model):
    """Returns how many arrays a model's forward casts to FP8 blocks, two for each product."""
    tokens = batch()[0]
    shapes = jax.eval_shape(model.init, jax.random.key(0), tokens)
    text = jax.jit(model.apply).lower(shapes, tokens).as_text()
    return len(re.findall(r"custom_call @apex_te\.block_quantize", text))


def products(**options):
    """Returns the names of the layers that are converted."""
    called = []

    def note(name, layer):
        called.append(name)
        return True

    model = te_flax.from_flax(Model(), "blockwise", include=note, **options)
    jax.eval_shape(model.init, jax.random.key(0), batch()[0])
    return called


PROJECTIONS = ("query", "key", "value", "out")
ALL = [
    *(f"block_0.MultiHeadDotProductAttention_0.{name}" for name in PROJECTIONS),
    "block_0.up", "block_0.down", "Dense_0",
]  # fmt: skip


def converted(**options):
    """Returns the layers that have FP8 state."""
    model = te_flax.from_flax(Model(), "delayed", **options)
    shapes = jax.eval_shape(model.init, jax.random.key(0), batch()[0])
    found = jax.tree_util.tree_leaves_with_path(shapes[STATE]) if STATE in shapes else ()
    names = (".".join(key.key for key in path[:-2]) for path, _ in found)
    return sorted(set(names), key=ALL.index)


def test_the_head_stays_in_high_precision_unless_it_is_included():
    assert products() == ALL
    assert converted() == ALL[:-1]
    assert converted(include="*") == ALL
    assert converted(include=["up", "Dense_0"]) == ["block_0.up", "Dense_0"]
    assert converted(include="block_0.MultiHead*", exclude="key") == [ALL[0], *ALL[2:4]]
    assert converted(exclude=lambda name, layer: isinstance(layer, nn.DenseGeneral)) == ALL[4:6]


class Mixture(nn.Module):
    """Layers by names that say what they are for."""

    @nn.compact
    def __call__(self, x):
        for name in ("router", "gate", "wi", "lm_head", "score"):
            x = x + nn.Dense(WIDTH, name=name)(x)
        return x


class Named(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = Mixture(name="moe")(Mixture(name="layers_0")(x))
        return nn.Dense(WIDTH, name="lm_head")(x)


def test_routers_and_heads_are_known_by_their_names():
    model = te_flax.from_flax(Named(), "delayed")
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.ones((2, WIDTH)))
    names = {name: set(each) for name, each in shapes[STATE].items()}
    # In a numbered block "score" is no head, and "gate" a router in a mixture of experts alone.
    assert names == {"layers_0": {"gate", "wi", "lm_head", "score"}, "moe": {"wi"}}


def test_products_of_the_program_are_the_converted_layers():
    assert casts(te_flax.from_flax(Model(), "blockwise")) == 12
    assert casts(te_flax.from_flax(Model(), "blockwise", include="up")) == 2
    assert casts(Model()) == 0


def test_the_model_is_the_given_one_but_for_its_class():
    given = Model(name="lm")
    model = te_flax.from_flax(given, "tensorwise")
    assert isinstance(model, Model)
    assert (model.name, model.wrap) == ("lm", "")
    assert type(model) is type(te_flax.from_flax(Model(), recipe.CurrentScaling()))
    tokens = batch()[0]
    variables = given.init(jax.random.key(0), tokens)
    y = model.apply(variables, tokens)
    assert not np.array_equal(y, given.apply(variables, tokens))
    assert float(model.apply(variables, tokens, method="features")) == float(y.mean())
    assert np.array_equal(model.clone().bind(variables)(tokens), y)
    again = te_flax.from_flax(model, "blockwise")  # the inner switch comes last
    assert np.isfinite(np.asarray(again.apply(variables, tokens))).all()


class Jitted(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.jit(nn.Dense)(WIDTH, name="dense")(x)


def test_nn_jit_traces_a_layer_again_for_another_switch():
    x = jax.random.normal(jax.random.key(0), (4, WIDTH))
    variables = Jitted().init(jax.random.key(1), x)
    found = [
        np.asarray(model.apply(variables, x))
        for model in (
            Jitted(), te_flax.from_flax(Jitted(), "tensorwise"),
            te_flax.from_flax(Jitted(), "mxfp8"), te_flax.from_flax(Jitted(), "mxfp8", exclude="*"),
        )
    ]  # fmt: skip
    assert np.array_equal(found[0], found[3])
    assert not np.array_equal(found[0], found[1])
    assert not np.array_equal(found[1], found[2])


def test_a_layer_with_its_own_dot_general_keeps_it():
    def twice(*args, **options):
        return 2 * jax.lax.dot_general(*args, **options)

    x = jax.random.normal(jax.random.key(0), (4, WIDTH))
    layer = nn.Dense(WIDTH, dot_general=twice)
    model = te_flax.from_flax(nn.Sequential([layer]), "tensorwise")
    variables = model.init(jax.random.key(1), x)
    assert np.array_equal(model.apply(variables, x), nn.Sequential([layer]).apply(variables, x))


def test_einsum_layers_have_flaxs_parameters_and_bias():
    x = jax.random.randint(jax.random.key(0), (3, 4, 5), -8, 9) / 4.0
    layer = nn.Einsum((5, 6, 7), "abc,cde->aebd", bias_init=nn.initializers.ones)
    model = te_flax.from_flax(layer, recipe.CurrentScaling(pow2=True))
    variables = layer.init(jax.random.key(1), x)
    ours = model.init(jax.random.key(1), x)
    assert jax.tree.map(jnp.shape, ours) == jax.tree.map(jnp.shape, variables)
    variables["params"]["kernel"] = jnp.round(variables["params"]["kernel"] * 4) / 4
    assert np.array_equal(model.apply(variables, x), layer.apply(variables, x))


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (("late",), ValueError, "recipe must be a recipe or one of"),
        ((7,), TypeError, "recipe must be a recipe"),
        ((recipe.DelayedScaling(interval=2),), NotImplementedError, "interval must be 1"),
    ],
)
def test_wrong_arguments_are_refused(arguments, error, text):
    with pytest.raises(error, match=f"from_flax: {text}"):
        te_flax.from_flax(nn.Dense(8), *arguments)


def test_wrong_choices_and_models_are_refused():
    with pytest.raises(TypeError, match="include must be names, patterns or predicates, got int"):
        te_flax.from_flax(nn.Dense(8), include=[3])
    with pytest.raises(TypeError, match=r"model must be a flax.linen.Module or .*, got function"):
        te_flax.from_flax(start)
    model = te_flax.from_flax(Model(), exclude="blok*")
    with pytest.raises(ValueError, match=r"from_flax: exclude must match a layer, got 'blok\*'"):
        jax.eval_shape(model.init, jax.random.key(0), batch()[0])


class Nnx(nnx.Module):
    """An nnx model with a layer of each kind."""

    def __init__(self, rngs):
        self.embedding = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, WIDTH, rngs=rngs, decode=False)
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs)])
        self.einsum = nnx.Einsum("...a,ab->...b", (WIDTH, WIDTH), (WIDTH,), rngs=rngs)
        self.out = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, tokens):
        x = self.embedding(tokens)
        x = x + self.attention(x)
        return self.out(self.einsum(nnx.gelu(self.layers[0](x))))


def test_nnx_models_train():
    tokens, targets = batch()

    def run(model):
        optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)

        @nnx.jit
        def step(model, optimizer):
            def loss(model):
                logits = model(tokens)
                return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

            value, grads = nnx.value_and_grad(loss)(model)
            optimizer.update(model, grads)
            return value

        return [float(step(model, optimizer)) for _ in range(10)]

    expected = run(Nnx(nnx.Rngs(0)))
    model = te_flax.from_flax(Nnx(nnx.Rngs(0)), "tensorwise")
    assert model.out.dot_general is jax.lax.dot_general or model.out.dot_general is None
    found = run(model)
    assert found != expected
    np.testing.assert_allclose(found, expected, rtol=0.02)


def test_nnx_models_need_a_recipe_without_state_and_names_that_match():
    with pytest.raises(
        NotImplementedError, match=r"recipe must keep no state .* got DelayedScaling"
    ):
        te_flax.from_flax(Nnx(nnx.Rngs(0)))
    with pytest.raises(ValueError, match="include must match a layer, got 'layer_0'"):
        te_flax.from_flax(Nnx(nnx.Rngs(0)), "tensorwise", include="layer_0")
    model = te_flax.from_flax(Nnx(nnx.Rngs(0)), "tensorwise", include="layers.0")
    assert type(model.layers[0].dot_general).__name__ == "DotGeneral"
    assert model.einsum.einsum_op is jnp.einsum


class OfMaxText(nn.Module):
    """Layers that use a quantization object as MaxText's do."""

    quant: FP8Quantization

    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (WIDTH, WIDTH))
        experts = self.param("experts", nn.initializers.lecun_normal(), (2, WIDTH, WIDTH))
        y = self.quant.dot_general_cls(mesh_axes=("embed", "mlp"))()(
            x, kernel, (((2,), (0,)), ((), ())), precision=None
        )
        y = jnp.stack([y, x])
        a = self.quant.einsum(dtype=jnp.float32)("ebsd,edf->ebsf", y, experts, precision=None)
        return a + self.quant.einsum(mesh_axes=("exp", None))("ebsd,edf->ebsf", y, experts)


@pytest.mark.parametrize("chosen", ["delayed", "mxfp8"])
def test_a_provider_in_maxtexts_form(chosen):
    quant = FP8Quantization(chosen)
    assert quant == FP8Quantization(chosen)
    assert (hash(quant), quant.quant_mode) == (hash(FP8Quantization(chosen)), "train")
    assert quant.get_block_size() == {"delayed": 1, "mxfp8": 32}[chosen]
    x = jax.random.normal(jax.random.key(0), (2, 3, WIDTH))
    model = OfMaxText(quant)
    variables = model.init(jax.random.key(1), x)
    assert (STATE in variables) == (chosen == "delayed")
    grads = jax.jit(jax.grad(lambda v: (model.apply(v, x) ** 2).sum()))(variables)
    assert all(np.asarray(leaf).any() for leaf in grads["params"].values())
    if chosen == "delayed":
        assert len(grads[STATE]) == 3  # a product and two einsums
        history = grads[STATE]["DotGeneral_0"]["amax_history_fwd"]
        assert float(history[0, 0]) == float(jnp.abs(x).max())
    with pytest.raises(ValueError, match="FP8Quantization: recipe must be a recipe or one of"):
        FP8Quantization("late")
