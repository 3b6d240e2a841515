"""Fused optimizers for optax: bits as PyTorch's, transforms, meshes, checkpoints and refusals."""

import copy

import pytest
import torch

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from arrays import bits, mesh_of, to_jax  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402

from apex_te import optimizers as torch_optimizers  # noqa: E402
from apex_te.jax import optimizers  # noqa: E402
from apex_te.jax.ops import multi_tensor_optim  # noqa: E402

P = PartitionSpec
STEPS = 5
# Shapes and dtypes of a tree's leaves.
LEAVES = {
    "a": {"kernel": ((17, 5), torch.bfloat16), "bias": ((5,), torch.float32)},
    "b": [((3, 4, 7), torch.float16), ((), torch.float32), ((0, 3), torch.float32)],
    "c": ((40, 65), torch.float32),
}
FLOAT32 = {"a": ((9, 7), torch.float32), "b": ((31,), torch.float32)}


def is_leaf(value):
    return isinstance(value, tuple)


def tree_of(leaves, scale=1.0):
    """Returns a tree of random tensors."""
    return jax.tree.map(lambda s: (scale * torch.randn(s[0])).to(s[1]), leaves, is_leaf=is_leaf)


def arrays(tree):
    return jax.tree.map(to_jax, tree)


def assert_trees(ours, theirs):
    """Asserts equal structures, dtypes and bits of a tree of arrays and one of tensors."""
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for found, expected in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert found.shape == tuple(expected.shape)
        assert bits(found) == bits(expected)


def gradients(leaves):
    """Returns the gradients of all steps; small ones come late, so that moments matter."""
    return [tree_of(leaves, 10.0 ** -(i % 3)) for i in range(STEPS)]


def torch_steps(make, params, grads):
    """Steps parameters in place; returns the optimizer."""
    leaves = [p.requires_grad_() for p in jax.tree.leaves(params)]
    optimizer = make(leaves)
    for each in grads:
        for p, g in zip(leaves, jax.tree.leaves(each), strict=True):
            p.grad = g.clone()
        optimizer.step()
    return optimizer


def torch_state(optimizer, params, name):
    """Returns a tree of the optimizer's state, None where a parameter has none."""
    return jax.tree.map(lambda p: optimizer.state[p].get(name), params)


def steps_of(tx, params, grads, **options):
    """Returns the parameters after all steps, each in a jitted program, and the state."""
    run = jax.jit(lambda p, s, g: tx.step(p, s, g, **options), donate_argnums=(0, 1))
    params = jax.tree.map(jnp.copy, params)
    state = tx.init(params)
    for each in grads:
        params, state = run(params, state, arrays(each))
    return params, state


OURS, THEIRS = optimizers, torch_optimizers
PAIRS = {
    "adamw": (
        lambda: OURS.fused_adam(3e-3, weight_decay=0.1, master_weights=True),
        lambda p: THEIRS.FusedAdam(p, 3e-3, weight_decay=0.1, master_weights=True),
    ),
    "adam": (
        lambda: OURS.fused_adam(
            1e-2, b1=0.8, b2=0.95, eps=1e-6, weight_decay=0.01, adam_w_mode=False
        ),
        lambda p: THEIRS.FusedAdam(
            p, 1e-2, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.01, adam_w_mode=False
        ),
    ),
    "adam without bias correction": (
        lambda: OURS.fused_adam(bias_correction=False),
        lambda p: THEIRS.FusedAdam(p, bias_correction=False),
    ),
    "lamb": (
        lambda: OURS.fused_lamb(1e-2, master_weights=True),
        lambda p: THEIRS.FusedLAMB(p, 1e-2, master_weights=True),
    ),
    "nvlamb": (
        lambda: OURS.fused_lamb(
            weight_decay=0.0, use_nvlamb=True, grad_averaging=False, max_grad_norm=0.0
        ),
        lambda p: THEIRS.FusedLAMB(
            p, weight_decay=0.0, use_nvlamb=True, grad_averaging=False, max_grad_norm=0.0
        ),
    ),
    "sgd": (lambda: OURS.fused_sgd(0.1), lambda p: THEIRS.FusedSGD(p, 0.1)),
    "momentum": (
        lambda: OURS.fused_sgd(0.1, 0.9, True, weight_decay=0.01, master_weights=True),
        lambda p: THEIRS.FusedSGD(
            p, 0.1, 0.9, nesterov=True, weight_decay=0.01, master_weights=True
        ),
    ),
    "dampening": (
        lambda: OURS.fused_sgd(0.1, 0.9, dampening=0.5),
        lambda p: THEIRS.FusedSGD(p, 0.1, 0.9, dampening=0.5),
    ),
}
NAMES = {"mu": "exp_avg", "nu": "exp_avg_sq", "trace": "momentum_buffer", "master": "master_param"}


@pytest.mark.parametrize("name", PAIRS)
def test_steps_have_torchs_bits(name):
    ours, theirs = PAIRS[name]
    params, grads = tree_of(LEAVES), gradients(LEAVES)
    start = arrays(params)
    optimizer = torch_steps(theirs, params, grads)
    found, state = steps_of(ours(), start, grads)
    assert_trees(found, jax.tree.map(torch.Tensor.detach, params))
    for field, key in NAMES.items():
        made = getattr(state, field, None)
        if made is not None:
            assert_trees(made, torch_state(optimizer, params, key))
    assert int(state.count) == STEPS


def test_updates_for_optax_give_the_same_masters_and_parameters():
    params, grads = tree_of(LEAVES), gradients(LEAVES)
    tx = OURS.fused_adam(3e-3, weight_decay=0.1, master_weights=True)
    found, state = arrays(params), tx.init(arrays(params))

    @jax.jit
    def run(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for each in grads:
        found, state = run(arrays(each), state, found)
    expected, wanted = steps_of(tx, arrays(params), grads)
    assert [x.dtype for x in jax.tree.leaves(found)] == [x.dtype for x in jax.tree.leaves(expected)]
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        if ours.dtype != jnp.float32:
            assert bits(ours) == bits(theirs)
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-7)
    for ours, theirs in zip(
        jax.tree.leaves(state.master), jax.tree.leaves(wanted.master), strict=True
    ):
        assert bits(ours) == bits(theirs)


def test_schedules_have_the_bits_of_torchs_rates_on_the_device():
    params, grads = tree_of(LEAVES), gradients(LEAVES)
    start, rates = arrays(params), [1e-2, 7e-3, 4e-3, 2e-3, 1e-3]
    leaves = [p.requires_grad_() for p in jax.tree.leaves(params)]
    optimizer = THEIRS.FusedAdam(leaves, rates[0], weight_decay=0.1, capturable=True)
    for rate, each in zip(rates, grads, strict=True):
        optimizer.param_groups[0]["lr"].fill_(rate)
        for p, g in zip(leaves, jax.tree.leaves(each), strict=True):
            p.grad = g
        optimizer.step()
    table = jnp.array(rates)
    found, _ = steps_of(OURS.fused_adam(lambda count: table[count], weight_decay=0.1), start, grads)
    assert_trees(found, jax.tree.map(torch.Tensor.detach, params))
    tx = optax.inject_hyperparams(OURS.fused_adam, static_args=("b1", "b2", "eps", "weight_decay"))(
        learning_rate=lambda count: table[count], weight_decay=0.1
    )
    state, again = tx.init(start), start
    for each in grads:
        updates, state = jax.jit(tx.update)(arrays(each), state, again)
        again = optax.apply_updates(again, updates)
    for ours, theirs in zip(jax.tree.leaves(again), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-7)


def test_masks_are_torchs_parameter_groups():
    params, grads = tree_of(LEAVES), gradients(LEAVES)
    start, flags = arrays(params), {"a": {"kernel": True, "bias": False}, "b": False, "c": True}
    leaves = [p.requires_grad_() for p in jax.tree.leaves(params)]
    every = [False, True, False, False, False, True]
    groups = [
        {"params": [p for p, f in zip(leaves, every, strict=True) if f == flag], "weight_decay": d}
        for flag, d in ((True, 0.3), (False, 0.0))
    ]
    optimizer = THEIRS.FusedAdam(groups, 1e-2)
    for each in grads:
        for p, g in zip(leaves, jax.tree.leaves(each), strict=True):
            p.grad = g
        optimizer.step()
    for mask in (flags, lambda _: flags):
        found, _ = steps_of(OURS.fused_adam(1e-2, weight_decay=0.3, mask=mask), start, grads)
        assert_trees(found, jax.tree.map(torch.Tensor.detach, params))


@pytest.mark.parametrize("name", ["adamw", "momentum", "dampening", "lamb"])
def test_loss_scales_and_steps_that_are_skipped(name):
    tx = PAIRS[name][0]()
    params, grads = arrays(tree_of(FLOAT32)), [arrays(g) for g in gradients(FLOAT32)]
    half = [jax.tree.map(lambda g: g * 2, each) for each in grads]
    run = jax.jit(tx.step)
    state, scaled, wanted = tx.init(params), params, params
    scaled_state = state
    for i, each in enumerate(grads):
        wanted, state = run(wanted, state, each)
        if i == 2:
            bad = jax.tree.map(lambda g: g * jnp.nan, each)
            before = scaled, scaled_state
            scaled, scaled_state = run(scaled, scaled_state, bad, inv_scale=0.5, found_inf=True)
            assert bits_of((scaled, scaled_state)) == bits_of(before)
        scaled, scaled_state = run(
            scaled, scaled_state, half[i], inv_scale=jnp.float32(0.5), found_inf=jnp.zeros(1)
        )
    if name != "lamb":  # whose limit of the norm is that of the unscaled gradients
        assert bits_of((scaled, scaled_state)) == bits_of((wanted, state))
    assert int(scaled_state.count) == STEPS


def bits_of(tree):
    return [bits(leaf) for leaf in jax.tree.leaves(tree)]


def test_donated_buffers_are_updated_in_place():
    tx = OURS.fused_adam(master_weights=True)
    params = {"w": jnp.ones((64, 32), jnp.bfloat16), "b": jnp.ones(33)}
    state, grads = tx.init(params), jax.tree.map(jnp.ones_like, params)
    run = jax.jit(tx.step, donate_argnums=(0, 1))
    program = run.lower(params, state, grads).compile()
    assert " copy(" not in program.as_text()
    assert "copy-start" not in program.as_text()

    def places():
        kept = (state.mu, state.nu, state.master, params["b"])
        return [x.unsafe_buffer_pointer() for x in jax.tree.leaves(kept)]

    before = places()
    params, state = run(params, state, grads)
    assert places() == before


def test_more_parameters_than_one_call_takes():
    count = multi_tensor_optim.MOST_TENSORS + 3
    params = [torch.randn(i % 5 + 1) for i in range(count)]
    grads = [[torch.randn_like(p) for p in params] for _ in range(2)]
    start = arrays(params)
    torch_steps(lambda p: THEIRS.FusedAdam(p, 1e-2), params, grads)
    found, _ = steps_of(OURS.fused_adam(1e-2), start, grads)
    assert_trees(found, [p.detach() for p in params])


def test_training_resumes_from_a_checkpoint_with_the_same_bits(tmp_path):
    serialization = pytest.importorskip("flax.serialization")
    tx = OURS.fused_adam(3e-3, weight_decay=0.1, master_weights=True)
    params, grads = arrays(tree_of(LEAVES)), gradients(LEAVES)
    expected = steps_of(tx, params, grads)
    half = steps_of(tx, params, grads[:2])
    file = tmp_path / "state"
    file.write_bytes(serialization.to_bytes(half))
    fresh = jax.tree.map(jnp.zeros_like, half[0])
    params, state = serialization.from_bytes((fresh, tx.init(fresh)), file.read_bytes())
    params, state = jax.tree.map(jnp.asarray, (params, state))
    run = jax.jit(tx.step)
    for each in grads[2:]:
        params, state = run(params, state, arrays(each))
    assert bits_of((params, state)) == bits_of(expected)
    assert jax.tree.structure(state) == jax.tree.structure(expected[1])


def test_what_optax_builds_of_transformations():
    params = arrays(tree_of(FLOAT32))
    grads = [arrays(g) for g in gradients(FLOAT32)]
    fused = OURS.fused_adam(1e-2, weight_decay=0.1)
    plain = optax.adamw(1e-2, weight_decay=0.1)

    def run(tx):
        state, found = tx.init(params), params
        step = jax.jit(tx.update)
        for each in grads:
            updates, state = step(each, state, found)
            found = optax.apply_updates(found, updates)
        return found, state

    def chained(tx):
        return optax.chain(optax.clip_by_global_norm(1.0), tx)

    def parted(tx):
        return optax.partition({"t": tx, "f": optax.set_to_zero()}, {"a": "t", "b": "f"})

    def repeated(tx):
        return optax.MultiSteps(tx, every_k_schedule=2)

    for build in (
        lambda tx: tx,
        chained,
        parted,
        repeated,
        lambda tx: optax.masked(tx, {"a": True, "b": False}),
    ):
        ours, theirs = run(build(fused))[0], run(build(plain))[0]
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)
    state = run(fused)[1]
    doubled = optax.tree_map_params(fused, lambda x: 2 * x, state)
    assert bits(doubled.mu["a"]) == bits(2 * state.mu["a"])
    assert int(doubled.count) == STEPS


def test_moments_go_to_torchs_names_as_parameters_do():
    te_flax, te_state = (
        pytest.importorskip("apex_te.jax.flax"),
        pytest.importorskip("apex_te.jax.state"),
    )
    model, x = te_flax.DenseGeneral(features=6), jnp.ones((2, 4))
    params = model.init(jax.random.key(0), x)["params"]
    tx = OURS.fused_adam()
    grads = jax.grad(lambda p: model.apply({"params": p}, x).sum())(params)
    _, state = tx.step(params, tx.init(params), grads)
    named = te_state.to_torch({"params": state.mu})
    np.testing.assert_array_equal(
        np.asarray(named["weight"]), np.asarray(state.mu["kernel"].value).T
    )


@pytest.fixture(params=["Auto", "Explicit"])
def mesh(request):
    return mesh_of(request.param, d=2, t=2)


SHARDED = {
    "a": ((8, 6), torch.bfloat16),
    "b": ((4,), torch.float32),
    "c": ((3, 2, 8), torch.float32),
}
SPECS = {"a": P("d", "t"), "b": P("t"), "c": P(None, "d", ("t",))}


@pytest.mark.parametrize("whole_params", [False, True])
@pytest.mark.parametrize("name", ["adamw", "momentum"])
def test_sharded_states_have_the_bits_of_one_device(mesh, name, whole_params):
    tx, params, grads = PAIRS[name][0](), tree_of(SHARDED), gradients(SHARDED)
    expected = steps_of(tx, arrays(params), grads)
    places = {key: NamedSharding(mesh, spec) for key, spec in SPECS.items()}
    of_params = dict.fromkeys(places, NamedSharding(mesh, P())) if whole_params else places
    state = tx.init(jax.device_put(arrays(params), places))
    params = jax.device_put(arrays(params), of_params)
    step = tx.step
    if not whole_params:
        text = jax.jit(step).lower(params, state, jax.device_put(arrays(grads[0]), places))
        assert "all-gather" not in text.compile().as_text()
    run = jax.jit(step)
    for each in grads:
        params, state = run(params, state, jax.device_put(arrays(each), of_params))
        params = jax.device_put(params, of_params)
    assert bits_of((params, state)) == bits_of(expected)
    moments = state.mu if name == "adamw" else state.trace
    for key, spec in SPECS.items():
        assert moments[key].sharding.is_equivalent_to(NamedSharding(mesh, spec), moments[key].ndim)


def test_lamb_on_a_mesh_has_the_bits_of_one_device(mesh):
    tx, params, grads = PAIRS["lamb"][0](), tree_of(SHARDED), gradients(SHARDED)
    expected = steps_of(tx, arrays(params), grads)
    places = {key: NamedSharding(mesh, spec) for key, spec in SPECS.items()}
    found = jax.device_put(arrays(params), places)
    state, run = tx.init(found), jax.jit(tx.step)
    for each in grads:
        found, state = run(found, state, jax.device_put(arrays(each), places))
    assert bits_of((found, state)) == bits_of(expected)


@pytest.mark.parametrize("check", [True, False])
def test_steps_inside_of_shard_map(mesh, check):
    tx, params, grads = PAIRS["adamw"][0](), tree_of(SHARDED), gradients(SHARDED)[0]
    params, grads = arrays(params), arrays(grads)
    expected = jax.jit(tx.step)(params, tx.init(params), grads)
    specs = {"a": P("d"), "b": P(), "c": P()}
    state = tx.init(params)
    state_specs = type(state)(P(), specs, specs, {"a": P("d"), "b": None, "c": None})
    mapped = jax.shard_map(
        tx.step, mesh=mesh, in_specs=(specs, state_specs, specs), out_specs=(specs, state_specs),
        check_vma=check,
    )  # fmt: skip
    given = jax.device_put(
        (params, state, grads),
        jax.tree.map(lambda spec: NamedSharding(mesh, spec), (specs, state_specs, specs)),
    )
    assert bits_of(jax.jit(mapped)(*given)) == bits_of(expected)


def test_train_states_of_flax():
    train_state = pytest.importorskip("flax.training.train_state")
    params = arrays(tree_of(FLOAT32))
    tx = OURS.fused_adam(1e-2)
    state = train_state.TrainState.create(apply_fn=None, params=params, tx=tx)
    grads = arrays(gradients(FLOAT32)[0])
    stepped = jax.jit(lambda s, g: s.apply_gradients(grads=g))(state, grads)
    expected, _ = tx.step(params, tx.init(params), grads)
    for a, b in zip(jax.tree.leaves(stepped.params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


def test_copies_step_as_well():
    params = {"w": jnp.ones(3)}
    tx = OURS.fused_adam(0.5)
    twin = copy.deepcopy(tx)
    stepped = twin.step(params, twin.init(params), params)
    assert bits_of(stepped) == bits_of(tx.step(params, tx.init(params), params))


def test_empty_trees():
    for tx in (OURS.fused_adam(), OURS.fused_lamb(), OURS.fused_sgd(momentum=0.9)):
        params, state = tx.step({}, tx.init({}), {})
        assert params == {}
        assert int(state.count) == 1


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: OURS.fused_adam(b1=1.0), ValueError,
         "fused_adam: b1 must be at least 0 and below 1, got 1.0"),
        (lambda: OURS.fused_adam(-1.0), ValueError,
         "fused_adam: learning_rate must be at least 0, got -1.0"),
        (lambda: OURS.fused_adam(eps=jnp.ones([])), TypeError,
         "fused_adam: eps must be a number, static_args of optax.inject_hyperparams, got Array"),
        (lambda: OURS.fused_lamb(max_grad_norm=-1.0), ValueError,
         "fused_lamb: max_grad_norm must be at least 0, got -1.0"),
        (lambda: OURS.fused_sgd(nesterov=True), ValueError,
         "fused_sgd: nesterov must be False without momentum or with dampening, got True"),
        (lambda: OURS.fused_adam().init({"a": jnp.ones(3, jnp.int32)}), TypeError,
         r"fused_adam: params\['a'\] must have dtype float32, float16 or bfloat16, got int32"),
        (lambda: OURS.fused_adam().update({}, None), ValueError,
         "fused_adam: params must be given to update, got None"),
    ],
)  # fmt: skip
def test_refusals_of_transformations(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_vmap_is_refused():
    tx = OURS.fused_adam()
    params = jnp.ones((3, 4))
    state = jax.vmap(tx.init)(params)
    with pytest.raises(NotImplementedError, match="multi_tensor_adam: params must be whole arrays"):
        jax.vmap(tx.step)(params, state, params)
