"""Defaults of the Flax modules: Transformer Engine's of today, and those of its version 1."""

import dataclasses

import numpy as np
import pytest

jax = pytest.importorskip("jax")
nn = pytest.importorskip("flax.linen")
import jax.numpy as jnp  # noqa: E402
from flax import serialization  # noqa: E402
from flax.linen import partitioning  # noqa: E402

import apex_te.jax as te  # noqa: E402
import apex_te.jax.flax as te_flax  # noqa: E402
import apex_te.jax.flax.te_v1 as te_v1  # noqa: E402

WIDTH = 16
X = jax.random.normal(jax.random.key(0), (2, 4, WIDTH))
# Field by field: the default of Transformer Engine 2.20 and that of 1.11.
DEFAULTS = {
    "LayerNormDenseGeneral": {
        "return_layernorm_output": (False, True),
        "transpose_batch_sequence": (False, True),
    },
    "LayerNormMLP": {
        "return_layernorm_output": (False, True),
        "activations": (("gelu",), ("relu",)),
        "intermediate_dropout_rate": (0.0, 0.1),
        "transpose_batch_sequence": (False, True),
    },
    "DotProductAttention": {"transpose_batch_sequence": (False, True)},
    "MultiHeadAttention": {"transpose_batch_sequence": (False, True)},
    "TransformerLayer": {
        "mlp_activations": (("gelu",), ("relu",)),
        "intermediate_dropout": (0.0, 0.1),
    },
}
SAMPLES = {
    "DenseGeneral": {"features": 8},
    "LayerNorm": {},
    "LayerNormDenseGeneral": {"features": 8},
    "LayerNormMLP": {"intermediate_dim": 8},
    "MultiHeadAttention": {"head_dim": 4, "num_attention_heads": 4},
    "TransformerLayer": {"hidden_size": WIDTH, "mlp_hidden_size": 8, "num_attention_heads": 4},
}
NOT_DROPPED = {"LayerNormMLP", "MultiHeadAttention", "TransformerLayer"}


def options(name):
    return {"deterministic": True} if name in NOT_DROPPED else {}


def init(module, x=X, **call):
    return jax.jit(lambda: module.init(jax.random.key(1), x, **call))()


def apply(module, variables, x=X, **call):
    return jax.jit(lambda v: module.apply(v, x, **call))(variables)


@pytest.mark.parametrize("name", [*SAMPLES, "DotProductAttention", "RelativePositionBiases"])
def test_defaults_are_transformer_engines_and_one_import_gives_those_of_version_1(name):
    """Fields of both differ exactly where Transformer Engine changed a default."""
    new, old = (
        {f.name: f.default for f in dataclasses.fields(getattr(kinds, name))}
        for kinds in (te_flax, te_v1)
    )
    assert list(new) == list(old)
    differ = {field: (new[field], old[field]) for field in new if new[field] != old[field]}
    assert differ == DEFAULTS.get(name, {})


@pytest.mark.parametrize("name", SAMPLES)
def test_dtype_is_of_parameters_and_the_input_says_in_which_to_compute(name):
    """With version 1's modules parameters are float32 and the computation has ``dtype``."""
    for kinds, of_parameters, of_output in (
        (te_flax, jnp.bfloat16, jnp.float32),
        (te_v1, jnp.float32, jnp.bfloat16),
    ):
        module = getattr(kinds, name)(dtype=jnp.bfloat16, **SAMPLES[name])
        made = jax.eval_shape(lambda m=module: m.init(jax.random.key(0), X, **options(name)))
        assert {leaf.dtype for leaf in jax.tree.leaves(made["params"])} == {
            jnp.dtype(of_parameters)
        }
        y = jax.eval_shape(lambda v, m=module: m.apply(v, X, **options(name)), made)
        assert jax.tree.leaves(y)[0].dtype == of_output
    plain = getattr(te_flax, name)(**SAMPLES[name])
    half = X.astype(jnp.bfloat16)
    made, y = jax.eval_shape(
        lambda: (
            plain.init(jax.random.key(0), half, **options(name)),
            plain.init_with_output(jax.random.key(0), half, **options(name))[0],
        )
    )
    assert {leaf.dtype for leaf in jax.tree.leaves(made["params"])} == {jnp.dtype("float32")}
    assert jax.tree.leaves(y)[0].dtype == jnp.bfloat16


def test_parameters_of_16_bits_train_with_inputs_of_float32():
    """Every parameter, a norm's too, is taken in the input's dtype, with and without FP8."""
    module = te_flax.LayerNormMLP(8, dtype=jnp.bfloat16, use_bias=True)
    for chosen in (None, "tensorwise"):
        with te.fp8_autocast(chosen is not None, chosen):
            variables = init(module)
            grads = jax.jit(jax.grad(lambda v: (module.apply(v, X)[0] ** 2).sum()))(variables)
        for leaf in jax.tree.leaves(grads):
            assert leaf.dtype == jnp.bfloat16
            assert np.isfinite(np.asarray(leaf, np.float32)).all()


@pytest.mark.parametrize("name", SAMPLES)
def test_logical_axes_are_in_boxes_and_those_of_version_1_in_params_axes(name):
    module, old = (getattr(kinds, name)(**SAMPLES[name]) for kinds in (te_flax, te_v1))
    new = jax.eval_shape(lambda: module.init(jax.random.key(0), X, **options(name)))
    assert set(new) == {"params"}
    boxes = jax.tree.leaves(new, is_leaf=lambda leaf: isinstance(leaf, nn.meta.AxisMetadata))
    assert all(isinstance(box, nn.LogicallyPartitioned) for box in boxes)
    before = jax.eval_shape(lambda: old.init(jax.random.key(0), X, **options(name)))
    assert jax.tree.map(jnp.shape, nn.unbox(new["params"])) == jax.tree.map(
        jnp.shape, before["params"]
    )
    if name == "DenseGeneral":  # no axes by default
        assert set(before) == {"params"}
        return
    axes = jax.tree.leaves(
        partitioning.get_axis_names(before["params_axes"]),
        is_leaf=lambda leaf: isinstance(leaf, jax.sharding.PartitionSpec),
    )
    assert axes == [box.get_partition_spec() for box in boxes if box.names]


@pytest.mark.parametrize("name", SAMPLES)
def test_variables_of_earlier_versions_go_on_and_give_the_same_numbers(name):
    """Plain arrays beside "params_axes" are taken by today's modules and by those of version 1."""
    same = {field: old for field, (_, old) in DEFAULTS.get(name, {}).items()}
    if name == "TransformerLayer":
        same = {"mlp_activations": ("relu",)}
    module = getattr(te_flax, name)(**SAMPLES[name], **same)
    old = getattr(te_v1, name)(**SAMPLES[name])
    before = init(old, **options(name))
    restored = serialization.from_bytes(before, serialization.to_bytes(before))
    expected = apply(old, before, **options(name))
    for variables in (before, restored):
        found = apply(module, variables, **options(name))
        for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            assert np.array_equal(ours, theirs)
    new = init(module, **options(name))
    boxed = nn.meta.replace_boxed(new["params"], before["params"])
    again = serialization.from_bytes(new, serialization.to_bytes({"params": boxed}))
    found = apply(module, again, **options(name))
    assert np.array_equal(jax.tree.leaves(found)[0], jax.tree.leaves(expected)[0])


def test_attention_of_both_versions_has_its_own_layout():
    """Version 1's [s, b, ...] of a transposed input gives the transposed result."""
    heads = {"head_dim": 4, "num_attention_heads": 4}
    new, old = te_flax.MultiHeadAttention(**heads), te_v1.MultiHeadAttention(**heads)
    variables = init(new)
    y = apply(new, variables)[0]
    turned = apply(old, nn.unbox(variables), X.swapaxes(0, 1))[0]
    np.testing.assert_allclose(turned.swapaxes(0, 1), y, atol=1e-6)


def test_a_layer_takes_inputs_of_another_width_than_its_heads():
    layer = te_flax.TransformerLayer(32, 8, 4, enable_relative_embedding=False)
    variables = init(layer, deterministic=True)
    assert variables["params"]["attention"]["qkv"]["kernel"].value.shape == (WIDTH, 3, 32)
    assert apply(layer, variables, deterministic=True).shape == X.shape
    with pytest.raises(ValueError, match=r"inputs must have shape \[b, s, 32\], got \[2, 4, 16\]"):
        te_v1.TransformerLayer(32, 8, 4).init(jax.random.key(0), X)


LAYERS = {
    "DenseGeneral": lambda **o: te_flax.DenseGeneral(**{"features": 8, **o}),
    "LayerNormDenseGeneral": lambda **o: te_flax.LayerNormDenseGeneral(**{"features": 8, **o}),
    "LayerNormMLP": lambda **o: te_flax.LayerNormMLP(**{"intermediate_dim": 8, **o}),
    "LayerNorm": te_flax.LayerNorm,
    "MultiHeadAttention": lambda **o: te_flax.MultiHeadAttention(4, 4, **o),
    "TransformerLayer": lambda **o: te_flax.TransformerLayer(16, 8, 4, **o),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(
    "dtype", ["int32", "int8", "uint8", "bool", "float64", "complex64", "float8_e4m3fn", "no"]
)
def test_dtypes_in_which_nothing_can_be_computed_are_refused(name, dtype):
    for kinds in (te_flax, te_v1):
        module = getattr(kinds, name)(**{**SAMPLES[name], "dtype": dtype})
        text = rf"{name}: dtype must be float32, float16 or bfloat16, got '?{dtype}"
        with pytest.raises(TypeError, match=text):
            module.init(jax.random.key(0), X)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(
    ("x", "error", "text"),
    [
        (jnp.float32(1), ValueError, "must have at least one dimension, got a scalar"),
        (jnp.ones((2, 4, WIDTH), jnp.int32), TypeError, "must have dtype float32, .* got int32"),
        (jnp.ones((2, 4, WIDTH), bool), TypeError, "must have dtype float32, .* got bool"),
        (jnp.ones((2, 4, 0)), ValueError, "inputs must have at least one element along axis -1"),
    ],
    ids=["scalar", "int32", "bool", "empty"],
)
def test_inputs_that_are_no_rows_of_numbers_are_refused(name, x, error, text):
    with pytest.raises(error, match=text):
        LAYERS[name]().init(jax.random.key(0), x)


@pytest.mark.parametrize("name", ["DenseGeneral", "LayerNormDenseGeneral", "LayerNormMLP"])
@pytest.mark.parametrize(
    ("axis", "error", "text"),
    [
        (5, ValueError, r"axis must be from -3 to 2 for inputs of shape \[2, 4, 16\], got 5"),
        (-4, ValueError, "axis must be from -3 to 2 .* got -4"),
        ((-1, 3), ValueError, "axis must be from -3 to 2 .* got 3"),
        ((2, -1), ValueError, r"axis must be one or several different dimensions, got \(2, -1\)"),
        ((), ValueError, r"axis must be one or several different dimensions, got \(\)"),
        (1.0, TypeError, "axis must be an int or a sequence of ints, got float"),
        ("-1", TypeError, "axis must be an int or a sequence of ints, got str"),
        (True, TypeError, "axis must be an int or a sequence of ints, got bool"),
    ],
)
def test_axes_that_the_input_lacks_are_refused(name, axis, error, text):
    with pytest.raises(error, match=f"{name}: {text}"):
        LAYERS[name](axis=axis).init(jax.random.key(0), X)


@pytest.mark.parametrize("name", ["LayerNormDenseGeneral", "LayerNormMLP"])
def test_layers_with_a_norm_contract_the_last_dimension(name):
    for axis in (-1, 2, (-1,), [2], np.int64(-1)):
        jax.eval_shape(lambda a=axis: LAYERS[name](axis=a).init(jax.random.key(0), X))
    with pytest.raises(ValueError, match=f"{name}: axis must be -1, got 1"):
        LAYERS[name](axis=1).init(jax.random.key(0), X)


@pytest.mark.parametrize("value", [0, -1, 2.0, True])
@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("DotProductAttention", "head_dim"),
        ("DotProductAttention", "num_gqa_groups"),
        ("MultiHeadAttention", "num_attention_heads"),
        ("MultiHeadAttention", "head_dim"),
        ("TransformerLayer", "num_attention_heads"),
        ("TransformerLayer", "hidden_size"),
        ("TransformerLayer", "num_gqa_groups"),
        ("RelativePositionBiases", "num_attention_heads"),
    ],
)
def test_heads_and_sizes_that_are_no_counts_are_refused(name, field, value):
    """Zero heads, for one, end in an error that names the field, not in a division by zero."""
    fields = {
        "DotProductAttention": {"head_dim": 4, "num_attention_heads": 4},
        "RelativePositionBiases": {
            "num_buckets": 32, "max_distance": 128, "num_attention_heads": 4
        },
        **SAMPLES,
    }[name]  # fmt: skip
    module = getattr(te_flax, name)(**{**fields, field: value})
    inputs = {
        "RelativePositionBiases": (5, 5),
        "DotProductAttention": (jnp.ones((2, 4, 4, 4)),) * 3,
    }.get(name, (X,))
    error = ValueError if type(value) is int else TypeError
    with pytest.raises(error, match=f"{name}: {field} must be (at least 1|an int), got"):
        module.init(jax.random.key(0), *inputs)


def test_cores_and_biases_refuse_dtypes_too():
    heads = (jnp.ones((2, 4, 4, 4)),) * 3
    for kinds in (te_flax, te_v1):
        with pytest.raises(
            TypeError, match=r"DotProductAttention: dtype must be float32, .* int32"
        ):
            kinds.DotProductAttention(4, 4, dtype=jnp.int32).init(jax.random.key(0), *heads)
        with pytest.raises(TypeError, match=r"RelativePositionBiases: dtype must be .* got int32"):
            kinds.RelativePositionBiases(32, 128, 4, dtype=jnp.int32).init(jax.random.key(0), 5, 5)
    with pytest.raises(
        TypeError, match=r"DotProductAttention: key must have dtype float32, .* int"
    ):
        te_flax.DotProductAttention(4, 4).init(
            jax.random.key(0), heads[0], heads[1].astype(jnp.int32), heads[2]
        )


@pytest.mark.parametrize("axis", [-1, 2, (1, 2), (-1, -2), [-2, 2], np.int64(1)])
def test_dense_general_contracts_the_dimensions_of_axis(axis):
    module = te_flax.DenseGeneral((3, 2), axis=axis)
    variables = module.init(jax.random.key(0), X)
    axes = sorted(a % 3 for a in np.atleast_1d(axis).tolist())
    kernel = np.asarray(variables["params"]["kernel"].value)
    wanted = np.tensordot(np.asarray(X), kernel, (axes, range(len(axes))))
    np.testing.assert_allclose(module.apply(variables, X), wanted, atol=1e-5)


@pytest.mark.parametrize(
    ("features", "error", "text"),
    [
        (0, ValueError, "features must be at least 1, got 0"),
        (-2, ValueError, "features must be at least 1, got -2"),
        (2.0, TypeError, "features must be an int, got float"),
        (True, TypeError, "features must be an int, got bool"),
        ("8", TypeError, "features must be an int, got str"),
        ((), ValueError, r"features must have an extent, got \(\)"),
        ((4, 0), ValueError, "features must be at least 1, got 0"),
    ],
)
@pytest.mark.parametrize("name", ["DenseGeneral", "LayerNormDenseGeneral"])
def test_features_that_are_no_counts_are_refused(name, features, error, text):
    with pytest.raises(error, match=f"{name}: {text}"):
        LAYERS[name](features=features).init(jax.random.key(0), X)
