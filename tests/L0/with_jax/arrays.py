"""Tensors of torch as arrays of JAX and back, bit for bit, and errors of both sides."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from replay import to_numpy


def to_jax(tensor):
    """Returns a tensor as an array of the same bits."""
    return jnp.asarray(to_numpy(tensor))


def bits(value):
    """Returns the bytes of a tensor or array."""
    array = to_numpy(value) if isinstance(value, torch.Tensor) else np.asarray(value)
    return array.tobytes()


def assert_same(ours, theirs):
    """Asserts equal shapes, dtypes' names and bits of an array of JAX and a tensor of torch.

    Either is None if the other is.
    """
    if ours is None or theirs is None:
        assert ours is theirs
        return
    assert tuple(ours.shape) == tuple(theirs.shape)
    assert str(ours.dtype) == str(theirs.dtype).removeprefix("torch.")
    assert bits(ours) == bits(theirs)


def refused(ours, theirs):
    """Asserts that a function of JAX raises while it is traced, in the words of PyTorch's."""
    with pytest.raises((TypeError, ValueError, NotImplementedError)) as expected:
        theirs()
    with pytest.raises((TypeError, ValueError, NotImplementedError)) as found:
        jax.jit(ours).trace()
    assert type(found.value) is type(expected.value)
    assert str(found.value) == str(expected.value)


def to_arrays(value):
    """Returns arguments with tensors and dtypes of torch as those of JAX, whatever holds them."""
    if isinstance(value, torch.Tensor):
        return to_jax(value)
    if isinstance(value, torch.dtype):
        return jnp.dtype(str(value).removeprefix("torch."))
    if isinstance(value, dict):
        return {name: to_arrays(each) for name, each in value.items()}
    return type(value)(map(to_arrays, value)) if type(value) in (list, tuple) else value


def assert_fields(made, expected):
    """Asserts the same fields, None included, of two results that are named tuples."""
    for name, ours in made._asdict().items():
        assert_same(ours, getattr(expected, name))


def assert_same_gradients(ours, theirs, tensors, *grads):
    """Asserts the bits of a function's outputs and, for output gradients, of all gradients.

    ``tensors`` are the arguments, None where there is none.
    """
    for tensor in tensors:
        if tensor is not None:
            tensor.requires_grad_()
    expected = theirs(*tensors)
    expected = expected if isinstance(expected, tuple) else (expected,)
    torch.autograd.backward(expected, grads)

    @jax.jit
    def run(arrays, grads):
        made, pull = jax.vjp(ours, *arrays)
        return made, pull(grads if isinstance(made, tuple) else grads[0])

    made, gradients = run(to_arrays(tuple(tensors)), to_arrays(grads))
    for y, wanted in zip(made if isinstance(made, tuple) else (made,), expected, strict=True):
        assert_same(y, wanted)
    for found, tensor in zip(gradients, tensors, strict=True):
        assert_same(found, None if tensor is None else tensor.grad)


def mesh_of(kind, **sizes):
    """Returns a mesh of four CPU devices, "Auto" or "Explicit", with axes of given sizes."""
    if len(jax.devices()) < 4:
        pytest.skip("jax was started before this folder's conftest")
    kinds = (getattr(jax.sharding.AxisType, kind),) * len(sizes)
    shape, names = tuple(sizes.values()), tuple(sizes)
    return jax.make_mesh(shape, names, axis_types=kinds, devices=jax.devices()[:4])


def calls(function, *given):
    """Returns the names of the C functions that a program of a function calls."""
    return {*re.findall(r"@apex_te\.(\w+)\(", jax.jit(function).lower(*given).as_text())}
