"""Places of arrays on a mesh by logical axes, which Flax's rules map to mesh axes."""

from __future__ import annotations

from typing import Any

import jax

from . import _partition

Axes = tuple[str | None, ...]


def _linen() -> Any:
    """Returns Flax's Linen, which programs without logical axes do without."""
    from flax import linen

    return linen


def is_placed(axes: Axes | None) -> bool:
    """Returns True if ``placed`` places arrays on the mesh axes of logical axes."""
    return axes is not None and bool(_linen().get_logical_axis_rules())


def placed(x: jax.Array, axes: Axes | None) -> jax.Array:
    """Constrains ``x`` to the mesh axes of logical axes; no-op without them or Flax's rules."""
    if not is_placed(axes):
        return x
    nn = _linen()
    spec = nn.logical_to_mesh_axes(axes, nn.get_logical_axis_rules())
    return _partition.constrained(x, spec, lambda x: nn.with_logical_constraint(x, axes))
