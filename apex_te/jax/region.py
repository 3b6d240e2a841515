"""FP8 regions: which recipe the layers that are traced inside of a ``with`` block use.

The recipe lives in a context of JAX's that is part of jit's cache key: a jitted function that is
called in and out of a region, or with another recipe, is traced again.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from ..recipe import (
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    MXFP8Scaling,
    Recipe,
    chosen_recipe,
)


@dataclasses.dataclass(frozen=True)
class MeshResource:
    """Names of the mesh axes that a program uses for each kind of parallelism.

    Args:
        dp_resource: axis along which devices hold different parts of the batch.
        tp_resource: axis along which they hold different parts of the weights, for tensor
            parallelism.
        fsdp_resource: axis along which they hold different parts of the batch and of the weights;
            the weights are gathered for each use.
        pp_resource: axis along which they hold different layers.
        cp_resource: axis along which they hold different parts of the sequence.
    """

    dp_resource: str | None = None
    tp_resource: str | None = None
    fsdp_resource: str | None = None
    pp_resource: str | None = None
    cp_resource: str | None = None

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if value is not None and not isinstance(value, str):
                raise TypeError(
                    f"MeshResource: {name} must be the name of a mesh axis or None, got"
                    f" {type(value).__name__}"
                )

    @property
    def amax_axes(self) -> tuple[str, ...]:
        """Axes over which amax values are combined: all axes but that of pipeline parallelism."""
        names = (self.dp_resource, self.tp_resource, self.fsdp_resource, self.cp_resource)
        return tuple(dict.fromkeys(name for name in names if name is not None))


_KINDS = (DelayedScaling, CurrentScaling, BlockScaling, MXFP8Scaling)
_SCHEMES = ("delayed", "current", "hif8", "block", "mx")  # in apex_te.jax.quantizer.schemes
_region: Any = jax.make_user_context(default_value=None)
_mesh: Any = jax.make_user_context(default_value=MeshResource())


def checked_recipe(owner: str, recipe: Any, argument: str = "fp8_recipe") -> Recipe:
    """Returns ``recipe``, the recipe with this name, or ``DelayedScaling()`` for None.

    Errors name ``owner`` and its ``argument``.
    """
    found = chosen_recipe(owner, argument, recipe)
    if not isinstance(found, _KINDS) or found.quantizer not in _SCHEMES:
        names = [kind.__name__ for kind in _KINDS]
        raise NotImplementedError(
            f"{owner}: {argument} must be {', '.join(names[:-1])} or {names[-1]} in JAX, got"
            f" {found!r}"
        )
    if isinstance(found, DelayedScaling):
        if found.interval != 1:
            raise NotImplementedError(
                f"{owner}: interval must be 1 in JAX (carry the FP8 state through a lax.scan of"
                f" microbatches instead), got {found.interval}"
            )
        if found.uses_callables:
            raise NotImplementedError(
                f"{owner}: algorithms must be given by name in JAX, got a function"
            )
    backward = getattr(found, "backward", None)
    if backward is not None:
        raise NotImplementedError(f"{owner}: backward must be None in JAX, got {backward!r}")
    return found


def fp8_autocast(
    enabled: bool | Recipe | str = False,
    fp8_recipe: Recipe | str | None = None,
    mesh_resource: MeshResource | None = None,
    *,
    sharding_resource: MeshResource | None = None,
) -> contextlib.AbstractContextManager[None]:
    """Context manager in which layers multiply in FP8.

    A jitted function uses the region in which it is called: the recipe is part of jit's cache key,
    so that a call with another recipe traces the function again.

    Args:
        enabled: False for a region in which layers multiply in their own dtype. A recipe or its
            name means True and that recipe.
        fp8_recipe: the recipe, or its name as in ``apex_te.recipe.make_recipe``; None means
            ``DelayedScaling()``.
        mesh_resource: names of mesh axes. ``extend_logical_axis_rules`` reads them, and inside of
            ``jax.shard_map`` amax values are combined over them. None means those of the enclosing
            region.
        sharding_resource: former name of ``mesh_resource``, used if that is None.

    Raises:
        TypeError: an argument has a wrong type, or both ``enabled`` and ``fp8_recipe`` are recipes.
        ValueError: no recipe has this name.
        NotImplementedError: the recipe or one of its options is not available in JAX.
    """
    name = "sharding_resource" if mesh_resource is None else "mesh_resource"
    resource = sharding_resource if mesh_resource is None else mesh_resource
    return _entered("fp8_autocast", enabled, ("fp8_recipe", fp8_recipe), (name, resource))


def autocast(
    enabled: bool | Recipe | str = False,
    recipe: Recipe | str | None = None,
    mesh_resource: MeshResource | None = None,
) -> contextlib.AbstractContextManager[None]:
    """Returns an ``fp8_autocast`` region, under Transformer Engine's new names.

    Args:
        enabled, mesh_resource: as in ``fp8_autocast``.
        recipe: as ``fp8_recipe`` in ``fp8_autocast``.
    """
    return _entered("autocast", enabled, ("recipe", recipe), ("mesh_resource", mesh_resource))


@contextlib.contextmanager
def _entered(
    owner: str, enabled: Any, recipe: tuple[str, Any], resource: tuple[str, Any]
) -> Iterator[None]:
    """Checks the arguments of a region, and enters it."""
    argument, given = recipe
    if resource[1] is not None and not isinstance(resource[1], MeshResource):
        kind = type(resource[1]).__name__
        raise TypeError(f"{owner}: {resource[0]} must be a MeshResource, got {kind}")
    if isinstance(enabled, (Recipe, str)):
        if given is not None:
            raise TypeError(f"{owner}: enabled must be a bool beside {argument}, got {enabled!r}")
        enabled, given, argument = True, enabled, "the first argument"
    elif not isinstance(enabled, (bool, np.bool_)):
        kind = type(enabled).__name__
        raise TypeError(f"{owner}: enabled must be a bool, or a recipe or its name, got {kind}")
    chosen = checked_recipe(owner, given, argument) if enabled else None
    with _region(chosen), _mesh(active_mesh_resource() if resource[1] is None else resource[1]):
        yield


@contextlib.contextmanager
def named_mesh(owner: str, resource: MeshResource) -> Iterator[None]:
    """Enters a region's names of mesh axes, with the recipe that there is."""
    if not isinstance(resource, MeshResource):
        kind = type(resource).__name__
        raise TypeError(f"{owner}: resource must be a MeshResource, got {kind}")
    with _mesh(resource):
        yield


def active_recipe() -> Recipe | None:
    """Returns the recipe of the innermost region; None outside and in one that is not enabled."""
    return _region.value


def active_mesh_resource() -> MeshResource:
    """Returns the innermost region's names of mesh axes; outside of regions all are None."""
    return _mesh.value


def get_delayed_scaling() -> DelayedScaling:
    """Returns the region's recipe if that is a ``DelayedScaling``, else ``DelayedScaling()``."""
    recipe = active_recipe()
    return recipe if isinstance(recipe, DelayedScaling) else DelayedScaling()


def is_fp8_available(gpu_id: int | None = None) -> tuple[bool, str]:
    """Returns ``(True, "")`` if the device can compute FP8 GEMMs, else ``(False, reason)``.

    None is JAX's first device; a CPU always can.
    """
    device = jax.devices()[0] if gpu_id is None else jax.devices("cuda")[gpu_id]
    if device.platform == "cpu":
        return True, ""
    found = str(getattr(device, "compute_capability", "0.0"))
    if tuple(int(part) for part in found.split(".")) >= (8, 9):
        return True, ""
    return False, f"FP8 products need a GPU of compute capability 8.9 or later, got {found}"
