"""Mistakes in calls of JAX's functions: arguments unknown, missing or of a wrong type."""

import inspect
import pkgutil
from importlib import import_module

import pytest

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402

from apex_te.jax import ops  # noqa: E402

X, W = jnp.ones((4, 8)), jnp.ones(8)
MODULES = [m.name for m in pkgutil.iter_modules(ops.__path__) if not m.name.startswith("_")]
FUNCTIONS = {
    f"{module}.{name}": function
    for module in MODULES
    for name in import_module(f"{ops.__name__}.{module}").__all__
    if inspect.isfunction(
        function := getattr(import_module(f"{ops.__name__}.{module}"), name)
    )
    and function.__module__.endswith(module)
}  # fmt: skip


def owner(name):
    module, _, function = name.partition(".")
    return function if function.startswith(module) else name


@pytest.mark.parametrize("name", FUNCTIONS)
def test_unknown_argument(name):
    with pytest.raises(TypeError, match=r": unexpected argument 'no_such_argument'") as caught:
        FUNCTIONS[name](no_such_argument=1)
    assert str(caught.value).rpartition(": unexpected")[0] in (owner(name), name.split(".")[1])


def required(name):
    return [
        p.name
        for p in inspect.signature(FUNCTIONS[name]).parameters.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]


@pytest.mark.parametrize("name", list(filter(required, FUNCTIONS)))
def test_missing_arguments(name):
    wanted = " and ".join(required(name))
    with pytest.raises(TypeError, match=f": {wanted} must be given, got nothing"):
        FUNCTIONS[name]()


@pytest.mark.parametrize("value", ["1e-5", None, [1e-5]])
def test_eps_that_is_not_a_number(value):
    rms_norm = FUNCTIONS["rms_norm.rms_norm"]
    kind = type(value).__name__
    with pytest.raises(TypeError, match=f"^rms_norm: eps must be a float, got {kind}$"):
        rms_norm(X, W, value)
    with pytest.raises(TypeError, match=r"^rms_norm: eps must be a float, got (JitTracer|Dynamic)"):
        jax.jit(lambda eps: rms_norm(X, W, eps))(1e-5)
