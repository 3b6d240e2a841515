"""Tensors of torch as arrays of JAX and back, bit for bit, and errors of both sides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
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


def refused(ours: Callable[[], Any], theirs: Callable[[], Any]) -> None:
    """Asserts that a function of JAX raises while it is traced, in the words of PyTorch's."""
    with pytest.raises((TypeError, ValueError, NotImplementedError)) as expected:
        theirs()
    with pytest.raises((TypeError, ValueError, NotImplementedError)) as found:
        jax.jit(ours).trace()
    assert type(found.value) is type(expected.value)
    assert str(found.value) == str(expected.value)
