"""FP8 state in ``flax.nnx`` modules: Variables whose arrays backward itself writes, and gradients.

``nnx.value_and_grad`` differentiates ``nnx.Param`` alone, and the next FP8 state comes out of
backward. A JAX Ref ("mutable array") that reaches a gradient rule can be written there. Refs cannot
leave ``jax.jit``, so the state can also be arrays, for which ``value_and_grad`` of this module is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx
from flax.nnx import variablelib

from ..fp8_state import FP8_COLLECTION_NAME, is_state, update_collections, where_gemms

__all__ = ["FP8State", "grad", "use_refs", "value_and_grad"]

WRITES = "writes"


class _OneRef(nnx.Variable[jax.Array]):
    """Variable whose copies share its Ref, since nnx copies modules that it differentiates."""

    def copy(self, *args: Any, **updates: Any) -> Any:
        """Returns a copy with another value or metadata, which is the same Ref without a value."""
        metadata = {n: v for n, v in updates.items() if n not in ("value", "_copy_ref")}
        value = args[0] if args else updates.get("value", self.get_raw_value())
        is_new = value is not self.get_raw_value() and not variablelib.is_array_ref(value)
        if is_new and isinstance(value, jax.Array):
            return super().copy(value, **metadata)
        return self.from_metadata(value, {**self.get_metadata(), **metadata})

    replace = copy
    to_state = copy

    def update_from_state(self, variable_state: Any) -> None:
        """Takes the value of another Variable, not its Ref."""
        own, given = self.get_raw_value(), variable_state.get_raw_value()
        is_ref = variablelib.is_array_ref(given)
        if given is not own and self.is_in_ref and (is_ref or isinstance(given, jax.Array)):
            own[...] = given[...]
            return
        super().update_from_state(variable_state)
        if is_ref and given is not own and isinstance(own, jax.Array):
            self.set_raw_value(given[...])

    @property
    def is_in_ref(self) -> bool:
        """Returns True if the value is in a Ref; ``ref`` tells how the Variable was made."""
        return variablelib.is_array_ref(self.get_raw_value())


class FP8State(_OneRef):
    """Variable with a part of a module's FP8 state of delayed scaling.

    It holds a Ref, which backward writes, or an array; see ``use_refs``.
    """


class FP8Writes(_OneRef):
    """Variable that counts the writes to a module's FP8 state, by which uses in one loss add up."""


# Linen modules in nnx.bridge.ToNNX have Variables of this class, too.
nnx.register_variable_name(FP8_COLLECTION_NAME, FP8State, overwrite=True)


def use_refs(module: nnx.Module, use: bool = True) -> None:
    """Puts the FP8 state of a module and of all modules in it in Refs, or in arrays.

    Modules begin with Refs: any ``nnx.value_and_grad`` then updates the state. Arrays are for
    programs that donate the module to a jitted function, or return it or its state from
    ``jax.jit``, which JAX does not support for Refs: modules that a jitted function makes, and
    functions of ``nnx.split``'s states. With arrays ``nnx.value_and_grad`` raises ValueError, and
    ``value_and_grad`` of this module updates the state.

    Args:
        module: the module, changed in place.
        use: False for arrays.

    Raises:
        TypeError: ``module`` is not an ``nnx.Module``.
    """
    if not isinstance(module, nnx.Module):
        raise TypeError(f"use_refs: module must be an nnx.Module, got {type(module).__name__}")
    for _, node in list(nnx.iter_graph(module)):
        held = vars(node) if isinstance(node, nnx.Module) else {}
        for name, found in list(held.items()):
            if isinstance(found, _OneRef) and found.is_in_ref != use:
                kept = found.get_metadata()
                others = {key: kept[key] for key in kept if key not in found.required_metadata}
                setattr(node, name, type(found)(found.get_value(), ref=use, **others))


def is_variable(value: Any) -> bool:
    """Returns True if a value is a Variable."""
    return isinstance(value, nnx.Variable)


def values(state: Any, writes: Any, parameters: Any) -> Any:
    """Returns the arrays of a tree of FP8 states; with Refs their gradient is written there.

    ``writes`` is the same tree with an ``FP8Writes`` for each module's state. If one of the arrays
    ``parameters`` is differentiated, the state is, too.
    """
    leaves = jax.tree.leaves((state, writes), is_leaf=is_variable)
    if not all(leaf.is_in_ref for leaf in leaves):
        return jax.tree.map(lambda v: v.get_value(), state, is_leaf=is_variable)
    refs = jax.tree.map(lambda v: v.get_raw_value(), (state, writes), is_leaf=is_variable)
    return _read(*refs, parameters)


@jax.custom_vjp
def _read(state: Any, writes: Any, parameters: Any) -> Any:
    return jax.tree.map(lambda ref: ref[...], state)


def _read_fwd(state: Any, writes: Any, parameters: Any) -> tuple[Any, Any]:
    found, before = jax.tree.map(lambda ref: ref[...], (state, writes))
    return found, (state, writes, before)


def _read_bwd(kept: Any, gradients: Any) -> tuple[None, None, None]:
    state, writes, before = kept
    _write(state, writes, before, gradients)
    return None, None, None


_read.defvjp(_read_fwd, _read_bwd)


def _write(state: Any, writes: Any, before: Any, gradients: Any) -> None:
    """Writes the gradient of each state, the next one, or adds it to that of another use."""
    if not is_state(state):
        for name in state:
            _write(state[name], writes[name], before[name], gradients[name])
        return
    now = {name: ref[...] for name, ref in state.items()}
    count = writes[WRITES][...]
    added = {name: now[name] + gradients[name] for name in now}
    is_used = gradients["uses"] > 0
    found = where_gemms(is_used, where_gemms(count == before[WRITES], gradients, added), now)
    for name, ref in state.items():
        ref[...] = found[name]
    writes[WRITES][...] = count + is_used


def value_and_grad(
    f: Callable[..., Any],
    *,
    argnums: int | nnx.DiffState | Sequence[int | nnx.DiffState] = 0,
    has_aux: bool = False,
) -> Callable[..., Any]:
    """Returns a function like ``nnx.value_and_grad``'s that also updates FP8 state in arrays.

    The returned gradients are those of the parameters, for ``nnx.Optimizer``. FP8 state in Refs is
    updated as by ``nnx.value_and_grad``.

    Args:
        f: function of modules, and of anything else, whose result is a scalar.
        argnums: numbers of the arguments that are differentiated, given by position; an
            ``nnx.DiffState`` selects other Variables than ``nnx.Param``.
        has_aux: ``f`` returns a pair of the scalar and anything else.

    Raises:
        TypeError: a differentiated argument is not given by position.
    """
    given = argnums if isinstance(argnums, Sequence) else (argnums,)
    wanted = []
    for each in given:
        diff = each if isinstance(each, nnx.DiffState) else nnx.DiffState(each, nnx.Param)
        wanted.append(nnx.DiffState(diff.argnum, nnx.Any(diff.filter, _is_array_state)))
    transformed = nnx.value_and_grad(f, argnums=tuple(wanted), has_aux=has_aux)

    @functools.wraps(f)
    def run(*args: Any, **kwargs: Any) -> Any:
        for diff in wanted:
            if not -len(args) <= diff.argnum < len(args):
                raise TypeError(
                    f"value_and_grad: argument {diff.argnum} must be given by position, got"
                    f" {len(args)} arguments by position"
                )
        value, grads = transformed(*args, **kwargs)
        taken = tuple(
            jax.tree.map(_taken, each, args[diff.argnum], is_leaf=_is_nnx_state)
            for each, diff in zip(grads, wanted, strict=True)
        )
        return value, taken if isinstance(argnums, Sequence) else taken[0]

    return run


def grad(
    f: Callable[..., Any],
    *,
    argnums: int | nnx.DiffState | Sequence[int | nnx.DiffState] = 0,
    has_aux: bool = False,
) -> Callable[..., Any]:
    """Returns a function like ``nnx.grad``'s that also updates FP8 state in arrays.

    Args:
        f, argnums, has_aux: as in ``value_and_grad``.

    Raises:
        TypeError: a differentiated argument is not given by position.
    """
    transformed = value_and_grad(f, argnums=argnums, has_aux=has_aux)

    @functools.wraps(f)
    def run(*args: Any, **kwargs: Any) -> Any:
        value, grads = transformed(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return run


def _is_array_state(path: Any, value: Any) -> bool:
    """Returns True if a Variable is FP8 state in an array; a filter of nnx."""
    return isinstance(value, FP8State) and not value.is_in_ref


def _is_nnx_state(value: Any) -> bool:
    """Returns True if a value has the gradients of a module."""
    return isinstance(value, nnx.State)


def _taken(grads: Any, module: Any) -> Any:
    """Returns gradients without those of FP8 state, which become the module's state."""
    if not _is_nnx_state(grads):
        return grads
    moved, rest = nnx.split_state(grads, FP8State, ...)
    if moved:
        new = nnx.to_pure_dict(moved)
        held = nnx.to_pure_dict(nnx.state(module, _is_array_state))
        name = FP8_COLLECTION_NAME
        nnx.update(module, update_collections({name: new}, {name: held})[name])
    return rest
