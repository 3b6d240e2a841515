"""LayerNormMLP with a gated activation that writes FP8 itself, against its parts one by one."""

import pytest
import torch

jax = pytest.importorskip("jax")
nn = pytest.importorskip("flax.linen")
import jax.numpy as jnp  # noqa: E402
import ml_dtypes  # noqa: E402
import numpy as np  # noqa: E402
from arrays import bits, calls, mesh_of, to_jax  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402

import apex_te  # noqa: E402
import apex_te.jax as te  # noqa: E402
import apex_te.jax.flax as te_flax  # noqa: E402
from apex_te import recipe  # noqa: E402
from apex_te.jax import layernorm_mlp  # noqa: E402
from apex_te.ops import swiglu as torch_swiglu  # noqa: E402

P = PartitionSpec
DELAYED = recipe.DelayedScaling(amax_history_len=4)
BLOCK = recipe.BlockScaling()
CURRENT = recipe.CurrentScaling()
IN, MID = 24, 40
WHOLE = {"intermediate_dim": 128, "dtype": jnp.bfloat16}  # whole blocks of 16-bit values


def mlp(activation="silu", **options):
    defaults = {"intermediate_dim": MID, "return_layernorm_output": True}
    return te_flax.LayerNormMLP(activations=(activation, "linear"), **defaults | options)


def start(module, x, chosen=DELAYED):
    """Returns new variables whose parameters, biases too, are not zero."""

    def moved(p):
        return p + 0.1 * jax.random.normal(jax.random.key(1), p.shape)

    with te.fp8_autocast(True, chosen):
        variables = nn.unbox(module.init(jax.random.key(0), x))
    return {**variables, "params": jax.tree.map(moved, variables["params"])}


def make_step(module, chosen=DELAYED):
    """Returns a jitted function of variables, input and output gradient: y and gradients."""

    @jax.jit
    def step(variables, x, dy):
        with te.fp8_autocast(True, chosen):
            y, pull = jax.vjp(lambda v, x: module.apply(v, x)[0], variables, x)
            return y, *pull(dy)

    return step


def run(module, chosen=DELAYED, steps=3):
    """Returns outputs and gradients of some steps, with the FP8 state moved on."""
    keys = jax.random.split(jax.random.key(2), 2 * steps)
    x = jax.random.normal(keys[0], (3, 5, IN), module.dtype)
    variables, found, step = start(module, x, chosen), [], make_step(module, chosen)
    for i in range(steps):
        x = jax.random.normal(keys[2 * i], (3, 5, IN), module.dtype) * 2.0**i
        dy = jax.random.normal(keys[2 * i + 1], (3, 5, IN), module.dtype)
        y, gradients, dx = step(variables, x, dy)
        found.append({"y": y, "dx": dx, **gradients})
        state = {name: gradients[name] for name in gradients if name == "fp8_metas"}
        variables = te.update_collections(state, variables)
    return found


@pytest.mark.parametrize(
    "options",
    [
        {"activation": "silu"},
        {"activation": "gelu", "use_bias": True},
        {"use_bias": True, "return_layernorm_output": False},
        {"layernorm_type": "rmsnorm", "return_layernorm_output": False},
    ],
)
def test_numbers_are_those_of_the_parts(monkeypatch, options):
    fused = run(mlp(**options))
    monkeypatch.setattr(layernorm_mlp, "can_fuse_activation", lambda state: False)
    parts = run(mlp(**options))
    for ours, theirs in zip(fused, parts, strict=True):
        assert jax.tree.structure(ours) == jax.tree.structure(theirs)
        for (path, a), b in zip(
            jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(theirs), strict=True
        ):
            if "wi_bias" in str(path):  # columns are added in another order
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
            else:
                assert bits(a) == bits(b), path
        assert ours["fp8_metas"]["uses"].tolist() == [1.0, 1.0]


def test_the_activation_is_cast_from_float32():
    x = jax.random.normal(jax.random.key(3), (7, IN), jnp.bfloat16)
    module = mlp(enable_layernorm=False)
    variables = start(module, x)
    with te.fp8_autocast(True, DELAYED):
        _, gradients, _ = make_step(module)(variables, x, jnp.ones((7, IN), jnp.bfloat16))
        first = te_flax.DenseGeneral((2, MID), use_bias=False)
        of_first = {"kernel": variables["params"]["wi_kernel"]}
        state = first.init(jax.random.key(0), x)["fp8_metas"]
        h = first.apply({"params": of_first, "fp8_metas": state}, x)
    assert h.dtype == jnp.bfloat16
    plain = torch.from_numpy(np.array(h.reshape(7, -1)).view(np.int16)).view(torch.bfloat16)
    amax = torch.zeros(1)
    torch_swiglu.swiglu_fwd_fp8(plain, None, torch.ones(1), torch.float8_e4m3fn, amax=amax)
    staged = np.asarray(gradients["fp8_metas"]["amax_history_fwd"])[0, 3]
    assert staged == amax.item()
    assert staged != np.float32(ml_dtypes.bfloat16(amax.item()))


@pytest.mark.parametrize(
    ("chosen", "options"),
    [
        (BLOCK, WHOLE),
        (
            BLOCK,
            {**WHOLE, "activation": "gelu", "use_bias": True, "return_layernorm_output": False},
        ),
        (CURRENT, {"use_bias": True, "return_layernorm_output": False}),
    ],
)
def test_scales_of_the_step_give_the_numbers_of_the_parts(monkeypatch, chosen, options):
    fused = run(mlp(**options), chosen, 1)
    monkeypatch.setattr(layernorm_mlp, "can_fuse_activation", lambda state: False)
    monkeypatch.setattr(layernorm_mlp, "can_fuse_norm", lambda state: False)
    parts = run(mlp(**options), chosen, 1)
    assert jax.tree.structure(fused) == jax.tree.structure(parts)
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(fused), jax.tree.leaves(parts), strict=True
    ):
        if "wi_bias" in str(path):  # the op adds float32 values, in another order
            np.testing.assert_allclose(a, b, rtol=2e-2, atol=2e-2)
        else:
            assert bits(a) == bits(b), path


@pytest.mark.parametrize(("chosen", "bias"), [(BLOCK, False), (BLOCK, True), (CURRENT, True)])
def test_bf16_steps_with_scales_of_the_step_are_torchs(chosen, bias):
    width = 32
    layer = apex_te.LayerNormMLP(
        width, 128, activation="reglu", normalization="RMSNorm", bias=bias, eps=1e-6
    ).bfloat16()
    with torch.no_grad():  # products of these are sums without rounding
        for p in layer.parameters():
            p.copy_(torch.randint(-1, 2, p.shape))
        layer.layer_norm_weight.fill_(1.0)
    x = torch.randn(12, width).bfloat16().requires_grad_()
    dy = torch.randint(-2, 3, (12, width)).bfloat16()
    with apex_te.fp8_autocast(enabled=True, fp8_recipe=chosen):
        y = layer(x)
    y.backward(dy)
    options = {**WHOLE, "layernorm_type": "rmsnorm", "use_bias": bias}
    module = mlp("relu", return_layernorm_output=False, **options)
    variables = start(module, to_jax(x.detach()), chosen)
    weights = {name: value.float() for name, value in layer.state_dict().items()}
    params = te.state.from_torch(weights, {"params": variables["params"]})["params"]
    step = make_step(module, chosen)
    given = {**variables, "params": params}, to_jax(x.detach()), to_jax(dy)
    made, gradients, dx = step(*given)
    assert bits(made) == bits(y.detach())
    assert bits(dx) == bits(x.grad)
    found = te.state.to_torch(gradients)
    for name, parameter in layer.named_parameters():
        assert bits(jnp.asarray(found[name], jnp.bfloat16)) == bits(parameter.grad), name


@pytest.mark.parametrize("returned", [True, False])
@pytest.mark.parametrize("norm", ["RMSNorm", "LayerNorm"])
def test_bf16_steps_are_torchs(monkeypatch, norm, returned):
    layer = apex_te.LayerNormMLP(
        IN, MID, activation="swiglu", normalization=norm, bias=False, eps=1e-6,
        return_layernorm_output=returned,
    ).bfloat16()  # fmt: skip
    x = torch.randn(12, IN).bfloat16()
    module = mlp(layernorm_type=norm.lower(), return_layernorm_output=returned)
    variables = start(module, to_jax(x))
    weights = {name: value.float() for name, value in layer.state_dict().items()}
    params = te.state.from_torch(weights, {"params": variables["params"]})["params"]
    ours = parts = {**variables, "params": params}

    def distance(found, wanted):
        found, wanted = np.asarray(found, np.float32), wanted.detach().float().numpy()
        return np.linalg.norm(found - wanted) / np.linalg.norm(wanted)

    for _ in range(3):
        x = torch.randn(12, IN).bfloat16().requires_grad_()
        dy = torch.randn(12, IN).bfloat16()
        with apex_te.fp8_autocast(enabled=True, fp8_recipe=DELAYED):
            y = layer(x)[0] if returned else layer(x)
        y.backward(dy)
        made, gradients, dx = make_step(module)(ours, to_jax(x), to_jax(dy))
        ours = {**ours, "fp8_metas": gradients["fp8_metas"]}
        assert distance(made, y) < 1e-3
        assert distance(dx, x.grad) < 1e-3
        named = te.state.to_torch(gradients)
        for name, parameter in layer.named_parameters():
            assert distance(named[name], parameter.grad) < 4e-3, name
        layer.zero_grad()
        with monkeypatch.context() as patch:
            patch.setattr(layernorm_mlp, "can_fuse_activation", lambda state: False)
            made, gradients, dx = make_step(module)(parts, to_jax(x), to_jax(dy))
        parts = {**parts, "fp8_metas": gradients["fp8_metas"]}
    assert distance(made, y) > 3e-3  # what rounding to bf16 in between makes of it
    assert distance(dx, x.grad) > 3e-3


@pytest.mark.parametrize(
    "wanted",
    [("wi_kernel",), ("wo_kernel",), ("wi_bias",), ("wo_bias",), ("scale",), ("ln_bias",), ()],
)
def test_gradients_of_some_parameters_are_those_of_all(wanted):
    module = mlp(use_bias=True, return_layernorm_output=False)
    x, dy = (to_jax(torch.randn(6, IN)) for _ in range(2))
    variables = start(module, x)
    _, every, dx = make_step(module)(variables, x, dy)

    @jax.jit
    def some(params, x, others, rest):
        def loss(params, x, others):
            variables = {"params": {**rest, **params}, **others}
            return (module.apply(variables, x)[0] * dy).sum()

        with te.fp8_autocast(True, DELAYED):
            return jax.grad(loss, (0, 2) if wanted else (1,))(params, x, others)[0]

    params = variables["params"]
    chosen = {name: params[name] for name in wanted}
    others = {name: part for name, part in variables.items() if name != "params"}
    found = some(chosen, x, others, params)
    if not wanted:
        assert bits(found) == bits(dx)
    for name in wanted:
        assert bits(found[name]) == bits(every["params"][name])


def test_the_activation_alone_is_never_written():
    x, module = jnp.ones((4, IN)), mlp()
    variables = start(module, x)
    found = calls(make_step(module), variables, x, x)
    assert {"swiglu_fwd_fp8", "swiglu_bwd_fp8"} <= found
    assert not {"swiglu_fwd", "swiglu_bwd"} & found
    without = module.clone(return_layernorm_output=False)
    assert "layer_norm_fwd" in found
    assert "layer_norm_fwd" not in calls(make_step(without), variables, x, x)
    dropout = mlp().clone(intermediate_dropout_rate=0.5)

    def loss(variables, x):
        with te.fp8_autocast(True, DELAYED):
            return dropout.apply(variables, x, rngs={"dropout": jax.random.key(0)})[0].sum()

    assert "swiglu_fwd" in calls(loss, variables, x)


def test_block_scaling_casts_gated_activations_in_their_ops():
    x, module = jnp.ones((4, IN), jnp.bfloat16), mlp(**WHOLE)
    variables = start(module, x, BLOCK)
    found = calls(make_step(module, BLOCK), variables, x, x)
    assert {"swiglu_fwd_block", "swiglu_bwd_block"} <= found
    assert not {"swiglu_fwd", "swiglu_bwd"} & found
    module = mlp(use_bias=True, **WHOLE)
    variables = start(module, x, BLOCK)
    found = calls(make_step(module, BLOCK), variables, x, x)
    assert {"swiglu_fwd_block", "swiglu_bwd"} <= found
    assert "swiglu_bwd_block" not in found


def test_a_module_that_one_loss_uses_twice(monkeypatch):
    x, module = jax.random.normal(jax.random.key(4), (4, IN)), mlp()
    variables = start(module, x)

    def gradients(wrap):
        @jax.jit
        def run(variables):
            def loss(variables):
                variables = wrap(variables)
                y, _ = module.apply(variables, x)
                return (module.apply(variables, y)[0] ** 2).sum()

            with te.fp8_autocast(True, DELAYED):
                return jax.grad(loss)(variables)["fp8_metas"]

        return run(variables)

    for wrap in (lambda v: v, te.max_over_uses):
        ours = gradients(wrap)
        with monkeypatch.context() as patch:
            patch.setattr(layernorm_mlp, "can_fuse_activation", lambda state: False)
            theirs = gradients(wrap)
        for name in theirs:
            np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-5)


@pytest.fixture(params=["Auto", "Explicit"])
def mesh(request):
    return mesh_of(request.param, d=2, t=2)


def on_mesh(mesh, variables, x, dy):
    """Returns a step's arguments on a mesh, rows along "d" and hidden columns along "t"."""

    def place(tree, spec):
        return jax.device_put(tree, NamedSharding(mesh, spec))

    specs = {"wi_kernel": P(None, None, "t"), "wo_kernel": P("t"), "scale": P()}
    params = {name: place(variables["params"][name], spec) for name, spec in specs.items()}
    others = {name: place(variables[name], P()) for name in variables if name == "fp8_metas"}
    return {"params": params, **others}, place(x, P("d")), place(dy, P("d"))


def test_devices_share_blocks(mesh):
    options = {**WHOLE, "intermediate_dim": 256, "layernorm_type": "rmsnorm"}
    module = mlp(return_layernorm_output=False, **options)
    x, dy = jax.random.normal(jax.random.key(5), (2, 2, 128, IN), jnp.bfloat16)
    variables = start(module, x, BLOCK)
    step = make_step(module, BLOCK)
    expected = step(variables, x, dy)
    given = on_mesh(mesh, variables, x, dy)
    text = step.lower(*given).compile().as_text()
    assert " all-gather" not in text
    assert "swiglu_bwd_block" in text
    for a, b in zip(jax.tree.leaves(step(*given)), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        assert np.linalg.norm(a - b) < 2**-7 * np.linalg.norm(b)


def test_devices_share_rows_and_hidden_columns(mesh):
    module = mlp(layernorm_type="rmsnorm", return_layernorm_output=False)
    x = jax.random.normal(jax.random.key(5), (4, 6, IN))
    variables = start(module, x)
    dy = jax.random.normal(jax.random.key(6), (4, 6, IN))
    step = make_step(module)
    expected = step(variables, x, dy)

    given = on_mesh(mesh, variables, x, dy)
    assert " all-gather" not in step.lower(*given).compile().as_text()
    made = step(*given)
    for a, b in zip(jax.tree.leaves(made), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4)
    # The gradient dy is the same on all meshes, and so is its amax.
    history = made[1]["fp8_metas"]["amax_history_bwd"], expected[1]["fp8_metas"]["amax_history_bwd"]
    assert bits(history[0][0, 2]) == bits(history[1][0, 2])
