"""Flax modules on a mesh: training as on one device, logical axes, state, and checkpoints."""

import numpy as np
import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("flax.linen")
import jax.numpy as jnp  # noqa: E402
import sharded_net  # noqa: E402
from flax import serialization  # noqa: E402
from jax.sharding import AxisType  # noqa: E402

import apex_te.jax as te  # noqa: E402

pytestmark = pytest.mark.skipif(
    len(jax.devices()) < 4, reason="jax was started before this folder's conftest"
)


def test_training_is_as_on_one_device_and_gathers_nothing():
    sharded_net.assert_trains_as_on_one_device("delayed", (2, 2), AxisType.Auto)


def test_the_state_is_the_same_on_all_devices_and_its_checkpoint_loads_on_one():
    variables, _, expected = sharded_net.on_one_device("delayed")
    sharded = sharded_net.run("delayed", (2, 2), AxisType.Auto)[0][-1][2]
    for leaf in jax.tree.leaves(sharded["fp8_metas"]):
        assert len({shard.data.tobytes() for shard in leaf.addressable_shards}) == 1
    saved = serialization.to_bytes(sharded)
    loaded = serialization.from_bytes(variables, saved)
    for x, wanted in zip(jax.tree.leaves(loaded), jax.tree.leaves(sharded), strict=True):
        assert np.asarray(x).tobytes() == np.asarray(wanted).tobytes()
    loaded = jax.tree.map(jnp.asarray, loaded)
    step = jax.jit(sharded_net.make_step("delayed", ()))
    after, wanted = step(loaded, *sharded_net.data()), step(expected[-1][2], *sharded_net.data())
    np.testing.assert_allclose(after[0], wanted[0], rtol=1e-4)
    assert len(jax.tree.leaves(loaded)[0].devices()) == 1


def test_a_mesh_resource_is_names_of_axes_and_part_of_the_region():
    with pytest.raises(TypeError, match="MeshResource: tp_resource must be the name of a mesh"):
        te.MeshResource("d", 3)
    resource = te.ShardingResource("d", "t", "d", "p")
    assert resource.amax_axes == ("d", "t")
    from apex_te.jax.region import active_mesh_resource

    with te.fp8_autocast(True, mesh_resource=resource), te.autocast(True):
        assert active_mesh_resource() == resource
    assert active_mesh_resource() == te.MeshResource()
