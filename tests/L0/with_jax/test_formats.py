"""MXFP8 and HiF8 in JAX, and first scales from the first tensors: numbers as PyTorch has them."""

import functools

import numpy as np
import pytest
import torch

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402
from arrays import assert_fields, assert_same, to_jax  # noqa: E402

import apex_te  # noqa: E402
from apex_te import ops as torch_ops  # noqa: E402
from apex_te import recipe  # noqa: E402
from apex_te.jax import fp8_autocast, ops  # noqa: E402
from apex_te.jax import state as fp8_state  # noqa: E402
from apex_te.jax.dense import dense_with_state as dense  # noqa: E402


def awkward(*shape):
    """Random values with infinity, NaN, zeros and a subnormal number among them."""
    x = torch.randn(shape) * torch.exp(torch.randn(shape) * 4)
    x[0, 0], x[1, 40], x[2, :32], x[3, 0] = float("inf"), float("nan"), 0.0, 2.0**-140
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rounding", ["up", "floor"])
@pytest.mark.parametrize("fp8", ["float8_e4m3fn", "float8_e5m2"])
def test_mxfp8_has_torchs_bits(fp8, rounding, dtype, poison):
    x = awkward(37, 70).to(dtype)
    expected = torch_ops.mx_quantize.mx_quantize(x, getattr(torch, fp8), rounding=rounding)
    made = jax.jit(lambda x: ops.mx_quantize.mx_quantize(x, fp8, rounding=rounding))(to_jax(x))
    assert_fields(made, expected)
    for out in (torch.float32, torch.bfloat16):
        values = torch_ops.mx_quantize.mx_dequantize(*expected[2:], dtype=out)
        name = str(out).removeprefix("torch.")
        assert_same(ops.mx_quantize.mx_dequantize(*made[2:], dtype=name), values)
    one = ops.mx_quantize.mx_quantize(to_jax(x), fp8, rowwise=False, rounding=rounding)
    assert one.rowwise is None
    assert_same(one.columnwise, expected.columnwise)


def test_hif8_has_torchs_bits(poison):
    x, scale, amax = awkward(37, 70), torch.tensor([3.0]), torch.tensor([2.0])
    theirs, ours = torch_ops.hif8, ops.hif8
    for saturate in (True, False):
        codes = theirs.encode(x, saturate=saturate)
        assert_same(ours.encode(to_jax(x), saturate=saturate), codes)
        for given in (None, scale):
            expected = theirs.decode(codes, torch.float32, scale_inv=given)
            inverse = None if given is None else to_jax(given)
            assert_same(ours.decode(to_jax(codes), jnp.float32, scale_inv=inverse), expected)
    expected = theirs.quantize(x, scale, amax=amax)
    assert_fields(ours.quantize(to_jax(x), to_jax(scale), amax=jnp.full(1, 2.0)), expected)
    x = x.nan_to_num(0.0, 9.0)
    for options in ({}, {"target": 224.0, "pow2": True}, {"eps": 1e9, "columnwise": False}):
        expected = theirs.quantize_current(x, **options)
        assert_fields(ours.quantize_current(to_jax(x), **options), expected)
    expected = theirs.quantize_current(x, amax=scale)
    made = ours.quantize_current(to_jax(x), amax=to_jax(scale))
    assert_same(made.rowwise, expected.rowwise)
    assert_same(made.scale_inv, expected.scale_inv)


@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("kind", ["mx", "hif8"])
def test_products_are_torchs_within_rounding(kind, with_bias, out):
    x, w, bias = torch.randn(24, 80), torch.randn(40, 80), torch.randn(40) if with_bias else None
    if kind == "mx":
        qx, qw = (torch_ops.mx_quantize.mx_quantize(t, columnwise=False) for t in (x, w))
        operands = qx.rowwise, qw.rowwise, qx.rowwise_scale, qw.rowwise_scale
        product, ours = torch_ops.emulated_gemm.mx_gemm, ops.emulated_gemm.mx_gemm
    else:
        qx, qw = (torch_ops.hif8.quantize_current(t, columnwise=False) for t in (x, w))
        operands = qx.rowwise, qw.rowwise, qx.scale_inv, qw.scale_inv
        product, ours = torch_ops.emulated_gemm.hif8_gemm, ops.emulated_gemm.hif8_gemm
    expected = product(*operands, out_dtype=out, bias=bias)
    name = str(out).removeprefix("torch.")
    added = None if bias is None else to_jax(bias)
    made = jax.jit(lambda *given: ours(*given, out_dtype=name, bias=added))(*map(to_jax, operands))
    assert made.dtype.name == name
    # Sums in another order; 2 units in the last place of bfloat16.
    bound = 1e-5 if out is torch.float32 else 2**-7
    np.testing.assert_allclose(
        np.asarray(made, np.float32), expected.float().numpy(), rtol=bound, atol=bound
    )


@pytest.mark.parametrize(
    "chosen",
    [
        recipe.MXFP8Scaling(fp8_format=recipe.Format.HYBRID),
        recipe.CurrentScaling(fp8_format=recipe.Format.HIF8),
        recipe.DelayedScaling(first_step="current", amax_history_len=3),
    ],
    ids=lambda chosen: type(chosen).__name__,
)
def test_a_layer_in_bfloat16_is_torchs_within_rounding(chosen):
    layer = apex_te.Linear(64, 32, params_dtype=torch.bfloat16)
    kernel, bias = to_jax(layer.weight.detach().t().contiguous()), to_jax(layer.bias.detach())
    state = fp8_state.initial(chosen) if chosen.keeps_state else None

    @jax.jit
    def step(kernel, bias, x, grad, state):
        with fp8_autocast(True, chosen):
            y, pull = jax.vjp(lambda *given: dense(*given), x, kernel, bias, state)
            return y, pull(grad)

    for _ in range(3):
        x, grad = torch.randn(24, 64).bfloat16().requires_grad_(), torch.randn(24, 32).bfloat16()
        with apex_te.fp8_autocast(fp8_recipe=chosen):
            y = layer(x)
        layer.zero_grad()
        y.backward(grad)
        ours, (dx, dkernel, dbias, state) = step(kernel, bias, to_jax(x), to_jax(grad), state)
        pairs = (
            (ours, y),
            (dx, x.grad),
            (dkernel, layer.weight.grad.t()),
            (dbias, layer.bias.grad),
        )
        for found, expected in pairs:
            wanted = expected.detach().float().numpy()
            bound = 2**-7 * np.abs(wanted).max()
            np.testing.assert_allclose(
                np.asarray(found, np.float32), wanted, rtol=2**-7, atol=bound
            )
        if state is not None:
            for name in fp8_state.TENSORS:
                assert_same(state[name], getattr(layer.fp8_state, name))


def test_first_scales_are_due_once_and_go_to_torch_and_back():
    flax = pytest.importorskip("flax.linen")
    import apex_te.jax as te
    import apex_te.jax.flax as te_flax

    chosen = recipe.DelayedScaling(first_step="current", amax_history_len=3)
    module, x = te_flax.DenseGeneral(32, kernel_init=flax.initializers.ones), jnp.ones((4, 32))
    with te.fp8_autocast(True, chosen):
        variables = jax.jit(module.init)(jax.random.key(0), x)
        assert variables["fp8_metas"]["first_due"].tolist() == [1.0] * 5
        saved = te.state.to_torch(variables)
        found = jax.jit(jax.grad(lambda v: module.apply(v, 3 * x).sum()))(variables)
        state = found["fp8_metas"]
        assert state["scale_fwd"].tolist() == [float(np.float32(448) / 3), 448.0, 1.0]
        assert state["scale_bwd"].tolist() == [57344.0, 1.0]
        # Slots of outputs and input gradients are never cast.
        assert state["first_due"].tolist() == [0.0, 0.0, 1.0, 0.0, 1.0]
        later = te.update_collections({"fp8_metas": state}, variables)
        found = jax.jit(jax.grad(lambda v: module.apply(v, 5 * x).sum()))(later)
        assert found["fp8_metas"]["scale_fwd"][0] == state["scale_fwd"][0]
        after = te.state.to_torch(later)
    layer = apex_te.Linear(32, 32)
    for values, due in ((saved, [1.0] * 5), (after, [0.0, 0.0, 1.0, 0.0, 1.0])):
        layer.load_state_dict({name: torch.from_numpy(v.copy()) for name, v in values.items()})
        assert layer.fp8_state.first_steps.due == [bool(each) for each in due]
        state = te.state.from_torch(
            {name: t.numpy() for name, t in layer.state_dict().items()}, variables
        )
        assert state["fp8_metas"]["first_due"].tolist() == due
    # A state without these flags has scales, and serves a recipe that would set first ones.
    with te.fp8_autocast(True, recipe.DelayedScaling(amax_history_len=3)):
        plain = jax.jit(module.init)(jax.random.key(0), x)
    with te.fp8_autocast(True, chosen):
        found = jax.jit(jax.grad(lambda v: module.apply(v, 3 * x).sum()))(plain)
    assert found["fp8_metas"]["scale_fwd"].tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("first_step", ["scale_one", "current"])
def test_a_layer_that_a_step_does_not_use_keeps_its_state(first_step):
    nn = pytest.importorskip("flax.linen")
    import apex_te.jax as te
    import apex_te.jax.flax as te_flax

    chosen = recipe.DelayedScaling(amax_history_len=3, first_step=first_step)

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x, both):
            y, z = te_flax.DenseGeneral(16, name="a")(x), te_flax.DenseGeneral(16, name="b")(x)
            return y + z if both else y

    module, x = Model(), to_jax(torch.randn(4, 16))
    with te.fp8_autocast(True, chosen):
        variables = jax.jit(module.init, static_argnums=2)(jax.random.key(0), x, True)

        @functools.partial(jax.jit, static_argnums=1)
        def states(variables, both):
            found = jax.grad(lambda v: (module.apply(v, x, both) ** 2).sum())(variables)
            return {"fp8_metas": found["fp8_metas"]}

        for _ in range(2):
            variables = te.update_collections(states(variables, True), variables)
        lost = states(variables, False)
        kept = te.update_collections(lost, variables)["fp8_metas"]
        for name, before in variables["fp8_metas"]["b"].items():
            assert np.array_equal(kept["b"][name], before), name
            assert np.array_equal(kept["a"][name], lost["fp8_metas"]["a"][name]), name
        # Without update_collections the layer's state begins anew.
        again = {**variables, **lost}
        assert np.isfinite(np.asarray(module.apply(again, x, True))).all()
        anew = states(again, True)["fp8_metas"]["b"]
    if first_step == "current":
        assert anew["first_due"].tolist() == [0.0, 0.0, 1.0, 0.0, 1.0]
        assert anew["scale_fwd"][1] == kept["b"]["scale_fwd"][1]  # the kernel is still the same
    else:
        assert anew["scale_fwd"].tolist() == [1.0, 1.0, 1.0]
    assert (anew["amax_history_fwd"][0, :2] > 0).all()
