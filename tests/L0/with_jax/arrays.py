"""Tensors of torch as arrays of JAX and back, bit for bit."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from replay import to_numpy


def to_jax(tensor: torch.Tensor) -> Any:
    """Returns a tensor as an array of the same bits."""
    return jnp.asarray(to_numpy(tensor))


def bits(value: Any) -> bytes:
    """Returns the bytes of a tensor or array."""
    array = to_numpy(value) if isinstance(value, torch.Tensor) else np.asarray(value)
    return array.tobytes()


def assert_same(ours: Any, theirs: Any) -> None:
    """Asserts equal shapes, dtypes' names and bits of an array of JAX and a tensor of torch."""
    assert tuple(ours.shape) == tuple(theirs.shape)
    assert str(ours.dtype) == str(theirs.dtype).removeprefix("torch.")
    assert bits(ours) == bits(theirs)
