"""Norms and joined gradients of heads that are cast to FP8 by their ops, against their parts."""

import re

import pytest
import torch

jax = pytest.importorskip("jax")
nn = pytest.importorskip("flax.linen")
import jax.numpy as jnp  # noqa: E402
from arrays import bits, to_jax  # noqa: E402

import apex_te  # noqa: E402
import apex_te.jax as te  # noqa: E402
import apex_te.jax.flax as te_flax  # noqa: E402
from apex_te import recipe  # noqa: E402
from apex_te.jax import layernorm_dense, layernorm_mlp  # noqa: E402
from apex_te.jax.head_gradients import HeadGradients  # noqa: E402
from apex_te.jax.joined_columns import JoinedColumns  # noqa: E402
from apex_te.jax.quantizer import quantizer_of  # noqa: E402

DELAYED = recipe.DelayedScaling(amax_history_len=4)
CURRENT = recipe.CurrentScaling()
WIDTH = 32


def attention(**options):
    return te_flax.MultiHeadAttention(head_dim=8, num_attention_heads=4, **options)


def first(module, chosen, *args):
    """Returns new variables with biases that are not zero."""

    def moved(p):
        return p + 0.1 * jax.random.normal(jax.random.key(1), p.shape)

    with te.fp8_autocast(True, chosen):
        variables = nn.unbox(module.init(jax.random.key(0), *args))
    return {**variables, "params": jax.tree.map(moved, variables["params"])}


def make_step(module, chosen, wrap=lambda f: f):
    """Returns a function of variables, output gradient and inputs: output and gradients."""

    def step(variables, dy, *args):
        def forward(variables, *args):
            return module.apply(variables, *args)[0]

        with te.fp8_autocast(True, chosen):
            y, pull = jax.vjp(wrap(forward), variables, *args)
            return y, *pull(dy)

    return step


def assert_same_trees(ours, theirs):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(theirs), strict=True
    ):
        assert bits(a) == bits(b), path


def calls(lowered):
    return {*re.findall(r"@apex_te\.(\w+)\(", lowered.as_text())}


def separately(monkeypatch):
    """Has modules cast what their norms and their heads' gradients give."""
    for module in (layernorm_dense, layernorm_mlp):
        monkeypatch.setattr(module, "can_fuse_norm", lambda state: False)


@pytest.mark.parametrize(
    ("chosen", "options"),
    [
        (DELAYED, {"num_gqa_groups": 2, "use_bias": True, "layernorm_type": "rmsnorm"}),
        (CURRENT, {"use_bias": True}),
    ],
)
def test_attention_has_the_numbers_of_its_parts(monkeypatch, chosen, options):
    module = attention(**options)
    x, dy = jax.random.normal(jax.random.key(2), (2, 6, 3, WIDTH))
    variables = first(module, chosen, x)
    ours = jax.jit(make_step(module, chosen)).lower(variables, dy, x)
    found = calls(ours)
    is_joined = chosen is DELAYED or not options.get("use_bias")
    assert ("qkv_cast_grad" in found) == is_joined
    is_fused = options.get("input_layernorm", True) and not options.get("return_layernorm_output")
    assert any(name.endswith("norm_fwd_fp8") for name in found) == is_fused
    separately(monkeypatch)
    theirs = jax.jit(make_step(module, chosen)).lower(variables, dy, x)
    assert not {"qkv_cast_grad", "layer_norm_fwd_fp8", "rms_norm_fwd_fp8"} & calls(theirs)
    assert_same_trees(ours.compile()(variables, dy, x), theirs.compile()(variables, dy, x))


def test_checkpoint_and_scan_keep_the_bits():
    module = attention(use_bias=True)
    x, dy = jax.random.normal(jax.random.key(3), (2, 6, 3, WIDTH))
    variables = first(module, DELAYED, x)
    expected = jax.jit(make_step(module, DELAYED))(variables, dy, x)
    again = jax.jit(make_step(module, DELAYED, jax.checkpoint))(variables, dy, x)
    assert_same_trees(again, expected)

    @jax.jit
    def scanned(variables, x, dy):
        step = make_step(module, DELAYED)
        return jax.lax.scan(lambda c, each: (c, step(variables, each[1], each[0])), 0, (x, dy))[1]

    made = scanned(variables, jnp.stack([x, x]), jnp.stack([dy, dy]))
    assert_same_trees(jax.tree.map(lambda a: a[1], made), expected)


@pytest.mark.parametrize(("norm", "chosen"), [("RMSNorm", DELAYED), ("LayerNorm", CURRENT)])
def test_bf16_steps_of_norm_and_dense_layer_are_torchs(monkeypatch, norm, chosen):
    layer = apex_te.LayerNormLinear(WIDTH, 48, normalization=norm, eps=1e-6).bfloat16()
    with torch.no_grad():  # products of these are sums without rounding
        for p in layer.parameters():
            p.copy_(torch.randint(-1, 2, p.shape))
        layer.layer_norm_weight.fill_(1.0)
    module = te_flax.LayerNormDenseGeneral(48, layernorm_type=norm.lower(), use_bias=True)
    x = torch.randn(12, WIDTH).bfloat16().requires_grad_()
    dy = torch.randint(-2, 3, (12, 48)).bfloat16()
    with apex_te.fp8_autocast(enabled=True, fp8_recipe=chosen):
        y = layer(x)
    y.backward(dy)
    ours = to_jax(x.detach())
    variables = first(module, chosen, ours)
    weights = {name: value.float() for name, value in layer.state_dict().items()}
    params = te.state.from_torch(weights, {"params": variables["params"]})["params"]
    given = {**variables, "params": params}, to_jax(dy), ours
    made, gradients, dx = jax.jit(make_step(module, chosen))(*given)
    assert bits(made) == bits(y.detach())
    assert bits(dx) == bits(x.grad)
    found = te.state.to_torch(gradients)
    for name, p in layer.named_parameters():
        assert bits(jnp.asarray(found[name], jnp.bfloat16)) == bits(p.grad), name
    separately(monkeypatch)
    with te.fp8_autocast(True, chosen):
        apart = module.apply(given[0], ours)[0]
    assert bits(apart) != bits(made)  # the norm's result is rounded to bf16 before


@pytest.mark.parametrize("chosen", [DELAYED, CURRENT])
@pytest.mark.parametrize(
    ("widths", "parts"),
    [((24, 24, 24), None), ((24, 24), None), ((32, 8, 8), 1), ((32, 16, 16), 2), ((16, 16), 2)],
)
def test_joined_gradients_have_the_bits_of_a_cast(widths, parts, chosen):
    columns, with_dbias = JoinedColumns(widths, parts), chosen is DELAYED
    given = [jax.random.normal(jax.random.key(i), (3, 5, w)) for i, w in enumerate(widths)]
    quantizer, scale = quantizer_of(chosen), jnp.full(1, 4.0)
    wanted = {"rowwise": True, "columnwise": True}
    made = quantizer.produce(HeadGradients(columns, given, with_dbias), "grad", scale, **wanted)
    joined = columns.join(given, 2)
    expected = quantizer.cast(
        joined, "grad", scale, flatten_axis=2, with_dbias=with_dbias, **wanted
    )
    for name, ours in made._asdict().items():
        theirs = getattr(expected, name)
        assert (ours is None) == (theirs is None), name
        if ours is None:
            continue
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype), name
        assert bits(ours) == bits(theirs), name


def test_kernels_of_other_widths_are_joined_before_the_cast():
    columns = JoinedColumns((10, 4, 4), 1)
    given = [jnp.ones((3, w)) for w in columns.widths]
    assert not HeadGradients(columns, given, False).can_fuse
    assert HeadGradients(columns, given, False).plain()[0].shape == (3, 18)


def test_vmap_over_joined_gradients_measures_all_elements():
    heads = [jnp.ones((2, 3, 8)), 2 * jnp.ones((2, 3, 8)), jnp.ones((2, 3, 8)).at[1].set(-3.0)]

    def measured(*heads):
        source = HeadGradients(JoinedColumns((8, 8, 8), None), heads, False)
        return source.fp8(jnp.ones(1), "float8_e5m2", False, False, jnp.zeros(1))[0].amax

    assert [float(measured(*(x[i] for x in heads))[0]) for i in range(2)] == [2.0, 3.0]
    assert (jax.vmap(measured)(*heads) == 3.0).all()
